"""The confusion table, and what it must not show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from tests.truth import covered
from tests.truth.scenario import Row

MAX_WRONG_NO = 0.05  # of all that was refused
MAX_UNKNOWN = 0.10  # of all
N_RESTORED, N_FAILED = 15, 25  # that the full form has at least
ANSWERS = ("yes", "no", "unknown")


@dataclass(frozen=True, kw_only=True)
class Confusion:
    """What was said against what happened: counts by (answer, restored)."""

    counts: dict[tuple[str, bool], int]

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Confusion:
        """Count rows."""
        counts = {(answer, restored): 0 for answer in ANSWERS for restored in (True, False)}
        for row in rows:
            counts[row.predicted.answer, row.happened.restored] += 1
        return cls(counts=counts)

    def happened(self, *, restored: bool) -> int:
        """How many ended so."""
        return sum(self.counts[answer, restored] for answer in ANSWERS)

    @property
    def n(self) -> int:
        """How many there are."""
        return sum(self.counts.values())

    def problems(self, *, full: bool) -> list[str]:
        """What must not be, in words. full: whether there must be enough scenarios of each end."""
        found: list[str] = []
        if wrong := self.counts["yes", False]:
            found.append(f"{wrong} wrong yes")
        refused = self.counts["no", True] + self.counts["no", False]
        if self.counts["no", True] > MAX_WRONG_NO * refused:
            found.append(f"{self.counts['no', True]} wrong no of {refused}, more than {MAX_WRONG_NO:.0%}")
        unknown = self.counts["unknown", True] + self.counts["unknown", False]
        if unknown > MAX_UNKNOWN * self.n:
            found.append(f"{unknown} unknown of {self.n}, more than {MAX_UNKNOWN:.0%}")
        for restored, least, word in ((True, N_RESTORED, "restored"), (False, N_FAILED, "failed")):
            if full and self.happened(restored=restored) < least:
                found.append(f"only {self.happened(restored=restored)} {word}, fewer than {least}")
        return found


def show_row(console: Console, row: Row) -> None:
    """One line for one scenario."""
    mark = "" if row.right else "  <-- wrong" if row.predicted.answer != "unknown" else "  <-- unknown"
    said = ", ".join(row.predicted.rules)
    happened = "restored" if row.happened.restored else f"failed ({row.happened.how})"
    console.print(
        f"{row.scenario.kind:8} {row.scenario.name:58} {row.predicted.answer:8} {happened:22}{said}{mark}",
        style=None if row.right else "bold red",
        soft_wrap=True,
        markup=False,
        highlight=False,
    )
    if row.first:
        console.print(
            f"         played again, since: {row.first}", soft_wrap=True, markup=False, highlight=False
        )
    if not row.right:
        why = row.predicted.message if row.happened.restored else row.happened.message
        console.print(f"         {why}", soft_wrap=True, markup=False, highlight=False)


def show_unmet(console: Console) -> None:
    """The rules that no scenario can meet here, and why."""
    for rule, why in covered.UNMET.items():
        console.print(f"no scenario for {rule}: {why}", soft_wrap=True, markup=False, highlight=False)


def show_table(console: Console, confusion: Confusion) -> None:
    """The confusion table."""
    table = Table(title="the verdict against what really happened")
    table.add_column("torpor said")
    table.add_column("restored", justify="right")
    table.add_column("failed", justify="right")
    for answer in ANSWERS:
        table.add_row(answer, str(confusion.counts[answer, True]), str(confusion.counts[answer, False]))
    table.add_section()
    table.add_row("all", str(confusion.happened(restored=True)), str(confusion.happened(restored=False)))
    console.print(table)
