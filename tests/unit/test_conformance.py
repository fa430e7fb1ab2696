"""How the conformance suite hears a workload, without a container."""

from __future__ import annotations

from unittest.mock import MagicMock

from engines.conformance import run_course
from engines.workloads.catalogue import WORKLOADS


def test_last_words_that_come_while_its_end_is_seen_are_heard() -> None:
    said: list[str] = []
    place = MagicMock()
    place.__enter__.return_value = place
    place.output.side_effect = lambda _: "".join(said)
    # The program speaks and ends while the runtime is asked for its pid.
    place.pid.side_effect = lambda _: said.append("absent: no such kernel\n") or 0
    outcome = run_course(lambda: place, WORKLOADS[0], "round-trip")
    assert (outcome.result, outcome.reason) == ("absent", "no such kernel")
