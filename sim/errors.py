"""The error of the simulator, and what goes wrong with files that others have written."""

from __future__ import annotations

import csv
import json


class SimError(Exception):
    """Something asked of the simulator cannot be done. The message is one sentence: what, why, what to do."""


BROKEN = (
    OSError, ValueError, OverflowError, RecursionError, LookupError, TypeError, AttributeError, csv.Error,
)  # fmt: skip
"""What reading a document, and taking it apart, raises where it is not as it should be."""


def why(error: Exception) -> str:
    """What one of `BROKEN` says of the file, as the middle of a sentence."""
    match error:
        case OSError():
            return error.strerror or str(error)
        case UnicodeDecodeError():
            return "it is not text"
        case json.JSONDecodeError():
            return f"it is not JSON (line {error.lineno}: {error.msg})"
        case RecursionError():
            return "it is nested too deep"
        case OverflowError():
            return "a number in it is too large"
        case KeyError():
            return f"it lacks {error}"
        case ValueError() if "int_max_str_digits" in str(error):
            return "a whole number in it has thousands of digits"
        case _:
            return str(error)
