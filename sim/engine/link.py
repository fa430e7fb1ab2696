"""Bandwidth that is divided evenly among those who use it at once: processor sharing."""

from __future__ import annotations

import simpy


class Flow:
    """A transfer. `done` happens at its end."""

    def __init__(self, env: simpy.Environment, size: float) -> None:
        self.left = size
        self.done = env.event()


class Link:
    """Bandwidth in bytes a second. What is left of each transfer is counted when one begins or ends."""

    def __init__(self, env: simpy.Environment, bytes_per_s: float) -> None:
        self._env = env
        self._bps = bytes_per_s
        self._flows: list[Flow] = []
        self._since_s = 0.0
        self._turn = 0

    def start(self, size: float) -> Flow:
        """Begin to transfer so many bytes."""
        flow = Flow(self._env, size)
        self._count()
        self._flows.append(flow)
        self._next()
        return flow

    def cancel(self, flow: Flow) -> None:
        """End a transfer before its end; one that has ended is none."""
        if flow in self._flows:
            self._count()
            self._flows.remove(flow)
            self._next()

    def _count(self) -> None:
        now_s = self._env.now
        if self._flows:
            share = (now_s - self._since_s) * self._bps / len(self._flows)
            for flow in self._flows:
                flow.left -= share
        self._since_s = now_s

    def _next(self) -> None:
        self._turn += 1
        if not self._flows:
            return
        turn, first = self._turn, min(self._flows, key=lambda flow: flow.left)
        wait = self._env.timeout(max(0.0, first.left) * len(self._flows) / self._bps)
        wait.callbacks.append(lambda _: self._end(turn, first))  # type: ignore[union-attr]

    def _end(self, turn: int, flow: Flow) -> None:
        # A timer of before the last change: it cannot be taken back, and is passed over.
        if turn != self._turn:
            return
        self._count()
        self._flows.remove(flow)
        flow.done.succeed()
        self._next()
