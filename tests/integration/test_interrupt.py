"""A person who presses Ctrl-C, once or more often, finds the container as it was."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shim.images import layout
from shim.images.store import Store
from tests.integration.test_verbs_kill import Scene
from tests.support import soak
from tests.support.containers import SEARCH_PATH, lab, mounts_under, until
from tests.support.torpor import CONF_VARIABLE

pytestmark = pytest.mark.engine

TRIES = 20 if soak.SOAK else 5


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    with lab(tmp_path) as inner:
        yield Scene(inner)


def interrupted(scene: Scene, words: list[str], when: float | Callable[[], bool]) -> int | None:
    """Run `torpor` and send it SIGINT twice, as an impatient person does; its status.

    when: so many seconds after it began, or as soon as this is so. None if it ended well before anybody saw
    that.
    """
    said = scene.lab.path / "said"
    process = subprocess.Popen(
        [Path(sys.executable).parent / "torpor", *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=said.open("wb"),
        env={**os.environ, CONF_VARIABLE: str(scene.torpor.conf_path), "PATH": SEARCH_PATH},
        # A shell's background job ignores SIGINT, and so may this process.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    if callable(when):
        while not when():
            if process.poll() is not None:
                assert process.returncode == 0, said.read_text()
                return None
    else:
        time.sleep(when)
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.02)
    return process.wait(60)


@pytest.mark.soak
def test_checkpoint(scene: Scene) -> None:
    name = scene.lab.new_id()
    output = scene.lab.runc.run(scene.bundle(name), name)
    until(lambda: output.last_tick() > 0)
    words = ["checkpoint", name, "--root", str(scene.lab.runc.root), "--replace", "--name", "web"]
    began = time.monotonic()
    scene.torpor(*words)
    whole_s = time.monotonic() - began
    for point in range(TRIES):
        interrupted(scene, words, whole_s * (0.3 + 0.7 * point / TRIES))
        scene.settle()
        last = output.last_tick()
        until(lambda last=last: output.last_tick() > last + 3, what=f"it runs on, try {point}")
        assert scene.lab.runc.state(name)["status"] == "running"


@pytest.mark.soak
def test_checkpoint_that_stops(scene: Scene) -> None:
    """The container runs on, or its image is there: whoever interrupts is never left with neither."""
    root = str(scene.lab.runc.root)
    whole_s = 0.0
    for point in range(-1, TRIES):
        name = scene.lab.new_id()
        output = scene.lab.runc.run(scene.bundle(name), name)
        until(lambda output=output: output.last_tick() > 0)
        words = ["checkpoint", name, "--root", root, "--stop", "--name", name]
        image = scene.torpor.image_path(name)
        if point < 0:
            began = time.monotonic()
            scene.torpor(*words)
            whole_s = time.monotonic() - began
            assert image.exists()
            continue

        def whole(image: Path = image) -> bool:
            return image.exists() and not (image / layout.PENDING).exists()

        def may_die(name: str = name, whole: Callable[[], bool] = whole) -> bool:
            journals = list(scene.torpor.state_path.glob(f"containers/*/{name}/criu-call.json"))
            with contextlib.suppress(FileNotFoundError):
                return any('"committed": true' in path.read_text() for path in journals) or whole()
            return whole()

        interrupted(scene, words, may_die if point % 2 else whole_s * (0.3 + 0.7 * point / TRIES))
        scene.settle()
        if whole():
            scene.torpor("images", "verify", name)
            assert scene.lab.runc.state(name).get("status") != "running", f"try {point}"
        else:
            last = output.last_tick()
            until(lambda output=output, last=last: output.last_tick() > last + 3, what=f"it runs on, {point}")
        scene.lab.runc.delete(name)


@pytest.mark.soak
def test_restore(scene: Scene) -> None:
    name = scene.lab.new_id()
    first = scene.lab.runc.run(scene.bundle(name), name)
    until(lambda: first.last_tick() > 5)
    root = str(scene.lab.runc.root)
    scene.torpor("checkpoint", name, "--root", root, "--name", "web", "--stop", "--use", "clone")
    scene.lab.runc.delete(name)

    def words(container_id: str) -> list[str]:
        bundle = str(scene.bundle(container_id))
        return ["restore", "web", "--bundle", bundle, "--id", container_id, "--root", root, "--detach"]

    whole = scene.lab.new_id("whole")
    began = time.monotonic()
    scene.torpor(*words(whole))
    whole_s = time.monotonic() - began
    # What it made can sleep again.
    scene.torpor("checkpoint", whole, "--root", root, "--name", "again")
    scene.lab.runc.delete(whole)
    for point in range(TRIES):
        container_id = scene.lab.new_id(f"i{point}")
        status = interrupted(scene, words(container_id), whole_s * (0.3 + 0.6 * point / TRIES))
        scene.settle()
        if status == 0:
            assert scene.lab.runc.state(container_id)["status"] == "running"
            scene.lab.runc.delete(container_id)
        else:
            assert not scene.lab.runc.state(container_id), f"try {point}"
        assert not mounts_under(f"{scene.lab.runc.root}/"), f"try {point}"


@pytest.mark.soak
def test_restore_that_nobody_can_end_any_more(scene: Scene) -> None:
    """Between the engine's part and the container's first step: it is carried through."""
    name = scene.lab.new_id()
    first = scene.lab.runc.run(scene.bundle(name), name)
    until(lambda: first.last_tick() > 5)
    root = str(scene.lab.runc.root)
    scene.torpor("checkpoint", name, "--root", root, "--name", "web", "--stop", "--use", "clone")
    scene.lab.runc.delete(name)
    met = 0
    for _ in range(3 * TRIES):  # a machine that is busy may look too late
        if met == TRIES:
            break
        container_id = scene.lab.new_id("h")
        bundle = str(scene.bundle(container_id))
        words = ["restore", "web", "--bundle", bundle, "--id", container_id, "--root", root, "--detach"]

        def held(container_id: str = container_id) -> bool:
            found = scene.torpor.state_path.glob(f"containers/*/{container_id}/held")
            return any(path.exists() for path in found)

        status = interrupted(scene, words, held)
        assert status in (0, None)
        met += status == 0
        assert scene.lab.runc.state(container_id)["status"] == "running"
        scene.lab.runc.delete(container_id)
    assert met == TRIES if soak.SOAK else met


# When the restored container is to be noted as held, the memory file system is full, or the call is killed.
UNNOTED = """
import os, signal, sys
from shim import state
from shim.cli.main import main

