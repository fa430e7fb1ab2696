"""What makes gVisor's pods work, without runsc: the attendant, the pod's wish, who is awaited, what fits."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engines.gvisor import pod
from engines.gvisor.image import Member, Record
from engines.gvisor.inspect import pod_needs
from engines.gvisor.preflight import _digest
from engines.gvisor.runsc import Task
from shim import annotations, attendant, members, state
from shim.argv import parse
from shim.entry import decide
from shim.errors import AdmissionRefused, ShimError
from shim.images.manifest import seccomp_digest
from shim.state import ContainerState
from tests.support.containers import processes_with, until

CRI = "io.kubernetes.cri."


def notes(kind: str, name: str = "", **more: str) -> dict[str, Any]:
    """A specification with what containerd writes on a pod's container, and torpor's annotations."""
    keys = {f"torpor.dev/{key.replace('_', '-')}": value for key, value in more.items()}
    found = {f"{CRI}container-type": kind, f"{CRI}sandbox-namespace": "ns", **keys}
    return {"annotations": found | ({f"{CRI}container-name": name} if name else {})}


# --- the attendant ---------------------------------------------------------------------------------------


def begin(
    directory: Path, script: str, monkeypatch: pytest.MonkeyPatch, sandbox: int = os.getpid()
) -> subprocess.Popen[bytes]:
    """An attendant that waits by a script; the tests are its parent, as a caller is."""
    started: list[subprocess.Popen[bytes]] = []
    real: Any = subprocess.Popen

    def popen(*argv: Any, **more: Any) -> subprocess.Popen[bytes]:
        started.append(real(*argv, **more))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", popen)
    wait = ["/bin/sh", "-c", script]
    attendant.begin(directory, wait, sandbox=sandbox, name="attendant-of-c1", terminal=True)
    return started[0]


@pytest.mark.parametrize(
    ("script", "status"),
    [
        ("""echo '{"id":"c1","exitStatus":3}'""", 3),
        ("""echo '{"id":"c1","exitStatus":143}'""", 143),
        ("exit 128", 137),
    ],
)
def test_an_attendant_ends_as_its_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, status: int
) -> None:
    process = begin(tmp_path, script, monkeypatch)
    assert attendant.find(tmp_path) == process.pid
    assert (tmp_path / state.HELD).exists()
    attendant.go(tmp_path)
    assert process.wait(10) == status
    assert not (tmp_path / state.HELD).exists()
    assert attendant.has(tmp_path)
    assert attendant.find(tmp_path) is None


@pytest.mark.parametrize("caller", ["ignores", "blocks", "leaves"])
def test_an_attendant_that_was_not_told_to_go_can_be_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caller: str
) -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN if caller == "ignores" else signal.SIG_DFL)
    mask = signal.pthread_sigmask(signal.SIG_SETMASK, [signal.SIGTERM] if caller == "blocks" else [])
    try:
        process = begin(tmp_path, "exit 0", monkeypatch)
        assert signal.getsignal(signal.SIGTERM) is (signal.SIG_IGN if caller == "ignores" else signal.SIG_DFL)
        assert (signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, [])) == (caller == "blocks")
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGTERM, before)
    attendant.end(tmp_path, signal.SIGTERM)
    assert process.wait(10) == -signal.SIGTERM
    attendant.go(tmp_path)  # nobody is there, and nobody waits
    attendant.end(tmp_path)
    with pytest.raises(ShimError, match="is gone"), attendant.streams(tmp_path):
        pass


def test_an_attendant_that_was_not_told_to_go_ends_with_its_sandbox(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with subprocess.Popen(["/bin/sleep", "1000"]) as box:
        process = begin(tmp_path, """echo '{"id":"c1","exitStatus":3}'""", monkeypatch, box.pid)
        watching = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        until(lambda: watching.read_text(), what="it looks at the sandbox")
        assert Path(f"/proc/{process.pid}/fd/0").readlink() == Path("/dev/null")  # not what it waits for
        box.kill()
    assert process.wait(10) == 137


def test_an_attendant_that_cannot_be_noted_does_not_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"{state.ATTENDANT}.new").mkdir()
    with pytest.raises(IsADirectoryError):
        begin(tmp_path, "exit 0", monkeypatch)
    until(lambda: not processes_with(str(tmp_path)), what="it is gone")


def test_streams_are_borrowed_and_given_back(tmp_path: Path) -> None:
    code = f"""
