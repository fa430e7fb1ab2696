"""torpor-runtime is killed in the middle of `checkpoint` and of a restoring `create`, as callers can do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shim.bundle import hostname
from shim.images.manifest import parse_manifest
from shim.images.seal import check_files
from tests.support import soak
from tests.support.containers import (
    CHECKOUT,
    SEARCH_PATH,
    Lab,
    Output,
    command,
    frozen,
    kill_and_wait,
    lab,
    live,
    make_rootfs,
    mounts_under,
    processes_with,
    until,
)
from tests.support.torpor import Torpor

pytestmark = pytest.mark.engine

PORT = 7000


class Scene:
    """A lab, an installation of torpor, and containers on overlays of one container image."""

    def __init__(self, inner: Lab) -> None:
        self.lab = inner
        self.torpor = Torpor(inner.path / "torpor")
        self.lower = make_rootfs(inner.path / "lower")
        self.network = inner.network()

    def bundle(self, name: str, **spec: object) -> Path:
        bundle = self.lab.bundle(
            name,
            live("--port", str(PORT), "--file", "/data/log"),
            netns_path=self.network.pod_path,
            rootfs=Path("rootfs"),
            **spec,
        )
        places = [bundle / part for part in ("rootfs", "upper", "work")]
        for path in places:
            path.mkdir()
        options = f"lowerdir={self.lower},upperdir={places[1]},workdir={places[2]}"
        command("mount", "-t", "overlay", "overlay", "-o", options, places[0])
        self.lab.on_close(lambda: command("umount", "--lazy", places[0], check=False))
        return bundle

    def call(self, *words: str | Path, output: Output | None = None) -> subprocess.Popen[bytes]:
        """Start torpor-runtime in a session of its own, as a caller's shim does."""
        stream = output.write_fd if output else subprocess.DEVNULL
        process = subprocess.Popen(
            [
                *(self.torpor.runtime, "--root", self.lab.runc.root),
                *("--log", self.lab.path / "log.json", "--log-format", "json", *words),
            ],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            env={**os.environ, "PATH": SEARCH_PATH},
            start_new_session=True,
        )
        if output:
            output.handed_over()
        return process

    def settle(self) -> None:
        """Wait until no guardian and no engine process is at work."""
        path = str(self.torpor.state_path)
        until(lambda: not processes_with(path), timeout_s=30, what="the guardian ends")

    def residue(self, container_id: str) -> list[str]:
        """What is left of a container: state, tasks, mounts, network locks, frozen groups."""
        left = [str(path) for path in self.torpor.state_path.glob(f"containers/*/{container_id}")]
        left += [f"runc: {container_id}"] if self.lab.runc.state(container_id) else []
        left += [f"process: {line}" for _, line in processes_with(container_id)]
        left += [f"mount: {point}" for point in mounts_under(f"{self.lab.runc.root}/")]
        left += [f"lock: {table}" for table in self.network.tables() if table.startswith("CRIU")]
        left += [f"frozen: {path}" for path in frozen(self.lab.tag)]
        return left + [str(path) for path in self.torpor.store_path.glob("staging/*")]


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    with lab(tmp_path) as inner:
        yield Scene(inner)


def check_complete_or_absent(image: Path, *, stopping: bool) -> bool:
    """Whether there is an image. One with a manifest must be whole; without, it is nobody's image yet."""
    path = image / "torpor-manifest.json"
    if path.exists():
        manifest = parse_manifest(path.read_bytes())
        check_files(manifest, checkpoint_path=image, extras_path=image, pages=True, what=str(image))
        return True
    # After the thaw of a container that runs on, CRIU's own files may be there.
    assert not stopping or not list(image.glob("*.img"))
    return False


