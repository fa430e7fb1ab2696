"""In a virtual machine: `python -m tests.truth.guest dump|wake NUMBER ARCHIVE`, NUMBER of a journey."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import msgspec

from tests.support.containers import lab
from tests.truth import portable
from tests.truth.journeys import JOURNEYS
from tests.truth.place import Place

PATIENCE = 10.0  # emulation is slow


def main(action: str, number: str, archive: str) -> None:
    """Make an image, or wake one up and say what was predicted and what happened."""
    journey = JOURNEYS[int(number)]
    with tempfile.TemporaryDirectory(dir="/root") as folder, lab(Path(folder)) as inner:
        place = Place(inner, patience=PATIENCE)
        work = Path(folder, "portable")
        work.mkdir()
        if action == "dump":
            portable.pack(place.dumped(journey.source), Path(archive), work)
            return
        place.dumps[journey.source.name] = portable.unpack(Path(archive), work, journey.source)
        with place.world(journey) as world:
            predicted, happened = place.predict(world), place.force(world)
        print(msgspec.json.encode((predicted, happened)).decode())


if __name__ == "__main__":
    main(*sys.argv[1:])
