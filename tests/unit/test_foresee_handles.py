"""Descriptors, mounts and threads that CRIU cannot bring back, seen beforehand."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engines.criu import foresee, handles, mounted, peers, tree
from engines.criu.outlook import Outlook
from engines.mountinfo import Mount, parse

ODD = """
import ctypes, os, socket, threading
libc = ctypes.CDLL(None)
kept = [
    os.open(f"/proc/self/fd/{os.memfd_create('a')}", os.O_PATH),
    os.open("/proc/self/ns/user", os.O_RDONLY),
    libc.timerfd_create(8, 0),
]
master, slave = os.openpty()
os.close(master)
listener = socket.socket(socket.AF_UNIX)
listener.bind("socket")
kept.append(os.open("socket", os.O_PATH))
done = threading.Event()
threading.Thread(target=done.wait, daemon=True).start()
got = []
thread = threading.Thread(target=lambda: got.append(os.open("/proc/thread-self/status", os.O_RDONLY)))
thread.start()
thread.join()
print("up", flush=True)
input()
"""
PLAIN = """
import os, select, socket, threading
a, b = socket.socketpair()
c, d = socket.socketpair()
socket.send_fds(a, [b"x"], [d.fileno()])
d.close()
r, w = os.pipe()
poll = select.epoll()
poll.register(r, 1)
other = os.dup(r)
os.close(r)
kept = [os.memfd_create("a"), os.pidfd_open(os.getpid()), os.open("/proc/self/status", os.O_RDONLY)]
kept += [os.openpty(), os.open("/proc/thread-self/status", os.O_RDONLY), os.open(".", os.O_PATH)]
done = threading.Event()
threading.Thread(target=done.wait, daemon=True).start()
print("up", flush=True)
input()
"""


# As a shell that appends to a file in a loop does with its standard output.
TURNING = """
import os
file, (pipe, _) = os.open("file", os.O_CREAT | os.O_WRONLY), os.pipe()
turning = os.dup(pipe)
print("up", flush=True)
while True:
    os.dup2(file, turning)
    os.dup2(pipe, turning)
"""


# Python asks each socket for its name to learn its family, and this family has none.
NAMELESS = """
import socket
kept = socket.socket(44, socket.SOCK_RAW, 0)  # AF_XDP
print("up", flush=True)
input()
"""


WITHOUT_VDSO = """
import ctypes, os
row = next(row for row in open("/proc/self/maps") if "[vdso]" in row)
begin, end = (int(word, 16) for word in row.split()[0].split("-"))
ctypes.CDLL(None).munmap(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin))
os.write(1, b"up\\n")
os.read(0, 1)
os._exit(0)
"""


def mounted_at(point: str) -> Mount:
    (mount,) = parse(b"1 0 0:1 / %b rw - tmpfs tmpfs rw" % point.replace(" ", "\\040").encode())
    return mount


def rules(program: str, path: Path) -> set[str]:
    """Of what is foreseen for a process of this machine, whose mounts are nobody's fault."""
    words = [sys.executable, "-ISc", program]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=path)
    try:
        assert process.stdout
        assert process.stdout.readline() == b"up\n"
        found = foresee.look(process.pid, path).findings
        return {finding.rule.removeprefix("criu.foresee.") for finding in found} - {"mount"}
    finally:
        process.kill()
        process.communicate()


def test_what_cannot_come_back_is_found(tmp_path: Path):
    found = rules(ODD, tmp_path)
    assert {"path", "node-namespace", "terminal", "ended-thread"} <= found
    assert found <= {"path", "node-namespace", "terminal", "ended-thread", "alarm"}  # if it may make one


def test_a_descriptor_that_becomes_another_as_it_is_looked_at_is_no_obstacle(tmp_path: Path):
    for _ in range(10):
        assert "outside" not in rules(TURNING, tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="not root: may not make such a socket")
def test_a_socket_of_a_family_without_names_is_found(tmp_path: Path):
    assert rules(NAMELESS, tmp_path) == {"socket"}


