"""One container sleeps and wakes many times, under every engine: its memory is right, and nothing grows."""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from engines.api import CheckpointRequest, ReleaseRequest, RestoreRequest
from tests.support import leaks, soak
from tests.support.containers import (
    Client,
    Lab,
    Network,
    command,
    lab,
    live,
    mounts_under,
    processes_with,
    tool,
    until,
)
from tests.support.criu import CriuLab
from tests.support.gpu import CudaLab, Fabric
from tests.support.gvisor import GvisorLab

pytestmark = [pytest.mark.engine, pytest.mark.soak]

PORT = 7000
MEMORY = ("--fill", "16", "--children", "2")


@dataclass(frozen=True, kw_only=True)
class Sleeper:
    """A container that is to sleep and wake under the same id. network, client: None where it keeps none."""

    place: CriuLab | GvisorLab
    container_id: str
    memory: Callable[[], str]
    network: Network | None = None
    client: Client | None = None

    def sleep(self, image: Path) -> int:
        """Dump and stop; the size of the image in bytes."""
        request = CheckpointRequest(
            container_id=self.container_id,
            bundle_path=self.place.bundle(self.container_id),
            image_path=image,
            timeout_s=60,
        )
        return self.place.engine(self.container_id).checkpoint(request).image_bytes

    def forget(self) -> None:
        """Delete what the runtime keeps of the stopped container, as its caller does."""
        self.place.lab.runc.delete(self.container_id)
        until(lambda: not self.place.residue(self.container_id), what="the source is gone")

    def wake(self, image: Path) -> None:
        """Restore and let run."""
        engine = self.place.engine(self.container_id)
        held = "held-restore" in engine.capabilities
        request = RestoreRequest(
            container_id=self.container_id,
            bundle_path=self.place.bundle(self.container_id),
            image_path=image,
            timeout_s=60,
            held=held,
            tcp="keep" if self.client else "close",
        )
        self.place.restore(engine, request)
        if held:
            engine.release(ReleaseRequest(container_id=self.container_id, timeout_s=20))


def criu(inner: Lab, _: Path) -> Sleeper:
    place = CriuLab(inner)
    network = place.network()
    source = place.start(netns_path=network.pod_path, args=live("--port", str(PORT), *MEMORY))
    return Sleeper(
        place=place,
        container_id=source,
        memory=lambda: place.ask(source, signal.SIGUSR1, "sum"),
        network=network,
        client=inner.client(network, PORT),
    )


def gvisor(inner: Lab, _: Path) -> Sleeper:
    place = GvisorLab(inner)
    source = place.start(args=tuple(live(*MEMORY)))
    return Sleeper(place=place, container_id=source, memory=lambda: place.memory(source))


def criu_cuda(inner: Lab, fabric_path: Path) -> Sleeper:
    place = CudaLab(inner, Fabric(fabric_path))
    for name, value in place.fabric.environment.items():
        os.environ[name] = value
    source = place.start()
    return Sleeper(place=place, container_id=source, memory=lambda: place.ask(source, signal.SIGUSR1, "sum"))


@pytest.fixture(params=[criu, gvisor, criu_cuda], ids=["criu", "gvisor", "criu-cuda"])
def sleeper(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Sleeper]:
    for name in ("FAKE_CUDA_DIR", "LD_LIBRARY_PATH"):
        monkeypatch.setenv(name, os.environ.get(name, ""))  # undone after the test
    path = tmp_path / "lab"
    path.mkdir()
    with lab(path) as inner:
        made = request.param(inner, tmp_path / "fabric")
        until(lambda: made.place.progress(made.container_id) > 1, timeout_s=40, what="the container counts")
        yield made


