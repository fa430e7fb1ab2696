"""The engine: plays one replication of one cell."""

from sim.engine.dispatch import simulate

__all__ = ["simulate"]
