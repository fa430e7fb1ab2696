"""The version of torpor, as it is recorded in images."""

VERSION = "0.1.0"
