"""The configuration that makes runtime callers know torpor's handlers; pure text, nothing is written here.

torpor is never made anybody's default runtime: pods choose it by RuntimeClass, people by `--runtime`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from shim.launcher import MARKER

_HEAD = f"{MARKER} `torpor install` replaces this file."

ANNOTATIONS = ("torpor.dev/*",)
"""What the CRI runtimes must let through from pods to the OCI runtime."""

# Below /etc.
CONTAINERD_DROPIN = Path("containerd/conf.d/60-torpor.toml")
CONTAINERD_MAIN = Path("containerd/config.toml")
CRIO_DROPIN = Path("crio/crio.conf.d/60-torpor.conf")
PODMAN_DROPIN = Path("containers/containers.conf.d/60-torpor.conf")

# Podman's own list; a drop-in replaces it whole.
_PODMAN_JSON = ("crun", "runc", "kata", "runsc", "youki", "krun")

_CRI_PLUGIN = {2: "io.containerd.grpc.v1.cri", 3: "io.containerd.cri.v1.runtime"}


def containerd(handlers: Mapping[str, Path], *, version: int, systemd_cgroup: bool) -> str:
    """Runtimes for containerd's CRI plugin.

    handlers: handler name to launcher. version: of the configuration, 2 for containerd 1.7, 3 for 2.x.
    systemd_cgroup: whether the node's containers live in systemd's cgroups.
    """
    # A string in JSON is one in TOML as well.
    plugin = f"plugins.{json.dumps(_CRI_PLUGIN[version])}.containerd.runtimes"
    lines = [_HEAD, f"version = {version}"]
    for name, launcher in handlers.items():
        lines += [
            "",
            f"[{plugin}.{name}]",
            'runtime_type = "io.containerd.runc.v2"',
            f"pod_annotations = {_list(ANNOTATIONS)}",
            f"container_annotations = {_list(ANNOTATIONS)}",
            f"[{plugin}.{name}.options]",
            f"BinaryName = {json.dumps(str(launcher))}",
            f"SystemdCgroup = {json.dumps(systemd_cgroup)}",
        ]
    return "\n".join([*lines, ""])


def containerd_main(dropin: Path) -> str:
    """A config.toml for a containerd that has none: the defaults and the drop-ins."""
    return f"{_HEAD}\nversion = 3\n{containerd_imports(dropin)}\n"


def containerd_imports(dropin: Path) -> str:
    """The line that makes containerd read its drop-ins."""
    return f"imports = {_list([str(dropin.parent / '*.toml')])}"


def crio(handlers: Mapping[str, Path], *, monitor: Path | None) -> str:
    """Runtimes for CRI-O. handlers: handler name to launcher. monitor: conmon, None: CRI-O's choice."""
    lines = [
        _HEAD,
        "# CRI-O hands every annotation of a pod to the runtime except those it knows to be dangerous, and",
        "# does not start if allowed_annotations names another one: so torpor's are not listed.",
    ]
    for name, launcher in handlers.items():
        lines += [
            "",
            f"[crio.runtime.runtimes.{name}]",
            f"runtime_path = {json.dumps(str(launcher))}",
            'runtime_type = "oci"',
            'runtime_root = "/run/runc"',
        ]
        if monitor:
            lines.append(f"monitor_path = {json.dumps(str(monitor))}")
    return "\n".join([*lines, ""])


def podman(handlers: Mapping[str, Path]) -> str:
    """Runtimes for Podman. handlers: name for `podman --runtime` to launcher."""
    lines = [
        _HEAD,
        "",
        "[engine]",
        "# Podman reads the errors of these runtimes as JSON.",
        f"runtime_supports_json = {_list([*_PODMAN_JSON, *handlers])}",
        "",
        "[engine.runtimes]",
    ]
    lines += [f"{name} = {_list([str(launcher)])}" for name, launcher in handlers.items()]
    return "\n".join([*lines, ""])


def runtime_classes(names: Sequence[str]) -> str:
    """The Kubernetes manifest by which pods choose torpor."""
    return "---\n".join(
        f"apiVersion: node.k8s.io/v1\nkind: RuntimeClass\nmetadata:\n  name: {name}\nhandler: {name}\n"
        for name in names
    )


CONFIG_TOML = f"""\
{MARKER} Yours to edit: it is never replaced.
# What stands behind a "#" here is the default.

# The engine for a checkpoint whose container asks for none.
#engine = "criu"

# Seconds until a checkpoint or a restore that hangs is undone.
#checkpoint_timeout_s = 120.0
#restore_timeout_s = 120.0

# Have runsc compress the images of gVisor: smaller, and frozen for longer.
#compress = false

# OCI hooks (absolute paths) that may run when a container is restored.
#allowed_hooks = []

# Directories, which only root may write, of archives that restore.criu.org/ annotations may name;
# they are obeyed only with FOREIGN=1 in runtime.conf.
#archive_roots = ["/var/lib/kubelet/checkpoints"]

# Rules of the processor (cpu.features, cpu.state ...) that only warn on this node, because the programs in
# its containers are built to run anywhere. Each use is in the audit log.
#overruled = []
"""


def _list(items: Sequence[str]) -> str:
    return json.dumps(list(items))
