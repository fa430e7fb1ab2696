"""Finds, installs and smoke-tests the tools that torpor drives."""
