"""gVisor containers that sleep and wake by the `torpor` command alone, and what is looked at before."""

from __future__ import annotations

import errno
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from engines.api import CheckpointRequest, EngineTimeout, NotSupported, Phase, PhaseInfo, RestoreRequest
from engines.gvisor.journal import Journal
from tests.support.containers import bind, command, lab, until
from tests.support.gvisor import GvisorLab
from tests.support.torpor import Torpor

pytestmark = pytest.mark.engine


@pytest.fixture
def place(tmp_path: Path) -> Iterator[GvisorLab]:
    (tmp_path / "lab").mkdir()
    with lab(tmp_path / "lab") as inner:
        yield GvisorLab(inner)


@pytest.fixture
def torpor(tmp_path: Path) -> Torpor:
    return Torpor(tmp_path / "torpor")


def ticks(path: Path) -> list[int]:
    return [int(number) for number in re.findall(r"^tick (\d+)$", path.read_text(), re.MULTILINE)]


def test_one_sleeps_and_wakes_without_a_caller(place: GvisorLab, torpor: Torpor, tmp_path: Path) -> None:
    source = place.start()
    torpor("checkpoint", source, "--root", place.runsc.root, "--name", "alone", "--stop")
    until(place.outputs[source].ended, what="its output is read to the end")
    last = place.progress(source)
    assert place.residue(source) == []
    assert torpor.json("images", "ls")[0]["engine"] == "gvisor"
    torpor("images", "verify", "alone")
    target = place.prepare()
    bundle, log = place.bundle(target), tmp_path / "log"
    said = torpor("restore", "alone", "--bundle", bundle, "--dry-run").stdout
    assert "can be restored" in said
    to = ("--bundle", bundle, "--id", target, "--root", place.runsc.root, "--detach", "--log", log)
    torpor("restore", "alone", *to)
    until(lambda: len(ticks(log)) > 5, what="it counts")
    assert ticks(log)[0] == last + 1
    assert torpor.json("ps")[0]["status"] == "running"
    again = torpor("restore", "alone", "--bundle", bundle, "--id", f"{target}-b", "--detach", check=False)
    assert again.returncode == 1
    assert "has used it" in again.stderr
    place.kill(target)


def test_what_gvisor_cannot_save_is_refused_and_the_container_runs_on(
    place: GvisorLab, tmp_path: Path
) -> None:
    (tmp_path / "volume").mkdir()
    script = "exec 3>/data/gone; rm /data/gone; i=0; while :; do i=$((i+1)); echo tick $i; sleep 0.05; done"
    source = place.start(
        args=("/bin/sh", "-c", script), mounts=[bind(tmp_path / "volume", "/data", writable=True)]
    )
    until(lambda: place.progress(source) > 2, what="it counts")
    pid, image = place.pid(source), place.image_root / "i"
    with pytest.raises(NotSupported, match="the deleted file") as refused:
        place.engine(source).checkpoint(
            CheckpointRequest(
                container_id=source, bundle_path=place.bundle(source), image_path=image, timeout_s=60
            )
        )
    assert refused.value.after == "running"
    assert not image.exists()
    before = place.progress(source)
    until(lambda: place.progress(source) > before, what="it goes on")
    assert place.pid(source) == pid


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        ("sleep 4242 & sleep 0.1", True),
        ("setsid sleep 4242 </dev/null >/dev/null 2>&1 & sleep 0.1", True),
        ("sleep 0.1 & wait", False),
    ],
)
def test_what_an_exec_session_left_behind_is_refused_before_anything_ends(
    place: GvisorLab, torpor: Torpor, words: str, refused: bool
) -> None:
    script = "setsid sleep 777 </dev/null >/dev/null 2>&1 & (setsid sleep 778 &); echo tick 1; "
    source = place.start(args=("/bin/sh", "-c", f"{script}i=1; while :; do echo tick $i; sleep 0.1; done"))
    until(lambda: place.progress(source) > 0, what="it runs")
    session = [torpor.runtime_runsc, "--root", place.runsc.root, "exec", source, "/bin/sh", "-c", words]
    nothing = subprocess.DEVNULL  # what is left behind would hold a pipe open
    subprocess.run(session, stdin=nothing, stdout=nothing, stderr=nothing, check=True, timeout=60)
    stop = ("checkpoint", source, "--root", place.runsc.root, "--name", "alone", "--stop")
    said = torpor(*stop, check=False)
    assert (said.returncode, "left sleep behind" in said.stderr) == ((1, True) if refused else (0, False)), (
        said.stderr
    )
    if refused:
        assert place.pid(source)
        assert torpor.json("images", "ls") == []
        leftover = place.runsc("exec", source, "pgrep", "-f", "sleep 4242").stdout.split()
        place.runsc("kill", "--pid", leftover[0], source, "KILL")
        torpor(*stop)
    assert place.residue(source) == []


