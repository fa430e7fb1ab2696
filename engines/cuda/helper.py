"""Makes one call of the GPU driver. Run as a program: helper.py ORDER; the order and the answer are JSON.

A driver call can hang, and only a process of its own can be given up then. It dies with the thread that
started it. Standard library, `cuda.bindings` and `pynvml` only; it imports nothing of ours.

Order: {"parent": pid of who starts us, "site": [directories that hold the packages], "action": ...,
"pid": ..., "pids": [...], "timeout_ms": ..., "pairs": {old UUID: new UUID}, "program": cuda-checkpoint's path
or ""}.
Answer: {"error": name, "text": words} or the result. The program answers in its own words.
"""

import contextlib
import ctypes
import importlib
import json
import os
import signal
import sys
from typing import Any

_PR_SET_PDEATHSIG = 1
_STATES = ("running", "locked", "checkpointed", "failed", "checkpointing", "restoring")


class Failed(Exception):
    """A driver call returned an error. name: as the driver calls it."""

    def __init__(self, name: str, text: str = "") -> None:
        super().__init__(text or name)
        self.name = name


# --- the driver's process checkpoint calls -------------------------------------------------------------


def _cuda() -> Any:
    return importlib.import_module("cuda.bindings.driver")


def _check(result: Any, *values: Any) -> Any:
    if int(result) != 0:
        raise Failed(str(result.name))
    return values[0] if values else None


def _uuid(cuda: Any, text: str) -> Any:
    found = cuda.CUuuid()  # its bytes can only be read
    ctypes.memmove(int(found.getPtr()), bytes.fromhex(text.removeprefix("GPU-").replace("-", "")), 16)
    return found


def _lock(cuda: Any, order: dict[str, Any]) -> None:
    arguments = cuda.CUcheckpointLockArgs()
    arguments.timeoutMs = int(order["timeout_ms"])
    _check(*cuda.cuCheckpointProcessLock(order["pid"], arguments))


def _checkpoint(cuda: Any, order: dict[str, Any]) -> None:
    _check(*cuda.cuCheckpointProcessCheckpoint(order["pid"], None))


def _restore(cuda: Any, order: dict[str, Any]) -> None:
    # Without persistence mode the driver wants this of whoever restores.
    _check(*cuda.cuInit(0))
    arguments = None
    if order["pairs"]:
        arguments = cuda.CUcheckpointRestoreArgs()
        pairs: list[Any] = []
        for old, new in order["pairs"].items():
            pair = cuda.CUcheckpointGpuPair()
            pair.oldUuid, pair.newUuid = _uuid(cuda, old), _uuid(cuda, new)
            pairs.append(pair)
        arguments.gpuPairs = pairs
        arguments.gpuPairsCount = len(pairs)
    _check(*cuda.cuCheckpointProcessRestore(order["pid"], arguments))


def _unlock(cuda: Any, order: dict[str, Any]) -> None:
    _check(*cuda.cuCheckpointProcessUnlock(order["pid"], None))


def _state(cuda: Any, pid: int) -> str | None:
    """None: the driver does not know this process."""
    try:
        return _STATES[int(_check(*cuda.cuCheckpointProcessGetState(pid)))]
    except Failed as failure:
        if failure.name in ("CUDA_ERROR_INVALID_VALUE", "CUDA_ERROR_NOT_INITIALIZED"):
            return None
        raise


def _states(cuda: Any, order: dict[str, Any]) -> dict[str, Any]:
    return {"states": {str(pid): _state(cuda, pid) for pid in order["pids"]}}


_ACTIONS = {
    "lock": _lock,
    "checkpoint": _checkpoint,
    "restore": _restore,
    "unlock": _unlock,
    "states": _states,
}


# --- NVML ----------------------------------------------------------------------------------------------


def _look() -> dict[str, Any]:
    """The devices of this node, and who is on them."""
    nvml: Any = importlib.import_module("pynvml")
    try:
        nvml.nvmlInit()
        devices: list[dict[str, Any]] = []
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            mps = _processes(nvml, nvml.nvmlDeviceGetMPSComputeRunningProcesses, handle)
            used = _processes(nvml, nvml.nvmlDeviceGetComputeRunningProcesses, handle)
            devices.append(
                {
                    "uuid": nvml.nvmlDeviceGetUUID(handle),
                    "model": nvml.nvmlDeviceGetName(handle),
                    "total_bytes": int(memory.total),
                    "free_bytes": int(memory.free),
                    "minor": int(nvml.nvmlDeviceGetMinorNumber(handle)),
                    "mig": _mig(nvml, handle),
                    "used": {**used, **mps},
                    "mps": [int(pid) for pid in mps],
                }
            )
        return {"driver": nvml.nvmlSystemGetDriverVersion(), "devices": devices}
    except nvml.NVMLError as error:
        raise Failed(type(error).__name__, str(error)) from error


def _processes(nvml: Any, call: Any, handle: Any) -> dict[str, int]:
    """Process id to bytes."""
    try:
        return {str(entry.pid): int(entry.usedGpuMemory or 0) for entry in call(handle)}
    except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound):
        return {}


def _mig(nvml: Any, handle: Any) -> bool:
    """Whether the device is split; most models cannot be."""
    with contextlib.suppress(nvml.NVMLError):
        return bool(nvml.nvmlDeviceGetMigMode(handle)[0])
    return False


# --- one call ------------------------------------------------------------------------------------------


def _program_arguments(order: dict[str, Any]) -> list[str]:
    action, pid = order["action"], str(order["pid"])
    if action == "state":
        return ["--get-state", "--pid", pid]
    words = ["--action", action, "--pid", pid]
    if action == "lock":
        words += ["--timeout", str(order["timeout_ms"])]
    if action == "restore" and order["pairs"]:
        words += ["--device-map", ",".join(f"{old}={new}" for old, new in order["pairs"].items())]
    return words


def main() -> int:
    """Make the call."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    order = json.loads(sys.argv[1])
    if os.getppid() != order["parent"]:
        return 1  # it died before we could tell the kernel; whoever undoes its call must not meet ours
    if order["program"]:
        os.execv(order["program"], [order["program"], *_program_arguments(order)])  # noqa: S606
    sys.path += order["site"]
    try:
        answer = _look() if order["action"] == "look" else _ACTIONS[order["action"]](_cuda(), order) or {}
    except Failed as failure:
        answer = {"error": failure.name, "text": str(failure)}
    except Exception as error:  # whatever the packages raise where there is no driver
        answer = {"error": type(error).__name__, "text": str(error).strip().partition("\n")[0]}
    sys.stdout.write(json.dumps(answer))
    sys.stdout.flush()
    return 1 if "error" in answer else 0


if __name__ == "__main__":
    # The driver library's own tidying up takes longer than all the rest.
    os._exit(main())
