"""What the annotations of a bundle ask of torpor.

Kubernetes gives a runtime only the annotations of the *pod*, the same set for the pause container, every
init container and every container. So each key may end in `.<container>`, and the bare `restore-from` is
only for the container whose name the image records. Everything under `torpor.dev/` is checked, so that a
spelling mistake does not become a silent cold start.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path, PurePosixPath
from typing import Any, Literal, cast

from shim.errors import AdmissionRefused
from shim.pod import identify

PREFIX = "torpor.dev/"
CRIU_PREFIX = "org.criu."
CRIU_OPERATOR = "restore.criu.org/checkpoint-path."

Use = Literal["clone", "move"]
OnFailure = Literal["fail", "cold-start"]
Network = Literal["keep", "keep-closed", "new"]

_VALUES: Mapping[str, tuple[str, ...]] = {
    "use": ("clone", "move"),
    "on-restore-failure": ("fail", "cold-start"),
    "network": ("keep", "keep-closed", "new"),
    "checkpointable": ("true", "false"),
}
_KEYS = ("restore-from", "engine", *_VALUES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What a bundle asks for.

    restore_from: reference of an image, None for a cold start. bare: it came from the annotation without a
    container's name, so it holds only if the image records this container's name (`applies_to`).
    foreign_path: archive that another tool's annotation names, as written. container_name: empty outside
    Kubernetes. sandbox: this is a pod's pause container, for which nothing is asked. named: the containers
    for which a pod that wakes up as a whole names an image, at its pause container.
    """

    restore_from: str | None = None
    bare: bool = False
    foreign_path: Path | None = None
    use: Use | None = None
    on_failure: OnFailure = "fail"
    network: Network | None = None
    engine: str | None = None
    checkpointable: bool = False
    container_name: str = ""
    sandbox: bool = False
    namespace: str = ""
    named: frozenset[str] = frozenset()

    @property
    def restores(self) -> bool:
        """Whether a restore is asked for at all."""
        return self.restore_from is not None or self.foreign_path is not None

    def applies_to(self, recorded_name: str) -> bool:
        """Whether the wish to restore holds for an image taken from a container of this name."""
        return not self.bare or recorded_name == self.container_name


def read(spec: Mapping[str, Any], *, foreign: bool, whole_pod: bool = False) -> Wish:
    """What the annotations of an OCI spec ask for.

    foreign: obey other tools' annotations too. whole_pod: the runtime sleeps and wakes pods as a whole, so
    that the pause container is asked too.
    Raises AdmissionRefused with one sentence for anything that is unknown, malformed or dangerous.
    """
    annotations = _annotations(spec)
    _refuse_criu(annotations)
    pod = identify(annotations)
    name = pod.container_name
    if pod.sandbox and whole_pod:
        return _of_pod(annotations, pod.namespace, foreign=foreign)
    if pod.sandbox:
        return Wish(container_name=name, sandbox=True, namespace=pod.namespace)
    own = _of_container(annotations, name, pod.namespace, foreign=foreign)
    if not whole_pod or not name or own.foreign_path:
        return own
    whole = _of_pod(annotations, pod.namespace, foreign=foreign)
    if own.restore_from:
        return replace(own, use=whole.use)
    if not whole.restore_from:
        return own
    # The image of one is the image of all; `bare`, since it need not hold this container.
    return replace(
        own, restore_from=whole.restore_from, bare=True, use=whole.use, on_failure=whole.on_failure
    )


def _of_container(annotations: Mapping[str, str], name: str, namespace: str, *, foreign: bool) -> Wish:
    asked = _asked(annotations, name)
    restore_from = asked.get("restore-from")
    foreign_path = _foreign_path(annotations, name) if foreign else None
    if restore_from and foreign_path:
        raise AdmissionRefused(
            f"could not read the annotations: both '{PREFIX}restore-from' and another tool's annotation say "
            f"what to restore ('{restore_from[1]}' and '{foreign_path}'); remove one"
        )
    value = {key: pair[1] for key, pair in asked.items()}
    return Wish(
        restore_from=value.get("restore-from"),
        bare=bool(restore_from and name and restore_from[0]),
        foreign_path=foreign_path,
        use=cast("Use | None", value.get("use")),
        on_failure=cast("OnFailure", value.get("on-restore-failure", "fail")),
        network=cast("Network | None", value.get("network")),
        engine=value.get("engine"),
        checkpointable=value.get("checkpointable") == "true",
        container_name=name,
        namespace=namespace,
    )


# --- torpor's own keys ---------------------------------------------------------------------------------


