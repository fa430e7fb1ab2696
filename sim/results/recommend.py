"""The best policy of a study, as a policy.json for the node that is to run it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from sim.engine.probe import Opening, opening
from sim.engine.terms import first_state, terms
from sim.errors import SimError
from sim.maths import theory
from sim.results import judge
from sim.results.tables import Results
from sim.studies.config import Training
from sim.studies.study import Cell, Study

LOSS = 0.01
"""How much of the best ETTR may be lost before an interval is no longer valid."""


def check(study: Study) -> None:
    """Refuse, before it is run, a study of which no policy can be the best one everywhere.

    Raises:
        SimError: it sweeps anything but policies and their options.

    """
    values: dict[str, set[object]] = {}
    for cell in study.cells:
        for key, value in cell.params.items():
            if not judge.is_policy(key):
                values.setdefault(key, set()).add(value)
    if swept := [key for key, several in values.items() if len(several) > 1]:
        raise SimError(
            f"could not recommend a policy: the study sweeps {', '.join(swept)}, and a node is in one place; "
            "give one value of it"
        )


def recommend(study: Study, results: Results) -> dict[str, Any]:
    """The document of a policy.json.

    Args:
        study: what was run; one that `check` lets pass.
        results: what came out.

    Raises:
        SimError: no policy is to be recommended.

    """
    (group,) = judge.groups(results)
    best = group.best
    if best.flaw:
        raise SimError(f"could not recommend a policy: {group.verdict()}; give others, or more time")
    cell = next(cell for cell in study.cells if cell.name == best.cell.name)
    opened = opening(cell)
    return {
        "schema": 1,
        "policy": {"name": cell.config.policy.name, "options": dict(cell.config.policy.options)},
        "verdict": group.verdict(),
        "objective": {"metric": group.objective.metric, **asdict(best.summary)},
        "not_worse": [one.cell.name for one in group.ranked[1:] if one.tied],
        "interval_s": opened.interval_s,
        "levels": [{"name": name, "every": every} for name, every in opened.levels],
        "triggers": opened.triggers,
        "valid": valid_range(cell, opened),
        "inputs": {"study_sha256": study.sha256, "files": dict(study.files)},
        "seed": results.seed,
        "replications": best.summary.n,
        "versions": dict(results.versions),
    }


def _edge(holds: Callable[[float], bool], toward: float) -> float:
    """The factor between 1 and `toward` up to which something holds, by bisection of its logarithm."""
    if holds(toward):
        return toward
    good, bad = 0.0, math.log(toward)
    for _ in range(60):
        middle = (good + bad) / 2
        good, bad = (middle, bad) if holds(math.exp(middle)) else (good, middle)
    return math.exp(good)


def valid_range(cell: Cell, opened: Opening) -> dict[str, Any] | None:
    """How far MTBF and stall may be from the study's before the interval loses more than `LOSS` of the ETTR.

    By the closed form of one blocking level under exponential failures, against the best interval there. None
    where the policy sets no interval or takes other checkpoints, or nothing is known to compare it with.
    """
    job = cell.config.workload
    if opened.interval_s is None or not isinstance(job, Training):
        return None
    state = first_state(terms(cell.config, job))
    interval_s, mtbf_s, stall_s = opened.interval_s, state.mtbf_s, state.stall_s
    if mtbf_s is None or not stall_s or opened.levels or not opened.plain:
        return None

    def close(mtbf: float, stall: float) -> bool:
        if interval_s + stall > 500 * mtbf:
            return False  # next to nothing is kept, less than a float holds
        kept = theory.exponential_ettr(interval_s, stall, mtbf, state.restart_s)
        best = theory.exponential_ettr(theory.exact_interval(stall, mtbf), stall, mtbf, state.restart_s)
        return kept >= (1 - LOSS) * best

    if not close(mtbf_s, stall_s):
        return None
    mtbf, stall = mtbf_s, stall_s
    return {
        "loss": LOSS,
        "basis": "closed form: exponential failures, one level, blocking checkpoints",
        "mtbf_s": [mtbf * _edge(lambda f: close(mtbf * f, stall), toward) for toward in (1e-3, 1e3)],
        "stall_s": [stall * _edge(lambda f: close(mtbf, stall * f), toward) for toward in (1e-3, 1e3)],
    }
