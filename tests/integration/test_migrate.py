"""Migrations between two nodes of a lab, in a room of its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from cluster import cargo, settle
from cluster.channel import Channel
from cluster.config import Config
from cluster.here import Here
from cluster.records import Departure, Record, new_name
from shim.images.rootfs import RootfsView
from tests.netlab import room
from tests.support.containers import CHECKOUT

pytestmark = [pytest.mark.engine, pytest.mark.soak]


@pytest.mark.parametrize("play", ["scenes", "decisions", "refusals", "ways", "guests", "routed"])
def test_migrate(play: str) -> None:
    room.sweep()
    words = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-rA",
        "-p",
        "no:cacheprovider",
        f"tests/migrate/{play}.py",
    ]
    done = subprocess.run(
        room.words(words),
        env=room.environment(),
        cwd=CHECKOUT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    print(done.stdout)
    assert done.returncode == 0


def test_a_kill_while_lower_layers_are_sent_leaves_no_mount(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Here(config=Config(node="a", state=tmp_path / "state"), node=cast("Any", None))
    record = Record(here.config.departures, new_name())
    layers = tmp_path / "one", tmp_path / "two"
    for layer in layers:
        layer.mkdir()
        (layer / layer.name).touch()
    with record.begun():
        record.make(
            Departure(
                migration=record.migration,
                container_id="c",
                root="",
                directory="",
                bundle="",
                peer="b",
                engine="criu",
                netns="",
                identity=b"",
                owner="c",
            )
        )
    pid = os.fork()
    if not pid:
        try:
            monkeypatch.setattr(cargo, "write_diff", lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
            view = RootfsView(path=tmp_path, kind="overlay", lower_paths=layers)
            cargo.send_base(Channel(socket.socketpair()[0], "b"), view, record.path)
        finally:
            os._exit(1)
    os.waitpid(pid, 0)
    lower = record.path / cargo.LOWER
    try:
        assert (lower / "two").exists()
        monkeypatch.setattr(settle, "resume", lambda *_: None)
        monkeypatch.setattr(settle, "tell", lambda *_: "unknown")
        assert settle.departure(here, record)
        assert not record.path.exists()
    finally:
        if lower.is_mount():
            subprocess.run(["umount", "--lazy", lower], check=True)