@pytest.mark.soak
@pytest.mark.parametrize("leave_running", [True, False], ids=["leave-running", "stop"])
def test_killed_checkpoint(request: pytest.FixtureRequest, scene: Scene, leave_running: bool) -> None:
    name = scene.lab.new_id()
    bundle = scene.bundle(name)
    output = scene.lab.runc.run(bundle, name)
    until(lambda: output.last_tick() > 0)
    client = scene.lab.client(scene.network, PORT)
    flags = ["--leave-running"] if leave_running else []
    whole_s = 60.0
    for number in range(2):  # the first one is slower
        image = scene.lab.path / f"whole{number}"
        began = time.monotonic()
        assert scene.call("checkpoint", "--image-path", image, "--leave-running", name).wait(60) == 0
        whole_s = min(whole_s, time.monotonic() - began)
        client.goes_on()
        # Without a work directory CRIU's log lies among the images.
        assert (image / "dump.log").is_file()
        assert check_complete_or_absent(image, stopping=False)
    seen = {"undone": 0, "done": 0, "stopped": 0}
    for point, moment in enumerate(soak.moments()):
        image, work = scene.lab.path / f"i{point}", scene.lab.path / f"w{point}"
        process = scene.call("checkpoint", "--image-path", image, "--work-path", work, *flags, name)
        time.sleep(whole_s * moment)
        kill_and_wait(process.pid)
        status = process.wait()
        scene.settle()
        where = f"{moment:.3f} of {whole_s:.3f} s, exit {status}"
        if scene.lab.runc.state(name).get("status") == "running":
            client.goes_on()
            assert leave_running or status != 0, where
            seen["undone" if status else "done"] += 1
            if status != 0:
                check_complete_or_absent(image, stopping=not leave_running)
        else:
            # The dump had been allowed to end the source: then the image is complete.
            assert not leave_running, where
            assert check_complete_or_absent(image, stopping=True), where
            seen["stopped"] += 1
            break
        assert not scene.residue("no-such-container"), where
    assert seen["undone"] >= soak.POINTS // 4
    soak.tell_kills(request, "criu", {f"`checkpoint` verbs {outcome}": n for outcome, n in seen.items()})


@pytest.mark.soak
def test_killed_restore_at_create(request: pytest.FixtureRequest, scene: Scene) -> None:
    name = scene.lab.new_id()
    bundle = scene.bundle(name)
    first = scene.lab.runc.run(bundle, name)
    until(lambda: first.last_tick() > 5)
    scene.torpor(
        "checkpoint", name, "--root", scene.lab.runc.root, "--name", "web", "--stop", "--use", "clone"
    )
    scene.lab.runc.delete(name)
    asked = {"torpor.dev/restore-from": "web"}

    def create(label: str) -> tuple[str, subprocess.Popen[bytes], Output]:
        container_id, output = scene.lab.new_id(label), Output()
        target = scene.bundle(container_id, annotations=asked)
        process = scene.call(
            *("create", "--bundle", target, "--pid-file", target / "pid", container_id), output=output
        )
        return container_id, process, output

    began = time.monotonic()
    container_id, process, output = create("whole")
    assert process.wait(60) == 0, output.text
    whole_s = time.monotonic() - began
    assert scene.call("delete", "--force", container_id).wait(30) == 0
    assert not output.ticks(), "it ran before start"
    seen = {"undone": 0, "held": 0}
    for point, moment in enumerate(soak.moments()):
        container_id, process, output = create(f"k{point}")
        time.sleep(whole_s * moment)
        process.send_signal(signal.SIGKILL)
        seen["undone" if process.wait() else "held"] += 1
        scene.settle()
        # What every caller sends after a failed create.
        assert scene.call("delete", "--force", container_id).wait(30) == 0
        scene.settle()
        until(lambda: not scene.residue(container_id), what=f"point {point}: {scene.residue(container_id)}")
        assert not output.ticks(), f"point {point}: it ran"
    scene.torpor("images", "verify", "web")
    container_id, process, output = create("last")
    assert process.wait(60) == 0, output.text
    assert scene.call("start", container_id).wait(30) == 0
    until(lambda: output.last_tick() > first.last_tick())
    client = scene.lab.client(scene.network, PORT)
    client.goes_on()
    assert scene.call("kill", container_id, "KILL").wait(30) == 0
    until(lambda: scene.lab.runc.state(container_id).get("status") == "stopped")
    assert scene.call("delete", container_id).wait(30) == 0
    assert not scene.residue(container_id)
    soak.tell_kills(request, "criu", {f"`create` verbs {outcome}": n for outcome, n in seen.items()})


def test_a_second_create_of_a_held_container_changes_nothing(scene: Scene) -> None:
    name = scene.lab.new_id()
    bundle = scene.bundle(name)
    first = scene.lab.runc.run(bundle, name)
    until(lambda: first.last_tick() > 5)
    scene.torpor("checkpoint", name, "--root", scene.lab.runc.root, "--name", "web", "--stop")
    scene.lab.runc.delete(name)
    container_id, output = scene.lab.new_id("held"), Output()
    target = scene.bundle(container_id, annotations={"torpor.dev/restore-from": "web"})
    words = ("create", "--bundle", target, "--pid-file", target / "pid", container_id)
    assert scene.call(*words, output=output).wait(60) == 0, output.text
    again = Output()
    assert scene.call(*words, output=again).wait(60) != 0
    until(again.ended)
    assert "already" in again.text  # runc's own words
    assert not output.ticks()
    assert scene.call("start", container_id).wait(30) == 0
    until(lambda: output.last_tick() > first.last_tick())
    assert scene.call("delete", "--force", container_id).wait(30) == 0
    assert not scene.residue(container_id)


def test_a_container_with_a_user_namespace_wakes_from_the_store(scene: Scene) -> None:
    """CRIU opens the image from inside the user namespace, where root is nobody in particular."""
    loop = "i=0; while :; do i=$((i+1)); echo tick $i; sleep 0.05; done"

    def bundle(name: str, **spec: object) -> Path:
        made = scene.bundle(name, **spec)
        document = json.loads((made / "config.json").read_text())
        document["process"]["args"] = ["sh", "-c", loop]
        document["mounts"] = [
            mount
            for mount in document["mounts"]
            if mount["destination"] == "/usr" or "rbind" not in mount["options"]
        ]
        document["mounts"] = [mount for mount in document["mounts"] if mount["destination"] != "/sys"]
        linux = document["linux"]
        linux["namespaces"] = [
            {"type": kind["type"]} if kind["type"] == "network" else kind for kind in linux["namespaces"]
        ] + [{"type": "user"}]
        linux["uidMappings"] = linux["gidMappings"] = [{"containerID": 0, "hostID": 100000, "size": 65536}]
        (made / "config.json").write_text(json.dumps(document))
        return made

    for path in (scene.lab.path, *scene.lab.path.parents):
        if path != Path("/tmp"):  # the mapped root must get as far as its root file system
            path.chmod(path.stat().st_mode | 0o011)
    name = scene.lab.new_id()
    first = scene.lab.runc.run(bundle(name), name)
    until(lambda: first.last_tick() > 5)
    scene.torpor("checkpoint", name, "--root", scene.lab.runc.root, "--name", "web", "--stop")
    scene.lab.runc.delete(name)
    container_id, output = scene.lab.new_id("t"), Output()
    target = bundle(container_id, annotations={"torpor.dev/restore-from": "web"})
    words = ("create", "--bundle", target, "--pid-file", target / "pid", container_id)
    assert scene.call(*words, output=output).wait(60) == 0, output.text
    assert scene.call("start", container_id).wait(30) == 0
    until(lambda: output.last_tick() > first.last_tick())
    assert scene.call("delete", "--force", container_id).wait(30) == 0
    assert not scene.residue(container_id)


# When the container is to be noted as held, or as running, the call is killed.
KILLED = """
import os, signal
from shim import entry, state

advance = state.advance

def killed(directory, found, phase):
    if phase == {phase!r}:
        os.kill(os.getpid(), signal.SIGKILL)
    return advance(directory, found, phase)

state.advance = killed
entry.main({conf!r}, "RUNTIME", "")
"""


def killed_at(scene: Scene, code: str, *words: str | Path, **more: str) -> None:
    """A call of torpor-runtime that is killed where `code` says."""
    code = code.format(conf=str(scene.torpor.conf_path), **more)
    argv = ["0", "torpor-runtime", "--root", str(scene.lab.runc.root), *map(str, words)]
    environment = {**os.environ, "PATH": SEARCH_PATH}
    done = subprocess.run([sys.executable, "-c", code, *argv], check=False, env=environment, cwd=CHECKOUT)
    assert done.returncode == -signal.SIGKILL
    scene.settle()