@pytest.mark.parametrize("later", [False, True])
def test_a_program_that_another_takes_the_place_of_is_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, later: bool
):
    """Beginning, it has its code and a stack, but not yet the kernel's own code (vDSO)."""

    def go_on(_: float) -> None:
        if later and not done:
            process.communicate(b"\n")  # it ends here, as others get theirs
            done.append(True)

    done: list[bool] = []
    monkeypatch.setattr(foresee, "time", SimpleNamespace(sleep=go_on))
    words = [sys.executable, "-ISc", WITHOUT_VDSO]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stdout.readline() == b"up\n"
        found = {finding.rule for finding in foresee.look(process.pid, tmp_path).findings}
        assert ("criu.foresee.vdso" in found) != later
        process.kill()


def test_what_is_like_it_and_comes_back_is_no_obstacle(tmp_path: Path):
    assert rules(PLAIN, tmp_path) == set()


def test_a_later_mount_hides_what_lies_below():
    mounts = handles.Mounts(kinds={"1": "overlay", "2": "tmpfs"}, tops={"/": "1", "/data/o": "2"})
    assert mounts.hide("/data/o/f", "1")
    assert mounts.hide("/data/o", "1")
    for path, mount in (
        *(("/data/o/f", "2"), ("/data/x", "1"), ("/data/other", "1"), ("/data/o/f (deleted)", "1")),
        ("/data/o/f", "77"),
    ):
        assert not mounts.hide(path, mount)


def test_devices_that_no_image_tells_the_numbers_of(tmp_path: Path):
    outlook = Outlook()
    mounts = handles.Mounts(kinds={"1": "overlay", "2": "tmpfs"})
    looks = handles.Handles(outlook, os.getpid(), mounts, frozenset(), frozenset({"/dev/named"}))
    for path, link, mount, wrong in (
        ("/dev/null", "/data/null", "1", True),
        ("/dev/null", "/data/null", "2", False),
        ("/dev/null", "/dev/named", "1", False),
        ("/dev/null", "/data/null", "77", False),
        (str(tmp_path), "/data/null", "1", False),
    ):
        assert looks.is_own_device(path, link, mount) is wrong


def test_mounts_that_no_restore_would_accept():
    spec: dict[str, Any] = {
        "mounts": [
            {"destination": "/a b", "type": "bind", "source": "/x"},
            {"destination": "/sys/fs/cgroup", "type": "cgroup"},
        ],
        "linux": {
            "maskedPaths": ["/proc/kcore"],
            "readonlyPaths": ["/proc/sys"],
            "devices": [{"path": "/dev/x"}],
        },
    }
    usual = ["/", "/a b", "/proc/kcore", "/proc/sys", "/sys/fs/cgroup", "/sys/fs/cgroup/cpu", "/dev/x"]

    def told(*more: str, **spec_more: Any) -> list[str]:
        outlook = Outlook()
        table = [mounted_at(point) for point in (*usual, *more)]
        mounted.unasked(outlook, table, ["/a b", "/sys/fs/cgroup"], {**spec, **spec_more})
        return [finding.message for finding in outlook.findings]

    assert told() == []
    assert "mounted on /a b/below" in told("/a b/below")[0]
    assert "mounted on /a b," in told("/a b")[0]
    grown = {"capabilities": {"bounding": ["CAP_SYS_ADMIN"]}}
    assert told("/a b/below", process=grown) == []
    assert told("/a b/below", process={**grown, "noNewPrivileges": True})
    apart = {"namespaces": [{"type": "cgroup"}]}
    assert "/sys/fs/cgroup/cpu" in told(linux={**spec["linux"], **apart})[0]


def test_two_processes_share_their_memory_only_if_they_do():
    assert tree.same(os.getpid(), os.getpid(), 1)
    assert not tree.same(os.getpid(), os.getppid(), 1)


def test_nothing_is_alone_where_nothing_is_to_be_read():
    assert peers.alone(Path("/proc/self/ns/net"), set()) == set()
