"""Which cell of a study is best, by how much, and whether that is more than noise."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sim.maths.statistics import Difference, Summary, paired
from sim.results.drawing import label, short
from sim.results.sweep import Objective, objective
from sim.results.tables import Cell, Results

Value = str | float | int | bool


@dataclass(frozen=True)
class Ranked:
    """A cell beside the best one of its group. `behind`: best less this one, None for the best itself."""

    cell: Cell
    name: str
    summary: Summary
    behind: Difference | None

    @property
    def beside(self) -> str:
        """What there is to say of it beside the best."""
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
        return self.behind is not None and not self.behind.significant


@dataclass(frozen=True)
class Group:
    """Cells that differ by policy and its options alone, the best first. `where`: what else was swept."""

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
        if len(self.ranked) == 1:
            return f"{best.name}: {figure}"
        ties = [one.name for one in self.ranked[1:] if one.tied]
        if ties:
            others = ", ".join(ties[:3]) + (f" and {len(ties) - 3} more" if len(ties) > 3 else "")
            return f"no significant difference between {best.name} ({figure}) and {others}"
        second = self.ranked[1]
        if second.behind is None:
            return f"{best.name}: {figure}"
        ahead = second.behind
        return (
            f"{best.name} is best: {figure}; better than {second.name} by {abs(ahead.mean):.3g} "
            f"± {ahead.ci95:.2g} on the same failures"
        )


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
    ordered = sorted(cells, key=lambda cell: sign * math.fsum(cell.values[judged.metric][:common]))
    best = ordered[0].values[judged.metric]
    # The values say which cell is held against the others, so it is as if all pairs were compared: of equal
    # cells the best differs from the worst as much as any two do.
    pairs = math.comb(len(cells), 2)
    ranked: list[Ranked] = []
    for cell in ordered:
        values = cell.values[judged.metric]
        behind = paired(best[:common], values[:common], pairs) if ranked and common > 1 else None
        ranked.append(Ranked(cell, label(cell, *where), cell.summary(judged.metric), behind))
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
