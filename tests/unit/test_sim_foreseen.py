"""Studies of which nobody would see the end are refused before they begin, with the key that is to blame."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from sim.errors import SimError
from sim.maths.laws import Exponential, Fixed, Lognormal, Quantiles, Weibull
from sim.models import regions
from sim.policies.base import Action, Event, RunOn, State
from sim.studies import foreseen, study

Tree = dict[str, Any]
Change = Callable[[Tree], object]


def load(tmp_path: Path, change: Change) -> study.Study:
    tree: Tree = {
        "schema": 1,
        "study": {"name": "much", "horizon": "10d"},
        "cluster": {"nodes": 8, "spares": 2, "racks": 4},
        "failures": [{"kind": "none"}, {"kind": "exponential", "mean": "30d"}],
        "repair": "1h",
        "costs": {"stall": "30s"},
        "job": {},
        "policies": ["daly"],
    }
    change(tree)
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump(tree))
    return study.load(path)


def failures(**one: Any) -> Change:
    return lambda tree: tree.update(failures=[one])


def notices(**one: Any) -> Change:
    return lambda tree: tree.update(notices=[one])


def instead(policy: str, **work: Any) -> Change:
    def change(tree: Tree) -> None:
        del tree["job"]
        tree.update(work, policies=[policy])
        if "spot" in work:
            for key in ("cluster", "failures", "repair", "costs"):
                del tree[key]
            del tree["study"]["horizon"]

    return change


def queue(**one: Any) -> Change:
    return instead("preemption", queue={"classes": [{"name": "a", "nodes": 1, "work": "1h"} | one]})


def spot(**more: Any) -> Change:
    region = {"name": "r", "mean_up": "5h", "mean_down": "2h"}
    base = {"work": "48h", "deadline": "60h", "spot_price": "$1/h", "on_demand_price": "$3/h"}
    return instead("greedy", spot=base | {"regions": [region]} | more)


MUCH: dict[str, tuple[Change, str]] = {
    "failures": (
        lambda tree: tree["failures"][1].update(mean="1us"),
        r"failures\[1\] comes to about 8.6e\+12",
    ),
    "failures of less than a number holds": (failures(kind="exponential", mean="1e-300s"), r"failures\[0\]"),
    "processes": (failures(kind="weibull", shape=0.7, mean="1us", scope="process"), r"failures\[0\]"),
    "racks": (failures(kind="group", scope="rack", mean="1us"), r"failures\[0\]"),
    "a long horizon": (lambda tree: tree["study"].update(horizon="1e300d"), r"failures\[1\]"),
    "maintenance": (
        notices(kind="maintenance", every="1us", lead="1m", lasting="1m"),
        r"notices\[0\]\.every comes to about 8.6e\+11",
    ),
    "maintenance by quantiles": (
        notices(
            kind="maintenance",
            every={"kind": "quantiles", "points": {"p0": "0s", "p100": "1us"}},
            lead="1m",
            lasting="1m",
        ),
        r"notices\[0\]\.every",
    ),
    "spot machines": (notices(kind="spot", mean="1us", away="1us", lead="2m"), r"notices\[0\]"),
    "recall": (
        notices(kind="predictor", precision=0.5, recall=1e-9, lead="2m"),
        r"notices\[0\]\.recall is 1e-09; it must be 0, or 1e-05 or more",
    ),
    "precision": (
        notices(kind="predictor", precision=1e-9, recall=0.5, lead="2m"),
        r"notices\[0\]\.precision is 1e-09; it must be 1e-05 or more",
    ),
    "jobs": (queue(every="1us"), r"queue\.classes\[0\]"),
    "jobs in bursts": (queue(every={"kind": "lognormal", "mean": "1h", "sigma": 15}), r"queue\.classes\[0\]"),
    "jobs at once": (queue(most=10**12), r"queue\.classes\[0\]"),
    "requests": (
        instead("cold-start", inference={"requests": {"rate": "1e12/s"}, "most": 4}),
        r"inference\.requests",
    ),
    "bursts": (
        instead(
            "cold-start",
            inference={
                "requests": {"rate": "1/s", "burst_every": "1s", "burst_for": "1h", "burst_factor": 9},
                "most": 4,
            },
        ),
        r"inference\.requests",
    ),
    "windows": (spot(windows=10**9), r"spot\.windows comes to 3.6e\+11 ticks"),
    "ticks": (spot(tick="1us"), r"spot\.tick comes to"),
    "machines": (
        lambda tree: tree["cluster"].update(nodes=10**30),
        r"cluster\.nodes is 1e\+30; .* at most 1000000",
    ),
    "spares": (lambda tree: tree["cluster"].update(spares=10**12), r"cluster\.spares is 1e\+12"),
    "a seed that no table holds": (lambda tree: tree["study"].update(seed=10**40), r"study\.seed is 1e\+40"),
}


@pytest.mark.parametrize("what", MUCH)
def test_more_than_can_be_played_is_refused_with_its_key(what: str, tmp_path: Path) -> None:
    change, said = MUCH[what]
    with pytest.raises(SimError, match=said):
        load(tmp_path, change)


@pytest.mark.parametrize(
    "change",
    [
        lambda tree: None,
        lambda tree: tree["study"].update(horizon="3650d"),
        # Lives of no length: what bounds them is their repair.
        failures(kind="weibull", shape=0.05, mean="30d"),
        queue(every="1us", most=1000),
        notices(kind="predictor", precision=1e-3, recall=0.0, lead="2m"),
    ],
)
def test_what_can_be_played_is_not(change: Change, tmp_path: Path) -> None:
    assert load(tmp_path, change).cells


@pytest.mark.parametrize(
    "law", [Weibull(0.5, 3.0), Weibull(60.0, 3.0), Lognormal(3.0, 2.0), Quantiles((0, 0.5, 1), (0, 1, 10))]
)
def test_a_law_is_counted_as_often_as_it_happens(law: Any) -> None:
    # Over a long time as often as its mean says; within a short one as its survival does.
    assert foreseen.times(law, 1e6) == pytest.approx(1e6 / law.mean, rel=0.1)
    assert foreseen.shortened(law, 1e-3) == pytest.approx(1e-3, rel=0.2)


def test_times_that_are_the_same_always_or_without_memory_are_exact() -> None:
    assert foreseen.times(Fixed(2.0), 10.0, Fixed(3.0)) == 2.0
    assert foreseen.times(Exponential(2.0), 10.0, Fixed(3.0)) == 5.0


def test_a_file_that_grows_as_it_is_read_is_refused_at_once(tmp_path: Path) -> None:
    lines = ["schema: 1", "study: {name: x}", "a: &a [x, x, x, x, x, x, x, x, x]"]
    lines += [f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]" for a, b in zip("abcdefgh", "bcdefghi", strict=True)]
    path = tmp_path / "study.yaml"
    path.write_text("\n".join(lines))
    with pytest.raises(SimError, match=r"refers to \(\*\) comes to .* values; write fewer"):
        study.load(path)


class Restless:
    """Has an answer to each answer."""

    name = "restless"

    def on_event(self, state: State, event: Event) -> list[Action]:
        return [RunOn("on-demand")]


def test_a_policy_that_answers_each_answer_is_told_to_stop() -> None:
    job = regions.RegionalJob(3600.0, 7200.0)
    with pytest.raises(SimError, match="'restless': at one tick it answers 10000 times"):
        regions.run(Restless(), job, [regions.Market("r", [1] * 20, 1.0, 3.0)])
