"""`./run netlab`: pods sleep, wake up and move under connected clients; a table, and build/netlab.json."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

from rich.console import Console

from tests.netlab import report, room, scenarios
from tests.netlab.pods import build_server
from tests.netlab.report import Row
from tests.perf.figures import machine
from tests.support.containers import CHECKOUT

RESULT = CHECKOUT / "build" / "netlab.json"
ROOT = Path("/run/netlab")  # in the room


def main() -> int:
    """Go into a room, play, print and write."""
    parser = argparse.ArgumentParser(prog="./run netlab", description=__doc__)
    parser.add_argument("--only", action="append", choices=list(scenarios.SCENARIOS), help="play only this")
    parser.add_argument(
        "--short", action="store_true", help="fewer scenarios and rounds, as in the test suite"
    )
    parser.add_argument("--output", type=Path, default=RESULT, help="where the document goes")
    wanted = parser.parse_args()
    if os.geteuid() != 0:
        print("the lab makes namespaces and runs containers: be root", file=sys.stderr)
        return 1
    if room.VARIABLE not in os.environ:
        room.sweep()
        words = room.words([sys.executable, "-m", "tests.netlab", *sys.argv[1:]])
        os.execvpe(words[0], words, room.environment())
    names = wanted.only or list(scenarios.SHORT if wanted.short else scenarios.SCENARIOS)
    return play(names, short=wanted.short, output=wanted.output)


def play(names: list[str], *, short: bool, output: Path) -> int:
    """Play scenarios; 0 if all is as it must be."""
    ROOT.mkdir()
    server = build_server(ROOT / "server")
    plan = (scenarios.short if short else scenarios.full)(ROOT, server)
    console = Console() if sys.stdout.isatty() else Console(width=170)
    facts = machine()
    begun = time.monotonic()
    rows: list[Row] = []
    for name in names:
        with console.status(f"playing: {name}"):
            rows += scenarios.play(plan, name)
    figures = scenarios.figures(rows)
    facts["load_after"] = os.getloadavg()[0]
    facts["took_s"] = round(time.monotonic() - begun, 1)
    document = {
        "schema": 1,
        "machine": facts,
        "rows": [row.document() for row in rows],
        "figures": [
            {"name": each.name, "value": round(each.value, 4), "limit": each.limit, "good": each.good}
            for each in figures
        ],
    }
    output.parent.mkdir(exist_ok=True)
    output.write_text(json.dumps(document, indent=2) + "\n")
    report.show(console, rows)
    console.print(f"kernel {facts['kernel']}, {facts['processors']} processors, {facts['tools']}")
    console.print(f"load before and after: {facts['load']:.2f}, {facts['load_after']:.2f}; {output}")
    console.print(report.summary(rows, figures), soft_wrap=True)
    return 0 if all(row.good for row in rows) and all(each.good for each in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
