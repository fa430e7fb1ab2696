"""Replicas of an inference service: requests, autoscaling, cold and warm starts, KV caches, failures.

A replica starts on any free machine. It serves `slots` requests at once: each is prefilled at `prefill_tps`
and decoded at its share of `decode_tps`, whatever else the replica does. Requests are served in order by the
first replica with a free slot. One that was being served when its replica failed begins anew, before those
that wait.
"""

from __future__ import annotations

import bisect
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from sim.engine.hardware import Incident, Item
from sim.engine.ledger import Ledger, Outcome, Span
from sim.engine.stage import Stage
from sim.engine.streams import Streams
from sim.errors import SimError
from sim.policies.asked import ask
from sim.policies.base import (
    Event,
    EventKind,
    Policy,
    Recompute,
    RestoreCache,
    Service,
    Start,
    State,
    Stop,
)  # fmt: skip
from sim.studies.config import Config, Inference, Requests


@dataclass(slots=True)
class _Request:
    at_s: float
    context: int
    generated: int
    resumed: bool  # it goes on with a session whose cache is kept
    first_s: float = math.nan
    done_s: float = math.nan


@dataclass(slots=True)
class _Replica:
    number: int
    phase: str  # startup, idle or goodput; off while it is not wanted or has no machine
    machine: int = -1
    since_s: float = 0.0
    version: int = 0
    serving: list[_Request] = field(default_factory=list[_Request])


def arrivals(requests: Requests, keep_share: float, streams: Streams, horizon_s: float) -> list[_Request]:
    """Requests in order of time: of the trace, or random ones with bursts.

    Raises:
        SimError: random requests come for ever.

    """
    rng = streams.make("workload")
    if requests.times_s:
        times = np.array(requests.times_s)
        context, generated = np.array(requests.context_tokens), np.array(requests.generated_tokens)
    else:
        if not math.isfinite(horizon_s):
            raise SimError("could not play a service: its requests come for ever; give a horizon")
        times = _poisson(rng, requests.per_s, 0.0, horizon_s)
        if requests.burst_every_s > 0:
            more = requests.per_s * (requests.burst_factor - 1)
            begins = _poisson(rng, 1 / requests.burst_every_s, 0.0, horizon_s)
            bursts = [_poisson(rng, more, begin, begin + requests.burst_s) for begin in begins.tolist()]
            times = np.sort(np.concatenate([times, *bursts]))
        lengths = rng.exponential(1.0, (2, times.size))
        context = np.ceil(lengths[0] * requests.mean_context).astype(np.int64)
        generated = np.ceil(lengths[1] * requests.mean_generated).astype(np.int64)
    resumed = streams.make("workload", 1).random(times.size) < keep_share
    return [
        _Request(*row)
        for row in zip(times.tolist(), context.tolist(), generated.tolist(), resumed.tolist(), strict=True)
        if row[0] < horizon_s
    ]


def _poisson(rng: np.random.Generator, per_s: float, from_s: float, to_s: float) -> np.ndarray:
    return np.sort(rng.uniform(from_s, to_s, rng.poisson(max(0.0, per_s) * (to_s - from_s))))


