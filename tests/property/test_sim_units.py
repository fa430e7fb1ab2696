"""Numbers with units, and laws of measured times, over random ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.errors import SimError
from sim.maths.laws import Constant, Quantiles
from sim.studies import units

numbers = st.floats(0, 1e12)


@given(numbers, st.sampled_from(sorted(units.TIMES)), st.sampled_from(["", " "]))
def test_a_time_is_its_number_times_its_unit(number: float, unit: str, gap: str) -> None:
    assert units.seconds(f"{number!r}{gap}{unit}") == number * units.TIMES[unit]


@given(numbers, st.sampled_from(sorted(units.BANDWIDTHS)))
def test_a_bandwidth_is_too(number: float, unit: str) -> None:
    assert units.bandwidth(f"{number!r}{unit}") == number * units.BANDWIDTHS[unit]


@given(st.text(max_size=12))
def test_any_text_is_a_number_or_one_error(text: str) -> None:
    for read in (units.seconds, units.size, units.bandwidth, units.rate, units.price, units.price_of_size):
        try:
            assert read(text) == read(text)
        except units.UnitError as error:
            assert str(error)


def test_units_are_what_people_take_them_for() -> None:
    assert units.seconds("1.5h") == 5400
    assert units.seconds("0") == 0
    assert units.size("4.86e12B") == units.size("4.86 TB") == 4.86e12
    assert units.size("1GiB") == 2**30
    assert units.bandwidth("20Gbps") == units.bandwidth("20 Gbit/s") == units.bandwidth("2.5GB/s") == 2.5e9
    assert units.price("$3.6/h") == units.price("3.6 USD/h") == pytest.approx(1e-3)
    assert units.rate("3/h") == pytest.approx(3 / 3600)
    assert units.price_of_size("$0.02/GB") == pytest.approx(2e-11)
    with pytest.raises(units.UnitError, match="did you mean 'GB'"):
        units.size("3gb")


@given(st.lists(st.floats(0, 1e6, allow_subnormal=False), min_size=2, max_size=9), st.integers(0, 2**32))
def test_measured_times_are_drawn_as_their_survival_says(times: list[float], seed: int) -> None:
    law = Quantiles(tuple(np.linspace(0, 1, len(times)).tolist()), tuple(sorted(times)))
    drawn = law.sample(np.random.default_rng(seed), 2000)
    assert min(times) <= drawn.min()
    assert drawn.max() <= max(times)
    assert abs(drawn.mean() - law.mean) <= 6 * (max(times) - min(times)) / 2000**0.5 + 1e-9
    for time in (min(times), law.mean, max(times)):
        assert abs(float((drawn > time).mean()) - law.survival(time)) < 0.1


@pytest.mark.parametrize(
    ("shares", "times"),
    [((0.0,), (1.0,)), ((0.1, 1.0), (1.0, 2.0)), ((0.0, 0.9), (1.0, 2.0)), ((0.0, 1.0), (2.0, 1.0)),
     ((0.0, 1.0), (-1.0, 1.0)), ((0.0, 1.0), (1.0,))],
)  # fmt: skip
def test_quantiles_that_are_none_are_refused(shares: tuple[float, ...], times: tuple[float, ...]) -> None:
    with pytest.raises(SimError, match="could not make a law of quantiles"):
        Quantiles(shares, times)


def test_a_constant_may_be_nothing_and_no_less() -> None:
    assert Constant(0).survival(0) == 0
    assert Constant(3).survival(2) == 1
    with pytest.raises(SimError, match="0 or more"):
        Constant(-1)
