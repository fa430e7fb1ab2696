"""Which pod and container a bundle belongs to, by the annotations that its caller writes itself.

Whoever makes a pod can put annotations on it, and callers hand them on: CRI-O all of them, containerd those
on a list. Both write their own afterwards, so that theirs win; but a key that a caller does not write may be
the pod's. So only the keys that the present caller always writes are believed, and a bundle that has the
marks of both is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from shim.errors import AdmissionRefused

_CONTAINERD = "io.kubernetes.cri."
_CRIO = "io.kubernetes.cri-o."
_MANAGER = "io.container.manager"
_CONTAINERD_TYPE = f"{_CONTAINERD}container-type"
_CRIO_TYPE = f"{_CRIO}ContainerType"
_CALLERS: Mapping[str, str] = {"libpod": "podman", "cri-o": "cri-o"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """Who a container is; what nobody says is empty.

    caller: "containerd", "cri-o", "podman" or "". sandbox: it is the pod's pause container.
    """

    caller: str = ""
    sandbox: bool = False
    sandbox_id: str = ""  # of the pause container; only containerd tells
    container_name: str = ""
    name: str = ""
    namespace: str = ""
    uid: str = ""
    image_name: str = ""  # container image
    image_ref: str = ""


def identify(annotations: Mapping[str, str]) -> Pod:
    """Read a specification's annotations. Raises AdmissionRefused if they bear the marks of two callers."""
    if annotations.get(_CONTAINERD_TYPE) and annotations.get(_CRIO_TYPE):
        raise AdmissionRefused(
            f"could not tell whose container this is: it has both '{_CONTAINERD_TYPE}' and '{_CRIO_TYPE}', "
            "and no caller writes both; remove that annotation from the pod"
        )
    if annotations.get(_CRIO_TYPE):
        return _crio(annotations)
    return Pod(
        caller=_caller(annotations),
        sandbox=annotations.get(_CONTAINERD_TYPE) == "sandbox",
        sandbox_id=annotations.get(f"{_CONTAINERD}sandbox-id", ""),
        container_name=annotations.get(f"{_CONTAINERD}container-name", ""),
        name=annotations.get(f"{_CONTAINERD}sandbox-name", ""),
        namespace=annotations.get(f"{_CONTAINERD}sandbox-namespace", ""),
        uid=annotations.get(f"{_CONTAINERD}sandbox-uid", ""),
        image_name=annotations.get(f"{_CONTAINERD}image-name", ""),
    )


def _crio(annotations: Mapping[str, str]) -> Pod:
    """CRI-O writes a container's full name, k8s_<container>_<pod>_<namespace>_<uid>_<attempt>, and last of
    all the kubelet's labels. `Namespace` and `ContainerName` it writes for sandboxes only.
    """
    sandbox = annotations[_CRIO_TYPE] == "sandbox"
    parts = annotations.get(f"{_CRIO}Name", "").split("_")
    if sandbox or len(parts) < 5 or parts[0] != "k8s":
        parts = [annotations.get(f"io.kubernetes.{key}", "") for key in ("container.name", "pod.name")]
        parts = ["", *parts, annotations.get("io.kubernetes.pod.namespace", "")]
    return Pod(
        caller=_caller(annotations),
        sandbox=sandbox,
        container_name=_metadata_name(annotations) or parts[1],
        name=parts[2],
        namespace=parts[3],
        uid=annotations.get("io.kubernetes.pod.uid", ""),
        image_name=annotations.get(f"{_CRIO}ImageName", ""),
        image_ref=annotations.get(f"{_CRIO}ImageRef", ""),
    )


def _metadata_name(annotations: Mapping[str, str]) -> str:
    try:
        found: object = json.loads(annotations.get(f"{_CRIO}Metadata") or "null")
    except (ValueError, RecursionError):
        return ""
    name: object = cast("dict[str, object]", found).get("name") if isinstance(found, dict) else None
    return name if isinstance(name, str) else ""


def _caller(annotations: Mapping[str, str]) -> str:
    manager = annotations.get(_MANAGER, "")
    if manager in _CALLERS:
        return _CALLERS[manager]
    for prefix, caller in ((_CRIO, "cri-o"), (_CONTAINERD, "containerd"), ("io.podman.", "podman")):
        if any(key.startswith(prefix) for key in annotations):
            return caller
    return ""