# When the dump is complete and the network locked, all die that could undo it. CRIU dies as under its
# guardian, with the container frozen, so that no task meets a socket in repair mode.
KILLED_WHOLE = """
import os, signal
from engines.criu import cgroups
from engines.criu.journal import Journal
from engines.criu.undo import call_processes
from shim import checkpoint, entry
from tests.support.containers import processes_with

def killed(job, phase, info):
    directory = job.source.directory
    if phase == "dumped":
        journal = Journal.read(directory)
        cgroups.freezer(journal.groups).freeze(timeout_s=5)
        guardians = [pid for pid, line in processes_with(str(directory)) if "guardian.py" in line]
        for pid in (*guardians, *call_processes(journal), os.getpid()):
            os.kill(pid, signal.SIGKILL)

checkpoint._Job._on_phase = killed
entry.main({conf!r}, "RUNTIME", "")
"""


def test_the_next_checkpoint_undoes_one_that_was_killed_with_its_guardian(scene: Scene) -> None:
    name = scene.lab.new_id()
    output = scene.lab.runc.run(scene.bundle(name), name)
    until(lambda: output.last_tick() > 0)
    client = scene.lab.client(scene.network, PORT)
    client.goes_on()
    first, image = scene.lab.path / "first", scene.lab.path / "image"
    killed_at(scene, KILLED_WHOLE, "checkpoint", "--image-path", first, "--leave-running", name)
    assert [table for table in scene.network.tables() if table.startswith("CRIU")]
    assert scene.call("checkpoint", "--image-path", image, "--leave-running", name).wait(60) == 0
    client.goes_on()
    assert not first.exists()
    assert check_complete_or_absent(image, stopping=False)
    assert not scene.residue("no-such-container")


def test_delete_undoes_all_of_a_killed_restore(scene: Scene) -> None:
    """The pod's host name and root file system are the next container's."""
    name = scene.lab.new_id()
    first = scene.lab.runc.run(scene.bundle(name), name)
    until(lambda: first.last_tick() > 0)
    scene.torpor("checkpoint", name, "--root", scene.lab.runc.root, "--name", "web", "--stop")
    scene.lab.runc.delete(name)
    uts_path = scene.lab.path / "uts"
    uts_path.touch()
    command("unshare", f"--uts={uts_path}", "hostname", "pod")
    scene.lab.on_close(lambda: command("umount", uts_path, check=False))
    container_id = scene.lab.new_id("t")
    target = scene.bundle(container_id, annotations={"torpor.dev/restore-from": "web"})
    document = json.loads((target / "config.json").read_text())
    uts = next(kind for kind in document["linux"]["namespaces"] if kind["type"] == "uts")
    uts["path"] = str(uts_path)
    (target / "config.json").write_text(json.dumps(document))
    words = ("create", "--bundle", target, "--pid-file", target / "pid", container_id)
    killed_at(scene, KILLED, *words, phase="held")
    assert scene.lab.runc.state(container_id)["status"] == "paused"
    assert (target / "rootfs" / "data" / "log").exists()
    hostname(uts_path, "box")  # as CRIU has left it, where the call is killed a little earlier
    assert scene.call("delete", container_id).wait(30) == 0
    assert not (target / "rootfs" / "data" / "log").exists()
    assert hostname(uts_path) == "pod"
    until(lambda: not scene.residue(container_id), what=f"{scene.residue(container_id)}")


def test_a_start_that_was_killed_is_carried_through_by_the_next(scene: Scene) -> None:
    name = scene.lab.new_id()
    first = scene.lab.runc.run(scene.bundle(name), name)
    until(lambda: first.last_tick() > 0)
    scene.torpor("checkpoint", name, "--root", scene.lab.runc.root, "--name", "web", "--stop")
    scene.lab.runc.delete(name)
    container_id, output = scene.lab.new_id("t"), Output()
    target = scene.bundle(container_id, annotations={"torpor.dev/restore-from": "web"})
    words = ("create", "--bundle", target, "--pid-file", target / "pid", container_id)
    assert scene.call(*words, output=output).wait(60) == 0, output.text
    killed_at(scene, KILLED, "start", container_id, phase="running")
    until(lambda: output.last_tick() > first.last_tick())
    assert scene.call("delete", container_id).wait(30) == 1
    assert scene.lab.runc.state(container_id)["status"] == "running"
    assert scene.call("start", container_id).wait(30) == 0
    assert scene.call("pause", container_id).wait(30) == 0
    assert scene.call("delete", "--force", container_id).wait(30) == 0
    assert not scene.residue(container_id)
    assert len(list(scene.torpor.store_path.glob("consumed/*"))) == 1
