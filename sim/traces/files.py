"""Reading of trace files, with errors that name the file and what is wrong with it."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

from sim.errors import SimError


def unusable(path: Path, why: str) -> SimError:
    """The error for a trace that cannot be used. `why` says what is wrong, and after a `;` what to do."""
    remedy = "" if "; " in why else "; correct the file, or give another one"
    return SimError(f"could not read trace '{path}': {why}{remedy}")


def read_text(path: Path) -> str:
    """The file's text.

    Raises:
        SimError: it cannot be read, is no text, or is empty.

    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise unusable(path, f"{error.strerror}; check the path") from error
    except UnicodeDecodeError as error:
        raise unusable(path, "it is not text; unpack archives first") from error
    if not text.strip():
        raise unusable(path, "it is empty")
    return text


def read_json(path: Path) -> Any:
    """The file's JSON document.

    Raises:
        SimError: as `read_text`, or it is not JSON.

    """
    try:
        return json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise unusable(path, f"it is not JSON (line {error.lineno}: {error.msg})") from error


def read_rows(path: Path) -> list[list[str]]:
    """The file's comma-separated rows, without blank ones.

    Raises:
        SimError: as `read_text`.

    """
    return [row for row in csv.reader(read_text(path).splitlines()) if any(field.strip() for field in row)]