import os, sys
sys.path.insert(0, {os.getcwd()!r})
from pathlib import Path
from shim import attendant
with attendant.streams(Path({str(tmp_path)!r})):
    os.write(1, b"theirs " + os.read(0, 10))
os.write(1, b"ours")
"""
    with subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as theirs:
        (tmp_path / state.ATTENDANT).write_text(f"{theirs.pid} {state.start_time(theirs.pid)}")
        os.kill(theirs.pid, signal.SIGSTOP)  # so that it does not read
        until(lambda: Path(f"/proc/{theirs.pid}/stat").read_text().split()[2] == "T", what="it stands")
        assert theirs.stdin
        theirs.stdin.write(b"words")
        theirs.stdin.flush()
        try:
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=60)
        finally:
            theirs.kill()
        assert theirs.stdout
        assert theirs.stdout.read() == b"theirs words"
    assert done.stdout == b"ours"


def test_a_killed_container_of_runsc_is_told_of_in_runcs_words() -> None:
    call = parse(["kill", "c1", "9"], "runsc")
    assert decide(call, {"HANDLER": "RUNSC"})
    assert not decide(call, {"HANDLER": "RUNTIME"})


# --- the pod's wish --------------------------------------------------------------------------------------


def test_the_pause_container_is_asked_where_pods_wake_up_as_a_whole() -> None:
    spec = notes("sandbox", restore_from="image", use="clone")
    assert not annotations.read(spec, foreign=False).restores
    wish = annotations.read(spec, foreign=False, whole_pod=True)
    assert (wish.restore_from, wish.use, wish.sandbox, wish.namespace) == ("image", "clone", True, "ns")
    assert annotations.read(notes("sandbox"), foreign=False, whole_pod=True).restore_from is None


def test_a_pod_wakes_up_from_one_image() -> None:
    spec = notes("sandbox")
    spec["annotations"] |= {"torpor.dev/restore-from.a": "x", "torpor.dev/restore-from.b": "x"}
    spec["annotations"]["torpor.dev/on-restore-failure.a"] = "cold-start"
    wish = annotations.read(spec, foreign=False, whole_pod=True)
    assert (wish.restore_from, wish.on_failure) == ("x", "fail")
    spec["annotations"]["torpor.dev/on-restore-failure.b"] = "cold-start"
    assert annotations.read(spec, foreign=False, whole_pod=True).on_failure == "cold-start"
    spec["annotations"]["torpor.dev/restore-from.b"] = "y"
    with pytest.raises(AdmissionRefused, match="the images x, y"):
        annotations.read(spec, foreign=False, whole_pod=True)


def test_the_image_of_one_is_the_image_of_all() -> None:
    asked = {"torpor.dev/restore-from.main": "x", "torpor.dev/use.main": "clone"}
    asked["torpor.dev/on-restore-failure.main"] = "cold-start"
    spec = notes("container", "side")
    spec["annotations"] |= asked
    wish = annotations.read(spec, foreign=False, whole_pod=True)
    assert (wish.restore_from, wish.use, wish.on_failure, wish.bare) == ("x", "clone", "cold-start", True)
    assert not annotations.read(spec, foreign=False).restores
    assert not annotations.read(notes("container", "side"), foreign=False, whole_pod=True).restores


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"restore-from.mian": "x"}, "a pod with main, side, and has no container 'mian'"),
        ({"restore-from": "x", "network": "keep"}, "with network: keep"),
        ({"restore-from": "x", "network.main": "keep-closed"}, "with network: keep-closed"),
        ({"restore-from.main": "x", "network": "new"}, ""),
    ],
)
def test_what_a_pod_cannot_have_is_refused_at_its_pause_container(asked: dict[str, str], why: str) -> None:
    class Engine:
        name = "gvisor"
        capabilities = frozenset({"clone"})

    spec = notes("sandbox")
    spec["annotations"] |= {f"torpor.dev/{key}": value for key, value in asked.items()}
    wish = annotations.read(spec, foreign=False, whole_pod=True)
    names = ("", "main", "side")
    with pytest.raises(AdmissionRefused, match=why) if why else contextlib.nullcontext():
        members.check_pod(FakeImage(), Engine(), names, wish)  # type: ignore[arg-type]


# --- who is awaited --------------------------------------------------------------------------------------


def sandbox(path: Path, *awaited: str) -> ContainerState:
    found = ContainerState(
        container_id=path.name,
        root="/r",
        bundle="/b",
        phase="running",
        engine="gvisor",
        image="ns/image",
        digest="sha256:1",
        use="move",
        created="",
        sandbox_id=path.name,
        awaited=awaited,
    )
    path.mkdir(exist_ok=True)
    state.save(path, found)
    return found


class FakeImage:
    digest = "sha256:1"
    reference = "ns/image"


def test_nothing_else_starts_before_all_have_come(tmp_path: Path) -> None:
    path = tmp_path / "pod"
    members.check_cold(path, "c1")  # not restored at all
    sandbox(path, "main", "side")
    with pytest.raises(ShimError, match="before main, side of the image"):
        members.check_cold(path, "c1")
    with pytest.raises(ShimError, match=r"^the true cause; container 'c1' cannot start anew either"):
        members.check_cold(path, "c1", "the true cause")
    sandbox(path)
    members.check_cold(path, "c1")


def test_who_joins_must_be_awaited_and_of_the_same_image(tmp_path: Path) -> None:
    path, image = tmp_path / "pod", FakeImage()
    with pytest.raises(ShimError, match="its pod was not restored from it"):
        members.check_join(path, image, "c1", "main", ("", "main", "side"))  # type: ignore[arg-type]
    found = sandbox(path, "main")
    members.check_join(path, image, "c1", "main", ("", "main", "side"))  # type: ignore[arg-type]
    with pytest.raises(ShimError, match="restored before"):
        members.check_join(path, image, "c1", "side", ("", "main", "side"))  # type: ignore[arg-type]
    state.save(path, replace(found, digest="sha256:2"))
    with pytest.raises(AdmissionRefused, match="name the same image"):
        members.check_join(path, image, "c1", "main", ("", "main", "side"))  # type: ignore[arg-type]


def test_the_pause_container_never_makes_the_pod_run(tmp_path: Path) -> None:
    found = sandbox(tmp_path / "pod", "main")
    with members.joining(tmp_path / "pod", found) as last:
        assert not last


# --- what is in an image ---------------------------------------------------------------------------------


def record(*names: str) -> Record:
    task = Task(pid=7, parent=0, uid=5, name="sh")
    parts = {
        name: Member(spec={"seccomp": f"sha256:{name}", "process": {}}, mounts={}, tasks=(task,))
        for name in names
    }
    return Record(runsc="1", setup={}, spec={}, tasks=(), pod=parts)


@pytest.mark.parametrize(
    ("names", "spec", "why"),
    [
        ((), {}, ""),
        ((), notes("sandbox"), "alone in its sandbox"),
        ((), notes("container", "main"), "alone in its sandbox"),
        (("", "main"), {}, "only as a pod"),
        (("", "main"), notes("sandbox"), ""),
        (("", "main"), notes("container", "main"), ""),
        (("", "main"), notes("container", "side"), "has no container 'side'"),
    ],
)
def test_an_image_becomes_only_what_it_was(names: tuple[str, ...], spec: dict[str, Any], why: str) -> None:
    found = pod.misfit(record(*names), spec)
    assert why in found if why else found == ""


def test_each_container_has_needs_of_its_own(tmp_path: Path) -> None:
    record("", "main").write(tmp_path)
    from engines.gvisor import image

    needs = pod_needs({}, image.record(tmp_path))
    assert set(needs) == {"", "main"}
    assert needs["main"].tasks[0].seccomp_filters == ("sha256:main",)


def test_a_seccomp_profile_has_the_same_digest_in_records_and_manifests() -> None:
    profile = {
        "defaultAction": "SCMP_ACT_ERRNO",
        "syscalls": [{"names": ["read"], "action": "SCMP_ACT_ALLOW"}],
    }
    assert _digest(profile) == seccomp_digest(profile)