class _Run(Stage):
    def __init__(
        self, config: Config, work: Inference, streams: Streams, policy: Policy, timeline: bool
    ) -> None:
        names = (
            "failures", "requests_restarted", "starts_cold", "starts_warm", "stops", "caches_restored",
            "caches_recomputed", "cache_s",
        )  # fmt: skip
        super().__init__(config, streams, names)
        self.work, self.policy = work, policy
        if work.most > config.cluster.machines:
            raise SimError(
                f"could not play a service: {work.most} replicas do not fit on {config.cluster.machines} "
                "nodes; allow fewer, or make the cluster larger"
            )
        self.ledger = Ledger()
        self.spans: list[Span] | None = [] if timeline else None
        self.requests = arrivals(work.requests, work.keep_share, streams, config.horizon_s)
        self.waiting: deque[_Request] = deque()
        self.replicas = [
            _Replica(number, "idle", number) if number < work.least else _Replica(number, "off")
            for number in range(work.most)
        ]
        self.free = list(range(work.least, config.cluster.machines))  # in order
        self.away: set[int] = set()
        self.ran = work.least > 0  # a checkpoint to start from takes a replica that once ran
        self.unserved = len(self.requests)
        self.wall_s = 0.0
        self.recoveries: list[float] = []
        self.failed_at: list[float] = []
        self.peak = work.least

    def enter(self, replica: _Replica, phase: str) -> None:
        """End a phase of a replica and begin another."""
        self.account(replica, self.env.now)
        replica.phase, replica.since_s = phase, self.env.now
        replica.version += 1

    def account(self, replica: _Replica, end_s: float) -> None:
        """Put the time of a replica's phase, up to `end_s`, into its bucket."""
        spent_s = end_s - replica.since_s
        if replica.phase != "off":
            self.ledger.add(replica.phase, spent_s)
            self.wall_s += spent_s
        if self.spans is not None and spent_s > 0 and replica.phase != "off":
            self.spans.append(Span(replica.since_s, end_s, f"replica{replica.number}", replica.phase))

    # What the policy decides

    def service(self) -> Service:
        phases = [replica.phase for replica in self.replicas]
        running, starting = phases.count("idle") + phases.count("goodput"), phases.count("startup")
        warm = self.work.warm
        return Service(
            running=running,
            starting=starting,
            waiting=len(self.waiting),
            least=self.work.least,
            most=min(len(phases), running + starting + len(self.free)),
            warm_s=warm.mean if warm is not None and self.ran else None,
            cold_s=self.work.cold.mean,
        )

    def ask(self, kind: EventKind, replica: _Replica | None = None) -> None:
        """Tell the policy, and do what it says of replicas."""
        state = State(now_s=self.env.now, service=self.service())
        for action in ask(self.policy, state, Event(kind)):
            match action:
                case Start(how, count):
                    for _ in range(count):
                        self.start(how)
                case Stop(after_s) if replica is not None:
                    version = replica.version
                    self.at(after_s, lambda one=replica, then=version: self.stop(one, then))
                case _:
                    raise SimError(
                        f"could not play a service with policy '{self.policy.name}': it asks for "
                        f"{type(action).__name__}, which a service does not have; use another policy"
                    )

    def first_token_s(self, request: _Request) -> float:
        """How long until the first token: a prefill, or getting the cache of a session back."""
        compute_s = request.context / self.work.prefill_tps
        if not request.resumed:
            return compute_s
        per_token_s = self.work.cache_bytes_per_token / self.work.cache_read_bps
        state = State(
            now_s=self.env.now,
            cache_restore_s=per_token_s or None,
            cache_compute_s=1 / self.work.prefill_tps,
        )
        actions = ask(self.policy, state, Event("resume", tokens=request.context))
        restored = next((action for action in actions if isinstance(action, RestoreCache)), None)
        if not all(isinstance(action, RestoreCache | Recompute) for action in actions):
            raise SimError(
                f"could not play a service with policy '{self.policy.name}': of a cache it says {actions}, "
                "not to restore or to compute it; use another policy"
            )
        if restored is None:
            self.counts["caches_recomputed"] += 1
            seconds = compute_s
        elif not per_token_s:
            raise SimError(
                f"could not play a service with policy '{self.policy.name}': it loads caches, and nothing "
                "says how long that takes; set inference.cache_per_token and inference.cache_read"
            )
        else:
            self.counts["caches_restored"] += 1
            seconds = request.context * per_token_s + restored.overhead_s
        self.counts["cache_s"] += seconds
        return seconds

    # What happens

    def start(self, how: str) -> None:
        """Start a replica on the first free machine; without one nothing happens."""
        replica = next((one for one in self.replicas if one.phase == "off"), None)
        if replica is None or not self.free:
            return
        replica.machine = self.free.pop(0)
        warm = self.work.warm if how == "warm" and self.ran else None
        self.counts["starts_cold" if warm is None else "starts_warm"] += 1
        starting_s = self.cost(self.work.cold if warm is None else warm)
        self.enter(replica, "startup")
        version = replica.version
        self.at(starting_s, lambda: self.ready(replica) if replica.version == version else None)

    def ready(self, replica: _Replica) -> None:
        self.ran = True
        self.enter(replica, "idle")
        if self.failed_at:
            self.recoveries.append(self.env.now - self.failed_at.pop(0))
        running = sum(one.phase in ("idle", "goodput") for one in self.replicas)
        self.peak = max(self.peak, running)
        self.serve()
        if replica.phase == "idle":
            self.ask("idle", replica)

    def stop(self, replica: _Replica, version: int) -> None:
        """Stop a replica that has been idle since; not one of the least."""
        there = sum(one.phase in ("idle", "goodput", "startup") for one in self.replicas)
        if replica.version == version and replica.phase == "idle" and there > self.work.least:
            self.counts["stops"] += 1
            self.enter(replica, "off")
            bisect.insort(self.free, replica.machine)

    def come(self, number: int) -> None:
        request = self.requests[number]
        if number + 1 < len(self.requests):
            self.at(self.requests[number + 1].at_s - self.env.now, lambda: self.come(number + 1))
        self.waiting.append(request)
        self.serve()
        if self.waiting:
            self.ask("arrival")

    def serve(self) -> None:
        for replica in self.replicas:
            while self.waiting and replica.phase in ("idle", "goodput"):
                if len(replica.serving) >= self.work.slots:
                    break
                self.begin(replica, self.waiting.popleft())
            if not self.waiting:
                return

    def begin(self, replica: _Replica, request: _Request) -> None:
        if replica.phase == "idle":
            self.enter(replica, "goodput")
        first_s = self.first_token_s(request)
        request.first_s = self.env.now + first_s
        replica.serving.append(request)
        decode_s = request.generated * self.work.slots / self.work.decode_tps
        self.at(first_s + decode_s, lambda: self.finish(replica, request))

    def finish(self, replica: _Replica, request: _Request) -> None:
        if not any(one is request for one in replica.serving):
            return  # its replica failed in between
        replica.serving = [one for one in replica.serving if one is not request]
        request.done_s = self.env.now
        self.unserved -= 1
        self.serve()
        if not replica.serving:
            self.enter(replica, "idle")
            self.ask("idle", replica)

    def befall(self, item: Item) -> None:
        if not isinstance(item, Incident):
            return
        nodes = [node for node in item.nodes if node not in self.away]
        hit = [one for one in self.replicas if one.phase != "off" and one.machine in nodes]
        if item.down_s > 0:
            self.away.update(nodes)
            self.free = [node for node in self.free if node not in self.away]
            self.at(item.down_s, lambda: self.back(nodes))
        for replica in hit:
            if item.down_s == 0:
                bisect.insort(self.free, replica.machine)
            self.counts["failures"] += 1
            self.failed_at.append(self.env.now)
            self.counts["requests_restarted"] += len(replica.serving)
            for request in replica.serving[::-1]:
                request.first_s = math.nan
                self.waiting.appendleft(request)
            replica.serving = []
            self.enter(replica, "off")
        if hit:
            self.serve()
            self.ask("failure")

    def back(self, nodes: Sequence[int]) -> None:
        self.away.difference_update(nodes)
        self.free = sorted([*self.free, *nodes])
        self.ask("repaired")

    def play(self) -> bool:
        """Play to the end: True once all requests are served, False at the horizon."""
        self.let_happen()
        for replica in self.replicas:
            if replica.phase == "idle":
                self.ask("idle", replica)
        if self.requests:
            self.at(self.requests[0].at_s, lambda: self.come(0))
        while self.unserved:
            if self.env.peek() > self.config.horizon_s:
                return False
            self.env.step()
        return True


