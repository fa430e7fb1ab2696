"""Who else is in the network namespace of a container that is about to leave."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from shim import bundle, pod
from shim.errors import ShimError


def company(root: str, container_id: str, netns: Path) -> list[str]:
    """Ids of the runtime's other containers that join a namespace; a pod's pause container does not count.

    root: the runtime's --root. netns: path of the namespace.
    """
    return sorted(
        path.name
        for path in Path(root).iterdir()
        if path.name != container_id and _joins(path / "state.json", netns)
    )


def _joins(state_path: Path, netns: Path) -> bool:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, ShimError):
        labels: list[str] = json.loads(state_path.read_bytes())["config"]["labels"]
        paths = [label.partition("=")[2] for label in labels if label.startswith("bundle=")]
        for spec in map(bundle.read_spec, map(Path, paths)):
            path = bundle.namespace_path(spec, "network")
            if path is not None and path.samefile(netns):
                return not pod.identify(spec.get("annotations") or {}).sandbox
    return False
