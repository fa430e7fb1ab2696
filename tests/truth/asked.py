"""Is a running container what its spec asks for? Read from /proc, by none of torpor's own rules.

A restore may end well and give a container that lacks a volume, sits in another network namespace or holds
more than its spec grants: that is no restore of what was asked for.
"""

from __future__ import annotations

import os
import resource
import stat
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.support.containers import status

Spec = Mapping[str, Any]

_KINDS = {"network": "net", "pid": "pid", "ipc": "ipc", "uts": "uts", "mount": "mnt", "user": "user"}
_CAPABILITIES = (
    *("CHOWN", "DAC_OVERRIDE", "DAC_READ_SEARCH", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "SETPCAP"),
    *("LINUX_IMMUTABLE", "NET_BIND_SERVICE", "NET_BROADCAST", "NET_ADMIN", "NET_RAW", "IPC_LOCK"),
    *("IPC_OWNER", "SYS_MODULE", "SYS_RAWIO", "SYS_CHROOT", "SYS_PTRACE", "SYS_PACCT", "SYS_ADMIN"),
    *("SYS_BOOT", "SYS_NICE", "SYS_RESOURCE", "SYS_TIME", "SYS_TTY_CONFIG", "MKNOD", "LEASE", "AUDIT_WRITE"),
    *("AUDIT_CONTROL", "SETFCAP"),
)
# Every runtime gives its containers these, and CRIU itself the terminals.
_NODES = frozenset({(1, 3), (1, 5), (1, 7), (1, 8), (1, 9), (5, 0), (5, 2)})
_PTS = 136
_NODE_FILES = frozenset(f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom", "tty"))


def differs(pid: int, spec: Spec, old: Spec) -> str:
    """The first thing in which a container is not what its spec asks for, in words; "" if there is none.

    pid: of its first process, as the host numbers it. old: the spec of the dump, whose words hold where the
    verdict says that the new ones are ignored.
    """
    found = (
        *_namespaces(pid, spec),
        *_mounts(pid, spec),
        *_groups(pid, spec),
        *_rights(pid, spec),
        *_devices(pid, spec),
        *_kernel_words(pid, spec, old),
    )
    return next(iter(found), "")


def _kernel_words(pid: int, spec: Spec, old: Spec) -> Iterator[str]:
    """The host name and the sysctls of namespaces that a restore makes."""
    own = {entry["type"] for entry in spec["linux"]["namespaces"] if not entry.get("path")}
    wanted = {"kernel.hostname": ("uts", old.get("hostname") or "")} if "uts" in own else {}
    for name, value in (spec["linux"].get("sysctl") or {}).items():
        if name.startswith("net.") and "network" in own:
            wanted[name] = "net", value
    for name, value in (old["linux"].get("sysctl") or {}).items():
        if not name.startswith("net.") and "ipc" in own:
            wanted[name] = "ipc", value
    for name, (kind, value) in wanted.items():
        words = ["nsenter", f"--{kind}=/proc/{pid}/ns/{kind}", "cat", f"/proc/sys/{name.replace('.', '/')}"]
        has = subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
        if has != value:
            yield f"its {name} is {has}, and not {value}"


def _namespaces(pid: int, spec: Spec) -> Iterator[str]:
    given = {entry["type"]: entry.get("path", "") for entry in spec["linux"]["namespaces"]}
    for kind, name in _KINDS.items():
        has = Path(f"/proc/{pid}/ns/{name}").stat().st_ino
        hosts = Path(f"/proc/self/ns/{name}").stat().st_ino
        path = given.get(kind)
        if path is None and has != hosts:
            yield f"its {kind} namespace is not the host's"
        elif path and has != Path(path).stat().st_ino:
            yield f"its {kind} namespace is not the one that the spec names"
        elif path == "" and has == hosts:
            yield f"its {kind} namespace is the host's"


def _mounts(pid: int, spec: Spec) -> Iterator[str]:
    options: dict[str, list[str]] = {}
    for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines():
        fields = line.split()
        options[fields[4]] = fields[5].split(",")
    linux = spec["linux"]
    hidden = [*(linux.get("maskedPaths") or ()), *(linux.get("readonlyPaths") or ())]
    wanted = {entry["destination"]: entry for entry in spec["mounts"]}
    groups = [path for path, entry in wanted.items() if entry["type"] == "cgroup"]
    for path, entry in wanted.items():
        if path not in options:
            yield f"nothing is mounted on {path}"
        elif "ro" in entry["options"] and "ro" not in options[path] and path not in groups:
            yield f"{path} can be written to"
        elif entry["type"] == "bind" and not os.path.samefile(f"/proc/{pid}/root{path}", entry["source"]):
            yield f"on {path} something else is mounted"
        elif mapping := entry.get("uidMappings"):
            owner, shown = (os.stat(top).st_uid for top in (entry["source"], f"/proc/{pid}/root{path}"))
            if shown != owner - mapping[0]["containerID"] + mapping[0]["hostID"]:
                yield f"the ids on {path} are not mapped"
    if spec["root"].get("readonly") and "ro" not in options["/"]:
        yield "its root file system can be written to"
    for path in hidden:
        if path not in options and Path(path).exists():
            yield f"{path} is not covered"
    known = {"/", *wanted, *hidden, *_NODE_FILES, "/dev/console"}
    # What may mount, may have mounted more.
    may_mount = "CAP_SYS_ADMIN" in spec["process"]["capabilities"]["bounding"]
    for path in () if may_mount else options.keys() - known:
        if not any(path.startswith(f"{top}/") for top in groups):
            yield f"something is mounted on {path}"


def _groups(pid: int, spec: Spec) -> Iterator[str]:
    """What is mounted of the control groups is the container's own, in version 2 if it is to be apart."""
    apart = any(entry["type"] == "cgroup" for entry in spec["linux"]["namespaces"])
    words = [line.split(":", 2) for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines()]
    own = {controller: path for _, names, path in words for controller in names.split(",")}
    for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        root, place = before.split()[3:5]
        kind, _, options = after.split()
        if kind.startswith("cgroup"):
            wanted = {own[option] for option in options.split(",") if option in own}
            if kind == "cgroup2":
                wanted = {own[""] if apart else "/"}
            if root not in wanted:
                yield f"on {place} are the control groups of '{root}'"


def _rights(pid: int, spec: Spec) -> Iterator[str]:
    process = spec["process"]
    mapped = spec["linux"].get("uidMappings")
    if not mapped and status(pid, "Uid").split() != [str(process["user"]["uid"])] * 4:
        yield f"its user is {status(pid, 'Uid')}"
    for field, name in (("CapBnd", "bounding"), ("CapPrm", "permitted"), ("CapEff", "effective")):
        held = int(status(pid, field), 16)
        granted = {word.removeprefix("CAP_") for word in process["capabilities"][name]}
        more = [word for bit, word in enumerate(_CAPABILITIES) if held >> bit & 1 and word not in granted]
        if more:
            yield f"it holds {more[0]} ({name})"
    if process.get("noNewPrivileges") and status(pid, "NoNewPrivs") != "1":
        yield "it may gain privileges"
    if spec["linux"].get("seccomp") and status(pid, "Seccomp") != "2":
        yield "it has no seccomp filter"
    for limit in process.get("rlimits") or ():
        _, hard = resource.prlimit(pid, getattr(resource, limit["type"]))
        if hard == resource.RLIM_INFINITY or hard > limit["hard"]:
            yield f"its {limit['type']} is {hard}"
    score = process.get("oomScoreAdj")
    if score is not None and int(Path(f"/proc/{pid}/oom_score_adj").read_text()) < score:
        yield "its OOM score is lower"
    label = process.get("apparmorProfile") or process.get("selinuxLabel") or ""
    if label and label not in _label(pid):
        yield "no security module confines it"


def _label(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/attr/current").read_text()
    except OSError:  # no module labels processes
        return ""


def _devices(pid: int, spec: Spec) -> Iterator[str]:
    nodes = {(node["major"], node["minor"]) for node in spec["linux"].get("devices") or ()}
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found = link.stat()
        except FileNotFoundError:  # it was closed meanwhile
            continue
        if stat.S_ISCHR(found.st_mode):
            numbers = os.major(found.st_rdev), os.minor(found.st_rdev)
            if numbers not in nodes | _NODES and numbers[0] != _PTS:
                yield f"it has {link.readlink()} open"
