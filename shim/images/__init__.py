"""Checkpoint images: layout, write, verify, import."""
