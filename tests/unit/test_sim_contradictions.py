"""Keys of a study that contradict each other or do nothing: each is an error that names its path."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.unit.test_sim_bad_studies import REGION, SERVICE, SPOT, Tree, both, good, instead, put, sentence

BAD: dict[str, tuple[Callable[[Tree], None], str]] = {
    "part of a priority": (
        instead(queue={"classes": [{"name": "a", "nodes": 1, "work": "1h", "most": 2, "priority": 1.5}]}),
        r"queue.classes\[0\].priority is 1.5; it must be a whole number",
    ),
    "a deadline that whole ticks miss": (
        instead(spot={**SPOT, "deadline": "48.25h", "regions": [REGION]}),
        r"spot.deadline is 173700 s, and work and a start take 174000 s in whole ticks of 600 s; allow",
    ),
}

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
def test_a_contradiction_is_told_in_one_sentence(kind: str, tmp_path: Path) -> None:
    change, expected = BAD[kind]
    tree = good()
    change(tree)
    path = tmp_path / "bad.yaml"
    path.write_text(yaml.safe_dump(tree))
    assert re.search(expected, sentence(path))
