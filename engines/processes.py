"""Knows a process again by its number and its start, since the kernel gives numbers anew."""

from __future__ import annotations

from pathlib import Path


def start_time(pid: int) -> int:
    """Start time of a process in clock ticks since boot, 0 if it is gone or a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return 0
    row = text[text.rindex(")") + 2 :].split()
    return 0 if row[0] in "ZX" else int(row[19])


def alive(pid: int, started: int) -> bool:
    """Whether this very process still lives."""
    return pid > 0 and started > 0 and start_time(pid) == started
