"""Which containers share a sandbox, and under which name each is known to runsc.

A sandbox of containerd's CRI holds the pause container, which is its first, and the containers of the pod.
runsc saves all of them at once, and finds each of them again by its name in the pod.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines.api import NotSupported
from engines.gvisor.image import Record
from engines.gvisor.runsc import Container, Runsc, read_spec

_TYPE = "io.kubernetes.cri.container-type"
_NAME = "io.kubernetes.cri.container-name"
_CRIO_TYPE = "io.kubernetes.cri-o.ContainerType"


@dataclass(frozen=True, kw_only=True)
class Fellow:
    """A container of a sandbox. name: in its pod, "" for the first one."""

    name: str
    container: Container
    spec: Mapping[str, Any]
    rootfs_path: Path


def name_of(spec: Mapping[str, Any]) -> str | None:
    """The name of a pod's container in its pod, "" for the pause container, None for one of no pod."""
    annotations: Mapping[str, Any] = spec.get("annotations") or {}
    if annotations.get(_TYPE) == "sandbox":
        return ""
    return str(annotations.get(_NAME) or "") or None if annotations.get(_TYPE) == "container" else None


def fellows(
    runsc: Runsc, container: Container, spec: Mapping[str, Any], rootfs_path: Path, words: str
) -> tuple[Fellow, ...]:
    """All containers of a container's sandbox, the first one first; it alone if it is of no pod.

    Raises NotSupported for a sandbox that could not be restored as a pod.
    """
    sandbox = runsc.ids().get(container.id)
    others = runsc.fellows(container.id)
    own = name_of(spec)
    first = Fellow(name=own or "", container=container, spec=spec, rootfs_path=rootfs_path)
    alone = not others and sandbox == container.id
    if alone and not {_TYPE, _CRIO_TYPE} & set(_annotations(spec)):
        return (first,)
    if not own:
        raise NotSupported(
            f"{words}: {_why(own, spec)}; checkpoint a container of a pod of containerd, or one alone",
            after="running",
        )
    found = [first]
    for other in others:
        if other.status not in ("running", "paused"):
            raise NotSupported(
                f"{words}: container '{other.id}' of its pod is {other.status}, and gVisor restores only "
                "containers that run; try again when it runs, or when it is deleted",
                after="running",
            )
        document = read_spec(other.bundle_path, words)
        name = name_of(document)
        if name is None or name in {fellow.name for fellow in found}:
            raise NotSupported(
                f"{words}: container '{other.id}' of its pod has no name of its own, by which gVisor could "
                "find it again; give it one",
                after="running",
            )
        root = other.bundle_path / document["root"]["path"]
        found.append(Fellow(name=name, container=other, spec=document, rootfs_path=root))
    for fellow in found:
        process: Mapping[str, Any] = fellow.spec.get("process") or {}
        if process.get("terminal"):
            raise NotSupported(
                f"{words}: container '{fellow.name}' of its pod has a terminal, which runsc cannot give a "
                "container of a pod that it restores; start it without (tty: false)",
                after="running",
            )
    return tuple(sorted(found, key=lambda fellow: fellow.container.id != sandbox))


def _why(own: str | None, spec: Mapping[str, Any]) -> str:
    if own == "":
        return "it is the pause container of a pod"
    if _CRIO_TYPE in _annotations(spec):
        return "it is part of a pod of CRI-O, whose containers gVisor does not find again"
    return "it shares its sandbox with others, and nothing says which container of a pod it is"


def _annotations(spec: Mapping[str, Any]) -> Mapping[str, Any]:
    return spec.get("annotations") or {}


def misfit(record: Record, spec: Mapping[str, Any]) -> str:
    """Why an image cannot become a container of this specification, "" if it can."""
    name = name_of(spec)
    names = sorted(filter(None, record.pod))
    if not record.pod:
        return "" if name is None else "the image is of a container alone in its sandbox, not of a pod"
    if name is None:
        return f"the image is of a pod with {', '.join(names)}, which gVisor restores only as a pod"
    if name not in record.pod:
        return f"the image is of a pod with {', '.join(names)}, and has no container '{name}'"
    return ""
