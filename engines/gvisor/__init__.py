"""The gVisor engine: checkpoints and restores whole sandboxes through runsc."""
