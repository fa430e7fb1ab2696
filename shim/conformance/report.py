"""The report of a conformance run: JSON for machines, one self-contained page for people."""

from __future__ import annotations

import datetime
import html
import json
import platform
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engines.conformance import Outcome, Result, verdict
from engines.workloads.catalogue import WORKLOADS

SCHEMA = 1

_MARKS: Mapping[Result, str] = {"pass": "✓", "refused": "⊘", "fail": "✗", "absent": "–", "skipped": "·"}
_WORDS: Mapping[Result, str] = {
    "pass": "came back as it was",
    "refused": "refused beforehand with a reason; the container was not touched",
    "fail": "went wrong",
    "absent": "this node cannot supply it",
    "skipped": "not asked for, or the engine does not declare it",
}

_TILES: tuple[Result, ...] = ("pass", "refused", "fail", "absent")
_APPLY: tuple[Result, ...] = ("pass", "refused", "fail")
_STYLE = Path(__file__).with_name("report.css")


@dataclass(frozen=True, slots=True)
class Share:
    """How many of the workloads that this node can supply pass."""

    passed: int
    of: int

    @property
    def percent(self) -> float:
        """In percent, 0 where there is none."""
        return round(100 * self.passed / self.of, 1) if self.of else 0.0


def share(outcomes: Sequence[Outcome]) -> Share:
    """The share of workloads that pass. What is absent or was skipped does not count."""
    subjects = by_subject(outcomes)
    subjects.pop("contract", None)
    verdicts = [verdict(rows) for rows in subjects.values()]
    return Share(verdicts.count("pass"), sum(result in _APPLY for result in verdicts))


def document(
    engine: str, versions: Mapping[str, str], outcomes: Sequence[Outcome], seconds: float
) -> dict[str, Any]:
    """The whole run, for machines. versions: of torpor and of the programs that the engine drives."""
    part = share(outcomes)
    return {
        "schema": SCHEMA,
        "engine": engine,
        "versions": dict(versions),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "made": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "seconds": round(seconds, 1),
        "contract": _count([outcome for outcome in outcomes if outcome.subject == "contract"]),
        "share": {"passed": part.passed, "of": part.of, "percent": part.percent},
        "workloads": {
            subject: {"result": verdict(rows), "reason": reason(rows)}
            for subject, rows in by_subject(outcomes).items()
            if subject != "contract"
        },
        "outcomes": [asdict(outcome) for outcome in outcomes],
    }


def by_subject(outcomes: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    """Outcomes of each workload, and those of the contract."""
    found: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        found.setdefault(outcome.subject, []).append(outcome)
    return found


def reason(rows: Sequence[Outcome]) -> str:
    """Why a workload's verdict is what it is; empty if it passed."""
    result = verdict(rows)
    if result == "pass":
        return ""
    outcome = next(row for row in rows if row.result == result)
    # What every refusal begins with says nothing about this one.
    _, _, cause = outcome.reason.partition("': ")
    words = cause if outcome.result == "refused" and cause else outcome.reason
    # Where the other courses went differently, this one is named.
    return words if {row.result for row in rows} <= {result, "skipped"} else f"{outcome.course}: {words}"


def _count(outcomes: Sequence[Outcome]) -> dict[str, int]:
    return {result: sum(outcome.result == result for outcome in outcomes) for result in _MARKS}


def prepare(folder: Path) -> None:
    """Make a folder for a report, and see that files can be written there. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


def write(folder: Path, content: dict[str, Any], outcomes: Sequence[Outcome]) -> tuple[Path, Path]:
    """Write conformance.json and conformance.html into a folder. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    as_json, page = folder / "conformance.json", folder / "conformance.html"
    as_json.write_text(json.dumps(content, indent=1) + "\n")
    page.write_text(_page(content, outcomes))
    return as_json, page


def _page(content: dict[str, Any], outcomes: Sequence[Outcome]) -> str:
    subjects = by_subject(outcomes)
    contract = subjects.pop("contract", [])
    verdicts: list[Result] = [verdict(rows) for rows in subjects.values()]
    courses = list(dict.fromkeys(row.course for rows in subjects.values() for row in rows))
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        '<meta name=viewport content="width=device-width,initial-scale=1">',
        f"<title>Conformance of {_safe(content['engine'])}</title><style>{_STYLE.read_text()}</style><main>",
        f"<h1>What survives a checkpoint with {_safe(content['engine'])}</h1>",
        f"<p class=sub>{_versions(content['versions'])} · Linux {_safe(content['kernel'])} · "
        f"{_safe(content['machine'])} · {_safe(content['made'])} · {content['seconds']:.0f} s</p>",
        _tiles(verdicts, contract, content["share"]),
        _legend(),
    ]
    if subjects:
        parts.append("<h2>Workloads</h2>" + _matrix(subjects, courses))
    if contract:
        parts.append("<h2>The engine contract</h2>" + _tests(contract))
    parts.append(
        "<footer>Made by <code>torpor conformance</code>, from real containers on one node.</footer>"
    )
    return "".join([*parts, "</main></html>\n"])


