"""Redis: keys, a client's open connection, a subscription, a transaction that is not executed yet."""

import sys

sys.path.insert(0, "/workloads")
import shutil
import socket
import subprocess

from common import Absent, check, eventually, run, same

ADDRESS = "/tmp/redis.sock"


class Client:
    def __init__(self):
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(5)
        self.socket.connect(ADDRESS)
        self.stream = self.socket.makefile("rwb")

    def __call__(self, *words):
        self.stream.write(b"*%d\r\n" % len(words))
        for word in words:
            data = str(word).encode()
            self.stream.write(b"$%d\r\n%s\r\n" % (len(data), data))
        self.stream.flush()
        return self.answer()

    def answer(self):
        line = self.stream.readline().rstrip(b"\r\n")
        kind, rest = line[:1], line[1:]
        if kind == b"$":
            return self.stream.read(int(rest) + 2)[:-2].decode() if int(rest) >= 0 else None
        if kind == b"*":
            return [self.answer() for _ in range(int(rest))]
        return int(rest) if kind == b":" else rest.decode()


def connected():
    try:
        Client()
    except OSError:
        return False
    return True


def setup():
    program = shutil.which("redis-server", path="/usr/bin:/bin")
    if program is None:
        raise Absent("no redis-server")
    argv = [program, "--port", "0", "--unixsocket", ADDRESS, "--save", "", "--dir", "/tmp"]
    server = subprocess.Popen(argv, stdout=subprocess.DEVNULL)
    eventually(connected, "redis answers", 20)
    client, subscriber = Client(), Client()
    for number in range(1000):
        client("set", f"key {number}", number * number)
    client("lpush", "list", "a", "b", "c")
    subscriber("subscribe", "news")
    client("multi")
    client("incr", "counter")

    def verify():
        check(server.poll() is None, "redis ended")
        same(client("exec"), [1], "the transaction")
        same(client("get", "key 77"), "5929", "a key")
        same(client("dbsize"), 1002, "number of keys")
        same(client("lrange", "list", 0, -1), ["c", "b", "a"], "a list")
        same(client("publish", "news", "hello"), 1, "subscribers")
        same(subscriber.answer(), ["message", "news", "hello"], "the subscription")
        fresh = Client()
        same(fresh("incr", "counter"), 2, "a new connection")

    return verify


run(setup)
