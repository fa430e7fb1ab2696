"""What a verdict costs: against reading the image's needs once, and for a whole cluster."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from compat import verdict
from compat.rules.case import Origin
from engines.api import FileNeed, MountNeed, SocketNeed
from shim.images.documents import decode_needs, encode_needs
from tests.support.verdicts import ROOMY, SPEC, TASK, image

LIMIT = 10.0
N_IMAGES, N_NODES = 100, 1000

# A busy server of 1 GiB: how much memory an image has is one number in its needs.
BIG = image(
    memory_bytes=1 << 30,
    tasks=tuple(replace(TASK, pid=number) for number in range(1, 201)),
    files=tuple(FileNeed(path=f"/lib/{number}.so", size_bytes=1, mode=0o644) for number in range(2000)),
    mounts=tuple(
        MountNeed(destination=path, fstype="proc", source="", external=False)
        for path in ("/proc/kcore", "/proc/sys", *(f"/mnt/{number}" for number in range(40)))
    ),
    sockets=tuple(
        SocketNeed(family="inet", protocol="tcp", state="established", address="10.0.0.1", port=number)
        for number in range(500)
    ),
)


def cpu_s(work: Callable[[], object], times: int = 15) -> float:
    """Processor time of a call, the median of some."""
    taken: list[float] = []
    for _ in range(times):
        began = time.process_time()
        work()
        taken.append(time.process_time() - began)
    return statistics.median(taken)


def test_a_verdict_costs_no_more_than_a_few_readings_of_what_the_image_needs(
    capsys: pytest.CaptureFixture[str],
):
    data = encode_needs(BIG)
    read_s = cpu_s(lambda: decode_needs(data, what="it"))
    judged_s = cpu_s(
        lambda: verdict.judge(BIG, SPEC, dump_host=ROOMY, node=ROOMY, origin=Origin(dump_spec=SPEC))
    )
    with capsys.disabled():
        print(f"\nverdict on 1 GiB, 200 tasks: {judged_s * 1e3:.2f} ms; read: {read_s * 1e3:.2f} ms")
    assert judged_s < LIMIT * read_s


def test_a_cluster_costs_little_more_than_its_pairs(capsys: pytest.CaptureFixture[str]):
    """No step of it is quadratic: a thousand nodes cost as much each as ten do."""
    images = [replace(BIG, tasks=BIG.tasks[:20], memory_bytes=number << 20) for number in range(N_IMAGES)]
    nodes = [
        replace(
            ROOMY,
            node=f"n{number}",
            kernel=f"6.{number % 20}.1",
            cpu_flags=ROOMY.cpu_flags if number % 3 else ("avx", "popcnt", "xsave"),
        )
        for number in range(N_NODES)
    ]

    def judge(of: int) -> dict[str, int]:
        found: dict[str, int] = {}
        for one in images:
            for node in nodes[:of]:
                answer = verdict.answer(verdict.judge_for(one, node, dump_host=ROOMY))
                found[answer] = found.get(answer, 0) + 1
        return found

    gc.collect()
    gc.freeze()  # what other tests left is no part of it
    small_s = cpu_s(lambda: judge(10), times=5)
    began = time.process_time()
    answers = judge(N_NODES)
    whole_s = time.process_time() - began
    gc.unfreeze()
    with capsys.disabled():
        print(f"\n{N_IMAGES} images x {N_NODES} nodes: {whole_s:.2f} s of processor time; {answers}")
    assert sum(answers.values()) == N_IMAGES * N_NODES
    assert answers["no"] > 0
    assert whole_s < 3.0 * small_s * N_NODES / 10
