"""Parts of the migration between nodes that need no node: the channel, agent.toml, the records."""

from __future__ import annotations

import hashlib
import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cluster import cargo, config
from cluster.channel import Channel, Lost, Refused
from cluster.config import split
from cluster.messages import Answer, Busy, Prepare, Question, Refusal, Send
from cluster.records import VERDICT, Departure, Record, all_of, check_name, new_name
from cluster.transport import Pipes
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
    done = threading.Event()
    thread = threading.Thread(target=lambda: (done.wait(1.0), two.send(Answer(standing="running"))))
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
        sending = beside.submit(cargo.send_memory, one, source.parent, dumped)

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
