"""A study: a question, and the cells that a file of it comes to.

Any list where one value is expected is a sweep, and the cells are all combinations. What is a list by itself
(failures, notices, storage, policies, classes of jobs, regions) is swept by a list of such lists.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import yaml

from sim.errors import SimError
from sim.policies import registry
from sim.studies import agreement, foreseen, units
from sim.studies.config import (
    NO_TIME,
    Cluster,
    Config,
    Inference,
    PolicySpec,
    Queue,
    Replications,
    SpotWork,
    Training,
)
from sim.studies.reading import Book, Section, Value, parse, shown
from sim.studies.sections import (
    law,
    read_cluster,
    read_costs,
    read_failures,
    read_measured,
    read_notices,
    read_storage,
)  # fmt: skip
from sim.studies.workloads import read_workload

SCHEMA = 1
MOST_CELLS = 100_000

_LISTS = ("failures", "notices", "storage", "policies", "classes", "regions", "zones")
"""Keys whose value is a list by itself."""


@dataclass(frozen=True)
class Cell:
    """One combination of what a study sweeps.

    Attributes:
        name: the policy, and the swept keys with their values, short.
        params: `policy` and each swept key by its path (`cluster.spares`, `policy.interval`): seconds, bytes.
        config: what runs.

    """

    name: str
    params: Mapping[str, Value]
    config: Config


@dataclass(frozen=True)
class Study:
    """What a study file says.

    `units`: of a swept key that is not a bare number or a word. `resolved`: the file with every default, as
    YAML; it loads as the same study. `files`: SHA-256 of the traces and measured costs that it names.
    """

    name: str
    question: str
    cells: tuple[Cell, ...]
    units: Mapping[str, str]
    resolved: str
    files: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def sha256(self) -> str:
        """Of the resolved file: two files that say the same have the same."""
        return hashlib.sha256(self.resolved.encode()).hexdigest()


def load(path: Path) -> Study:
    """Read a study file.

    Args:
        path: the file. Traces that it names are beside it, or below the folder of TORPOR_TRACES.

    Raises:
        SimError: the file is no study; the sentence has the path of the key.

    """
    document = parse(path)
    book = Book(path)
    if document.get("schema") != SCHEMA:
        book.fail("schema", f"is {shown(document.get('schema'))}; it must be {SCHEMA}")
    policies = document.pop("policies", None)
    if not isinstance(policies, list) or not policies:
        book.fail("policies", "is missing or empty; give a list with one policy or more")
    axes = list(_axes(book, document, (), lambda _: False))
    entries = [_Entry(book, number, raw) for number, raw in enumerate(cast("list[Any]", policies))]
    per_policy = sum(math.prod(len(axis.values) for axis in entry.axes) for entry in entries)
    if (count := math.prod(len(axis.values) for axis in axes) * per_policy) > MOST_CELLS:
        book.fail("the file", f"comes to {count} cells; sweep no more than {MOST_CELLS}")
    return _study(path, document, axes, entries)


def _study(path: Path, document: dict[str, Any], axes: list[_Axis], entries: list[_Entry]) -> Study:
    cells: list[Cell] = []
    unit_of: dict[str, str] = {}
    files: dict[str, str] = {}
    trees: list[tuple[tuple[int, ...], dict[str, Any]]] = []
    alone = Counter(entry.raw["name"] for entry in entries if isinstance(entry.raw["name"], str))
    for places in itertools.product(*(range(len(axis.values)) for axis in axes)):
        book = Book(path)
        top = Section(book, "", _chosen(document, axes, places))
        config = _config(top)
        trees.append((places, top.resolved))
        files |= book.files
        chosen = [(axis.path, axis.values[place]) for axis, place in zip(axes, places, strict=True)]
        shared = {key: book.values.get(key, _label(raw)) for key, raw in chosen}
        for entry in entries:
            for options in entry.choices():
                policy = _policy(book, entry, options, config)
                own = entry.named(options, all_=alone[options["name"]] > 1)
                label = " ".join(
                    [policy.name]
                    + [f"{key}={_label(raw)}" for key, raw in own]
                    + [f"{_short(key, axes)}={_label(raw)}" for key, raw in chosen]
                )
                found = {f"policy.{key}": _option(policy, key, raw) for key, raw in own}
                cells.append(
                    Cell(label, {"policy": policy.name, **found, **shared}, replace(config, policy=policy))
                )
                unit_of |= {f"policy.{key}": "s" for key, raw in own if _option(policy, key, raw) != raw}
        unit_of |= book.units
    for name, times in Counter(cell.name for cell in cells).items():
        if times > 1:
            Book(path).fail("policies", f"come to '{name}' {times} times; leave one out")
    used = {key for cell in cells for key in cell.params}
    tree = _resolved(trees, axes, entries)
    units_ = {key: unit for key, unit in unit_of.items() if key in used}
    writer: Any = yaml
    text: str = writer.safe_dump(tree, sort_keys=False, allow_unicode=True, width=100)
    return Study(tree["study"]["name"], tree["study"]["question"], tuple(cells), units_, text, files)


# Sweeps.


@dataclass(frozen=True)
class _Axis:
    """Something that is swept: where it is, and over what."""

    where: tuple[str | int, ...]
    values: list[Any]

    @property
    def path(self) -> str:
        """As an error shows it."""
        text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in self.where)
        return text.removeprefix(".")


def _axes(
    book: Book, tree: Mapping[str, Any], where: tuple[str | int, ...], is_list: Callable[[str], bool]
) -> Iterator[_Axis]:
    """Every sweep below a mapping. `is_list`: keys whose value is a list by itself, beside `_LISTS`."""
    for key, value in tree.items():
        here = (*where, key)
        if isinstance(value, list):
            values = cast("list[Any]", value)
            if key not in _LISTS and not is_list(key):
                if not values:
                    book.fail(_Axis(here, []).path, "is an empty list; give values, or leave it out")
                yield _Axis(here, values)
            elif values and all(isinstance(one, list) for one in values):
                yield _Axis(here, values)
            else:
                for place, one in enumerate(values):
                    if isinstance(one, dict):
                        yield from _axes(book, cast("dict[str, Any]", one), (*here, place), is_list)
        elif isinstance(value, dict):
            yield from _axes(book, cast("dict[str, Any]", value), here, is_list)


def _chosen(tree: dict[str, Any], axes: Sequence[_Axis], places: Sequence[int]) -> dict[str, Any]:
    """The tree with one value of each sweep in its place."""
    found = copy.deepcopy(tree)
    for axis, place in zip(axes, places, strict=True):
        _put(found, axis.where, axis.values[place])
    return found


def _put(tree: Any, where: Sequence[str | int], value: object) -> None:
    for part in where[:-1]:
        tree = tree[part]
    tree[where[-1]] = value


def _pick(tree: Any, where: Sequence[str | int]) -> Any:
    for part in where:
        tree = tree[part]
    return tree


def _label(value: object) -> str:
    """A value as a name shows it."""
    if isinstance(value, dict):
        inner = cast("dict[str, object]", value)
        return str(inner.get("kind", inner.get("name", "+".join(inner))))
    if isinstance(value, list):
        return "+".join(_label(one) for one in cast("list[object]", value)) or "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


def _short(path: str, axes: Sequence[_Axis]) -> str:
    """The last key of a path, where that is enough to know which it is."""
    last = path.rpartition(".")[2]
    return last if sum(axis.path.rpartition(".")[2] == last for axis in axes) == 1 else path


# Policies.


class _Entry:
    """One entry of `policies`."""

    def __init__(self, book: Book, number: int, raw: object) -> None:
        self.path = f"policies[{number}]"
        if isinstance(raw, str):
            raw = {"name": raw}
        if not isinstance(raw, dict) or "name" not in raw:
            book.fail(self.path, f"is {shown(raw)}; it must be a name, or a name and options")  # pyright: ignore[reportUnknownArgumentType]
        self.raw = cast("dict[str, Any]", raw)
        name = self.raw["name"]
        lists: set[str] = set()
        if isinstance(name, str):
            found = self._checked(book, name)
            lists = {one.name for one in found.parameters if one.kind == "list"}
        self.axes = list(_axes(book, self.raw, (), lambda key: key in lists))

    def _checked(self, book: Book, name: str) -> registry.Description:
        try:
            return registry.describe(name)
        except SimError as error:
            book.fail(f"{self.path}.name", f"is wrong: {error}")

    def choices(self) -> Iterator[dict[str, Any]]:
        """Each combination of what is swept."""
        for places in itertools.product(*(range(len(axis.values)) for axis in self.axes)):
            yield _chosen(self.raw, self.axes, places)

    def named(self, options: dict[str, Any], *, all_: bool) -> list[tuple[str, Any]]:
        """Options that tell a cell from others: those that are swept, or all of them."""
        swept = [(axis.path, _pick(options, axis.where)) for axis in self.axes if axis.path != "name"]
        return swept + [
            (key, raw)
            for key, raw in options.items()
            if all_ and key != "name" and all(axis.where[0] != key for axis in self.axes)
        ]


_KINDS: dict[type[object], str] = {
    Training: "job", Queue: "queue", Inference: "inference", SpotWork: "spot",
}  # fmt: skip


def _policy(book: Book, entry: _Entry, options: dict[str, Any], config: Config) -> PolicySpec:
    name = str(options["name"])
    rest = {key: raw for key, raw in options.items() if key != "name"}
    try:
        registry.make(name, rest, units.seconds)
        spec = PolicySpec(name, _canonical(name, rest))
    except SimError as error:
        book.fail(entry.path, f"cannot be used: {error}")
    kind, suits = _KINDS[type(config.workload)], registry.describe(name).work
    if suits and kind not in suits:
        book.fail(
            f"{entry.path}.name",
            f"is '{name}', which is for {' or '.join(suits)} and decides nothing for {kind}; choose another "
            "one, 'torpor sim policies' lists them",
        )
    agreement.policy(book, entry.path, spec, config)
    return spec


def _canonical(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options, which a policy was made with, with times in seconds."""
    described = registry.describe(name)
    found: dict[str, Any] = {}
    for key, raw in options.items():
        parameter = described.parameter(key)
        kind = parameter.kind if parameter is not None else "any"
        if kind == "duration" and isinstance(raw, str) and raw != "auto":
            found[key] = units.seconds(raw)
        elif kind == "policy" and isinstance(raw, dict):
            inner = cast("dict[str, Any]", raw)
            rest = {one: value for one, value in inner.items() if one != "name"}
            found[key] = {"name": inner["name"], **_canonical(str(inner["name"]), rest)}
        else:
            found[key] = raw
    return found


