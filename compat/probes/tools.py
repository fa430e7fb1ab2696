"""Versions of the programs that have a part in a restore, and what CRIU finds on this kernel."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from compat.probes.base import Answer, System, Untold, output

T = TypeVar("T")

_KNOWN = re.compile(r"--feature FEAT .*?one of:\s*(.*?)\n\s*\n", re.DOTALL)


def versions(system: System) -> Answer:
    """The version of every tool that is there. Never raises."""
    names = tuple(system.tools)

    def ask(name: str) -> str | Untold:
        try:
            return parse(output(system, system.tools[name], "--version"))
        except Untold as error:
            return error

    answers = dict(zip(names, _each(ask, names), strict=True))
    return Answer(
        values={"tools": {name: value for name, value in answers.items() if isinstance(value, str)}},
        unknown={f"tools.{name}": str(value) for name, value in answers.items() if isinstance(value, Untold)},
    )


def parse(text: str) -> str:
    """The first dotted number, or date, in what a program says of itself. Raises Untold."""
    found = re.search(r"(?<![\w./])v?(?:0\.0~)?(\d+(?:\.\d+)*)", text)
    if found is None:
        raise Untold("it tells no version")
    return found[1]


def criu_features(system: System) -> Answer:
    """What CRIU says of this kernel, feature by feature, by trying them. Never raises."""
    criu = system.tools.get("criu")
    if criu is None:
        return Answer(unknown={"criu_features": "there is no criu"})

    def ask(feature: str) -> bool:
        try:
            output(system, criu, "check", "--feature", feature)
        except Untold:
            return False
        return True

    why: dict[str, str] = {}
    works = True
    try:
        output(system, criu, "check")
    except Untold as error:
        works, why = False, {"criu_works": str(error)}
    try:
        listed = _KNOWN.search(output(system, criu, "check", "--help"))
    except Untold as error:
        return Answer(values={"criu_works": works}, unknown={**why, "criu_features": str(error)})
    names = re.findall(r"[\w-]+", listed[1]) if listed else []
    found = tuple(name for name, has in zip(names, _each(ask, names), strict=True) if has)
    return Answer(values={"criu_features": found, "criu_works": works}, unknown=why)


def _each(ask: Callable[[str], T], names: Sequence[str]) -> list[T]:
    """A few at a time: each starts a program."""
    from concurrent.futures import ThreadPoolExecutor  # slow to load, and a cached profile needs none

    with ThreadPoolExecutor(4) as threads:
        return list(threads.map(ask, names))


def identity(paths: Mapping[str, Path]) -> str:
    """What changes when one of these programs is replaced; "" without any."""
    parts: list[str] = []
    for name, path in sorted(paths.items()):
        with contextlib.suppress(OSError):
            found = path.stat()
            parts.append(f"{name}:{path}:{found.st_size}:{found.st_mtime_ns}")
    return hashlib.sha256(" ".join(parts).encode()).hexdigest() if parts else ""
