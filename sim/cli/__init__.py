"""The commands of `torpor sim`."""
