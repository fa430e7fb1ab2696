"""Containers for `torpor conformance`: their specs, root file systems and output, and the report."""
