"""The agent: what it refuses to start with, and that nothing of its node ends it."""

from __future__ import annotations

import contextlib
import datetime
import os
import select
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import trustme
from cryptography.hazmat.primitives import serialization

from cluster import agent, config, settle, transport
from cluster.channel import SILENCE_S, Channel
from cluster.here import Here
from cluster.messages import PROTOCOL, Answer, Hello
from cluster.records import PLAN, Record, new_name
from shim.errors import UsageError
from tests.support.containers import until

NAME = "node-a"


@pytest.fixture
def here(tmp_path: Path) -> Here:
    authority = trustme.CA()
    certificate = authority.issue_cert(NAME)
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    certificate.private_key_pem.write_to_path(str(tmp_path / "key.pem"))
    certificate.cert_chain_pems[0].write_to_path(str(tmp_path / "cert.pem"))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    tls = config.Tls(tmp_path / "cert.pem", tmp_path / "key.pem", tmp_path / "ca.pem")
    found = config.Config(node=NAME, state=tmp_path / "state", listen=f"127.0.0.1:{port}", tls=tls)
    return Here(config=found, node=cast("Any", SimpleNamespace()))


def changed(here: Here, **fields: object) -> Here:
    return Here(config=msgspec.structs.replace(here.config, **fields), node=here.node)


class Started:
    """An agent in a process of its own."""

    def __init__(self, here: Here, log_path: Path) -> None:
        self.here, self.log_path = here, log_path
        self.pid = os.fork()
        if not self.pid:
            with log_path.open("ab") as log:
                os.dup2(log.fileno(), 2)
            try:
                sys.stderr = os.fdopen(2, "w", closefd=False)
                agent.run(here)
            finally:
                os._exit(0)

    @property
    def log(self) -> str:
        return self.log_path.read_text() if self.log_path.exists() else ""

    def lives(self) -> bool:
        return os.waitpid(self.pid, os.WNOHANG) == (0, 0)

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGTERM)
            os.waitpid(self.pid, 0)


@pytest.fixture
def started(here: Here, tmp_path: Path) -> Iterator[Started]:
    one = Started(here, tmp_path / "log")
    until(lambda: "listens at" in one.log, what="the agent says that it listens")
    yield one
    one.end()


def test_damage_in_its_state_is_said_once_and_ends_nothing(started: Started) -> None:
    departures = started.here.config.departures
    departures.mkdir()
    (departures / new_name()).write_text("no directory")
    until(lambda: "Not a directory" in started.log, what="the damage is told")
    before = started.log
    departures.rename(departures.with_name("aside"))
    departures.write_text("no directory either")
    until(lambda: started.log.count("Not a directory") == 2, what="other damage is told, too")
    time.sleep(1.2)  # two rounds more
    assert started.lives()
    assert started.log.count("\n") == before.count("\n") + 1


