"""Models that need no event engine: arrays, replays and formulas of whole jobs, pools and markets."""
