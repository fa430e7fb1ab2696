"""Small parts of the CRIU engine that need no container."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import time
from pathlib import Path

import pytest

from engines import processes
from engines.api import EngineSettings, EngineUnavailable
from engines.criu import calls, cgroups, config, journal, phases, views, wire
from engines.registry import choose, create, names
from tests.support.containers import until


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("leave-stopped", ["leave-stopped"]),
        ("--log-file=/x", ["log-file"]),
        ("  action-script  /x  # why", ["action-script"]),
        ("network-lock iptables", ["network-lock"]),
        ("skip-file-rwx-check", ["skip-file-rwx-check"]),
        ("network-lock nftables", []),
        ("network-lock = 'nftables'", []),
        ("manage-cgroups=ignore", []),
        ("tcp-established", []),
        ("# leave-stopped", []),
        ("verbosity=4", []),
    ],
)
def test_only_directives_that_spoil_a_call_are_named(tmp_path: Path, line: str, found: list[str]) -> None:
    path = tmp_path / "runc.conf"
    path.write_text(f"{line}\n")
    assert config.spoilers(path) == found


@pytest.mark.parametrize("place", ["etc/criu/default.conf", "etc/criu/runc.conf", "home/.criu/default.conf"])
def test_every_file_that_criu_reads_unasked_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.setattr(
        config, "SYSTEM_FILES", tuple(str(tmp_path / name[1:]) for name in config.SYSTEM_FILES)
    )
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    path = tmp_path / place
    path.parent.mkdir(parents=True)
    path.write_text("tcp-established\n")
    path.chmod(0o644)
    assert config.check_system() == ()
    path.write_text("# a comment with exec-cmd\naction-script /tmp/x.sh\n")
    (found,) = config.check_system()
    assert (found.rule, found.severity) == ("criu.config", "refuse")
    assert f"{path} sets action-script" in found.message
    assert str(path) in found.remedy
    path.write_text("")
    path.chmod(0o664)
    (found,) = config.check_system()
    assert (found.rule, found.severity) == ("criu.config", "refuse")
    assert "chmod 644" in found.remedy


def test_options_of_a_restore() -> None:
    held = config.restore_config("/s", held=True, tcp="keep").splitlines()
    assert "leave-stopped" in held
    assert "tcp-close" not in held
    assert "tcp-close" in config.restore_config("/s", held=False, tcp="close").splitlines()


def test_mounts_that_are_given_from_outside_are_told() -> None:
    assert "external mnt[/g]:/g" in config.dump_config("/s", outside=["/g"]).splitlines()
    restored = config.restore_config("/s", held=False, tcp="keep", outside={"/g": "/sys/fs/cgroup"})
    assert "external mnt[/g]:/sys/fs/cgroup" in restored.splitlines()
    assert "/g\nx" not in views.outside(["/g\nx"])
    assert views.bound(os.getpid(), ["/sys/fs/cgroup"]) == ()


def test_protobuf_fields() -> None:
    # 1: 150, 2: "hi", 3: fixed32, 1 again
    message = b"\x08\x96\x01\x12\x02hi\x1d\x01\x00\x00\x00\x08\x01"
    assert wire.fields(message) == {1: [150, 1], 2: [b"hi"], 3: [b"\x01\x00\x00\x00"]}
    for broken in (b"\x08", b"\x12\x05hi", b"\x0f"):
        with pytest.raises(ValueError, match=r"\w"):
            wire.fields(broken)


def test_a_journal_survives_and_a_newer_one_is_refused(tmp_path: Path) -> None:
    written = journal.Journal(
        operation="restore",
        container_id="c",
        runtime="/r",
        runtime_args=[],
        root="/root",
        state=str(tmp_path),
        search_path="/bin",
        image="/i",
        groups={"freezer": "/g"},
    )
    written.write()
    assert journal.Journal.read(tmp_path) == written
    written.schema = 99
    written.write()
    with pytest.raises(ValueError, match="schema 99"):
        journal.Journal.read(tmp_path)
    written.remove()
    written.remove()
    assert journal.Journal.read(tmp_path) is None


@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        (["Can't fork for 8: File exists", "Restoring FAILED."], "Can't fork for 8: File exists"),
        (["one", "two", "three"], "one (then: three)"),
        (
            ["Unseizable non-zombie 7 found, state D, err -1/10", "Unable to detach from 7: No such process"],
            "",
        ),
        (
            ["Unable to detach from 7: No such process", "Unseizable non-zombie 7 found, state D, err -1/10"],
            "",
        ),
        (["Unable to detach from 7: No such process"], "Unable to detach from 7: No such process"),
        (["Can't open file data/\x1b[2J\xff"], "Can't open file data/\\x1b[2J\xff"),
    ],
)
def test_the_cause_is_told_rather_than_what_it_led_to(tmp_path: Path, lines: list[str], cause: str) -> None:
    log = tmp_path / "dump.log"
    log.write_text("".join(f"(00.01) Error (compel/src/lib/infect.c:263): {line}\n" for line in lines))
    assert calls.criu_error(log) == (cause or "Unseizable non-zombie 7 found, state D, err -1/10")
    assert "does not stop" in calls.advice("Unseizable non-zombie 7 found, state D, err -1/10")


def test_cgroups_that_vanish_meanwhile_are_left_alone(tmp_path: Path) -> None:
    """As those of a container that makes and removes them while it is looked at, or ended."""
    done = threading.Event()

    def churn() -> None:
        while not done.is_set():
            with contextlib.suppress(OSError):  # it was removed for us
                for name in ("a/b/c", "a/b", "a"):
                    (tmp_path / "a/b/c").mkdir(parents=True, exist_ok=True)
                    (tmp_path / name).rmdir()

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for _ in range(300):
            assert cgroups.tasks({"": str(tmp_path)}) == []
            cgroups.remove([str(tmp_path / "a")])
    finally:
        done.set()
        thread.join()


def test_a_cgroup_that_somebody_lives_in_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "cgroup.procs").write_text("1\n")
    began = time.monotonic()
    cgroups.remove([str(tmp_path)], timeout_s=60)
    assert time.monotonic() < began + 30


def test_our_own_cgroups_are_never_a_container_s() -> None:
    assert cgroups.strictly_own(cgroups.of_process("self")) == {}


def test_a_process_is_known_by_its_start() -> None:
    started = processes.start_time(os.getpid())
    assert processes.alive(os.getpid(), started)
    assert not processes.alive(os.getpid(), started + 1)
    assert not processes.alive(0, 0)


def test_the_registry_names_what_there_is(tmp_path: Path) -> None:
    settings = EngineSettings(
        runtime_path=tmp_path / "none", root_path=tmp_path, state_path=tmp_path, search_path=str(tmp_path)
    )
    assert names()[0] == "criu"
    assert choose(settings, "gvisor").name == create("gvisor", settings).name == "gvisor"
    for name in ("none", "fake"):  # what only tests may use has no name here
        with pytest.raises(EngineUnavailable, match=f"engine '{name}': there are criu,"):
            create(name, settings)
    assert choose(settings).name == "criu", "an engine without a rival is not probed"
    refused = [finding for finding in create("criu", settings).probe() if finding.severity == "refuse"]
    assert {finding.rule for finding in refused} >= {"criu.runtime", "criu.tool.criu"}


@pytest.mark.parametrize("text", [None, "", "abort\n", "commit\n", "commit", "hold\n", "hold", "later\n"])
def test_a_script_without_its_engine_takes_the_verdict_as_the_undo_does(
    tmp_path: Path, text: str | None
) -> None:
    path = tmp_path / "it's a verdict"
    if text is not None:
        path.write_text(text)
    call = journal.Journal(
        operation="checkpoint",
        container_id="c",
        runtime="runc",
        runtime_args=[],
        root="/run/runc",
        state=str(tmp_path),
        search_path="",
        image="",
        verdict_path=str(path),
    )
    verdict = call.verdict()
    script = phases.Script(str(path))
    try:
        process = subprocess.Popen(
            [script.path],
            env={**os.environ, "CRTOOLS_SCRIPT_ACTION": "post-dump"},
            stderr=subprocess.DEVNULL,
        )
        until(lambda: bool(script.stages()), what="the script asks")
    finally:
        script.close()
    if verdict == "hold":
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.3)
        path.write_text("commit\n")
        verdict = "commit"
    assert process.wait(10) == (0 if verdict == "commit" else 1)
