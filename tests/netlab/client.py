"""The lab's measuring client: client.py MODE@ADDRESS@PERIOD_MS...

Each argument is one connection to the server of server.c. It judges as an application does: by the records
that it reads. Modes:

  echo     a record each period, and back
  duplex   four records each period to the server, which checks them; the server sends its own
  push     the server sends as fast as the client takes it: 64 KiB a period, so the window is full
  sink     the client sends as fast as the server takes it
  udp      a datagram each period, and back

On standard output `ready` once all are connected. A line `?` on standard input is answered by one line of
JSON, the state of the flows; `stop`, or the end of the input, ends them: each TCP connection is shut down,
what is under way is read, and the server's own count is compared. Then the state is printed once more and the
program ends. Times are of CLOCK_MONOTONIC, seconds. A stall that has not ended counts as a gap.
"""

from __future__ import annotations

import errno
import heapq
import json
import os
import selectors
import socket
import struct
import sys
import time
from typing import Any

CHUNK = 65536
CONNECT_S = 10.0
DRAIN_S = 20.0
END = 2**64 - 1


class Flow:
    """What all flows have: counts, and the longest time without progress."""

    def __init__(self, mode: str, address: str, period_ms: float) -> None:
        self.mode = mode
        self.period_s = period_ms / 1000
        self.family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self.sent = self.received = self.lost = self.repeated = 0
        self.error = ""
        self.done = False
        self.last = 0.0
        self.gap = (0.0, 0.0, 0.0)
        self.sent_before = 0  # what was sent when there was progress last
        self.sent_in_gaps = 0  # of 20 periods and more

    def progress(self) -> None:
        now = time.monotonic()
        length = now - self.last if self.last else 0.0
        if length > self.gap[0]:
            self.gap = (length, self.last, now)
        if length >= 20 * self.period_s:
            self.sent_in_gaps += self.sent - self.sent_before
        self.last, self.sent_before = now, self.sent

    def state(self) -> dict[str, Any]:
        length, begun, ended = self.gap
        stalled = False
        if not self.done and self.last and time.monotonic() - self.last > max(length, 1.0):
            length, begun, ended = time.monotonic() - self.last, self.last, time.monotonic()
            stalled = True
        return {
            "mode": self.mode,
            "family": 6 if self.family == socket.AF_INET6 else 4,
            "sent": self.sent,
            "received": self.received,
            "lost": self.lost,
            "repeated": self.repeated,
            "error": self.error,
            "last_s": self.last,
            "gap_s": length,
            "gap_from_s": begun,
            "gap_to_s": ended,
            "stalled": stalled,
            "sent_in_gaps": self.sent_in_gaps,
            "period_s": self.period_s,
        }


class Datagrams(Flow):
    """UDP: what is lost shows in the end; what comes twice or late is counted."""

    def __init__(self, mode: str, address: str, period_ms: float) -> None:
        super().__init__(mode, address, period_ms)
        self.socket = socket.socket(self.family, socket.SOCK_DGRAM)
        self.socket.connect((address, 7001))
        self.socket.setblocking(False)
        self.seen: set[int] = set()
        self.refused = 0

    def due(self) -> None:
        try:
            self.socket.send(struct.pack("!Q", self.sent))
        except OSError as error:
            self.note(error)
        self.sent += 1

    def note(self, error: OSError) -> None:
        """Somebody answered for the address: what nobody answers is only silence, or has no way."""
        if error.errno == errno.ECONNREFUSED:
            self.refused += 1

    def readable(self) -> None:
        try:
            (number,) = struct.unpack("!Q", self.socket.recv(2048))
        except BlockingIOError:
            return
        except OSError as error:
            self.note(error)
            return
        if number in self.seen:
            self.repeated += 1
        self.seen.add(number)
        self.received += 1
        self.progress()

    def finish(self) -> None:
        self.done = True

    def state(self) -> dict[str, Any]:
        self.lost = self.sent - len(self.seen)
        return super().state() | {"refused": self.refused}


