"""Closed forms that simulations are held against, each with its source.

Notation: `mtbf` is the mean time between failures of the whole job, `stall` the time a checkpoint stops the
job, `interval` the useful work between checkpoints, `persist` the time after the stall until a checkpoint
counts, `restart` the time from a failure to work going on. Times are of one unit, seconds unless said.
Failures may strike during work, checkpoint and restart; the failure clock starts anew after each failure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sim.errors import SimError

_TERMS = 10_000_000
"""Terms of a series after which it is not going to converge."""


def _positive(**values: float) -> None:
    for name, value in values.items():
        if not (math.isfinite(value) and value > 0):
            raise SimError(f"could not compute: {name} is {value}; it must be above 0")


def _not_negative(**values: float) -> None:
    for name, value in values.items():
        if not (math.isfinite(value) and value >= 0):
            raise SimError(f"could not compute: {name} is {value}; it must be 0 or more")


def young(stall: float, mtbf: float) -> float:
    """The interval `sqrt(2 stall mtbf)` (Young, CACM 17(9), 1974)."""
    _positive(stall=stall, mtbf=mtbf)
    return math.sqrt(2 * stall * mtbf)


def daly_first(stall: float, mtbf: float, restart: float = 0.0) -> float:
    """The interval `sqrt(2 stall (mtbf + restart)) - stall` (Daly, FGCS 22, 2006, first order).

    Raises:
        SimError: the stall is so long that the formula gives no interval above 0.

    """
    _positive(stall=stall, mtbf=mtbf)
    _not_negative(restart=restart)
    interval = math.sqrt(2 * stall * (mtbf + restart)) - stall
    if interval <= 0:
        raise SimError(
            f"could not compute Daly's first-order interval: a stall of {stall:g} is too long for "
            f"failures every {mtbf:g}; use the exact optimum"
        )
    return interval


def daly_higher(stall: float, mtbf: float) -> float:
    """Daly's higher-order interval (FGCS 22, 2006); `mtbf` itself when the stall is 2 mtbf or more."""
    _positive(stall=stall, mtbf=mtbf)
    if stall >= 2 * mtbf:
        return mtbf
    ratio = stall / (2 * mtbf)
    return math.sqrt(2 * stall * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stall


def exact_interval(stall: float, mtbf: float) -> float:
    """The interval with the most work done under exponential failures: `mtbf (1 + W0(-e^(-stall/mtbf - 1)))`.

    It maximises `exponential_ettr` and does not depend on restart or persist. With u = interval / mtbf the
    condition reads `-ln(1 - u) - u = stall / mtbf`, which keeps its digits where Lambert's W0 is at its
    branch point; Newton's method starts above the root of a convex function, so it cannot overshoot.
    """
    _positive(stall=stall, mtbf=mtbf)
    x = stall / mtbf
    if x > 30:
        return mtbf  # to the last digit but one
    u = min(math.sqrt(2 * x), -math.expm1(-(x + 1)))
    for _ in range(100):
        # The series where the difference of two nearly equal numbers would lose every digit.
        left = sum(u**k / k for k in range(2, 12)) if u < 0.01 else -math.log1p(-u) - u
        step = (left - x) * (1 - u) / u
        u -= step
        if abs(step) <= 1e-15 * u:
            break
    return mtbf * u


def expected_wall(work: float, interval: float, stall: float, mtbf: float, restart: float) -> float:
    """Mean time until `work` is done: `M e^(R/M) (e^((interval + stall)/M) - 1) work / interval` (Daly 2006).

    Exponential failures; every interval, the last one too, ends in a checkpoint. Where `work` is no whole
    number of intervals, the last part is counted in proportion, which is right but for a fraction of one
    stall.
    """
    _positive(work=work, interval=interval, mtbf=mtbf)
    _not_negative(stall=stall, restart=restart)
    return mtbf * math.exp(restart / mtbf) * math.expm1((interval + stall) / mtbf) * work / interval


def job_mttf(nodes: int, failures_per_node: float) -> float:
    """Mean time to failure of a job on `nodes` nodes that all must live: `1 / (nodes rate)`.

    In the unit of time that `failures_per_node` is a rate of (Kokolis et al., HPCA 2025, with failures per
    node and day).
    """
    _positive(nodes=nodes, failures_per_node=failures_per_node)
    return 1 / (nodes * failures_per_node)


def meta_ettr(mttf: float, interval: float, write: float, restart: float) -> float:
    """Expected ETTR to first order: `(1 - (u0 + dt/2)/M) / (1 + w/dt)` (Kokolis et al., HPCA 2025).

    An approximation for failures much rarer than checkpoints: see `exponential_ettr` for the exact value.
    """
    _positive(mttf=mttf, interval=interval)
    _not_negative(write=write, restart=restart)
    return (1 - (restart + interval / 2) / mttf) / (1 + write / interval)


def exponential_ettr(
    interval: float, stall: float, mtbf: float, restart: float = 0.0, persist: float = 0.0
) -> float:
    """Share of time whose work is kept: `(interval/M) e^(-(R + p)/M) / (e^((interval + stall)/M) - 1)`.

    What `renewal_ettr` sums to for exponential failures. Steady state of a job without an end.
    """
    _positive(interval=interval, mtbf=mtbf)
    _not_negative(stall=stall, restart=restart, persist=persist)
    return interval / mtbf * math.exp(-(restart + persist) / mtbf) / math.expm1((interval + stall) / mtbf)


def renewal_ettr(
    survival: Callable[[float], float],
    mean: float,
    interval: float,
    stall: float,
    restart: float = 0.0,
    persist: float = 0.0,
) -> float:
    """Share of time spent on work that is kept, for failures of any law whose clock starts anew after each.

    `(interval / mean) sum over k >= 1 of survival(restart + persist + k (interval + stall))`: the k-th
    interval after a failure is kept if the next failure comes later than its checkpoint (renewal reward
    theorem).

    Args:
        survival: the chance that the time between two failures is longer than its argument.
        mean: the mean time between failures.
        interval: work between checkpoints.
        stall: time a checkpoint stops the job.
        restart: time from a failure to work going on.
        persist: time after the stall until the checkpoint counts.

    Raises:
        SimError: the tail of the law is too heavy for the sum to converge.

    """
    _positive(interval=interval, mean=mean)
    _not_negative(stall=stall, restart=restart, persist=persist)
    total = 0.0
    for k in range(1, _TERMS):
        term = survival(restart + persist + k * (interval + stall))
        total += term
        if term <= 1e-17 * total or term < 1e-300:
            return interval / mean * total
    raise SimError(
        f"could not compute the renewal ETTR: the sum has not converged after {_TERMS} terms; "
        "use a longer interval or a law with a lighter tail"
    )


@dataclass(frozen=True)
class Levels:
    """The best intervals for checkpoints of several levels, and the share of time that all costs."""

    overhead: float
    intervals: tuple[float, ...]


def multilevel(stalls: Sequence[float], rates: Sequence[float]) -> Levels:
    """First order for several levels: overhead `sum sqrt(2 rate stall)`, intervals `sqrt(2 stall / rate)`.

    Benoit, Cavelan, Le Fevre, Robert, Sun: IEEE Transactions on Computers 66(7), 2017. The i-th level heals
    failures of rate `rates[i]`. First order: about a point optimistic where the overhead is near 10 %.
    """
    if not stalls or len(stalls) != len(rates):
        raise SimError(
            f"could not compute levels: {len(stalls)} stalls and {len(rates)} rates; give one pair a level"
        )
    for stall, rate in zip(stalls, rates, strict=True):
        _positive(stall=stall, rate=rate)
    pairs = list(zip(stalls, rates, strict=True))
    return Levels(
        sum(math.sqrt(2 * rate * stall) for stall, rate in pairs),
        tuple(math.sqrt(2 * stall / rate) for stall, rate in pairs),
    )


def prediction_period(stall: float, mtbf: float, recall: float) -> float:
    """Period when a share `recall` of failures is predicted: `sqrt(2 mtbf stall / (1 - recall))`.

    Aupy, Robert, Vivien, Zaidouni: JPDC 74(2), 2014. Predicted failures are met by checkpoints of their own.
    """
    _positive(stall=stall, mtbf=mtbf)
    if not 0 <= recall < 1:
        raise SimError(f"could not compute a period: recall is {recall}; it must be 0 or more and below 1")
    return math.sqrt(2 * mtbf * stall / (1 - recall))


def gemini_waste(checkpoint: float, frequency: float, retrieval: float) -> float:
    """Mean time wasted by a failure: `checkpoint + 1/(2 frequency) + retrieval` (Wang et al., SOSP 2023)."""
    _not_negative(checkpoint=checkpoint, retrieval=retrieval)
    _positive(frequency=frequency)
    return checkpoint + 1 / (2 * frequency) + retrieval


def gemini_placement(machines: int, replicas: int, lost: int) -> float:
    """Chance that in-memory replicas survive `lost` machines at once (Wang et al., SOSP 2023).

    Machines are in groups of `replicas`, each holding the group's checkpoints; a checkpoint is gone when a
    whole group is. `1 - N C(N - m, k - m) / (m C(N, k))`, exact while only one group can be gone (`k < 2m`),
    else a lower bound.
    """
    if replicas < 1 or machines < 1 or machines % replicas or not 0 <= lost <= machines:
        raise SimError(
            f"could not compute a placement of {replicas} replicas on {machines} machines with {lost} lost: "
            "machines must be a multiple of replicas, and no more can be lost than there are"
        )
    if lost < replicas:
        return 1.0
    gone = math.comb(machines - replicas, lost - replicas) * (machines // replicas)
    return max(0.0, 1 - gone / math.comb(machines, lost))


def poisson_quantile(mean: float, chance: float) -> int:
    """The least n with P(Poisson(mean) <= n) >= `chance`."""
    _positive(mean=mean)
    if not 0 < chance < 1:
        raise SimError(f"could not compute a quantile: chance is {chance}; it must be between 0 and 1")
    total, n = 0.0, 0
    while True:
        total += math.exp(-mean + n * math.log(mean) - math.lgamma(n + 1))
        if total >= chance or (n > mean and total >= 1 - 1e-12):
            return n
        n += 1


def spares(nodes: int, failures_per_node: float, repair: float, chance: float) -> int:
    """Spares that suffice with `chance`: nodes in repair are Poisson(nodes rate repair) for any repair law.

    The M/G/infinity queue (Takacs 1962): it needs failures that are a Poisson process, which those of real
    clusters are not. `failures_per_node` and `repair` (its mean) in the same unit of time.
    """
    _positive(nodes=nodes, failures_per_node=failures_per_node, repair=repair)
    return poisson_quantile(nodes * failures_per_node * repair, chance)


def kv_bytes_per_token(layers: int, kv_heads: int, head_size: int, bytes_per_value: int) -> int:
    """Bytes of KV cache for one token: a key and a value for each layer and head."""
    return 2 * layers * kv_heads * head_size * bytes_per_value


def kv_break_even(bytes_per_token: float, parameters: float, flops: float) -> float:
    """Bandwidth, bytes/s, above which restoring a KV cache is faster than computing it anew.

    Prefill costs about two floating-point operations a parameter and token: `bytes / (2 parameters / flops)`,
    with `flops` the effective rate a second.
    """
    _positive(bytes_per_token=bytes_per_token, parameters=parameters, flops=flops)
    return bytes_per_token * flops / (2 * parameters)


def notice_capacity(lead: float, poll: float, bandwidth: float) -> float:
    """Most bytes that are safe when a notice comes `lead` s ahead and is looked for every `poll` s.

    `(lead - poll) bandwidth`, with `bandwidth` in bytes/s: the notice may be seen a whole poll late.
    """
    _not_negative(lead=lead, poll=poll)
    _positive(bandwidth=bandwidth)
    return max(0.0, lead - poll) * bandwidth


def preemptive_mm1(rates: Sequence[float], service: float) -> tuple[float, ...]:
    """Mean time in an M/M/1 queue for each class, the first one first, lower ones preempted and resumed.

    `T_k = (1/mu) / (1 - s_(k-1)) + (sum of rates up to k) / mu^2 / ((1 - s_(k-1)) (1 - s_k))` with s_k the
    load of classes 1..k (Kleinrock, Queueing Systems 2, 1976).

    Args:
        rates: arrivals of each class in a unit of time, the highest priority first.
        service: jobs the server does in a unit of time, the same for every class.

    Raises:
        SimError: the queue is not stable.

    """
    _positive(service=service)
    times: list[float] = []
    arrived = 0.0
    for rate in rates:
        _positive(rate=rate)
        above = arrived / service
        arrived += rate
        load = arrived / service
        if load >= 1:
            raise SimError(f"could not compute a queue: its load is {load:g}; it must be below 1")
        times.append(1 / service / (1 - above) + arrived / service**2 / ((1 - above) * (1 - load)))
    return tuple(times)


def just_in_time_ettr(mtbf: float, down: float, step: float = 0.0) -> float:
    """Share of time whose work is kept when survivors save after each failure: `e^(-down/M) (1 - step/(2M))`.

    The mechanism of Gupta et al., EuroSys 2024; the form is that of a renewal process. Each failure costs
    half a step of work on average, and `down`: detection, saving and restart, which begin anew when the next
    failure strikes within them. It does not depend on what a checkpoint costs, so it beats periodic ones
    (`exponential_ettr` at `exact_interval`) from some size of the job on.
    """
    _positive(mtbf=mtbf)
    _not_negative(down=down, step=step)
    return math.exp(-down / mtbf) * (1 - step / (2 * mtbf))