def _versions(versions: Mapping[str, str]) -> str:
    return " · ".join(_safe(f"{name} {version}") for name, version in versions.items())


def _tiles(verdicts: Sequence[Result], contract: Sequence[Outcome], part: Mapping[str, Any]) -> str:
    tiles = "".join(
        f"<div class='tile {result}'><b>{verdicts.count(result)}</b><span>workloads {result}</span></div>"
        for result in _TILES
    )
    tiles += f"<div class=tile><b>{part['percent']:g} %</b><span>pass of {part['of']} that apply</span></div>"
    if contract:
        good, all_tests = sum(row.result == "pass" for row in contract), len(contract)
        tiles += f"<div class=tile><b>{good}/{all_tests}</b><span>contract tests pass</span></div>"
    bar = "".join(
        f"<i class={result} style='width:{100 * verdicts.count(result) / part['of']:.2f}%'></i>"
        for result in _APPLY
        if part["of"]
    )
    return f"<div class=tiles>{tiles}</div><div class=bar>{bar}</div>"


def _legend() -> str:
    lines = "".join(f"<li>{_mark(result)} {result}: {words}</li>" for result, words in _WORDS.items())
    return f"<ul class=legend>{lines}</ul>"


def _matrix(subjects: Mapping[str, Sequence[Outcome]], courses: Sequence[str]) -> str:
    head = "".join(f"<th>{_safe(course)}</th>" for course in courses)
    summaries = {workload.name: workload.summary for workload in WORKLOADS}
    lines: list[str] = []
    for name, rows in subjects.items():
        cells = {row.course: row for row in rows}
        marks = "".join(
            f"<td class=c>{_mark(cells[course].result, cells[course].reason)}</td>"
            if course in cells
            else "<td class=c></td>"
            for course in courses
        )
        lines.append(
            f"<tr><td class=n>{_safe(name)}<small>{_safe(summaries.get(name, ''))}</small></td>{marks}"
            f"<td class=why>{_safe(reason(rows))}</td></tr>"
        )
    return (
        f"<div class=card><table><thead><tr><th>workload</th>{head}<th>reason</th></tr></thead>"
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def _tests(contract: Sequence[Outcome]) -> str:
    lines = "".join(
        f"<tr><td class=c>{_mark(row.result)}</td><td>{_safe(row.course.replace('_', ' '))}</td>"
        f"<td class=why>{_safe(row.reason)}</td></tr>"
        for row in contract
    )
    return f"<div class=card><table><tbody>{lines}</tbody></table></div>"


def _mark(result: Result, title: str = "") -> str:
    hint = f' title="{_safe(title)}"' if title else ""
    return f"<span class='m {result}'{hint}>{_MARKS[result]}</span>"


def _safe(text: object) -> str:
    return html.escape(str(text), quote=True)
