"""What a study says once read: cluster, failures, costs, work. Seconds, bytes, dollars; floats.

Plain values that can be pickled, so that a cell of a study runs on any machine. Laws are those
of `sim.maths.laws`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from sim.maths.laws import Constant, Law

Scope = Literal["node", "rack", "switch", "nothing"]
"""What a group failure takes, and with what a checkpoint level is lost."""

NO_TIME = Constant(0.0)


@dataclass(frozen=True)
class Cluster:
    """Machines. `nodes` are those that work runs on, `spares` come on top; both fail.

    Nodes are divided evenly among racks and racks among switches, in order; 0 is none of them.
    """

    nodes: int
    gpus_per_node: int = 8
    spares: int = 0
    racks: int = 0
    switches: int = 0

    @property
    def machines(self) -> int:
        """Nodes and spares."""
        return self.nodes + self.spares


@dataclass(frozen=True)
class NodeFailures:
    """Each node fails after a time of `law` since it was last whole.

    `process`: only what runs there ends; the node needs no repair, and what is on its disk stays.
    """

    law: Law
    process: bool = False


@dataclass(frozen=True)
class GroupFailures:
    """Each rack or switch fails after a time of `law`, with every node in it. `repair` None: as for nodes."""

    scope: Literal["rack", "switch"]
    law: Law
    repair: Law | None = None


@dataclass(frozen=True)
class TraceFailures:
    """Failures as they happened, with their repairs.

    `faults`: start and length in seconds, and the number of the node. Replication r sees the trace from
    `start_s + r offset_s` on, or from a random moment where `offset_s` is None. `repeat`: begins anew at its
    end, else there are no more.
    """

    path: str
    faults: tuple[tuple[float, float, int], ...]
    span_s: float
    start_s: float = 0.0
    offset_s: float | None = 0.0
    repeat: bool = False


Failures = NodeFailures | GroupFailures | TraceFailures


@dataclass(frozen=True)
class Maintenance:
    """Every so often `nodes` neighbouring nodes are taken away for `lasting`, told `lead_s` before."""

    every: Law
    nodes: int
    lead_s: float
    lasting: Law


@dataclass(frozen=True)
class SpotNotice:
    """Each node is taken after a time of `law` and comes back after `away`.

    A share `coverage` of that is told `lead_s` before, and is looked for every `poll_s`.
    """

    law: Law
    away: Law
    lead_s: float
    coverage: float = 1.0
    poll_s: float = 0.0


@dataclass(frozen=True)
class Predictor:
    """Predicts a share `recall` of failures `lead_s` ahead; a share `precision` of predictions is true."""

    precision: float
    recall: float
    lead_s: float


Notice = Maintenance | SpotNotice | Predictor


@dataclass(frozen=True)
class Storage:
    """Where a checkpoint goes. Bandwidth in bytes a second: of a node, or of all together where `shared`.

    A shared one is divided among those who use it at once. What is there is lost with what `lost_with` says.
    `stall`, `persist`, `restore`: what they take, None where bytes and bandwidth say it.
    """

    name: str
    write_bps: float = math.inf
    read_bps: float = math.inf
    shared: bool = False
    lost_with: Scope = "nothing"
    stall: Law | None = None
    persist: Law | None = None
    restore: Law | None = None


@dataclass(frozen=True)
class Costs:
    """What else takes time, and what machines cost.

    Attributes:
        startup: from nodes to work, at the beginning.
        detection: from a failure to somebody noticing.
        restart: from nodes to work after a failure, without reading the checkpoint.
        async_stall: stall of a checkpoint that is written while work goes on; None: the job cannot do that.
        increment: share of a whole checkpoint that one of what has changed is.
        replica_stall: copying the state into the memory of other nodes; None: not to be had.
        replica_restore: reading it from there.
        jit_save: saving what surviving replicas hold, after a failure; None: no data-parallel replica holds
            the whole state.
        migrate: time work stops for a planned move of a node; None: it cannot move.
        swap: the restart where a spare that stands ready takes the place of a failed node; None: no shorter.
        requeue: from giving the nodes back to being considered again.
        node_usd_per_s: price of a node, working or spare.

    """

    startup: Law = NO_TIME
    detection: Law = NO_TIME
    restart: Law = NO_TIME
    async_stall: Law | None = None
    increment: float = 1.0
    replica_stall: Law | None = None
    replica_restore: Law = NO_TIME
    jit_save: Law | None = None
    migrate: Law | None = None
    swap: Law | None = None
    requeue: Law = NO_TIME
    node_usd_per_s: float = 0.0


@dataclass(frozen=True)
class Training:
    """`count` gangs, each of `nodes` nodes that all must live, with `work_s` of useful work.

    `replicas`: data-parallel copies of the state that the nodes of a gang hold among them.
    """

    nodes: int
    work_s: float = math.inf
    replicas: int = 1
    step_s: float = 0.0
    state_bytes: float = 0.0
    count: int = 1
    final_checkpoint: bool = False


@dataclass(frozen=True)
class JobClass:
    """Jobs that come every `gaps` (None: all at the beginning), at most `most`, a higher `priority` first."""

    name: str
    nodes: int
    work: Law
    priority: int = 0
    gaps: Law | None = None
    most: int | None = None


@dataclass(frozen=True)
class Queue:
    """Jobs that wait for nodes of the cluster."""

    classes: tuple[JobClass, ...]
    state_bytes: float = 0.0


@dataclass(frozen=True)
class Requests:
    """Requests that a service gets: of a trace (`path`), or Poisson ones at `per_s` with bursts.

    A burst comes every `burst_every_s` on average and multiplies the rate by `burst_factor` for
    `burst_s`; 0: none.
    """

    path: str = ""
    times_s: tuple[float, ...] = ()
    context_tokens: tuple[int, ...] = ()
    generated_tokens: tuple[int, ...] = ()
    per_s: float = 0.0
    burst_every_s: float = 0.0
    burst_s: float = 0.0
    burst_factor: float = 1.0
    mean_context: float = 1024.0
    mean_generated: float = 128.0


@dataclass(frozen=True)
class Inference:
    """Replicas of a service.

    `prefill_tps`, `decode_tps`: tokens a second of a replica; `slots`: requests it serves at once.
    `keep_share`: share of requests that go on with a session whose cache was kept.
    """

    requests: Requests
    least: int = 0
    most: int = 1
    slots: int = 1
    prefill_tps: float = 10_000.0
    decode_tps: float = 1_000.0
    cold: Law = NO_TIME
    warm: Law | None = None
    cache_bytes_per_token: float = 0.0
    cache_read_bps: float = math.inf
    keep_share: float = 0.0


@dataclass(frozen=True)
class RegionCapacity:
    """A region or zone: at each tick whether there is spot capacity; dollars a second."""

    name: str
    available: tuple[int, ...]
    spot_usd_per_s: float
    on_demand_usd_per_s: float


@dataclass(frozen=True)
class SpotWork:
    """A job with a deadline on spot and on-demand machines, tick by tick."""

    work_s: float
    deadline_s: float
    restart_s: float
    tick_s: float
    regions: tuple[RegionCapacity, ...]
    state_bytes: float = 0.0
    move_usd_per_byte: float = 0.0
    starts: tuple[int, ...] = (0,)


Workload = Training | Queue | Inference | SpotWork


@dataclass(frozen=True)
class PolicySpec:
    """A policy by name, and its options: times in seconds, sizes in bytes, shares as numbers."""

    name: str
    options: Mapping[str, object] = field(default_factory=dict[str, object])


@dataclass(frozen=True)
class Replications:
    """How many: until the half-width of the interval is `rel_half_width` of the mean, within limits."""

    least: int = 30
    most: int = 2000
    rel_half_width: float = 0.01


@dataclass(frozen=True)
class Config:
    """Everything that one cell of a study runs with. `horizon_s`: when watching ends."""

    cluster: Cluster
    workload: Workload
    policy: PolicySpec
    failures: tuple[Failures, ...] = ()
    repair: Law = NO_TIME
    notices: tuple[Notice, ...] = ()
    storage: tuple[Storage, ...] = ()
    costs: Costs = field(default_factory=Costs)
    horizon_s: float = math.inf
    warmup_s: float = 0.0
    replications: Replications = field(default_factory=Replications)
    seed: int = 0

    @property
    def predictor(self) -> Predictor | None:
        """The one that predicts failures, if any."""
        return next((notice for notice in self.notices if isinstance(notice, Predictor)), None)
