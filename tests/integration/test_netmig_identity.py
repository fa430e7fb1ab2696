"""A pod's network identity on the real kernel: read, given to another namespace, taken back."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest

from netmig.apply import apply
from netmig.capture import capture
from netmig.identity import decode, diff, encode
from tests.support.pods import Nodes, nodes, rich_pod

pytestmark = pytest.mark.engine


@pytest.fixture
def made(tmp_path: Path) -> Generator[Nodes]:
    with nodes(tmp_path / "ns") as these:
        yield these


def test_everything_goes_round(made: Nodes) -> None:
    a, b = made.node("a"), made.node("b")
    pod = rich_pod(made, a)
    identity = decode(encode(capture(pod, a)))
    assert identity.warnings == ()
    assert (len(identity.links), len(identity.routes), len(identity.rules)) == (3, 14, 11)

    other = made.empty("other")
    applied = apply(identity, other, b, adopt=False)

    assert diff(identity, capture(other, b)) == []
    assert applied.warnings == ()
