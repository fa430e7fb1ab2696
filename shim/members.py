"""Containers of a pod that falls asleep and wakes up as a whole, as gVisor's do.

The image of one of them is the image of all: its pause container's too. So the pod's annotations are obeyed
at the pause container already, and what is awaited then stands in its state: the containers that are in the
image and were not restored yet. Nothing in the pod runs before the last of them has come, and nothing else
can be started in it until then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Generator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from engines.api import CheckpointEngine, Needs
from engines.pods import SANDBOX, PodEngine
from shim import attendant, bundle, state
from shim.annotations import Wish
from shim.errors import AdmissionRefused, ShimError
from shim.images.store import Image
from shim.state import ContainerState


@dataclass(frozen=True)
class Part(Image):
    """An image, seen as that of one of the containers in it."""

    own_needs: Needs

    @cached_property
    def needs(self) -> Needs:
        """What this container asks of a node and a spec."""
        return self.own_needs


def parts(image: Image, engine: CheckpointEngine) -> Mapping[str, Needs]:
    """The needs of each container in an image by its name; empty if it is no pod's. Raises ImageError."""
    return engine.inspect_pod(image.checkpoint_path) if isinstance(engine, PodEngine) else {}


def part(image: Image, name: str, needs: Needs) -> Image:
    """An image as that of the container `name` in it.

    The manifest knows only the container that was asked to sleep: the seccomp profiles of the others are in
    their needs.
    """
    if name == image.manifest.source.container_name:
        return image
    digest = next((task.seccomp_filters[-1] for task in needs.tasks if task.seccomp_filters), "")
    security = replace(image.manifest.security, seccomp_digest=digest)
    manifest = replace(image.manifest, security=security)
    return Part(image.path, image.reference, image.digest, manifest, needs)


def awaited(sandbox_path: Path) -> ContainerState | None:
    """The state of a pod's pause container if that was restored, else None. sandbox_path: torpor's of it."""
    found = state.load(sandbox_path)
    return found if found is not None and found.sandbox_id else None


def check_pod(image: Image, engine: CheckpointEngine, names: Collection[str], wish: Wish) -> None:
    """Raises AdmissionRefused at the pause container for what would be refused at one of the others."""
    words = f"could not restore image '{image.reference}'"
    if wish.network in {"keep", "keep-closed"} and "tcp-established" not in engine.capabilities:
        raise AdmissionRefused(
            f"{words} with network: {wish.network}: engine {engine.name} cannot keep addresses and "
            "connections; use network: new"
        )
    if names and (absent := sorted(wish.named - set(names))):
        raise AdmissionRefused(f"{words} as container '{absent[0]}': {_absent(absent[0], names)}")


def _absent(name: str, names: Collection[str]) -> str:
    there = ", ".join(sorted(filter(None, names)))
    return f"the image is of a pod with {there}, and has no container '{name}'; correct the annotation"


def check_join(
    sandbox_path: Path, image: Image, container_id: str, name: str, names: Collection[str]
) -> None:
    """Raises AdmissionRefused, ShimError if a container cannot be restored in its pod."""
    words = f"could not restore image '{image.reference}' as container '{container_id}'"
    sandbox = awaited(sandbox_path)
    if sandbox is None:
        raise ShimError(f"{words}: its pod was not restored from it, and gVisor restores only whole pods")
    if sandbox.digest != image.digest:
        raise AdmissionRefused(f"{words}: its pod is restored from {sandbox.image}; name the same image")
    if name not in names:
        raise AdmissionRefused(f"{words}: {_absent(name, names)}")
    if name not in sandbox.awaited:
        raise ShimError(
            f"{words}: container '{name}' of the pod was restored before, and gVisor restores a pod only "
            "once; let it start anew with torpor.dev/on-restore-failure: cold-start, or make the pod anew"
        )


def check_cold(sandbox_path: Path, container_id: str, cause: str = "") -> None:
    """Raises ShimError while a pod waits for its containers: another one would be the end of the sandbox.

    cause: why the container is not one that is awaited, if it should have been.
    """
    sandbox = awaited(sandbox_path)
    if sandbox is not None and sandbox.awaited and cause:
        raise ShimError(
            f"{cause}; container '{container_id}' cannot start anew either, since its pod wakes up from "
            f"{sandbox.image} already: make the pod anew without the image"
        )
    if sandbox is not None and sandbox.awaited:
        raise ShimError(
            f"could not create container '{container_id}': its pod wakes up from {sandbox.image}, and gVisor "
            f"starts no other container before {', '.join(sandbox.awaited)} of the image; take init "
            "containers and those that are not in the image out of the pod, or start them later"
        )


def noted(found: ContainerState, sandbox_id: str, name: str, names: Mapping[str, Needs]) -> ContainerState:
    """The state of a container of a pod that is about to be restored."""
    waiting = tuple(sorted(set(names) - {SANDBOX})) if name == SANDBOX else ()
    return replace(found, sandbox_id=sandbox_id, container_name=name, awaited=waiting)


@contextlib.contextmanager
def joining(directory: Path, found: ContainerState) -> Generator[bool]:
    """The frame of a restore in a pod: whether it is the last, which makes the pod run.

    A container but the pause container has its own streams meanwhile. Raises AdmissionRefused, ShimError.
    """
    if found.container_name == SANDBOX:
        yield False
        return
    sandbox_path = directory.parent / found.sandbox_id
    with state.locked(sandbox_path, wait_s=5.0):
        sandbox = awaited(sandbox_path)
        if sandbox is None or found.container_name not in sandbox.awaited:
            raise ShimError(
                f"could not restore container '{found.container_id}': its pod does not wait for it any more; "
                "delete it, and create it again"
            )
        rest = tuple(name for name in sandbox.awaited if name != found.container_name)
        with attendant.streams(directory):
            yield not rest
        state.save(sandbox_path, replace(sandbox, awaited=rest))
    attendant.go(directory)


def attend(
    runtime: list[str],
    directory: Path,
    container_id: str,
    pid_file_path: Path | None,
    *,
    cgroup: str,
    terminal: bool,
) -> None:
    """Give a container that was created in a sandbox its attendant, and the caller its pid.

    runtime: the real runtime with its global options. cgroup, terminal: see `attendant`. Raises OSError; then
    the container is deleted.
    """
    try:
        name = f"torpor-attendant-{container_id}"
        wait = [*runtime, "wait", container_id]
        sandbox = _sandbox_pid(runtime, container_id, pid_file_path)
        pid = attendant.begin(directory, wait, sandbox=sandbox, name=name, terminal=terminal)
        attendant.join(pid, cgroup)
        if pid_file_path:
            draft = pid_file_path.with_name(f".{pid_file_path.name}.torpor")
            draft.write_text(str(pid))
            draft.rename(pid_file_path)
    except BaseException:
        attendant.end(directory)
        bundle.ask_runtime(Path(runtime[0]), runtime[1:], "delete", "--force", container_id)
        raise


def _sandbox_pid(runtime: list[str], container_id: str, pid_file_path: Path | None) -> int:
    """What runsc takes for the pid of a container. Raises ShimError, OSError."""
    if pid_file_path:
        with contextlib.suppress(ValueError):
            return int(pid_file_path.read_text())
    return bundle.runtime_state(Path(runtime[0]), runtime[runtime.index("--root") + 1], container_id).pid
