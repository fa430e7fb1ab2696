"""Loaders of public traces: failures, spot capacity, nodes that come and go, requests."""
