"""`./run truth`: images are really dumped, the world is changed, torpor says whether they would restore, and
then they are restored whatever it said. The confusion table comes last; build/truth.json has all.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from engines.api import EngineError
from shim.errors import ShimError
from shim.toolchain.lock import ToolchainError
from tests.perf.figures import machine
from tests.support.containers import CHECKOUT, lab
from tests.truth import catalogue, covered, report
from tests.truth.journeys import Journey
from tests.truth.machines import Machines
from tests.truth.place import Place
from tests.truth.report import Confusion
from tests.truth.scenario import Happened, NotDumped, Row, Scenario
from tests.vm import build, payload
from tests.vm.machine import MachineError

# A source that cannot be dumped, tools or machines that cannot be had: the others are played all the same.
SPOILS = (
    *(AssertionError, OSError, subprocess.SubprocessError, EngineError, ShimError, ToolchainError),
    *(build.BuildFailed, payload.PayloadFailed, MachineError),
)
RESULT = CHECKOUT / "build" / "truth.json"


def main() -> int:
    """Play, print and write; 0 if nothing that torpor said was worse than it may be."""
    parser = argparse.ArgumentParser(prog="./run truth", description=__doc__)
    parser.add_argument("--only", action="append", metavar="PATTERN", help="play scenarios named like this")
    parser.add_argument("--short", action="store_true", help="the few that the test suite plays")
    parser.add_argument("--output", type=Path, default=RESULT, help="where the document goes")
    wanted = parser.parse_args()
    if os.geteuid() != 0:
        print("the scenarios run containers: be root", file=sys.stderr)
        return 1
    full = not wanted.only and not wanted.short
    chosen = [
        scenario
        for scenario in catalogue.SCENARIOS
        if (not wanted.short or scenario.short)
        and (not wanted.only or any(fnmatch.fnmatch(scenario.name, pattern) for pattern in wanted.only))
    ]
    if not chosen:
        print("no scenario is named like this", file=sys.stderr)
        return 2
    console = Console() if sys.stdout.isatty() else Console(width=170)
    facts = machine()
    with tempfile.TemporaryDirectory(prefix="tt-") as folder:
        # A container's mapped root must be able to reach its root file system.
        Path(folder).chmod(0o711)
        with lab(Path(folder)) as place:
            rows, spoiled = play(Place(place), chosen, console)
            tag = place.tag
    facts["load_after"] = os.getloadavg()[0]
    confusion = Confusion.of(rows)
    problems = [*confusion.problems(full=full), *(f"not played: {name}" for name in spoiled)]
    problems += covered.missed(rows) if full else []
    document = {
        "schema": 1,
        "machine": facts,
        "tag": tag,  # in the names of all that was made
        "scenarios": [row.document() for row in rows],
        "confusion": {
            answer: {"restored": confusion.counts[answer, True], "failed": confusion.counts[answer, False]}
            for answer in report.ANSWERS
        },
        "rules": {"met": covered.MET, "not_met": covered.UNMET},
        "spoiled": spoiled,
        "problems": problems,
    }
    wanted.output.parent.mkdir(exist_ok=True)
    wanted.output.write_text(json.dumps(document, indent=2) + "\n")
    console.print(f"load before and after: {facts['load']:.2f}, {facts['load_after']:.2f}; {wanted.output}")
    if full:
        report.show_unmet(console)
    for problem in problems:
        console.print(f"truth: {problem}", style="bold red")
    report.show_table(console, confusion)
    return 1 if problems else 0


def play(place: Place, scenarios: list[Scenario], console: Console) -> tuple[list[Row], dict[str, str]]:
    """Play scenarios one after the other. Returns also why some could not be, by name."""
    rows: list[Row] = []
    spoiled: dict[str, str] = {}
    machines = Machines(place)
    place.lab.on_close(machines.close)
    for scenario in scenarios:
        try:
            row = _row(place, machines, scenario)
            if isinstance(scenario, Journey) and row.predicted.answer == "yes" and not row.right:
                # Emulated processors are slow, and a busy machine makes them stumble: once more, and told.
                row = replace(_row(place, machines, scenario), first=row.happened.message or row.happened.how)
        except SPOILS as error:
            spoiled[scenario.name] = str(error)
            console.print(f"not played: {scenario.name}: {error}", style="bold red", markup=False)
            continue
        report.show_row(console, row)
        rows.append(row)
    return rows, spoiled


def _row(place: Place, machines: Machines, scenario: Scenario) -> Row:
    began = time.monotonic()
    if isinstance(scenario, Journey):
        predicted, happened = machines.play(scenario)
    else:
        try:
            with place.world(scenario) as world:
                predicted, happened = place.predict(world), place.force(world)
        except NotDumped as error:
            predicted, happened = (
                error.predicted,
                Happened(restored=False, how="error", message=str(error)),
            )
    return Row(scenario=scenario, predicted=predicted, happened=happened, took_s=time.monotonic() - began)


if __name__ == "__main__":
    sys.exit(main())
