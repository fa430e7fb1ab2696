"""Calibration: what timings of real checkpoints come to, that a fit finds what was put in, bad files."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from engines.api import DumpStats, Restored
from shim.timing import Timings, encode, record
from sim.errors import SimError
from sim.results import calibrate as c


def checkpoint(frozen_s: float, total_s: float, size: int, **more: Any) -> Timings:
    return Timings(
        operation="checkpoint", container_id="a", engine="criu", image="/i", started="2026-01-01T00:00:00Z",
        total_s=total_s, phases={"engine": total_s - 0.01, "commit": 0.01}, image_bytes=size,
        dump=DumpStats(frozen_s=frozen_s, total_s=total_s, image_bytes=size, **more),
    )  # fmt: skip


def restore(total_s: float, size: int) -> Timings:
    return Timings(
        operation="restore", container_id="b", engine="criu", image="/i", started="2026-01-01T00:00:01.000Z",
        total_s=total_s, phases={"engine": total_s}, image_bytes=size,
        restored=Restored(pid=1, total_s=total_s),
    )  # fmt: skip


def put(folder: Path, *several: Timings) -> Path:
    for number, timings in enumerate(several):
        (folder / f"{number:03d}.json").write_bytes(encode(timings))
    return folder


def test_what_the_runtime_writes_is_read(tmp_path: Path) -> None:
    put(tmp_path, checkpoint(0.4, 1.0, 500, memdump_s=0.3), checkpoint(0.6, 1.5, 500), restore(0.2, 500))
    found = c.calibrate([tmp_path])
    assert (found.checkpoints, found.restores, found.engines) == (2, 1, ("criu",))
    assert list(found.phases)[:3] == ["stall", "persist", "restore"]
    assert found.phases["stall"].mean_s == pytest.approx(0.5)
    assert found.phases["persist"].mean_s == pytest.approx(0.75)
    assert found.phases["restore"].times_s == (0.2,) * len(c.SHARES)
    assert found.phases["checkpoint: memory dump"].n == 1, "0 is that nobody knows"
    assert found.phases["checkpoint: commit"].n == 2


def test_time_in_which_gpus_are_emptied_is_stall(tmp_path: Path) -> None:
    put(tmp_path, checkpoint(0.4, 3.0, 500, gpu_s=2.0))
    found = c.calibrate([tmp_path])
    assert found.phases["stall"].mean_s == pytest.approx(2.4)
    assert found.phases["persist"].mean_s == pytest.approx(0.6)


def test_a_fit_finds_what_was_put_in(tmp_path: Path) -> None:
    rng = random.Random(4)
    made: list[Timings] = []
    for _ in range(60):
        size = rng.randrange(10**8, 10**10)
        stall = 0.2 + size / 2e9 * rng.uniform(0.97, 1.03)
        made.append(checkpoint(stall, stall + 1, size))
    found = c.calibrate([put(tmp_path, *made)]).phases["stall"]
    assert found.fit.bytes_per_s == pytest.approx(2e9, rel=0.02)
    assert found.fit.base_s == pytest.approx(0.2, abs=0.05)
    assert found.error is not None and found.error < 0.04
    assert found.fit.seconds(4e9) == pytest.approx(2.2, rel=0.02)


def test_each_time_is_foretold_from_the_others_only(tmp_path: Path) -> None:
    # One time is far off: were it part of its own fit, its foretold value would be drawn to it.
    stalls = [1.0, 1.001, 1.002, 1.003, 9.0]
    found = c.calibrate([put(tmp_path, *(checkpoint(s, s + 1, 100) for s in stalls))]).phases["stall"]
    assert found.predicted_s[4] == pytest.approx(1.0015)
    assert found.observed_s == tuple(stalls)


@pytest.mark.parametrize(
    ("sizes", "times_s", "expected"),
    [
        ([100.0, 100.0], [1.0, 3.0], c.Fit(2.0, None)),
        ([100.0, 200.0], [3.0, 1.0], c.Fit(2.0, None)),
        ([100.0, 200.0], [1.0, 2.0], c.Fit(0.0, 100.0)),
        ([100.0, 200.0], [2.0, 3.0], c.Fit(1.0, 100.0)),
        ([0.0, 0.0], [1.0, 1.0], c.Fit(1.0, None)),
        ([7.0], [1.0], c.Fit(1.0, None)),
    ],
)
def test_fits(sizes: list[float], times_s: list[float], expected: c.Fit) -> None:
    assert c.fit(sizes, times_s) == expected


def test_a_base_is_never_below_nothing() -> None:
    found = c.fit([100.0, 200.0, 300.0], [0.1, 2.0, 4.5])
    assert found.base_s == 0.0
    assert found.bytes_per_s is not None and 50 < found.bytes_per_s < 120


def test_a_store_is_searched_and_the_same_checkpoint_counts_once(tmp_path: Path) -> None:
    one = checkpoint(0.4, 1.0, 500)
    image = tmp_path / "images/default/web"
    image.mkdir(parents=True)
    (image / "timings.json").write_bytes(encode(one))
    record(tmp_path, one)
    record(tmp_path, checkpoint(0.5, 1.1, 500))
    record(tmp_path, restore(0.2, 500))
    found = c.calibrate([tmp_path])
    # The two checkpoints of the history have one name: the later one took the place of the first.
    assert (found.checkpoints, found.restores) == (2, 1)
    assert found.phases["stall"].observed_s == ()


def test_it_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    made = c.calibrate([put(tmp_path, checkpoint(0.4, 1.0, 500), restore(0.2, 500))])
    c.save(made, tmp_path / "measured.json")
    assert c.load(tmp_path / "measured.json") == made
    assert json.loads((tmp_path / "measured.json").read_text())["shares"] == list(c.SHARES)


GOOD = json.loads(encode(checkpoint(0.4, 1.0, 500)))


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("{", "it is not JSON"),
        ("[]", "it has no schema 1"),
        (GOOD | {"schema": 2}, "it has no schema 1"),
        (GOOD | {"operation": "nap"}, "operation is 'nap'"),
        (GOOD | {"total_s": -1.0}, "total_s is -1.0"),
        (GOOD | {"total_s": "long"}, "total_s is 'long'"),
        (GOOD | {"phases": [1]}, "phases is no object"),
        (GOOD | {"phases": {"engine": None}}, "engine is None"),
        (GOOD | {"image_bytes": True}, "image_bytes is True"),
        (GOOD | {"dump": GOOD["dump"] | {"frozen_s": float("nan")}}, "frozen_s is nan"),
    ],
)
def test_bad_files_are_one_sentence(content: Any, why: str, tmp_path: Path) -> None:
    path = tmp_path / "timings.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(
        SimError, match=rf"^could not read timings '.*timings.json': {why}.*; give a timings.json"
    ):
        c.calibrate([path])


def test_nothing_to_read_says_so(tmp_path: Path) -> None:
    with pytest.raises(SimError, match=r"there is no timings\.json"):
        c.calibrate([tmp_path])
    with pytest.raises(SimError, match="there is no such file"):
        c.calibrate([tmp_path / "not"])
    put(tmp_path, restore(0.2, 500))
    with pytest.raises(SimError, match="no checkpoint"):
        c.calibrate([tmp_path])
    (tmp_path / "measured.json").write_text("{}")
    with pytest.raises(SimError, match="make one with"):
        c.load(tmp_path / "measured.json")
