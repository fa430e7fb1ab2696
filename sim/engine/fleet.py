"""Machines: which are whole, who has which, who waits for some."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Protocol

import simpy

from sim.engine.hardware import Announcement, Incident
from sim.engine.ledger import Span


class Tenant(Protocol):
    """Who can have machines. `nodes[i]` is the machine in place i; None where it is one of `missing`."""

    nodes: list[int | None]
    missing: set[int]

    def struck(self, incident: Incident, places: Sequence[int]) -> None:
        """Machines in these places failed; those that are gone are None by now."""
        ...

    def told(self, announcement: Announcement, places: Sequence[int]) -> None:
        """Machines in these places are said to go."""
        ...

    def repaired(self, node: int) -> None:
        """A machine that the tenant had is whole again."""
        ...


class Fleet:
    """All machines of a cluster. Who waits longest is served first, and nobody passes it."""

    def __init__(self, env: simpy.Environment, machines: int, spans: list[Span] | None) -> None:
        self._env = env
        self._owner: list[tuple[Tenant, int] | None] = [None] * machines
        self._last: list[Tenant | None] = [None] * machines
        self._down = [False] * machines
        self._leaving = [False] * machines
        self._free = [True] * machines
        self._heap = list(range(machines))
        self._waiting: list[tuple[Tenant, simpy.Event]] = []
        self._spans = spans
        self.free = machines
        self.down = 0
        self._areas_s: dict[int, float] = {}
        """Time for which so many were down, up to the last change."""
        self.most_down = 0
        self._since_s = 0.0

    def claim(self, tenant: Tenant) -> simpy.Event | None:
        """Machines for all places of a tenant that have none: None if it has them now, else when it does."""
        if not self._waiting and self._serve(tenant):
            return None
        event = self._env.event()
        self._waiting.append((tenant, event))
        return event

    def withdraw(self, tenant: Tenant) -> None:
        """The tenant waits no more."""
        self._waiting = [(other, event) for other, event in self._waiting if other is not tenant]

    def release(self, tenant: Tenant, places: Sequence[int]) -> None:
        """Give machines back."""
        for place in places:
            node = tenant.nodes[place]
            if node is not None:
                tenant.nodes[place] = None
                tenant.missing.add(place)
                self._owner[node] = None
                self._add(node)
        self._serve_all()

    def replace(self, tenant: Tenant, place: int, announcement: Announcement) -> bool:
        """Another machine for one that is said to go; False without a free one."""
        if self._waiting or not self.free:
            return False
        old = tenant.nodes[place]
        tenant.nodes[place] = None
        tenant.missing.add(place)
        self._serve(tenant)
        if old is not None:
            self._owner[old] = None
            self._leaving[old] = True
            if announcement.kind == "prediction":
                # Which may be false: the machine is drained for as long as it could come true.
                wait = self._env.timeout(announcement.lead_s * (1 + 1e-9) + 1e-6)
                wait.callbacks.append(lambda _: self._stayed(old))  # type: ignore[union-attr]
        return True

    def _stayed(self, node: int) -> None:
        if not self._down[node]:
            self._leaving[node] = False
            self._add(node)
            self._serve_all()

    def announce(self, announcement: Announcement) -> None:
        """Tell tenants; nobody is given a machine that is going."""
        hit: dict[int, tuple[Tenant, list[int]]] = {}
        for node in announcement.nodes:
            if self._down[node]:
                continue
            owner = self._owner[node]
            if announcement.kind == "notice":
                self._leaving[node] = True
                self._take(node)
            if owner is not None:
                hit.setdefault(id(owner[0]), (owner[0], []))[1].append(owner[1])
        for tenant, places in hit.values():
            tenant.told(announcement, places)

    def strike(self, incident: Incident) -> None:
        """Machines fail, and come back when they are repaired."""
        hit: dict[int, tuple[Tenant, list[int]]] = {}
        gone: list[int] = []
        for node in incident.nodes:
            if self._down[node]:
                continue
            owner = self._owner[node]
            if owner is not None:
                hit.setdefault(id(owner[0]), (owner[0], []))[1].append(owner[1])
            if incident.down_s > 0:
                self._take(node)
                self._down[node] = True
                gone.append(node)
                if owner is not None:
                    owner[0].nodes[owner[1]] = None
                    owner[0].missing.add(owner[1])
                    self._owner[node] = None
                    self._last[node] = owner[0]
            elif incident.severity:
                # Taken and back at once: one that was announced may be given away again.
                self._leaving[node] = False
                self._add(node)
        if gone:
            self._count(len(gone))
            # A callback and no process: a repair is one event.
            back = self._env.timeout(incident.down_s)
            back.callbacks.append(lambda _: self._back(gone))  # type: ignore[union-attr]
            if self._spans is not None:
                now_s = self._env.now
                self._spans += [
                    Span(now_s, now_s + incident.down_s, f"node{node}", "down", incident.cause)
                    for node in gone
                ]
        for tenant, places in hit.values():
            tenant.struck(incident, places)
        self._serve_all()

    def close(self) -> None:
        """Count to the end."""
        self._count(0)

    @property
    def down_area_s(self) -> float:
        """Seconds that machines were down, added up."""
        return sum(count * seconds for count, seconds in self._areas_s.items())

    def spare_area_s(self, spares: int) -> float:
        """Seconds that spares stood in for machines that were down, added up."""
        return sum(min(count, spares) * seconds for count, seconds in self._areas_s.items())

    def _count(self, more: int) -> None:
        passed_s = self._env.now - self._since_s
        self._areas_s[self.down] = self._areas_s.get(self.down, 0.0) + passed_s
        self._since_s = self._env.now
        self.down += more
        self.most_down = max(self.most_down, self.down)

    def _back(self, nodes: Sequence[int]) -> None:
        self._count(-len(nodes))
        for node in nodes:
            self._down[node] = self._leaving[node] = False
            self._add(node)
        for node in nodes:
            last, self._last[node] = self._last[node], None
            if last is not None:
                last.repaired(node)
        self._serve_all()

    def _add(self, node: int) -> None:
        if self._owner[node] is None and not self._leaving[node] and not self._free[node]:
            self._free[node] = True
            self.free += 1
            heapq.heappush(self._heap, node)

    def _take(self, node: int) -> None:
        # It stays in the heap, where it is passed over.
        if self._free[node]:
            self._free[node] = False
            self.free -= 1

    def _serve(self, tenant: Tenant) -> bool:
        if len(tenant.missing) > self.free:
            return False
        for place in sorted(tenant.missing):
            node = heapq.heappop(self._heap)
            while not self._free[node]:
                node = heapq.heappop(self._heap)
            self._take(node)
            tenant.nodes[place] = node
            self._owner[node] = (tenant, place)
        tenant.missing.clear()
        return True

    def _serve_all(self) -> None:
        while self._waiting and self._serve(self._waiting[0][0]):
            self._waiting.pop(0)[1].succeed()
