"""What CRIU loses without a word: it is said before the dump, and what is like it and comes back is not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.truth import sources
from tests.truth.scenario import Scenario, Source, counting

_BEFORE = (
    "import ctypes, os, socket, threading, time",
    "libc = ctypes.CDLL(None, use_errno=True)",
    "got, go = [], threading.Event()",
    "def other(flag, then=lambda: None):",
    "    def work():",
    "        assert libc.unshare(flag) == 0, ctypes.get_errno()",
    "        then()",
    "        got.append(threading.get_native_id())",
    "        while True: time.sleep(9)",
    "    threading.Thread(target=work, daemon=True).start()",
    "    while not got: time.sleep(0.01)",
)
_NET, _UTS, _FILES, _FS = 0x40000000, 0x04000000, 0x400, 0x200


def _admin(spec: dict[str, Any], _: Path) -> None:
    sources.grant(spec, "CAP_SYS_ADMIN", "CAP_NET_ADMIN")


def _of(name: str, *lines: str, each: Sequence[str] = ()) -> Scenario:
    source = Source(
        name="-".join(name.replace("'", "").replace(",", "").split()),
        args=counting(*_BEFORE, *lines, each=each),
        edit=_admin,
        plain=True,
    )
    return Scenario(kind="loss", name=name, source=source)


def _namespace(kind: str, flag: int) -> Scenario:
    return _of(
        f"a thread's own {kind} namespace",
        f"other({flag})",
        f"def place(task): return os.readlink(f'/proc/self/task/{{task}}/ns/{kind}')",
        each=("assert place(got[0]) != place(os.getpid())",),
    )


SCENARIOS = (
    _namespace("net", _NET),
    _namespace("uts", _UTS),
    _of(
        "a thread's own working directory",
        f"other({_FS}, lambda: os.chdir('/data'))",
        each=("assert os.readlink(f'/proc/self/task/{got[0]}/cwd') == '/data'",),
    ),
    _of("a thread that has unshared its working directory, the same", f"other({_FS})"),
    _of(
        "a thread's own table of descriptors",
        f"other({_FILES}, lambda: os.dup2(1, 77))",
        each=("assert os.path.lexists(f'/proc/self/task/{got[0]}/fd/77')",),
    ),
    _of("a thread that has unshared its descriptors, the same", f"other({_FILES})"),
    _of(
        "a unix listener that was renamed",
        "s = socket.socket(socket.AF_UNIX)",
        "s.bind('/data/new')",
        "s.listen()",
        "os.rename('/data/new', '/data/sock')",
        each=(
            "c = socket.socket(socket.AF_UNIX)",
            "c.connect('/data/sock')",
            "s.accept()[0].close()",
            "c.close()",
        ),
    ),
    _of(
        "a unix listener whose file was removed",
        "s = socket.socket(socket.AF_UNIX)",
        "s.bind('/data/new')",
        "s.listen()",
        "os.unlink('/data/new')",
    ),
    _of(
        "a bridge in a network namespace of its own",
        "c = socket.socket(socket.AF_INET, socket.SOCK_STREAM)",
        "import fcntl",
        "fcntl.ioctl(c, 0x89a0, b'br0\\0')",
        each=(
            "assert os.path.exists('/proc/self/net/dev_snmp6/br0') or 'br0' in open('/proc/net/dev').read()",
        ),
    ),
    _of(
        "socket options and attributes that are lost",
        "s = socket.create_server(('127.0.0.1', 7000))",
        "s.setsockopt(6, 18, 9999)",
        "libc.prctl(29, 123456, 0, 0, 0)",
        "open('/dev/shm/x', 'w').close()",
        "os.setxattr('/dev/shm/x', 'trusted.a', b'b')",
    ),
)
