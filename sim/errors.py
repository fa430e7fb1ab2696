"""The error of the simulator."""

from __future__ import annotations


class SimError(Exception):
    """Something asked of the simulator cannot be done. The message is one sentence: what, why, what to do."""
