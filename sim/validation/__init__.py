"""What the simulator is held to, line by line."""
