"""Reading of trace files, with errors that name the file and what is wrong with it."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

from sim.errors import BROKEN, SimError, why


def unusable(path: Path, wrong: str) -> SimError:
    """The error for a trace that cannot be used. `wrong` says what it is, and after a `;` what to do."""
    remedy = "" if "; " in wrong else "; correct the file, or give another one"
    return SimError(f"could not read trace '{path}': {wrong}{remedy}")


def read_text(path: Path) -> str:
    """The file's text.

    Raises:
        SimError: it cannot be read, is no text, or is empty.

    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise unusable(path, f"{why(error)}; unpack archives first") from error
    except BROKEN as error:
        raise unusable(path, f"{why(error)}; check the path") from error
    if not text.strip():
        raise unusable(path, "it is empty")
    return text


def read_json(path: Path) -> Any:
    """The file's JSON document.

    Raises:
        SimError: as `read_text`, or it is not JSON.

    """
    text = read_text(path)
    try:
        return json.loads(text)
    except BROKEN as error:
        raise unusable(path, why(error)) from error


def read_rows(path: Path) -> list[list[str]]:
    """The file's comma-separated rows, without blank ones; one at least.

    Raises:
        SimError: as `read_text`, or no row is left, or one is too long.

    """
    lines = read_text(path).splitlines()
    try:
        rows = [row for row in csv.reader(lines) if any(field.strip() for field in row)]
    except csv.Error as error:
        raise unusable(path, f"it is not CSV: {error}") from error
    if not rows:
        raise unusable(path, "it is empty")
    return rows
