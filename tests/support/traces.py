"""Where the public traces lie, for tests that replay them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def trace(name: str) -> Path:
    """A file below TORPOR_TRACES; skips the test, saying what is missing, where it is not there."""
    folder = os.environ.get("TORPOR_TRACES")
    if not folder:
        pytest.skip("TORPOR_TRACES names no folder of public traces")
    path = Path(folder) / name
    if not path.exists():
        pytest.skip(f"no trace {name} below TORPOR_TRACES")
    return path
