"""Why an image would not restore, or would restore and then go wrong.

Each rule is one small function from a `Case` to findings. They were measured with CRIU 4.2 and runc 1.3:
several of these combinations end with exit status 0 and a container that is wrong (no volume, another
network namespace) or that dies of SIGILL later.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from compat.elf import build_id
from compat.profile import DumpHost, Profile
from engines.api import FileNeed, Finding, Needs, Severity

Given = Literal["own", "joined", "host"]

# glibc picks implementations by these at start-up, so a process that never mentions them jumps into them.
_PICKED = (
    "ssse3 sse4_1 sse4_2 popcnt avx avx2 fma fma4 bmi1 bmi2 abm movbe rtm avx512f avx512bw avx512cd avx512dq "
    "avx512vl avx512_vbmi avx512_vbmi2"
)
_PICKED_BY_GLIBC = frozenset(_PICKED.split())
_TUNABLES: Mapping[str, str] = {"abm": "LZCNT"}  # where glibc's name differs from the kernel's
# Programs that use these have asked the processor themselves. Flags in neither set (`erms`, `pcid`) make
# things faster or safer, and no instruction depends on them.
_ASKED = (
    "aes vaes pclmulqdq vpclmulqdq sha_ni gfni rdrand rdseed adx f16c avx512ifma avx512_vnni avx512_bitalg "
    "avx512_vpopcntdq avx512_bf16 avx512_fp16 avx_vnni amx_tile amx_int8 amx_bf16 clflushopt clwb fsgsbase "
    "cx16 pku asimd asimddp atomics crc32 pmull sha1 sha2 sha3 sha512 sve sve2"
)
_INSTRUCTIONS = frozenset(_ASKED.split())
_DROPPABLE_SINCE = (6, 11)
_MAX_LINKS = 40  # the kernel's own limit
_LINK_NAMES: Mapping[str, str] = {"network": "net", "mount": "mnt"}
NODE_DEVICES = frozenset(f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom", "tty"))
"""What a runtime binds into a container that may not make device nodes."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """An image, the node and the spec that shall have it.

    dump_host: None if nobody recorded it. rootfs_path: the new root file system, None if it is not there yet.
    """

    needs: Needs
    spec: Mapping[str, Any]
    node: Profile
    dump_host: DumpHost | None
    rootfs_path: Path | None

    @property
    def has_kernel(self) -> bool:
        """Whether the image brings its own kernel: then this node's does not matter to it."""
        return self.needs.engine == "gvisor"


Rule = Callable[[Case], Iterator[Finding]]


def finding(rule: str, severity: Severity, message: str, remedy: str) -> Finding:
    """A Finding, in one line."""
    return Finding(rule=rule, severity=severity, message=message, remedy=remedy)


