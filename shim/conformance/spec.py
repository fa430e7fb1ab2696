"""The OCI spec of a workload's container: Docker's defaults, and what the workload wishes."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engines.workloads.catalogue import PROGRAMS, Workload
from shim.checkpointable import without_io_uring

MAPPED_ID = 100_000
"""What root of a container with a user namespace is on the node."""

_DEFAULT_CAPABILITIES = (
    *("CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FSETID", "CAP_FOWNER", "CAP_MKNOD", "CAP_NET_RAW", "CAP_SETGID"),
    *("CAP_SETUID", "CAP_SETFCAP", "CAP_SETPCAP", "CAP_NET_BIND_SERVICE", "CAP_SYS_CHROOT", "CAP_KILL"),
    "CAP_AUDIT_WRITE",
)
_NAMES = [
    "CHOWN",
    "DAC_OVERRIDE",
    "DAC_READ_SEARCH",
    "FOWNER",
    "FSETID",
    "KILL",
    "SETGID",
    "SETUID",
    "SETPCAP",
    "LINUX_IMMUTABLE",
    "NET_BIND_SERVICE",
    "NET_BROADCAST",
    "NET_ADMIN",
    "NET_RAW",
    "IPC_LOCK",
    "IPC_OWNER",
    "SYS_MODULE",
    "SYS_RAWIO",
    "SYS_CHROOT",
    "SYS_PTRACE",
    "SYS_PACCT",
    "SYS_ADMIN",
    "SYS_BOOT",
    "SYS_NICE",
    "SYS_RESOURCE",
    "SYS_TIME",
    "SYS_TTY_CONFIG",
    "MKNOD",
    "LEASE",
    "AUDIT_WRITE",
    "AUDIT_CONTROL",
    "SETFCAP",
    "MAC_OVERRIDE",
    "MAC_ADMIN",
    "SYSLOG",
    "WAKE_ALARM",
    "BLOCK_SUSPEND",
    "AUDIT_READ",
    "PERFMON",
    "BPF",
    "CHECKPOINT_RESTORE",
]
_SETS = ("bounding", "effective", "permitted", "inheritable", "ambient")
_ERROR_OF_THE_FILTER = 118


def machine_python() -> Path:
    """The system's Python if there is one, else the one that runs this, outside its virtual environment."""
    system = Path("/usr/bin/python3")
    if system.exists():
        return system.resolve()
    return Path(getattr(sys, "_base_executable", sys.executable)).resolve()


def machine_binds() -> list[dict[str, Any]]:
    """What an empty root file system needs to run this machine's Python."""
    binds = [bind(Path("/usr"), "/usr")]
    if not machine_python().is_relative_to("/usr"):
        binds.append(bind(Path(sys.base_prefix), sys.base_prefix))
    return binds


def bind(source: Path, destination: str, *, writable: bool = False) -> dict[str, Any]:
    """A bind mount. The source is resolved: CRIU cannot restore a bind of a link."""
    options = ["rbind", "rprivate", "rw" if writable else "ro"]
    return {"destination": destination, "type": "bind", "source": str(source.resolve()), "options": options}


def capabilities_here() -> tuple[str, ...]:
    """All capabilities that this process may give away."""
    status = Path("/proc/self/status").read_text()
    mask = int(status.partition("CapBnd:")[2].split()[0], 16)
    return tuple(f"CAP_{name}" for number, name in enumerate(_NAMES) if mask >> number & 1)


