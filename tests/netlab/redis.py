"""Redis in a pod, and redis-benchmark connected to it."""

from __future__ import annotations

import contextlib
import csv
import subprocess
from collections.abc import Generator
from pathlib import Path

from tests.netlab.nodes import Host
from tests.netlab.traffic import Tally
from tests.support.containers import until
from tests.support.rootfs import rootfs

ARGV = (
    *("/usr/bin/redis-server", "--bind", "*", "--protected-mode", "no"),
    *("--save", "", "--appendonly", "no", "--dir", "/data"),
)
N_CLIENTS = 50
_COUNTER = "counter:__rand_int__"  # what redis-benchmark's INCR test increments


def layer() -> Path:
    """A root file system with redis and its tools."""
    return rootfs("redis")


class Redis:
    """A server in a pod, seen from a host."""

    def __init__(self, host: Host, address: str) -> None:
        self._host = host
        self._address = address
        until(lambda: self.ask("PING") == "PONG", what="redis answers")

    def words(self, program: str, *words: str) -> list[str]:
        """The command line of one of redis' own tools, run on the host."""
        return self._host.words("chroot", layer(), f"/usr/bin/{program}", "-h", self._address, *words)

    def ask(self, *words: str) -> str:
        """What redis-cli prints, without the line's end."""
        done = subprocess.run(self.words("redis-cli", *words), capture_output=True, text=True, check=False)
        return done.stdout.strip()

    def rate_hz(self) -> float:
        """How many increments a second the benchmark gets through now."""
        lines = subprocess.run(
            self._benchmark(20_000), capture_output=True, text=True, check=True
        ).stdout.splitlines()
        return float(next(csv.DictReader(lines))["rps"])

    @contextlib.contextmanager
    def under_load(self, seconds: float) -> Generator[Tally]:
        """The benchmark runs while the body does, which must take less than so many seconds.

        The tally is filled in at the end: an error of the benchmark, or of the counter that it incremented.
        """
        tally = Tally(n_tcp=N_CLIENTS)
        number = int(self.rate_hz() * seconds)
        before = int(self.ask("GET", _COUNTER))
        benchmark = subprocess.Popen(
            self._benchmark(number), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            until(lambda: int(self.ask("GET", _COUNTER)) > before, what="the benchmark is at work")
            yield tally
            if benchmark.poll() is not None:
                tally.errors.append("the benchmark was over too early to see anything")
            output, _ = benchmark.communicate(timeout=120)
        finally:
            benchmark.kill()
            benchmark.wait()
        if benchmark.returncode or "rror" in output:
            tally.errors.append(f"redis-benchmark exited with {benchmark.returncode}: {output[-500:]}")
        after = int(self.ask("GET", _COUNTER))
        if after - before != number:
            tally.errors.append(f"{number} increments were answered, {after - before} were done")

    def _benchmark(self, number: int) -> list[str]:
        return self.words("redis-benchmark", "-t", "incr", "-c", str(N_CLIENTS), "-n", str(number), "--csv")
