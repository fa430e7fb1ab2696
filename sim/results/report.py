"""A report on results: one HTML page that needs nothing else, for people who were not there."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Iterable, Sequence

from sim.results import judge, plots
from sim.results.drawing import short
from sim.results.sweep import objective
from sim.results.tables import BUCKET, Cell, Results

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.6rem; margin-bottom: .2rem } h2 { font-size: 1.15rem; margin-top: 2rem }
.question { color: #555; margin-top: 0 } .answer { border-left: 4px solid #009E73; padding: .4rem 1rem }
table { border-collapse: collapse; font-size: .88rem; display: block; overflow-x: auto }
th, td { padding: .25rem .7rem; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap }
th:first-child, td:first-child { text-align: left } th { border-bottom: 2px solid #999 }
tr.best td { font-weight: 600 } td.tied { color: #777 }
img { max-width: 100% } figure { margin: 1rem 0 } figcaption { color: #555; font-size: .88rem }
pre { background: #f6f6f6; padding: 1rem; overflow-x: auto; font-size: .82rem } code { font-size: .9em }
"""

LIMITS = {
    "training": (
        "A failure's clock starts anew when a node is whole again; nodes do not get worse with age unless "
        "the law of failures says so.",
        "Useful work goes at one speed: no stragglers, no slow network, no change of the number of nodes.",
        "Checkpoints are always good: one that was written can be read.",
    ),
    "queue": (
        "Jobs are placed on any free nodes: no topology, no fragmentation within a node.",
        "A job's work is known and does not depend on where it runs.",
    ),
    "inference": (
        "A replica serves tokens at one speed, whatever its batch.",
        "Requests do not give up, and a burst does not change what later ones ask for.",
    ),
    "spot": (
        "Nothing done is lost when a machine is taken: the job is taken to save its state as it goes.",
        "Capacity is what a trace says at each tick; the job itself does not change it.",
    ),
}
"""What a kind of work leaves out. docs/sim.md has the whole of it."""


_GROUPS, _CELLS = 24, 60
"""So many rankings, and cells with all their figures, are on the page at most; it says so."""


def _left_out(there: int, shown: int, what: str) -> str:
    if there <= shown:
        return ""
    return f"<p>The first {shown} of {there} {what}; summary.csv beside the results has all.</p>"


def _cells(values: Iterable[str], kind: str = "td") -> str:
    return "".join(f"<{kind}>{value}</{kind}>" for value in values)


def _table(head: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]]) -> str:
    """A table of rows, each with its class; cells are HTML already."""
    body = "".join(f'<tr class="{kind}">{_cells(row)}</tr>' for kind, row in rows)
    return (
        f"<table><thead><tr>{_cells(map(html.escape, head), 'th')}</tr></thead><tbody>{body}</tbody></table>"
    )


def _figure(several: Sequence[Results], kind: plots.Kind) -> str:
    sink = io.BytesIO()
    kind.draw(several).savefig(sink, format="png", metadata={"Software": None})
    data = base64.b64encode(sink.getvalue()).decode()
    shows = html.escape(kind.shows)
    image = f'<img alt="{shows}" src="data:image/png;base64,{data}">'
    return f"<figure>{image}<figcaption>{shows}</figcaption></figure>"


def _ranking(group: judge.Group) -> str:
    rows: list[tuple[str, Sequence[str]]] = []
    for one in group.ranked:
        s = one.summary
        rows.append(
            (
                "best" if one is group.best else "",
                [
                    html.escape(one.name), f"{s.mean:.5g}", f"± {s.ci95:.2g}", f"{s.sd:.3g}", str(s.n),
                    f"{s.p5:.4g}", f"{s.p50:.4g}", f"{s.p95:.4g}", one.beside,
                ],
            )
        )  # fmt: skip
    head = (
        "policy", group.objective.metric, "95 % interval", "sd", "runs", "5 %", "median", "95 %",
        "beside the best",
    )  # fmt: skip
    title = f"<h3>{html.escape(group.place)}</h3>" if group.place else ""
    return title + _table(head, rows)


