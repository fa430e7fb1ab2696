"""The engine: plays one replication of one cell."""
