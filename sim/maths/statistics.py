"""Figures of many replications: means with intervals, differences on the same failures, steady states.

Intervals are Student's t at 95 % unless said. Everything is plain Python over lists of numbers, summed
without rounding errors (`math.fsum`), so that the same values give the same digits on any backend.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from sim.errors import SimError

CONFIDENCE = 0.95


def _beta_fraction(a: float, b: float, x: float) -> float:
    """The continued fraction of the incomplete beta function, by Lentz's method."""
    tiny = 1e-300
    c, d = 1.0, 1.0 - (a + b) * x / (a + 1)
    d = 1 / (d if abs(d) > tiny else tiny)
    total = d
    for m in range(1, 500):
        for step in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 + step * d
            c = 1 + step / c
            d = 1 / (d if abs(d) > tiny else tiny)
            c = c if abs(c) > tiny else tiny
            total *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return total


def t_tail(t: float, freedom: int) -> float:
    """The chance that Student's t with so many degrees of freedom is farther from 0 than `t`, either side.

    The incomplete beta function I_x(freedom/2, 1/2) at x = freedom / (freedom + t^2) (Abramowitz and Stegun
    26.7.1), by its continued fraction.
    """
    if freedom < 1:
        raise SimError(f"could not compute Student's t: {freedom} degrees of freedom; use 2 or more values")
    a, b = freedom / 2, 0.5
    x, y = freedom / (freedom + t * t), t * t / (freedom + t * t)
    if y == 0:
        return 1.0
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log(y))
    if x < (a + 1) / (a + b + 2):
        return front * _beta_fraction(a, b, x) / a
    return 1 - front * _beta_fraction(b, a, y) / b


@functools.lru_cache(maxsize=4096)
def t_quantile(freedom: int, confidence: float = CONFIDENCE) -> float:
    """How many standard errors a two-sided interval reaches to either side."""
    if not 0 < confidence < 1:
        raise SimError(f"could not compute Student's t: confidence is {confidence}; it must be in (0, 1)")
    low, high = 0.0, 1.0
    while t_tail(high, freedom) > 1 - confidence:
        high *= 2
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if t_tail(middle, freedom) > 1 - confidence else (low, middle)
    return high


def quantile(ordered: Sequence[float], share: float) -> float:
    """The value below which `share` of sorted values lie, between two of them in proportion."""
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


@dataclass(frozen=True, slots=True)
class Summary:
    """Values of independent replications. `ci95` is half the width of the mean's interval.

    It is not a number where one replication alone was run.
    """

    mean: float
    sd: float
    n: int
    ci95: float
    p5: float
    p50: float
    p95: float


def _mean_sd(values: Sequence[float]) -> tuple[float, float]:
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return mean, math.nan
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def half_width(sd: float, n: int, confidence: float = CONFIDENCE) -> float:
    """Half the width of the interval of a mean of `n` values; not a number for one value."""
    return t_quantile(n - 1, confidence) * sd / math.sqrt(n) if n > 1 else math.nan


def summarise(values: Sequence[float]) -> Summary:
    """Mean, spread, interval and quantiles.

    Raises:
        SimError: there are no values.

    """
    if not values:
        raise SimError("could not summarise: there are no values; run at least one replication")
    mean, sd = _mean_sd(values)
    ordered = sorted(values)
    return Summary(
        mean, sd, len(values), half_width(sd, len(values)),
        quantile(ordered, 0.05), quantile(ordered, 0.5), quantile(ordered, 0.95),
    )  # fmt: skip


def wanted(values: Sequence[float], relative: float, least: int, most: int) -> int:
    """How many replications to have before the next look: as many as there are once that is enough.

    Args:
        values: of the replications so far; none asks for `least`.
        relative: half of the interval's width over the mean, wanted.
        least: replications before the first look.
        most: replications after which to stop, whatever the width.

    The next look is where the spread so far says that it would be enough, but no more than at twice as many,
    as a spread from few values says little. It depends on the values alone, not on how they were computed.

    """
    n = len(values)
    if n < least:
        return min(least, most)
    if n >= most:
        return n
    mean, sd = _mean_sd(values)
    if n < 2:
        return min(2, most)
    width = half_width(sd, n)
    if width <= relative * abs(mean):
        return n
    needed = n * (width / (relative * abs(mean))) ** 2 if mean and relative else math.inf
    return min(most, max(n + 1, math.ceil(min(needed, 2 * n))))