def _option(policy: PolicySpec, path: str, raw: object) -> Value:
    """The value of an option, in seconds where it is a time."""
    value = _pick(policy.options, path.split("."))
    return value if isinstance(value, str | int | float) else _label(raw)


# The rest.


def _config(top: Section) -> Config:
    """Everything but the policy, whose place holds `none`."""
    top.has("schema")
    top.resolved["schema"] = SCHEMA
    study = top.section("study")
    study.text("name")
    study.text("question", "")
    seed = study.count("seed", 0, most=2**63 - 1)
    rule = study.section("replications")
    least, most = rule.count("min", 30, least=2), rule.count("max", 2000, least=2)
    if least > most:
        rule.fail("min", f"is {least}, more than the {most} of max; make it smaller")
    replications = Replications(least, most, rule.number("rel_half_width", 0.01, above=True, most=1.0))
    rule.done()
    horizon_s = study.time("horizon", math.inf, least="above 0")
    warmup_s = study.time("warmup", 0.0)
    study.done()
    cluster = (
        read_cluster(top.section("cluster")) if top.has("cluster") or not top.has("spot") else Cluster(1)
    )
    failures = read_failures(top.sections("failures"), cluster)
    repair = law(top, "repair", NO_TIME)
    notices = read_notices(top.sections("notices"), cluster, failures)
    work = read_workload(top, cluster, seed)
    if isinstance(work, SpotWork):
        # A replication is a window of capacity, and there are no more of them.
        most = min(most, len(work.starts))
        replications = replace(replications, least=min(least, most), most=most)
    costs = top.section("costs")
    storage = read_storage(
        top.sections("storage"), cluster, costs, read_measured(costs), needed=isinstance(work, Training)
    )
    config = Config(
        cluster=cluster, workload=work, policy=PolicySpec("none"), failures=failures, repair=repair,
        notices=notices, storage=storage, costs=read_costs(costs), horizon_s=horizon_s, warmup_s=warmup_s,
        replications=replications, seed=seed,
    )  # fmt: skip
    top.done()
    agreement.sections(top, study, config)
    foreseen.check(top, config)
    return config


def _resolved(
    trees: Sequence[tuple[tuple[int, ...], dict[str, Any]]], axes: Sequence[_Axis], entries: Sequence[_Entry]
) -> dict[str, Any]:
    """The file with every default: sweeps are lists again."""
    found = copy.deepcopy(trees[0][1])
    for number, axis in enumerate(axes):
        values = [
            next(_pick(tree, axis.where) for places, tree in trees if places[number] == place)
            for place in range(len(axis.values))
        ]
        _put(found, axis.where, values)
    found["policies"] = [_times(entry.raw) for entry in entries]
    return found


def _times(raw: Any) -> Any:
    """Options of policies, with each time in seconds."""
    if isinstance(raw, dict):
        return {key: _times(value) for key, value in cast("dict[str, Any]", raw).items()}
    if isinstance(raw, list):
        return [_times(value) for value in cast("list[Any]", raw)]
    if isinstance(raw, str):
        try:
            return f"{units.seconds(raw)!r}s"
        except units.UnitError:
            return raw
    return raw
