"""A network namespace that the runtime makes: its loopback device works after a restore."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest

from engines.api import CheckpointRequest, ReleaseRequest, RestoreRequest
from tests.support.containers import lab, until
from tests.support.criu import CriuLab

pytestmark = pytest.mark.engine


@pytest.fixture
def place(tmp_path: Path) -> Iterator[CriuLab]:
    with lab(tmp_path) as inner:
        yield CriuLab(inner)


@pytest.mark.parametrize(
    ("options", "tcp"),
    [((), "keep"), (("--reconnect",), "close")],
    ids=["connection-kept", "new-connections"],
)
def test_a_container_goes_on_talking_to_itself(
    place: CriuLab, options: tuple[str, ...], tcp: Literal["keep", "close"]
) -> None:
    args = ["python", "-IS", "-u", "/workloads/loopback.py", *options]
    source = place.start(args=args)
    until(lambda: place.progress(source) > 3, what="it talks to itself")
    image = place.image_root / "i"
    place.engine(source).checkpoint(
        CheckpointRequest(
            container_id=source, bundle_path=place.bundle(source), image_path=image, timeout_s=60
        )
    )
    last = place.progress(source)
    place.kill(source)
    target = place.prepare(args=args)
    place.restore(
        place.engine(target),
        RestoreRequest(
            container_id=target,
            bundle_path=place.bundle(target),
            image_path=image,
            timeout_s=60,
            held=True,
            tcp=tcp,
        ),
    )
    place.engine(target).release(ReleaseRequest(container_id=target, timeout_s=10))
    until(lambda: place.progress(target) > last + 3, what="it goes on talking")
    place.kill(target)
    until(lambda: not place.residue(target), what="nothing is left")