def test_a_node_set_up_otherwise_is_told_before_anything_is_touched(
    place: GvisorLab, torpor: Torpor, tmp_path: Path
) -> None:
    source = place.start()
    torpor("checkpoint", source, "--root", place.runsc.root, "--name", "here")
    for network in ("keep", "keep-closed"):
        to = ("--bundle", place.bundle(place.prepare()), "--network", network, "--dry-run")
        done = torpor("restore", "here", *to, check=False)
        assert done.returncode == 1
        assert "engine gvisor can keep neither connections nor addresses" in done.stderr
    conf = torpor.conf_path.read_text()
    torpor.conf_path.write_text(conf.replace("--platform=systrap", "--platform=ptrace --overlay2=none"))
    target = place.prepare()
    to = ("--bundle", place.bundle(target), "--id", target, "--root", place.runsc.root, "--detach")
    done = torpor("restore", "here", *to, check=False)
    assert done.returncode == 1
    assert "made on the platform systrap, this node's runsc uses ptrace [gvisor.platform]" in done.stderr
    assert "[gvisor.overlay]" in done.stderr
    assert place.residue(target) == []


@pytest.mark.parametrize(("launcher", "engine"), [("runtime_runsc", "criu"), ("runtime", "gvisor")])
def test_an_engine_of_the_other_runtime_is_refused_when_the_container_is_created(
    place: GvisorLab, torpor: Torpor, launcher: str, engine: str
) -> None:
    target = place.prepare(annotations={"torpor.dev/engine": engine})
    create = (getattr(torpor, launcher), "--root", place.runsc.root, "create")
    done = command(*create, "--bundle", place.bundle(target), target, check=False)
    assert done.returncode == 1
    assert f"could not create container '{target}': engine {engine} does not work through" in done.stderr
    assert place.residue(target) == []


# Both ends of two pipes are ready at once, then none is, then one is closed: what no runsc may bring back.
_CLOSED = """
import os, select, signal
epoll, pipes = select.epoll(), [os.pipe(), os.pipe()]
for read_end, write_end in pipes:
    epoll.register(read_end, select.EPOLLIN)
    os.write(write_end, b"x")
assert len(epoll.poll(1)) == 2
for read_end, _ in pipes:
    os.read(read_end, 1)
assert not epoll.poll(0)
gone = pipes[1][0]
epoll.unregister(gone)
[os.close(end) for end in pipes[1]]
signal.signal(signal.SIGUSR1, lambda *_: print("stale" if epoll.poll(0.2) else "none", flush=True))
print("ready", flush=True)
while True:
    signal.pause()
"""


def test_a_closed_descriptor_that_comes_back_was_warned_of(place: GvisorLab) -> None:
    source = place.start(args=("python", "-IS", "-u", "-c", _CLOSED))
    until(lambda: "ready" in place.outputs[source].text, what="it has begun")
    place.runsc("kill", source, "USR1")
    until(lambda: "none" in place.outputs[source].text, what="nothing is ready before")
    engine, target = place.engine(source), place.prepare()
    stats = engine.checkpoint(
        CheckpointRequest(
            container_id=source,
            bundle_path=place.bundle(source),
            image_path=place.image_root / "i",
            timeout_s=60,
        )
    )
    request = RestoreRequest(
        container_id=target,
        bundle_path=place.bundle(target),
        image_path=place.image_root / "i",
        timeout_s=60,
    )
    place.restore(place.engine(target), request)
    place.runsc("kill", target, "USR1")
    said = until(lambda: place.outputs[target].text, what="it says what is ready")
    assert ["closed before" in warning for warning in stats.warnings] == ([True] if "stale" in said else [])
    place.kill(target)


def test_a_dump_whose_commitment_cannot_be_written_is_undone(
    place: GvisorLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the disk is full: nobody was told that the container may end."""
    source = place.start()

    def full(_: Journal) -> bool:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Journal, "update", full)
    with pytest.raises(OSError, match="No space"):
        place.engine(source).checkpoint(
            CheckpointRequest(
                container_id=source,
                bundle_path=place.bundle(source),
                image_path=place.image_root / "i",
                timeout_s=60,
            )
        )
    before = place.progress(source)
    until(lambda: place.progress(source) > before, what="it goes on")


def test_a_dump_that_its_guardian_has_undone_is_none(
    place: GvisorLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever looks after the image takes too long: the container, which runs again, is not ended for it."""
    monkeypatch.setattr("engines.gvisor.calls._GUARDIAN_GRACE_S", 0.0)
    source = place.start()
    image, journal = place.image_root / "i", place.state_path(source) / Journal.FILE

    def look(phase: Phase, _: PhaseInfo) -> None:
        if phase == "dumped":
            until(lambda: not journal.exists(), what="the guardian undoes it")

    with pytest.raises(EngineTimeout, match="give it more time") as late:
        place.engine(source).checkpoint(
            CheckpointRequest(
                container_id=source,
                bundle_path=place.bundle(source),
                image_path=image,
                timeout_s=2,
                on_phase=look,
            )
        )
    assert late.value.after == "running"
    assert not image.exists()
    before = place.progress(source)
    until(lambda: place.progress(source) > before, what="it goes on")
