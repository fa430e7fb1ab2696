"""Real services sleep in one pod and wake in another."""

from __future__ import annotations

import socket

import pytest

from tests.support.containerd import Containerd
from tests.support.containers import until
from tests.support.cri import Cri
from tests.support.network import Lines
from tests.support.torpor import Torpor

pytestmark = pytest.mark.engine

N_KEYS = 10_000
MEBIBYTES = 256
REDIS = (
    "/usr/bin/redis-server --bind 0.0.0.0 --protected-mode no --save '' --dir /data --appendonly no"
    " --daemonize no"
)


class Redis:
    """A client of redis' own protocol, enough for these tests."""

    def __init__(self, address: str) -> None:
        self.connection = socket.create_connection((address, 6379), timeout=30)
        self.reader = self.connection.makefile("rb")

    def send(self, *commands: tuple[str, ...]) -> list[str]:
        """Send commands in one go; their answers as text, "" for a missing value. Raises OSError."""
        packets: list[str] = []
        for words in commands:
            packets.append(f"*{len(words)}\r\n")
            packets += [f"${len(word)}\r\n{word}\r\n" for word in words]
        self.connection.sendall("".join(packets).encode())
        return [self._answer() for _ in commands]

    def _answer(self) -> str:
        line = self.reader.readline().decode().rstrip("\r\n")
        if not line:
            raise ConnectionError("redis closed the connection")
        if line[0] == "$":
            length = int(line[1:])
            return self.reader.read(length + 2)[:-2].decode() if length >= 0 else ""
        return line[1:]

    def close(self) -> None:
        self.reader.close()
        self.connection.close()


def ready_redis(address: str) -> Redis:
    def connect() -> list[Redis]:
        try:
            return [Redis(address)]
        except OSError:
            return []

    (client,) = until(connect, what="redis answers")
    assert client.send(("PING",)) == ["PONG"]
    return client


def test_redis_wakes_with_its_keys_and_without_its_clients(
    cri: Cri, daemon: Containerd, torpor: Torpor
) -> None:
    image = daemon.image("redis")
    old = cri.pod("redis-old")
    source = old.run("redis", ["/bin/sh", "-c", f"exec {REDIS}"], image=image)
    client = ready_redis(old.ip)
    client.send(*[("SET", f"key:{n}", f"value of {n}") for n in range(N_KEYS)])
    client.send(("INCR", "counter"), ("INCR", "counter"))
    assert client.send(("DBSIZE",)) == [str(N_KEYS + 1)]
    archive = source.checkpoint(old.path / "redis.tar")
    torpor.import_archive(archive, "redis", namespace="default")
    assert client.send(("INCR", "counter")) == ["3"]  # the connected client goes on with the source

    new = cri.pod("redis-new", annotations={"torpor.dev/restore-from.redis": "redis"})
    target = new.run("redis", ["/bin/sh", "-c", f"exec {REDIS}"], image=image)
    woken = ready_redis(new.ip)
    assert woken.send(("DBSIZE",), ("GET", "counter")) == [str(N_KEYS + 1), "2"]
    values = woken.send(*[("GET", f"key:{n}") for n in range(N_KEYS)])
    assert values == [f"value of {n}" for n in range(N_KEYS)]

    def alone() -> bool:
        listing = woken.send(("CLIENT", "LIST", "TYPE", "normal"))[0]
        return len(listing.splitlines()) == 1

    until(alone, what="the clone has closed the connections of its source")
    assert client.send(("INCR", "counter")) == ["4"]
    assert woken.send(("INCR", "counter")) == ["3"]
    client.close()
    woken.close()
    target.stop(timeout_s=10)
    assert target.exit_code() == 0


def test_memory_files_pipe_and_listener_of_a_python_service_go_on(
    cri: Cri, daemon: Containerd, torpor: Torpor
) -> None:
    image = daemon.image("python")
    argv = ["/usr/bin/python3", "/workloads/service.py", "7000", str(MEBIBYTES)]
    old = cri.pod("service-old")
    source = old.run("service", argv, image=image)
    source.until_number(1, word="ready")
    client = Lines(old.ip, 7000)
    checksum = client.ask("sum")
    assert [client.ask("count") for _ in range(3)] == ["1", "2", "3"]
    assert client.ask("write before-sleep") == "written"
    position = client.ask("file")
    archive = source.checkpoint(old.path / "service.tar")
    torpor.import_archive(archive, "service", namespace="default")
    client.ask("write not-in-the-image")
    client.close()
    old.remove()

    new = cri.pod("service-new", annotations={"torpor.dev/restore-from.service": "service"})
    target = new.run("service", argv, image=image)
    woken = Lines(new.ip, 7000)
    assert woken.ask("sum") == checksum
    assert woken.ask("count") == "4"
    assert woken.ask("file") == position
    assert woken.ask("write after-waking") == "written"
    assert woken.ask("pipe") == "left in the pipe"
    assert woken.ask("pipe") == "4"
    assert woken.ask("where") == "service-new"
    until(lambda: woken.ask("clients") == "1", what="the connections of the source are closed")
    woken.close()
    log = target.exec("cat", "/data/service.log").stdout
    assert log.splitlines() == ["first line", "second line", "before-sleep", "after-waking"]
    target.stop(timeout_s=10)
    assert target.exit_code() == 42
