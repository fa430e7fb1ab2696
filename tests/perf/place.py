"""Containers that are put to sleep again and again, by torpor and by its peers, in one lab."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import subprocess
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.containers import SEARCH_PATH, Lab, Output, command, lab, make_rootfs, until
from tests.support.torpor import Torpor

_TICK = re.compile(r"^tick \d+ ([0-9.]+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sleeper:
    """A running container and what it prints."""

    id: str
    output: Output


class Place:
    """A lab whose bundles have an overlay as their root file system, as callers make them.

    criu_config: settings of CRIU for those calls that torpor does not make.
    """

    def __init__(self, inner: Lab, torpor: Torpor, criu_config: Path) -> None:
        self.lab = inner
        self.torpor = torpor
        self.path = inner.path
        self.criu_config = criu_config
        self._lower = make_rootfs(inner.path / "lower")

    def bundle(self, container_id: str, argv: Sequence[str], **annotations: str) -> Path:
        """A bundle over a fresh overlay. argv: as in `make_bundle`; annotations: of torpor, by short name."""
        base = self._overlay(container_id)
        for part in ("upper", "work", "merged"):
            (base / part).mkdir(parents=True)
        options = f"lowerdir={self._lower},upperdir={base}/upper,workdir={base}/work"
        command("mount", "-t", "overlay", "overlay", "-o", options, base / "merged")
        self.lab.on_close(lambda: command("umount", "-l", base / "merged", check=False))
        wanted = {f"torpor.dev/{name.replace('_', '-')}": value for name, value in annotations.items()}
        return self.lab.bundle(container_id, argv, rootfs=base / "merged", annotations=wanted)

    def source(self, argv: Sequence[str], *, timeout_s: float = 60.0) -> Sleeper:
        """A new container that counts."""
        container_id = self.lab.new_id("source")
        output = self.lab.runc.run(self.bundle(container_id, argv), container_id)
        until(lambda: "\ntick " in output.text, timeout_s=timeout_s, what="the container counts")
        return Sleeper(id=container_id, output=output)

    def torpor_runtime(self, *words: str | Path, output: Output | None = None) -> None:
        """Call torpor-runtime. output: the container's, for calls that make one."""
        _call([self.torpor.runtime, "--root", self.lab.runc.root, *words], output, {})

    def runc(self, *words: str | Path, output: Output | None = None) -> None:
        """Call the real runtime."""
        more = {"CRIU_CONFIG_FILE": str(self.criu_config)}
        _call([self.lab.runc.program, "--root", self.lab.runc.root, *words], output, more)

    def checkpoint(self, container_id: str, name: str) -> None:
        """`torpor checkpoint` into the store; the container runs on."""
        self.torpor("checkpoint", container_id, "--root", self.lab.runc.root, "--name", name, "--replace")

    def remove(self, container_id: str) -> None:
        """Delete a container and its bundle."""
        self.torpor_runtime("delete", "--force", container_id)
        base = self._overlay(container_id)
        command("umount", "-l", base / "merged")
        shutil.rmtree(base)

    def _overlay(self, container_id: str) -> Path:
        return self.path / "overlays" / container_id


@contextlib.contextmanager
def place(path: Path, *, runtime: Path | None = None) -> Generator[Place]:
    """A place in an absent directory, emptied at the end. runtime: what torpor takes for the real one."""
    path.mkdir(parents=True)
    criu_config = path / "criu.conf"
    # As torpor has it, for everybody: iptables, which CRIU takes by itself, may not be there.
    criu_config.write_text("network-lock nftables\n")
    settings = {"RUNTIME": str(runtime)} if runtime else {}
    with lab(path) as inner:
        yield Place(inner, Torpor(path / "torpor", **settings), criu_config)


def goes_on(output: Output) -> None:
    """Fail unless the container prints again. Close our copy of its pipe."""
    output.handed_over()
    n_before = len(output.text)
    until(lambda: output.text.find("\ntick ", n_before) > 0, what="the restored container counts")


def longest_gap_s(text: str, since_s: float, until_s: float) -> float:
    """The longest time between two ticks in a stretch of time.

    text: what tests/workloads/memory.py printed. since_s, until_s: monotonic seconds. 0 if there is none.
    """
    times = [float(match) for match in _TICK.findall(text)]
    gaps = (
        later - early for early, later in itertools.pairwise(times) if later > since_s and early < until_s
    )
    return max(gaps, default=0.0)


def _call(words: Sequence[str | Path], output: Output | None, more: Mapping[str, str]) -> None:
    """Run a program. A container that it makes must not inherit a pipe that we read to its end."""
    if output is None:
        command(*words, env=more)
        return
    stream = output.write_fd
    environment = {**os.environ, "PATH": SEARCH_PATH, **more}
    subprocess.run(words, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, check=True, env=environment)
