"""All scenarios. Each changes one thing between a dump and a restore."""

from __future__ import annotations

from tests.truth import (
    dumps,
    files,
    gpus,
    journeys,
    limits,
    losing,
    mounts,
    network,
    node,
    rights,
    sandboxes,
    volumes,
    wording,
)
from tests.truth.scenario import Scenario

SCENARIOS: tuple[Scenario, ...] = (
    *files.SCENARIOS,
    *mounts.SCENARIOS,
    *network.SCENARIOS,
    *rights.SCENARIOS,
    *node.SCENARIOS,
    *limits.SCENARIOS,
    *volumes.SCENARIOS,
    *wording.SCENARIOS,
    *sandboxes.SCENARIOS,
    *gpus.SCENARIOS,
    *dumps.SCENARIOS,
    *losing.SCENARIOS,
    *journeys.JOURNEYS,
)
