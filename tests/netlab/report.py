"""What the lab found: rows for a table, figures with their limits, a document."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.netlab.traffic import Tally


@dataclass(kw_only=True)
class Row:
    """One scenario, or one round of it. phases_ms: how long its steps took; the keys tell."""

    scenario: str
    name: str
    network: str
    moves: int = 1
    tally: Tally = field(default_factory=Tally)
    phases_ms: dict[str, float] = field(default_factory=dict[str, float])
    problem: str = ""  # why it could not be done

    @property
    def good(self) -> bool:
        """It was done, and no connection noticed but by waiting."""
        return not self.problem and self.tally.whole

    def document(self) -> dict[str, Any]:
        """For machines."""
        tally = self.tally
        return {
            "scenario": self.scenario,
            "name": self.name,
            "network": self.network,
            "moves": self.moves,
            "good": self.good,
            "problem": self.problem,
            "connections": tally.n_tcp,
            "bytes_lost": tally.lost * 8,
            "bytes_repeated": tally.repeated * 8,
            "errors": tally.errors,
            "gap_ms": round(tally.gap_s * 1000, 1),
            "longest_gap_ms": round(tally.longest_s * 1000, 1),
            "udp": {
                "flows": tally.n_udp,
                "sent": tally.udp_sent,
                "lost": tally.udp_lost,
                "rate_times_gap": tally.udp_in_gaps,
                "refused": tally.udp_refused,
            },
            "phases_ms": {name: round(value, 1) for name, value in self.phases_ms.items()},
        }


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A number with the limit that it must not pass."""

    name: str
    value: float
    limit: float

    @property
    def good(self) -> bool:
        """Within the limit."""
        return self.value <= self.limit


def medians(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median of each phase over several rounds."""
    return {name: statistics.median(row[name] for row in rows) for name in (rows[0] if rows else ())}


def merge(rows: Sequence[Row]) -> list[Row]:
    """One row for all rounds of a scenario: sums, and medians of the times."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.scenario, row.name, row.network), []).append(row)
    return [
        Row(
            scenario=first.scenario,
            name=first.name + (f", {len(group)} rounds" if len(group) > 1 else ""),
            network=first.network,
            moves=sum(row.moves for row in group),
            tally=Tally.sum([row.tally for row in group]),
            phases_ms=medians([row.phases_ms for row in group]),
            problem=first.problem,
        )
        for group in groups.values()
        for first in group[:1]
    ]


def show(console: Console, rows: Sequence[Row]) -> None:
    """Print the table."""
    table = Table(title="the network lab: what connected clients saw")
    for heading in ("scenario", "network", "TCP", "bytes lost", "twice", "gap ms", "longest", "UDP lost"):
        table.add_column(heading, justify="left" if heading in {"scenario", "network"} else "right")
    table.add_column("phases, ms")
    for row in merge(rows):
        tally = row.tally
        udp = f"{tally.udp_lost} of {tally.udp_sent} (rate x gap {tally.udp_in_gaps})"
        table.add_row(
            row.name,
            row.network,
            str(tally.n_tcp),
            str(tally.lost * 8),
            str(tally.repeated * 8),
            f"{tally.gap_s * 1000:.0f}",
            f"{tally.longest_s * 1000:.0f}",
            udp if tally.n_udp else "",
            row.problem or ", ".join(f"{name} {value:.1f}" for name, value in row.phases_ms.items()),
            style=None if row.good else "bold red",
        )
    console.print(table)
    for row in rows:
        for error in row.tally.errors[:5]:
            console.print(f"{row.name} ({row.network}): {error}", style="red", soft_wrap=True)


def summary(rows: Sequence[Row], figures: Sequence[Figure]) -> str:
    """All that counts, in one line."""
    lost = sum(row.tally.lost for row in rows) * 8
    repeated = sum(row.tally.repeated for row in rows) * 8
    broken = sum(len(row.tally.errors) for row in rows)
    n_tcp = sum(row.tally.n_tcp for row in rows)
    moves = sum(row.moves for row in rows if not row.problem)
    failed = [row.scenario for row in rows if row.problem]
    words = [
        f"{moves} moves under {n_tcp} TCP connections: {lost} bytes lost, {repeated} twice or out of order, "
        f"{broken} connections broken",
        *(f"{each.name} {each.value:.3f} (limit {each.limit:g})" for each in figures),
    ]
    if failed:
        words.append(f"not done: {', '.join(failed)}")
    return "netlab: " + "; ".join(words)
