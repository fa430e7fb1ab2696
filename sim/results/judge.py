"""Which cell of a study is best, by how much, and whether that is more than noise."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import yaml

from sim.maths.statistics import Difference, Summary, paired
from sim.results.drawing import label, short
from sim.results.sweep import Objective, objective
from sim.results.tables import Cell, Results

Value = str | float | int | bool


@dataclass(frozen=True)
class Ranked:
    """A cell beside the best one of its group.

    `behind`: best less this one, None for the best itself. `flaw`: why its figures are not to be compared, ""
    where they are.
    """

    cell: Cell
    name: str
    summary: Summary
    behind: Difference | None
    flaw: str = ""

    @property
    def beside(self) -> str:
        """What there is to say of it beside the best."""
        if self.flaw:
            return self.flaw
        if self.behind is None:
            return "best"
        if self.behind.mean == 0 and self.behind.ci95 == 0:
            return "the same in every run"
        if self.behind.significant:
            return f"{abs(self.behind.mean):.3g} ± {self.behind.ci95:.2g} behind"
        return f"no significant difference (p = {self.behind.p:.2g})"

    @property
    def tied(self) -> bool:
        """Whether nobody can tell it from the best."""
        return self.behind is not None and not self.flaw and not self.behind.significant


@dataclass(frozen=True)
class Group:
    """Cells that differ by policy and its options alone, the best first. `where`: what else was swept.

    Those with a flaw come last, so the first has one only if all do.
    """

    where: Mapping[str, Value]
    ranked: Sequence[Ranked]
    objective: Objective

    @property
    def best(self) -> Ranked:
        """The one with the best mean."""
        return self.ranked[0]

    @property
    def place(self) -> str:
        """Where, in words; "" where nothing but policies was swept."""
        units = self.best.cell.units
        return ", ".join(f"{key} = {short(value, units.get(key, ''))}" for key, value in self.where.items())

    def verdict(self) -> str:
        """Who wins by how much, in one sentence."""
        judged, best = self.objective, self.best
        figure = f"{judged.metric} {best.summary.mean:.4g} ± {best.summary.ci95:.2g}"
        if best.flaw:
            alone = f"{best.name}: {figure}, but {best.flaw}"
            return alone if len(self.ranked) == 1 else f"nobody wins, as each has such runs: {alone}"
        if len(self.ranked) == 1:
            return f"{best.name}: {figure}"
        return self._beside_others(f"{best.name} is best: {figure}", figure) + self._out()

    def _beside_others(self, wins: str, figure: str) -> str:
        """The verdict on those without a flaw."""
        best, others = self.best, [one for one in self.ranked[1:] if not one.flaw]
        if ties := [one.name for one in others if one.tied]:
            return f"no significant difference between {best.name} ({figure}) and {_few(ties)}"
        ahead = others[0].behind if others else None
        if ahead is None:
            return wins
        return (
            f"{wins}; better than {others[0].name} by {abs(ahead.mean):.3g} ± {ahead.ci95:.2g} on the same "
            "failures"
        )

    def _out(self) -> str:
        """Who is out of the comparison, and why."""
        out = [f"{one.name} ({one.flaw})" for one in self.ranked if one.flaw]
        return f"; not compared: {_few(out)}" if out else ""


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def flaw(cell: Cell) -> str:
    """Why a cell must not pass for the best, whatever it is judged by; "" where nothing is wrong.

    A run that ends as livelock is cut short, a job that misses its deadline is cheap because it is not done,
    and a service that serves nobody costs nothing.
    """
    served = zip(cell.values.get("requests", []), cell.values.get("requests_done", []), strict=True)
    for count, what in (
        (cell.statuses.count("livelock"), "livelock"),
        (sum(met < 1 for met in cell.values.get("deadline_met", [])), "deadline missed"),
        (sum(came > 0 and not done for came, done in served), "nobody served"),
    ):
        if count:
            return f"{what} in {count} of {cell.replications} runs"
    return ""


def remark(results: Results) -> str:
    """What all intervals of a study that replays a trace are, in one sentence; "" where it replays none.

    Its runs are moments of one trace, whose windows overlap: many of them tell little of any other time.
    """
    document: Any = yaml.safe_load(results.resolved) or {}
    played = any(_replays(document.get(key)) for key in ("failures", "inference", "spot"))
    return "± 95 % is of this trace alone: another time may differ by more" if played else ""


def _replays(value: object) -> bool:
    """Whether part of a study names a trace: under that key, or as that kind of failures."""
    if isinstance(value, dict):
        inner = cast("dict[str, object]", value)
        return "trace" in inner or any(map(_replays, inner.values()))
    return value == "trace" or (isinstance(value, list) and any(map(_replays, cast("list[object]", value))))


def is_policy(key: str) -> bool:
    """Whether a swept key is the policy or one of its options."""
    return key == "policy" or key.startswith(("policy.", "policies."))


def groups(results: Results) -> list[Group]:
    """Cells by what was swept besides policies, each ranked by what this kind of work is judged by."""
    judged = objective(results.workload)
    found: dict[tuple[tuple[str, Value], ...], list[Cell]] = {}
    for cell in results.cells:
        where = tuple((key, value) for key, value in cell.params.items() if not is_policy(key))
        found.setdefault(where, []).append(cell)
    return [_group(dict(where), cells, judged) for where, cells in found.items()]


def _group(where: Mapping[str, Value], cells: Sequence[Cell], judged: Objective) -> Group:
    sign = -1 if judged.more else 1
    # Cells stop when their own interval is narrow. They are ranked by the replications that all have, or one
    # that met kinder failures later on would pass for better than one that beat it on the same failures.
    common = min(len(cell.values[judged.metric]) for cell in cells)
    flaws = {id(cell): flaw(cell) for cell in cells}
    ordered = sorted(
        cells,
        key=lambda cell: (bool(flaws[id(cell)]), sign * math.fsum(cell.values[judged.metric][:common])),
    )
    best = ordered[0].values[judged.metric]
    # The values say which cell is held against the others, so it is as if all pairs were compared: of equal
    # cells the best differs from the worst as much as any two do.
    pairs = math.comb(len(cells), 2)
    ranked: list[Ranked] = []
    for cell in ordered:
        values = cell.values[judged.metric]
        behind = paired(best[:common], values[:common], pairs) if ranked and common > 1 else None
        summary = cell.summary(judged.metric)
        ranked.append(Ranked(cell, label(cell, *where), summary, behind, flaws[id(cell)]))
    return Group(where, ranked, judged)


@dataclass(frozen=True)
class Effect:
    """What a swept key does to what cells are judged by: the mean over all cells with each of its values."""

    key: str
    unit: str
    means: Mapping[Value, float]

    @property
    def reach(self) -> float:
        """From the least mean to the most."""
        return max(self.means.values()) - min(self.means.values())


def sensitivity(results: Results) -> list[Effect]:
    """Each swept key and its effect, the largest first."""
    judged = objective(results.workload)
    values: dict[str, dict[Value, list[float]]] = {}
    for cell in results.cells:
        mean = cell.summary(judged.metric).mean
        for key, value in cell.params.items():
            values.setdefault(key, {}).setdefault(value, []).append(mean)
    effects = [
        Effect(
            key,
            results.cells[0].units.get(key, ""),
            {value: sum(several) / len(several) for value, several in means.items()},
        )
        for key, means in values.items()
        if len(means) > 1
    ]
    return sorted(effects, key=lambda effect: -effect.reach)
