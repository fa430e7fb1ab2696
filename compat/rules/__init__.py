"""Why an image would not restore, or would restore and then go wrong: one small function for each reason."""

from __future__ import annotations

from compat.rules import cpu, edits, files, gpu, kernel, place, spec, tools
from compat.rules.case import (
    NODE_DEVICES,
    REGISTRY,
    Case,
    Origin,
    Rule,
    given,
    is_bind,
    part,
    resolve,
    specified_mounts,
)

__all__ = [
    "NODE_DEVICES",
    "REGISTRY",
    "Case",
    "Origin",
    "Rule",
    "cpu",
    "edits",
    "files",
    "given",
    "gpu",
    "is_bind",
    "kernel",
    "part",
    "place",
    "resolve",
    "spec",
    "specified_mounts",
    "tools",
]
