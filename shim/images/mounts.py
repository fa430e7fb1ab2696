"""What is mounted where."""

from __future__ import annotations

import os
from pathlib import Path

from engines.mountinfo import Mount, mounts


def mount_at(path: Path) -> Mount | None:
    """The topmost mount whose mount point is exactly `path` (resolved), or None. Raises OSError."""
    wanted = os.path.realpath(path)
    return next((mount for mount in reversed(mounts()) if mount.point == wanted), None)


def mounts_below(path: Path) -> tuple[Mount, ...]:
    """Mounts strictly beneath `path`. Raises OSError."""
    prefix = os.path.realpath(path).rstrip("/") + "/"
    return tuple(mount for mount in mounts() if mount.point.startswith(prefix))
