"""What the simulator says on each row of the validation table."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from sim.maths import theory
from sim.maths.laws import Exponential, Fixed, Lognormal, Weibull
from sim.models import pool, queueing, renewal, spot
from sim.models.regions import Market
from sim.models.renewal import Estimate, Job
from sim.models.replay import Costs, replay
from sim.models.spot import SpotJob
from sim.policies.base import Policy
from sim.policies.interval import Never, Periodic
from sim.policies.spot import Greedy, OnDemand, UniformProgress
from sim.traces import capacity, faults, priced
from sim.validation import published
from sim.validation.played import PLAYED

HOUR, DAY = 3600.0, 86400.0
LLAMA3_RATE = 3.78870e-3 / DAY
META_RATE = 6.5e-3 / DAY
MTTI = 11_135.08  # Llama 3's, seconds

SPOT_WINDOWS = "spot/cbl_aws_2022-10-26.json"
NODE_FAULTS = "infinitehbd/fault_trace.json"
H100_ZONES = "skynomad/h100_16_13zones.tar.gz"

DEADLINES = "skynomad/expected_deadline_sensitivity.csv"
CHECKPOINTS = "skynomad/expected_checkpoint_sensitivity.csv"


@dataclass(frozen=True)
class SpotMeans:
    """Means over every window of every zone: dollars, hours of work."""

    cost: float
    on_demand_h: float
    spot_h: float


class Traces:
    """Public traces below a folder, each read once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._means: dict[str, SpotMeans] = {}

    @cached_property
    def windows(self) -> capacity.Windows:
        return capacity.load_windows(self.folder / SPOT_WINDOWS)

    @cached_property
    def faulty(self) -> faults.Faulty:
        return faults.faulty(faults.load(self.folder / NODE_FAULTS))

    def availability(self, zone: str) -> float:
        """Share of ticks with capacity; not a number for a zone that is not there."""
        return next((z.availability for z in self.windows.zones if z.name == zone), float("nan"))

    def means(self, policy: Policy) -> SpotMeans:
        """What a policy comes to on the windows of "Can't Be Late"."""
        if policy.name not in self._means:
            job = SpotJob(tick_s=self.windows.tick_s)
            outs = [
                spot.run(policy, job, zone.window(start, self.windows.window_ticks))
                for zone in self.windows.zones
                for start in self.windows.starts
            ]
            self._means[policy.name] = SpotMeans(
                sum(out.cost for out in outs) / len(outs),
                sum(out.on_demand_work_s for out in outs) / len(outs) / HOUR,
                sum(out.spot_work_s for out in outs) / len(outs) / HOUR,
            )
        return self._means[policy.name]

    @cached_property
    def h100(self) -> list[Market]:
        return published.markets(priced.load(self.folder / H100_ZONES))

    def furthest(self, policy: str, file: str, column: str) -> float:
        """Largest relative difference of a policy from a published table of SkyNomad."""
        return published.furthest(policy, self.h100, self.folder / file, column)


Rng = np.random.Generator
Measure = Callable[[Rng], Estimate | float]
TraceMeasure = Callable[[Traces], float]


def _ettr(job: Job, law: Exponential | Weibull) -> Measure:
    return lambda rng: renewal.ettr(job, law, rng, 200, 4000)


def _best(stall: float, mtbf: float, restart: float, unit: float = 1.0) -> Measure:
    def measure(rng: Rng) -> float:
        centre = theory.exact_interval(stall, mtbf)
        grid = np.geomspace(centre / 4, centre * 4, 61)
        job = Job(centre, stall, restart)
        return renewal.best_interval(job, Exponential(mtbf), rng, grid, 400_000) / unit

    return measure


def _sampled_mttf(rng: Rng) -> float:
    days = 10_000.0
    return days * 24 / pool.failure_times(Exponential(1 / 6.5e-3), 2048, days, rng).size


def _interruptions(rng: Rng) -> renewal.Array:
    # One process of the summed rate: V09 plays node by node and finds the two alike.
    gaps = Exponential(theory.job_mttf(2048, LLAMA3_RATE)).sample(rng, (2000, 600))
    return (gaps.cumsum(axis=1) < 54 * DAY).sum(axis=1).astype(np.float64)


