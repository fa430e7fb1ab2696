"""The confusion table counts right, and none of its limits can be passed unnoticed."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Generator
from dataclasses import replace
from typing import Any, cast

import pytest
from rich.console import Console

from engines.api import Finding, Severity
from tests.truth import catalogue, covered, report
from tests.truth.__main__ import play
from tests.truth.journeys import Journey
from tests.truth.machines import Machines
from tests.truth.place import Place
from tests.truth.report import Confusion
from tests.truth.scenario import Answer, Happened, Prediction, Row, Scenario, Source

SCENARIO = Scenario(kind="spec", name="one", source=Source(name="s", args=("true",)))


def rows(answer: Answer, n: int = 1, *, restored: bool) -> list[Row]:
    how = "runs" if restored else "error"
    happened = Happened(restored=restored, how=how, message="why")
    return [
        Row(scenario=SCENARIO, predicted=Prediction(answer=answer), happened=happened, took_s=0.1)
        for _ in range(n)
    ]


GOOD = [*rows("yes", 20, restored=True), *rows("no", 40, restored=False)]


def problems(*more: Row, full: bool = True) -> list[str]:
    return Confusion.of([*GOOD, *more]).problems(full=full)


def test_all_right():
    assert problems() == []


def test_one_wrong_yes_is_too_many():
    assert problems(*rows("yes", restored=False)) == ["1 wrong yes"]


def test_wrong_noes_up_to_their_share():
    assert problems(*rows("no", 2, restored=True)) == []
    assert problems(*rows("no", 3, restored=True)) == ["3 wrong no of 43, more than 5%"]


@pytest.mark.parametrize("restored", [True, False])
def test_unknown_up_to_its_share(restored: bool):
    assert problems(*rows("unknown", 6, restored=restored)) == []
    assert problems(*rows("unknown", 7, restored=restored)) == ["7 unknown of 67, more than 10%"]


def test_the_full_form_has_enough_of_both():
    few = Confusion.of([*rows("yes", 14, restored=True), *rows("no", 24, restored=False)])
    assert few.problems(full=True) == ["only 14 restored, fewer than 15", "only 24 failed, fewer than 25"]
    assert few.problems(full=False) == []


def finding(rule: str, severity: Severity) -> Finding:
    return Finding(rule=rule, severity=severity, message="m", remedy="r")


def test_the_worst_finding_counts():
    fine, worse, worst = finding("a.b", "warn"), finding("c.d", "unknown"), finding("e.f", "refuse")
    assert Prediction.of([fine], 0).answer == "yes"
    unknown = Prediction.of([fine, worse], 0)
    assert (unknown.answer, unknown.rules, unknown.told) == ("unknown", ("c.d",), ("a.b",))
    no = Prediction.of([worst, worse, worst], 0)
    assert (no.answer, no.rules, no.told) == ("no", ("e.f",), ())


def test_a_refusal_names_its_rules():
    message = "could not admit image 'i': a [x.y]; b [z.w-v]; a [x.y]; what to do: c"
    assert Prediction.refused(message, 0).rules == ("x.y", "z.w-v")
    assert Prediction.refused("it is gone", 0).rules == ("an error",)


def test_the_wrong_ones_are_marked_and_explained():
    text = io.StringIO()
    console = Console(file=text, width=170)
    for row in (*rows("yes", restored=False), *rows("unknown", restored=True), *rows("no", restored=False)):
        report.show_row(console, row)
    wrong, why, unknown, _, right = text.getvalue().splitlines()
    assert wrong.endswith("<-- wrong")
    assert why.strip() == "why"
    assert unknown.endswith("<-- unknown")
    assert "<--" not in right


def test_every_rule_has_a_scenario_or_a_reason_why_not():
    assert covered.MET.keys() | covered.UNMET.keys() == covered.names()
    assert not covered.MET.keys() & covered.UNMET.keys()
    assert all(covered.UNMET.values())
    names = [scenario.name for scenario in catalogue.SCENARIOS]
    assert len(names) == len(set(names)), "a scenario is known by its name"
    assert set(covered.MET.values()) <= set(names)


def test_a_scenario_that_does_not_meet_its_rule_is_named():
    def met(**rules: str) -> list[Row]:
        happened = Happened(restored=False, how="error")
        return [
            Row(
                scenario=replace(SCENARIO, name=covered.MET[rule]),
                predicted=Prediction(answer="no", rules=(rules.get(rule, rule),)),
                happened=happened,
                took_s=0.1,
            )
            for rule in covered.MET
        ]

    assert covered.missed(met()) == []
    assert len(covered.missed([])) == len(covered.MET)
    assert len(covered.missed(met(**{"cpu.features": "cpu.state"}))) == 1


class Stage:
    """A place where one source cannot be dumped."""

    lab: Any

    def __init__(self) -> None:
        self.lab = self

    def on_close(self, _: object) -> None:
        pass

    @contextlib.contextmanager
    def world(self, scenario: Scenario) -> Generator[str]:
        if scenario.name == "bad":
            raise AssertionError("it does not count")
        yield scenario.name

    def predict(self, _: str) -> Prediction:
        return Prediction(answer="yes")

    def force(self, _: str) -> Happened:
        return Happened(restored=True, how="runs")


def test_what_cannot_be_played_is_told_and_keeps_nothing_else_from_being_played():
    stage = cast("Place", Stage())
    scenarios = [replace(SCENARIO, name=name) for name in ("good", "bad", "better")]
    played, spoiled = play(stage, scenarios, Console(file=io.StringIO()))
    assert [row.scenario.name for row in played] == ["good", "better"]
    assert spoiled == {"bad": "it does not count"}


@pytest.mark.parametrize(("second", "right"), [(True, True), (False, False)])
def test_a_stumble_of_an_emulated_machine_is_told_and_played_again(
    second: bool, right: bool, monkeypatch: pytest.MonkeyPatch
):
    ends = [Happened(restored=False, how="error", message="stumbled"), Happened(restored=second, how="runs")]
    journey = Journey(kind="machine", name="far", source=SCENARIO.source, woken_on="max")
    monkeypatch.setattr(Machines, "play", lambda *_: (Prediction(answer="yes"), ends.pop(0)))
    text = io.StringIO()
    ((row,), _) = play(cast("Place", Stage()), [journey], Console(file=text, width=170))
    assert (row.first, row.right) == ("stumbled", right)
    assert "played again, since: stumbled" in text.getvalue()
    assert row.document()["first"] == "stumbled"
    assert ends == []
