"""A dry run of a checkpoint and of a restore says what the real one would meet, and leaves nothing behind."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from compat import profile
from engines.api import AbstractNeed, LockNeed
from engines.criu import processor
from engines.criu.images import ImageReader
from engines.criu.inspect import inspect
from tests.integration.test_verbs_kill import Scene
from tests.support.containers import PREFIX, command, lab, mounts_under, tool, until

pytestmark = pytest.mark.engine

Edit = Callable[[dict[str, Any]], object]


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    with lab(tmp_path) as inner:
        yield Scene(inner)


def test_a_processor_that_criu_wrote_down_is_read(tmp_path: Path):
    command(tool("criu"), "cpuinfo", "dump", "-D", tmp_path)
    written = processor.written_flags(ImageReader(tmp_path, PREFIX / "python"))
    assert written is not None
    known = {name for names in processor.BITS.values() for name in names.values()}
    assert set(written) == known & set(profile.load(None).cpu_flags)


HOLDS = """
import ctypes, fcntl, mmap, os, socket, time
zombie = os.fork() or os._exit(0)
os.waitid(os.P_PID, zombie, os.WEXITED | os.WNOWAIT)
leader = os.fork()
if not leader:
    os.setsid(); os.fork() or time.sleep(99); os._exit(0)
os.waitpid(leader, 0)
os.makedirs('/data/home/run'); os.chdir('/data/home')
there = os.open('/data', os.O_RDONLY)
os.mkfifo('/data/fifo'); end = os.open('/data/fifo', os.O_RDWR)
listeners = [socket.socket(socket.AF_UNIX) for _ in range(2)]
for listener, path in zip(listeners, ('run/sock', '@abstract'.replace('@', chr(0)))):
    listener.bind(path); listener.listen()
libc = ctypes.CDLL(None)
watch = libc.inotify_init1(0)
assert libc.inotify_add_watch(watch, b'/data/home/run', 0x100) > 0
whole = open('/data/whole', 'w'); fcntl.flock(whole, fcntl.LOCK_SH)
part = open('/data/part', 'w'); fcntl.lockf(part, fcntl.LOCK_EX, 10, 5)
open('/data/leased', 'w').close(); leased = open('/data/leased')
fcntl.fcntl(leased, fcntl.F_SETLEASE, fcntl.F_RDLCK)
port = socket.socket(socket.AF_INET6)
for level, option, value in ((0, 15, 1), (41, 26, 1), (1, 25, b'lo')):
    port.setsockopt(level, option, value)
port.bind(('::1', 7))
room = open('/dev/shm/room', 'wb'); room.write(b'z' * (8 << 20)); room.flush()
gone = open('/dev/shm/gone', 'wb'); gone.write(b'z' * (8 << 20)); gone.flush(); os.unlink('/dev/shm/gone')
shared = mmap.mmap(-1, 8 << 20); shared.write(b'z' * (8 << 20))
print('ready', zombie, leader, flush=True); time.sleep(99)
"""


def test_what_tasks_hold_is_read_from_the_image(scene: Scene):
    name = scene.lab.new_id()
    output = scene.lab.runc.run(scene.lab.bundle(name, ["python", "-IS", "-c", HOLDS]), name)
    until(lambda: "ready" in output.text, what=f"it is ready: {output.text}")
    options = ("--name", "web", "--stop", "--full-copy")
    scene.torpor("checkpoint", name, "--root", scene.lab.runc.root, *options)
    (image_path,) = scene.torpor.store_path.glob("images/*/*/checkpoint")
    needs = inspect(image_path, PREFIX / "python")
    assert needs.dead_pids == tuple(int(number) for number in output.text.split()[1:])
    held = {(need.path, need.kind, need.use) for need in needs.files if need.path.startswith("/data")}
    assert held == {
        ("/data/home", "directory", "working-directory"),
        ("/data", "directory", "open"),
        ("/data/fifo", "fifo", "open"),
        ("/data/home/run", "directory", "socket"),
        ("/data/home/run/sock", "socket", "socket"),
        ("/data/home/run", "any", "watched"),
        ("/data/whole", "file", "open"),
        ("/data/part", "file", "open"),
        ("/data/leased", "file", "open"),
    }
    assert {need.path for need in needs.files if need.writable} >= {"/data/whole", "/data/part"}
    assert needs.abstract == (AbstractNeed(name=b"abstract".hex(), kind="stream"),)
    assert needs.memory_bytes >= 24 << 20, "shared memory and file systems in memory count"
    assert {(need.port, need.freebind, need.v6only, need.interface) for need in needs.sockets} == {
        (7, True, True, "lo")
    }
    assert set(needs.locks) == {
        LockNeed(path="/data/whole", kind="flock", exclusive=False),
        LockNeed(path="/data/leased", kind="lease", exclusive=False),
        LockNeed(path="/data/part", kind="range", exclusive=True, first=5, last=14),
    }


def start(scene: Scene) -> str:
    name = scene.lab.new_id()
    output = scene.lab.runc.run(scene.bundle(name), name)
    until(lambda: output.last_tick() > 2, what="it counts")
    return name


def foresee(scene: Scene, name: str, *options: str) -> tuple[int, dict[str, str]]:
    """Exit status of a dry checkpoint, and its findings' severity by rule."""
    words = ("checkpoint", name, "--root", scene.lab.runc.root, "--dry-run", "--json", *options)
    done = scene.torpor(*words, check=False)
    assert done.stdout, done.stderr
    findings = json.loads(done.stdout)["findings"]
    return done.returncode, {finding["rule"]: finding["severity"] for finding in findings}