def run(config: Config, streams: Streams, policy: Policy, timeline: bool) -> Outcome:
    """Play a service until every request is served, or to its horizon.

    The wall time is that of all replicas together while they are wanted: `goodput` of it they serve. Of a
    request that still waits at the end, its wait so far counts; of one that is being served, nothing.

    Raises:
        SimError: the replicas do not fit the cluster, requests come for ever, or the policy asks for what a
            service does not have.

    """
    work = config.workload
    assert isinstance(work, Inference)
    played = _Run(config, work, streams, policy, timeline)
    done = played.play()
    end_s = played.env.now if done else config.horizon_s
    for replica in played.replicas:
        played.account(replica, end_s)
    buckets, recoveries = played.ledger.buckets(), played.recoveries
    served = [one for one in played.requests if not math.isnan(one.done_s) and one.at_s >= config.warmup_s]
    # Who still waits has waited for so long at least. Without them a service that serves nobody is fastest.
    so_far_s = [end_s - one.at_s for one in played.waiting if one.at_s >= config.warmup_s]
    metrics = {
        "wall_s": played.wall_s,
        "goodput_s": buckets["goodput"],
        "ettr": buckets["goodput"] / played.wall_s if played.wall_s else 0.0,
        "makespan_s": end_s,
        "requests": float(len(played.requests)),
        "requests_done": float(len(played.requests) - played.unserved),
        **_spread("ttft", [one.first_s - one.at_s for one in served] + so_far_s),
        **_spread("latency", [one.done_s - one.at_s for one in served] + so_far_s),
        "replicas_mean": played.wall_s / end_s if end_s else 0.0,
        "replicas_most": float(played.peak),
        **({"recovery_s": math.fsum(recoveries) / len(recoveries)} if recoveries else {}),
        "cost_usd": played.wall_s * config.costs.node_usd_per_s,
        **played.counts,
    }
    return Outcome("done" if done else "horizon", metrics, buckets, recoveries, played.spans or [])


def _spread(name: str, values: list[float]) -> dict[str, float]:
    if not values:
        return {}  # no time, and not one of 0
    p50, p95, p99 = np.quantile(values, (0.5, 0.95, 0.99)).tolist()
    mean = math.fsum(values) / len(values)
    return {f"{name}_mean_s": mean, f"{name}_p50_s": p50, f"{name}_p95_s": p95, f"{name}_p99_s": p99}