def _of_pod(annotations: Mapping[str, str], namespace: str, *, foreign: bool) -> Wish:
    """What the containers of a pod together ask of their pause container."""
    keys = [key.removeprefix(PREFIX) for key in annotations if key.startswith(PREFIX)]
    names = {key.partition(".")[2] for key in keys} - {""}
    wishes = [_of_container(annotations, name, namespace, foreign=foreign) for name in names or {"-"}]
    asking = [wish for wish in wishes if wish.restore_from]
    images = sorted({wish.restore_from or "" for wish in asking})
    if len(images) > 1:
        raise AdmissionRefused(
            f"could not read the annotations: the pod names the images {', '.join(images)}, but gVisor "
            "restores a pod from one image; name one"
        )
    if not asking:
        return Wish(sandbox=True, namespace=namespace)
    return Wish(
        restore_from=images[0],
        use=asking[0].use if len({wish.use for wish in asking}) == 1 else None,
        on_failure="fail" if any(wish.on_failure == "fail" for wish in asking) else "cold-start",
        network=next((wish.network for wish in asking if wish.network not in {None, "new"}), None),
        sandbox=True,
        namespace=namespace,
        named=frozenset(
            name for key in keys for word, _, name in [key.partition(".")] if word == "restore-from" and name
        ),
    )


def _asked(annotations: Mapping[str, str], name: str) -> dict[str, tuple[bool, str]]:
    """Key to (whether it was the bare form, value), for this container. All keys of the pod are checked."""
    asked: dict[str, tuple[bool, str]] = {}
    for annotation, value in sorted(annotations.items()):
        if not annotation.startswith(PREFIX):
            continue
        key, dot, container = annotation.removeprefix(PREFIX).partition(".")
        if key not in _KEYS or (dot and not container):
            raise AdmissionRefused(_unknown(annotation, key))
        _check_value(annotation, key, value)
        if dot and not name:
            raise AdmissionRefused(
                f"could not read the annotations: '{annotation}' names the container '{container}', but the "
                f"bundle does not say its container's name; use '{PREFIX}{key}'"
            )
        # The form with this container's name comes after the bare one in the order of the loop, and wins.
        if not dot or container == name:
            asked[key] = (not dot, value)
    return asked


def _unknown(annotation: str, key: str) -> str:
    near = get_close_matches(key, _KEYS, n=1, cutoff=0.0)[0]
    return (
        f"could not read the annotations: '{annotation}' is unknown; did you mean '{PREFIX}{near}' or "
        f"'{PREFIX}{near}.<container>'?"
    )


def _check_value(annotation: str, key: str, value: str) -> None:
    allowed = _VALUES.get(key)
    if allowed and value not in allowed:
        near = get_close_matches(value, allowed, n=1)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        raise AdmissionRefused(
            f"could not read the annotations: '{annotation}' is '{value}', but must be one of "
            f"{', '.join(allowed)}{hint}"
        )
    if not allowed and (not value or not value.isprintable() or any(sign.isspace() for sign in value)):
        raise AdmissionRefused(
            f"could not read the annotations: '{annotation}' is {value!r}, but must be "
            f"{'an image reference' if key == 'restore-from' else 'the name of an engine'} without blanks"
        )


def _refuse_criu(annotations: Mapping[str, str]) -> None:
    """Torpor itself sets CRIU's configuration by environment, so none of these is ever its own."""
    for annotation in annotations:
        if annotation.startswith(CRIU_PREFIX):
            raise AdmissionRefused(
                f"could not admit the container: the annotation '{annotation}' would let the pod run "
                "programs as root on the node (CRIU's action scripts); remove it"
            )


# --- the section itself ---------------------------------------------------------------------------------


def _annotations(spec: Mapping[str, Any]) -> Mapping[str, str]:
    found: object = spec.get("annotations") or {}
    if not isinstance(found, dict):
        raise AdmissionRefused("could not read the annotations: they are no JSON object; repair config.json")
    pairs = cast("dict[object, object]", found)
    for key, value in pairs.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise AdmissionRefused(
                f"could not read the annotations: '{key}' has a value that is no text; write it in quotes"
            )
    return cast("Mapping[str, str]", pairs)


# --- other tools' keys ---------------------------------------------------------------------------------


def _foreign_path(annotations: Mapping[str, str], name: str) -> Path | None:
    """The archive that the annotation of the checkpoint-restore operator names."""
    key = f"{CRIU_OPERATOR}{name}"
    if not name or key not in annotations:
        return None
    value = annotations[key]
    path = PurePosixPath(value)
    if not path.is_absolute() or ".." in path.parts or not value.isprintable():
        raise AdmissionRefused(
            f"could not read the annotations: '{key}' is '{value}', but must be an absolute path without '..'"
        )
    return Path(path)
