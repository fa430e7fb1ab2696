"""A target that is reached over a program's standard streams, as over SSH, and has no daemon."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path

import pytest

from tests.migrate.pair import PORT, TORPOR, Pair, Pairs, whole
from tests.netlab.traffic import both_ways
from tests.support.containers import CHECKOUT, command, until

pytestmark = pytest.mark.engine

SOAK = bool(os.environ.get("TORPOR_SOAK"))
SSHD = shutil.which("sshd", path="/usr/sbin")
SSH_PORT = 2222


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Pair]:
    with Pairs(tmp_path) as pairs:
        yield pairs.fresh()


def reach_by(place: Pair, program: Sequence[str | Path], ssh: Sequence[str | Path] = ()) -> None:
    """Let the first node reach the second by a program there. ssh: the words before it; () where
    the program itself stands in for ssh.
    """
    one, two = place.agents
    two.kill()
    settings = {key: two.environment[key] for key in ("TORPOR_CONF", "TORPOR_AGENT", "PATH")}
    words = ["env", "-C", str(CHECKOUT), *(f"{key}={value}" for key, value in settings.items())]
    there = [*program, "agent", "--stdio"]
    words += map(str, there) if ssh else two.node.words(*there)
    words = [*map(str, ssh), shlex.join(words)] if ssh else words
    text = one.config_path.read_text()
    address = f'address = "{two.node.address}:{PORT}"'
    assert address in text
    one.config_path.write_text(text.replace(address, f"command = {json.dumps(words)}"))


@pytest.mark.skipif(bool(SSHD) and not SOAK, reason="long, and ssh itself is tried: see ./run soak")
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


@contextlib.contextmanager
def sshd(place: Pair, path: Path) -> Generator[list[str | Path]]:
    """A real sshd on the second node, with keys of its own; the words of a client that it lets in."""
    node = place.agents[1].node
    for name in ("host", "user"):
        command("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path / name)
    (path / "known").write_text(f"[{node.address}]:{SSH_PORT} {(path / 'host.pub').read_text()}")
    Path("/run/sshd").mkdir(exist_ok=True)
    (path / "sshd.conf").write_text(
        f"ListenAddress {node.address}\nPort {SSH_PORT}\nHostKey {path / 'host'}\nPidFile none\n"
        f"AuthorizedKeysFile {path / 'user.pub'}\nPermitRootLogin prohibit-password\nUsePAM no\n"
        "PasswordAuthentication no\nStrictModes no\n"
    )
    with (path / "sshd.log").open("wb") as log:
        process = subprocess.Popen(
            node.words(SSHD or "sshd", "-D", "-e", "-f", path / "sshd.conf"), stdout=log, stderr=log
        )
    try:
        listens = ("ss", "-Hltn", f"sport = :{SSH_PORT}")
        until(lambda: node(*listens).stdout, what=f"sshd listens: {(path / 'sshd.log').read_text()}")
        words: list[str | Path] = ["ssh", "-F", "none", "-i", path / "user", "-p", str(SSH_PORT)]
        for option in ("BatchMode=yes", "StrictHostKeyChecking=yes", f"UserKnownHostsFile={path / 'known'}"):
            words += ["-o", option]
        yield [*words, f"root@{node.address}"]
    finally:
        process.kill()
        process.wait()


@pytest.mark.skipif(SSHD is None, reason="no sshd here: apt-get install openssh-server")
def test_over_ssh(place: Pair, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.mkdir()
    with sshd(place, keys) as ssh:
        reach_by(place, [TORPOR], ssh)
        pod = place.start("web")
        client = place.client(both_ways(pod.ips, 2))
        one, two = place.agents
        report = place.migrate(one, two)
        print(report)
        assert report["target"] == "node2"
    assert "Accepted publickey for root" in (keys / "sshd.log").read_text()
    client.goes_on()  # the container outlives sshd and the session in which it was restored
    whole(client.stop())
    assert place.never_twice() == ["node1", "node2"]
    assert place.leftovers(two, one) == []
    two.start()
    place.forget()


@pytest.mark.skipif(not SOAK, reason="long: see ./run soak")
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
