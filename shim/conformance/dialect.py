"""How the runtime of an engine is called. An engine that is not named here drives runc."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from engines.api import EngineUnavailable
from shim.launcher import RUNSC_ARGS
from shim.toolchain.find import Tools


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """A runtime. args: global options of every call, the engine's as well.

    lacks: wishes of workloads that it cannot grant, and why.
    """

    name: Literal["runc", "runsc"]
    program: Path
    args: tuple[str, ...] = ()
    lacks: Mapping[str, str]


_RUNSC_LACKS = {
    "outside-socket": "a sandbox is given no unix socket of the node",
    "outside-file": "a sandbox is given no file but by mounts",
    "host-ipc": "a sandbox has an IPC namespace of its own",
    "seccomp-filter": "runsc does not apply the spec's seccomp filter",
    "user-namespace": "users are the sandbox's own",
}


def of_engine(name: str, tools: Tools) -> Dialect:
    """The runtime that an engine drives. Raises EngineUnavailable if it is not there."""
    runsc = name == "gvisor"
    program = tools.runsc if runsc else tools.runc
    if program is None:
        word = "runsc" if runsc else "runc"
        raise EngineUnavailable(
            f"could not try engine '{name}': there is no {word} on this node; run `torpor toolchain install`"
        )
    if runsc:
        return Dialect(name="runsc", program=program, args=tuple(RUNSC_ARGS.split()), lacks=_RUNSC_LACKS)
    return Dialect(name="runc", program=program, lacks={})
