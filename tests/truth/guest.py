"""In a virtual machine: `python -m tests.truth.guest dump|wake NUMBER ARCHIVE`, NUMBER of a journey."""

from __future__ import annotations

import ctypes
import sys
import tempfile
from pathlib import Path

import msgspec

from tests.support.containers import lab
from tests.truth import portable
from tests.truth.journeys import JOURNEYS
from tests.truth.place import Place

_PR_CAPBSET_DROP = 24
PATIENCE = 10.0  # emulation is slow


def main(action: str, number: str, archive: str) -> None:
    """Make an image, or wake one up and say what was predicted and what happened."""
    journey = JOURNEYS[int(number)]
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder, lab(Path(folder)) as inner:
        Path(folder).chmod(0o711)  # for the root of a user namespace
        place = Place(inner, patience=PATIENCE)
        work = Path(folder, "portable")
        work.mkdir()
        if action == "dump":
            portable.pack(place.dumped(journey.source), Path(archive), work)
            return
        if journey.lacks is not None:
            ctypes.CDLL(None).prctl(_PR_CAPBSET_DROP, journey.lacks, 0, 0, 0)
        place.dumps[journey.source.name] = portable.unpack(Path(archive), work, journey.source)
        with place.world(journey) as world:
            predicted, happened = place.predict(world), place.force(world)
        print(msgspec.json.encode((predicted, happened)).decode())


if __name__ == "__main__":
    main(*sys.argv[1:])
