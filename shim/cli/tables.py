"""Tables on stdout, as all commands print them."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.markup import escape
from rich.table import Table

_ONE_LINE = 10_000  # columns


def console() -> Console:
    """For stdout. A program reads lines: one for each row, whatever its length."""
    return Console(width=None if sys.stdout.isatty() else _ONE_LINE)


def table(*headings: str) -> Table:
    """An empty table whose long cells are folded, not cut."""
    found = Table(box=None, header_style="bold")
    for heading in headings:
        found.add_column(heading, overflow="fold")
    return found


def plain(value: object) -> str:
    """A cell for a terminal: what an archive says may not steer it."""
    text = str(value)
    return escape(text if text.isprintable() else ascii(text))
