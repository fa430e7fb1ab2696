"""Migrations between the nodes of a lab. `scenes.py` runs in a room (see tests/netlab/room.py)."""
