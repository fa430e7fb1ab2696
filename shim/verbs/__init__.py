"""One file per OCI verb that torpor serves itself."""
