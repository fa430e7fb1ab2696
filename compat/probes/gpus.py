"""The GPUs, as the driver's management library (NVML) tells.

The library can hang, and no thread that hangs in it can be ended: so it is asked by a process of its own
(`python -m compat.probes.gpus`).
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

from compat.gpus import read as from_proc
from compat.probes.base import System, Untold, output, probe

_DRIVER = "proc/driver/nvidia/version"


@probe("gpus")
def read(system: System) -> dict[str, Any]:
    """Driver, and the GPUs in the driver's order; none where there is no driver."""
    if not (system.root / _DRIVER).exists():
        return {"gpu_driver": "", "gpus": ()}
    try:
        return json.loads(output(system, sys.executable, "-m", __name__))
    except Untold as error:
        # The kernel driver tells less, and is always there.
        seen = from_proc(system.root / "proc/driver/nvidia")
        if any("?" in gpu.uuid for gpu in seen.gpus) or not seen.gpus:
            raise Untold(f"NVML does not answer: {error}") from error
        gpus = [{"uuid": gpu.uuid, "model": gpu.model, "minor": gpu.minor} for gpu in seen.gpus]
        return {"gpu_driver": seen.driver, "gpus": gpus}


def ask() -> dict[str, Any]:
    """What NVML tells. Raises whatever it raises."""
    nvml: Any = importlib.import_module("pynvml")

    def words(value: Any) -> str:
        return value.decode() if isinstance(value, bytes) else str(value)

    nvml.nvmlInit()
    gpus: list[dict[str, Any]] = []
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        gpu: dict[str, Any] = {
            "uuid": words(nvml.nvmlDeviceGetUUID(handle)),
            "model": words(nvml.nvmlDeviceGetName(handle)),
            "minor": int(nvml.nvmlDeviceGetMinorNumber(handle)),
            "memory_bytes": int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
        }
        try:
            gpu["mig"] = bool(nvml.nvmlDeviceGetMigMode(handle)[0])
        except nvml.NVMLError:
            gpu["mig"] = False  # a device that cannot be split
        gpus.append(gpu)
    return {"gpu_driver": words(nvml.nvmlSystemGetDriverVersion()), "gpus": gpus}


if __name__ == "__main__":
    try:
        print(json.dumps(ask()))
    except Exception as error:
        print(error, file=sys.stderr)
        sys.exit(1)
