"""What users of checkpoint and restore have met, each in its smallest form, and what the verdict says of it.

Reports by their public names. Those of a restore are images and nodes; those of a dump are small processes of
this machine, which are only looked at.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from compat.rules.case import Origin
from engines.api import DeviceNeed, FileNeed, MountNeed, SocketNeed
from engines.criu import foresee, tree
from shim import network
from tests.support.verdicts import (
    GPU,
    HAVE_GPUS,
    ROOMY,
    SPEC,
    At,
    bind,
    edited,
    has,
    image,
    named,
    new,
    node,
    task,
)

LISTENING = SocketNeed(family="inet", protocol="tcp", state="listen", address="0.0.0.0", port=80)
SEEN_CGROUPS = has("/sys/fs/cgroup", "cgroup2")
TUN = DeviceNeed(path="/dev/net/tun", kind="c", major=10, minor=200, access="rw")

# report: the case, the rule that names it, how severe ("" for nothing: it works).
AT_RESTORE: dict[str, tuple[At, str, str]] = {
    "opencontainers/runc#87: a terminal without a console": (
        At(image(terminal=True), spec=SPEC),
        "spec.terminal",
        "refuse",
    ),
    "opencontainers/runc#2328: cgroups of another mode are mounted": (
        At(SEEN_CGROUPS, node(cgroup_mode="hybrid")),
        "cgroup.mode",
        "refuse",
    ),
    "checkpoint-restore/criu#838: a tunnel": (At(image(devices=(TUN,))), "place.devices", "refuse"),
    "containers/podman#13566: a label of SELinux on a node without": (
        At(task(lsm_profile="system_u:system_r:container_t:s0:c1,c2")),
        "kernel.lsm",
        "refuse",
    ),
    "checkpoint-restore/criu#323: labels of another module": (
        At(image(tasks=task(lsm_profile="docker-default").tasks, lsm="apparmor"), node(lsm="selinux")),
        "kernel.lsm",
        "refuse",
    ),
    "checkpoint-restore/criu#499: root has fewer capabilities": (
        At(task(cap_permitted=1 << 24), node(capabilities=(1 << 41) - 1 & ~(1 << 24))),
        "kernel.capabilities",
        "refuse",
    ),
    "checkpoint-restore/criu#1533: huge pages, none free": (
        At(image(hugepages={"2097152": 2}), node(hugepages={"2097152": 0})),
        "place.hugepages",
        "refuse",
    ),
    "checkpoint-restore/criu#1533: huge pages, enough free": (
        At(image(hugepages={"2097152": 2})),
        "place.hugepages",
        "",
    ),
    "checkpoint-restore/criu#2829: kernel 6.17, CRIU 4.1": (
        At(image(sockets=(LISTENING,)), node(kernel="6.17.0", tools={"criu": "4.1.1"})),
        "criu.kernel",
        "warn",
    ),
    "a vDSO that CRIU 3.17 does not know": (
        At(on=node(kernel="6.18.44", tools={"criu": "3.17.1"})),
        "criu.kernel",
        "refuse",
    ),
    "checkpoint-restore/criu PR#2652: guard pages on an old kernel": (
        At(image(guard_pages=True), node(kernel="6.12.1")),
        "kernel.guard-pages",
        "refuse",
    ),
    "checkpoint-restore/criu#217: too little memory": (
        At(image(memory_bytes=64 << 30)),
        "place.memory",
        "refuse",
    ),
    "checkpoint-restore/criu#217: the disk of the target is full": (
        At(on=node(rootfs_free_bytes=4 << 20), origin=Origin(rootfs_bytes=64 << 20)),
        "place.disk",
        "refuse",
    ),
    "eclipse-openj9/openj9#17022: clones have one identity": (
        At(origin=Origin(use="clone", leave_running=True)),
        "identity.once",
        "ok",
    ),
    "an image for one restore is restored twice": (
        At(origin=Origin(use="move", used_by="web-1")),
        "identity.once",
        "refuse",
    ),
    "google/gvisor#10673: the root file system became read-only": (
        At(
            replace(image(engine="gvisor", image_version="20240729.0")),
            spec=new(root={"readonly": True}),
            origin=Origin(dump_spec=SPEC),
        ),
        "spec.edit.mounts",
        "refuse",
    ),
    "google/gvisor#11842: another release of runsc": (
        At(image(engine="gvisor", image_version="20250101.0")),
        "gvisor.release",
        "refuse",
    ),
    "beam-cloud/beta9 PR#1916: the new spec adds a mount": (
        At(spec=new(mounts=bind("/new")), local=True),
        "mounts.added",
        "unknown",  # without the root file system a link may lead there
    ),
    "checkpoint-restore/criu#2692, #807: a process id is taken": (
        At(task(pid=os.getpid()), spec=new(linux={"namespaces": [{"type": "network"}]}), local=True),
        "place.pids",
        "refuse",
    ),
    "containers/podman#14389: the network namespace is gone": (
        At(
            image(namespaces={"network": "external", "pid": "own"}),
            spec=new(linux={"namespaces": [{"type": "pid"}, {"type": "network", "path": "/gone"}]}),
            local=True,
        ),
        "spec.namespaces",
        "refuse",
    ),
    "NVIDIA/cuda-checkpoint#21: the library of another driver was bound in": (
        At(has("/lib/libEGL.so.560", external=True), spec=new(mounts=bind("/lib/libEGL.so.560")), local=True),
        "mounts.source",
        "refuse",
    ),
    "criu of 4.2 made the image, 4.1 is there": (
        At(on=node(tools={"criu": "4.1.1"}), dumped_on=node(tools={"criu": "4.2.1"})),
        "criu.image",
        "refuse",
    ),
    "containers/podman#17496: AVX-512 is missing": (
        At(dumped_on=node(cpu_flags=(*ROOMY.cpu_flags, "avx512f"))),
        "cpu.features",
        "refuse",
    ),
    "containers/podman#17496: only cpuinfo.img says so": (
        At(image(cpu_flags=("avx512f",)), dumped_on=None),
        "cpu.features",
        "refuse",
    ),
    "beam-cloud/beta9 PR#1792: only ERMS is missing": (
        At(on=node(cpu_flags=tuple(flag for flag in ROOMY.cpu_flags if flag != "erms"))),
        "cpu.features",
        "",
    ),
    "NVIDIA/cuda-checkpoint#18: another model of GPU": (
        At(image(gpus=(replace(GPU, model="A100"),)), HAVE_GPUS),
        "gpu.model",
        "refuse",
    ),
    "NVIDIA/cuda-checkpoint#35: another GPU, an old driver": (
        At(image(gpus=(replace(GPU, uuid="GPU-7"),)), replace(HAVE_GPUS, gpu_driver="575.1")),
        "gpu.place",
        "refuse",
    ),
    "checkpoint-restore/criu#2993: no GPU there": (
        At(image(gpus=(GPU,)), replace(HAVE_GPUS, gpus=())),
        "gpu.count",
        "refuse",
    ),
    "the user was edited": (edited(process={"user": {"uid": 1000}}), "spec.edit.identity", "refuse"),
    "the command was edited": (edited(process={"args": ["new"]}), "spec.edit.ignored", "warn"),
    "the memory limit was edited": (
        edited(linux={"resources": {"memory": {"limit": 1 << 30}}}),
        "spec.edit.applied",
        "ok",
    ),
    "Can't stat mountpoint .../sysrq-trigger": (
        At(has("/proc/sysrq-trigger", external=False), node(kernel="6.18")),
        "kernel.paths",
        "refuse",
    ),
}


@pytest.mark.parametrize("report", AT_RESTORE)
def test_a_restore(report: str):
    case, rule, severity = AT_RESTORE[report]
    assert named(case.found(), rule) == ([severity] if severity else [])


def test_bound_to_an_address_that_is_elsewhere():
    """checkpoint-restore/criu#312, #953, opencontainers/runc#1411: Can't bind inet socket."""
    here = replace(LISTENING, address="10.77.0.2")
    found = network.judge(image(sockets=(here,)), SPEC, tcp="close")
    assert [(finding.rule, finding.severity) for finding in found] == [("network.address", "refuse")]
    assert network.judge(image(sockets=(here,)), SPEC, tcp="close", coming=("10.77.0.2",)) == ()
    assert network.judge(image(sockets=(LISTENING,)), SPEC, tcp="close") == ()