def make(
    workload: Workload,
    *,
    rootfs_path: Path,
    cgroups_path: str,
    netns_path: Path | None,
    mounts: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """The spec of a workload's container."""
    wishes = workload.wishes
    python = "/usr/bin/python3" if workload.packages else str(machine_python())
    args = [python, "-ISu", f"/workloads/{workload.program}.py", *workload.args]
    granted = capabilities_here() if "all-capabilities" in wishes else _DEFAULT_CAPABILITIES
    network: dict[str, Any] = {"type": "network"}
    if netns_path:
        network["path"] = str(netns_path)
    namespaces: list[dict[str, Any]] = [{"type": "pid"}, {"type": "uts"}, {"type": "mount"}, network]
    if "host-ipc" not in wishes:
        namespaces.append({"type": "ipc"})
    linux: dict[str, Any] = {
        "cgroupsPath": cgroups_path,
        "namespaces": namespaces,
        "maskedPaths": ["/proc/kcore", "/proc/keys", "/proc/timer_list", "/sys/firmware"],
        "readonlyPaths": ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sysrq-trigger"],
    }
    if "unmasked-network" in wishes:
        linux["sysctl"] = {"net.ipv4.ping_group_range": "0 2147483647"}
    if "user-namespace" in wishes:
        namespaces.append({"type": "user"})
        mapping = [{"containerID": 0, "hostID": MAPPED_ID, "size": 65536}]
        linux |= {"uidMappings": mapping, "gidMappings": mapping}
    if "seccomp-filter" in wishes:
        rule = {
            "names": ["mkdir", "mkdirat"],
            "action": "SCMP_ACT_ERRNO",
            "errnoRet": _ERROR_OF_THE_FILTER,
        }
        linux["seccomp"] = {"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [rule]}
    if "tun-device" in wishes:
        linux["resources"] = {"devices": [{"allow": True, "access": "rwm"}]}
    spec: dict[str, Any] = {
        "ociVersion": "1.0.2",
        "process": {
            "terminal": "terminal" in wishes,
            "user": {"uid": 0, "gid": 0},
            "args": args,
            "env": ["PATH=/usr/sbin:/usr/bin:/sbin:/bin", "TERM=xterm", "HOME=/root", "LC_ALL=C.UTF-8"],
            "cwd": "/",
            "capabilities": {name: list(granted) for name in _SETS},
            "noNewPrivileges": True,
        },
        "root": {"path": str(rootfs_path), "readonly": False},
        "hostname": "conformance",
        "mounts": [*_virtual(wishes), bind(PROGRAMS, "/workloads"), *map(dict, mounts)],
        "linux": linux,
    }
    return without_io_uring(spec) if "no-io-uring" in wishes else spec


def _virtual(wishes: frozenset[Any]) -> list[dict[str, Any]]:
    def mount(destination: str, kind: str, *options: str) -> dict[str, Any]:
        return {"destination": destination, "type": kind, "source": kind, "options": list(options)}

    mounts = [
        mount("/proc", "proc", "nosuid", "noexec", "nodev"),
        mount("/dev", "tmpfs", "nosuid", "strictatime", "mode=755", "size=65536k"),
        mount("/dev/pts", "devpts", "nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620"),
        mount("/dev/shm", "tmpfs", "nosuid", "noexec", "nodev", "mode=1777", "size=65536k"),  # noqa: S108
        mount("/sys", "sysfs", "nosuid", "noexec", "nodev", "ro"),
    ]
    if "host-ipc" not in wishes:
        mounts.insert(3, mount("/dev/mqueue", "mqueue", "nosuid", "noexec", "nodev"))
    if "cgroup-mount" in wishes:
        mounts.append(mount("/sys/fs/cgroup", "cgroup", "nosuid", "noexec", "nodev", "rw"))
    return mounts


def skeleton(path: Path) -> Path:
    """Fill an empty directory so that the machine's /usr can be mounted into it."""
    for name in ("proc", "dev", "sys", "tmp", "root", "usr", "workloads", "etc", "opt", "var", "run",
                 "volume", "outside"):  # fmt: skip
        (path / name).mkdir(exist_ok=True, parents=True)
    (path / "tmp").chmod(0o1777)
    for name in ("bin", "sbin", "lib", "lib64"):
        if not (path / name).exists() and not (path / name).is_symlink():
            (path / name).symlink_to(f"usr/{name}")
    if not (path / "etc/passwd").exists():
        (path / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
        (path / "etc/group").write_text("root:x:0:\n")
    if not (path / "etc/hosts").exists():
        (path / "etc/hosts").write_text("127.0.0.1 localhost\n")
    os.chmod(path, 0o755)  # noqa: S103, PTH101
    return path
