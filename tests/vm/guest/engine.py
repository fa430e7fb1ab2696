"""The CRIU engine under another kernel. In the machine: `python -m tests.vm.guest.engine SCENE`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

from engines.api import CheckpointEngine, CheckpointRequest, EngineSettings, ReleaseRequest, RestoreRequest
from engines.registry import create
from shim.toolchain.find import find_tools
from tests.support.containers import status
from tests.vm.guest.counter import ROOT, TIMEOUT_S, Counter, frozen


def engine_for(counter: Counter, container_id: str) -> CheckpointEngine:
    tools = find_tools()
    assert tools.runc
    state = ROOT / "state" / container_id
    state.mkdir(parents=True, mode=0o700, exist_ok=True)
    return create(
        "criu",
        EngineSettings(
            runtime_path=tools.runc,
            root_path=counter.runc.root,
            state_path=state,
            search_path=tools.search_path,
            python_path=tools.python_path,
        ),
    )


def dump(
    counter: Counter,
    container_id: str,
    image: Path,
    *,
    parent: Path | None = None,
    leave_running: bool = False,
) -> None:
    engine_for(counter, container_id).checkpoint(
        CheckpointRequest(
            container_id=container_id,
            bundle_path=ROOT / "bundles" / container_id,
            image_path=image,
            parent_path=parent,
            leave_running=leave_running,
            timeout_s=TIMEOUT_S,
        )
    )


def restore(counter: Counter, container_id: str, image: Path, *, held: bool, uid: int = 0) -> int:
    """Restore into a new bundle and cgroup; the pid."""
    request = RestoreRequest(
        container_id=container_id,
        bundle_path=counter.bundle(container_id, uid=uid),
        image_path=image,
        held=held,
        timeout_s=TIMEOUT_S,
    )
    return engine_for(counter, container_id).restore(request).pid


def probe() -> None:
    """Nothing speaks against CRIU here."""
    findings = engine_for(Counter(), "none").probe()
    assert findings
    assert not [finding for finding in findings if finding.severity == "refuse"], findings


def held() -> None:
    """Nothing runs between restore and release, and the memory goes on afterwards."""
    counter = Counter()
    counter.start("one")
    image = ROOT / "image"
    dump(counter, "one", image)
    last = counter.count()
    assert not counter.runc.pids("one")
    pid = restore(counter, "two", image, held=True)
    assert frozen("two"), "a held container's cgroup is frozen"
    assert status(pid, "NSpid").split()[-1] == "1"
    assert counter.count() == last, "nothing ran before the release"
    engine_for(counter, "two").release(ReleaseRequest(container_id="two", timeout_s=TIMEOUT_S))
    assert not frozen("two")
    counter.until_above(last)
    first_seen = counter.count()
    counter.until_above(first_seen + 3)
    assert status(pid, "State")[:1] in "SRD", "the process is not left stopped"
    counter.runc("kill", "two", "KILL")
    counter.until_gone(pid)


def killed_while_held() -> None:
    """cgroup v2 lets a SIGKILL through to frozen tasks: nothing need run for it to be delivered."""
    counter = Counter()
    counter.start("one")
    image = ROOT / "image"
    dump(counter, "one", image)
    last = counter.count()
    pid = restore(counter, "two", image, held=True)
    counter.runc("kill", "two", "KILL")
    counter.until_gone(pid)
    counter.runc.delete("two")
    assert counter.count() == last
    pid = restore(counter, "three", image, held=False)  # the image is as good as before
    counter.until_above(last)
    engine_for(counter, "three").undo("three")  # nothing is half-done: it touches nothing
    counter.until_above(counter.count() + 3)
    counter.runc("kill", "three", "KILL")
    counter.until_gone(pid)


def pre_dump() -> None:
    """Soft-dirty tracking: the second dump holds only what changed after the first."""
    counter = Counter()
    bundle = counter.start("one")
    first, second = ROOT / "first", ROOT / "second"
    engine_for(counter, "one").pre_dump(
        CheckpointRequest(container_id="one", bundle_path=bundle, image_path=first, timeout_s=TIMEOUT_S)
    )
    counter.until_above(counter.count() + 3)
    dump(counter, "one", second, parent=first)
    last = counter.count()
    # Of the shell alone: what it has just forked, and is no other program yet, has a copy of all that.
    sizes = [(image / "pages-1.img").stat().st_size for image in (first, second)]
    print(json.dumps({"pages_bytes": sizes}))
    assert sizes[0] > 4 << 20
    assert sizes[1] < sizes[0] // 4
    pid = restore(counter, "two", second, held=False)
    counter.until_above(last)
    counter.runc("kill", "two", "KILL")
    counter.until_gone(pid)


def non_root() -> None:
    """A process of another user, without a user namespace: that needs CAP_SYS_RESOURCE."""
    counter = Counter()
    counter.start("one", uid=1000)
    image = ROOT / "image"
    dump(counter, "one", image, leave_running=True)
    counter.until_above(counter.count() + 3)  # it was left running
    counter.runc("kill", "one", "KILL")
    counter.until_gone(counter.runc.pid("one"))
    last = counter.count()
    pid = restore(counter, "two", image, held=False, uid=1000)
    assert status(pid, "Uid").split() == ["1000"] * 4
    # it goes on from the dump, which is below what it reached afterwards
    counter.until_above(last)


SCENES: dict[str, Callable[[], None]] = {
    scene.__name__: scene for scene in (probe, held, killed_while_held, pre_dump, non_root)
}

if __name__ == "__main__":
    SCENES[sys.argv[1]]()
