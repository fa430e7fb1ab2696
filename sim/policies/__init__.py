"""Policies: what to do when, in plain Python, so that a node can run the same object as the simulator."""
