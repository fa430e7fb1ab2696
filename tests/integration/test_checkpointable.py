"""With the rule in place the kernel itself says that there is no io_uring, under the real runc."""

from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from shim.checkpointable import without_io_uring
from tests.support.containers import Lab, lab

pytestmark = pytest.mark.engine

# The numbers of io_uring's three calls are the same on every architecture.
PROBE = """
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
for number, name in ((425, "setup"), (426, "enter"), (427, "register")):
    libc.syscall(number, 4, 0, 0, 0, 0, 0)
    print(name, errno.errorcode.get(ctypes.get_errno(), "none"))
with open("/proc/self/status") as status:
    print(*[line.split()[1] for line in status if line.startswith("Seccomp:")])
"""
# What runc's init and Python use from the moment the filter is in place.
NEEDED = (
    "access arch_prctl brk capget capset chdir clock_gettime clone close close_range dup dup2 dup3 "
    "epoll_create1 epoll_ctl epoll_pwait execve exit exit_group faccessat faccessat2 fchdir fcntl fstat "
    "fstatfs futex getcwd getdents64 getegid geteuid getgid getpid getppid getrandom gettid "
    "gettimeofday getuid ioctl lseek lstat madvise mmap mprotect mremap munmap nanosleep newfstatat "
    "open openat openat2 pipe2 poll prctl pread64 prlimit64 read readlink readlinkat readv rseq "
    "rt_sigaction rt_sigprocmask rt_sigreturn sched_getaffinity sched_yield set_robust_list "
    "set_tid_address setgid setgroups setuid sigaltstack stat statfs statx sysinfo tgkill tkill uname "
    "wait4 write writev"
)
ALLOWED = {"names": ["io_uring_setup", "io_uring_enter", "io_uring_register"], "action": "SCMP_ACT_ALLOW"}


@pytest.fixture
def place(tmp_path: Path) -> Generator[Lab]:
    with lab(tmp_path) as made:
        yield made


def answers(place: Lab, name: str, seccomp: dict[str, Any] | None, *, wanted: bool = True) -> list[str]:
    bundle = place.bundle(name, ["python", "-IS", "-c", PROBE])
    path = bundle / "config.json"
    spec = json.loads(path.read_text())
    if seccomp:
        spec["linux"]["seccomp"] = seccomp
    path.write_text(json.dumps(without_io_uring(spec) if wanted else spec))
    with open("/dev/null") as nothing:
        done = place.runc("run", "--bundle", bundle, place.new_id(), stdin=nothing)
    return done.stdout.split()


ENOSYS = ["setup", "ENOSYS", "enter", "ENOSYS", "register", "ENOSYS", "2"]


def test_without_a_profile(place: Lab):
    before = answers(place, "before", None, wanted=False)
    assert before[-1] == "0", "the container had a filter already"
    assert answers(place, "after", None) == ENOSYS


def test_over_a_profile_that_allows_io_uring(place: Lab):
    profile: dict[str, Any] = {"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [ALLOWED]}
    others = {"names": ["mount", "io_uring_setup"], "action": "SCMP_ACT_ERRNO", "errnoRet": 1}
    assert answers(place, "plain", profile) == ENOSYS
    assert answers(place, "denied", {**profile, "syscalls": [others]}) == ENOSYS
    conditional = {**ALLOWED, "args": [{"index": 0, "value": 4, "op": "SCMP_CMP_EQ"}]}
    assert (
        answers(place, "conditional", {**profile, "defaultAction": "SCMP_ACT_LOG", "syscalls": [conditional]})
        == ENOSYS
    )


def test_over_a_profile_that_denies_by_default(place: Lab):
    """As the runtime callers' own profiles do: what is not named gets EPERM, io_uring among it."""
    needed = {"names": NEEDED.split(), "action": "SCMP_ACT_ALLOW"}
    profile: dict[str, Any] = {
        "defaultAction": "SCMP_ACT_ERRNO",
        "defaultErrnoRet": 1,
        "syscalls": [needed],
    }
    assert answers(place, "before", profile, wanted=False)[:2] == ["setup", "EPERM"]
    assert answers(place, "after", profile) == ENOSYS
    allowing = {**profile, "syscalls": [needed, ALLOWED]}
    assert answers(place, "allowing", allowing) == ENOSYS
    assert answers(place, "same", {**allowing, "defaultErrnoRet": 38}) == ENOSYS
