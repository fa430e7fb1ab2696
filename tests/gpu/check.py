"""What tests/gpu/check.sh runs: one container with memory on a GPU goes every way that the engine offers.

usage: python -m tests.gpu.check [--mib N] [--rehearse]

--rehearse: with a pretended GPU instead, to see that this very program works.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import stat
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from engines.api import CheckpointRequest, ReleaseRequest, RestoreRequest
from engines.cuda.devices import version
from engines.cuda.engine import CudaEngine
from engines.cuda.node import find_driver
from tests.support.containers import Lab, bind, lab, until
from tests.support.criu import CriuLab
from tests.support.gpu import Fabric

T = TypeVar("T")
_STEP_S = 120.0
_LIMIT_S = 240.0


class Failed(Exception):
    """The engine did not do what it should; in words."""


class Check:
    """The containers of a check. fabric: pretended GPUs, None for real ones."""

    def __init__(self, inner: Lab, mib: int, fabric: Fabric | None) -> None:
        self.place = CriuLab(inner)
        self.mib = mib
        self.fabric = fabric
        self.figures: list[tuple[str, str]] = []

    def engine(self, container_id: str) -> CudaEngine:
        return CudaEngine(self.place.settings(container_id))

    def prepare(self) -> str:
        """A bundle for a container that has the GPUs; its id."""
        if self.fabric:
            words = self.fabric.program_words("--mib", str(self.mib))
            return self.place.prepare(args=words, mounts=[self.fabric.mount()], name="gpu")
        site = Path(sysconfig.get_path("purelib"))
        words = ["python", "-IS", "-u", "/workloads/gpu_memory.py", str(site), str(self.mib)]
        mounts = [bind(site, str(site))]
        library = _library_directory()
        if library and not library.is_relative_to("/usr"):
            mounts.append(bind(library, str(library)))
        container_id = self.place.prepare(args=words, mounts=mounts, name="gpu")
        path = self.place.bundle(container_id) / "config.json"
        spec = json.loads(path.read_text())
        if library:
            spec["process"]["env"].append(f"LD_LIBRARY_PATH={library}")
        spec["linux"]["devices"], allowed = _devices()
        spec["linux"].setdefault("resources", {})["devices"] = allowed
        path.write_text(json.dumps(spec))
        return container_id

    def start(self) -> str:
        container_id = self.prepare()
        place = self.place
        place.outputs[container_id] = place.runc.run(place.bundle(container_id), container_id)
        try:
            until(lambda: place.progress(container_id) > 1, timeout_s=60, what="it counts on the GPU")
        except AssertionError as error:
            raise Failed(f"the container does not start: {place.outputs[container_id].text}") from error
        return container_id

    def timed(self, what: str, work: Callable[[], T]) -> T:
        """Do something, and note how long it took."""
        began = time.monotonic()
        found = work()
        self.figures.append((what, f"{time.monotonic() - began:.2f} s"))
        return found

    def whole(self, container_id: str, total: str, what: str) -> None:
        """Fail unless the container counts on, with the memory it had."""
        before = self.place.progress(container_id)
        until(
            lambda: self.place.progress(container_id) > before,
            timeout_s=30,
            what=f"it counts on the GPU after {what}",
        )
        if (found := self.place.ask(container_id, signal.SIGUSR1, "sum")) != total:
            raise Failed(f"after {what} the GPU's memory is not what it was: {found}, not {total}")

    def on_gpu(self, container_id: str) -> int:
        """Bytes that the driver says the container holds on GPUs."""
        found = self.engine(container_id).gpu_processes(container_id)
        return sum(size for process in found if process.state == "running" for size in process.gpus.values())

    def run(self) -> None:
        """The whole way. Raises Failed, AssertionError, EngineError."""
        place = self.place
        source = self.timed("start", self.start)
        total = place.ask(source, signal.SIGUSR1, "sum")
        engine = self.engine(source)
        driver, node = find_driver(place.settings(source), None, "could not check")
        self.figures.append(("driver", f"{node.driver} through the {driver.way}"))
        self.figures.append(("GPUs", ", ".join(gpu.model for gpu in node.gpus)))
        held = self.on_gpu(source)
        self.figures.append(("on the GPU", f"{held >> 20} MiB"))
        if held < self.mib << 20:
            raise Failed(f"NVML tells of {held} bytes on the GPU, {self.mib} MiB were expected")
        self.timed("suspend", lambda: engine.suspend(source, timeout_s=_STEP_S))
        if left := self.on_gpu(source):
            raise Failed(f"{left} bytes are on the GPU while the container is suspended")
        self.timed("resume", lambda: engine.resume(source, timeout_s=_STEP_S, pairs={}))
        self.whole(source, total, "resume")
        self._other_gpu(source, total, node.driver)
        self._dump(source, "copy", stay=True)
        self.whole(source, total, "a checkpoint that left it running")
        image = self._dump(source, "image", stay=False)
        count = place.progress(source)
        place.kill(source)
        size = sum(path.stat().st_size for path in image.iterdir())
        self.figures.append(("image", f"{size >> 20} MiB"))
        target = self.prepare()
        request = RestoreRequest(
            container_id=target,
            bundle_path=place.bundle(target),
            image_path=image,
            timeout_s=_STEP_S,
            held=True,
        )
        self.timed("restore", lambda: place.restore(self.engine(target), request))
        release = ReleaseRequest(container_id=target, timeout_s=_STEP_S)
        self.timed("release, with the GPU", lambda: self.engine(target).release(release))
        self.whole(target, total, "the restore")
        if place.progress(target) <= count:
            raise Failed("the restored container counts from the beginning")
        place.kill(target)
        until(lambda: not place.residue(target), what="nothing is left")

    def _dump(self, container_id: str, name: str, *, stay: bool) -> Path:
        image = self.place.image_root / name
        request = CheckpointRequest(
            container_id=container_id,
            bundle_path=self.place.bundle(container_id),
            image_path=image,
            timeout_s=_STEP_S,
            leave_running=stay,
        )
        what = "checkpoint, leaving it running" if stay else "checkpoint, ending it"
        stats = self.timed(what, lambda: self.engine(container_id).checkpoint(request))
        self.figures.append(("  of it, GPU to host memory", f"{stats.gpu_s:.2f} s"))
        self.figures.append(("  of it, frozen by CRIU", f"{stats.frozen_s:.2f} s"))
        return image

    def _other_gpu(self, container_id: str, total: str, driver: str) -> None:
        """Onto another GPU of the same model and back, where there is one."""
        engine = self.engine(container_id)
        _, node = find_driver(self.place.settings(container_id), None, "could not check")
        (process,) = engine.gpu_processes(container_id)
        (old,) = process.gpus
        gpu = node.by_uuid(old)
        same = [each.uuid for each in node.gpus if gpu and each.model == gpu.model and each.uuid != old]
        if not same or version(driver) < (580,):
            self.figures.append(("to another GPU", "not tried: one GPU of its model, or a driver before 580"))
            return
        engine.suspend(container_id, timeout_s=_STEP_S)
        self.timed(
            "resume on another GPU",
            lambda: engine.resume(container_id, timeout_s=_STEP_S, pairs={old: same[0]}),
        )
        self.whole(container_id, total, "the move to another GPU")


def _library_directory() -> Path | None:
    """Where the driver's library is, None if the loader does not say."""
    told = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True, check=False).stdout
    match = re.search(r"libcuda\.so\.1 \(.*x86-64.*\) => (\S+)", told)
    return Path(match[1]).parent if match else None