def _metrics(cells: Sequence[Cell]) -> str:
    names = [
        name for name in dict.fromkeys(n for c in cells for n in c.values) if not name.startswith(BUCKET)
    ]
    rows: list[tuple[str, Sequence[str]]] = []
    for cell in cells[:_CELLS]:
        row = [html.escape(cell.name)]
        for name in names:
            if name in cell.values:
                s = cell.summary(name)
                row.append(f"{s.mean:.4g}" + (f" ± {s.ci95:.1g}" if s.ci95 else ""))
            else:
                row.append("")
        rows.append(("", row))
    return _table(["cell", *names], rows)


def _limits(results: Results) -> list[str]:
    limits: list[str] = []
    wide = [
        cell.name
        for cell in results.cells
        if (s := cell.summary(objective(results.workload).metric)).ci95 > 0.05 * abs(s.mean)
    ]
    if wide:
        limits.append(f"{len(wide)} cells have an interval wider than a twentieth: {', '.join(wide[:5])}.")
    for status, what in (
        (
            "livelock",
            "would never have ended, as they lose more than they do: what they show is no steady state",
        ),
        ("horizon", "were still going on when watching ended"),
    ):
        count = sum(cell.statuses.count(status) for cell in results.cells)
        total = sum(cell.replications for cell in results.cells)
        # A job without an end is always cut off there.
        if count and not (status == "horizon" and count == total):
            limits.append(f"{count} of {total} runs {what}.")
    return [*limits, *LIMITS[results.workload]]


def page(results: Results) -> str:
    """The report as HTML: question, answer, configuration, seeds, tables, plots, sensitivity, limits."""
    escape = html.escape
    judged = objective(results.workload)
    found = judge.groups(results)
    verdicts = "".join(
        f"<p>{'<b>' + escape(group.place) + '</b>: ' if group.place else ''}{escape(group.verdict())}.</p>"
        for group in found[:12]
    )
    if len(found) > 12:
        verdicts += f"<p>and {len(found) - 12} more, in the tables below.</p>"
    figures: list[str] = []
    for kind in plots.KINDS:
        try:
            figures.append(_figure([results], kind))
        except plots.NotHere:
            continue
    effects = [
        (
            "",
            [
                escape(effect.key), f"{effect.reach:.3g}",
                escape(", ".join(f"{short(v, effect.unit)}: {m:.4g}" for v, m in effect.means.items())),
            ],
        )
        for effect in judge.sensitivity(results)
    ]  # fmt: skip
    runs = [cell.replications for cell in results.cells]
    seeds = (
        f"Seed {results.seed}; replication r of each stream of random numbers is its child (stream, r), the "
        f"same for every policy and cell. {sum(runs)} runs, {min(runs)} to {max(runs)} a cell. "
        + ", ".join(f"{name} {version}" for name, version in results.versions.items())
        + f". Study SHA-256 <code>{results.sha256}</code>."
    )
    better = "more is better" if judged.more else "less is better"
    remark = f" {text}." if (text := judge.remark(results)) else ""
    parts = [
        f"<h1>{escape(results.title)}</h1>",
        f'<p class="question">{escape(results.question)}</p>',
        f"<h2>Answer</h2><p>Judged by <code>{judged.metric}</code>, {judged.words} ({better}).{remark}</p>"
        f'<div class="answer">{verdicts}</div>',
        "<h2>Policies</h2>"
        + _left_out(len(found), _GROUPS, "tables")
        + "".join(_ranking(group) for group in found[:_GROUPS]),
        "<h2>Plots</h2>" + "".join(figures),
        "<h2>Sensitivity</h2>"
        + (
            _table(["swept", "reach", f"mean {judged.metric} over all cells with each value"], effects)
            if effects
            else "<p>Nothing was swept.</p>"
        ),
        f"<h2>All figures</h2><p>Mean ± half of the 95 % interval.{remark}</p>"
        + _left_out(len(results.cells), _CELLS, "cells")
        + _metrics(results.cells),
        f"<h2>Seeds and versions</h2><p>{seeds}</p>",
        "<h2>Limits</h2><ul>" + "".join(f"<li>{escape(limit)}</li>" for limit in _limits(results)) + "</ul>",
        f"<h2>Configuration</h2><pre>{escape(results.resolved)}</pre>",
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{escape(results.title)}</title><style>{STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )
