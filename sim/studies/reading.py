"""Study files as YAML, and their sections: a value is of its kind, or the error has the path of its key."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

import yaml

from sim.errors import SimError
from sim.studies import units

Tree = Mapping[str, Any]
Value = str | float | int | bool
T = TypeVar("T")

MOST_VALUES = 1_000_000
"""Of a study file."""

_MISSING = object()


class StudyError(SimError):
    """A study file cannot be used: what, at which key, and what to do."""


class _Loader(yaml.SafeLoader):
    """YAML 1.2 where it matters: `on` is a word, `1e3` a number; a key that is there twice is an error."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in found if not tag.endswith((":bool", ":timestamp", ":int"))]
    for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def _implicit(tag: str, pattern: str, first: str) -> None:
    resolvers: Any = _Loader
    resolvers.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(pattern), list(first))


_implicit("bool", r"^(?:true|false|True|False)$", "tfTF")
_implicit("int", r"^[-+]?\d+$", "-+0123456789")
_implicit("float", r"^[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?$", "-+.0123456789")


def _mapping(loader: Any, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key: Any = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str):
            line = key_node.start_mark.line + 1
            raise yaml.constructor.ConstructorError(None, None, f"a key in line {line} is no word")
        if key in seen:
            line = key_node.start_mark.line + 1
            raise yaml.constructor.ConstructorError(None, None, f"key '{key}' is there again in line {line}")
        seen.add(key)
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)


def parse(path: Path) -> dict[str, Any]:
    """The document of a study file.

    Raises:
        StudyError: it cannot be read, is no YAML, or holds no mapping.

    """

    def bad(why: str) -> StudyError:
        return StudyError(f"could not read study '{path}': {why}")

    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise bad(f"{error.strerror or error}; check the path") from error
    except UnicodeDecodeError as error:
        raise bad("it is no text; give a YAML file") from error
    try:
        node = yaml.compose(text, Loader=_Loader)
        if node is not None:
            weight = _weight(node, {})
            if math.isinf(weight):
                raise bad("it refers to itself (*); write the values out")
            if weight > MOST_VALUES:
                raise bad(f"what it refers to (*) comes to {weight:.2g} values; write fewer")
        document: Any = yaml.load(text, Loader=_Loader)  # noqa: S506  # a safe loader
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or str(error)
        raise bad(f"it is not YAML{where}: {problem}; correct it") from error
    except ValueError as error:
        raise bad("it holds a whole number of thousands of digits; write a smaller one") from error
    except RecursionError as error:
        raise bad("it is nested too deep; write it flat") from error
    if document is None:
        raise bad("it is empty; see the examples of `torpor sim`")
    if not isinstance(document, dict):
        raise bad("it is no mapping of keys to values; begin it with 'schema: 1'")
    return cast("dict[str, Any]", document)


def _weight(node: yaml.Node, known: dict[int, float]) -> float:
    """Values in a node, what it refers to counted each time; infinite if it refers to itself."""
    # Infinite until it is known: whoever asks meanwhile is inside of it.
    if id(node) in known:
        return known[id(node)]
    known[id(node)] = math.inf
    inside: list[yaml.Node] = []
    if isinstance(node, yaml.MappingNode):
        inside = [one for pair in node.value for one in pair]
    elif isinstance(node, yaml.SequenceNode):
        inside = node.value
    known[id(node)] = 1.0 + sum(_weight(one, known) for one in inside)
    return known[id(node)]


def shown(value: object) -> str:
    """A value as an error shows it: short."""
    text = f"'{value}'" if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _finite(number: float) -> bool:
    """Whether a float holds it: no infinity, and no whole number past 1e308."""
    try:
        return math.isfinite(number)
    except OverflowError:
        return False


