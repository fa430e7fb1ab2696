"""The dump itself: what CRIU cannot dump, or dumps and cannot restore, is said before anything is touched."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.containers import bind
from tests.truth import sources
from tests.truth.scenario import Edit, Scenario, Source, as_it_is, counting

_BEFORE = (
    "import ctypes, mmap, os, select, signal, socket, subprocess, sys, threading, time",
    "libc = ctypes.CDLL(None, use_errno=True)",
    "def mount(kind, path, flags=0, source=None):",
    "    os.makedirs(path, exist_ok=True)",
    "    words = source or b'none', path.encode(), kind, ctypes.c_ulong(flags), None",
    "    assert libc.mount(*words) == 0, ctypes.get_errno()",
    "def child(do):",
    "    r, w = os.pipe()",
    "    pid = os.fork()",
    "    if not pid:",
    "        do()",
    "        os.write(w, b'x')",
    "        while True: signal.pause()",
    "    os.read(r, 1)",
    "    os.close(r)",
    "    os.close(w)",
    "    return pid",
)


def _admin(spec: dict[str, Any], _: Path) -> None:
    sources.grant(spec, "CAP_SYS_ADMIN", "CAP_SYS_NICE", "CAP_WAKE_ALARM", "CAP_BPF")


def _both(*edits: Edit) -> Edit:
    def edit(spec: dict[str, Any], path: Path) -> None:
        for each in edits:
            each(spec, path)

    return edit


def _compiled(text: str) -> Edit:
    """Give the container a program of C, /data/program."""

    def edit(_: dict[str, Any], path: Path) -> None:
        words = ["gcc", "-w", "-x", "c", "-", "-o", path / "rootfs/data/program"]
        subprocess.run(words, input=text, text=True, check=True)

    return edit


def _of(name: str, *lines: str, edit: Edit = as_it_is, each: Sequence[str] = ()) -> Scenario:
    source = Source(
        name=re.sub("[^a-z0-9]+", "-", name),
        args=counting(*_BEFORE, *lines, each=each),
        edit=edit,
        plain=True,
    )
    return Scenario(kind="dump", name=name, source=source)


def _line_break(spec: dict[str, Any], path: Path) -> None:
    (path / "volume").mkdir()
    spec["mounts"].append(bind(path / "volume", "/vol\nx"))


_WITHOUT_VDSO = """
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
int main() {
    char line[300]; unsigned long from, to; FILE *maps = fopen("/proc/self/maps", "r");
    while (fgets(line, 300, maps)) if (strstr(line, "[vdso]")) sscanf(line, "%lx-%lx", &from, &to);
    munmap((void *)from, to - from); write(1, "up\\n", 3); for (;;) pause();
}
"""
_SHARING = """
#define _GNU_SOURCE
#include <sched.h>
#include <signal.h>
#include <unistd.h>
static char stack[65536];
int child(void *_) { for (;;) pause(); }
int main() { clone(child, stack + 65000, CLONE_VM | SIGCHLD, 0); write(1, "up\\n", 3); for (;;) pause(); }
"""
_VFORKING = """
#include <unistd.h>
int main() { if (!vfork()) { write(1, "up\\n", 3); for (;;) pause(); } return 0; }
"""
_PROGRAM = (
    "program = subprocess.Popen(['/data/program'], stdout=subprocess.PIPE)",
    "assert program.stdout.readline() == b'up\\n'",
)
_RUNS = ("assert program.poll() is None",)

_ENDED = (
    _of(
        "a file of an ended thread's /proc",
        "got, done = [], threading.Event()",
        "def work():",
        "    got.append(os.open('/proc/thread-self/status', 0))",
        "    done.wait()",
        "thread = threading.Thread(target=work)",
        "thread.start()",
        "time.sleep(0.1)",
        "done.set()",
        "thread.join()",
        "time.sleep(0.1)",
    ),
    _of(
        "a unix socket under way that nobody else has",
        "a, b = socket.socketpair()",
        "x, y = socket.socketpair()",
        "x.send(b'in')",
        "socket.send_fds(a, [b'f'], [y.fileno()])",
        "y.close()",
    ),
    _of(
        "a unix socket under way whose other end is closed",
        "a, b = socket.socketpair()",
        "x, y = socket.socketpair()",
        "x.close()",
        "socket.send_fds(a, [b'f'], [y.fileno()])",
        "y.close()",
        each=(
            "if n == 14: z = socket.socket(fileno=socket.recv_fds(b, 9, 1)[1][0]); assert z.recv(9) == b''",
        ),
    ),
    _of(
        "a deadline scheduler",
        "import struct",
        "words = struct.pack('IIQiIQQQ', 48, 6, 0, 0, 0, 1000000, 50000000, 50000000)",
        "def do():",
        "    assert libc.syscall(314, 0, words, 0) == 0, ctypes.get_errno()",
        "pid = child(do)",
        each=("assert os.sched_getscheduler(pid) == 6",),
        edit=_admin,
    ),
    _of("a program without a vDSO", *_PROGRAM, each=_RUNS, edit=_compiled(_WITHOUT_VDSO)),
    _of(
        "a memfd opened by O_PATH",
        "file = os.memfd_create('a')",
        "path = os.open(f'/proc/self/fd/{file}', os.O_PATH)",
    ),
    _of(
        "a program on what is now noexec",
        "mount(b'tmpfs', '/data/t')",
        "import shutil",
        "shutil.copy('/data/program', '/data/t/program')",
        "program = subprocess.Popen(['/data/t/program'], stdout=subprocess.PIPE)",
        "assert program.stdout.readline() == b'up\\n'",
        "mount(None, '/data/t', 0x20 | 8)",
        each=_RUNS,
        edit=_both(
            _admin, _compiled(_SHARING.replace("clone(child, stack + 65000, CLONE_VM | SIGCHLD, 0);", ""))
        ),
    ),
    _of(
        "a thread in control groups of its own",
        "os.mkdir('/sys/fs/cgroup/cpu/sub')",
        "done = threading.Event()",
        "thread = threading.Thread(target=done.wait, daemon=True)",
        "thread.start()",
        "open('/sys/fs/cgroup/cpu/sub/tasks', 'w').write(str(thread.native_id))",
        "where = f'/proc/self/task/{thread.native_id}/cgroup'",
        each=("assert [line.strip()[-4:] for line in open(where) if ':cpu:' in line] == ['/sub']",),
        edit=_both(_admin, sources.CGROUPS_WRITABLE.edit),
    ),
)
_FAILING = (
    _of(
        "a process whose main thread has ended",
        "def do():",
        "    threading.Thread(target=time.sleep, args=(9999,)).start()",
        "    libc.syscall(60, 0)",
        "pid = os.fork()",
        "if not pid: do()",
        "time.sleep(0.3)",
    ),
    _of(
        "a descriptor of a namespace that nobody is in",
        "mine = os.open('/proc/self/ns/uts', 0)",
        "assert libc.unshare(0x4000000) == 0",
        "other = os.open('/proc/self/ns/uts', 0)",
        "assert libc.setns(mine, 0) == 0",
        "os.close(mine)",
        edit=_admin,
    ),
    _of(
        "a namespace bound to a file",
        "open('/data/ns', 'w').close()",
        "assert libc.mount(b'/proc/self/ns/net', b'/data/ns', None, 0x1000, None) == 0",
        edit=_admin,
    ),
    *(
        _of(f"a {kind} mounted inside", f"mount(b'{kind}', '/data/m')", edit=_admin)
        for kind in ("ramfs", "hugetlbfs", "bpf")
    ),
    _of(
        "a file under a later mount",
        "os.mkdir('/data/o')",
        "file = open('/data/o/f', 'w')",
        "mount(b'tmpfs', '/data/o')",
        edit=_admin,
    ),
    _of(
        "a working directory under a later mount",
        "os.makedirs('/data/o/p')",
        "os.chdir('/data/o/p')",
        "mount(b'tmpfs', '/data/o')",
        edit=_admin,
    ),
    _of(
        "a directory bound inside, a file open there",
        "os.makedirs('/data/o')",
        "os.makedirs('/data/p')",
        "open('/data/o/f', 'w').close()",
        "mount(None, '/data/p', 0x1000, b'/data/o')",
        "file = open('/data/p/f', 'a')",
        "os.chdir('/data/p')",
        edit=_admin,
    ),
    _of(
        "an epoll on what only a child has open",
        "r, w = os.pipe()",
        "poll = select.epoll()",
        "poll.register(r, 1)",
        "pid = child(lambda: None)",
        "os.close(r)",
    ),
    _of(
        "an epoll on what has another number",
        "r, w = os.pipe()",
        "poll = select.epoll()",
        "poll.register(r, 1)",
        "other = os.dup(r)",
        "os.close(r)",
    ),
    _of(
        "an epoll on what only a parent has open",
        "r, w = os.pipe()",
        "poll = select.epoll()",
        "poll.register(r, 1)",
        "pid = child(lambda: os.close(r))",
    ),
    _of("a long vfork", *_PROGRAM, edit=_compiled(_VFORKING)),
    _of("memory shared with another process", *_PROGRAM, each=_RUNS, edit=_compiled(_SHARING)),
    _of(
        "a timer of an alarm clock",
        "file = libc.timerfd_create(8, 0)",
        "assert file >= 0, ctypes.get_errno()",
        edit=_admin,
    ),
    _of(
        "a descriptor of a thread",
        "done = threading.Event()",
        "thread = threading.Thread(target=done.wait, daemon=True)",
        "thread.start()",
        "file = libc.syscall(434, thread.native_id, os.O_EXCL)",
        "assert file >= 0",
    ),
    _of(
        "a file of huge pages in memory",
        "file = os.memfd_create('a', 4)",
        "os.ftruncate(file, 2 << 20)",
    ),
    _of(
        "a BPF map",
        "import struct",
        "words = struct.pack('IIIII', 2, 4, 8, 4, 0).ljust(128, b'\\0')",
        "file = libc.syscall(321, 0, words, 128)",
        "assert file >= 0, ctypes.get_errno()",
        edit=_admin,
    ),
    _of(
        "a unix socket opened by O_PATH",
        "listener = socket.socket(socket.AF_UNIX)",
        "listener.bind('/data/s')",
        "file = os.open('/data/s', os.O_PATH)",
    ),
    _of("a FIFO opened by O_PATH", "os.mkfifo('/data/f')", "file = os.open('/data/f', os.O_PATH)"),
    _of(
        "a limit of address space that is exceeded",
        "import resource",
        "resource.setrlimit(resource.RLIMIT_AS, (4096, 4096))",
    ),
    _of(
        "a limit of address space that is not",
        "import resource",
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))",
    ),
    _of("a mount on a place with a line break", edit=_line_break),
)

SCENARIOS = (*_ENDED, *_FAILING)
