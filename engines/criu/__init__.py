"""Checkpoint and restore with CRIU through runc."""
