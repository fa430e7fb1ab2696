"""The CRIU engine on real containers: connections, phases, stopped tasks, and what failures leave."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from engines.api import (
    CheckpointRequest,
    DumpFailed,
    EngineTimeout,
    EngineUnavailable,
    ImageCorrupt,
    InvalidRequest,
    NotSupported,
    PhaseInfo,
    ReleaseRequest,
    RestoreFailed,
    RestoreRequest,
)
from engines.criu import cgroups, wire
from engines.criu.engine import CriuEngine
from tests.support import soak
from tests.support.containers import (
    PREFIX,
    PYTHON,
    bind,
    command,
    frozen,
    lab,
    live,
    processes_with,
    status,
    tool,
    until,
)
from tests.support.criu import CriuLab

pytestmark = pytest.mark.engine


@pytest.fixture
def place(tmp_path: Path) -> Iterator[CriuLab]:
    with lab(tmp_path) as inner:
        yield CriuLab(inner)


def dump(
    place: CriuLab, container_id: str, name: str = "i", *, leave_running: bool = False, timeout_s: float = 60
) -> Path:
    image = place.image_root / name
    place.engine(container_id).checkpoint(
        CheckpointRequest(
            container_id=container_id,
            bundle_path=place.bundle(container_id),
            image_path=image,
            timeout_s=timeout_s,
            leave_running=leave_running,
        )
    )
    return image


def wake(
    place: CriuLab,
    container_id: str,
    image: Path,
    *,
    held: bool = False,
    tcp: Literal["keep", "close"] = "close",
    timeout_s: float = 60,
) -> int:
    request = RestoreRequest(
        container_id=container_id,
        bundle_path=place.bundle(container_id),
        image_path=image,
        timeout_s=timeout_s,
        held=held,
        tcp=tcp,
    )
    return place.restore(place.engine(container_id), request)


def release(place: CriuLab, container_id: str) -> None:
    place.engine(container_id).release(ReleaseRequest(container_id=container_id, timeout_s=10))


SERVER = live("--port", "7000", "--fill", "1")


def test_a_connection_goes_on_over_a_dump_and_a_held_restore(place: CriuLab) -> None:
    network = place.network()
    source = place.start(netns_path=network.pod_path, args=SERVER)
    client = place.lab.client(network, 7000)
    dump(place, source, "a", leave_running=True)
    client.goes_on()
    assert network.tables() == []
    image = dump(place, source)
    assert network.tables() == [wire.lock_table(image)], "the lock keeps the peer from a reset"
    target = place.prepare(netns_path=network.pod_path)
    wake(place, target, image, held=True, tcp="keep")
    received = client.ask()[0]
    release(place, target)
    client.goes_on()
    assert client.ask()[0] > received
    assert network.tables() == []


def test_close_ends_old_connections_and_keeps_the_listener(place: CriuLab) -> None:
    network = place.network()
    source = place.start(netns_path=network.pod_path, args=SERVER)
    place.lab.client(network, 7000)
    image = dump(place, source)
    elsewhere = place.lab.network("m")
    target = place.prepare(netns_path=elsewhere.pod_path)
    wake(place, target, image, tcp="close")
    place.lab.client(elsewhere, 7000).goes_on()


def test_a_failed_restore_leaves_the_network_open(place: CriuLab) -> None:
    network = place.network()
    source = place.start(netns_path=network.pod_path, args=SERVER)
    client = place.lab.client(network, 7000)
    image = dump(place, source)
    client.close()
    # The connection's address is gone, so that it cannot be made again.
    command("ip", "-n", network.pod, "address", "flush", "dev", "eth0")
    command("ip", "-n", network.pod, "address", "add", "10.77.0.9/24", "dev", "eth0")
    target = place.prepare(netns_path=network.pod_path)
    with pytest.raises(RestoreFailed, match=r"Can't bind inet socket.*log: .*old address") as failure:
        wake(place, target, image, tcp="keep")
    assert failure.value.after == "stopped"
    assert failure.value.log_path
    assert failure.value.log_path.exists()
    assert network.tables() == []
    until(lambda: not place.residue(target), what=f"{place.residue(target)}")
    # What the caller falls back to must have a network.
    network.pod_address = "10.77.0.9"
    place.start(netns_path=network.pod_path, args=SERVER)
    place.lab.client(network, 7000).goes_on()


def test_a_connection_in_the_backlog_is_skipped(place: CriuLab) -> None:
    network = place.network()
    script = (
        "import socket,time\ns=socket.create_server(('0.0.0.0',7000),backlog=5)\nn=0\n"
        "while True:\n n+=1; print('tick',n,flush=True); time.sleep(0.02)"
    )
    source = place.start(netns_path=network.pod_path, args=["python", "-IS", "-c", script])
    until(lambda: place.progress(source) > 1)
    peer = subprocess.Popen(
        [
            *("ip", "netns", "exec", network.peer, PYTHON, "-IS", "-c"),
            "import socket,sys\nc=[socket.create_connection(('10.77.0.2',7000)) for _ in range(3)]\n"
            "print('ready',flush=True)\nsys.stdin.read()",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert peer.stdout
        assert peer.stdout.readline() == b"ready\n"
        dump(place, source)
    finally:
        peer.kill()
        peer.wait()


def test_the_host_namespace_has_phases_too(place: CriuLab) -> None:
    source = place.prepare()
    path = place.bundle(source) / "config.json"
    spec = json.loads(path.read_text())
    spec["linux"]["namespaces"] = [
        entry for entry in spec["linux"]["namespaces"] if entry["type"] != "network"
    ]
    spec["mounts"] = [mount for mount in spec["mounts"] if mount["destination"] != "/sys"]
    path.write_text(json.dumps(spec))
    place.outputs[source] = place.runc.run(place.bundle(source), source)
    until(lambda: place.progress(source) > 1)
    seen: list[tuple[str, PhaseInfo, int]] = []

    def look(phase: str, info: PhaseInfo) -> None:
        time.sleep(0.1)
        before = place.progress(source)
        time.sleep(0.1)
        assert place.progress(source) == before
        seen.append((phase, info, before))

    place.engine(source).checkpoint(
        CheckpointRequest(
            container_id=source,
            bundle_path=place.bundle(source),
            image_path=place.image_root / "i",
            timeout_s=60,
            leave_running=True,
            on_phase=look,
        )
    )
    assert [phase for phase, _, _ in seen] == ["frozen", "dumped"]
    assert all(info.netns_path is None for _, info, _ in seen)
    assert seen[0][2] == seen[1][2], "it did not run between the phases"
    until(lambda: place.progress(source) > seen[1][2])


def test_a_paused_container_stays_paused(place: CriuLab) -> None:
    source = place.start()
    place.runc("pause", source)
    dump(place, source, leave_running=True)
    assert place.runc.state(source)["status"] == "paused"
    place.runc("resume", source)
    before = place.progress(source)
    until(lambda: place.progress(source) > before)


def test_job_control_notices_no_stop(place: CriuLab) -> None:
    source = place.start(args=["python", "-IS", "-u", "/workloads/job_control.py"])
    until(lambda: place.progress(source) > 5)
    image = dump(place, source)
    target = place.prepare()
    wake(place, target, image, held=True)
    time.sleep(0.2)
    assert place.outputs[target].text == "", "nothing ran before release"
    release(place, target)
    until(lambda: len(place.outputs[target].ticks()) > 20)
    until(lambda: "child tick" in place.outputs[target].text)
    assert "stopped" not in place.outputs[target].text


def test_a_task_in_sigstop_is_refused_and_the_container_runs_on(place: CriuLab) -> None:
    source = place.start(args=["python", "-IS", "-u", "/workloads/job_control.py", "--stopped"])
    until(lambda: place.progress(source) > 5)
    with pytest.raises(NotSupported, match=r"stopped by a signal.*SIGCONT") as failure:
        dump(place, source)
    assert failure.value.after == "running"
    before = place.progress(source)
    until(lambda: place.progress(source) > before)
    assert not (place.image_root / "i").exists()


def test_a_task_that_hangs_criu_ends_at_the_deadline(place: CriuLab, monkeypatch: pytest.MonkeyPatch) -> None:
    source = place.start(args=["python", "-IS", "-u", "/workloads/job_control.py", "--stopped"])
    until(lambda: place.progress(source) > 5)
    # As if it had been stopped right after we looked.
    monkeypatch.setattr("engines.criu.engine._check_stopped", lambda *_: None)
    with pytest.raises(EngineTimeout) as failure:
        dump(place, source, timeout_s=2)
    assert failure.value.after == "running"
    assert frozen(place.lab.tag) == []
    before = place.progress(source)
    until(lambda: place.progress(source) > before)
    assert not (place.image_root / "i").exists()
    assert place.residue(source)  # the container itself
    assert not [line for line in place.residue(source) if "criu" in line]


def test_truncated_pages_end_at_the_deadline(place: CriuLab) -> None:
    source = place.start(args=live("--fill", "4"))
    image = dump(place, source)
    pages = max(image.glob("pages-*.img"), key=lambda path: path.stat().st_size)
    os.truncate(pages, pages.stat().st_size // 2)
    target = place.prepare()
    with pytest.raises((EngineTimeout, RestoreFailed)):
        wake(place, target, image, timeout_s=5)
    until(lambda: not place.residue(target), what=f"{place.residue(target)}")


def test_a_damaged_inventory_is_refused(place: CriuLab) -> None:
    source = place.start()
    image = dump(place, source)
    os.truncate(image / "inventory.img", 9)
    target = place.prepare()
    with pytest.raises(ImageCorrupt):
        wake(place, target, image)
    assert place.residue(target) == []


def test_a_full_disk_leaves_the_container_running(place: CriuLab, tmp_path: Path) -> None:
    source = place.start(args=live("--fill", "16"))
    small = tmp_path / "small"
    small.mkdir()
    command("mount", "-t", "tmpfs", "-o", "size=4m", "none", small)
    try:
        with pytest.raises(DumpFailed, match=r"No space left|free space|write") as failure:
            place.engine(source).checkpoint(
                CheckpointRequest(
                    container_id=source,
                    bundle_path=place.bundle(source),
                    image_path=small / "i",
                    timeout_s=60,
                )
            )
        assert failure.value.after == "running"
        assert list(small.iterdir()) == []
    finally:
        command("umount", small)
    before = place.progress(source)
    until(lambda: place.progress(source) > before)


def test_an_unlinked_file_that_cannot_be_dumped_leaves_no_name(place: CriuLab, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    script = (
        "import os,time\nf=open('/data/a','w'); f.write('x'*100); f.flush()\n"
        "os.link('/data/a','/data/b'); os.unlink('/data/a')\nn=0\n"
        "while True:\n n+=1; print('tick',n,flush=True); time.sleep(0.02)"
    )
    source = place.start(args=["python", "-IS", "-c", script], mounts=[bind(data, "/data", writable=True)])
    until(lambda: place.progress(source) > 1)

    def veto(phase: str, info: PhaseInfo) -> None:
        if phase == "dumped":
            raise KeyError(info.pid)

    with pytest.raises(KeyError):
        place.engine(source).checkpoint(
            CheckpointRequest(
                container_id=source,
                bundle_path=place.bundle(source),
                image_path=place.image_root / "i",
                timeout_s=60,
                on_phase=veto,
            )
        )
    assert sorted(path.name for path in data.iterdir()) == ["b"]


def test_pre_dump_is_refused_or_works_as_the_kernel_allows(place: CriuLab) -> None:
    source = place.start()
    request = CheckpointRequest(
        container_id=source,
        bundle_path=place.bundle(source),
        image_path=place.image_root / "pre",
        timeout_s=60,
    )
    engine = place.engine(source)
    warned = [finding for finding in engine.probe() if finding.rule == "criu.pre-dump"]
    if warned[0].severity == "warn":
        with pytest.raises(NotSupported, match="dirty memory"):
            engine.pre_dump(request)
        assert not request.image_path.exists()
    else:
        engine.pre_dump(request)
        final = CheckpointRequest(
            container_id=source,
            bundle_path=place.bundle(source),
            image_path=place.image_root / "i",
            parent_path=request.image_path,
            timeout_s=60,
        )
        engine.checkpoint(final)
        target = place.prepare()
        wake(place, target, final.image_path)
    before = place.progress(source)
    assert before > 0


def test_a_configuration_that_spoils_a_call_is_refused(place: CriuLab, tmp_path: Path) -> None:
    spoiled = tmp_path / "criu.conf"
    spoiled.write_text("# harmless\nverbosity=4\nnetwork-lock nftables\nleave-stopped\nlog-file /x\n")
    source = place.start(annotations={"org.criu.config": str(spoiled)})
    with pytest.raises(EngineUnavailable, match="leave-stopped, log-file"):
        dump(place, source)
    spoiled.write_text("# harmless\nnetwork-lock nftables\nmanage-cgroups=ignore\n")
    image = dump(place, source)
    target = place.prepare()
    wake(place, target, image)


def test_images_are_private_and_links_are_refused(place: CriuLab) -> None:
    source = place.start()
    image = dump(place, source, leave_running=True)
    assert image.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o077 for path in image.iterdir()} == {0}
    (place.image_root / "link").symlink_to(place.image_root)
    with pytest.raises(InvalidRequest, match="link"):
        dump(place, source, "link")


def test_statistics_agree_with_pycriu(place: CriuLab) -> None:
    source = place.start()
    dump(place, source, leave_running=True)
    work = place.state_path(source) / "work"
    numbers = wire.dump_numbers(work)
    assert numbers
    script = (
        "import sys,json; from pycriu import images; "
        "print(json.dumps(images.load(open(sys.argv[1],'rb'))['entries'][0]['dump']))"
    )
    told = subprocess.run(
        [sys.executable, "-c", script, work / "stats-dump"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(PREFIX / "python")},
    )
    judge = json.loads(told.stdout)
    assert numbers.frozen_s == judge["frozen_time"] / 1e6
    assert numbers.memwrite_s == judge["memwrite_time"] / 1e6
    assert numbers.pages_written == judge["pages_written"]


def test_the_crash_of_everything_is_undone_later(place: CriuLab) -> None:
    """Caller, guardian, runtime and CRIU all die; a later `undo` finds the journal."""
    network = place.network()
    source = place.start(netns_path=network.pod_path, args=SERVER)
    client = place.lab.client(network, 7000)
    pid = place.pid(source)

    def crash(phase: str, info: PhaseInfo) -> None:
        if phase == "dumped":
            os.kill(0, signal.SIGSTOP)

    child = os.fork()
    if child == 0:
        os.setsid()
        request = CheckpointRequest(
            container_id=source,
            bundle_path=place.bundle(source),
            image_path=place.image_root / "i",
            timeout_s=60,
            on_phase=crash,
        )
        place.engine(source).checkpoint(request)
        os._exit(0)
    until(lambda: status(child, "State").startswith("T"), what="the dump is complete")
    assert frozen(place.lab.tag) == [] or network.tables()
    guardians = [number for number, line in _state_processes(place, source) if "guardian" in line]
    assert guardians
    for number in guardians:
        os.kill(number, signal.SIGKILL)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    place.engine(source).undo(source)
    assert place.pid(source) == pid
    client.goes_on()
    assert network.tables() == []
    assert frozen(place.lab.tag) == []
    assert not (place.image_root / "i").exists()
    until(lambda: not _state_processes(place, source), what="the killed guardian is gone")


def _state_processes(place: CriuLab, container_id: str) -> list[tuple[int, str]]:
    return processes_with(str(place.state_path(container_id)))


def test_a_big_log_is_cut(place: CriuLab, tmp_path: Path) -> None:
    from engines.criu.calls import cap, criu_error

    del place
    log = tmp_path / "dump.log"
    log.write_text("first\n" + "noise\n" * 50_000 + "(00.1) Error (criu/x.c:1): the cause\n")
    cap(log, limit_bytes=100_000)
    assert log.stat().st_size < 100_100
    assert log.read_text().startswith("first\n")
    assert criu_error(log) == "the cause"


def test_abstract_sockets_are_untouched_by_the_end_of_repair(place: CriuLab) -> None:
    """Ending repair mode looks at sockets of every kind and changes none that is not in it."""
    from engines.criu.repair import end_repair

    del place
    here, there = socket.socketpair()
    with here, there, socket.socket() as plain:
        plain.bind(("127.0.0.1", 0))
        assert end_repair(os.getpid()) == 0
        here.send(b"x")
        assert there.recv(1) == b"x"


@pytest.mark.soak
def test_a_shell_that_forks_all_the_time(place: CriuLab) -> None:
    """A task in vfork cannot be seized while its child is: the freeze waits for a better moment."""
    container_id = place.start(args=["sh", "-c", "while :; do /usr/bin/true; done"])
    until(lambda: len(place.runc.pids(container_id)) > 0)
    for number in range(40 if soak.SOAK else 8):
        dump(place, container_id, f"i{number}", leave_running=True, timeout_s=30)


@pytest.mark.parametrize("release", [True, False])
def test_the_lock_of_a_stopped_container_goes_or_stays_as_asked(place: CriuLab, release: bool) -> None:
    network = place.network()
    source = place.start(netns_path=network.pod_path, args=live("--port", "7000"))
    client = place.lab.client(network, 7000)
    client.goes_on()
    image = place.image_root / "i"
    place.engine(source).checkpoint(
        CheckpointRequest(
            container_id=source,
            bundle_path=place.bundle(source),
            image_path=image,
            timeout_s=60,
            release_network=release,
        )
    )
    assert network.tables() == ([] if release else [wire.lock_table(image)])


def test_a_lock_that_stays_is_told(place: CriuLab, tmp_path: Path) -> None:
    """Without nft nobody can unlock the network; the image is good, so the dump does not fail for that."""
    network = place.network()
    source = place.start(netns_path=network.pod_path, args=SERVER)
    place.lab.client(network, 7000)
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("criu", "runc", "tar", "gzip", "nsenter", "sh"):
        (tools / name).symlink_to(tool(name))
    engine = CriuEngine(replace(place.settings(source), search_path=str(tools)))
    stats = engine.checkpoint(
        CheckpointRequest(
            container_id=source,
            bundle_path=place.bundle(source),
            image_path=place.image_root / "i",
            timeout_s=60,
            release_network=True,
        )
    )
    assert network.tables()
    (warning,) = stats.warnings
    assert str(network.pod_path) in warning
    assert "locked" in warning
    assert "nft" in warning


def test_a_frozen_cgroup_does_not_keep_an_undo_waiting(place: CriuLab) -> None:
    """CRIU is in the container's own cgroup, and on cgroup v1 what is frozen does not die."""
    source = place.start()
    image = dump(place, source)
    target = place.prepare()

    def freeze(phase: str, info: PhaseInfo) -> None:
        assert phase == "restored"
        freezer = cgroups.freezer(cgroups.of_process(info.pid))
        assert freezer
        assert freezer.freeze(timeout_s=5)
        until(lambda: time.monotonic() > deadline, what="the deadline passes")

    deadline = time.monotonic() + 3
    with pytest.raises(EngineTimeout) as late:
        place.restore(
            place.engine(target),
            RestoreRequest(
                container_id=target,
                bundle_path=place.bundle(target),
                image_path=image,
                timeout_s=deadline - time.monotonic(),
                held=True,
                on_phase=freeze,
            ),
        )
    assert "could not undo" not in str(late.value)
    until(lambda: not place.residue(target), what=f"{place.residue(target)}")
