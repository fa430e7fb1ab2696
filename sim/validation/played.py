"""What the event engine says on rows of the validation table: the same cases as the array model's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from sim.engine.dispatch import simulate
from sim.engine.ledger import Outcome
from sim.maths import theory
from sim.maths.laws import Constant, Exponential, Law, Weibull
from sim.models.renewal import Estimate, Job, estimate
from sim.studies.config import (
    Cluster,
    Config,
    Costs,
    NodeFailures,
    PolicySpec,
    Storage,
    TraceFailures,
    Training,
)
from sim.studies.study import Cell

HOUR, DAY = 3600.0, 86400.0
MTTI = 11_135.08
LLAMA3_NODE = 1000 * DAY / 3.78870
"""Seconds between failures of a node."""

Rng = np.random.Generator
Played = Callable[[Rng], Estimate | float]


def _config(job: Job, law: Law, **more: Any) -> Config:
    """One node that is whole again at once."""
    base: dict[str, Any] = {
        "cluster": Cluster(1),
        "workload": Training(1),
        "policy": PolicySpec("asynchronous" if job.persist else "periodic", {"interval": job.interval}),
        "failures": (NodeFailures(law),),
        "storage": (Storage("remote", stall=Constant(job.stall), persist=Constant(job.persist)),),
        "costs": Costs(restart=Constant(job.restart), async_stall=Constant(job.stall)),
    }
    return Config(**(base | more))


def _outcomes(config: Config, replications: int) -> list[Outcome]:
    return [simulate(Cell("validation", {}, config), number) for number in range(replications)]


def _seed(rng: Rng) -> int:
    return int(rng.integers(2**31))


def share_kept(config: Config, replications: int) -> Estimate:
    """ETTR over replications, with its standard error as a ratio of means."""
    outs = _outcomes(config, replications)
    good = np.array([out.buckets["goodput"] for out in outs])
    wall = np.array([out.metrics["wall_s"] for out in outs])
    ratio = float(good.sum() / wall.sum())
    return Estimate(ratio, estimate((good - ratio * wall) / float(wall.mean())).error)


def _ettr(job: Job, law: Law) -> Played:
    # Long enough that the first start and the work in memory at the end are far below the error.
    return lambda rng: share_kept(_config(job, law, horizon_s=1000 * law.mean, seed=_seed(rng)), 10)


def _wall(rng: Rng) -> Estimate:
    work = Training(1, 500 * HOUR, final_checkpoint=True)
    config = _config(Job(116.690 * 60, 300, 600), Exponential(DAY), workload=work, seed=_seed(rng))
    return estimate(np.array([out.metrics["wall_s"] / HOUR for out in _outcomes(config, 200)]))


def _interruptions(rng: Rng) -> Estimate:
    config = _config(
        Job(797.5, 30, 300),
        Exponential(LLAMA3_NODE),
        cluster=Cluster(2048),
        workload=Training(2048),
        horizon_s=54 * DAY,
        seed=_seed(rng),
    )
    return estimate(np.array([out.metrics["failures"] for out in _outcomes(config, 30)]))


def _two_levels(rng: Rng) -> float:
    config = Config(
        Cluster(1),
        Training(1),
        PolicySpec("multilevel"),
        failures=(NodeFailures(Exponential(7200), process=True), NodeFailures(Exponential(72000))),
        storage=(
            Storage("local", stall=Constant(10), lost_with="node"),
            Storage("remote", stall=Constant(120)),
        ),
        horizon_s=200 * DAY,
        seed=_seed(rng),
    )
    return 1 / share_kept(config, 2).mean - 1


def _once(policy: str, options: dict[str, object]) -> Played:
    config = Config(
        Cluster(1),
        Training(1, 600),
        PolicySpec(policy, options),
        failures=(TraceFailures("OpenDC", ((300.0, 300.0, 0),), 1e9),),
        storage=(Storage("remote", stall=Constant(1)),),
    )
    return lambda rng: _outcomes(config, 1)[0].metrics["wall_s"]


_META = theory.job_mttf(2048, 6.5e-3 / DAY)

PLAYED: dict[str, Played] = {
    "V05.engine": _wall,
    "V13.engine": _ettr(Job(HOUR, 0, 300), Exponential(_META)),
    "V16.engine": _interruptions,
    "V18.engine": _ettr(Job(theory.exact_interval(30, MTTI), 30, 300), Exponential(MTTI)),
    "V20.engine": _ettr(Job(600, 5, 300, 120), Exponential(MTTI)),
    "V22.engine": _ettr(Job(1800, 30, 300), Weibull(0.7, MTTI)),
    "V24.engine": _two_levels,
    "V32.engine": _once("none", {}),
    "V34.engine": _once("periodic", {"interval": 60.0}),
}
"""Row to what the event engine says of it, with randomness of its own."""
