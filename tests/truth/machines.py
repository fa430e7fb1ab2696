"""The virtual machines of the journeys: one of each processor, started when it is first needed."""

from __future__ import annotations

import gzip
import os
import tempfile
from pathlib import Path

import msgspec

from tests.support.containers import CHECKOUT
from tests.truth import portable
from tests.truth.journeys import JOURNEYS, PROGRAM, Journey, compile_program
from tests.truth.place import Place
from tests.truth.scenario import Happened, Prediction
from tests.vm import build, payload
from tests.vm.machine import Kind, Machine, saved

_FOLDER = CHECKOUT / "build" / "vm"
_ARCHIVE = Path("/root/image.tar")


class Machines:
    """Machines of one run; `close` ends them. place: this very machine's."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._machines: dict[str, Machine] = {}
        self._images: dict[tuple[str, str], bytes] = {}
        self._disk: Path | None = None

    def play(self, journey: Journey) -> tuple[Prediction, Happened]:
        """Make the image on the one machine, ask torpor on the other, and wake it up there."""
        if not self._images:
            compile_program()
        image = self._image(journey)
        if journey.woken_on:
            machine = self._machine(journey.woken_on)
            machine.put(_ARCHIVE, image)
            machine.run(journey.before_wake)
            output = payload.guest_module(
                machine, "tests.truth.guest", "wake", _number(journey), str(_ARCHIVE)
            )
            machine.run(journey.after)
            return msgspec.json.decode(output.out.splitlines()[-1], type=tuple[Prediction, Happened])
        place = self._place
        folder = place.lab.path / f"journey-{_number(journey)}"
        folder.mkdir(exist_ok=True)
        (folder / "image.tar").write_bytes(image)
        place.dumps[journey.source.name] = portable.unpack(
            folder / "image.tar", folder / "image", journey.source
        )
        try:
            with place.world(journey) as world:
                return place.predict(world), place.force(world)
        finally:
            del place.dumps[journey.source.name]  # it was not made here

    def _image(self, journey: Journey) -> bytes:
        key = journey.source.name, journey.made_on
        if key not in self._images:
            self._images[key] = self._make(journey)
        return self._images[key]

    def _make(self, journey: Journey) -> bytes:
        if journey.made_on:
            machine = self._machine(journey.made_on)
            for path, data in journey.brings().items():
                machine.put(path, data)
            machine.run(journey.before_dump)
            payload.guest_module(machine, "tests.truth.guest", "dump", _number(journey), str(_ARCHIVE))
            return gzip.compress(machine.get(_ARCHIVE), 1)  # what an emulated machine would take long for
        folder = self._place.lab.path / f"made-{_number(journey)}"
        (folder / "work").mkdir(parents=True)
        portable.pack(self._place.dumped(journey.source), folder / "image.tar", folder / "work")
        return gzip.compress((folder / "image.tar").read_bytes(), 1)

    def _machine(self, name: str) -> Machine:
        if name not in self._machines:
            if not self._machines:
                os.environ["PATH"] += ":/usr/sbin:/sbin"  # where mke2fs is
            folder = Path(os.environ.get("TORPOR_VM_IMG", _FOLDER))
            cpu, _, memory_mib = name.partition(":")
            kind = Kind(cpu=cpu, memory_mib=int(memory_mib)) if memory_mib else Kind(cpu=cpu)
            state = saved(build.ensure(folder), kind)
            machine = self._machines[name] = Machine.clone(state, self._payload(folder))
            machine.mount_payload()
            machine.put(PROGRAM, PROGRAM.read_bytes(), mode=0o755)
        return self._machines[name]

    def _payload(self, folder: Path) -> Path:
        if self._disk is None:
            self._work = tempfile.TemporaryDirectory(prefix=f"payload-{os.getpid()}-", dir=folder)
            staging = Path(self._work.name, "staging")
            staging.mkdir()
            self._disk = Path(self._work.name, "disk")
            payload.write(self._disk, staging)
        return self._disk

    def close(self) -> None:
        """End them."""
        for machine in self._machines.values():
            machine.kill()
        if self._disk is not None:
            self._work.cleanup()


def _number(journey: Journey) -> str:
    return str(JOURNEYS.index(journey))
