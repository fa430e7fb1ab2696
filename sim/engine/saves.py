"""Checkpoints that exist: which of them count, and which survive a failure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from sim.engine.terms import Terms
from sim.policies.base import MEMORY

SAME_S = 1e-6
"""Times this close are one: what ends as a failure strikes has ended."""


@dataclass(slots=True)
class Save:
    """A checkpoint.

    Attributes:
        level: where it is.
        work_s: work that it holds.
        number: of the last checkpoint of the interval up to it.
        at_s: when its stall was over.
        valid_s: when it counts; infinite while nobody knows.
        parts: checkpoints of changes that a restart reads beside the last whole one.

    """

    level: str
    work_s: float
    number: int
    at_s: float
    valid_s: float
    parts: int = 0


class Saves:
    """The checkpoints of one gang: of each level the last that counts, and those that do not yet."""

    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        # In the order in which equal ones are preferred.
        self._by_level: dict[str, list[Save]] = {level: [] for level in (MEMORY, *terms.places)}

    def add(self, save: Save, now_s: float) -> None:
        """One more; of the same level, those that it makes useless are gone."""
        kept = self._by_level[save.level]
        kept.append(save)
        counting = [i for i, one in enumerate(kept) if one.valid_s <= now_s + SAME_S]
        if counting:
            del kept[: counting[-1]]

    def best(self, now_s: float) -> Save | None:
        """The one with most work that counts; of equal ones that of the cheapest level."""
        found: Save | None = None
        for kept in self._by_level.values():
            for save in kept:
                if save.valid_s <= now_s + SAME_S and (found is None or save.work_s > found.work_s):
                    found = save
        return found

    def fail(self, now_s: float, severity: int, lost: Iterable[int], copies: int) -> None:
        """What a failure leaves: nothing that does not count yet, and no level that is lost with it.

        Args:
            now_s: when it strikes.
            severity: of the failure.
            lost: places of the gang whose machines' memory is gone since the last restart.
            copies: of in-memory replicas, in groups of so many places.

        """
        for level, kept in self._by_level.items():
            if not kept:
                continue
            if level == MEMORY:
                gone = bool(copies) and _group_gone(set(lost), copies, self._terms.job.nodes)
            else:
                gone = severity >= self._terms.places[level].severity
            kept[:] = [] if gone else [save for save in kept if save.valid_s <= now_s + SAME_S]


def _group_gone(lost: set[int], copies: int, nodes: int) -> bool:
    """Whether a place and all that hold copies of it, which are the next ones of its group, are gone.

    Places that make no whole group join the last one, around which the copies go as in a ring (Gemini).
    """
    last = max(nodes // copies, 1) - 1
    for place in lost:
        group = min(place // copies, last)
        start, size = group * copies, copies if group < last else nodes - last * copies
        if all(start + (place - start + k) % size in lost for k in range(copies)):
            return True
    return False


def replica_lives(lost: Iterable[int], nodes: int, replicas: int) -> bool:
    """Whether of each part of the state there is a place left that holds it.

    Place p of a gang holds part `p mod (nodes / replicas)`.
    """
    shards = nodes // replicas
    gone = Counter(place % shards for place in lost)
    return replicas > 1 and all(count < replicas for count in gone.values())
