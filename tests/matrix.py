"""Writes what survives, kind by kind, into the README: python -m tests.matrix REPORT.json...

Each report is the conformance.json of a full run of `torpor conformance`, and gives one column.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from engines.workloads.catalogue import WORKLOADS

README = Path(__file__).resolve().parents[1] / "README.md"
BEGIN, END = "<!-- matrix -->\n", "<!-- end of matrix -->\n"


# What is different in each run, and says nothing to anybody else.
_PLAIN = (
    (r"\bprocess \d+ \('[^']*'\)", "it"),
    (r", descriptor \d+,", ""),
    (r"\bprocess \d+", "a process"),
    (r"/tmp/tc-[^/ ]*/", "/"),
    (r"\[Errno \d+\] ", ""),
)


def cell(entry: dict[str, str] | None) -> str:
    """One workload of one engine: its result and, without the remedy, the reason."""
    if entry is None:
        return ""
    if entry["result"] == "pass":
        return "passes"
    why = entry["reason"].partition("; ")[0]
    for pattern, words in _PLAIN:
        why = re.sub(pattern, words, why)
    course, colon, rest = why.partition(": ")
    if colon and course in {"twice", "held", "clones"}:
        why = f"{rest} (only {'in the second generation' if course == 'twice' else course})"
    return f"*{entry['result']}*: {why}".replace("|", r"\|")


def line(report: dict[str, Any]) -> str:
    """One engine's run in a sentence."""
    results = [entry["result"] for entry in report["workloads"].values()]
    counts = ", ".join(f"{results.count(word)} {word}" for word in ("pass", "refused", "fail", "absent"))
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    share, tests = report["share"], report["contract"]
    return (
        f"- **{report['engine']}** ({report['made'][:10]}, Linux {report['kernel'].partition('-')[0]}, "
        f"{versions}, {report['seconds'] / 60:.0f} min): of {len(results)} workloads {counts}; "
        f"**{share['percent']:g} % of the {share['of']} that apply pass**. Of the contract's tests "
        f"{tests['pass']} pass, {tests['fail']} fail, {tests['skipped']} do not apply.\n"
    )


def matrix(reports: list[dict[str, Any]]) -> str:
    """The runs and the table, in Markdown."""
    names = [report["engine"] for report in reports]
    rows = [f"| workload | holds | {' | '.join(names)} |", "|---|---|" + "---|" * len(names)]
    for workload in WORKLOADS:
        cells = [cell(report["workloads"].get(workload.name)) for report in reports]
        # What an engine shares with the one on whose shoulders it stands is said once.
        for number, (name, text) in enumerate(zip(names, cells, strict=True)):
            base = name.partition("-")[0]
            if base != name and base in names and text == cells[names.index(base)]:
                cells[number] = f"as {base}"
        rows.append(f"| {workload.name} | {workload.summary} | {' | '.join(cells)} |")
    return "".join(map(line, reports)) + "\n" + "\n".join(rows) + "\n"


def main(paths: list[str]) -> None:
    """Replace what stands between the marks."""
    text = README.read_text()
    before, _, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise SystemExit(f"{README} has no marks around the matrix")
    reports = [json.loads(Path(path).read_text()) for path in paths]
    README.write_text(before + BEGIN + matrix(reports) + END + after)


if __name__ == "__main__":
    main(sys.argv[1:])
