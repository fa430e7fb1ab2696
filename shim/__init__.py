"""The OCI runtime wrapper: what runs on a node in place of runc or runsc."""
