"""Runs workloads through an engine and says what survives: pass, refused or fail, with the reason.

A *course* is one way through the interface: dump and restore, dump and run on, a vetoed dump, and so on.
Every workload takes every course. What cannot work must be refused with `NotSupported` before the container
is touched; an error that comes later is a failure, even if the container is unharmed. Containers come from a
`Place`; nothing here knows an engine or a runtime.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol
from unittest import SkipTest

from engines.api import (
    Capability,
    CheckpointEngine,
    CheckpointRequest,
    EngineError,
    NotSupported,
    Phase,
    PhaseInfo,
    ReleaseRequest,
    RestoreRequest,
)
from engines.harness import Harness, Veto
from engines.testing import EngineContract
from engines.workloads.catalogue import Workload

Result = Literal["pass", "refused", "fail", "absent", "skipped"]

_WORST_FIRST: tuple[Result, ...] = ("fail", "refused", "absent", "pass")

TIMEOUT_S = 120.0
_ANSWER_S = 40.0
_SETTLE_S = 20.0


class Absent(Exception):
    """This node cannot supply a workload. The message says why."""


class Place(Harness, Protocol):
    """Makes containers for workloads, beside those of the contract. Closed when a course is over."""

    def begin(self, workload: Workload) -> str:
        """Start a workload's container; its id. Raises Absent."""
        ...

    def successor(self, container_id: str) -> str:
        """A bundle for a new container that has another's files as they are now; its id."""
        ...

    def output(self, container_id: str) -> str:
        """What a container has printed so far, since its start or its restore."""
        ...

    def ask(self, container_id: str) -> None:
        """Send SIGUSR1 to a container's init."""
        ...

    def __enter__(self) -> Place: ...

    def __exit__(self, *error: object) -> None: ...


