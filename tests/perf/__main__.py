"""`./run bench`: every figure as a ratio to a peer in the same run; a table, and build/bench.json."""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.perf import hot_path, memory, share, simulator, start, sweep
from tests.perf.figures import Figure, machine
from tests.support import leaks
from tests.support.containers import CHECKOUT

RESULT = CHECKOUT / "build" / "bench.json"


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(prog="./run bench", description=__doc__)
    parser.add_argument(
        "--only",
        action="append",
        help="measure only this: hot-path, start, memory, share, simulator, sweep",
    )
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies every number of rounds")
    parser.add_argument("--size-mib", type=int, default=1024, help="memory of the large process")
    wanted = parser.parse_args()
    if os.geteuid() != 0:
        print("the benchmarks run containers: be root", file=sys.stderr)
        return 1
    tag = f"torpor-{secrets.token_hex(4)}"
    os.environ[leaks.TAG_VARIABLE] = tag
    path = Path(tempfile.gettempdir()) / tag
    path.mkdir(mode=0o711)

    def rounds(usual: int) -> int:
        return max(1, round(usual * wanted.scale))

    jobs: dict[str, Callable[[], list[Figure]]] = {
        "hot-path": lambda: hot_path.measure(path / "hot", rounds=rounds(200)),
        "share": lambda: share.measure(path / "share", rounds=rounds(15)),
        "start": lambda: start.measure(path / "start", tag, rounds=rounds(20)),
        "memory": lambda: memory.measure(path / "memory", tag, rounds=rounds(5), size_mib=wanted.size_mib),
        "simulator": lambda: simulator.measure(rounds=rounds(15)),
        "sweep": lambda: sweep.measure(path / "sweep", rounds=rounds(5)),
    }
    facts = machine()
    begun = time.monotonic()
    figures: list[Figure] = []
    console = Console() if sys.stdout.isatty() else Console(width=150)
    try:
        for name in wanted.only or jobs:
            with console.status(f"measuring: {name}"):
                figures += jobs[name]()
    finally:
        leaks.unmount(tag)
        leaks.remove_cgroups(tag)
        shutil.rmtree(path, ignore_errors=True)
    facts["load_after"] = os.getloadavg()[0]
    facts["took_s"] = round(time.monotonic() - begun, 1)
    RESULT.parent.mkdir(exist_ok=True)
    document = {"schema": 1, "machine": facts, "figures": [asdict(figure) for figure in figures]}
    RESULT.write_text(json.dumps(document, indent=2) + "\n")
    _show(console, figures, facts)
    return 0


def _show(console: Console, figures: list[Figure], facts: dict[str, object]) -> None:
    table = Table(title="torpor beside its peers (medians)")
    for heading in ("figure", "torpor", "quartiles", "peer", "ratio", "beside", "rounds"):
        number = heading in {"torpor", "quartiles", "peer", "ratio", "rounds"}
        table.add_column(heading, justify="right" if number else "left")
    for figure in figures:
        low, high = (_number(value, figure.unit) for value in figure.spread)
        table.add_row(
            figure.name,
            f"{_number(figure.value, figure.unit)} {figure.unit}",
            f"{low} to {high}",
            f"{_number(figure.peer, figure.unit)} {figure.unit}",
            f"{figure.ratio:.2f}",
            figure.peer_name,
            str(figure.rounds),
        )
    console.print(table)
    tools = facts["tools"]
    console.print(f"{facts['processors']} x {facts['processor']}, kernel {facts['kernel']}, {tools}")
    console.print(f"load before and after: {facts['load']:.2f}, {facts['load_after']:.2f}; {RESULT}")


def _number(value: float, unit: str) -> str:
    return f"{value:.3f}" if unit == "s" else f"{value:.1f}"


if __name__ == "__main__":
    sys.exit(main())
