"""Which scenario each rule of the verdict has, and why a few have none.

A test holds this complete, and the full form of `./run truth` that each scenario really meets its rule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from compat.rules.case import REGISTRY
from tests.truth.scenario import Row

MET: Mapping[str, str] = {
    "cpu.architecture": "an image of another architecture",
    "cpu.features": "a processor without AVX2",
    "cpu.state": "from this machine to an emulated one",
    "cpu.xsave": "a processor without XSAVE",
    "cpu.xsave-size": "a processor with a larger state",
    "kernel.capabilities": "a capability that root has not got",
    "kernel.guard-pages": "guard pages, a kernel without",
    "kernel.lsm": "a profile of AppArmor, no such kernel",
    "kernel.namespaces": "a user namespace, which may not be made",
    "kernel.paths": "from an emulated machine to this one",
    "cgroup.mode": "to an emulated machine, control groups mounted",
    "cgroup.open": "control groups mounted, one of their files open",
    "cgroup.mount": "control groups of version 2, dumped by runc alone",
    "criu.absent": "no CRIU",
    "criu.image": "restored by CRIU 4.1, made by a later one",
    "criu.kernel": "a CRIU too old for the kernel",
    "gvisor.release": "an older runsc, asked from afar",
    "gpu.count": "a GPU too few",
    "gpu.driver": "an older driver of GPUs",
    "gpu.memory": "GPUs with less memory",
    "gpu.mig": "a GPU that is split",
    "gpu.model": "GPUs of another model",
    "gpu.place": "other GPUs, a driver without maps",
    "place.cpus": "a processor that the node has not",
    "place.devices": "a tunnel",
    "place.disk": "a disk too full for what the image changed",
    "place.hugepages": "huge pages, none free",
    "place.memory": "a machine with less memory than the image",
    "place.memory-limit": "memory for a quarter of the image",
    "place.pids": "the host's process ids, taken",
    "place.pids-limit": "process ids for half of the tasks",
    "place.names": "an abstract unix socket, taken",
    "place.interface": "a socket on an interface that is missing",
    "place.ports": "the listener's port is taken",
    "identity.once": "its source lives on beside it",
    "mounts.added": "a tmpfs that only the new spec has",
    "mounts.kind": "a bind in place of a tmpfs",
    "mounts.missing": "a volume that the new spec lacks",
    "mounts.place": "the place of a mount of the program's own is missing",
    "mounts.reach": "a volume that the root of a user namespace cannot reach",
    "mounts.mapped": "a volume whose ids are mapped",
    "mounts.source": "a volume whose source is missing",
    "files.immutable": "an open file is immutable",
    "files.in-way": "a file where a unix socket was",
    "files.build-id": "a library is another build of the same size",
    "files.locked": "a lock on a volume's file that another has",
    "files.missing": "an open file is missing",
    "files.mode": "an open file has another mode",
    "files.read-only": "a file open in a volume that is read-only",
    "files.busy": "a program that another has open for writing",
    "files.size": "an open file has grown",
    "spec.ipc": "the host's ipc in place of its own",
    "spec.uts": "the host's uts in place of its own",
    "spec.limits": "a processor quota of 1 µs",
    "spec.namespaces": "the pod's namespace is gone",
    "spec.network": "the host's network in place of the pod's",
    "spec.words": "no arguments",
    "spec.terminal": "a terminal that the image lacks",
    "spec.edit.applied": "another host name",
    "spec.edit.capabilities": "a capability less",
    "spec.edit.identity": "another user",
    "spec.edit.ignored": "another program and environment",
    "spec.edit.image": "another container image, nothing open differs",
    "spec.edit.mounts": "a read-only root",
    "spec.edit.seccomp": "a filter that the image lacks",
}
_ALONE = "; tests/unit/test_rules.py alone has it"
UNMET: Mapping[str, str] = {
    "image.damaged": "a restore compares all of the content first; tests/unit/test_cli_compat.py has it",
    "kernel.droppable": f"no emulated machine here has a kernel before 6.11{_ALONE}",
    "kernel.page-size": f"every x86-64 kernel has pages of 4 KiB{_ALONE}",
    "place.pid-max": f"a lower limit would bind everybody on this machine{_ALONE}",
    "kernel.shadow-stack": f"no processor here has shadow stacks, and qemu emulates none{_ALONE}",
}


def names() -> set[str]:
    """All rules of the verdict."""
    return {name for rule in REGISTRY for name in rule.names}


def missed(rows: Sequence[Row]) -> list[str]:
    """Rules that have a scenario, and it did not meet them, in words; a spoiled one counts too."""
    met = {row.scenario.name: {*row.predicted.rules, *row.predicted.told} for row in rows}
    return [f"{rule} was not met by '{name}'" for rule, name in MET.items() if rule not in met.get(name, ())]