PlaceMaker = Callable[[], Place]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How one course of one workload, or one test of the contract, went.

    reason: why it did not pass. seconds: how long it took.
    """

    subject: str  # a workload's name, or "contract"
    course: str
    result: Result
    reason: str = ""
    seconds: float = 0.0


class _Failed(Exception):
    """Something is not as it must be."""


# --- talking to a workload -----------------------------------------------------------------------------


def _until(condition: Callable[[], bool], what: str, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise _Failed(f"not within {timeout_s:.0f} s: {what}")
        time.sleep(0.01)


def _lines(place: Place, container_id: str) -> list[str]:
    # Without the last, which may be incomplete.
    return [line.rstrip("\r") for line in place.output(container_id).split("\n")[:-1]]


def _ready(place: Place, container_id: str, workload: Workload) -> None:
    def told() -> bool:
        for line in _lines(place, container_id):
            if line.startswith("absent:"):
                raise Absent(line.removeprefix("absent: "))
            if line.startswith("bad:"):
                raise _Failed(f"before the dump: {line.removeprefix('bad: ')}")
            if line == "ready":
                return True
        return False

    def ready() -> bool:
        if told():
            return True
        if place.pid(container_id) != 0:
            return False
        time.sleep(0.2)  # its last words may be on their way
        if not told():
            raise _Failed(f"it ended before it was ready: {place.output(container_id)[-300:]!r}")
        return True

    _until(ready, "the workload becomes ready", workload.ready_s)


def _verify(place: Place, container_id: str, when: str) -> None:
    """Ask the workload whether all is as it was."""

    def answers() -> list[str]:
        return [line for line in _lines(place, container_id) if line == "ok" or line.startswith("bad:")]

    before = len(answers())
    place.ask(container_id)
    deadline = time.monotonic() + _ANSWER_S
    while len(answers()) == before:
        if place.pid(container_id) == 0:
            raise _Failed(f"{when}: it ended; it said {place.output(container_id)[-300:]!r}")
        if time.monotonic() > deadline:
            raise _Failed(f"{when}: no answer; it said {place.output(container_id)[-100:]!r}")
        time.sleep(0.01)
    answer = answers()[before]
    if answer != "ok":
        raise _Failed(f"{when}: {answer.removeprefix('bad: ')}")


def _clean(place: Place, container_id: str) -> None:
    deadline = time.monotonic() + _SETTLE_S
    while left := place.residue(container_id):
        if time.monotonic() > deadline:
            raise _Failed(f"left of {container_id}: {', '.join(left)}")
        time.sleep(0.01)


# --- courses -------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Run:
    """A workload on its way. source: the container that it is in now."""

    place: Place
    source: str
    pid: int

    def engine(self, container_id: str = "") -> CheckpointEngine:
        return self.place.engine(container_id or self.source)

    def dump(
        self,
        image: Path,
        *,
        leave_running: bool = False,
        on_phase: Callable[[Phase, PhaseInfo], None] | None = None,
    ) -> None:
        self.engine().checkpoint(
            CheckpointRequest(
                container_id=self.source,
                bundle_path=self.place.bundle(self.source),
                image_path=image,
                timeout_s=TIMEOUT_S,
                leave_running=leave_running,
                on_phase=on_phase,
            )
        )

    def restore(self, image: Path, container_id: str, *, held: bool = False) -> None:
        engine = self.engine(container_id)
        request = RestoreRequest(
            container_id=container_id,
            bundle_path=self.place.bundle(container_id),
            image_path=image,
            timeout_s=TIMEOUT_S,
            held=held,
            # Connections within the container go on in any case; there are no others.
            tcp="keep" if "tcp-established" in engine.capabilities else "close",
        )
        try:
            pid = self.place.restore(engine, request)
        except EngineError as error:
            raise _Failed(f"the restore failed: {error}") from error
        if pid != self.place.pid(container_id):
            raise _Failed("the restore told another pid than the runtime")

    def remove(self, container_id: str = "") -> None:
        self.place.kill(container_id or self.source)
        _clean(self.place, container_id or self.source)


def _round_trip(run: _Run) -> None:
    image = run.place.image_root / "i"
    run.dump(image)
    target = run.place.successor(run.source)
    run.remove()
    run.restore(image, target)
    _verify(run.place, target, "after the restore")
    run.remove(target)


def _leave_running(run: _Run) -> None:
    run.dump(run.place.image_root / "i", leave_running=True)
    if run.place.pid(run.source) != run.pid:
        raise _Failed("the container has another process now")
    _verify(run.place, run.source, "running on after the dump")
    run.remove()


def _vetoed(run: _Run) -> None:
    def veto(phase: Phase, info: PhaseInfo) -> None:
        del info
        if phase == "dumped":
            raise Veto(phase)

    image = run.place.image_root / "i"
    try:
        run.dump(image, on_phase=veto)
    except Veto:
        pass
    else:
        raise _Failed("a veto was not heard")
    if image.exists():
        raise _Failed("an image is left of a vetoed dump")
    _verify(run.place, run.source, "after a vetoed dump")
    run.remove()


def _held(run: _Run) -> None:
    image = run.place.image_root / "i"
    run.dump(image)
    target = run.place.successor(run.source)
    run.remove()
    run.restore(image, target, held=True)
    time.sleep(0.2)
    if run.place.output(target):
        raise _Failed("it ran while it was held")
    run.engine(target).release(ReleaseRequest(container_id=target, timeout_s=TIMEOUT_S))
    _verify(run.place, target, "after the release")
    run.remove(target)


def _twice(run: _Run) -> None:
    for generation in (1, 2):
        image = run.place.image_root / f"i{generation}"
        run.dump(image)
        target = run.place.successor(run.source)
        run.remove()
        run.restore(image, target)
        run.source, run.pid = target, run.place.pid(target)
    _verify(run.place, run.source, "in the second generation")
    run.remove()


def _clones(run: _Run) -> None:
    image = run.place.image_root / "i"
    run.dump(image)
    targets = [run.place.successor(run.source) for _ in range(2)]
    run.remove()
    for target in targets:
        run.restore(image, target)
    for number, target in enumerate(targets):
        _verify(run.place, target, f"clone {number + 1}")
    for target in targets:
        run.remove(target)


COURSES: Mapping[str, tuple[Capability | None, Callable[[_Run], None]]] = {
    "round-trip": (None, _round_trip),
    "leave-running": ("leave-running", _leave_running),
    "vetoed": ("phases", _vetoed),
    "held": ("held-restore", _held),
    "twice": (None, _twice),
    "clones": ("clone", _clones),
}
"""Name of each course, the capability it needs, and what it does."""


def run_course(make: PlaceMaker, workload: Workload, course: str) -> Outcome:
    """Send one workload through one course. Raises nothing but interrupts."""
    started = time.monotonic()
    capability, way = COURSES[course]

    def outcome(result: Result, reason: object = "") -> Outcome:
        words = " ".join(str(reason).split())
        seconds = time.monotonic() - started
        return Outcome(subject=workload.name, course=course, result=result, reason=words, seconds=seconds)

    try:
        with make() as place:
            source = place.begin(workload)
            engine = place.engine(source)
            if capability and capability not in engine.capabilities:
                return outcome("skipped", f"{engine.name} does not declare {capability}")
            _ready(place, source, workload)
            run = _Run(place, source, place.pid(source))
            try:
                way(run)
            except NotSupported as refusal:
                if place.pid(run.source) != run.pid:
                    return outcome("fail", f"refused, but the container was touched: {refusal}")
                _verify(place, run.source, "after a refusal")
                return outcome("refused", refusal)
            return outcome("pass")
    except Absent as reason:
        return outcome("absent", reason)
    except _Failed as failure:
        return outcome("fail", failure)
    except Exception as error:
        return outcome("fail", f"{type(error).__name__}: {error}")


# --- the contract --------------------------------------------------------------------------------------


def contract_tests(suite: type[EngineContract] = EngineContract) -> tuple[str, ...]:
    """Names of the contract's tests."""
    return tuple(name for name in vars(suite) if name.startswith("test_"))