class Stream(Flow):
    """TCP."""

    def __init__(self, mode: str, address: str, period_ms: float) -> None:
        super().__init__(mode, address, period_ms)
        self.socket = self._connected(address)
        self.socket.send({"echo": b"E", "duplex": b"D", "push": b"P", "sink": b"S"}[mode])
        self.socket.setblocking(False)
        self.out = bytearray()
        self.rest = b""
        self.tail: list[int] = []  # the server's account, once it has begun
        self.closing = False
        self.shut = False

    def _connected(self, address: str) -> socket.socket:
        """Connect; the server may still be about to listen."""
        deadline = time.monotonic() + CONNECT_S
        while True:
            connection = socket.socket(self.family, socket.SOCK_STREAM)
            if self.mode == "push":
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 * CHUNK)
            connection.settimeout(CONNECT_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                connection.connect((address, 7000))
                return connection
            except ConnectionRefusedError:
                connection.close()
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)

    def due(self) -> None:
        number = {"echo": 1, "duplex": 4, "sink": 128}.get(self.mode, 0)
        if not self.closing and len(self.out) < CHUNK:  # a stalled peer must not fill our memory
            self.out += struct.pack(f"!{number}Q", *range(self.sent, self.sent + number))
            self.sent += number
        self.write()
        if self.mode == "push":
            self.readable()

    def write(self) -> None:
        try:
            if self.out:
                taken = self.socket.send(self.out)
                del self.out[:taken]
                if self.mode == "sink" and taken:
                    self.progress()
            if self.closing and not self.shut and not self.out:
                self.socket.shutdown(socket.SHUT_WR)
                self.shut = True
        except BlockingIOError:
            pass
        except OSError as error:
            self.fail(str(error))

    def fail(self, what: str) -> None:
        self.error = f"{what} after {self.received} records"
        self.done = True

    def readable(self) -> None:
        if self.done:
            return
        try:
            data = self.socket.recv(CHUNK)
        except BlockingIOError:
            return
        except OSError as error:
            self.fail(str(error))
            return
        if not data:
            self.ended()
            return
        if self.mode != "sink":
            self.progress()
        data = self.rest + data
        whole = len(data) // 8
        self.rest = data[whole * 8 :]
        numbers = struct.unpack(f"!{whole}Q", data[: whole * 8])
        if not self.tail and numbers == tuple(range(self.received, self.received + whole)):
            self.received += whole  # all is well, found out quickly
            return
        for number in numbers:
            self.record(number)

    def record(self, number: int) -> None:
        if self.tail or number == END:
            self.tail.append(number)
            return
        if number > self.received:
            self.lost += number - self.received
        elif number < self.received:
            self.repeated += 1
        self.received = number + 1

    def ended(self) -> None:
        """The server closed: right only at the end, and then the accounts must agree."""
        self.done = True
        if not self.shut:
            self.fail("closed by the server")
        elif self.mode == "echo":
            self.lost += self.sent - self.received
        elif len(self.tail) != 4:
            self.fail("the server gave no account")
        else:
            _, received, wrong, sent = self.tail
            self.lost += self.sent - received + sent - self.received
            self.repeated += wrong

    def finish(self) -> None:
        self.closing = True
        if not self.done:
            self.write()


def main() -> None:
    make = {"udp": Datagrams}
    flows: list[Datagrams | Stream] = []
    for word in sys.argv[1:]:
        mode, address, period = word.split("@")
        flows.append(make.get(mode, Stream)(mode, address, float(period)))
    selector = selectors.DefaultSelector()
    selector.register(0, selectors.EVENT_READ)
    for flow in flows:
        if flow.mode != "push":
            selector.register(flow.socket, selectors.EVENT_READ, flow)
    print("ready", flush=True)
    begun = time.monotonic()
    due = [(begun + index * flow.period_s / len(flows), index) for index, flow in enumerate(flows)]
    heapq.heapify(due)
    deadline = 0.0
    while True:
        now = time.monotonic()
        for key, _ in selector.select(max(0.0, due[0][0] - now)):
            if key.data is not None:
                key.data.readable()
                if key.data.done and key.data.mode != "udp":
                    selector.unregister(key.fileobj)
                continue
            words = os.read(0, 100).decode().split()
            if "?" in words:
                print(json.dumps([flow.state() for flow in flows]), flush=True)
            if "stop" in words or not words:
                selector.unregister(0)
                deadline = time.monotonic() + DRAIN_S
                for flow in flows:
                    flow.finish()
        now = time.monotonic()
        while due[0][0] <= now:
            at, index = due[0]
            flow = flows[index]
            if not flow.done:
                flow.due()
            heapq.heapreplace(due, (max(at + flow.period_s, now), index))
        if deadline and (all(flow.done for flow in flows) or now > deadline):
            break
    for flow in flows:
        if not flow.done:
            flow.error = f"did not end within {DRAIN_S:.0f} s"
    print(json.dumps([flow.state() for flow in flows]), flush=True)


if __name__ == "__main__":
    main()
