"""The verdict against the truth: `./run truth`."""
