"""What is in a trace file, in figures: its kind is found from its content."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from sim.errors import why
from sim.traces import capacity, faults, membership, priced, requests
from sim.traces.files import read_json, read_rows, unusable

Facts = list[tuple[str, str]]
"""A label and a value for each figure, in the order to show them."""

KINDS = (
    "node faults (JSON events), spot zones (JSON), spot zones with prices (tar.gz), counts over time (JSON), "
    "nodes that join and leave (CSV), inference requests (CSV)"
)


def inspect(path: Path, one_is: capacity.Polarity = "available") -> Facts:
    """Figures of a trace of any kind that there is a loader for.

    Args:
        path: the file.
        one_is: what 1 stands for in counts over time, the one kind that does not say it.

    Raises:
        SimError: it is of no such kind, or malformed.

    """
    return _kind(path)(path, one_is)


def _kind(path: Path) -> Callable[[Path, capacity.Polarity], Facts]:
    if path.suffix == ".json":
        document = read_json(path)
        if isinstance(document, list):
            return _faults
        if isinstance(document, dict) and "zones" in document:
            return _zones
        if isinstance(document, dict) and "metadata" in document:
            return _counts
    elif path.suffix == ".csv":
        row = read_rows(path)[0]
        if row == requests.HEADER:
            return _requests
        if len(row) == 3 and row[1].strip() in ("add", "remove"):
            return _membership
    elif path.name.endswith((".tar.gz", ".tgz", ".tar")):
        return _priced
    try:
        path.open("rb").close()
    except OSError as error:
        raise unusable(path, f"{why(error)}; check the path") from error
    raise unusable(path, f"it is none of: {KINDS}")


def _faults(path: Path, _: capacity.Polarity) -> Facts:
    found = faults.load(path)
    days, nodes = faults.span_d(found), {fault.node for fault in found}
    repairs = [fault.end_d - fault.start_d for fault in found]
    gaps = faults.gaps_d(found)
    faulty = faults.faulty(found)
    per_node = sorted(Counter(fault.node for fault in found).values(), reverse=True)
    facts = [
        ("kind", "node faults"),
        ("faults", f"{len(found)} on {len(nodes)} nodes in {days:.2f} days"),
        ("nodes faulty at once", f"mean {faulty.mean:.4f}, most {faulty.most}"),
        (
            "repair",
            f"median {24 * statistics.median(repairs):.1f} h, mean {24 * statistics.fmean(repairs):.1f} h",
        ),
        (
            "worst tenth of the nodes with faults",
            f"{sum(per_node[: max(1, len(nodes) // 10)]) / len(found):.0%} of faults",
        ),
    ]
    if len(set(gaps)) > 1:
        fit = faults.fit_weibull(gaps)
        spread = statistics.pvariance(gaps) / statistics.fmean(gaps) ** 2
        facts += [
            (
                "gaps above 0",
                f"{len(gaps)}, mean {24 * statistics.fmean(gaps):.2f} h, longest {24 * max(gaps):.1f} h",
            ),
            ("their Weibull fit", f"shape {fit.shape:.2f}, scale {24 * fit.scale:.2f} h (Poisson: shape 1)"),
            ("their squared coefficient of variation", f"{spread:.2f} (Poisson: 1)"),
        ]
    causes = Counter(fault.cause for fault in found).most_common(3)
    facts.append(("causes", ", ".join(f"{cause} {count / len(found):.0%}" for cause, count in causes)))
    return facts


def _stretches(available: list[int]) -> str:
    lengths = {
        state: [len(list(run)) for key, run in itertools.groupby(available) if bool(key) == state]
        for state in (True, False)
    }
    return f"{len(lengths[True])} with capacity, longest without {max(lengths[False], default=0)} ticks"


def _zones(path: Path, _: capacity.Polarity) -> Facts:
    found = capacity.load_windows(path)
    facts = [
        ("kind", "spot zones; 1 is available once loaded, as the file's own polarity says"),
        ("windows", f"{len(found.starts)} of {found.window_ticks} ticks of {found.tick_s:g} s in each zone"),
    ]
    return facts + [
        (
            zone.name,
            f"available {zone.availability:.4f} of {len(zone.available)} ticks; {_stretches(zone.available)}",
        )
        for zone in found.zones
    ]


def _priced(path: Path, _: capacity.Polarity) -> Facts:
    found = priced.load(path)
    return [
        ("kind", "spot zones with prices; 1 is preempted in the file, and available once loaded"),
        *(
            (
                zone.name,
                f"available {statistics.fmean(zone.available):.4f} of {len(zone.available)} ticks of "
                f"{zone.tick_s:g} s; {_stretches(zone.available)}; spot ${zone.spot_price:.4g}/h, on demand "
                f"${zone.on_demand_price:.4g}/h",
            )
            for zone in found.values()
        ),
    ]


def _counts(path: Path, one_is: capacity.Polarity) -> Facts:
    found = capacity.load_counts(path, one_is)
    up = [int(count > 0) for count in found.counts]
    facts = [
        ("kind", "machines over time"),
        (
            "length",
            f"{len(up)} ticks of {found.tick_s:g} s, {len(up) * found.tick_s / 86400:.2f} days",
        ),
        ("machines", f"mean {statistics.fmean(found.counts):.3f}, most {max(found.counts)}"),
        ("any at all", f"{statistics.fmean(up):.4f} of the time; {_stretches(up)}"),
    ]
    if max(found.counts) <= 1:
        facts.append(
            (
                "polarity",
                f"not in the file: read with 1 = {one_is}; files of simulators often have 1 = preempted",
            )
        )
    return facts


def _membership(path: Path, _: capacity.Polarity) -> Facts:
    found = membership.summary(membership.load(path))
    return [
        ("kind", "nodes that join and leave"),
        ("length", f"{found.hours:.2f} h"),
        ("nodes", f"mean {found.mean_nodes:.2f}, most {found.most_nodes}"),
        ("removals", f"{found.removals}, {found.removals_per_node_hour:.3f} for each hour of a node"),
    ]


def _requests(path: Path, _: capacity.Polarity) -> Facts:
    found = requests.summary(requests.load(path))
    return [
        ("kind", "inference requests"),
        ("requests", f"{found.requests}, {found.per_second:.2f} a second"),
        ("gaps", f"coefficient of variation {found.gap_cv:.2f} (Poisson: 1)"),
        ("tokens", f"mean {found.mean_context:.0f} in, {found.mean_generated:.0f} out"),
    ]
