"""Decides, with reasons, whether an image can be restored on a node."""
