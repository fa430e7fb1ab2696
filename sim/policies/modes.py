"""Policies of how and where checkpoints are kept: while work goes on, in parts, on levels, in memory."""

from __future__ import annotations

from sim.errors import SimError
from sim.maths import theory
from sim.policies.around import above_0, known
from sim.policies.base import (
    MEMORY,
    ROUTINE,
    Action,
    Event,
    KeepReplica,
    SetInterval,
    SetLevels,
    SetMode,
    State,
)
from sim.policies.interval import LEAST_STALL_S


def _best_s(policy: str, state: State, stall_s: float) -> float:
    mtbf_s = known(policy, "the MTBF", state.mtbf_s)
    return theory.exact_interval(max(stall_s, LEAST_STALL_S), mtbf_s)


class Asynchronous:
    """Writes checkpoints while work goes on: a short stall, and a lag until each counts.

    The interval is the exact optimum for the stall, which does not depend on the lag. It is no shorter than
    the lag, nor is one set by hand: one checkpoint is written at a time (as in CheckFreq, FAST 2021).
    """

    name = "asynchronous"
    ignores = ROUTINE

    def __init__(self, interval_s: float | None = None) -> None:
        above_0(self.name, interval=interval_s)
        self._interval_s = interval_s

    def on_event(self, state: State, event: Event) -> list[Action]:
        if event.kind != "start":
            return []
        stall_s = known(self.name, "the stall of a checkpoint that is written later", state.async_stall_s)
        interval_s = self._interval_s or _best_s(self.name, state, stall_s)
        return [SetMode(asynchronous=True), SetInterval(max(interval_s, state.persist_s))]


class Incremental:
    """Writes what has changed since the last checkpoint, and everything once in `full_every`.

    The interval is the exact optimum for the mean stall. A restart reads the last whole checkpoint and all
    parts since, which is why not every checkpoint is a part.
    """

    name = "incremental"
    ignores = ROUTINE

    def __init__(self, full_every: int = 10, interval_s: float | None = None) -> None:
        above_0(self.name, full_every=full_every, interval=interval_s)
        self._full_every = full_every
        self._interval_s = interval_s

    def on_event(self, state: State, event: Event) -> list[Action]:
        if event.kind != "start":
            return []
        interval_s = self._interval_s
        if interval_s is None:
            whole_s = known(self.name, "the cost of a checkpoint", state.stall_s)
            parts = (1 + (self._full_every - 1) * state.increment) / self._full_every
            interval_s = _best_s(self.name, state, whole_s * parts)
        return [SetMode(full_every=self._full_every), SetInterval(interval_s)]


class MultiLevel:
    """Checkpoints to several levels, each as often as the failures ask for that it alone heals.

    Intervals `sqrt(2 stall / rate)` for each level (Benoit et al., TC 66(7), 2017), the dearer ones in whole
    multiples of the cheapest. `interval_s` sets the cheapest by hand and `remote_every` the multiple of the
    dearest.
    """

    name = "multilevel"
    ignores = ROUTINE

    def __init__(self, interval_s: float | None = None, remote_every: int | None = None) -> None:
        above_0(self.name, interval=interval_s, remote_every=remote_every)
        self._interval_s = interval_s
        self._remote_every = remote_every

    def on_event(self, state: State, event: Event) -> list[Action]:
        if event.kind != "start":
            return []
        levels = [level for level in state.levels if level.rate > 0]
        if not levels:
            raise SimError(
                f"could not use policy '{self.name}': no level heals a failure; give storage and failures"
            )
        best = theory.multilevel(
            [max(level.stall_s, LEAST_STALL_S) for level in levels], [level.rate for level in levels]
        ).intervals
        interval_s = self._interval_s or best[0]
        every = [max(1, round(length / interval_s)) for length in best]
        every[0] = 1
        if self._remote_every is not None and len(every) > 1:
            every[-1] = self._remote_every
        return [
            SetLevels(tuple((level.name, count) for level, count in zip(levels, every, strict=True))),
            SetInterval(interval_s),
        ]


class InMemory:
    """Keeps copies in the memory of other machines, and one on storage every `remote_s`.

    Wang et al., SOSP 2023 (Gemini): `copies` machines form a group and hold each other's state, which is lost
    when all of a group are. The interval is the exact optimum for the stall of a copy, and no shorter than a
    step or a copy.
    """

    name = "in-memory"
    ignores = ROUTINE

    def __init__(
        self, copies: int = 2, remote_s: float = 3 * 3600.0, interval_s: float | None = None
    ) -> None:
        if copies < 2:
            raise SimError(f"could not make policy '{self.name}': copies is {copies}; it must be 2 or more")
        above_0(self.name, remote=remote_s, interval=interval_s)
        self._copies = copies
        self._remote_s = remote_s
        self._interval_s = interval_s

    def on_event(self, state: State, event: Event) -> list[Action]:
        if event.kind != "start":
            return []
        copy_s = known(self.name, "the stall of a copy into another machine's memory", state.replica_s)
        if not state.levels:
            raise SimError(
                f"could not use policy '{self.name}': it needs storage beside memory; give storage"
            )
        interval_s = self._interval_s or max(_best_s(self.name, state, copy_s), copy_s, state.step_s)
        remote = max(1, round(self._remote_s / interval_s))
        return [
            KeepReplica(self._copies),
            SetLevels(((MEMORY, 1), (state.levels[-1].name, remote))),
            SetInterval(interval_s),
        ]
