"""Inference requests: TIMESTAMP,ContextTokens,GeneratedTokens, as in Azure's traces of LLM inference."""

from __future__ import annotations

import itertools
import statistics
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from sim.traces.files import read_rows, unusable

HEADER = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]


@dataclass(frozen=True)
class Request:
    """A request: seconds after the first one, tokens in and out."""

    time_s: float
    context_tokens: int
    generated_tokens: int


@dataclass(frozen=True)
class Summary:
    """Requests a second, the coefficient of variation of the gaps between them, mean tokens in and out."""

    requests: int
    per_second: float
    gap_cv: float
    mean_context: float
    mean_generated: float


def load(path: Path) -> list[Request]:
    """Requests in order.

    Raises:
        SimError: the header or a row is malformed, or a row is out of order.

    """
    header, *rows = read_rows(path)
    if header != HEADER:
        raise unusable(path, f"its first row is not {','.join(HEADER)}")
    requests: list[Request] = []
    first: datetime | None = None
    for number, row in enumerate(rows, 2):
        try:
            stamp, context, generated = row
            # Seven digits of a second, of which Python reads six.
            time = datetime.fromisoformat(stamp[:26])
            first = first or time
            request = Request((time - first).total_seconds(), int(context), int(generated))
            if not all(0 <= tokens < 10**9 for tokens in (request.context_tokens, request.generated_tokens)):
                raise ValueError(row)
        except (ValueError, TypeError) as error:
            raise unusable(path, f"row {number} is not a time and two counts of tokens") from error
        if requests and request.time_s < requests[-1].time_s:
            raise unusable(path, f"row {number} is earlier than the one before; sort the rows by time")
        requests.append(request)
    if len(requests) < 3 or requests[-1].time_s == 0:
        raise unusable(path, "it has fewer than three requests, or all at one moment")
    return requests


def summary(requests: list[Request]) -> Summary:
    """Figures of a trace."""
    gaps = [later.time_s - earlier.time_s for earlier, later in itertools.pairwise(requests)]
    return Summary(
        requests=len(requests),
        per_second=len(gaps) / requests[-1].time_s,
        gap_cv=statistics.pstdev(gaps) / statistics.fmean(gaps),
        mean_context=statistics.fmean(request.context_tokens for request in requests),
        mean_generated=statistics.fmean(request.generated_tokens for request in requests),
    )