@pytest.mark.parametrize(
    ("size", "mode", "rule"),
    [(16965, 0o644, "files.size"), (25195, 0o775, "files.mode"), (25195, 0o644, ""), (-1, -1, "")],
)
def test_open_files(tmp_path: Path, size: int, mode: int, rule: str):
    """checkpoint-restore/criu#1258 (bad size), #650 (bad mode), #302 (an empty log in the image)."""
    log = tmp_path / "access.log"
    log.write_bytes(bytes(25195))
    log.chmod(0o644)
    entry = {"destination": "/logs", "type": "bind", "source": str(tmp_path), "options": ["bind"]}
    mounts = (MountNeed(destination="/logs", fstype="other", source="", external=True),)
    needs = image(mounts=mounts, files=(FileNeed(path="/logs/access.log", size_bytes=size, mode=mode),))
    found = At(needs, spec=new(mounts=[entry]), local=True).found()
    assert [finding.rule for finding in found] == ([rule] if rule else [])


@pytest.mark.parametrize("became", ["directory", "nothing", "file"])
def test_what_is_bound_on_a_file_must_be_one(tmp_path: Path, became: str):
    """cri-o/cri-o PR#6203: resolv.conf was recreated as a directory."""
    source, root = tmp_path / "resolv.conf", tmp_path / "root"
    (root / "etc").mkdir(parents=True)
    (root / "etc/resolv.conf").write_text("nameserver 10.0.0.1\n")
    if became == "directory":
        source.mkdir()
    elif became == "file":
        source.write_text("")
    entry = {"destination": "/etc/resolv.conf", "type": "bind", "source": str(source), "options": ["bind"]}
    mounts = (MountNeed(destination="/etc/resolv.conf", fstype="other", source="", external=True),)
    case = At(image(mounts=mounts), spec=new(mounts=[entry]), local=True, rootfs_path=root)
    assert named(case.found(), "mounts.source") == ([] if became == "file" else ["refuse"])


