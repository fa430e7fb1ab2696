"""What a scenario is, what torpor says of it, and what really happens."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from engines.api import Finding

if TYPE_CHECKING:
    from tests.truth.place import World
    from tests.truth.tools import Release

Answer = Literal["yes", "no", "unknown"]
Edit = Callable[[dict[str, Any], Path], object]

_RULE = re.compile(r"\[([a-z]+(?:\.[a-z-]+)+)\]")


def as_it_is(*_: object) -> None:
    """Nothing is changed."""


def counting(*before: str, each: Sequence[str] = ()) -> list[str]:
    """A program that does something and then counts aloud; `each` are its lines at each tick."""
    body = [f"    {line}" for line in each]
    lines = [*before, "import time", "n = 0", "while True:", "    n += 1", *body]
    return [
        "python",
        "-IS",
        "-c",
        "\n".join([*lines, "    print('tick', n, flush=True)", "    time.sleep(0.02)"]),
    ]


@dataclass(frozen=True, kw_only=True)
class Source:
    """A container that is dumped.

    edit: changes its spec and its bundle before it starts. once: each scenario gets an image of its own.
    client: a live one is connected to port 7000. lives_on: the container runs on beside its image.
    tools: that dump it. engine: by which. plain: dumped by the runtime alone, which looks at nothing first;
    what was foreseen of the dump counts with what is said of the image.
    """

    name: str
    args: Sequence[str]
    edit: Edit = as_it_is
    network: Literal["own", "joined", "host"] = "own"
    terminal: bool = False
    client: bool = False
    once: bool = False
    lives_on: bool = False
    tools: Release = ""
    engine: Literal["criu", "criu-cuda", "gvisor"] = "criu"
    plain: bool = False


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """An image and a change of the world. short: it is one of those that the test suite plays."""

    kind: str
    name: str
    source: Source
    change: Callable[[World], object] = as_it_is
    short: bool = False


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What torpor says.

    rules: those that speak against it, or that do not know. told: those that only tell something. message: of
    the refusal. took_s: seconds.
    """

    answer: Answer
    rules: tuple[str, ...] = ()
    told: tuple[str, ...] = ()
    message: str = ""
    took_s: float = 0.0

    @classmethod
    def of(cls, findings: Sequence[Finding], took_s: float) -> Prediction:
        """Of findings, the worst counts."""
        by = {word: list(_rules(findings, word)) for word in ("refuse", "unknown", "warn", "ok")}
        answer: Answer = "no" if by["refuse"] else "unknown" if by["unknown"] else "yes"
        return cls(
            answer=answer,
            rules=tuple(dict.fromkeys(by["refuse"] or by["unknown"])),
            told=tuple(dict.fromkeys(by["warn"] + by["ok"])),
            message="; ".join(finding.message for finding in findings),
            took_s=took_s,
        )

    def beside(self, other: Prediction) -> Prediction:
        """This and another one, of which the worse counts."""
        order = ("no", "unknown", "yes")
        worst = min(self.answer, other.answer, key=order.index)
        rules = [rule for each in (self, other) if each.answer == worst for rule in each.rules]
        return replace(
            other,
            answer=worst,
            rules=tuple(dict.fromkeys(rules)),
            told=(*self.told, *other.told),
            message="; ".join(filter(None, (self.message, other.message))),
        )

    @classmethod
    def refused(cls, message: str, took_s: float) -> Prediction:
        """Of an admission's refusal, which names its rules."""
        rules = tuple(dict.fromkeys(_RULE.findall(message))) or ("an error",)
        return cls(answer="no", rules=rules, message=message, took_s=took_s)


def _rules(findings: Sequence[Finding], severity: str) -> Iterator[str]:
    return (finding.rule for finding in findings if finding.severity == severity)


class NotDumped(Exception):
    """A container could not be dumped. predicted: what had been foreseen."""

    def __init__(self, predicted: Prediction, message: str) -> None:
        super().__init__(message)
        self.predicted = predicted


@dataclass(frozen=True, kw_only=True)
class Happened:
    """What became of a restore.

    how: "runs"; or "error" (the engine failed), "died", "stands still", "other" (it runs and is not what its
    spec asks for). message: why, in words.
    """

    restored: bool
    how: Literal["runs", "error", "died", "stands still", "other"]
    message: str = ""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A scenario that was played. first: why it failed when it was played before, "" if it was not."""

    scenario: Scenario
    predicted: Prediction
    happened: Happened
    took_s: float
    first: str = ""

    @property
    def right(self) -> bool:
        """What was said is what happened."""
        return self.predicted.answer == ("yes" if self.happened.restored else "no")

    def document(self) -> dict[str, Any]:
        """For machines."""
        return {
            "kind": self.scenario.kind,
            "name": self.scenario.name,
            "source": self.scenario.source.name,
            "predicted": self.predicted.answer,
            "rules": list(self.predicted.rules),
            "told": list(self.predicted.told),
            "said": self.predicted.message,
            "verdict_ms": round(self.predicted.took_s * 1000, 1),
            "happened": "restored" if self.happened.restored else "failed",
            "how": self.happened.how,
            "message": self.happened.message,
            "took_s": round(self.took_s, 2),
            "first": self.first,
        }