def surroundings(sleeper: Sleeper) -> Counter[str]:
    """What is this container's, or can only be CRIU's, and must be the same after each cycle."""
    place = sleeper.place
    path, word = str(place.lab.path), f"tt-{place.lab.tag}"
    found = [
        *(f"process: {line.split(None, 1)[:1]}" for _, line in processes_with(word, path)),
        *(f"mount: {point}" for point in mounts_under(word, path)),
        *(f"cgroup: {group}" for group in leaks.cgroups(word)),
        *(f"network namespace: {path}" for path in Path("/run/netns").glob(f"tt{place.lab.tag}*")),
        *("child of the engine's caller" for _ in Path("/proc/thread-self/children").read_text().split()),
        *("open file of the engine's caller" for _ in os.listdir("/proc/self/fd")),
    ]
    for folder, folders, files in os.walk(path):
        found += [f"file: {folder}/{name}" for name in folders + files]
    if sleeper.network:
        found += [f"network rules: {table}" for table in sleeper.network.tables()]
    if isinstance(place, CriuLab):
        found += [f"left by CRIU: {name}" for name in place.yards()]
    if isinstance(place, CudaLab):
        found += [f"GPU memory: {place.fabric.vram(uuid)}, {uuid}" for uuid in place.fabric.uuids]
    return Counter(found)


def nothing_new(sleeper: Sleeper, first: Counter[str], cycle: int) -> None:
    """Fail unless everything is as it was after the first cycle; waits for what goes by itself."""
    deadline = time.monotonic() + 20
    while (now := surroundings(sleeper)) != first:
        assert time.monotonic() < deadline, f"cycle {cycle}: {now - first} came, {first - now} went"
        time.sleep(0.05)


def numbers(sleeper: Sleeper) -> dict[str, int]:
    """What changes a little from cycle to cycle, and must not grow."""
    ours = 0
    for pid, _ in processes_with(f"tt-{sleeper.place.lab.tag}", str(sleeper.place.lab.path)):
        with contextlib.suppress(OSError):
            ours += len(os.listdir(f"/proc/{pid}/fd"))
    return {
        "open files of the container": ours,
        "network rules of the machine": len(command(tool("nft"), "list", "ruleset").stdout.splitlines()),
        "left by CRIU": sum(len(list(Path("/").glob(pattern[1:]))) for pattern in leaks.CRIU_REMNANTS),
    }


def growth(seen: Sequence[dict[str, int]]) -> dict[str, int]:
    """How much more there is of each kind in the last quarter than in the first, at the quietest moments."""
    part = -(-len(seen) // 4)
    low = [{kind: min(one[kind] for one in some) for kind in seen[0]} for some in (seen[:part], seen[-part:])]
    return {kind: low[1][kind] - low[0][kind] for kind in seen[0]}


def test_memory_stays_and_nothing_grows(request: pytest.FixtureRequest, sleeper: Sleeper) -> None:
    place, container_id = sleeper.place, sleeper.container_id
    memory = sleeper.memory()
    image = place.image_root / "i"
    sleeps_s: list[float] = []
    wakes_s: list[float] = []
    sizes: list[int] = []
    counts: list[dict[str, int]] = []
    first: Counter[str] = Counter()
    for cycle in range(soak.CYCLES):
        began = time.monotonic()
        sizes.append(sleeper.sleep(image))
        sleeps_s.append(time.monotonic() - began)
        last = place.progress(container_id)
        sleeper.forget()
        began = time.monotonic()
        sleeper.wake(image)
        wakes_s.append(time.monotonic() - began)
        place.engine(container_id).discard(image)
        until(lambda then=last: place.progress(container_id) > then, what=f"it goes on, cycle {cycle}")
        if sleeper.client:
            sleeper.client.goes_on()
        assert sleeper.memory() == memory, f"cycle {cycle}"
        first = first or surroundings(sleeper)
        nothing_new(sleeper, first, cycle)
        counts.append(numbers(sleeper))
    assert sizes[-1] < sizes[0] * 1.5
    medians_s = statistics.median(sleeps_s), statistics.median(wakes_s)
    note = f"asleep in {medians_s[0]:.2f} s, awake in {medians_s[1]:.2f} s (medians)"
    grown = growth(counts)
    # Less than one for every second cycle: what a cycle left behind would be more.
    assert all(number < soak.CYCLES / 2 for number in grown.values()), grown
    soak.tell(
        request,
        soak.Count(
            engine=place.engine(container_id).name,
            part="cycles",
            n=soak.CYCLES,
            outcomes={"with the right memory": soak.CYCLES},
            note=f"nothing grew; {note}",
        ),
    )
