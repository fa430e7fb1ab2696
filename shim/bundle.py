"""The bundle of a container, and what the real runtime says of it."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shim import shape
from shim.errors import NoContainer, ShimError

CONFIG = "config.json"

Spec = dict[str, Any]
"""A decoded config.json (OCI runtime spec): its own schema is the standard's, not ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeState:
    """What `runc state` prints. pid is 0 for a container that does not run."""

    container_id: str
    status: str
    pid: int
    bundle_path: Path
    raw: Mapping[str, Any]


def read_spec(bundle_path: Path) -> Spec:
    """The spec of a bundle, without its nulls.

    Raises ShimError if there is none, or it is not of the shape that the standard asks for.
    """
    path = bundle_path / CONFIG
    try:
        document = json.loads(_plain(path))
    except OSError as error:
        raise ShimError(f"could not read {path}: {error.strerror}; is this a bundle?") from None
    except (ValueError, RecursionError) as error:
        raise ShimError(f"could not read {path}: it is not JSON ({error})") from None
    try:
        return shape.checked(document)
    except ValueError as error:
        raise ShimError(f"could not read {path}: {error}; correct the bundle") from None


def _plain(path: Path) -> bytes:
    """Content of a regular file: whoever writes into a FIFO is not waited for. Raises OSError, ShimError."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ShimError(f"could not read {path}: it is no regular file; correct the bundle")
        return file.read()


def write_spec(bundle_path: Path, spec: Mapping[str, Any]) -> None:
    """Replace the spec of a bundle at once, keeping the file's owner and mode."""
    path = bundle_path / CONFIG
    status = path.stat()
    temporary = path.with_name(f".{CONFIG}.torpor")
    temporary.write_bytes(json.dumps(spec, separators=(",", ":")).encode("utf-8", "surrogatepass"))
    os.chown(temporary, status.st_uid, status.st_gid)
    temporary.chmod(status.st_mode & 0o7777)
    temporary.replace(path)


def rootfs_path(bundle_path: Path, spec: Mapping[str, Any]) -> Path:
    """Where the root file system of a bundle is mounted on the host."""
    return bundle_path / str(spec.get("root", {}).get("path") or "rootfs")


def namespace_path(spec: Mapping[str, Any], kind: str) -> Path | None:
    """The path of the namespace that the spec tells a container to join, None if it gets its own."""
    for namespace in spec.get("linux", {}).get("namespaces") or ():
        if namespace.get("type") == kind and namespace.get("path"):
            return Path(namespace["path"])
    return None


def ask_runtime(
    runtime_path: Path, runtime_args: Sequence[str], *verb: str
) -> subprocess.CompletedProcess[str]:
    """Run a short verb of the real runtime and return what it printed; its failure is in the return code.

    Raises ShimError if it cannot be run, or does not end within 60 s.
    """
    try:
        return subprocess.run(
            [str(runtime_path), *runtime_args, *verb],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="surrogateescape",
            check=False,
            timeout=60,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ShimError(
            f"could not run `{runtime_path} {' '.join(verb)}`: {error}; run `torpor doctor`"
        ) from None


def processes(runtime_path: Path, root: str, container_id: str) -> list[int]:
    """The processes of a container, as its runtime tells."""
    answer = ask_runtime(runtime_path, ("--root", root), "ps", "--format", "json", container_id)
    return [int(word) for word in answer.stdout.strip("[]\n ").split(",") if word.strip().isdigit()]


def runtime_state(runtime_path: Path, root: str, container_id: str) -> RuntimeState:
    """Ask the real runtime about a container.

    Raises ShimError with the runtime's own sentence: NoContainer where it says that there is none.
    """
    answer = ask_runtime(runtime_path, ("--root", root), "state", container_id)
    if answer.returncode:
        cause = answer.stderr.strip().rpartition("\n")[2] or f"exit status {answer.returncode}"
        kind = NoContainer if "does not exist" in cause else ShimError
        raise kind(f"could not find container '{container_id}' under {root}: {cause}")
    raw: Mapping[str, Any] = json.loads(answer.stdout)
    if raw["id"] != container_id:  # runsc takes the beginning of an id for the id
        raise NoContainer(f"could not find container '{container_id}' under {root}: it does not exist")
    return RuntimeState(
        container_id=container_id,
        status=raw["status"],
        pid=raw.get("pid") or 0,
        bundle_path=Path(raw["bundle"]),
        raw=raw,
    )


def noted_init(root: str, container_id: str) -> tuple[int, int] | None:
    """The first process of a container and its start time (clock ticks), as runc notes it; None if it is not
    runc's, or not noted.
    """
    try:
        document = json.loads(Path(root, container_id, "state.json").read_bytes())
        return int(document["init_process_pid"]), int(document["init_process_start"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def runs(runtime_path: Path, root: str, container_id: str) -> bool:
    """Whether the runtime says that a container runs. Raises ShimError if it does not tell."""
    with contextlib.suppress(NoContainer):
        return runtime_state(runtime_path, root, container_id).status == "running"
    return False


def hostname(uts_path: Path, new: str | None = None) -> str:
    """The host name in a UTS namespace; `new` replaces it first. Raises OSError if it cannot be entered."""
    import socket  # only where a pod shares its host name

    from engines.namespaces import inside

    def ask() -> str:
        if new is not None:
            socket.sethostname(new)
        return socket.gethostname()

    return inside("uts", uts_path, ask)
