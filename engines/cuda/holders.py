"""Which processes of a container hold a GPU, and whether they can be put to sleep."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from engines.api import GpuNeed
from engines.criu import cgroups
from engines.cuda.devices import Gpu, Node
from engines.cuda.driver import State
from engines.cuda.records import Holder

DEVICE_PREFIX = "/dev/nvidia"


class Refused(Exception):
    """A known limit of GPU checkpoints; in words, with what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process that holds a GPU. pid: on the host; start: its start time (clock ticks)."""

    pid: int
    start: int
    inner: tuple[int, ...]
    comm: str
    state: State
    gpus: dict[str, int]

    def holder(self) -> Holder:
        """What is recorded of it."""
        return Holder(inner=self.inner, comm=self.comm, gpus=self.gpus)

    def words(self) -> str:
        """For messages."""
        return f"process {self.pid} ('{self.comm}')"


def inner_pids(pid: int) -> tuple[int, ...]:
    """A process's ids in its pid namespaces below the host's; its own if it has none. Empty: it is gone."""
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/status").read_text(errors="replace")
        pids = tuple(int(word) for word in text.partition("\nNSpid:")[2].partition("\n")[0].split())
        return pids[1:] or pids
    return ()


def comm(pid: int) -> str:
    """A process's name, empty if it is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    return ""


def open_devices(pid: int) -> list[str]:
    """GPU device files that a process has open or mapped."""
    found: set[str] = set()
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                found.add(str(Path(entry.path).readlink()))
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
            found.add(line.partition("/dev/")[1] + line.partition("/dev/")[2])
    return sorted(path for path in found if path.startswith(DEVICE_PREFIX))


def check(processes: Sequence[Process], node: Node, unknown: Iterable[int]) -> None:
    """Refuse what is known not to work, before anything is touched.

    unknown: processes with a GPU device open that the driver does not know. Raises Refused.
    """
    if len({process.state == "checkpointed" for process in processes}) > 1:
        raise Refused(
            "some of its processes are suspended while others use a GPU; `torpor gpu resume` it first"
        )
    for process in processes:
        for gpu in node.gpus:
            if gpu.mig and process.pid in gpu.used:
                raise Refused(
                    f"{process.words()} uses GPU {gpu.uuid}, which is split (MIG), and the driver cannot "
                    "checkpoint that; run it on a whole GPU"
                )
            if process.pid in gpu.mps:
                raise Refused(
                    f"{process.words()} uses GPU {gpu.uuid} through MPS, which the driver cannot checkpoint; "
                    "run it without MPS"
                )
        if process.state == "failed":
            raise Refused(f"the driver gave {process.words()} up at an earlier checkpoint; restart it")
        if process.state not in ("running", "checkpointed"):
            raise Refused(
                f"somebody else is checkpointing {process.words()} (it is {process.state}); wait for them"
            )
    for pid in unknown:
        raise Refused(
            f"process {pid} ('{comm(pid)}') has {', '.join(open_devices(pid))} open but does not use CUDA, "
            "and only CUDA can be checkpointed; stop what uses the GPU for graphics or video"
        )


def check_room(processes: Sequence[Process], groups: cgroups.Groups) -> None:
    """Refuse what would end in an OOM kill: GPU memory comes into the processes' own. Raises Refused."""
    wanted = sum(sum(process.gpus.values()) for process in processes if process.state == "running")
    room = [(_available(), "in this machine")]
    if limit := _below_limit(groups):
        room.append((limit, "below its memory limit"))
    left, where = min(room)
    if wanted > left:
        raise Refused(
            f"it holds {wanted >> 20} MiB on GPUs, which must go into host memory, and {left >> 20} MiB are "
            f"left {where}; give it more memory"
        )


def _available() -> int:
    rows = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(rows["MemAvailable"].split()[0]) << 10


def _below_limit(groups: cgroups.Groups) -> int:
    """Bytes that a container may still take, 0 if nobody says. Idle page cache counts as free."""
    for controller, limit, usage, cache in (
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ("", "memory.max", "memory.current", "inactive_file"),
    ):
        path = Path(groups.get(controller, "/nonexistent"))
        with contextlib.suppress(OSError, ValueError):
            most = int((path / limit).read_text())
            stat = dict(line.split() for line in (path / "memory.stat").read_text().splitlines())
            return max(1, most - int((path / usage).read_text()) + int(stat.get(cache, 0)))
    return 0


def needs(processes: Iterable[Process], given: Iterable[Gpu], node: Node) -> tuple[GpuNeed, ...]:
    """The GPUs that processes see, in the node's order: those that they use, and those the container has."""
    used: dict[str, int] = {}
    for process in processes:
        for uuid, size in process.gpus.items():
            used[uuid] = used.get(uuid, 0) + size
    if not used:
        return ()
    seen = {*used, *(gpu.uuid for gpu in given)}
    return tuple(
        GpuNeed(uuid=gpu.uuid, model=gpu.model, memory_bytes=used.get(gpu.uuid, 0), driver=node.driver)
        for gpu in node.gpus
        if gpu.uuid in seen
    )