# --- dumps ---------------------------------------------------------------------------------------------

SYSCALL = "import ctypes, os, socket, sys; libc = ctypes.CDLL(None, use_errno=True); "
# report: a program, the rule. A program exits with 77 where this kernel has no such thing.
AT_DUMP: dict[str, tuple[str, str]] = {
    "checkpoint-restore/criu#2131: io_uring": (
        "fd = libc.syscall(425, 4, ctypes.create_string_buffer(120)); fd < 0 and sys.exit(77)",
        "inode.io_uring",
    ),
    "checkpoint-restore/criu#2021: userfaultfd": (
        "fd = libc.syscall(323, 0); fd < 0 and sys.exit(77)",
        "inode.userfaultfd",
    ),
    "checkpoint-restore/criu#2188: memfd_secret": (
        "fd = libc.syscall(447, 0); fd < 0 and sys.exit(77)",
        "secret-memory",
    ),
    "checkpoint-restore/criu#1873: vsock": (
        "\ntry: s = socket.socket(40, socket.SOCK_STREAM)\nexcept OSError: sys.exit(77)",
        "socket",
    ),
    "checkpoint-restore/criu#156: a file of the host": (
        "f = open('/etc/passwd'); libc.unshare(0x00020000) and sys.exit(77)",
        "outside",
    ),
    "checkpoint-restore/criu#1430: a nested UTS namespace": (
        "r, w = os.pipe(); child = os.fork()\nif child == 0:\n"
        " libc.unshare(0x04000000) and os._exit(77); os.write(w, b'x'); __import__('time').sleep(60)\n"
        "os.read(r, 1)",
        "namespace.uts",
    ),
    "checkpoint-restore/criu#2225: a nested time namespace": (
        "libc.unshare(0x00000080) and sys.exit(77)",
        "namespace.time",
    ),
    "checkpoint-restore/criu#505: a unix socket to the outside": (
        "s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1])",
        "unix",
    ),
}
_DEEP = "os.chdir(sys.argv[2]); [(os.mkdir('d' * 200), os.chdir('d' * 200)) for _ in range(25)]; "
_MEMORY = (
    "m = mmap.mmap(-1, 65536, flags=34); at = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(m)))"
)
# What no report is about, but was met: a program, the rule.
MET: dict[str, tuple[str, str]] = {
    "a child that runs a program in memory": (
        "m = os.memfd_create('x'); os.write(m, open('/usr/bin/sleep', 'rb').read()); child = os.fork()\n"
        "if child == 0: os.execve(m, ['sleep', '60'], {})\n"
        "while b'memfd' not in os.fsencode(os.readlink(f'/proc/{child}/exe')): pass",
        "memory-program",
    ),
    "sealed memory": (
        f"import mmap; {_MEMORY}; "
        "libc.syscall(462, at, ctypes.c_size_t(65536), ctypes.c_ulong(0)) and sys.exit(77)",
        "sealed-memory",
    ),
    "a working directory with a long path": (_DEEP, "long-name"),
    "an open file with a long path": (
        f"{_DEEP} f = open('file', 'w'); there = os.open(sys.argv[2], 0); os.fchdir(there)",
        "long-name",
    ),
}
# What may be gone in a moment.
PASSING: dict[str, tuple[str, str]] = {
    "data on a connection that nobody has accepted": (
        "s = socket.socket(socket.AF_UNIX); s.bind('\\0torpor-x' + str(os.getpid())); s.listen(); "
        "c = socket.socket(socket.AF_UNIX); c.connect(s.getsockname()); c.send(b'x')",
        "unaccepted",
    ),
    "unread messages of the kernel": (
        "import struct; s = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0); "
        "s.send(struct.pack('IHHIIBxxxiIII', 32, 18, 0x301, 1, 0, 0, 0, 0, 0, 0))",
        "netlink",
    ),
}


