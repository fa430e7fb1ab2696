"""Real containers under the CRIU engine, for tests: engines per container, restores with pipes, residue."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

from engines.api import EngineSettings, RestoreRequest
from engines.criu.engine import CriuEngine
from tests.support.containers import (
    PREFIX,
    SEARCH_PATH,
    Lab,
    Network,
    Output,
    cgroups,
    live,
    mounts_under,
    processes_with,
    status,
    until,
)


@contextlib.contextmanager
def streams(output: Output) -> Generator[None]:
    """This process's standard streams are a container's while the body runs."""
    kept = [os.dup(number) for number in (0, 1, 2)]
    nothing = os.open(os.devnull, os.O_RDONLY)
    try:
        os.dup2(nothing, 0)
        os.dup2(output.write_fd, 1)
        os.dup2(output.write_fd, 2)
        yield
    finally:
        for number, copy in enumerate(kept):
            os.dup2(copy, number)
            os.close(copy)
        os.close(nothing)
        output.handed_over()


class CriuLab:
    """Containers of one test, with an engine for each."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.runc = lab.runc
        self.image_root = lab.path / "images"
        self.image_root.mkdir()
        self.outputs: dict[str, Output] = {}
        self.bundles: dict[str, Path] = {}
        self.networks: list[Network] = []
        self._rootfs: Path | None = None

    def settings(self, container_id: str, runtime_path: Path | None = None) -> EngineSettings:
        """An engine's settings for a container."""
        return EngineSettings(
            runtime_path=runtime_path or self.runc.program,
            root_path=self.runc.root,
            state_path=self.state_path(container_id),
            search_path=SEARCH_PATH,
            python_path=PREFIX / "python",
        )

    def state_path(self, container_id: str) -> Path:
        return self.lab.path / "state" / container_id

    def engine(self, container_id: str) -> CriuEngine:
        return CriuEngine(self.settings(container_id))

    def network(self) -> Network:
        """A network namespace joined to one for clients."""
        network = self.lab.network(f"n{len(self.networks)}")
        self.networks.append(network)
        return network

    def prepare(
        self, *, netns_path: Path | None = None, args: Sequence[str] = (), name: str = "c", **spec: Any
    ) -> str:
        """A bundle for a new container; all containers of a lab share one rootfs."""
        container_id = self.lab.new_id(name)
        words = list(args) or live("--fill", "1")
        bundle = self.lab.bundle(container_id, words, netns_path=netns_path, rootfs=self._rootfs, **spec)
        self._rootfs = self._rootfs or bundle / "rootfs"
        self.bundles[container_id] = bundle
        return container_id

    def start(
        self, *, netns_path: Path | None = None, args: Sequence[str] = (), name: str = "c", **spec: Any
    ) -> str:
        """Start a container; tests/workloads/live.py unless args say otherwise."""
        container_id = self.prepare(netns_path=netns_path, args=args, name=name, **spec)
        self.outputs[container_id] = self.runc.run(self.bundles[container_id], container_id)
        if not args or "/workloads/live.py" in args:
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
        return self.runc.pid(container_id)

    def ask(self, container_id: str, signal_number: int, answer: str) -> str:
        """Send a signal to the container's init; the line it prints, which starts with `answer`."""
        output = self.outputs[container_id]
        whole = re.compile(rf"^({answer} .*)\n", re.MULTILINE)  # the end of a line may come later
        seen = len(whole.findall(output.text))
        os.kill(self.pid(container_id), signal_number)
        return until(lambda: whole.findall(output.text)[seen:], what=f"prints {answer}")[0]

    def kill(self, container_id: str) -> None:
        """Kill and delete as a runtime caller does."""
        self.runc("kill", container_id, "KILL", check=False)
        pid = self.pid(container_id)
        if pid:
            until(lambda: status(pid, "State")[:1] in ("", "Z"), what=f"{container_id} dies")
        self.runc.delete(container_id)

    def residue(self, container_id: str) -> list[str]:
        """What is left of a container that is gone, in words."""
        state = self.state_path(container_id)
        group = f"tt-{self.lab.tag}/{container_id}"
        left = [f"process {pid}: {line}" for pid, line in processes_with(group, str(state))]
        left += [f"mount {point}" for point in mounts_under(str(self.runc.root / container_id), ".criu.")]
        if (self.runc.root / container_id).exists():
            left.append("runtime state")
        left += [f"cgroup {path}" for path in cgroups(self.lab.tag) if path.name == container_id]
        if (state / "criu-call.json").exists():
            left.append("journal")
        return left

    def yards(self) -> list[str]:
        """CRIU's temporary directories that logs of this lab name and that are still there."""
        found: set[str] = set()
        for log in self.lab.path.glob("state/*/work/*.log"):
            found.update(re.findall(r"/tmp/\.criu\.\w+\.\w{6}", log.read_text(errors="replace")))
        return [name for name in found if Path(name).exists()]
