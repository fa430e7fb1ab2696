"""The benchmarks of `./run bench`, shortened: each yields its figures, which are not judged here."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.perf import __main__ as bench
from tests.perf import hot_path, memory, share, simulator, start, sweep
from tests.perf.figures import Figure
from tests.perf.place import longest_gap_s
from tests.support import leaks

HOT_PATH_BOUND = 2.5  # for a machine that does much else; the rule itself is in test_hot_path.py


@pytest.fixture
def place() -> Iterator[Path]:
    """A short directory of a session of its own, which nothing may outlive."""
    if os.geteuid() != 0:
        pytest.skip("containers need root")
    tag = f"torpor-{secrets.token_hex(4)}"
    before = os.environ.get(leaks.TAG_VARIABLE)
    os.environ[leaks.TAG_VARIABLE] = tag
    path = Path("/tmp") / tag
    path.mkdir(mode=0o711)
    watch = leaks.Watch(tag)
    yield path
    left = watch.leaks()
    leaks.unmount(tag)
    leaks.remove_cgroups(tag)
    shutil.rmtree(path)
    with contextlib.suppress(KeyError):
        del os.environ[leaks.TAG_VARIABLE]
    if before is not None:
        os.environ[leaks.TAG_VARIABLE] = before
    assert not left, "left behind:\n" + "\n".join(left)


def check(figures: Sequence[Figure], *words: str) -> None:
    """There is a figure for each of the words, and all of them say something."""
    for word in words:
        assert [figure for figure in figures if word in figure.name], word
    for figure in figures:
        assert figure.value > 0, figure
        assert figure.peer > 0, figure
        assert figure.ratio == pytest.approx(figure.value / figure.peer), figure


def test_the_hot_path(tmp_path: Path) -> None:
    figures = hot_path.measure(tmp_path, rounds=20)
    check(figures, "passes through")
    assert figures[0].ratio < HOT_PATH_BOUND


@pytest.mark.engine
def test_start_under_containerd(place: Path) -> None:
    check(start.measure(place / "start", place.name, rounds=1), "containerd")


@pytest.mark.engine
def test_own_share_of_a_small_container(place: Path) -> None:
    check(share.measure(place / "share", rounds=1), "checkpoint, own share", "create and start")


@pytest.mark.engine
def test_a_process_with_memory(place: Path) -> None:
    figures = memory.measure(place / "memory", place.name, rounds=1, size_mib=16)
    check(figures, "total", "says CRIU", "says the process", "create and start")


def test_the_simulator() -> None:
    check(simulator.measure(rounds=1, replications=50), "event engine", "array path")


def test_a_sweep(tmp_path: Path) -> None:
    check(sweep.measure(tmp_path, rounds=1, cells=20, replications=3), "sweep of 20 cells, 3 replications")


def test_the_longest_gap() -> None:
    text = "tick 1 10.0\ntick 2 10.5\ntick 3 12.0\ntick 4 12.1\ntick 5 19.0\n"
    assert longest_gap_s(text, 10.2, 12.05) == 1.5
    assert longest_gap_s(text, 20.0, 30.0) == 0.0


def test_the_table_and_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if os.geteuid() != 0:
        pytest.skip("the benchmarks need root")
    monkeypatch.setattr(bench, "RESULT", tmp_path / "bench.json")
    monkeypatch.setattr(sys, "argv", ["bench", "--only", "hot-path", "--scale", "0.02"])
    monkeypatch.setenv(leaks.TAG_VARIABLE, "")
    assert bench.main() == 0
    assert "passes through" in capsys.readouterr().out
    document = json.loads((tmp_path / "bench.json").read_text())
    assert {"name", "value", "unit", "peer", "ratio"} <= set(document["figures"][0])
    assert document["machine"]["tools"]["criu"]