@contextmanager
def process(program: str, *words: str) -> Generator[int]:
    """A process that has done something and waits; a test is skipped where the kernel has no such thing."""
    ending = "\nprint('ready', flush=True)\nsys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-ISc", SYSCALL + program + ending, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as child:
        assert child.stdout
        said = child.stdout.readline()
        try:
            if not said:
                assert child.wait(10) == 77
                pytest.skip("this kernel has no such thing")
            yield child.pid
        finally:
            for pid in reversed(tree.of(child.pid)):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("met", [*MET, *PASSING])
def test_a_dump_that_was_met(met: str, tmp_path: Path):
    program, rule = (MET | PASSING)[met]
    with process(program, "", str(tmp_path)) as pid:
        outlook = foresee.look(pid, tmp_path)
    told, silent = (outlook.findings, outlook.passing)[:: -1 if met in PASSING else 1]
    (finding,) = (finding for finding in told if finding.rule == f"criu.foresee.{rule}")
    assert finding.remedy
    assert f"criu.foresee.{rule}" not in {finding.rule for finding in silent}


def test_what_is_accepted_and_read_is_no_obstacle(tmp_path: Path):
    program = (
        "import mmap; s = socket.socket(socket.AF_UNIX); s.bind('\\0torpor-x' + str(os.getpid()))\n"
        "s.listen(); c = socket.socket(socket.AF_UNIX); c.connect(s.getsockname()); a = s.accept()[0]\n"
        "c.send(b'x'); d = socket.socket(socket.AF_UNIX); d.connect(s.getsockname())\n"
        "m = os.memfd_create('x'); os.ftruncate(m, 4096); memory = mmap.mmap(m, 4096)\n"
        "n = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)"
    )
    with process(program) as pid:
        outlook = foresee.look(pid, tmp_path)
    known = {f"criu.foresee.{rule}" for _, rule in (MET | PASSING).values()}
    assert not known & {finding.rule for finding in (*outlook.findings, *outlook.passing)}


@pytest.mark.parametrize("report", AT_DUMP)
def test_a_dump(report: str, tmp_path: Path):
    program, rule = AT_DUMP[report]
    with socket.socket(socket.AF_UNIX) as daemon:
        daemon.bind(str(tmp_path / "daemon"))
        daemon.listen()
        with process(program, str(tmp_path / "daemon")) as pid:
            accepted = daemon.accept()[0] if rule == "unix" else None
            found: dict[str, Any] = {f.rule: f for f in foresee.look(pid, tmp_path).findings}
            if accepted:
                accepted.close()
    assert f"criu.foresee.{rule}" in found
    assert found[f"criu.foresee.{rule}"].remedy
