"""Fixtures of the virtual machine tests.

Without qemu or mmdebstrap they are skipped, with the reason; in CI that is a failure.
TORPOR_VM_IMG: folder of the built machines, build/vm of the checkout if unset.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from tests.vm import build, machine, payload

PROGRAMS = (machine.EMULATOR, "qemu-img", "mmdebstrap", "mke2fs", "setpriv")
REPORT = pytest.StashKey[pytest.TestReport]()


def _unavailable(reason: str) -> NoReturn:
    if os.environ.get("CI"):
        pytest.fail(f"no virtual machine: {reason}", pytrace=False)
    pytest.skip(f"no virtual machine: {reason}")


@pytest.fixture(scope="session")
def vm_folder() -> Iterator[Path]:
    """Where built machines lie. From here on PATH has the administrator's programs, as root's may not."""
    named = os.environ.get("TORPOR_VM_IMG")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{os.environ['PATH']}:/usr/sbin:/sbin")
        yield Path(named) if named else payload.CHECKOUT / "build" / "vm"


@pytest.fixture(scope="session")
def vm_state(vm_folder: Path) -> machine.State:
    missing = [program for program in PROGRAMS if not shutil.which(program)]
    if missing:
        _unavailable(f"{', '.join(missing)} not found")
    if os.geteuid() != 0:
        _unavailable("building one needs root")
    try:
        return machine.saved(build.ensure(vm_folder), machine.Kind())
    except (build.BuildFailed, machine.MachineError) as problem:
        _unavailable(str(problem))


@pytest.fixture(scope="session")
def vm_payload(vm_folder: Path) -> Iterator[Path]:
    for old in vm_folder.glob("payload-*"):  # of a run that was killed
        if not Path("/proc", old.name.split("-")[1]).exists():
            shutil.rmtree(old)
    folder = vm_folder / f"payload-{os.getpid()}"
    staging, disk = folder / "staging", folder / "disk"
    staging.mkdir(parents=True)
    try:
        payload.write(disk, staging)
        shutil.rmtree(staging)
        yield disk
    except payload.PayloadFailed as problem:
        _unavailable(str(problem))
    finally:
        shutil.rmtree(folder)


@pytest.fixture
def new_vm(
    vm_state: machine.State, vm_payload: Path, request: pytest.FixtureRequest
) -> Iterator[Callable[[], machine.Machine]]:
    """Makes machines that have this checkout mounted; a failed test shows their consoles."""
    machines: list[machine.Machine] = []

    def make() -> machine.Machine:
        clone = machine.Machine.clone(vm_state, vm_payload)
        machines.append(clone)
        clone.mount_payload()
        return clone

    yield make
    report = request.node.stash.get(REPORT, None)
    for number, clone in enumerate(machines, start=1):
        if report is not None and report.failed:
            print(f"--- console of machine {number}\n{clone.console()}")
        clone.kill()


@pytest.fixture
def vm(new_vm: Callable[[], machine.Machine]) -> machine.Machine:
    """One machine of the test's own."""
    return new_vm()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report: pytest.TestReport = yield
    if report.when == "call":
        item.stash[REPORT] = report
    return report
