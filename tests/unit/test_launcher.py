"""The files that start torpor; how they behave is in tests/contract/test_call_corpus.py."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path

import pytest

from shim import stub
from shim.errors import UsageError
from shim.launcher import base_python, conf_text, default_settings, package_root, write_launchers


def _build(machine: str) -> bytes:
    return stub.build(
        machine,
        prefix=["/usr/bin/python3", "-IS", "-c", "pass"],
        landmarks=["/usr/bin/python3", "/usr/lib/python3/encodings/__init__.py"],
        runtime="/usr/sbin/runc",
    )


@pytest.mark.parametrize(
    ("machine", "digest"),
    [
        ("aarch64", "cd69188a42e2250070bc8963df4faf76d9b41cc110fc00274670ec35b4c3214c"),
        ("x86_64", "9838993d0e69acd396afb6f7b947f7eef5128fd90fb1b4abac41f2e53ebe3027"),
    ],
)
def test_the_machine_code_is_that_which_was_tried(machine: str, digest: str) -> None:
    """Every branch of aarch64's was run under qemu-aarch64, and x86_64's runs in the contract tests. Whoever
    changes a byte tries it again, then changes the digest."""
    assert hashlib.sha256(_build(machine)).hexdigest() == digest


@pytest.mark.parametrize("machine", stub.machines())
def test_the_program_is_small_and_neither_writable_nor_with_an_executable_stack(machine: str) -> None:
    program = _build(machine)
    assert len(program) < 1024
    assert program[:4] == b"\x7fELF"
    flags = {}
    for number in range(2):
        kind, flag = struct.unpack_from("<II", program, 64 + 56 * number)
        flags[kind] = flag
    assert flags == {1: 5, 0x6474E551: 6}  # loaded: read and execute; stack: read and write


def test_a_path_of_any_bytes_can_be_the_runtime() -> None:
    program = stub.build("x86_64", prefix=["/p"], landmarks=[], runtime="/caf\udce9")
    assert b"/caf\xe9\0" in program


def test_launchers_need_a_runtime(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no runtime is known"):
        write_launchers(
            tmp_path, python=base_python(), package_root=package_root(), site=tmp_path, settings={}
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", ["/a\nRUNTIME=/evil", " /a", "/a\r"])
def test_a_setting_is_one_line(value: str) -> None:
    with pytest.raises(UsageError, match="STATE"):
        conf_text({"STATE": value})


def test_writing_twice_changes_nothing(tmp_path: Path) -> None:
    def write() -> list[Path]:
        return write_launchers(
            tmp_path / "bin",
            python=base_python(),
            package_root=package_root(),
            site=tmp_path,
            settings={"RUNTIME": "/bin/true", "RUNSC": "/bin/false"},
        )

    first = write()
    assert [path.name for path in first] == ["runtime.conf", "torpor-runtime", "torpor-runtime-runsc"]
    assert first[0] == tmp_path / "etc" / "torpor" / "runtime.conf"
    before = [path.stat().st_mtime_ns for path in first]
    assert write() == first
    assert [path.stat().st_mtime_ns for path in first] == before


def test_the_defaults_name_the_tools_of_this_node() -> None:
    settings = default_settings(None)
    assert Path(settings["RUNTIME"]).name == "runc"
    assert Path(settings["TOOLS"]).is_absolute()
