"""delete of a container that torpor restored, holds, attends, or failed to restore."""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path

from engines.api import EngineUnavailable
from shim import bundle, state
from shim.errors import Busy, ShimError, Undecided
from shim.verbs.context import Context

WAIT_S = 15.0
_SAID_S = 3.0
_MNT_DETACH, _UMOUNT_NOFOLLOW = 2, 8


def serve(context: Context) -> int | None:
    """Delete the container, then forget it.

    A held container counts as created, so it needs no --force. What a killed restore left behind is undone:
    tasks, mounts and network lock, then addresses, host name and root file system. With --force a restore at
    work is interrupted.
    """
    force = "force" in context.call.options
    directory = context.directory
    if state.undecided(directory):
        raise Undecided("delete", context.container_id, "is leaving for")
    if force and not _says_so_itself(directory):
        state.interrupt(directory)
    with contextlib.ExitStack() as lock:
        try:
            lock.enter_context(state.locked(directory, wait_s=WAIT_S if force else 1.0))
        except FileNotFoundError:
            return None  # it went away between the entry point's look and ours
        found = state.load(directory)
        # Before the runtime deletes: below a half-made restore its root file system is mounted again.
        engine = found.engine if found is not None else state.engine_at_work(directory)
        if engine is not None:
            with contextlib.suppress(EngineUnavailable):  # gone from the node, and what it left with it
                context.engine(engine).undo(context.container_id)
        held = (directory / state.HELD).exists() or (found is not None and found.phase != "running")
        attended = (directory / state.ATTENDANT).exists()
        if held and not force:  # one that runs is not: a `start` that had let it run was killed
            with contextlib.suppress(ShimError):  # it does not tell: then nobody is killed for that
                force = not bundle.runs(context.config.runtime_path, context.call.root, context.container_id)
        # A caller that saw the attendant end takes the container for ended.
        flags = ("--force",) if force or (attended and _unattended(directory)) else ()
        if attended and flags:  # before: it may be in a control group that the runtime removes
            from shim import attendant

            attendant.end(directory)
        guest = found is not None and bool(found.promised) and held
        rootfs_path = _rootfs_path(context) if attended else None
        answer = bundle.ask_runtime(
            context.config.runtime_path,
            (*context.config.runtime_args, *context.runtime_args, "--root", context.call.root),
            "delete",
            *flags,
            context.container_id,
        )
        if answer.returncode and "does not exist" not in answer.stderr:
            cause = answer.stderr.strip().rpartition("\n")[2]
            raise ShimError(f"could not delete container '{context.container_id}': {cause}")
        # Now that no socket of its is left, and nothing holds its root file system.
        if found is not None and found.phase == "restoring":
            from shim import restore  # seldom

            restore.undo_around(context.config, found, directory, context.engine_settings.search_path)
        elif guest:
            from shim import network

            network.clear(context.config, directory, context.engine_settings.search_path)
        if (directory / state.UPPER).exists():  # its `create` was killed when it was through
            from shim.images import undo

            undo.forget(directory / state.UPPER)
        if rootfs_path is not None:
            # A sandbox that lives on keeps a file of its own open in there, and the caller's unmount would
            # fail for as long. What is not mounted any more it takes for unmounted.
            ctypes.CDLL(None).umount2(os.fsencode(rootfs_path), _MNT_DETACH | _UMOUNT_NOFOLLOW)
        state.remove(directory)
    return 0


def _rootfs_path(context: Context) -> Path | None:
    """Where the root file system of a container in a gVisor pod is mounted, None if that is not known."""
    try:
        found = bundle.runtime_state(context.config.runtime_path, context.call.root, context.container_id)
        bundle_path = Path(str(found.raw["bundle"]))
        return bundle.rootfs_path(bundle_path, bundle.read_spec(bundle_path))
    except (ShimError, KeyError):
        return None


def _says_so_itself(directory: Path) -> bool:
    """Whether a call that restores into this pod ended by itself, with the cause, as where the sandbox died.

    Its caller would hear nothing of one that is interrupted.
    """
    found = state.load(directory)
    if found is None or not found.awaited:
        return False
    with contextlib.suppress(Busy, FileNotFoundError), state.locked(directory, wait_s=_SAID_S):
        return True
    return False


def _unattended(directory: Path) -> bool:
    from shim import attendant

    return attendant.find(directory) is None
