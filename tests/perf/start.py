"""A container's life under containerd, torpor as its runtime beside bare runc."""

from __future__ import annotations

from pathlib import Path

from tests.perf.figures import Figure, Series, seconds
from tests.support.containerd import Containerd, Handler, runc_options
from tests.support.containers import tool
from tests.support.torpor import Torpor


def measure(path: Path, tag: str, *, rounds: int) -> list[Figure]:
    """`ctr run` of /bin/true, from the call to the container's removal: create, start, delete.

    path: a short directory; tag: stands in it, and in all that containerd makes.
    """
    torpor = Torpor(path / "torpor")
    runtimes = {"torpor": torpor.runtime, "runc": tool("runc")}
    handlers = {name: Handler(binary=binary) for name, binary in runtimes.items()}
    daemon = Containerd(path / "c", tag, handlers)
    try:
        # The namespace is also the cgroups' parent: it carries the tag.
        image = daemon.image("busybox", namespace=tag)
        series = Series()
        for number in range(rounds + 1):
            for name, binary in runtimes.items():
                words = ["run", "--rm", "--null-io", *runc_options(binary, daemon)]
                words += [image, f"{name}-{number}", "/bin/true"]
                taken_s = seconds(lambda words=words: daemon.ctr(*words, namespace=tag))
                if number:  # the first one warms the caches
                    series.add(name, taken_s * 1000)
    finally:
        daemon.close()
    name = "containerd: run of /bin/true"
    return [series.figure(name, "torpor", "runc", peer_name="runc", unit="ms")]
