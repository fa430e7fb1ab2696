"""The journal of a call to CRIU. Standard library only."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from engines import guard, mountinfo

Verdict = Literal["abort", "hold", "commit"]

CONFIG = "criu.conf"
WORK = "work"


@dataclass(kw_only=True)
class Journal(guard.Journal):
    """One call.

    operation: "checkpoint", "pre-dump" or "restore".
    state: it also names the processes of the call, whose CRIU_CONFIG_FILE points into it.
    began: when, seconds since the epoch.
    image_made: the image directory did not exist before.
    init, init_start: the container's first process and its start time (clock ticks), 0 at a restore.
    groups: the container's cgroups; at a restore known once CRIU is in them, without those that CRIU was
        started in.
    new_groups: cgroup directories that a restore will make.
    was_frozen: by somebody else, before.
    committed: the source was allowed to die, so that the image must be kept; tasks: who was alive then;
        release_network: the lock that the dump left goes when they are dead.
    verdict_path: where the caller keeps its verdict on the call, empty if it keeps none.
    netns: path of the container's network namespace, empty if it makes its own.
    rootfs: of the new container; mounts: what was mounted there, or in the runtime's state, before.
    """

    FILE = "criu-call.json"
    LOCK = "criu-undo.lock"

    operation: str
    container_id: str
    runtime: str
    runtime_args: list[str]
    root: str
    search_path: str
    image: str
    began: float = field(default_factory=time.time)
    image_made: bool = False
    init: int = 0
    init_start: int = 0
    tasks: list[int] = field(default_factory=list[int])
    groups: dict[str, str] = field(default_factory=dict[str, str])
    new_groups: list[str] = field(default_factory=list[str])
    was_frozen: bool = False
    committed: bool = False
    release_network: bool = False
    verdict_path: str = ""
    netns: str = ""
    rootfs: str = ""
    mounts: list[str] = field(default_factory=list[str])

    @property
    def config_path(self) -> str:
        """CRIU's configuration file of the call; also the mark by which its processes are known."""
        return str(Path(self.state, CONFIG))

    @property
    def work_path(self) -> Path:
        """CRIU's work directory of the call: logs and statistics."""
        return Path(self.state, WORK)

    def verdict(self) -> Verdict:
        """What the caller wants of a call that is cut short. What cannot be read is not yet decided."""
        try:
            word = Path(self.verdict_path or os.devnull).read_text().strip()
        except FileNotFoundError:
            return "abort"
        except OSError:
            return "hold"
        return "abort" if word in ("", "abort") else "commit" if word == "commit" else "hold"


def mount_points(*prefixes: str) -> list[str]:
    """Mount points under one of the directories (the directories themselves included)."""
    return [
        mount.point
        for mount in mountinfo.mounts()
        if any(mount.point == top or mount.point.startswith(f"{top}/") for top in prefixes if top)
    ]


def real_path(path: str | Path) -> str:
    """Without links, as mount tables name it."""
    return os.path.realpath(path)
