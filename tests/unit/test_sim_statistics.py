"""Intervals, paired differences, batch means and warm-up, against tables and by how often they are right."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.errors import SimError
from sim.maths import statistics as s


# Two-sided quantiles as printed in every table of Student's t.
@pytest.mark.parametrize(
    ("freedom", "confidence", "printed"),
    [
        (1, 0.95, 12.706),
        (2, 0.95, 4.303),
        (5, 0.99, 4.032),
        (9, 0.95, 2.262),
        (29, 0.95, 2.045),
        (30, 0.90, 1.697),
        (120, 0.95, 1.980),
        (100_000, 0.95, 1.960),
    ],
)
def test_quantiles_of_t_are_those_of_the_tables(freedom: int, confidence: float, printed: float) -> None:
    assert s.t_quantile(freedom, confidence) == pytest.approx(printed, abs=6e-4)


@given(st.integers(1, 2000), st.floats(0.5, 0.999))
def test_a_quantile_has_its_tail(freedom: int, confidence: float) -> None:
    assert s.t_tail(s.t_quantile(freedom, confidence), freedom) == pytest.approx(1 - confidence, rel=1e-6)


def test_the_tail_of_one_degree_is_cauchys() -> None:
    for t in (0.0, 0.1, 1.0, 3.0, 50.0):
        assert s.t_tail(t, 1) == pytest.approx(1 - 2 * math.atan(t) / math.pi, rel=1e-9)


def test_a_summary() -> None:
    found = s.summarise([4.0, 1.0, 3.0, 2.0, 5.0])
    assert (found.mean, found.n, found.p5, found.p50, found.p95) == (3.0, 5, 1.2, 3.0, 4.8)
    assert found.sd == pytest.approx(math.sqrt(2.5))
    assert found.ci95 == pytest.approx(2.776 * math.sqrt(2.5 / 5), abs=1e-3)
    assert math.isnan(s.summarise([1.0]).ci95)


def test_an_interval_holds_the_truth_as_often_as_it_says() -> None:
    rng = random.Random(3)
    rounds = 1000
    held = 0
    for _ in range(rounds):
        found = s.summarise([rng.gauss(7, 2) for _ in range(8)])
        held += abs(found.mean - 7) <= found.ci95
    assert abs(held / rounds - 0.95) < 4 * math.sqrt(0.95 * 0.05 / rounds)


def test_replications_go_on_until_the_width_is_reached() -> None:
    rng = random.Random(5)
    values: list[float] = []
    looks: list[int] = []
    while (n := s.wanted(values, 0.01, 30, 5000)) > len(values):
        looks.append(n)
        values += [rng.gauss(10, 2) for _ in range(n - len(values))]
    found = s.summarise(values)
    assert found.ci95 <= 0.01 * found.mean
    assert looks[0] == 30
    assert all(later <= 2 * earlier for earlier, later in itertools.pairwise(looks))
    # A hundredth of 10 takes about (1.96 * 2 / 0.1)^2 values.
    assert 1200 < len(values) < 2000


def test_replications_stop_at_the_most_and_where_there_is_no_spread() -> None:
    assert s.wanted([1.0, 2.0] * 50, 1e-6, 10, 100) == 100
    assert s.wanted([3.0] * 10, 0.0, 10, 100) == 10
    assert s.wanted([-1.0, 1.0] * 5, 0.01, 10, 12) == 12


def test_the_same_failures_tell_more_than_different_ones() -> None:
    rng = random.Random(8)
    noise = [rng.gauss(0, 1) for _ in range(50)]
    a = [10 + x for x in noise]
    b = [9.9 + x + rng.gauss(0, 0.05) for x in noise]
    found = s.paired(a, b)
    assert found.significant
    assert found.mean == pytest.approx(0.1, abs=0.03)
    assert s.paired(b, a).mean == -found.mean
    shuffled = s.paired(a, b[1:] + b[:1])
    assert not shuffled.significant
    assert shuffled.ci95 > 10 * found.ci95


def test_a_difference_of_none_is_found_as_rarely_as_it_says() -> None:
    rng = random.Random(1)
    rounds = 500
    found = sum(
        s.paired([rng.gauss(0, 1) for _ in range(10)], [rng.gauss(0, 1) for _ in range(10)]).significant
        for _ in range(rounds)
    )
    assert abs(found / rounds - 0.05) < 4 * math.sqrt(0.05 * 0.95 / rounds)


def test_equal_values_do_not_differ_and_a_constant_shift_does() -> None:
    assert not s.paired([1.0, 2.0], [1.0, 2.0]).significant
    assert s.paired([1.0, 2.0], [0.5, 1.5]).p == 0.0


def _autoregressive(rng: random.Random, n: int, start: float) -> list[float]:
    values, last = [], start
    for _ in range(n):
        last = 0.8 * last + rng.gauss(0, 1)
        values.append(last + 5)
    return values


def test_batch_means_hold_the_mean_of_a_series_with_memory() -> None:
    rng = random.Random(2)
    rounds, held, naive = 150, 0, 0
    for _ in range(rounds):
        series = _autoregressive(rng, 2000, 0.0)
        found = s.batch_means(series)
        held += abs(found.mean - 5) <= found.ci95
        naive += abs(found.mean - 5) <= s.summarise(series).ci95
    assert held / rounds > 0.87
    assert naive / rounds < 0.7, "values taken for independent ones would be far too sure"


def test_the_warm_up_is_cut_off() -> None:
    rng = random.Random(6)
    series = [30 * math.exp(-i / 50) + rng.gauss(0, 1) for i in range(2000)]
    cut = s.warm_up(series)
    assert 100 <= cut <= 400
    assert abs(s.batch_means(series[cut:]).mean) < 0.2 < s.batch_means(series).mean
    assert s.warm_up([rng.gauss(0, 1) for _ in range(2000)]) < 1000
    assert s.warm_up([1.0] * 60) == 0


def test_a_series_that_never_settles_is_refused() -> None:
    with pytest.raises(SimError, match="run it longer"):
        s.warm_up([float(i * i) for i in range(500)])


@pytest.mark.parametrize(
    "action",
    [
        lambda: s.summarise([]),
        lambda: s.paired([1.0, 2.0], [1.0]),
        lambda: s.paired([1.0], [1.0]),
        lambda: s.t_quantile(0),
        lambda: s.t_quantile(5, 1.0),
        lambda: s.batch_means([1.0] * 30),
        lambda: s.warm_up([1.0] * 40),
    ],
)
def test_what_cannot_be_computed_is_one_sentence(action: object) -> None:
    with pytest.raises(SimError, match=r"^could not [a-z].*; "):
        assert callable(action)
        action()
