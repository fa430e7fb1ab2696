"""Which engines there are: the one place that names them.

An engine is imported when it is first asked for. Third parties publish a factory (EngineSettings to
CheckpointEngine) under the entry-point group `torpor.engines`; a built-in name cannot be taken over.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import cast

from engines.api import CheckpointEngine, EngineSettings, EngineUnavailable, NotSupported

GROUP = "torpor.engines"

_BUILT_IN = {
    "criu": "engines.criu.engine:CriuEngine",
    "criu-cuda": "engines.cuda.engine:CudaEngine",
    "gvisor": "engines.gvisor.engine:GvisorEngine",
}
# In this order when nothing else decides.
_CHOICE: tuple[str, ...] = ("criu",)

Factory = Callable[[EngineSettings], CheckpointEngine]


def names() -> tuple[str, ...]:
    """The names of all engines, built-in ones first."""
    from importlib.metadata import entry_points

    others = sorted(point.name for point in entry_points(group=GROUP) if point.name not in _BUILT_IN)
    return (*_BUILT_IN, *others)


def create(name: str, settings: EngineSettings) -> CheckpointEngine:
    """Make the engine of this name. Raises EngineUnavailable if there is none."""
    if name in _BUILT_IN:
        module, _, attribute = _BUILT_IN[name].partition(":")
        factory = cast("Factory", getattr(importlib.import_module(module), attribute))
        return factory(settings)
    # Reading the metadata of every installed package takes 50 ms: only for a name that is not ours.
    from importlib.metadata import entry_points

    for point in entry_points(group=GROUP, name=name):
        return cast("Factory", point.load())(settings)
    raise EngineUnavailable(
        f"could not find engine '{name}': there are {', '.join(names())}; choose one of them"
    )


def choose(settings: EngineSettings, wanted: str | None = None) -> CheckpointEngine:
    """The engine for a dump: the one that is wanted, else the first whose probe refuses nothing.

    Raises EngineUnavailable, with what every engine said. An engine without a rival is not probed: that takes
    longer than a small dump, and the engine refuses what it cannot do by itself.
    """
    if wanted or len(_CHOICE) == 1:
        return create(wanted or _CHOICE[0], settings)
    said: list[str] = []
    for name in _CHOICE:
        engine = create(name, settings)
        refusals = [finding for finding in engine.probe() if finding.severity == "refuse"]
        if not refusals:
            return engine
        said += [f"{name}: {finding.message} ({finding.remedy})" for finding in refusals]
    raise EngineUnavailable(f"could not choose an engine: {'; '.join(said)}; run `torpor doctor`")


def check_dump(engine: CheckpointEngine, container_id: str, *, leave_running: bool, keep_tcp: bool) -> None:
    """Raises NotSupported, before anything is touched, if an engine cannot dump a container this way."""
    if leave_running and "leave-running" not in engine.capabilities:
        cannot = "leave it running; stop it instead"
    elif keep_tcp and not leave_running and "tcp-established" not in engine.capabilities:
        cannot = "keep connections; do without --keep-tcp"
    else:
        return
    raise NotSupported(
        f"could not checkpoint container '{container_id}': engine {engine.name} cannot {cannot}",
        after="running",
    )