def run_contract_test(make: PlaceMaker, name: str, suite: type[EngineContract] = EngineContract) -> Outcome:
    """Run one test of the contract. Raises nothing but interrupts."""
    started = time.monotonic()
    result: Result = "pass"
    reason = ""
    try:
        with make() as place:
            getattr(suite(), name)(place)
    except SkipTest as skip:
        result, reason = "skipped", str(skip)
    except Exception as error:
        result, reason = "fail", " ".join(f"{type(error).__name__}: {error}".split())
    seconds = time.monotonic() - started
    return Outcome(
        subject="contract", course=name.removeprefix("test_"), result=result, reason=reason, seconds=seconds
    )


# --- profiles and the whole ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is to run. skip: "contract.TEST", "WORKLOAD" or "WORKLOAD.COURSE" to the reason."""

    workloads: Sequence[Workload]
    courses: Sequence[str] = tuple(COURSES)
    contract: bool = True
    skip: Mapping[str, str]

    def size(self) -> int:
        """How many outcomes there will be."""
        tests = len(contract_tests()) if self.contract else 0
        return tests + len(self.workloads) * len(self.courses)


def run(make: PlaceMaker, plan: Plan) -> Iterator[Outcome]:
    """Run a plan; each outcome when it is known."""
    if plan.contract:
        for name in contract_tests():
            course = name.removeprefix("test_")
            reason = plan.skip.get(f"contract.{course}")
            if reason:
                yield Outcome(subject="contract", course=course, result="skipped", reason=reason)
            else:
                yield run_contract_test(make, name)
    for workload in plan.workloads:
        whole = plan.skip.get(workload.name)
        given: Outcome | None = None
        for course in plan.courses:
            reason = whole or plan.skip.get(f"{workload.name}.{course}")
            if reason:
                yield Outcome(subject=workload.name, course=course, result="skipped", reason=reason)
                continue
            if given is not None:
                # What the node cannot supply once it cannot supply the next time.
                yield Outcome(subject=workload.name, course=course, result="absent", reason=given.reason)
                continue
            outcome = run_course(make, workload, course)
            given = outcome if outcome.result == "absent" else None
            yield outcome


def verdict(outcomes: Sequence[Outcome]) -> Result:
    """One word for several outcomes: the worst of them; skipped only if all were."""
    found = {outcome.result for outcome in outcomes}
    for result in _WORST_FIRST:
        if result in found:
            return result
    return "skipped"
