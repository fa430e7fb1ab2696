"""Keys of a study that contradict each other or do nothing: each is an error that names its path."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.unit import test_sim_bad_studies
from tests.unit.test_sim_bad_studies import REGION, SERVICE, SPOT, Tree, both, good, instead, put, sentence

folder = test_sim_bad_studies.folder  # the fixture with the files that studies name


def spot(**more: object) -> Callable[[Tree], None]:
    """A spot job and nothing that it has no use for, but for what is given."""

    def change(tree: Tree) -> None:
        instead(spot={**SPOT, "regions": [REGION]})(tree)
        for key in ("failures", "repair", "costs"):
            del tree[key]
        tree.update({"policies": ["greedy"]} | more)
        if "trace" in tree["spot"]:
            del tree["spot"]["tick"]

    return change


BAD: dict[str, tuple[Callable[[Tree], None], str]] = {
    "part of a priority": (
        instead(queue={"classes": [{"name": "a", "nodes": 1, "work": "1h", "most": 2, "priority": 1.5}]}),
        r"queue.classes\[0\].priority is 1.5; it must be a whole number",
    ),
    "a deadline that whole ticks miss": (
        instead(spot={**SPOT, "deadline": "48.25h", "regions": [REGION]}),
        r"spot.deadline is 173700 s, and work and a start take 174000 s in whole ticks of 600 s; allow",
    ),
    "a stall beside bandwidths": (
        put("storage")([{"name": "a", "write": "9GB/s"}]),
        "costs.stall is there beside storage, each level of which has a bandwidth; leave it out",
    ),
    "shared without a bandwidth": (
        put("storage")([{"name": "a", "stall": "9s", "shared": True}]),
        r"storage\[0\].shared is true, and there is no bandwidth to share; give write",
    ),
    "failures of a spot job": (
        instead(spot={**SPOT, "regions": [REGION]}),
        "failures decides nothing for a spot job",
    ),
    "storage of a spot job": (
        spot(storage=[{"name": "a", "stall": "9s"}]),
        "storage decides nothing for a spot job",
    ),
    "costs of a spot job": (spot(costs={"stall": "3s"}), "costs decides nothing for a spot job"),
    "a trace of capacity that ends too soon": (
        spot(spot={**SPOT, "deadline": "110h", "trace": "zones.json"}),
        "spot.deadline is 396000 s, and 360000 s after the last window begins .* shorten it",
    ),
    "offsets past the end of a trace": (
        put("failures")([{"kind": "none"}, {"kind": "trace", "path": "faults.json", "offset": "900d"}]),
        r"failures\[1\].offset is 7.776e\+07 s, so replication 1 begins past the end of the trace",
    ),
    "a step longer than the interval": (
        put("job", "step")("20m"),
        r"policies\[0\].interval is 900 s, shorter than job.step of 1200 s; make it longer",
    ),
    "the interval of a base longer than the job": (
        put("policies")([{"name": "event", "base": {"name": "periodic", "interval": "60d"}}]),
        r"policies\[0\].base.interval is 5.184e\+06 s, longer than the work",
    ),
    "bursts that never come": (
        instead(inference={**SERVICE, "requests": {"rate": "2/s", "burst_factor": 8}}),
        "inference.requests.burst_every is missing, without which burst_factor does nothing",
    ),
    "bursts of no more requests": (
        instead(inference={**SERVICE, "requests": {"rate": "2/s", "burst_every": "1h", "burst_for": "9s"}}),
        "inference.requests.burst_factor is missing, without which burst_every does nothing",
    ),
    "more copies than nodes": (
        both(put("policies")([{"name": "in-memory", "copies": 65}]), put("costs", "replica_stall")("9s")),
        r"policies\[0\].copies is 65, each on another node, and the job has 64; use fewer, or more",
    ),
    "copies of the only node": (
        both(
            put("policies")([{"name": "hot-spares", "base": "in-memory"}]),
            both(put("costs", "replica_stall")("9s"), put("job", "nodes")(1)),
        ),
        r"policies\[0\].base.copies is 2, each on another node, and the job has 1; use fewer",
    ),
    "a save from replicas that are not there": (
        both(put("policies")(["just-in-time"]), put("costs", "jit_save")("9s")),
        r"job.replicas is 1, of which policy 'just-in-time' at policies\[0\] can save none",
    ),
}

for kind, cost in (
    ("migrate", "migrate"), ("just-in-time", "jit_save"), ("in-memory", "replica_stall"),
    ("asynchronous", "async_stall"),
):  # fmt: skip
    BAD[f"no cost of {kind}"] = (
        put("policies")([{"name": "hot-spares", "base": kind}]),
        rf"costs.{cost} is missing, which policy '{kind}' at policies\[0\].base needs; give it",
    )

for kind in ("kv-restore", "kv-cheaper"):
    for missing, given in (
        ("cache_per_token", {"cache_read": "9GB/s"}),
        ("cache_read", {"cache_per_token": "9kB"}),
    ):
        BAD[f"{missing} of {kind}"] = (
            both(instead(inference={**SERVICE, **given}), put("policies")([kind])),
            rf"inference.{missing} is missing or 0, which policy '{kind}' needs; give it",
        )


@pytest.mark.parametrize("kind", BAD)
def test_a_contradiction_is_told_in_one_sentence(kind: str, folder: Path) -> None:
    change, expected = BAD[kind]
    tree = good()
    change(tree)
    path = folder / "bad.yaml"
    path.write_text(yaml.safe_dump(tree))
    assert re.search(expected, sentence(path))