end = sys.argv.pop(1)
advance = state.advance

def unnoted(directory, found, phase):
    if phase == "held" and end == "full":
        raise OSError(28, "No space left on device")
    if phase == "held":
        os.kill(os.getpid(), signal.SIGKILL)
    return advance(directory, found, phase)

state.advance = unnoted
main()
"""


@pytest.mark.parametrize("end", ["full", "killed"])
def test_a_restore_that_fails_behind_its_engine_is_undone(scene: Scene, end: str) -> None:
    name = scene.lab.new_id()
    first = scene.lab.runc.run(scene.bundle(name), name)
    until(lambda: first.last_tick() > 5)
    root = str(scene.lab.runc.root)
    scene.torpor("checkpoint", name, "--root", root, "--name", "web", "--stop")
    scene.lab.runc.delete(name)
    target = scene.lab.new_id("f")
    words = ["restore", "web", "--bundle", str(scene.bundle(target)), "--root", root, "-d", "--id", target]
    failed = subprocess.run(
        [sys.executable, "-c", UNNOTED, end, *words],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env={**os.environ, CONF_VARIABLE: str(scene.torpor.conf_path), "PATH": SEARCH_PATH},
        check=False,
    )
    scene.settle()
    if end == "full":
        assert (failed.returncode, "No space left" in failed.stderr) == (1, True), failed.stderr
        until(lambda: not scene.residue(target), what=f"{scene.residue(target)}")
    else:
        assert failed.returncode == -signal.SIGKILL
        assert scene.lab.runc.state(target)["status"] == "paused"
    scene.torpor(*words)
    assert scene.lab.runc.state(target)["status"] == "running"
    scene.lab.runc.delete(target)


# The checkpoint is killed when it has replaced an image, and before its source may die.
REPLACED = """
import os, signal
from shim import signals
from shim.cli.main import main

signals.too_late = lambda: os.kill(os.getpid(), signal.SIGKILL)
main()
"""


def test_a_killed_checkpoint_gives_back_what_it_replaced(scene: Scene) -> None:
    name = scene.lab.new_id()
    output = scene.lab.runc.run(scene.bundle(name), name)
    until(lambda: output.last_tick() > 0)
    words = ["checkpoint", name, "--root", str(scene.lab.runc.root), "--name"]
    scene.torpor(*words, "web")
    manifest = scene.torpor.image_path("web") / "manifest.json"
    old = manifest.read_bytes()
    killed = subprocess.run(
        [sys.executable, "-c", REPLACED, *words, "web", "--stop", "--replace"],
        stdin=subprocess.DEVNULL,
        env={**os.environ, CONF_VARIABLE: str(scene.torpor.conf_path), "PATH": SEARCH_PATH},
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL
    scene.settle()
    assert manifest.read_bytes() != old
    scene.torpor(*words, "other")
    assert manifest.read_bytes() == old
    store = Store(scene.torpor.store_path)
    store.verify(store.resolve(layout.Reference(namespace="", name="web")), pages=True)
    assert not list(scene.torpor.store_path.glob("replaced/*"))
    scene.lab.runc.delete(name)
    assert not scene.residue(name)


def test_a_log_is_appended_to_and_an_error_is_told(scene: Scene) -> None:
    name = scene.lab.new_id()
    first = scene.lab.runc.run(scene.bundle(name), name)
    until(lambda: first.last_tick() > 5)
    root = str(scene.lab.runc.root)
    scene.torpor("checkpoint", name, "--root", root, "--name", "web", "--stop")
    scene.lab.runc.delete(name)
    log = scene.lab.path / "log"
    log.write_text("precious\n")
    target = scene.lab.new_id("t")
    words = ["restore", "web", "--bundle", str(scene.bundle(target)), "--root", root, "-d", "--log", str(log)]
    scene.torpor(*words, "--id", target)
    until(lambda: "tick" in log.read_text())
    assert log.read_text().startswith("precious\ntick ")
    other = scene.lab.new_id("t")
    refused = scene.torpor(*words, "--id", other, check=False)
    assert refused.returncode == 1
    assert "has used it" in refused.stderr
    scene.lab.runc.delete(target)
