"""Keeps a pod's network identity across a restore."""
