"""Policies by name: those of torpor by a table, those of others by the entry-point group `torpor.policies`.

A third party's distribution says `[project.entry-points."torpor.policies"]` and `name = "module:Class"`. The
class has the two members of `sim.policies.base.Policy`; its options are the arguments of its `__init__`.
Distributions are looked through only for a name that torpor does not have.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import json
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, cast

from sim.errors import BROKEN, SimError, why
from sim.policies.base import Policy

GROUP = "torpor.policies"

_JOB, _QUEUE, _SERVICE, _SPOT = ("job",), ("queue",), ("inference",), ("spot",)
"""Kinds of work, as studies call them."""

_BUILT_IN: dict[str, tuple[str, tuple[str, ...]]] = {
    "none": ("sim.policies.interval:Never", _JOB + _QUEUE + _SERVICE),
    "periodic": ("sim.policies.interval:Periodic", _JOB + _QUEUE),
    "young": ("sim.policies.interval:Young", _JOB + _QUEUE),
    "daly-first": ("sim.policies.interval:DalyFirst", _JOB + _QUEUE),
    "daly": ("sim.policies.interval:Daly", _JOB + _QUEUE),
    "exact": ("sim.policies.interval:Exact", _JOB + _QUEUE),
    "adaptive": ("sim.policies.interval:Adaptive", _JOB + _QUEUE),
    "asynchronous": ("sim.policies.modes:Asynchronous", _JOB),
    "incremental": ("sim.policies.modes:Incremental", _JOB),
    "multilevel": ("sim.policies.modes:MultiLevel", _JOB),
    "in-memory": ("sim.policies.modes:InMemory", _JOB),
    "event": ("sim.policies.triggers:OnEvent", _JOB + _QUEUE),
    "predicted": ("sim.policies.triggers:Predicted", _JOB + _QUEUE),
    "just-in-time": ("sim.policies.triggers:JustInTime", _JOB),
    "hot-spares": ("sim.policies.triggers:HotSpares", _JOB),
    "migrate": ("sim.policies.triggers:Migration", _JOB + _QUEUE),
    "requeue": ("sim.policies.triggers:Requeueing", _JOB + _QUEUE),
    "preemption": ("sim.policies.serving:Preemption", _QUEUE),
    "cold-start": ("sim.policies.serving:ColdStart", _SERVICE),
    "warm-start": ("sim.policies.serving:WarmStart", _SERVICE),
    "kv-restore": ("sim.policies.serving:CacheRestore", _SERVICE),
    "kv-recompute": ("sim.policies.serving:CacheRecompute", _SERVICE),
    "kv-cheaper": ("sim.policies.serving:CacheCheaper", _SERVICE),
    "greedy": ("sim.policies.spot:Greedy", _SPOT),
    "uniform-progress": ("sim.policies.spot:UniformProgress", _SPOT),
    "on-demand": ("sim.policies.spot:OnDemand", _SPOT),
    "up-failover": ("sim.policies.regions:Failover", _SPOT),
    "up-availability": ("sim.policies.regions:Availability", _SPOT),
    "up-availability-price": ("sim.policies.regions:AvailabilityPrice", _SPOT),
    "skynomad": ("sim.policies.skynomad:SkyNomad", _SPOT),
    "skynomad-oracle": ("sim.policies.skynomad:SkyNomadOracle", _SPOT),
}
"""Where each class is, and for which kinds of work it decides anything."""

Kind = Literal["duration", "number", "count", "flag", "text", "list", "policy", "any"]


@dataclass(frozen=True)
class Parameter:
    """An option of a policy. One that is None unless given may also be given as `auto`.

    Attributes:
        name: what a study calls it; `interval` for the argument `interval_s`.
        argument: the argument of the class.
        kind: duration (seconds, or text with a unit), number, count (a whole number), flag, text, list (of
            texts; a list is the value, no sweep), policy (a name, or a mapping with `name` and options).
        choices: the texts that it may be, where they are counted.
        required: whether it must be given.
        default: what it is otherwise.

    """

    name: str
    argument: str
    kind: Kind
    choices: tuple[str, ...]
    required: bool
    default: Any


@dataclass(frozen=True)
class Description:
    """A policy: its name, what it does in one line, its options, and the kinds of work that it is for.

    `work` is empty for a policy of somebody else, which may be for any.
    """

    name: str
    summary: str
    work: tuple[str, ...]
    parameters: tuple[Parameter, ...]

    def parameter(self, name: str) -> Parameter | None:
        """The option of that name, as a study or as the class calls it."""
        return next((one for one in self.parameters if name in (one.name, one.argument)), None)


def names() -> list[str]:
    """All names, those of torpor first."""
    others = sorted(point.name for point in metadata.entry_points(group=GROUP))
    return [*_BUILT_IN, *(name for name in dict.fromkeys(others) if name not in _BUILT_IN)]


def code(words: Iterable[str]) -> dict[str, str]:
    """SHA-256 of the code of each policy of another package that is among the words, by its name.

    All Python of the package (or module) at the top counts, as a policy may use its neighbours.
    """
    tops = {
        point.name: point.module.partition(".")[0]
        for point in metadata.entry_points(group=GROUP)
        if point.name not in _BUILT_IN
    }
    return {name: digest(tops[name]) for name in sorted(set(words) & set(tops))}


def digest(package: str) -> str:
    """SHA-256 of all Python of a package or module, "" of one that has no files."""
    spec = importlib.util.find_spec(package)
    found = hashlib.sha256()
    files: list[tuple[str, Path]] = []
    if spec is not None and spec.submodule_search_locations is not None:
        for folder in map(Path, spec.submodule_search_locations):
            files += [(str(file.relative_to(folder)), file) for file in folder.rglob("*.py")]
    elif spec is not None and spec.origin:
        files = [(package, file) for file in [Path(spec.origin)] if file.is_file()]
    for name, file in sorted(files):
        found.update(f"{name} {hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return found.hexdigest() if files else ""


def describe(name: str) -> Description:
    """What a policy does and takes.

    Raises:
        SimError: there is no such policy, or its class cannot be loaded.

    """
    return _checked(name, _load(name))


def make(
    name: str, options: Mapping[str, object] | None = None, seconds: Callable[[str], float] | None = None
) -> Policy:
    """A new policy.

    Args:
        name: of the policy.
        options: as `describe` names them; durations in seconds.
        seconds: reads a duration as people write it, with its unit, or raises ValueError with a message that
            goes on after "is ...; "; None takes numbers of seconds only.

    Raises:
        SimError: there is no such policy or option, one is missing, or a value is not of its kind.

    """
    made = _load(name)
    described = _checked(name, made)
    arguments: dict[str, object] = {}
    for key, value in (options or {}).items():
        parameter = described.parameter(key)
        if parameter is None:
            near = _near(key, [one.name for one in described.parameters])
            raise SimError(f"could not make policy '{name}': it has no option '{key}'{near}")
        arguments[parameter.argument] = _value(name, parameter, value, seconds)
    for parameter in described.parameters:
        if parameter.required and parameter.argument not in arguments:
            raise SimError(f"could not make policy '{name}': it needs '{parameter.name}'; give it")
    try:
        return made(**arguments)
    except SimError:
        raise
    except (Exception, SystemExit) as error:
        raise SimError(
            f"could not make policy '{name}': it raises {type(error).__name__}: {error}; correct its "
            "options, or the policy"
        ) from error


def from_policy_json(path: Path) -> Policy:
    """The policy of a `policy.json`: its member `policy` is {"name": ..., "options": {...}}.

    Raises:
        SimError: the file cannot be read or is no such document, or the policy cannot be made.

    """
    try:
        document: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SimError(f"could not read policy file '{path}': {why(error)}; check the path") from error
    except BROKEN as error:
        raise SimError(
            f"could not read policy file '{path}': {why(error)}; make it with 'torpor sim recommend'"
        ) from error
    try:
        chosen = document["policy"]
        name, options = str(chosen["name"]), dict(chosen.get("options") or {})
    except BROKEN as error:
        raise SimError(
            f"could not read policy file '{path}': it names no policy; make it with 'torpor sim recommend'"
        ) from error
    return make(name, options)


def _near(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, 1, 0.5)
    if close:
        return f"; did you mean '{close[0]}'?"
    return f"; it has {', '.join(known)}" if known else "; it has none"


def _load(name: str) -> Callable[..., Policy]:
    if name in _BUILT_IN:
        module, attribute = _BUILT_IN[name][0].split(":")
        return getattr(importlib.import_module(module), attribute)
    points = [point for point in metadata.entry_points(group=GROUP) if point.name == name]
    if not points:
        close = difflib.get_close_matches(name, names(), 1, 0.5)
        hint = f"did you mean '{close[0]}'?" if close else f"there are {', '.join(names())}"
        raise SimError(f"could not make policy '{name}': there is none of that name; {hint}")
    try:
        return points[0].load()
    except (Exception, SystemExit) as error:
        raise SimError(
            f"could not make policy '{name}': {points[0].value} does not load "
            f"({type(error).__name__}: {error}); repair or remove its package"
        ) from error


def _checked(name: str, made: Callable[..., Policy]) -> Description:
    try:
        return _described(name, made)
    except (NameError, TypeError, ValueError, AttributeError) as error:
        raise SimError(
            f"could not make policy '{name}': its arguments cannot be read ({type(error).__name__}: "
            f"{error}); repair or remove its package"
        ) from error


@functools.lru_cache(maxsize=256)  # asked for at each replication
def _described(name: str, made: Callable[..., Policy]) -> Description:
    hints = typing.get_type_hints(made.__init__) if inspect.isclass(made) else typing.get_type_hints(made)
    parameters = tuple(
        _parameter(one, hints.get(one.name))
        for one in inspect.signature(made).parameters.values()
        if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    )
    summary = (inspect.getdoc(made) or "").partition("\n\n")[0].replace("\n", " ")
    work = _BUILT_IN[name][1] if name in _BUILT_IN else ()
    return Description(name, summary, work, parameters)


def _parameter(argument: inspect.Parameter, hint: Any) -> Parameter:
    kind, choices = _kind(hint)
    name = argument.name
    if kind == "number" and name.endswith("_s"):
        name, kind = name.removesuffix("_s"), "duration"
    required = argument.default is inspect.Parameter.empty
    return Parameter(name, argument.name, kind, choices, required, None if required else argument.default)


def _kind(hint: Any) -> tuple[Kind, tuple[str, ...]]:
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        rest = [part for part in typing.get_args(hint) if part is not type(None)]
        return _kind(rest[0]) if len(rest) == 1 else ("any", ())
    if typing.get_origin(hint) is Literal:
        return "text", tuple(str(choice) for choice in typing.get_args(hint))
    if typing.get_origin(hint) in (Sequence, list, tuple):
        return "list", _kind(typing.get_args(hint)[0])[1]
    simple: dict[Any, Kind] = {
        float: "number", int: "count", bool: "flag", str: "text", Policy: "policy",
    }  # fmt: skip
    return simple.get(hint, "any"), ()


def _value(name: str, parameter: Parameter, value: Any, seconds: Callable[[str], float] | None) -> object:
    def wrong(wanted: str) -> SimError:
        return SimError(f"could not make policy '{name}': {parameter.name} is {value!r}; it must be {wanted}")

    try:
        number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
    except OverflowError as error:
        raise wrong("a number that a float holds") from error
    if value in (None, "auto") and not parameter.required and parameter.default is None:
        return None
    match parameter.kind:
        case "duration":
            if seconds is None:
                if number is None:
                    raise wrong("a number of seconds")
                return number
            if number is None and not isinstance(value, str):
                raise wrong("a time like 15m")
            try:
                return seconds(str(value))
            except ValueError as error:
                raise SimError(
                    f"could not make policy '{name}': {parameter.name} is {value!r}; {error}"
                ) from error
        case "number":
            if number is None:
                raise wrong("a number")
            return number
        case "count":
            if number is None or number % 1:
                raise wrong("a whole number")
            return int(number)
        case "flag":
            if not isinstance(value, bool):
                raise wrong("true or false")
            return value
        case "text":
            if not isinstance(value, str) or (parameter.choices and value not in parameter.choices):
                raise wrong(" or ".join(parameter.choices) if parameter.choices else "a text")
            return value
        case "list":
            texts: Any = [value] if isinstance(value, str) else value
            if not isinstance(texts, list | tuple) or not all(
                isinstance(text, str) and (not parameter.choices or text in parameter.choices)
                for text in cast("list[Any]", texts)
            ):
                raise wrong("a list of " + (", ".join(parameter.choices) if parameter.choices else "texts"))
            return tuple(cast("list[str]", texts))
        case "policy":
            return _nested(name, parameter, value, seconds)
        case "any":
            return value


def _nested(name: str, parameter: Parameter, value: Any, seconds: Callable[[str], float] | None) -> Policy:
    if isinstance(value, str):
        return make(value, {}, seconds)
    if isinstance(value, Mapping) and isinstance(cast("Mapping[str, object]", value).get("name"), str):
        rest = dict(cast("Mapping[str, object]", value))
        return make(str(rest.pop("name")), rest, seconds)
    raise SimError(
        f"could not make policy '{name}': {parameter.name} is {value!r}; it must be the name of a policy, "
        "or its name and options"
    )