def _survived(lost: int) -> Measure:
    def measure(rng: Rng) -> float:
        # The first `lost` of a random order of 16 machines; machine m is in pair m // 2.
        gone = rng.random((100_000, 16)).argsort(axis=1)[:, :lost] // 2
        gone.sort(axis=1)
        return 1 - float((np.diff(gone, axis=1) == 0).any(axis=1).mean())

    return measure


def _most_saved(rng: Rng) -> float:
    late_s = rng.uniform(0, 5, 100_000)
    sizes = np.arange(200, 400)
    saved = [bool((size / 2.5 <= 120 - late_s).all()) for size in sizes]
    return float(sizes[saved].max())


def _spares(repair: Fixed | Lognormal) -> Measure:
    return lambda rng: float(pool.spares_needed(2048 * 3.7887e-3, repair, 0.99, rng))


def _queue(which: int) -> Measure:
    return lambda rng: queueing.mean_times((0.3, 0.4), Exponential(1), 1_000_000, rng)[which]


def _wall(rng: Rng) -> Estimate:
    job = Job(116.690 / 60, 5 / 60, 10 / 60)
    return renewal.estimate(renewal.wall_times(job, 500, Exponential(24), rng, 4000))


_META = theory.job_mttf(2048, META_RATE)
_LLAMA3 = Job(theory.exact_interval(30, MTTI), 30, 300)
_ASYNC = Job(600, 5, 300, 120)
_BURSTS = Job(1800, 30, 300)
_LEVELS = theory.multilevel((10, 120), (1 / 7200, 1 / 72000))
_MTNLG_MIN = 530e9 * 12 * 8 / 20e9 / 60
_KV = theory.kv_bytes_per_token(layers=32, kv_heads=8, head_size=128, bytes_per_value=2)


def _closed(value: float) -> Measure:
    return lambda rng: value


MEASURES: dict[str, Measure] = {
    "V01.formula": _closed(theory.daly_higher(5, 24 * 60)),
    "V01.paper": _closed(theory.daly_higher(5, 24 * 60)),
    "V04.formula": _closed(theory.exact_interval(5, 15)),
    "V04.simulation": _best(300, 900, 60, unit=60),
    "V05.formula": _closed(theory.expected_wall(500, 116.690 / 60, 5 / 60, 24, 10 / 60)),
    "V05.simulation": _wall,
    "V08.formula": _closed(theory.daly_higher(60, 20)),
    "V09.formula": _closed(_META / HOUR),
    "V09.simulation": _sampled_mttf,
    "V09.paper": _closed(_META / HOUR),
    "V11.formula": _closed(theory.job_mttf(128, META_RATE) / HOUR),
    "V12.formula": _closed(theory.meta_ettr(_META, 300, 0, 300)),
    "V12.paper": _closed(theory.meta_ettr(_META, 300, 0, 300)),
    "V13.first-order": _closed(theory.meta_ettr(_META, HOUR, 0, 300)),
    "V13.formula": _closed(theory.exponential_ettr(HOUR, 0, _META, 300)),
    "V13.simulation": _ettr(Job(HOUR, 0, 300), Exponential(_META)),
    "V16.mean": lambda rng: float(_interruptions(rng).mean()),
    "V16.spread": lambda rng: float(_interruptions(rng).std(ddof=1)),
    "V18.interval": _closed(_LLAMA3.interval),
    "V18.formula": _closed(theory.exponential_ettr(_LLAMA3.interval, 30, MTTI, 300)),
    "V18.simulation": _ettr(_LLAMA3, Exponential(MTTI)),
    "V18.best": _best(30, MTTI, 300),
    "V20.formula": _closed(theory.exponential_ettr(600, 5, MTTI, 300, 120)),
    "V20.simulation": _ettr(_ASYNC, Exponential(MTTI)),
    "V22.formula": _closed(theory.renewal_ettr(Weibull(0.7, MTTI).survival, MTTI, 1800, 30, 300)),
    "V22.simulation": _ettr(_BURSTS, Weibull(0.7, MTTI)),
    "V24.overhead": _closed(_LEVELS.overhead),
    "V24.local": _closed(_LEVELS.intervals[0]),
    "V24.remote": _closed(_LEVELS.intervals[1]),
    "V24.count": _closed(float(round(_LEVELS.intervals[1] / _LEVELS.intervals[0]))),
    "V27.formula": _closed(theory.prediction_period(60, 36000, 0.85)),
    "V29.checkpoint": _closed(_MTNLG_MIN),
    "V29.checkpoint-paper": _closed(_MTNLG_MIN),
    "V29.waste": _closed(theory.gemini_waste(_MTNLG_MIN, 1 / _MTNLG_MIN, _MTNLG_MIN)),
    "V29.waste-paper": _closed(theory.gemini_waste(_MTNLG_MIN, 1 / _MTNLG_MIN, _MTNLG_MIN)),
    "V30.two": _closed(theory.gemini_placement(16, 2, 2)),
    "V30.two-simulation": _survived(2),
    "V30.three": _closed(theory.gemini_placement(16, 2, 3)),
    "V30.three-simulation": _survived(3),
    "V32.replay": lambda rng: replay(Never(), 600, Costs(0), [(300, 300)]).wall_s,
    "V34.replay": lambda rng: replay(Periodic(60), 600, Costs(1), [(300, 300)]).wall_s,
    "V43.formula": _closed(float(theory.spares(2048, 3.7887e-3, 1, 0.99))),
    "V43.lognormal": _spares(Lognormal(1, 1)),
    "V43.fixed": _spares(Fixed(1)),
    "V44.bytes": _closed(float(_KV)),
    "V44.bandwidth": _closed(theory.kv_break_even(_KV, 8.03e9, 400e12) / 1e9),
    "V47.formula": _closed(theory.notice_capacity(120, 5, 2.5)),
    "V47.simulation": _most_saved,
    "V48.first": _closed(theory.preemptive_mm1((0.3, 0.4), 1)[0]),
    "V48.second": _closed(theory.preemptive_mm1((0.3, 0.4), 1)[1]),
    "V48.first-simulation": _queue(0),
    "V48.second-simulation": _queue(1),
    **PLAYED,
}
"""Row to what is measured for it, with randomness of its own."""

