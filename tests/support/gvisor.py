"""Real containers under the gVisor engine, for tests: engines per container, restores with pipes, residue."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from pathlib import Path
from typing import Any

from engines.api import EngineSettings, RestoreRequest
from engines.gvisor.engine import GvisorEngine
from shim.launcher import RUNSC_ARGS
from tests.support.containers import (
    SEARCH_PATH,
    Lab,
    Output,
    Runc,
    live,
    processes_with,
    tool,
    until,
)
from tests.support.criu import streams
from tests.support.torpor import Torpor

ARGS = tuple(RUNSC_ARGS.split())
_SUM = r"^sum [0-9a-f]{64}$"


class GvisorLab:
    """Containers of one test, with an engine for each, in sandboxes of their own."""

    def __init__(self, lab: Lab) -> None:
        program = lab.path / "runsc-as-set-up"
        program.write_text(f'#!/bin/sh\nexec {shlex.join([str(tool("runsc")), *ARGS])} "$@"\n')
        program.chmod(0o755)
        self.lab = lab
        self.runsc = lab.runc = Runc(lab.path / "runsc", program)
        self.image_root = lab.path / "images"
        self.image_root.mkdir()
        self.outputs: dict[str, Output] = {}
        self.bundles: dict[str, Path] = {}
        self._rootfs: Path | None = None

    def settings(self, container_id: str, runtime_path: Path | None = None) -> EngineSettings:
        """An engine's settings for a container."""
        return EngineSettings(
            runtime_path=runtime_path or tool("runsc"),
            root_path=self.runsc.root,
            state_path=self.state_path(container_id),
            search_path=SEARCH_PATH,
            runtime_args=ARGS,
        )

    def state_path(self, container_id: str) -> Path:
        return self.lab.path / "state" / container_id

    def engine(self, container_id: str) -> GvisorEngine:
        return GvisorEngine(self.settings(container_id))

    def prepare(self, *, netns_path: Path | None = None, args: tuple[str, ...] = (), **spec: Any) -> str:
        """A bundle for a new container; all containers of a lab share one rootfs."""
        container_id = self.lab.new_id()
        words = list(args) or live("--fill", "1")
        bundle = self.lab.bundle(container_id, words, netns_path=netns_path, rootfs=self._rootfs, **spec)
        self._rootfs = self._rootfs or bundle / "rootfs"
        self.bundles[container_id] = bundle
        return container_id

    def start(self, *, netns_path: Path | None = None, args: tuple[str, ...] = (), **spec: Any) -> str:
        """Start a container; tests/workloads/live.py unless args say otherwise."""
        container_id = self.prepare(netns_path=netns_path, args=args, **spec)
        self.outputs[container_id] = self.runsc.run(self.bundles[container_id], container_id)
        if not args:
            until(lambda: self.progress(container_id) > 1, what="the container counts")
        return container_id

    def restore(self, engine: Any, request: RestoreRequest) -> int:
        """Restore with fresh pipes as the container's output; its pid."""
        output = self.outputs[request.container_id] = Output()
        with streams(output):
            return engine.restore(request).pid

    def bundle(self, container_id: str) -> Path:
        return self.bundles[container_id]

    def progress(self, container_id: str) -> int:
        output = self.outputs.get(container_id)
        return output.last_tick() if output else 0

    def pid(self, container_id: str) -> int:
        return self.runsc.pid(container_id)

    def memory(self, container_id: str) -> str:
        """The checksum of what the container remembers."""
        output = self.outputs[container_id]
        seen = len(re.findall(_SUM, output.text, re.MULTILINE))
        for _ in range(10):
            # Asked in the middle of a line, it answers in the middle of that line: then ask again.
            self.runsc("kill", container_id, "USR1")
            with contextlib.suppress(AssertionError):
                return until(
                    lambda: re.findall(_SUM, output.text, re.MULTILINE)[seen:],
                    timeout_s=3,
                    what="prints its checksum",
                )[0]
        raise AssertionError(f"{container_id} does not print its checksum: {output.text[-200:]}")

    def kill(self, container_id: str) -> None:
        """End and remove a container."""
        self.runsc.delete(container_id)
        until(lambda: not self.residue(container_id), what="the killed container is gone")

    def residue(self, container_id: str) -> list[str]:
        """What is left of a container that is gone, in words."""
        left = [
            f"process {pid}: {line}"
            for pid, line in processes_with(container_id)
            if "runsc" in line and str(self.runsc.root) in line
        ]
        left += [f"state {path.name}" for path in self.runsc.root.glob(f"*{container_id}*")]
        if self._rootfs:
            left += [path.name for path in self._rootfs.glob(f".gvisor.filestore.{container_id}")]
        if (self.state_path(container_id) / "gvisor-call.json").exists():
            left.append("journal")
        return left


def launcher_with_network(path: Path, torpor: Torpor) -> Path:
    """A launcher of the same installation whose gVisor has the pod's network.

    runsc 20240729 takes every network namespace of a newer kernel for the root one, by a file in
    /proc/sys/net: it does not see that directory.
    """
    program = path / "runsc-with-network"
    script = f'mount -t tmpfs tmpfs /proc/sys/net; exec {tool("runsc")} "$@"'
    path.mkdir()
    program.write_text(f'#!/bin/sh\nexec unshare -m sh -c {shlex.quote(script)} runsc "$@"\n')
    program.chmod(0o755)
    places = {"STATE": str(torpor.state_path), "STORE": str(torpor.store_path)}
    arguments = RUNSC_ARGS.replace("--network=none", "--network=sandbox")
    return Torpor(path / "torpor", RUNSC=str(program), RUNSC_ARGS=arguments, **places).runtime_runsc


def netns_of(pid: int) -> str:
    """A name of the network namespace a process is in."""
    return os.readlink(f"/proc/{pid}/ns/net")
