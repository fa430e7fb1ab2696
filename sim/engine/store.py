"""Where the checkpoints of a queue go: each takes its time, or jobs share the bandwidth."""

from __future__ import annotations

from collections.abc import Callable

import simpy

from sim.engine.hardware import Incident
from sim.engine.jobs import Job, unless_changed
from sim.engine.link import Link
from sim.engine.stage import Stage
from sim.engine.terms import SEVERITY
from sim.maths.laws import Law
from sim.studies.config import Storage


class Store:
    """The storage that survives most. `shared`: what a checkpoint takes depends on who else moves bytes."""

    def __init__(self, stage: Stage, state_bytes: float) -> None:
        self._stage, self._size = stage, state_bytes
        self._storage: Storage | None = max(
            reversed(stage.config.storage), key=lambda one: SEVERITY[one.lost_with], default=None
        )
        self._link: Link | None = None
        if self._storage and self._storage.shared and self._storage.stall is None:
            self._link = Link(stage.env, self._storage.write_bps)

    @property
    def shared(self) -> bool:
        return self._link is not None

    def lost_with(self, incident: Incident) -> bool:
        """Whether what is there does not survive it."""
        return self._storage is not None and incident.severity >= SEVERITY[self._storage.lost_with]

    def save_s(self, job: Job) -> float:
        """What a checkpoint stalls a job, with all the bandwidth there is."""
        storage = self._storage
        return 0.0 if storage is None else self._moved_s(storage.write_bps, storage.stall, job)

    def save(self, job: Job, act: Callable[[Job], None]) -> None:
        """Write the state of a job, then do it unless the job's phase changes before."""
        if self._link is None:
            self._stage.at(self.save_s(job), unless_changed(job, act))
        else:
            self._move(job, self._link, self._size, act)

    def restore(self, job: Job, starting_s: float, act: Callable[[Job], None]) -> None:
        """The same for reading it back, where there is any, after a start."""
        storage, link, restore_s = self._storage, self._link, 0.0
        if storage is not None and job.kept_s > 0:
            if link is not None and storage.restore is None:
                size = self._size * storage.write_bps / storage.read_bps
                read = unless_changed(job, lambda one: self._move(one, link, size, act))
                self._stage.at(starting_s, read)
                return
            restore_s = self._moved_s(storage.read_bps, storage.restore, job)
        self._stage.at(starting_s + restore_s, unless_changed(job, act))

    def stop(self, job: Job) -> None:
        """Move no more bytes of a job."""
        if self._link is not None and job.flow is not None:
            self._link.cancel(job.flow)
            job.flow = None

    def _moved_s(self, bandwidth: float, law: Law | None, job: Job) -> float:
        if law is not None:
            return self._stage.cost(law)
        of_all = self._storage is not None and self._storage.shared
        return self._size / (bandwidth if of_all else bandwidth * job.kind.nodes)

    def _move(self, job: Job, link: Link, size: float, act: Callable[[Job], None]) -> None:
        job.flow, then = link.start(size), unless_changed(job, act)

        def moved(_: simpy.Event) -> None:
            self._stage.counts["events"] += 1
            then()

        job.flow.done.callbacks.append(moved)  # type: ignore[union-attr]