PUBLISHED = {
    "optimal": "Optimal",
    "skynomad": "SkyNomad",
    "skynomad-o": "SkyNomad(o)",
    "up": "UP",
    "up-s": "UP(S)",
    "up-a": "UP(A)",
    "up-ap": "UP(AP)",
}
"""Rows to the names of SkyNomad's tables."""


def _alone(traces: Traces, ratio: float) -> float:
    return published.mean_cost("UP", traces.h100, ratio)


TRACE_MEASURES: dict[str, tuple[str | tuple[str, ...], TraceMeasure]] = {
    "V37.up-cost": (SPOT_WINDOWS, lambda traces: traces.means(UniformProgress()).cost),
    "V37.up-od": (SPOT_WINDOWS, lambda traces: traces.means(UniformProgress()).on_demand_h),
    "V37.up-spot": (SPOT_WINDOWS, lambda traces: traces.means(UniformProgress()).spot_h),
    "V37.up-od-paper": (SPOT_WINDOWS, lambda traces: traces.means(UniformProgress()).on_demand_h),
    "V37.up-spot-paper": (SPOT_WINDOWS, lambda traces: traces.means(UniformProgress()).spot_h),
    "V37.greedy-cost": (SPOT_WINDOWS, lambda traces: traces.means(Greedy()).cost),
    "V37.greedy-od-paper": (SPOT_WINDOWS, lambda traces: traces.means(Greedy()).on_demand_h),
    "V37.greedy-spot-paper": (SPOT_WINDOWS, lambda traces: traces.means(Greedy()).spot_h),
    "V37.od-cost": (SPOT_WINDOWS, lambda traces: traces.means(OnDemand()).cost),
    "V40.availability": (SPOT_WINDOWS, lambda traces: traces.availability("us-west-2a_k80_1")),
    **{
        f"S02.up-{ratio}": (H100_ZONES, functools.partial(_alone, ratio=ratio))
        for ratio in (1.05, 1.1, 1.15, 1.2, 1.3, 1.5, 2.0)
    },
    **{
        f"{row}.{short}": (
            (H100_ZONES, file),
            functools.partial(Traces.furthest, policy=name, file=file, column=column),
        )
        for row, file, column in (
            ("S03", DEADLINES, "deadline_ratio"),
            ("S04", CHECKPOINTS, "checkpoint_size"),
        )
        for short, name in PUBLISHED.items()
    },
    "V41.mean": (NODE_FAULTS, lambda traces: traces.faulty.mean),
    "V41.most": (NODE_FAULTS, lambda traces: float(traces.faulty.most)),
}
"""Row to the trace, or traces, that it needs and what is measured on it."""
