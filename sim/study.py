"""A study: a question, and the cells that a file of it comes to."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from sim.config import Cluster, Config, NodeFailures, PolicySpec, Storage, Training
from sim.laws import Constant, Exponential

Param = str | float | int | bool


@dataclass(frozen=True)
class Cell:
    """One combination of what a study sweeps.

    Attributes:
        name: the swept keys and their values, short.
        params: `policy` and each swept key by its path (`cluster.spares`, `policy.interval`): seconds, bytes.
        config: what runs.

    """

    name: str
    params: Mapping[str, Param]
    config: Config


@dataclass(frozen=True)
class Study:
    """What a study file says. `units`: of a swept key that is not a bare number or a word."""

    name: str
    question: str
    cells: tuple[Cell, ...]
    units: Mapping[str, str]
    text: str

    def resolved(self) -> str:
        """The file with every default, as YAML."""
        return self.text

    @property
    def sha256(self) -> str:
        """Of the resolved file: two files that say the same have the same."""
        return hashlib.sha256(self.resolved().encode()).hexdigest()


def load(path: Path) -> Study:
    """Read a study file.

    Raises:
        SimError: the file is no study; the sentence has the path of the key.

    """
    text = path.read_text(encoding="utf-8")
    raw: Any = yaml.safe_load(text)
    cells: list[Cell] = []
    for entry in raw["policies"]:
        options = {key: value for key, value in entry.items() if key != "name"}
        config = Config(
            cluster=Cluster(raw["cluster"]["nodes"]),
            workload=Training(raw["cluster"]["nodes"], float(raw["job"]["work_s"])),
            policy=PolicySpec(entry["name"], options),
            failures=(NodeFailures(Exponential(float(raw["failures"][0]["mean_s"]))),),
            storage=(Storage("remote", stall=Constant(float(raw["costs"]["stall_s"]))),),
            seed=raw["study"].get("seed", 0),
        )
        cells.append(Cell(entry["name"], {"policy": entry["name"]}, config))
    return Study(raw["study"]["name"], raw["study"].get("question", ""), tuple(cells), {}, text)
