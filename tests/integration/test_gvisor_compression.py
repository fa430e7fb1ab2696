"""Images that runsc compresses: smaller, restored like others, and of no use once they are damaged."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from engines.api import CheckpointRequest, DumpStats, ImageCorrupt, RestoreFailed, RestoreRequest
from engines.gvisor.engine import GvisorEngine
from tests.support.containers import lab, live, until
from tests.support.gvisor import GvisorLab
from tests.support.torpor import Torpor

pytestmark = pytest.mark.engine


@pytest.fixture
def place(tmp_path: Path) -> Iterator[GvisorLab]:
    (tmp_path / "lab").mkdir()
    with lab(tmp_path / "lab") as inner:
        yield GvisorLab(inner)


def dump(place: GvisorLab, source: str, image_path: Path, *, compress: bool) -> DumpStats:
    engine = GvisorEngine(replace(place.settings(source), compress=compress))
    return engine.checkpoint(
        CheckpointRequest(
            container_id=source,
            bundle_path=place.bundle(source),
            image_path=image_path,
            timeout_s=60,
            leave_running=compress,
        )
    )


def request(place: GvisorLab, image_path: Path) -> RestoreRequest:
    target = place.prepare(args=tuple(live("--fill", "1")))
    return RestoreRequest(
        container_id=target,
        bundle_path=place.bundle(target),
        image_path=image_path,
        timeout_s=60,
        tcp="close",
    )


def test_a_compressed_image_is_smaller_and_brings_everything_back(place: GvisorLab) -> None:
    source = place.start()
    memory = place.memory(source)
    small, plain = place.image_root / "small", place.image_root / "plain"
    compressed = dump(place, source, small, compress=True)
    last = place.progress(source)
    stats = dump(place, source, plain, compress=False)
    assert 0 < compressed.pages_bytes <= compressed.image_bytes < stats.image_bytes / 2
    assert {entry.name for entry in small.iterdir()} == {"checkpoint.img", "gvisor.json"}
    for _ in range(2):
        wanted = request(place, small)
        place.restore(place.engine(wanted.container_id), wanted)
        until(lambda: place.progress(wanted.container_id) > last, what="it goes on")
        assert place.memory(wanted.container_id) == memory
        place.kill(wanted.container_id)


def test_a_compressed_image_that_is_cut_short_is_not_restored(place: GvisorLab) -> None:
    source = place.start()
    image_path = place.image_root / "i"
    dump(place, source, image_path, compress=True)
    place.kill(source)
    state = image_path / "checkpoint.img"
    data = state.read_bytes()
    wanted = request(place, image_path)
    for percent in (0, 10, 50, 99):
        state.write_bytes(data[: len(data) * percent // 100])
        with pytest.raises((ImageCorrupt, RestoreFailed)):
            place.restore(place.engine(wanted.container_id), wanted)
        until(lambda: not place.residue(wanted.container_id), what=f"nothing is left after {percent} %")
    state.write_bytes(data)
    place.restore(place.engine(wanted.container_id), wanted)
    until(lambda: place.progress(wanted.container_id) > 0, what="the whole image is restored")
    place.kill(wanted.container_id)


def test_a_changed_byte_of_it_is_found_by_its_digest(place: GvisorLab, tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text("compress = true\n")
    config.chmod(0o644)
    torpor = Torpor(tmp_path / "torpor", CONFIG=str(config))
    source = place.start()
    torpor("checkpoint", source, "--root", place.runsc.root, "--name", "small", "--stop")
    (state,) = (tmp_path / "torpor").glob("**/checkpoint.img")
    assert not state.with_name("pages.img").exists(), "it is compressed"
    torpor("images", "verify", "small")
    with state.open("r+b") as file:
        file.seek(state.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))
    done = torpor("images", "verify", "small", check=False)
    assert done.returncode == 1
    assert "checkpoint.img" in done.stderr + done.stdout
