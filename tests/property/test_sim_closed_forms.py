"""Simulations against closed forms over random parameters."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.maths import theory
from sim.maths.laws import Constant, Exponential, Fixed, Law, Lognormal, Weibull
from sim.models import pool, queueing, renewal
from sim.studies.config import Cluster, Config, NodeFailures, PolicySpec, Storage, Training
from sim.validation.played import share_kept

seeds = st.integers(0, 2**32)
jobs = st.builds(
    renewal.Job,
    interval=st.floats(20, 2000),
    stall=st.floats(0, 60),
    restart=st.floats(0, 300),
    persist=st.floats(0, 200),
)
laws = st.one_of(
    st.builds(Exponential, st.floats(1000, 50_000)),
    st.builds(Weibull, st.floats(0.5, 2.5), st.floats(1000, 50_000)),
)


@settings(deadline=None, max_examples=50)
@given(laws, jobs, seeds)
def test_the_share_kept_is_that_of_renewal_theory(law: Law, job: renewal.Job, seed: int) -> None:
    seen = renewal.ettr(job, law, np.random.default_rng(seed), 40, 500)
    exact = theory.renewal_ettr(law.survival, law.mean, job.interval, job.stall, job.restart, job.persist)
    # Errors are estimated from forty replications: their ratio has wider tails than a normal law.
    assert abs(seen.mean - exact) < 6 * seen.error + 1e-9


@settings(deadline=None, max_examples=8)
@given(st.floats(2, 20), st.floats(5, 15), st.floats(5e3, 5e4), st.floats(5, 15), st.integers(0, 2**31))
def test_two_levels_cost_what_is_first_order_but_for_its_square(
    stall_s: float, dearer: float, mean_s: float, rarer: float, seed: int
) -> None:
    stalls, means = (stall_s, stall_s * dearer), (mean_s, mean_s * rarer)
    overhead = theory.multilevel(stalls, [1 / mean for mean in means]).overhead
    config = Config(
        Cluster(1),
        Training(1),
        PolicySpec("multilevel"),
        failures=(NodeFailures(Exponential(means[0]), process=True), NodeFailures(Exponential(means[1]))),
        storage=(
            Storage("local", stall=Constant(stalls[0]), lost_with="node"),
            Storage("remote", stall=Constant(stalls[1])),
        ),
        horizon_s=40 * means[1],
        seed=seed,
    )
    seen = share_kept(config, 6)
    assert abs(1 / seen.mean - 1 - overhead) < overhead**2 + 6 * seen.error / seen.mean**2


@settings(deadline=None, max_examples=6)
@given(st.lists(st.floats(0.05, 0.22), min_size=1, max_size=3), st.floats(0.5, 5), seeds)
def test_classes_wait_as_kleinrock_says(loads: list[float], service: float, seed: int) -> None:
    rates = [load * service for load in loads]
    rng = np.random.default_rng(seed)
    count = 60_000
    arrivals = rng.exponential(1 / sum(rates), count).cumsum()
    classes = rng.choice(len(rates), count, p=np.array(rates) / sum(rates))
    needs = rng.exponential(1 / service, count)
    spent = np.array(queueing.times_in_system(arrivals.tolist(), needs.tolist(), classes.tolist()))
    for number, exact in enumerate(theory.preemptive_mm1(rates, service)):
        own = spent[classes == number]
        # Of batches, as those that wait together wait alike.
        means = np.array([batch.mean() for batch in np.array_split(own, 30)])
        assert abs(own.mean() - exact) < 6 * means.std(ddof=1) / 30**0.5


@settings(deadline=None, max_examples=10)
@given(
    st.floats(0.5, 20),
    st.one_of(
        st.builds(Fixed, st.floats(0.5, 3)),
        st.builds(Exponential, st.floats(0.5, 3)),
        st.builds(Lognormal, st.floats(0.5, 3), st.floats(0.2, 1.2)),
    ),
    seeds,
)
def test_spares_are_a_quantile_of_poisson_for_any_law_of_repairs(
    arrivals: float, repair: Law, seed: int
) -> None:
    seen = pool.spares_needed(arrivals, repair, 0.99, np.random.default_rng(seed), 60_000)
    mean = arrivals * repair.mean
    # A quantile of what was seen is one of a share that is a little off.
    assert theory.poisson_quantile(mean, 0.982) - 1 <= seen <= theory.poisson_quantile(mean, 0.995) + 1
