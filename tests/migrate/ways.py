"""A target that is reached over a program's standard streams, as over SSH, and has no daemon."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.migrate.pair import PORT, TORPOR, Pair, Pairs, whole
from tests.netlab.traffic import both_ways
from tests.support.containers import CHECKOUT

pytestmark = pytest.mark.engine


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Pair]:
    with Pairs(tmp_path) as pairs:
        yield pairs.fresh()


def reach_by(place: Pair, program: Sequence[str | Path]) -> None:
    """Let the first node reach the second by a program that stands in for ssh."""
    one, two = place.agents
    two.kill()
    settings = {key: two.environment[key] for key in ("TORPOR_CONF", "TORPOR_AGENT", "PATH")}
    words = ["env", "-C", str(CHECKOUT), *(f"{key}={value}" for key, value in settings.items())]
    words += two.node.words(*program, "agent", "--stdio")
    text = one.config_path.read_text()
    address = f'address = "{two.node.address}:{PORT}"'
    assert address in text
    one.config_path.write_text(text.replace(address, f"command = {json.dumps(words)}"))


def test_over_standard_streams(place: Pair) -> None:
    reach_by(place, [TORPOR])
    pod = place.start("web")
    client = place.client(both_ways(pod.ips, 2))
    one, two = place.agents
    report = place.migrate(one, two)
    assert report["target"] == "node2"
    client.goes_on()
    whole(client.stop())
    assert place.never_twice() == ["node1", "node2"]
    assert place.leftovers(two, one) == []
    two.start()
    place.forget()


@pytest.mark.skipif(not os.environ.get("TORPOR_SOAK"), reason="long: see ./run soak")
def test_its_process_dies_when_it_is_prepared(place: Pair, tmp_path: Path) -> None:
    """The next process takes over what the dead one left: the record on disk is all there is."""
    marks = tmp_path / "marks"
    marks.mkdir()
    once = tmp_path / "once"
    once.write_text(
        f'#!/bin/sh\n[ -e {marks}/reached ] && exec {TORPOR} "$@"\n'
        f'exec {sys.executable} -m tests.migrate.failing "after cluster.records:Record.write=prepared" kill '
        f'{marks} "$@"\n'
    )
    once.chmod(0o755)
    reach_by(place, [once])
    pod = place.start("web")
    client = place.client(both_ways(pod.ips, 2))
    one, two = place.agents
    place.migrate(one, two)
    assert (marks / "reached").exists()
    client.goes_on()
    whole(client.stop())
    assert place.never_twice() == ["node1", "node2"]
    two.start()
    place.forget()
