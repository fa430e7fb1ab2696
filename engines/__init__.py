"""Interchangeable ways to turn a container into an image directory and back."""
