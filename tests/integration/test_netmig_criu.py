"""CRIU and a hold: a table placed beforehand is the one that the restore takes away."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Generator
from pathlib import Path

import pytest

from engines.api import CheckpointRequest, PhaseInfo, ReleaseRequest, RestoreRequest
from netmig import claim, hold
from netmig.ns import Netns
from tests.support.containers import PYTHON, SEARCH_PATH, WORKLOADS, lab, live, until
from tests.support.criu import CriuLab
from tests.support.segment import At, Member, Segment, Sniffer, is_neighbour_talk, segment

pytestmark = pytest.mark.engine


@pytest.fixture
def place(tmp_path: Path) -> Generator[CriuLab]:
    with lab(tmp_path) as inner:
        yield CriuLab(inner)


@pytest.fixture
def wire(tmp_path: Path) -> Generator[Segment]:
    with segment(tmp_path / "wire") as made:
        yield made


class Echo:
    """A client whose records must come back in order."""

    def __init__(self, netns: Netns, address: str) -> None:
        with netns.inside():
            self._process = subprocess.Popen(
                [PYTHON, "-IS", WORKLOADS / "echo_client.py", address, "7000"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "PATH": SEARCH_PATH},
            )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def received(self) -> int:
        """How many records came back. Fails if the connection broke, or its order."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("?\n")
        self._process.stdin.flush()
        received, _, error = self._process.stdout.readline().split()
        assert error == "-", f"the connection broke: {error}"
        return int(received)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def test_a_connection_moves_into_a_namespace_that_was_held_before(place: CriuLab, wire: Segment) -> None:
    """The target is plugged in and announced before anything runs there, and says nothing until it does."""
    old, client = wire.add("old", 10), wire.add("client", 20)
    new = wire.add("new", 10, plugged=False)
    source = place.start(netns_path=old.netns.path, args=live("--port", "7000"))
    echo = Echo(client.netns, old.ip4)
    place.lab.on_close(echo.close)
    until(lambda: echo.received() > 20, what="it answers")

    image = place.image_root / "i"
    place.engine(source).checkpoint(
        CheckpointRequest(
            container_id=source, bundle_path=place.bundle(source), image_path=image, timeout_s=60
        )
    )
    [table] = hold.tables(old.netns)
    assert table.startswith(hold.CRIU_PREFIX)
    stopped_at = echo.received()

    target = place.prepare(netns_path=new.netns.path, args=live("--port", "7000"))
    seen: list[tuple[str, ...]] = []

    def at_phase(phase: str, info: PhaseInfo) -> None:
        if phase == "restored":
            seen.append(hold.tables(new.netns))

    with Sniffer(client, new.mac) as sniffer:
        _switch(wire, old, new, table)
        place.restore(
            place.engine(target),
            RestoreRequest(
                container_id=target,
                bundle_path=place.bundle(target),
                image_path=image,
                timeout_s=60,
                held=True,
                tcp="keep",
                on_phase=at_phase,
            ),
        )
        flags = [frame[47] for frame in sniffer.frames() if not is_neighbour_talk(frame) and frame[23] == 6]
    assert seen == [(table,)], "the hold stood until the tasks were there"
    assert not any(flag & 0x04 for flag in flags), "nobody was reset"
    assert hold.tables(new.netns) == (), "CRIU took it away"
    assert hold.tables(old.netns) == (table,), "the source stays mute"

    place.engine(target).release(ReleaseRequest(container_id=target, timeout_s=10))
    # A peer sends again after up to twice what it has waited.
    until(lambda: echo.received() > stopped_at + 20, timeout_s=60, what="the client goes on")
    place.kill(target)


def _switch(wire: Segment, old: Member, new: Member, table: str) -> None:
    with claim.Announcer(new.netns, [At(ip=ip, mac=new.mac) for ip in new.addresses]) as announcer:
        wire.unplug(old)
        hold.lock(new.netns, table)
        wire.plug(new)
        announcer.send()