@pytest.mark.parametrize("call", ["os.fork", "os.pipe", "cluster.settle.unfinished", "select.select"])
def test_no_call_of_the_kernel_ends_a_round(here: Here, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def fails(*_: object) -> object:
        raise OSError(11, "Resource temporarily unavailable")

    with socket.create_server(("127.0.0.1", 0)) as server:
        listener = agent._Listener(here, server)  # pyright: ignore[reportPrivateUsage]
        with socket.create_connection(server.getsockname()):
            monkeypatch.setattr(call, fails)
            (trouble,) = listener.round()
    assert "Resource temporarily unavailable" in trouble


def test_a_damaged_record_does_not_keep_others_from_being_settled(here: Here) -> None:
    arrivals = here.config.arrivals
    arrivals.mkdir(parents=True)
    (arrivals / ("0" * 16)).write_text("no directory")
    whole = arrivals / ("1" * 16)
    whole.mkdir()
    (whole / PLAN).write_text("{}")
    troubles: list[str] = []
    assert [one.path for one in settle.unfinished(here, troubles)] == [whole]
    assert [str(arrivals / ("0" * 16)) in one for one in troubles] == [True]
    (problem,) = settle.settle_all(here)
    assert "1" * 16 in problem


def test_one_state_has_one_agent(started: Started) -> None:
    with pytest.raises(UsageError, match="another one works in"):
        agent.run(started.here)


def test_a_killed_agent_leaves_all_to_the_next(started: Started, tmp_path: Path) -> None:
    _, port = transport.split(started.here.config.listen)
    with socket.create_connection(("127.0.0.1", port)):  # a child of the dead one lives on
        until(lambda: children(started.pid) >= 1, what="a child talks to us")
        os.kill(started.pid, signal.SIGKILL)
        os.waitpid(started.pid, 0)
        following = Started(started.here, tmp_path / "next")
        try:
            until(lambda: "listens at" in following.log, what="the next one has its state and its address")
        finally:
            following.end()


def test_over_standard_streams_nobody_waits_until_all_is_settled(
    here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = changed(here, peers={"node-b": config.Peer(may_push=True)})
    record = Record(here.config.arrivals, new_name())
    with record.begun():
        (record.path / PLAN).write_text("{}")
    begun, go, done = (tmp_path / name for name in ("begun", "go", "done"))

    def settle_all(_: Here) -> None:
        begun.touch()
        until(go.exists)
        done.touch()

    monkeypatch.setattr(settle, "settle_all", settle_all)
    (their_in, our_out), (our_in, their_out), (our_err, their_err) = os.pipe(), os.pipe(), os.pipe()
    pid = os.fork()
    if not pid:
        try:
            for number, end in enumerate((their_in, their_out, their_err)):
                os.dup2(end, number)
            # Not all that is open: what else this process has loaded may need its own to fork once more.
            for end in (their_in, their_out, their_err, our_in, our_out, our_err):
                os.close(end)
            agent.stdio(here)
        finally:
            os._exit(0)
    for end in (their_in, their_out, their_err):
        os.close(end)
    asked = time.monotonic()
    Channel(transport.Pipes(our_in, our_out), "node-a").ask(Hello(protocol=PROTOCOL, node="node-b"), Answer)
    assert time.monotonic() - asked < SILENCE_S
    until(begun.exists, what="what is unfinished is settled")
    os.close(our_out)
    os.waitpid(pid, 0)
    for end in (our_in, our_err):
        assert select.select([end], [], [], 5.0)[0]
        assert os.read(end, 1) == b""
        os.close(end)
    assert not done.exists()
    go.touch()
    until(done.exists, what="it is settled all the same")


def test_a_state_that_cannot_be_is_named(here: Here, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        UsageError, match=r"could not start the agent: .*file.*Not a directory; put that right"
    ):
        agent.run(changed(here, state=tmp_path / "file" / "state"))


def children(pid: int) -> int:
    return len(subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, check=False).stdout.split())


def test_strangers_are_bounded_and_told(here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "_N_STRANGERS", 4)
    monkeypatch.setattr(agent, "_STRANGE_S", 60.0)  # none leaves by itself meanwhile
    _, port = transport.split(here.config.listen)
    with contextlib.ExitStack() as stack:
        one = Started(here, tmp_path / "log")
        stack.callback(one.end)
        until(lambda: "listens at" in one.log, what="the agent says that it listens")
        with contextlib.ExitStack() as connections:
            for _ in range(20):
                connections.enter_context(socket.create_connection(("127.0.0.1", port)))
            until(lambda: "hung up on the first" in one.log, what="the first are hung up on")
            until(lambda: one.log.count("hung up") == 16, what="all are taken")
            until(lambda: children(one.pid) <= 5, what="the others are gone")
        until(lambda: "127.0.0.1: could not take a connection" in one.log, what="refused peers are told")


def prove(here: Here) -> ssl.SSLSocket:
    """A connection of somebody with a certificate of the authority, who is none of the peers."""
    connection = socket.create_connection(transport.split(here.config.listen))
    return transport.context(here.config, server=False).wrap_socket(connection, server_hostname=NAME)


def test_so_are_those_who_only_have_a_certificate(
    here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "_N_STRANGERS", 2)
    with contextlib.ExitStack() as stack:
        one = Started(here, tmp_path / "log")
        stack.callback(one.end)
        until(lambda: "listens at" in one.log, what="the agent says that it listens")
        for _ in range(5):
            stack.enter_context(prove(here))
        until(lambda: one.log.count("hung up") == 3, what="the first are hung up on")


def test_nobody_is_a_stranger_for_long(here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by saying a little of something now and then, either."""
    monkeypatch.setattr(agent, "_STRANGE_S", 2.0)
    with contextlib.ExitStack() as stack:
        one = Started(here, tmp_path / "log")
        stack.callback(one.end)
        until(lambda: "listens at" in one.log, what="the agent says that it listens")
        connection = stack.enter_context(prove(here))
        connection.sendall(b"\0\0\1\0")
        connection.settimeout(0.1)

        def ended() -> bool:
            try:
                connection.sendall(b" ")
                return connection.recv(1) == b""
            except TimeoutError:
                return False
            except OSError:
                return True

        until(ended, what="it is hung up on")


@pytest.mark.parametrize("line", ['root = "runc"', 'root = ""', 'leases = "networks/pods"', 'state = "s"'])
def test_paths_do_not_depend_on_where_it_is_started(tmp_path: Path, line: str) -> None:
    file = tmp_path / "agent.toml"
    file.write_text(f'node = "a"\n{line}\n')
    file.chmod(0o600)
    with pytest.raises(UsageError, match=r"agent\.toml.*not an absolute path"):
        config.load(file)


# --- who it is -----------------------------------------------------------------------------------------


def test_its_certificate_is_what_others_will_believe(here: Here) -> None:
    transport.check_own(here.config)


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (
            lambda path: {"node": "node-b"},
            "could not be node 'node-b' with its .*: Hostname mismatch",
        ),
        (lambda path: {"tls": replace_tls(path, authority="other.pem")}, "could not be node 'node-a'"),
        (lambda path: {"tls": replace_tls(path, key="none.pem")}, r"could not use .*none\.pem: No such file"),
        (
            lambda path: {"tls": replace_tls(path, certificate="none.pem")},
            r"could not use .*none\.pem: No such file",
        ),
        (lambda path: {"tls": replace_tls(path, authority="log")}, r"could not use .*log: No such file"),
        (lambda path: {"tls": replace_tls(path, certificate="garbage")}, "could not use .*garbage: "),
        (
            lambda path: {"tls": replace_tls(path, key="locked.pem")},
            r"could not use .*locked\.pem: it is encrypted",
        ),
    ],
)
def test_who_others_will_not_believe_does_not_start(
    here: Here, tmp_path: Path, break_it: Callable[[Path], dict[str, object]], words: str
) -> None:
    trustme.CA().cert_pem.write_to_path(str(tmp_path / "other.pem"))
    (tmp_path / "garbage").write_text("garbage")
    key = serialization.load_pem_private_key((tmp_path / "key.pem").read_bytes(), None)
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8)
    locked = key.private_bytes(*form, serialization.BestAvailableEncryption(b"word"))
    (tmp_path / "locked.pem").write_bytes(locked)
    with pytest.raises(UsageError, match=words):
        agent.run(changed(here, **break_it(tmp_path)))


def replace_tls(path: Path, **names: str) -> config.Tls:
    files = {"certificate": "cert.pem", "key": "key.pem", "authority": "ca.pem"} | names
    return config.Tls(**{name: path / file for name, file in files.items()})


def test_a_certificate_that_is_too_old_is_told_to_its_owner(here: Here, tmp_path: Path) -> None:
    transport.check_date(here.config)
    transport.check_date(changed(here, node="node-b").config)  # wrong, but not by its date
    transport.check_date(changed(here, tls=None).config)
    authority = trustme.CA()
    past = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)
    old = authority.issue_cert(NAME, not_before=past - datetime.timedelta(days=1), not_after=past)
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    old.private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "old.pem"))
    tls = replace_tls(tmp_path, certificate="old.pem", key="old.pem")
    with pytest.raises(UsageError, match="certificate has expired; have the authority"):
        transport.check_date(changed(here, tls=tls).config)


def test_a_key_that_all_may_read_is_told(here: Here, tmp_path: Path) -> None:
    (tmp_path / "key.pem").chmod(0o644)
    one = Started(here, tmp_path / "log")
    try:
        until(lambda: "key.pem is readable by all" in one.log, what="that is told")
    finally:
        one.end()


def test_one_that_is_away_and_fails_stops_no_other(
    here: Here, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("0" * 16, "1" * 16):
        record = Record(here.config.away, name)
        with record.begun():
            (record.path / PLAN).write_text("{}")
    asked: list[str] = []

    def absence(_: Here, record: Record) -> object:
        asked.append(record.migration)
        raise ValueError("no address")

    monkeypatch.setattr(agent.away, "Absence", absence)
    agent._send_on(here)  # pyright: ignore[reportPrivateUsage]
    assert asked == ["0" * 16, "1" * 16]
    assert capsys.readouterr().err.count("could not go on: ValueError: no address") == 2


def test_what_others_flush_is_looked_at_again(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child's work, and only while something is away."""
    looked: list[object] = []
    monkeypatch.setattr(agent, "_fork", lambda work, _: looked.append(work.func) or 0)
    monkeypatch.setattr(agent, "_LOOK_S", 0.0)
    monkeypatch.setattr(agent, "_TICK_S", 0.0)
    listener = agent._Listener(here, None)  # pyright: ignore[reportPrivateUsage]
    record = Record(here.config.away, "0" * 16)
    with record.begun():
        listener.round()
        assert looked == []
        (record.path / PLAN).write_text("{}")
        listener.round()
    assert looked == [agent.away.keep_passing]
