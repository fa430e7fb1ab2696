"""Containers by containerd's own command."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from tests.support.containerd import Containerd, runc_options
from tests.support.containers import until
from tests.support.counter import COUNTER
from tests.support.torpor import Torpor


class Tasks:
    """Containers of one containerd namespace, which is also their cgroup's parent."""

    def __init__(self, daemon: Containerd, torpor: Torpor, path: Path, runtime: Path | None = None) -> None:
        self.daemon = daemon
        self.torpor = torpor
        self.path = path
        self.runtime = runtime or torpor.runtime
        self.ids: list[str] = []

    def ctr(self, *words: str | Path, check: bool = True) -> str:
        done = self.daemon.ctr(*words, namespace=self.daemon.tag, check=check)
        return done.stdout + done.stderr

    def run(self, container_id: str, *options: str, argv: Sequence[str] = COUNTER, check: bool = True) -> str:
        """`ctr run`; what it printed."""
        image = self.daemon.image("busybox", namespace=self.daemon.tag)
        self.ids.append(container_id)
        runtime = runc_options(self.runtime, self.daemon)
        log = f"file://{self.log_path(container_id)}"
        return self.ctr(
            "run",
            "--detach",
            *runtime,
            "--log-uri",
            log,
            *options,
            image,
            container_id,
            *argv,
            check=check,
        )

    def log_path(self, container_id: str) -> Path:
        return self.path / f"{container_id}.log"

    def numbers(self, container_id: str) -> list[int]:
        path = self.log_path(container_id)
        # The last line may be half written yet.
        lines = path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []
        return [int(line.split()[1]) for line in lines if line.startswith("tick ")]

    def until_number(self, container_id: str, least: int) -> int:
        return until(
            lambda: next((n for n in self.numbers(container_id) if n >= least), 0), what=f"tick {least}"
        )

    def status(self, container_id: str) -> str:
        lines = self.ctr("task", "ls").splitlines()
        return next((line.split()[2] for line in lines if line.split()[0] == container_id), "")

    def remove(self, container_id: str) -> None:
        self.ctr("task", "kill", "--signal", "SIGKILL", container_id, check=False)
        with contextlib.suppress(AssertionError):
            until(lambda: self.status(container_id) in {"", "STOPPED"}, what="the task ends")
        self.ctr("task", "delete", "--force", container_id, check=False)
        self.ctr("container", "delete", container_id, check=False)

    def close(self) -> None:
        for container_id in self.ids:
            self.remove(container_id)