@dataclass(frozen=True, slots=True)
class Difference:
    """`a - b` over the same replications. `p`: the chance of one so far from 0 if there were none.

    Both are of this and of all that it was compared along with (`paired`).
    """

    mean: float
    ci95: float
    n: int
    p: float

    @property
    def significant(self) -> bool:
        """Whether the interval leaves out 0."""
        return abs(self.mean) > self.ci95


def paired(a: Sequence[float], b: Sequence[float], comparisons: int = 1) -> Difference:
    """The mean of `a - b`, replication by replication: both saw the same failures, so most noise cancels.

    Args:
        a: values, in the order of replications.
        b: values of the same replications.
        comparisons: how many this one is of. Interval and `p` are Bonferroni's: with 95 % all of the
            intervals hold their differences.

    Raises:
        SimError: they are not of the same replications, or of fewer than two.

    """
    if len(a) != len(b) or len(a) < 2:
        raise SimError(
            f"could not compare {len(a)} and {len(b)} replications; it takes the same ones, two or more"
        )
    mean, sd = _mean_sd([x - y for x, y in zip(a, b, strict=True)])
    n = len(a)
    if sd == 0:
        return Difference(mean, 0.0, n, 1.0 if mean == 0 else 0.0)
    width = half_width(sd, n, 1 - (1 - CONFIDENCE) / comparisons)
    return Difference(mean, width, n, min(1.0, comparisons * t_tail(mean / (sd / math.sqrt(n)), n - 1)))


def warm_up(series: Sequence[float], batch: int = 5) -> int:
    """How many values at the beginning of a series to leave out: MSER-5.

    White, Cobb and Spratt, WSC 2000: of means of `batch` values, cut where the standard error of what is
    left, `variance / count`, is least; a cut in the second half says that the series is too short.

    Raises:
        SimError: fewer than ten batches, or no cut in the first half.

    """
    count = len(series) // batch
    if count < 10:
        raise SimError(f"could not find a warm-up in {len(series)} values; it takes {10 * batch} or more")
    means = [math.fsum(series[batch * i : batch * (i + 1)]) / batch for i in range(count)]
    best, cut = math.inf, 0
    # From the end on: the mean and squares of what is left after each cut (Welford).
    mean = squares = 0.0
    errors = [math.inf] * count
    for kept, value in enumerate(reversed(means), 1):
        step = value - mean
        mean += step / kept
        squares += step * (value - mean)
        if kept >= 5:
            errors[count - kept] = squares / kept**2
    for place, error in enumerate(errors):
        if error < best:
            best, cut = error, place
    if cut > count // 2:
        raise SimError(
            f"could not find a warm-up in {len(series)} values: the series still changes; run it longer"
        )
    return cut * batch


@dataclass(frozen=True, slots=True)
class Batches:
    """The mean of one long run, half the width of its 95 % interval, and of how many batches."""

    mean: float
    ci95: float
    batches: int


def batch_means(series: Sequence[float], batches: int = 20) -> Batches:
    """The mean of a series whose values depend on each other, and its interval from the means of batches.

    Raises:
        SimError: fewer than two values for each batch.

    """
    size = len(series) // batches
    if size < 2 or batches < 2:
        raise SimError(
            f"could not make {batches} batches of {len(series)} values; it takes two or more for each of two"
        )
    # The oldest are left out where it does not come out even.
    kept = series[len(series) - size * batches :]
    means = [math.fsum(kept[size * i : size * (i + 1)]) / size for i in range(batches)]
    mean, sd = _mean_sd(means)
    return Batches(mean, half_width(sd, batches), batches)