def _devices() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The GPU device files of this machine for a spec, and the rules that allow them."""
    devices: list[dict[str, Any]] = []
    rules: list[dict[str, Any]] = [{"allow": False, "access": "rwm"}]
    for path in sorted(Path("/dev").glob("nvidia*")):
        status = path.stat()
        if not stat.S_ISCHR(status.st_mode):
            continue
        numbers = {"type": "c", "major": os.major(status.st_rdev), "minor": os.minor(status.st_rdev)}
        devices.append({"path": str(path), "fileMode": 0o666, "uid": 0, "gid": 0, **numbers})
        rules.append({"allow": True, "access": "rw", **numbers})
    return devices, rules


def main() -> int:
    """Check; 0 if all went well."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=2048)
    parser.add_argument("--rehearse", action="store_true")
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="torpor-gpu-", dir="/var/tmp") as path:
        fabric = None
        if options.rehearse:
            fabric = Fabric(Path(path, "fabric"))
            os.environ |= fabric.environment
        with lab(Path(path)) as inner:
            check = Check(inner, options.mib, fabric)
            verdict = "PASS"
            try:
                check.run()
            except Exception as error:
                verdict = f"FAIL: {error}"
    width = max((len(name) for name, _ in check.figures), default=0)
    for name, figure in check.figures:
        print(f"{name:<{width}}  {figure}")
    total_s = time.monotonic() - began
    print(f"{'in all':<{width}}  {total_s:.1f} s")
    if total_s > _LIMIT_S:
        print(f"note: that is long; it should take less than {_LIMIT_S:.0f} s")
    if fabric:
        print("This was a rehearsal on a pretended GPU: it proves nothing about a real one.")
    print(verdict)
    return 0 if verdict == "PASS" else 1


if __name__ == "__main__":
    sys.exit(main())
