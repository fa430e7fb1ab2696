"""Policies of shared machines: who makes room for whom, how replicas start, what becomes of their caches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal

from sim.policies.around import Around, above_0
from sim.policies.base import Action, Event, Policy, Preempt, Recompute, RestoreCache, Start, State, Stop
from sim.policies.interval import Never


class Preemption(Around):
    """Makes room for a job of higher priority in one of three ways; saving is what `torpor` is for.

    `base` takes checkpoints against failures, none unless told so.
    """

    name = "preemption"

    def __init__(
        self,
        how: Literal["kill", "checkpoint", "none"] = "checkpoint",
        base: Policy | None = None,
        interval_s: float | None = None,
    ) -> None:
        super().__init__(base or (None if interval_s else Never()), interval_s)
        self._how: Literal["kill", "checkpoint", "none"] = how

    def _more(self, state: State, event: Event) -> list[Action]:
        return [Preempt(self._how)] if event.kind == "preempt" else []


class _Autoscaling(ABC):
    """Starts replicas for requests that wait, `per_replica` for each, and stops idle ones after `idle_s`."""

    name: str

    def __init__(self, per_replica: int = 8, idle_s: float = 300.0) -> None:
        above_0(self.name, per_replica=per_replica, idle=idle_s)
        self._per_replica = per_replica
        self._idle_s = idle_s

    @abstractmethod
    def _how(self, state: State) -> Literal["cold", "warm"]: ...

    def on_event(self, state: State, event: Event) -> list[Action]:
        service = state.service
        if service is None:
            return []
        if event.kind == "idle":
            return [Stop(self._idle_s)]
        if event.kind not in ("arrival", "failure", "repaired"):
            return []
        for_least = service.least - service.running - service.starting
        wanted = max(-(-service.waiting // self._per_replica) - service.starting, for_least)
        room = service.most - service.running - service.starting
        count = min(wanted, room)
        return [Start(self._how(state), count)] if count > 0 else []


class ColdStart(_Autoscaling):
    """Every replica starts from nothing."""

    name = "cold-start"

    def _how(self, state: State) -> Literal["cold", "warm"]:
        return "cold"


class WarmStart(_Autoscaling):
    """Replicas start from a checkpoint of a running one, where there is one."""

    name = "warm-start"

    def _how(self, state: State) -> Literal["cold", "warm"]:
        return "cold" if state.service is None or state.service.warm_s is None else "warm"


class CacheRestore(WarmStart):
    """Loads the KV cache of a session that goes on, wherever it was kept; replicas as with a warm start."""

    name = "kv-restore"

    def on_event(self, state: State, event: Event) -> list[Action]:
        if event.kind == "resume":
            return [Recompute()] if state.cache_restore_s is None else [RestoreCache()]
        return super().on_event(state, event)


class CacheRecompute(WarmStart):
    """Computes the KV cache of a session that goes on anew; replicas as with a warm start."""

    name = "kv-recompute"

    def on_event(self, state: State, event: Event) -> list[Action]:
        return [Recompute()] if event.kind == "resume" else super().on_event(state, event)


class CacheCheaper(WarmStart):
    """Loads or computes a KV cache, whichever is faster for that many tokens; replicas as with a warm start.

    Loading takes `cache_restore_s` a token and `overhead_s` each time; computing `cache_compute_s` a token.
    """

    name = "kv-cheaper"

    def __init__(self, overhead_s: float = 0.0, per_replica: int = 8, idle_s: float = 300.0) -> None:
        super().__init__(per_replica, idle_s)
        self._overhead_s = overhead_s

    def on_event(self, state: State, event: Event) -> list[Action]:
        if event.kind != "resume":
            return super().on_event(state, event)
        if state.cache_restore_s is None:
            return [Recompute()]
        restore_s = self._overhead_s + event.tokens * state.cache_restore_s
        return [
            RestoreCache(self._overhead_s)
            if restore_s < event.tokens * state.cache_compute_s
            else Recompute()
        ]
