"""The GPU's stage of a dump and of a restore: into host memory, and back.

All processes are locked before any is checkpointed: those of one job wait for each other (NCCL). A lock needs
the process to run, so nothing here is done to a frozen container. Standard library only: the undo of a killed
call is here.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from engines.cuda.driver import Action, Driver, DriverError
from engines.processes import alive

Known = tuple[int, int]
"""A process: its pid on the host and its start time, by which another of the same pid is told from it."""

UNDO_S = 60.0  # for each step of giving back; memory moves at some gigabytes a second
_SETTLE_S = 0.1
_STEPS: tuple[tuple[Action, tuple[str, ...]], ...] = (
    ("restore", ("checkpointed",)),
    ("unlock", ("checkpointed", "locked")),
)


class StageFailed(Exception):
    """A step failed for a process. late: because the deadline passed."""

    def __init__(self, action: str, pid: int, error: DriverError) -> None:
        super().__init__(f"{action} of process {pid}: {error.words()}")
        self.late = error.name in ("deadline", "CUDA_ERROR_NOT_READY")


def take(driver: Driver, processes: Sequence[Known], *, deadline: float) -> None:
    """Lock all, then move the GPU memory of all into host memory.

    deadline: on the monotonic clock. Raises StageFailed; then some are locked or checkpointed: `give_back`.
    """
    _all(driver, "lock", processes, deadline)
    _all(driver, "checkpoint", processes, deadline)


def bring(driver: Driver, processes: Sequence[Known], pairs: Mapping[str, str], *, deadline: float) -> None:
    """Move the GPU memory of all back, then let all run on. Those that are locked are only unlocked.

    pairs: old UUID to new, empty for the same GPUs. Raises StageFailed.
    """
    try:
        states = _states(driver, processes)
    except DriverError as error:
        raise StageFailed("look at the state", processes[0][0], error) from error
    _all(driver, "restore", [p for p in processes if states.get(p[0]) == "checkpointed"], deadline, pairs)
    _all(driver, "unlock", [p for p in processes if states.get(p[0]) != "running"], deadline)


def give_back(driver: Driver, processes: Sequence[Known], pairs: Mapping[str, str]) -> list[str]:
    """Whatever state they are in: restore and unlock, in reverse order; what went wrong, in words.

    A call that was cut off may still be at work inside the driver: so they are looked at until they are found
    running twice, with a moment between.
    """
    problems: dict[int, str] = {}
    until = time.monotonic() + UNDO_S
    calm = 0
    while calm < 2:
        there = [known for known in reversed(processes) if alive(*known) and known[0] not in problems]
        try:
            states = _states(driver, there)
        except DriverError as error:
            return [*problems.values(), error.words()]
        restless = [known for known in there if states.get(known[0]) not in ("running", None)]
        if time.monotonic() > until:
            return [*problems.values(), *(f"process {pid} stays {states[pid]}" for pid, _ in restless)]
        for action, before in _STEPS:
            for pid, start in restless:
                if states[pid] not in before or pid in problems:
                    continue
                try:
                    driver.act(action, pid, timeout_s=UNDO_S, pairs=pairs)
                except DriverError as error:
                    # It may have gone its way meanwhile; if not, this comes again.
                    if alive(pid, start) and error.name != "CUDA_ERROR_ILLEGAL_STATE":
                        problems[pid] = str(StageFailed(action, pid, error))
        calm = 0 if restless else calm + 1
        time.sleep(_SETTLE_S)
    return list(problems.values())


def put_away(driver: Driver, processes: Sequence[Known]) -> list[str]:
    """Whatever state they are in: into host memory, as before a `bring` that failed; problems in words."""
    there = [process for process in processes if alive(*process)]
    try:
        states = _states(driver, there)
        until = time.monotonic() + UNDO_S
        _all(driver, "lock", [p for p in there if states.get(p[0]) == "running"], until)
        _all(driver, "checkpoint", [p for p in there if states.get(p[0]) != "checkpointed"], until)
    except (StageFailed, DriverError) as error:
        return [str(error)]
    return []


def _states(driver: Driver, processes: Sequence[Known]) -> dict[int, str | None]:
    return dict(driver.states([pid for pid, _ in processes]))


def _all(
    driver: Driver,
    action: Action,
    processes: Sequence[Known],
    deadline: float,
    pairs: Mapping[str, str] | None = None,
) -> None:
    """Do something to all processes at once. Raises StageFailed for the first that failed."""
    if not processes:
        return

    def one(process: Known) -> StageFailed | None:
        try:
            driver.act(action, process[0], timeout_s=max(0.1, deadline - time.monotonic()), pairs=pairs)
        except DriverError as error:
            return StageFailed(action, process[0], error)
        return None

    with ThreadPoolExecutor(len(processes)) as pool:
        failures = [failure for failure in pool.map(one, processes) if failure]
    if failures:
        # One that broke made the others wait: tell the breakage, not the waiting.
        raise min(failures, key=lambda failure: failure.late)
