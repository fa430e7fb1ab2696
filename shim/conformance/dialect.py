"""How the runtime of an engine is called. An engine that is not named here drives runc."""

from __future__ import annotations

import subprocess
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

    def versions(self, tools: Tools) -> dict[str, str]:
        """Names and versions of the runtime and, beside runc, of CRIU, as they tell them."""
        programs = {self.name: self.program}
        if self.name == "runc" and tools.criu:
            programs["criu"] = tools.criu
        return {name: _version(program) for name, program in programs.items()}


def _version(program: Path) -> str:
    """The first word of `--version` that has a digit, "unknown" if there is none."""
    done = subprocess.run(
        [program, "--version"], capture_output=True, text=True, errors="replace", check=False
    )
    return next((word for word in done.stdout.split() if any(map(str.isdigit, word))), "unknown")


_RUNSC_LACKS = {
    "outside-socket": "a sandbox is given no unix socket of the node",
    "outside-file": "a sandbox has files of the node as standard streams only, and a restore gives others",
    "host-ipc": "a sandbox has an IPC namespace of its own",
}

# What runsc leaves out by default, so that workloads find it.
_RUNSC_EXTRAS = ("--oci-seccomp", "--net-raw")


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
        args = (*RUNSC_ARGS.split(), *_RUNSC_EXTRAS)
        return Dialect(name="runsc", program=program, args=args, lacks=_RUNSC_LACKS)
    return Dialect(name="runc", program=program, lacks={})
