"""The commands of `torpor` that concern more than one node."""