def test_a_checkpoint_is_foreseen_without_a_freeze(scene: Scene):
    name = start(scene)
    status, found = foresee(scene, name)
    assert status == 0, found
    assert "refuse" not in found.values()
    assert scene.lab.runc.state(name)["status"] == "running"
    assert not list(scene.torpor.store_path.glob("images/*"))

    assert foresee(scene, name, "--name", "free")[0] == 0
    status, found = foresee(scene, name, "--name", "no name")
    assert (status, found["image.name"]) == (1, "refuse")

    # A session of exec is not in the image: that is told, and no obstacle.
    scene.lab.runc("exec", "-d", name, "sh", "-c", "exec sleep 100 >/dev/null 2>&1 </dev/null")
    status, found = foresee(scene, name)
    assert (status, found["criu.foresee.session"]) == (0, "warn")


def test_what_a_checkpoint_would_meet_is_named(scene: Scene):
    name = scene.lab.new_id()
    program = "import time; print('ready', flush=True); time.sleep(99)"
    plain = scene.lab.bundle(name, ["python", "-IS", "-c", program])
    output = scene.lab.runc.run(plain, name)
    until(lambda: "ready" in output.text, what="it is ready")
    status, found = foresee(scene, name)
    assert (status, found["rootfs.kind"]) == (1, "refuse")
    assert foresee(scene, name, "--full-copy")[0] == 0


def test_a_restore_is_rehearsed(scene: Scene):
    source = start(scene)
    root = scene.lab.runc.root
    words = ("--root", root, "--name", "web", "--stop", "--use", "clone")
    scene.torpor("checkpoint", source, "--root", root, "--name", "web")
    assert foresee(scene, source, "--name", "web")[1]["image.name"] == "refuse"
    assert foresee(scene, source, "--name", "web", "--replace")[0] == 0
    scene.torpor("checkpoint", source, *words, "--replace")
    scene.lab.runc.delete(source)
    assert scene.torpor("compat", "check", "web").returncode == 0

    target = scene.lab.new_id("t")
    bundle = scene.bundle(target)
    document: dict[str, Any] = json.loads((bundle / "config.json").read_text())

    def rehearse(edit: Edit = lambda _: None, *options: str) -> tuple[int, str]:
        changed = json.loads(json.dumps(document))
        edit(changed)
        (bundle / "config.json").write_text(json.dumps(changed))
        words = ("restore", "web", "--bundle", bundle, "--root", root, "--dry-run", *options)
        done = scene.torpor(*words, check=False)
        return done.returncode, done.stdout + done.stderr

    for _ in range(2):
        status, said = rehearse()
        assert status == 0, said
        assert "can be restored" in said
    assert not list((bundle / "upper").iterdir()), "the changes of the image went into the container"
    assert not list(scene.torpor.store_path.glob("rehearsal-*"))
    assert not mounts_under("rehearsal-")

    def spoil(changed: dict[str, Any]) -> None:
        entry = {"destination": "/new", "type": "bind", "source": "/etc", "options": ["rbind"]}
        changed["mounts"].append(entry)
        changed["process"].update(user={"uid": 7, "gid": 7}, terminal=True)

    status, said = rehearse(spoil)
    assert status == 1, said
    for rule in ("mounts.added", "spec.edit.identity", "spec.terminal"):
        assert f"refuse   {rule}:" in said

    status, said = rehearse(lambda changed: changed["process"].update(args=["other"]))
    assert status == 0, said
    assert "warn     spec.edit.ignored:" in said


def test_a_restore_under_an_id_that_is_taken(scene: Scene):
    source = start(scene)
    root = scene.lab.runc.root
    scene.torpor("checkpoint", source, "--root", root, "--name", "web")
    bundle = scene.bundle(scene.lab.new_id("t"))
    words = ("restore", "web", "--bundle", bundle, "--root", root, "--dry-run")
    done = scene.torpor(*words, "--id", source, check=False)
    assert done.returncode == 1
    assert "restore.id" in done.stdout
    assert scene.lab.runc.state(source)["status"] == "running"
