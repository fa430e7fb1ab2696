"""The measuring client (client.py) at work on a host, and what its flows say in the end."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from tests.netlab.nodes import Host
from tests.support.containers import PYTHON

CLIENT = Path(__file__).with_name("client.py")

Flow = dict[str, Any]  # what client.py prints of one


def mixed(ips: Sequence[str]) -> list[str]:
    """Every kind of flow once for each address, each with a period of 5 ms."""
    return [f"{mode}@{ip}@5" for ip in ips for mode in ("echo", "duplex", "push", "sink", "udp")]


def both_ways(ips: Sequence[str], number: int) -> list[str]:
    """So many connections on which both sides send, spread over the addresses; the more, the less each."""
    return [f"duplex@{ips[index % len(ips)]}@{5 if number <= 2 else 50}" for index in range(number)]


def name_of(flow: Flow) -> str:
    """For people."""
    return f"{flow['mode']} over IPv{flow['family']}"


class Client:
    """A running client. flows: MODE@ADDRESS@PERIOD_MS each."""

    def __init__(self, host: Host, flows: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            host.words(PYTHON, "-IS", CLIENT, *flows),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=dict(os.environ),
        )
        assert self._process.stdout
        assert self._process.stdout.readline() == "ready\n", "the client could not connect"
        self.goes_on()

    def _say(self, word: str) -> list[Flow]:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def look(self) -> list[Flow]:
        """The state of every flow now."""
        return self._say("?")

    def goes_on(self, *, timeout_s: float = 30.0) -> None:
        """Wait until every flow has made progress from now on. Fails if one is broken or does not."""
        begun = time.monotonic()
        deadline = begun + timeout_s
        while True:
            flows = self.look()
            broken = [f"{name_of(flow)}: {flow['error']}" for flow in flows if flow["error"]]
            assert not broken, f"{len(broken)} of {len(flows)} connections are broken: {broken[:3]}"
            stuck = [name_of(flow) for flow in flows if flow["last_s"] < begun]
            if not stuck:
                return
            assert time.monotonic() < deadline, (
                f"{len(stuck)} of {len(flows)} flows do not go on: {stuck[:8]}"
            )
            time.sleep(0.02)

    def stop(self) -> Tally:
        """End the flows, what is under way included, and count."""
        flows = self._say("stop")
        self._process.wait(timeout=30)
        return Tally.of(flows)

    def close(self) -> None:
        """End the client, however it is."""
        self._process.kill()
        self._process.wait()


@dataclass(kw_only=True)
class Tally:
    """What the flows of one client came to.

    lost, repeated: records of TCP, 8 bytes each, as the application read them; repeated counts those out of
    order too. gaps_s, gap_ends_s: the longest time without progress, for each connection. udp_in_gaps:
    datagrams sent while nothing came back, that is rate times gap.
    """

    n_tcp: int = 0
    lost: int = 0
    repeated: int = 0
    errors: list[str] = field(default_factory=list[str])
    gaps_s: list[float] = field(default_factory=list[float])
    gap_ends_s: list[float] = field(default_factory=list[float])
    n_udp: int = 0
    udp_sent: int = 0
    udp_lost: int = 0
    udp_refused: int = 0
    udp_in_gaps: int = 0

    @classmethod
    def of(cls, flows: Sequence[Flow]) -> Tally:
        """Count the flows that a client has printed."""
        tally = cls()
        for flow in flows:
            if flow["mode"] == "udp":
                tally.n_udp += 1
                tally.udp_sent += flow["sent"]
                tally.udp_lost += flow["lost"]
                tally.udp_refused += flow["refused"]
                tally.udp_in_gaps += flow["sent_in_gaps"]
                if flow["refused"]:
                    tally.errors.append(f"{name_of(flow)}: somebody else answered {flow['refused']} times")
                continue
            tally.n_tcp += 1
            tally.lost += flow["lost"]
            tally.repeated += flow["repeated"]
            tally.gaps_s.append(flow["gap_s"])
            tally.gap_ends_s.append(flow["gap_to_s"])
            if flow["error"] or flow["stalled"]:
                tally.errors.append(f"{name_of(flow)}: {flow['error'] or 'stalled'}")
        return tally

    @classmethod
    def sum(cls, tallies: Sequence[Tally]) -> Tally:
        """All of them together."""
        total = cls()
        for each in fields(cls):
            for tally in tallies:
                setattr(total, each.name, getattr(total, each.name) + getattr(tally, each.name))
        return total

    @property
    def whole(self) -> bool:
        """Nothing lost, nothing twice, nothing broken."""
        return not (self.lost or self.repeated or self.errors)

    @property
    def gap_s(self) -> float:
        """The median of the connections' longest gaps."""
        return statistics.median(self.gaps_s) if self.gaps_s else 0.0

    @property
    def heard_s(self) -> float:
        """When the longest gaps ended, their median, on the monotonic clock."""
        return statistics.median(self.gap_ends_s) if self.gap_ends_s else 0.0

    @property
    def longest_s(self) -> float:
        """The longest gap of any connection."""
        return max(self.gaps_s, default=0.0)
