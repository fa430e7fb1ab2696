"""The GPU driver as this engine sees it: one call, one short-lived process, one deadline.

Two ways lead to the same calls: the package `cuda-bindings`, or NVIDIA's program `cuda-checkpoint` where it
is installed. NVML (the package `nvidia-ml-py`) tells about devices either way. Imported by the undo of a
killed call, so only the standard library.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from engines.cuda import helper

Action = Literal["lock", "checkpoint", "restore", "unlock"]
State = Literal["running", "locked", "checkpointed", "failed", "checkpointing", "restoring"]
Way = Literal["bindings", "program"]

PROGRAM = "cuda-checkpoint"
_ANSWER_S = 30.0
_START_S = 5.0  # for a helper to start, beside the time its call may take
_TOLD = (
    ("not supported", "CUDA_ERROR_NOT_SUPPORTED"),
    ("not ready", "CUDA_ERROR_NOT_READY"),
    ("timed out", "CUDA_ERROR_NOT_READY"),
    ("timeout", "CUDA_ERROR_NOT_READY"),
    ("invalid argument", "CUDA_ERROR_INVALID_VALUE"),
    ("out of memory", "CUDA_ERROR_OUT_OF_MEMORY"),
    ("present state", "CUDA_ERROR_ILLEGAL_STATE"),
    ("illegal state", "CUDA_ERROR_ILLEGAL_STATE"),
)
_MEANING: Mapping[str, str] = {
    "CUDA_ERROR_NOT_SUPPORTED": "the driver cannot do this to it: unified (managed) memory, memory shared by "
    "CUDA IPC and a driver before 570 are known causes",
    "CUDA_ERROR_NOT_READY": "it did not come to rest in time: work on the GPU goes on, or it waits for a "
    "process outside of this container (NCCL)",
    "CUDA_ERROR_OUT_OF_MEMORY": "there is not enough memory: on the GPU at a restore, in the host otherwise",
    "CUDA_ERROR_ILLEGAL_STATE": "somebody else is checkpointing it",
    "CUDA_ERROR_INVALID_VALUE": "the driver does not know the process, or a GPU it shall go to",
    "deadline": "the driver did not answer before the deadline",
}


class DriverError(Exception):
    """A driver call failed. name: the driver's name of the error, or "deadline"."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(text)
        self.name = name

    def words(self) -> str:
        """The cause in words."""
        meaning = _MEANING.get(self.name)
        detail = str(self) if str(self) and str(self) != self.name else ""
        told = f"{self.name}: {detail}" if detail else self.name
        return f"{meaning} ({told})" if meaning else told


@dataclass(frozen=True, kw_only=True)
class Driver:
    """How the driver is called. site: directories that hold the packages; program: empty for the bindings."""

    site: tuple[str, ...]
    program: str = ""

    @property
    def way(self) -> Way:
        """Which of the two ways."""
        return "program" if self.program else "bindings"

    def look(self) -> dict[str, Any]:
        """Devices and who is on them, as NVML tells (see helper.py). Raises DriverError."""
        return self._call({"action": "look"}, timeout_s=_ANSWER_S, program="")

    def states(self, pids: Iterable[int]) -> dict[int, State | None]:
        """The state of each process, None for one the driver does not know. Raises DriverError."""
        wanted = list(pids)
        if not wanted:
            return {}
        if not self.program:
            told = self._call({"action": "states", "pids": wanted}, timeout_s=_ANSWER_S)["states"]
            return {int(pid): state for pid, state in told.items()}
        with ThreadPoolExecutor(min(len(wanted), 16)) as pool:
            return dict(zip(wanted, pool.map(self._state, wanted), strict=True))

    def _state(self, pid: int) -> Any:
        try:
            return self._call({"action": "state", "pid": pid}, timeout_s=_ANSWER_S)["said"]
        except DriverError as error:
            if error.name == "deadline" or "not find" in str(error):
                raise
            return None

    def act(
        self, action: Action, pid: int, *, timeout_s: float, pairs: Mapping[str, str] | None = None
    ) -> None:
        """Do something to a process. pairs: old GPU's UUID to the new one's, empty for the same ones.

        timeout_s: a lock that takes longer leaves the process running; any call that takes longer is given
        up. Raises DriverError.
        """
        timeout_ms = max(1, int(timeout_s * 1000))
        order = {"action": action, "pid": pid, "timeout_ms": timeout_ms, "pairs": dict(pairs or {})}
        self._call(order, timeout_s=timeout_s + _START_S)

    def _call(self, order: dict[str, Any], *, timeout_s: float, program: str | None = None) -> dict[str, Any]:
        through = self.program if program is None else program
        whole: dict[str, Any] = {"pid": 0, "pids": [], "timeout_ms": 0, "pairs": {}, **order}
        whole |= {"parent": os.getpid(), "site": list(self.site), "program": through}
        try:
            done = subprocess.run(
                [sys.executable, "-IS", helper.__file__, json.dumps(whole)],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise DriverError("deadline", f"{order['action']} took longer than {timeout_s:.0f} s") from error
        except OSError as error:
            raise DriverError(type(error).__name__, str(error)) from error
        if through:
            if done.returncode:
                text = " ".join(done.stderr.split()) or f"exit status {done.returncode}"
                raise DriverError(next((name for told, name in _TOLD if told in text.lower()), PROGRAM), text)
            return {"said": done.stdout.strip()}
        try:
            answer = json.loads(done.stdout)
        except ValueError as error:
            lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
            raise DriverError("no answer", lines[-1]) from error
        if "error" in answer:
            raise DriverError(answer["error"], answer["text"])
        return answer


def find(search_path: str, way: Way | None = None) -> Driver | None:
    """How this node's driver can be called; None if neither package nor program is there, or NVML's is not.

    way: one of the two, None for the bindings and, without them, the program. Nothing is executed.
    """
    nvml = importlib.util.find_spec("pynvml")
    if nvml is None or nvml.origin is None:
        return None
    site = [str(Path(nvml.origin).parent)]
    if way != "program":
        try:
            bindings = importlib.util.find_spec("cuda.bindings")
        except ModuleNotFoundError:
            bindings = None
        if bindings and bindings.origin:
            site.append(str(Path(bindings.origin).parents[2]))
            return Driver(site=tuple(dict.fromkeys(site)))
    program = None
    if way != "bindings":
        program = shutil.which(PROGRAM, path=search_path) or shutil.which(
            PROGRAM, path=os.environ.get("PATH")
        )
    return Driver(site=tuple(site), program=program) if program else None