class Book:
    """What was read of a study: each key's value, and its text in a file that says everything."""

    def __init__(self, study: Path) -> None:
        self.study = study
        self.values: dict[str, Value] = {}
        self.units: dict[str, str] = {}
        self.files: dict[str, str] = {}

    def uses(self, name: str, file: Path) -> None:
        """Keep the SHA-256 of a file that the study names; that it cannot be read is told by who reads it."""
        with contextlib.suppress(OSError, ValueError):
            self.files[name] = hashlib.sha256(file.read_bytes()).hexdigest()

    def fail(self, path: str, why: str) -> NoReturn:
        """Say what is wrong at a key.

        Raises:
            StudyError: always.

        """
        raise StudyError(f"could not read study '{self.study}': {path} {why}")


class Section:
    """A mapping of the file. `resolved` fills with everything that is read, defaults too."""

    def __init__(self, book: Book, path: str, raw: object) -> None:
        self.book, self.path = book, path
        if not isinstance(raw, Mapping):
            book.fail(path or "the file", f"is {shown(raw)}; it must hold keys and values")
        self.raw = cast("Tree", raw)
        self.resolved: dict[str, Any] = {}
        self._known: list[str] = []

    def at(self, key: str) -> str:
        """The path of a key."""
        return f"{self.path}.{key}" if self.path else key

    def has(self, key: str) -> bool:
        """Whether the key is there; asking makes it a known one."""
        self._known.append(key)
        return key in self.raw

    def fail(self, key: str, why: str) -> NoReturn:
        """Say what is wrong at a key.

        Raises:
            StudyError: always.

        """
        self.book.fail(self.at(key), why)

    def done(self) -> None:
        """Nothing else may be here.

        Raises:
            StudyError: a key is not known.

        """
        for key in self.raw:
            if key not in self._known:
                close = difflib.get_close_matches(key, self._known, 1, 0.5)
                known = ", ".join(dict.fromkeys(self._known))
                hint = f"did you mean '{close[0]}'" if close else f"there are {known}"
                self.fail(key, f"is no key here; {hint}")

    def get(self, key: str, default: object = _MISSING) -> Any:
        """The raw value.

        Raises:
            StudyError: it is not there, and has no default.

        """
        if self.has(key) and self.raw[key] is not None:
            return self.raw[key]
        if default is _MISSING:
            if key in self.raw:
                self.fail(key, "has no value; give it one")
            self.fail(key, "is missing; give it")
        return default

    def section(self, key: str) -> Section:
        """A mapping below; an empty one where it is not there."""
        found = Section(self.book, self.at(key), self.get(key, {}))
        self.resolved[key] = found.resolved
        return found

    def sections(self, key: str) -> list[Section]:
        """A list of mappings below; none where it is not there."""
        raw = self.get(key, [])
        if not isinstance(raw, Sequence) or isinstance(raw, str):
            self.fail(key, f"is {shown(raw)}; it must be a list")
        found = [
            Section(self.book, f"{self.at(key)}[{i}]", one)
            for i, one in enumerate(cast("Sequence[Any]", raw))
        ]
        self.resolved[key] = [one.resolved for one in found]
        return found

    def note(self, key: str, value: Value, text: object, unit: str = "") -> None:
        """Keep a value under its key."""
        self.book.values[self.at(key)] = value
        if unit:
            self.book.units[self.at(key)] = unit
        self.resolved[key] = text

    # Values of one kind.

    def _unit(
        self, key: str, read: Callable[[str], float], unit: str, default: float | None, least: str
    ) -> float:
        raw = self.get(key, _MISSING if default is None else default)
        if isinstance(raw, bool) or not isinstance(raw, str | int | float):
            self.fail(key, f"is {shown(raw)}; it must be a number with a unit")
        if raw is default:
            value = float(raw)
        else:
            try:
                value = read(str(raw))
            except units.UnitError as error:
                self.fail(key, f"is {shown(raw)}; {error}")
        if value < 0 or (least == "above 0" and value == 0):
            self.fail(key, f"is {shown(raw)}; it must be {least}")
        if math.isfinite(value):
            text = {"$/s": f"${value * 3600!r}/h", "$/B": f"${value!r}/B"}.get(unit, f"{value!r}{unit}")
            self.note(key, value, text, unit)
        return value

    def time(self, key: str, default: float | None = None, *, least: str = "0 or more") -> float:
        """Seconds. `least`: "0 or more" or "above 0"."""
        return self._unit(key, units.seconds, "s", default, least)

    def size(self, key: str, default: float | None = None) -> float:
        """Bytes."""
        return self._unit(key, units.size, "B", default, "0 or more")

    def bandwidth(self, key: str, default: float | None = None) -> float:
        """Bytes a second."""
        return self._unit(key, units.bandwidth, "B/s", default, "above 0")

    def rate(self, key: str, default: float | None = None) -> float:
        """How often a second."""
        return self._unit(key, units.rate, "/s", default, "above 0")

    def price(self, key: str, default: float | None = None) -> float:
        """Dollars a second."""
        return self._unit(key, units.price, "$/s", default, "0 or more")

    def price_of_size(self, key: str, default: float | None = None) -> float:
        """Dollars a byte."""
        return self._unit(key, units.price_of_size, "$/B", default, "0 or more")

    def number(
        self, key: str, default: float | None = None, *, least: float = 0.0, most: float = math.inf,
        above: bool = False,
    ) -> float:  # fmt: skip
        """A bare number from `least` (not itself if `above`) to `most`."""
        raw = self.get(key, _MISSING if default is None else default)
        if isinstance(raw, bool) or not isinstance(raw, int | float) or not _finite(raw):
            self.fail(key, f"is {shown(raw)}; it must be a number without a unit")
        if raw < least or raw > most or (above and raw == least):
            low = f"above {least:g}" if above else f"{least:g} or more"
            self.fail(
                key, f"is {raw:g}; it must be {low}" + (f", at most {most:g}" if most < math.inf else "")
            )
        self.note(key, float(raw), raw)
        return float(raw)

    def count(self, key: str, default: int | None = None, *, least: int = 0, most: float = math.inf) -> int:
        """A whole number."""
        raw = self.get(key, _MISSING if default is None else default)
        if isinstance(raw, bool) or not isinstance(raw, int | float) or not _finite(raw) or raw % 1:
            self.fail(key, f"is {shown(raw)}; it must be a whole number")
        if raw < least:
            self.fail(key, f"is {raw:g}; it must be {least} or more")
        if raw > most:
            self.fail(key, f"is {raw:g}; it must be at most {most}")
        self.note(key, int(raw), int(raw))
        return int(raw)

    def count_or(self, key: str, derived: int, *, least: int = 0) -> int:
        """A whole number, or one that follows from others: a file that says everything does not say that.

        It may follow from what a study sweeps.
        """
        return self.count(key, least=least) if self.has(key) else derived

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        raw = self.get(key, default)
        if not isinstance(raw, bool):
            self.fail(key, f"is {shown(raw)}; it must be true or false")
        self.note(key, raw, raw)
        return raw

    def text(self, key: str, default: str | None = None) -> str:
        """A text."""
        raw = self.get(key, _MISSING if default is None else default)
        if not isinstance(raw, str) or (default is None and not raw.strip()):
            self.fail(key, f"is {shown(raw)}; it must be a text")
        self.note(key, raw, raw)
        return raw

    def choice(self, key: str, choices: Sequence[T], default: T | None = None) -> T:
        """One of a few words."""
        raw = self.get(key, _MISSING if default is None else default)
        if raw not in choices:
            words = [str(choice) for choice in choices]
            close = difflib.get_close_matches(str(raw), words, 1, 0.5)
            hint = f"did you mean '{close[0]}'" if close else f"it must be {' or '.join(words)}"
            self.fail(key, f"is {shown(raw)}; {hint}")
        self.note(key, str(raw), str(raw))
        return raw
