"""Redis in a pod, and redis-benchmark connected to it."""

from __future__ import annotations

import contextlib
import csv
import subprocess
import threading
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
RUN_S = 2.0
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

    @contextlib.contextmanager
    def under_load(self) -> Generator[Tally]:
        """The benchmark runs over and over while the body does, a few seconds each time.

        The tally is filled in at the end: errors of the benchmark, or of the counter that it incremented.
        """
        tally = Tally(n_tcp=N_CLIENTS)
        rate_hz = float(next(csv.DictReader(self._increment(20_000).splitlines()))["rps"])
        number = int(rate_hz * RUN_S)
        before = int(self.ask("GET", _COUNTER))
        over = threading.Event()
        runs = 0

        def run() -> None:
            nonlocal runs
            while not over.is_set():
                try:
                    self._increment(number)
                    runs += 1
                except AssertionError as error:
                    tally.errors.append(str(error))
                    return

        thread = threading.Thread(target=run)
        thread.start()
        try:
            until(lambda: int(self.ask("GET", _COUNTER)) > before, what="the benchmark is at work")
            yield tally
        finally:
            over.set()
            thread.join()
        after = int(self.ask("GET", _COUNTER))
        if after - before != runs * number:
            tally.errors.append(f"{runs * number} increments were answered, {after - before} were done")

    def _increment(self, number: int) -> str:
        """Run the benchmark; what it prints. Raises AssertionError for an error that it saw."""
        done = subprocess.run(
            self._benchmark(number), capture_output=True, text=True, check=False, timeout=120
        )
        said = done.stdout + done.stderr
        assert done.returncode == 0, f"redis-benchmark exited with {done.returncode}: {said[-500:]}"
        assert "rror" not in said, f"redis-benchmark saw an error: {said[-500:]}"
        return done.stdout

    def _benchmark(self, number: int) -> list[str]:
        return self.words("redis-benchmark", "-t", "incr", "-c", str(N_CLIENTS), "-n", str(number), "--csv")