def part(spec: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A section of a spec, empty if it is absent or null."""
    found: Any = spec.get(name)
    return found or {}


def given(spec: Mapping[str, Any], kind: str) -> Given:
    """Which namespace of a kind a spec gives: one of its own, somebody's by path, or the host's."""
    for entry in part(spec, "linux").get("namespaces") or ():
        if entry.get("type") == kind:
            path = str(entry.get("path") or "")
            if not path:
                return "own"
            return "host" if _is_ours(path, kind) else "joined"
    return "host"


def _is_ours(path: str, kind: str) -> bool:
    """Whether a path leads to the namespace that this process lives in, which is the host's."""
    try:
        return Path(path).samefile(f"/proc/self/ns/{_LINK_NAMES.get(kind, kind)}")
    except OSError:
        return False


# --- the processor and the kernel ----------------------------------------------------------------------


def architecture(case: Case) -> Iterator[Finding]:
    """Machine code runs on its own architecture only."""
    if case.dump_host and case.dump_host.arch != case.node.arch:
        yield finding(
            "cpu.architecture",
            "refuse",
            f"the image was made on {case.dump_host.arch}, this node is {case.node.arch}",
            f"restore on a node with {case.dump_host.arch}",
        )


def xsave(case: Case) -> Iterator[Finding]:
    """CRIU cannot load an XSAVE area without the instruction."""
    if case.needs.xsave and case.node.arch == "x86_64" and "xsave" not in case.node.cpu_flags:
        yield finding(
            "cpu.xsave",
            "refuse",
            "the tasks carry XSAVE state, which this node's processor cannot load",
            "restore on a node whose processor has XSAVE",
        )


def cpu_features(case: Case) -> Iterator[Finding]:
    """What the dump's processor had and this one lacks: the restore succeeds, the process dies later."""
    if case.dump_host is None:
        yield finding(
            "cpu.features",
            "unknown",
            "nobody recorded the processor of the node on which the image was made",
            "restore on a node with the same processor",
        )
        return
    if case.dump_host.arch != case.node.arch:
        return
    lacking = set(case.dump_host.cpu_flags) - set(case.node.cpu_flags)
    if case.has_kernel and (fatal := sorted(lacking & (_PICKED_BY_GLIBC | _INSTRUCTIONS))):
        yield finding(
            "cpu.features",
            "refuse",
            f"this node's processor lacks {', '.join(fatal)}, and gVisor restores only where all are there "
            "that were there at the dump",
            "restore on a node that has them",
        )
        return
    if fatal := sorted(lacking & _PICKED_BY_GLIBC):
        yield finding(
            "cpu.features",
            "refuse",
            f"this node's processor lacks {', '.join(fatal)}, which the C library uses where it finds them",
            "restore on a node that has them, or start the program that is to be checkpointed with "
            f"GLIBC_TUNABLES=glibc.cpu.hwcaps={','.join(map(_switched_off, fatal))}",
        )
    if possible := sorted(lacking & _INSTRUCTIONS):
        yield finding(
            "cpu.features",
            "warn",
            f"this node's processor lacks {', '.join(possible)}, which the program may use",
            "watch for an illegal instruction",
        )


def _switched_off(flag: str) -> str:
    return f"-{_TUNABLES.get(flag, flag.upper())}"


def page_size(case: Case) -> Iterator[Finding]:
    """Memory is kept in pages of the kernel that made the image."""
    host = case.dump_host
    if host and host.page_size_bytes != case.node.page_size_bytes:
        yield finding(
            "kernel.page-size",
            "refuse",
            f"the image has pages of {host.page_size_bytes} bytes, this node's kernel of "
            f"{case.node.page_size_bytes}",
            "restore on a node with the same page size",
        )


def droppable(case: Case) -> Iterator[Finding]:
    """From glibc 2.41 on random numbers have their state in a kind of mapping that old kernels lack."""
    if not case.needs.droppable_mappings:
        return
    version = re.match(r"(\d+)\.(\d+)", case.node.kernel)
    if version is None:
        severity: Severity = "unknown"
    elif tuple(map(int, version.groups())) < _DROPPABLE_SINCE:
        severity = "refuse"
    else:
        return
    yield finding(
        "kernel.droppable",
        severity,
        f"the image has droppable mappings, which need kernel 6.11; this node runs {case.node.kernel}",
        "restore on a node with kernel 6.11 or later",
    )


def kernel_paths(case: Case) -> Iterator[Finding]:
    """Every hidden or read-only path of /proc and /sys is a mount, and needs something to be mounted on."""
    for mount in () if case.has_kernel else case.needs.mounts:
        path = mount.destination
        inside = path.startswith(("/proc/", "/sys/")) and not path.startswith("/sys/fs/cgroup")
        if inside and not os.path.lexists(path):
            yield finding(
                "kernel.paths",
                "refuse",
                f"the image has a mount on '{path}', which this node's kernel ({case.node.kernel}) lacks",
                "leave the path out of maskedPaths and readonlyPaths before the checkpoint, or restore on a "
                "node with the same kernel",
            )


def cgroup_mounts(case: Case) -> Iterator[Finding]:
    """A container that sees its control groups sees those of one cgroup mode."""
    host = case.dump_host
    if host is None or host.cgroup_mode == case.node.cgroup_mode or case.has_kernel:
        return
    if any(
        mount.fstype in {"cgroup", "cgroup2"} or _in_cgroup(mount.destination) for mount in case.needs.mounts
    ):
        yield finding(
            "cgroup.mode",
            "refuse",
            f"the image has control groups of mode {host.cgroup_mode} mounted, this node has "
            f"{case.node.cgroup_mode}",
            "take the checkpoint of a container without a mount on /sys/fs/cgroup, or restore on a node with "
            "the same mode",
        )


def _in_cgroup(path: str) -> bool:
    return path == "/sys/fs/cgroup" or path.startswith("/sys/fs/cgroup/")


# --- the new spec --------------------------------------------------------------------------------------


def terminal(case: Case) -> Iterator[Finding]:
    """A terminal comes through the console socket or not at all."""
    wanted = bool(part(case.spec, "process").get("terminal"))
    if wanted != case.needs.terminal:
        yield finding(
            "spec.terminal",
            "refuse",
            f"the image's container had {'a' if case.needs.terminal else 'no'} terminal, the new one "
            f"{'wants one' if wanted else 'has none'}",
            f"set process.terminal (in a pod: tty) to {str(case.needs.terminal).lower()}",
        )


def network_kind(case: Case) -> Iterator[Finding]:
    """CRIU makes the kind of network namespace that the image had, whatever the new spec says."""
    if case.has_kernel:
        return
    kinds: Mapping[str, Given] = {"own": "own", "external": "joined", "host": "host"}
    had = kinds[case.needs.namespaces.get("network", "own")]
    wants = given(case.spec, "network")
    if had != wants:
        words = {"own": "an empty one of its own", "joined": "one that its caller made", "host": "the host's"}
        yield finding(
            "spec.network",
            "refuse",
            f"the image's network namespace was {words[had]}, the new container's is {words[wants]}",
            "restore into a container of the same kind of network",
        )


def resolve(rootfs_path: Path | None, path: str) -> str:
    """Where a destination really lies: runtimes follow links inside the root file system, and CRIU records
    the result (`/var/run/secrets` becomes `/run/secrets`). Without a root file system the path as it is.
    """
    if rootfs_path is None:
        return _clean(path)
    waiting = path.split("/")[::-1]
    found: list[str] = []
    links = 0
    while waiting:
        name = waiting.pop()
        if name == "..":
            found[-1:] = []
        elif name not in {"", "."}:
            here = rootfs_path.joinpath(*found, name)
            if links < _MAX_LINKS and here.is_symlink():
                links += 1
                target = str(here.readlink())
                found = [] if target.startswith("/") else found
                waiting += target.split("/")[::-1]
            else:
                found.append(name)
    return "/" + "/".join(found)


def specified_mounts(spec: Mapping[str, Any], rootfs_path: Path | None) -> dict[str, Mapping[str, Any]]:
    """A spec's mounts by where they really lie; of several in one place the last, which hides the others."""
    entries: Sequence[Mapping[str, Any]] = spec.get("mounts") or ()
    return {resolve(rootfs_path, str(entry.get("destination"))): entry for entry in entries}


def mounts(case: Case) -> Iterator[Finding]:
    """Mounts are matched by destination. One that only the new spec has would silently be missing."""
    specified = specified_mounts(case.spec, case.rootfs_path)
    # Without the root file system a link may hide that two paths are one.
    severity: Severity = "refuse" if case.rootfs_path else "unknown"
    hidden = {_clean(path) for path in part(case.spec, "linux").get("maskedPaths") or ()}
    image = {mount.destination: mount for mount in case.needs.mounts}
    for path, mount in image.items():
        ours = path == "/" or path in hidden or path in NODE_DEVICES or path.startswith(("/proc/", "/sys/"))
        if mount.external and not ours and not is_bind(specified.get(path, {})):
            yield finding(
                "mounts.missing",
                severity,
                f"the image has a mount on '{path}', for which the new spec names no source",
                f"mount something on '{path}' in the new container",
            )
    for path, entry in specified.items():
        if not is_bind(entry) or _in_cgroup(path):
            continue
        found = image.get(path)
        if found is None:
            yield finding(
                "mounts.added",
                severity,
                f"the new spec mounts '{entry.get('source')}' on '{path}', where the image has nothing; the "
                "restored container would not see it",
                "leave the mount out, or take the checkpoint of a container that has it",
            )
        elif not found.external:
            yield finding(
                "mounts.kind",
                "refuse",
                f"the new spec mounts '{entry.get('source')}' on '{path}', where the image has a "
                f"{found.fstype} with content of its own",
                "leave the mount out, or take the checkpoint of a container that has it",
            )


def is_bind(entry: Mapping[str, Any]) -> bool:
    """Whether a spec's mount shows something that exists elsewhere."""
    return entry.get("type") == "bind" or bool({"bind", "rbind"} & set(entry.get("options") or ()))


def _clean(path: Any) -> str:
    return os.path.normpath(str(path))


# --- open files ----------------------------------------------------------------------------------------


def files(
    needs: Needs, spec: Mapping[str, Any], rootfs_path: Path | None, *, complete: bool
) -> Iterator[Finding]:
    """Open and mapped files must be there with the same size and mode: CRIU refuses anything else. Of
    programs and libraries the build is compared too, which CRIU does not do: another one crashes later.

    complete: the image's changes are already in the root file system; else only what the spec binds in from
    elsewhere can be looked at.
    """
    specified = specified_mounts(spec, rootfs_path)
    sources = {path: Path(str(entry.get("source"))) for path, entry in specified.items() if is_bind(entry)}
    root = rootfs_path if complete else None
    destinations = sorted({mount.destination for mount in needs.mounts}, key=len, reverse=True)
    for need in needs.files:
        base = next((path for path in destinations if _beneath(need.path, path)), "/")
        source = sources.get(base) if base != "/" else root
        if source is not None:
            inside = need.path.removeprefix(base).lstrip("/")
            yield from _same_file(need, source / inside if inside else source, content=complete)


def _beneath(path: str, top: str) -> bool:
    return path == top or path.startswith(f"{top.rstrip('/')}/")


def _same_file(need: FileNeed, path: Path, *, content: bool) -> Iterator[Finding]:
    remedy = "restore over the container image and the volumes of the dump"
    try:
        found = path.lstat()
    except OSError as error:
        yield finding(
            "files.missing", "refuse", f"the image has '{need.path}' open: {error.strerror}", remedy
        )
        return
    if not stat.S_ISREG(found.st_mode):
        yield finding("files.missing", "refuse", f"'{need.path}' is no regular file here", remedy)
    elif need.size_bytes not in {-1, found.st_size}:
        yield finding(
            "files.size",
            "refuse",
            f"the image has '{need.path}' open with {need.size_bytes} bytes, here it has {found.st_size}",
            remedy,
        )
    elif need.mode not in {-1, stat.S_IMODE(found.st_mode)}:
        yield finding(
            "files.mode",
            "refuse",
            f"the image has '{need.path}' open with mode {need.mode:04o}, here it is "
            f"{stat.S_IMODE(found.st_mode):04o}",
            remedy,
        )
    elif content and need.build_id and not _may_be_build(need.build_id, path):
        yield finding(
            "files.build-id",
            "refuse",
            f"the image has '{need.path}' mapped, and here that is another build of the same size",
            remedy,
        )


def _may_be_build(wanted: str, path: Path) -> bool:
    """Whether a program or library is this very build, or does not say which it is."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            found = build_id(descriptor)
        finally:
            os.close(descriptor)
        return not found or found == wanted
    return True


ALL: Sequence[Rule] = (
    *(architecture, xsave, cpu_features, page_size, droppable, kernel_paths, cgroup_mounts),
    *(terminal, network_kind, mounts),
)
