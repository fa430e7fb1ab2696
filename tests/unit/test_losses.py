"""What CRIU loses without a word, found in a living process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engines.criu import losses, tree
from engines.criu.outlook import Outlook

_BEFORE = """
import ctypes, os, socket, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
def other(flag, then=lambda: None):
    ready = threading.Event()
    def work():
        assert libc.unshare(flag) == 0
        then()
        ready.set()
        time.sleep(99)
    threading.Thread(target=work, daemon=True).start()
    assert ready.wait(9)
"""


@contextmanager
def _running(text: str) -> Generator[int]:
    argv = [sys.executable, "-IS", "-c", f"{_BEFORE}\n{text}\nprint(1, flush=True)\ninput()"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline()
        try:
            yield process.pid
        finally:
            process.kill()


def _found(pid: int, *, own_network: bool = False) -> list[str]:
    outlook = Outlook()
    losses.look(outlook, pid, [pid], own_network=own_network)
    assert all(one.severity == "refuse" and one.remedy for one in outlook.findings)
    return [one.rule.removeprefix("criu.foresee.") for one in outlook.findings]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", []),
        ("other(0x200)", []),
        ("other(0x200, lambda: os.chdir('/'))", ["thread"]),
        ("other(0x400)", []),
        ("other(0x400, lambda: os.dup2(1, 77))", ["thread"]),
    ],
)
def test_what_a_thread_has_for_itself(text: str, found: list[str], tmp_path: Path):
    with _running(f"os.chdir({str(tmp_path)!r})\n{text}") as pid:
        if text and tree.same(pid, pid, 0) is False:
            pytest.skip("no kcmp here")
        assert _found(pid) == found


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes namespaces")
def test_a_thread_in_a_namespace_of_its_own():
    with _running("other(0x04000000)") as pid:
        assert _found(pid) == ["thread"]


@pytest.mark.parametrize(("then", "found"), [("rename(p, p + '2')", ["renamed"]), ("unlink(p)", [])])
@pytest.mark.skipif(os.geteuid() != 0, reason="only root asks for a socket's file")
def test_a_listener_that_was_renamed(then: str, found: list[str], tmp_path: Path):
    path = str(tmp_path / "s\n\udcff x")
    text = f"p = {path!a}\ns = socket.socket(socket.AF_UNIX)\ns.bind(p)\ns.listen()\n"
    with _running(text) as pid:
        assert _found(pid) == []
    Path(path).unlink()
    with _running(f"{text}os.{then}") as pid:
        assert _found(pid) == found


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes network namespaces")
def test_interfaces_and_addresses_of_an_own_network_namespace():
    text = "libc.unshare(0x40000000)\nimport fcntl\nc = socket.socket()\n"
    with _running(text) as pid:
        assert _found(pid, own_network=True) == []
        assert losses.addresses(pid) == []
    with _running(f"{text}fcntl.ioctl(c, 0x89a0, b'br0\\0')") as pid:
        assert _found(pid, own_network=True) == ["devices"]
        assert _found(pid) == []


def test_what_is_set_and_not_set_again():
    with _running("") as pid:
        assert list(losses.attributes([pid])) == list(losses.options([pid])) == []
    text = "libc.personality(0x40000)\ns = socket.create_server(('127.0.0.1', 0))\ns.setsockopt(6, 18, 9)"
    with _running(text) as pid:
        assert list(losses.attributes([pid])) == [f"a personality (process {pid})"]
        assert list(losses.options([pid])) == ["TCP_USER_TIMEOUT"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts")
def test_attributes_of_files_on_a_tmpfs(tmp_path: Path):
    subprocess.run(["mount", "-t", "tmpfs", "torpor-test", tmp_path], check=True)
    try:
        (tmp_path / "a b").mkdir()
        (tmp_path / "a b/c").touch()
        others = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
        others.remove(str(tmp_path))
        assert losses.on_tmpfs(os.getpid(), others) == ""
        os.setxattr(tmp_path / "a b/c", "trusted.torpor", b"x")
        assert losses.on_tmpfs(os.getpid(), others) == str(tmp_path / "a b/c")
        assert losses.on_tmpfs(os.getpid(), [*others, str(tmp_path)]) == ""
    finally:
        subprocess.run(["umount", tmp_path], check=True)
