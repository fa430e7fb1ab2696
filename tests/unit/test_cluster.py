"""Parts of the migration between nodes that need no node: the channel, agent.toml, the records."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from click.testing import CliRunner

from cluster import cargo, config, settle
from cluster.channel import Channel, Lost, Refused
from cluster.cli import migrate as migrate_cli
from cluster.config import split
from cluster.here import Here
from cluster.messages import PROTOCOL, Answer, Busy, Hello, Prepare, Question, Refusal, Send
from cluster.records import PLAN, VERDICT, Departure, Record, all_of, begin_departure, check_name, new_name
from cluster.serve import serve
from cluster.transport import Pipes
from netmig.errors import NetworkError
from netmig.lease import Owner
from shim.errors import ShimError, UsageError


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    one, two = socket.socketpair()
    channels = Channel(one, "two"), Channel(two, "one")
    yield channels
    for channel in channels:
        channel.close()


def test_questions_and_answers(ends: tuple[Channel, Channel]) -> None:
    one, two = ends
    one.send(Question(migration="x"))
    assert two.receive() == Question(migration="x")
    two.send(Busy())
    two.send(Answer(standing="prepared", times_ms={"restore": 1.5}))
    assert one.answer(Answer).standing == "prepared"
    two.send(Refusal(cause="no room"))
    with pytest.raises(Refused, match="no room"):
        one.answer(Answer)
    two.send(Refusal(cause="no \x1b[2Jroom"))
    with pytest.raises(Refused, match=r"^no \\x1b\[2Jroom$"):
        one.answer(Answer)


def test_a_side_that_hangs_up_is_lost(ends: tuple[Channel, Channel]) -> None:
    one, two = ends
    two.close()
    with pytest.raises(Lost, match="could not hear node 'two' any more"):
        one.receive()


def test_silence_is_a_loss_and_work_is_not(
    ends: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = ends
    monkeypatch.setattr("cluster.channel.SILENCE_S", 0.3)
    monkeypatch.setattr("cluster.channel._BUSY_S", 0.05)
    with pytest.raises(Lost):
        one.answer(Answer)
    monkeypatch.setattr("cluster.channel.SILENCE_S", 2.0)
    done = threading.Event()
    thread = threading.Thread(target=lambda: (done.wait(2.5), two.send(Answer(standing="running"))))
    with two.busy():
        thread.start()
        assert one.answer(Answer).standing == "running"
        done.set()
    thread.join()


@pytest.mark.parametrize("garbage", [b"\xff\xff\xff\xff", b"\0\0\0\4nope", b"\0\0\0\2{}"])
def test_garbage_is_a_loss(garbage: bytes) -> None:
    ours, theirs = socket.socketpair()
    channel = Channel(ours, "two")
    theirs.sendall(garbage)
    with pytest.raises(Lost, match="could not understand node 'two'"):
        channel.receive()
    channel.close()
    theirs.close()


@pytest.mark.parametrize("size", [0, 1, (1 << 20) + 1])
def test_files_go_through_whole(ends: tuple[Channel, Channel], tmp_path: Path, size: int) -> None:
    one, two = ends
    content = os.urandom(size)
    (tmp_path / "a").write_bytes(content)
    seen: list[bytes] = []
    sender = threading.Thread(
        target=lambda: (
            one.send(Send(place="image", name="a", size_bytes=size)),
            one.send_file(tmp_path / "a", size, lambda piece: seen.append(bytes(piece))),
            one.send(Prepare()),
        )
    )
    sender.start()
    said = two.receive()
    assert isinstance(said, Send)
    two.receive_file(tmp_path / "b", said.size_bytes)
    assert isinstance(two.receive(), Prepare)
    sender.join()
    assert (tmp_path / "b").read_bytes() == content == b"".join(seen)
    assert (tmp_path / "b").stat().st_mode & 0o777 == 0o600


def test_what_is_small_waits_for_more_and_keeps_its_place(
    ends: tuple[Channel, Channel], tmp_path: Path
) -> None:
    one, two = ends
    content = [os.urandom(size) for size in (3, 0, 1 << 17, 5)]
    for number, data in enumerate(content):
        (tmp_path / f"{number}").write_bytes(data)
    sizes: list[int] = []

    def receive(number: int) -> None:
        said = two.receive()
        assert isinstance(said, Send)
        sizes.append(said.size_bytes)
        two.receive_file(tmp_path / f"copy-{number}", said.size_bytes)
        assert (tmp_path / f"copy-{number}").read_bytes() == content[number]

    with ThreadPoolExecutor(1) as beside:
        sending = beside.submit(
            lambda: [cargo.send(one, "image", f"{n}", tmp_path / f"{n}", more=True) for n in range(4)]
        )
        for number in range(3):
            receive(number)
        assert sending.result() == [3, 0, 1 << 17, 5]
    one.flush()
    receive(3)
    assert sizes == [3, 0, 1 << 17, 5]


def test_a_file_that_cannot_be_written_leaves_the_channel_usable(
    ends: tuple[Channel, Channel], tmp_path: Path
) -> None:
    one, two = ends
    (tmp_path / "a").write_bytes(b"x" * 10)
    one.send_file(tmp_path / "a", 10)
    one.send(Prepare())
    with pytest.raises(FileNotFoundError):
        two.receive_file(tmp_path / "none" / "b", 10)
    assert isinstance(two.receive(), Prepare)


def test_a_part_goes_behind_those_before_it_and_nowhere_else(
    ends: tuple[Channel, Channel], tmp_path: Path
) -> None:
    one, two = ends
    (tmp_path / "a").write_bytes(b"first, second")
    one.send_file(tmp_path / "a", 7)
    two.receive_file(tmp_path / "b", 7)
    one.send_file(tmp_path / "a", 6, offset=7)
    two.receive_file(tmp_path / "b", 6, offset=7)
    assert (tmp_path / "b").read_bytes() == b"first, second"
    one.send_file(tmp_path / "a", 6, offset=7)
    one.send(Prepare())
    with pytest.raises(OSError, match="13 bytes where 7 came before"):
        two.receive_file(tmp_path / "b", 6, offset=7)
    assert isinstance(two.receive(), Prepare)


def test_pages_are_sent_while_they_grow_and_the_rest_when_all_is_dumped(
    ends: tuple[Channel, Channel], tmp_path: Path
) -> None:
    one, two = ends
    source, target = tmp_path / "image" / "checkpoint", tmp_path / "copy"
    source.mkdir(parents=True)
    target.mkdir()
    content = os.urandom((3 << 20) + 5)
    (source / "inventory.img").write_bytes(b"small")
    (source / "pages-1.img").write_bytes(content[: 2 << 20])
    dumped = threading.Event()
    with ThreadPoolExecutor(1) as beside:
        sending = beside.submit(cargo.send_memory, one, source.parent, dumped, {})

        def receive() -> str:
            said = two.receive()
            assert isinstance(said, Send)
            name = said.name.removeprefix("checkpoint/")
            two.receive_file(target / name, said.size_bytes, offset=said.offset)
            return name

        assert receive() == "pages-1.img"
        assert not sending.done()
        with (source / "pages-1.img").open("ab") as pages:
            pages.write(content[2 << 20 :])
        dumped.set()
        while receive() == "pages-1.img":
            pass
        digests = sending.result()
    assert (target / "pages-1.img").read_bytes() == content
    assert {name: digest.size_bytes for name, digest in digests.items()} == {
        "checkpoint/pages-1.img": len(content),
        "checkpoint/inventory.img": 5,
    }
    assert digests["checkpoint/pages-1.img"].sha256 == ""  # the channel vouches for those
    assert digests["checkpoint/inventory.img"].sha256 == hashlib.sha256(b"small").hexdigest()


def test_pipes_are_a_stream() -> None:
    there, back = os.pipe(), os.pipe()
    one, two = Channel(Pipes(back[0], there[1]), "two"), Channel(Pipes(there[0], back[1]), "one")
    one.send(Question(migration="x"))
    assert isinstance(two.receive(), Question)
    two.send(Answer(standing="unknown"))
    assert one.answer(Answer).standing == "unknown"
    one.close()
    with pytest.raises(Lost):
        two.receive()
    two.close()


def test_addresses() -> None:
    assert split("10.0.0.1:7077") == ("10.0.0.1", 7077)
    assert split("[fd00::1]:7077") == ("fd00::1", 7077)
    for text in ("10.0.0.1", "a:b", "", "10.0.0.1:99999", "10.0.0.1:0", "a:-1", "a:²", f"a:1{'0' * 5000}"):
        with pytest.raises(UsageError, match="write HOST:PORT"):
            split(text)


# --- agent.toml ----------------------------------------------------------------------------------------

WHOLE = """
node = "a"
listen = "10.0.0.1:7077"
leases = "/var/lib/cni/networks/pods"
[tls]
certificate = "/etc/torpor/a.pem"
key = "/etc/torpor/a.key"
authority = "/etc/torpor/ca.pem"
[peers.b]
address = "10.0.0.2:7077"
may_push = true
[peers.c]
command = ["ssh", "root@c", "torpor", "agent", "--stdio"]
"""


def load(path: Path, text: str, mode: int = 0o600) -> config.Config:
    file = path / "agent.toml"
    file.write_text(text)
    file.chmod(mode)
    return config.load(file)


def test_a_whole_file(tmp_path: Path) -> None:
    read = load(tmp_path, WHOLE)
    assert read.peer("b").may_push
    assert not read.peer("c").may_push
    assert read.peer("c").command[0] == "ssh"
    with pytest.raises(UsageError, match=r"agent\.toml knows b, c"):
        read.peer("d")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('node = "a"', "", "node"),
        ("may_push", "may_pull", "may_pull"),
        ('address = "10.0.0.2:7077"', "", "needs an address or a command"),
        ('"/etc/torpor/a.key"', '"a.key"', "not an absolute path"),
        ("[tls]", "[peers.tls]", "peers"),
        ('"a"', '" "', "`node` is empty"),
        ("10.0.0.1:7077", "10.0.0.1:99999", "write HOST:PORT"),
        ("10.0.0.2:7077", "10.0.0.2", "write HOST:PORT"),
        ('node = "a"', 'node = "Node-A"', "'Node-A' has capitals"),
        ("[peers.b]", "[peers.B]", "'B' has capitals"),
        ("[peers.b]", '[peers.""]', "a peer has no name"),
        ('["ssh", "root@c", "torpor", "agent", "--stdio"]', '[""]', "names no program"),
        ("listen", 'state = "/var/a,b"\nlisten', "which the mount"),
        ("listen", 'state = "/var/a:b"\nlisten', "which the mount"),
        ("listen", f"deep = {'[' * 3000}\nlisten", "nested too deep; correct"),
        ("listen", f"long = 1{'0' * 5000}\nlisten", "value has 5001 digits; correct"),
        ("listen", 'cgroup = "../.."\nlisten', "not an absolute path"),
        ("listen", 'cgroup = "pods"\nlisten', "not an absolute path"),
        ("listen", 'cgroup = "/pods/../.."\nlisten', "leads up by"),
        ('node = "a"', 'node = "a/b"', "'a/b' is no name of a node"),
        ("[peers.b]", '[peers."b c"]', "'b c' is no name of a node"),
        ("[peers.b]", "[peers.a]", "peer 'a' is this node itself"),
        ("listen", 'via = ["10.0.0.1", "10.0.0.2"]\nlisten', "two addresses of one family"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path: Path, old: str, new: str, words: str) -> None:
    assert old in WHOLE
    with pytest.raises(UsageError, match=words) as caught:
        load(tmp_path, WHOLE.replace(old, new, 1))
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("mode", [0o622, 0o620, 0o602])
def test_nobody_else_may_write_it(tmp_path: Path, mode: int) -> None:
    with pytest.raises(UsageError, match="decides who is root here"):
        load(tmp_path, WHOLE, mode)


def with_leases(path: Path, leases: Path) -> config.Config:
    return load(path, WHOLE.replace("/var/lib/cni/networks/pods", str(leases)))


def test_leases_are_of_a_network_that_is_there(tmp_path: Path) -> None:
    store = tmp_path / "pods"
    for make in (lambda: None, store.mkdir, (store / "10.88.0.9").touch):
        make()
        with pytest.raises(UsageError, match="no directory that host-local has made"):
            with_leases(tmp_path, store).check_leases()
    (store / "last_reserved_ip.0").touch()
    with_leases(tmp_path, store).check_leases()
    reserver = with_leases(tmp_path, store).reserver()
    reserver.reserve("10.88.0.1", Owner(container_id="c"))
    assert (store / "10.88.0.1").exists()


def test_leases_by_a_cni_configuration_are_of_its_ranges(tmp_path: Path) -> None:
    network = tmp_path / "10-pods.conflist"
    ipam = {"type": "host-local", "dataDir": str(tmp_path), "subnet": "10.88.0.0/24"}
    network.write_text(json.dumps({"name": "pods", "plugins": [{"type": "bridge", "ipam": ipam}]}))
    read = with_leases(tmp_path, network)
    read.check_leases()
    read.reserver().reserve("10.88.0.7", Owner(container_id="c"))
    assert (tmp_path / "pods" / "10.88.0.7").exists()
    with pytest.raises(NetworkError, match=r"its ranges are 10\.88\.0\.1 to 10\.88\.0\.254"):
        read.reserver().reserve("10.89.0.7", Owner(container_id="c"))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"name": 1}', '{"plugins": [1]}', '{"ipam": 7}', "\xff"])
def test_a_damaged_cni_configuration_is_told(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.conf").write_text(text, encoding="latin-1")
    with pytest.raises((UsageError, NetworkError), match="could not use"):
        with_leases(tmp_path, tmp_path / "x.conf").check_leases()


def test_no_leases_are_warned_of(tmp_path: Path) -> None:
    read = load(tmp_path, WHOLE.replace('leases = "/var/lib/cni/networks/pods"\n', ""))
    read.check_leases()
    assert ["names no `leases`" in one for one in read.unprotected] == [True]
    assert load(tmp_path, WHOLE).unprotected == ()


# --- records -------------------------------------------------------------------------------------------


def plan() -> Departure:
    return Departure(
        migration="0" * 16,
        container_id="c",
        root="/run/runc",
        directory="/run/torpor/c",
        bundle="/b",
        peer="b",
        engine="criu",
        netns="/run/netns/c",
        identity=b"{}",
        owner="c",
    )


def test_a_record_comes_and_goes(tmp_path: Path) -> None:
    record = Record(tmp_path, new_name())
    assert not record.exists()
    with record.begun():
        assert not record.exists()
        record.make(plan())
        assert record.exists()
        with Record(tmp_path, record.migration).locked() as ours:
            assert not ours
        assert record.read(VERDICT) == ""
        record.write(VERDICT, "hold")
        record.write(VERDICT, "commit")
        assert record.read(VERDICT) == "commit"
        assert (record.path / VERDICT).read_text() == "commit\n"
    assert record.plan(Departure) == plan()
    assert [each.migration for each in all_of(tmp_path)] == [record.migration]
    record.remove()
    record.remove()
    assert list(all_of(tmp_path)) == []
    with record.locked() as ours:
        assert not ours


@pytest.mark.parametrize(
    "name", ["", "..", "../../etc/passwd", "0" * 15, "0" * 17, "g" * 16, "0" * 15 + "\n"]
)
def test_a_name_that_is_no_name(name: str) -> None:
    with pytest.raises(ShimError, match="sixteen hex digits"):
        check_name(name)


def test_one_container_leaves_once_at_a_time(tmp_path: Path) -> None:
    first, second = (Record(tmp_path, name * 16) for name in "01")
    with first.begun():
        begin_departure(first, plan())
        with second.begun(), pytest.raises(ShimError, match=f"is under way, {'0' * 16}"):
            begin_departure(second, plan())
        with second.begun():
            begin_departure(second, msgspec.structs.replace(plan(), container_id="other"))
        second.remove()
    with second.begun():
        begin_departure(second, plan())  # the first was killed before there was anything to decide
        second.remove()
    first.write(VERDICT, "hold")
    with second.begun(), pytest.raises(ShimError, match="is under way"):
        begin_departure(second, plan())


def test_a_damaged_record_is_listed_among_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = Here(config=config.Config(node="a", state=tmp_path), node=cast("Any", None))
    for name in ("0" * 16, "1" * 16):
        record = Record(here.config.departures, name)
        with record.begun():
            record.make(plan())
    (here.config.departures / ("0" * 16) / PLAN).write_text("{")
    arrived = here.config.arrivals / ("2" * 16)
    arrived.mkdir(parents=True)
    (arrived / PLAN).write_text("")
    migrate_cli._list(here, as_json=True)  # pyright: ignore[reportPrivateUsage]
    said = capsys.readouterr()
    assert [row["state"] for row in json.loads(said.out)] == ["damaged", "preparing", "damaged"]
    assert said.err.count("end its container, and only then remove the directory") == 2


def test_a_state_that_is_no_directory_is_told_by_the_list(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "agent.toml").write_text(f'node = "a"\nstate = "{tmp_path / "file"}"\n')
    done = CliRunner().invoke(migrate_cli.command, ["--list", "--config", str(tmp_path / "agent.toml")])
    assert isinstance(done.exception, ShimError)
    words = f"could not list migrations: could not use '{tmp_path / 'file' / 'departures'}': Not a directory"
    assert str(done.exception).startswith(words)


@pytest.mark.parametrize(
    ("number", "words"),
    [(errno.ENOSPC, "free some space"), (errno.EROFS, "remount it"), (errno.ENOTDIR, "put that right")],
)
def test_errors_of_files_name_place_and_remedy(number: int, words: str) -> None:
    told = settle.told(OSError(number, os.strerror(number), "/x/y"))
    assert told == f"could not use '/x/y': {os.strerror(number)}; {words}"
    assert settle.told(ShimError("could not do it; do not")) == "could not do it; do not"
    assert settle.told(OSError(number, os.strerror(number))).startswith("could not use its state: ")
    assert settle.told(ValueError("no address")) == "could not go on: ValueError: no address; report it"


def test_a_record_that_fails_in_any_way_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Here(config=config.Config(node="a", state=tmp_path), node=cast("Any", None))
    for name in ("0" * 16, "1" * 16):
        record = Record(here.config.departures, name)
        with record.begun():
            record.make(plan())
    seen: list[str] = []

    def departure(_: Here, record: Record) -> bool:
        seen.append(record.migration)
        if record.migration == "0" * 16:
            raise ValueError("no address")
        record.remove()
        return True

    monkeypatch.setattr(settle, "departure", departure)
    assert settle.settle_all(here) == [
        f"migration {'0' * 16}: could not go on: ValueError: no address; report it"
    ]
    assert seen == ["0" * 16, "1" * 16]
    assert settle.settle_all(here) == []  # told once


def test_room_is_asked_of_the_file_system_of_the_state(tmp_path: Path) -> None:
    here = Here(config=config.Config(node="a", state=tmp_path), node=cast("Any", None))
    here.check_room(0)
    with pytest.raises(ShimError, match=f"{tmp_path}, has [0-9]+ MiB free and the migration needs"):
        here.check_room(1 << 60)


def test_the_first_word_of_a_stranger_is_short(tmp_path: Path) -> None:
    here = Here(config=config.Config(node="b", state=tmp_path), node=cast("Any", None))
    ours, theirs = socket.socketpair()
    with ours:
        ours.sendall((1 << 20).to_bytes(4, "big"))
        with pytest.raises(Lost, match=f"a message of {1 << 20} bytes"):
            serve(here, Channel(theirs, "a"), trusted=False)
    theirs.close()


@pytest.mark.parametrize("question", [Question(migration="0" * 16), Prepare()])
def test_what_stood_against_a_file_is_told_at_the_next_question(
    ends: tuple[Channel, Channel], tmp_path: Path, question: Question | Prepare
) -> None:
    """The source asks before it freezes: a full disk is not found out while nobody runs."""
    one, two = ends
    (tmp_path / "base").write_bytes(b"x" * 10)
    peers = {"a": config.Peer(may_push=True)}
    node = cast("Any", SimpleNamespace(config=SimpleNamespace(store_path=tmp_path / "store")))
    here = Here(config=config.Config(node="b", state=tmp_path, peers=peers), node=node)
    with ThreadPoolExecutor(1) as beside:
        serving = beside.submit(serve, here, two, trusted=True)
        one.ask(Hello(protocol=PROTOCOL, node="a"), Answer)
        cargo.send(one, "base", "base.tar", tmp_path / "base")
        words = "belongs to nothing" if isinstance(question, Question) else "nothing was announced"
        with pytest.raises(Refused, match=words):
            one.ask(question, Answer)
        one.close()
        assert isinstance(serving.exception(), Lost)
