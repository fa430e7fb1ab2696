"""What there is to work with: the node's driver and GPUs, and a container's processes on them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from engines.api import EngineSettings, EngineUnavailable, Finding, InvalidRequest, NotSupported
from engines.criu import cgroups
from engines.criu.runtime import Container, Runtime
from engines.cuda import devices, holders, records
from engines.cuda import driver as drivers
from engines.cuda.devices import Gpu, Node
from engines.cuda.driver import Driver, DriverError, Way
from engines.cuda.holders import Process, Refused
from engines.cuda.records import Asleep
from engines.cuda.stage import Known
from engines.processes import start_time

_DRIVER_SINCE = (570,)


@dataclass(frozen=True, kw_only=True)
class Found:
    """A container as its GPUs see it. processes: those that hold a GPU, suspended ones too.

    asleep: what is to be recorded once all of them are in host memory.
    """

    container: Container
    groups: cgroups.Groups
    freezer: cgroups.Freezer | None
    frozen: bool
    driver: Driver
    node: Node
    processes: tuple[Process, ...]
    asleep: Asleep

    def running(self) -> list[Known]:
        """Those whose memory is on a GPU."""
        return [(p.pid, p.start) for p in self.processes if p.state == "running"]


def find_driver(settings: EngineSettings, way: Way | None, words: str) -> tuple[Driver, Node]:
    """The driver of this node, and its GPUs. Raises EngineUnavailable."""
    driver = drivers.find(settings.search_path, way)
    if driver is None:
        raise EngineUnavailable(
            f"{words}: neither the Python packages cuda-bindings and nvidia-ml-py nor, with the latter, the "
            "program cuda-checkpoint are installed; in torpor's checkout, pip install '.[cuda]'",
            after="running",
        )
    try:
        node = devices.parse(driver.look())
    except DriverError as error:
        raise EngineUnavailable(
            f"{words}: the GPU driver's NVML does not answer ({error.words()}); look at nvidia-smi",
            after="running",
        ) from error
    if devices.version(node.driver) < _DRIVER_SINCE:
        raise EngineUnavailable(
            f"{words}: the GPU driver is {node.driver}, checkpoints need 570 or later; install a newer one",
            after="running",
        )
    return driver, node


def probe(settings: EngineSettings, way: Way | None) -> tuple[Finding, ...]:
    """What this node allows with GPUs. Never raises."""
    try:
        driver, node = find_driver(settings, way, "could not use GPUs")
    except EngineUnavailable as error:
        cause, _, remedy = str(error).rpartition("; ")
        return (Finding(rule="gpu.driver", severity="refuse", message=cause, remedy=remedy),)
    models = ", ".join(gpu.model for gpu in node.gpus) or "none"
    found = [
        Finding(
            rule="gpu.driver",
            severity="ok",
            message=f"GPU driver {node.driver}, called through the {driver.way}; GPUs: {models}",
        )
    ]
    if not node.gpus:
        found.append(
            Finding(
                rule="gpu.count",
                severity="warn",
                message="there is no GPU on this node",
                remedy="use the engine criu here",
            )
        )
    found += [
        Finding(
            rule="gpu.mig",
            severity="warn",
            message=f"GPU {gpu.uuid} is split (MIG), and what runs on it cannot be checkpointed",
            remedy="switch MIG off on it",
        )
        for gpu in node.gpus
        if gpu.mig
    ]
    return tuple(found)


def find_container(settings: EngineSettings, container_id: str, words: str) -> Container:
    """A container that runs or is paused. Raises InvalidRequest."""
    container = Runtime(settings).state(container_id)
    if container is None:
        raise InvalidRequest(f"{words}: there is no such container; look at the id and the root")
    if container.status not in ("running", "paused"):
        raise InvalidRequest(f"{words}: it is {container.status}; it must run", after="stopped")
    return container


def find(
    settings: EngineSettings, way: Way | None, container_id: str, words: str, *, moving: bool = False
) -> Found:
    """A container and who holds a GPU in it. moving: its GPU memory shall go into host memory.

    Raises InvalidRequest, EngineUnavailable, NotSupported for what is known not to work.
    """
    container = find_container(settings, container_id, words)
    driver, node = find_driver(settings, way, words)
    groups = cgroups.of_container(settings.root_path, container.id, container.pid)
    freezer = cgroups.freezer(groups)
    tasks = cgroups.tasks(groups)
    on_gpu = {pid for gpu in node.gpus for pid in gpu.used} & set(tasks)
    openers = {pid for pid in tasks if holders.open_devices(pid)}
    try:
        suspended = records.read_asleep(settings.root_path / container_id / records.SUSPENDED)
        states = driver.states(tasks)
    except (DriverError, ValueError) as error:
        cause = error.words() if isinstance(error, DriverError) else str(error)
        raise EngineUnavailable(f"{words}: {cause}; see the driver's log", after="running") from error
    recorded = {holder.inner: holder for holder in suspended.holders} if suspended else {}
    processes: list[Process] = []
    unknown: list[int] = []
    for pid in tasks:
        state = states.get(pid)
        if state is None:
            if pid in on_gpu | openers:
                unknown.append(pid)
            continue
        inner = holders.inner_pids(pid)
        if not inner or (state == "running" and pid not in on_gpu | openers):
            continue  # gone, or it knows CUDA but has nothing on a GPU
        used = {gpu.uuid: gpu.used[pid] for gpu in node.gpus if pid in gpu.used}
        if state == "checkpointed":
            if inner not in recorded:
                raise NotSupported(
                    f"{words}: somebody else moved process {pid} ('{holders.comm(pid)}') off its GPU; they "
                    "must move it back first",
                    after="running",
                )
            used = recorded[inner].gpus
        process = Process(
            pid=pid,
            start=start_time(pid),
            inner=inner,
            comm=holders.comm(pid),
            state=state,
            gpus=used,
        )
        processes.append(process)
    try:
        holders.check(processes, node, unknown)
        if moving:
            holders.check_room(processes, groups)
    except Refused as error:
        raise NotSupported(f"{words}: {error}", after="running") from error
    needs = holders.needs(processes, seen(container.pid, node), node)
    return Found(
        container=container,
        groups=groups,
        freezer=freezer,
        frozen=freezer is not None and freezer.is_frozen(),
        driver=driver,
        node=node,
        processes=tuple(processes),
        asleep=Asleep(holders=tuple(process.holder() for process in processes), needs=needs),
    )


def seen(pid: int, node: Node) -> tuple[Gpu, ...]:
    """The GPUs whose device files a process sees; all if it sees none, as on the host."""
    try:
        names = {entry.name for entry in Path(f"/proc/{pid}/root/dev").iterdir()}
    except OSError:
        return node.gpus
    minors = {int(match[1]) for name in names if (match := re.fullmatch(r"nvidia(\d+)", name))}
    return tuple(gpu for gpu in node.gpus if gpu.minor in minors) or node.gpus
