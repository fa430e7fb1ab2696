"""Randomness: one stream for each purpose and replication, whatever the policy or the cell.

Two policies of one study therefore see the same failures, repairs and requests, and differ by what they do.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

NAMES = ("failure", "repair", "spot", "workload", "predictor", "noise", "maintenance")
"""A stream's number is its place here; new ones go to the end, so that the others stay what they are."""


class Streams:
    """The streams of one replication."""

    def __init__(self, seed: int, replication: int) -> None:
        self._seed, self.replication = seed, replication

    def make(self, name: str, source: int = 0) -> np.random.Generator:
        """A new generator at the beginning of a stream. `source`: which of several users of one purpose."""
        key = (NAMES.index(name), self.replication, source)
        return np.random.Generator(np.random.PCG64(np.random.SeedSequence(self._seed, spawn_key=key)))

    @cached_property
    def noise(self) -> np.random.Generator:
        """What costs draw from, in the order in which they are paid."""
        return self.make("noise")

    @cached_property
    def workload(self) -> np.random.Generator:
        """What work draws from: arrivals and needs."""
        return self.make("workload")
