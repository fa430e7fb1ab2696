"""The parts of the gVisor engine that need no runsc: headers, records, needs, verdicts, messages."""

from __future__ import annotations

import contextlib
import json
import os
import struct
import subprocess
import termios
from collections.abc import Generator
from pathlib import Path
from typing import Any, Literal

import pytest

from compat.profile import Profile
from compat.verdict import judge as judge_image
from engines.api import EngineSettings, FileNeed, ImageCorrupt, ImageNotFound, InvalidRequest, NotSupported
from engines.gvisor import image, judge, runsc, terminal
from engines.gvisor.calls import _complaint
from engines.gvisor.engine import GvisorEngine
from engines.gvisor.inspect import needs_of
from engines.gvisor.preflight import Source
from engines.gvisor.runsc import Container, Runsc, Task

SETUP = {"platform": "systrap", "network": "none", "overlay": "root:self", "directfs": "true"}
SPEC: dict[str, Any] = {
    "process": {
        "user": {"uid": 0, "gid": 5, "additionalGids": [7]},
        "capabilities": {"bounding": ["CAP_CHOWN", "CAP_KILL"], "permitted": ["CAP_KILL"]},
        "noNewPrivileges": True,
        "rlimits": [{"type": "RLIMIT_NOFILE", "soft": 10, "hard": 20}],
    },
    "root": {"readonly": False},
    "linux": {
        "namespaces": [{"type": "pid"}, {"type": "network", "path": "/run/netns/x"}],
        "maskedPaths": ["/proc/kcore"],
    },
    "seccomp": "",
}


def write_image(path: Path, head: object, *, magic: bytes = image.MAGIC) -> Path:
    path.mkdir()
    text = json.dumps(head).encode()
    (path / image.STATE).write_bytes(magic + struct.pack(">Q", len(text)) + text + b"hmac")
    for name in image.PAGES:
        (path / name).touch()
    return path


def record(**changes: Any) -> image.Record:
    task = Task(pid=1, parent=0, uid=33, name="sh")
    values: dict[str, Any] = {"runsc": "20240729.0", "setup": SETUP, "spec": SPEC, "tasks": (task,)}
    return image.Record(**{**values, **changes})


def settings(*args: str, root: Path = Path("/nonexistent")) -> EngineSettings:
    return EngineSettings(
        runtime_path=Path("/bin/false"),
        root_path=root,
        state_path=Path("/nonexistent"),
        search_path="/bin",
        runtime_args=args,
    )


class Released(Runsc):
    """A runsc that says its release, and nothing else."""

    def version(self) -> str:
        return "20240729.0"


def rules(head: dict[str, str], found: image.Record, *args: str) -> list[str]:
    where = settings(*args)
    return [finding.rule for finding in judge.judge(head, found, where, Released(where))]


def test_a_header_is_read(tmp_path: Path) -> None:
    place = write_image(tmp_path / "i", {"compression": "none", "container_count": "1"})
    assert image.header(place)["container_count"] == "1"


@pytest.mark.parametrize("cut", [0, 3, 8, 15, 20])
def test_a_header_cut_short_is_corrupt(tmp_path: Path, cut: int) -> None:
    place = write_image(tmp_path / "i", {"compression": "none", "container_count": "1"})
    data = (place / image.STATE).read_bytes()
    (place / image.STATE).write_bytes(data[:cut])
    with pytest.raises(ImageCorrupt):
        image.header(place)


def test_what_is_no_header_is_corrupt(tmp_path: Path) -> None:
    with pytest.raises(ImageNotFound):
        image.header(tmp_path / "none")
    with pytest.raises(ImageCorrupt, match="no checkpoint of runsc"):
        image.header(write_image(tmp_path / "a", {}, magic=b"notRunsc"))
    with pytest.raises(ImageCorrupt, match="cut short"):
        image.header(write_image(tmp_path / "b", ["a", "list"]))
    place = write_image(tmp_path / "c", {})
    (place / image.STATE).write_bytes(image.MAGIC + struct.pack(">Q", 1 << 40))
    with pytest.raises(ImageCorrupt, match="header of"):
        image.header(place)
    place = write_image(tmp_path / "d", {"compression": "none"})
    (place / "pages.img").unlink()
    with pytest.raises(ImageCorrupt, match=r"lacks pages\.img"):
        image.header(place)


def test_a_record_comes_back_as_it_was_written(tmp_path: Path) -> None:
    record().write(tmp_path)
    assert image.record(tmp_path) == record()


FILE: dict[str, Any] = {"path": "/f", "size_bytes": 1, "mode": -1}


def test_a_record_of_all_that_there_is_comes_back(tmp_path: Path) -> None:
    member = image.Member(spec=SPEC, mounts={"/m": {"type": "bind"}}, tasks=record().tasks)
    file = FileNeed(path="/f", size_bytes=1, mode=-1)
    whole = record(files=(file,), pod={"": member}, mounts={"/m": {}}, memory_bytes=1, terminal="t")
    whole.write(tmp_path)
    assert image.record(tmp_path) == whole


@pytest.mark.parametrize(
    "changes",
    [
        {"files": [{**FILE, "path": 1}]},
        {"files": [{**FILE, "size_bytes": "1"}]},
        {"files": [{**FILE, "kind": "socks"}]},
        {"files": [{"path": "/f"}]},
        {"files": {"path": "/f"}},
        {"tasks": [{"pid": "1", "parent": 0, "uid": 0, "name": "sh"}]},
        {"mounts": {"/m": []}},
        {"memory_bytes": None},
        {"pod": {"a": {"spec": {}, "mounts": {}}}},
        {"setup": []},
    ],
)
def test_a_record_with_a_value_of_another_type_is_corrupt(tmp_path: Path, changes: dict[str, Any]) -> None:
    record().write(tmp_path)
    document = json.loads((tmp_path / image.RECORD).read_bytes())
    (tmp_path / image.RECORD).write_text(json.dumps({**document, **changes}))
    with pytest.raises(ImageCorrupt, match=next(iter(changes))):
        image.record(tmp_path)


def test_a_record_without_processes_is_corrupt(tmp_path: Path) -> None:
    record().write(tmp_path)
    document = json.loads((tmp_path / image.RECORD).read_bytes())
    del document["tasks"]
    (tmp_path / image.RECORD).write_text(json.dumps(document))
    with pytest.raises(ImageCorrupt, match="tasks"):
        image.record(tmp_path)


@pytest.mark.parametrize(
    "spec", [{"process": ["x"]}, {"linux": {"uidMappings": [{}]}}, {"process": {"user": {"gid": "x"}}}]
)
def test_a_record_with_a_specification_that_is_none_is_corrupt(tmp_path: Path, spec: dict[str, Any]) -> None:
    place = write_image(tmp_path / "image", {})
    record(spec=spec).write(place)
    with pytest.raises(ImageCorrupt, match=r"could not inspect image '.*specification.*; checkpoint again"):
        GvisorEngine(settings()).inspect(place)


@pytest.mark.parametrize("text", ["", "[]", '{"schema": 9}', '{"schema": 1, "tasks": [{}]}', "[" * 100000])
def test_a_record_that_is_none_is_corrupt(tmp_path: Path, text: str) -> None:
    with pytest.raises(ImageCorrupt):
        image.record(tmp_path)
    (tmp_path / image.RECORD).write_text(text)
    with pytest.raises(ImageCorrupt):
        image.record(tmp_path)


def test_the_needs_are_the_most_that_the_spec_allowed() -> None:
    mounts = {"/data": {"destination": "/data", "type": "bind", "source": "/s", "options": ["rbind", "ro"]}}
    needs = needs_of({}, record(mounts=mounts))
    (task,) = needs.tasks
    assert task.uids == (33, 33, 33, 33)
    assert task.gids == (5, 5, 5, 5)
    assert task.groups == (7,)
    assert (task.cap_bounding, task.cap_permitted) == (1 << 0 | 1 << 5, 1 << 5)
    assert task.no_new_privs
    assert task.rlimits == {"RLIMIT_NOFILE": (10, 20)}
    assert needs.namespaces["pid"] == "own"
    assert needs.namespaces["network"] == "external"
    assert needs.namespaces["user"] == "host"
    found = {mount.destination: (mount.external, mount.readonly) for mount in needs.mounts}
    assert found["/data"] == (True, True)
    assert found["/"] == (True, False)
    assert found["/proc/kcore"] == (False, True)


def test_what_runsc_does_not_compare_is_compared() -> None:
    assert rules({}, record()) == []
    assert rules({}, record(runsc="20221219.0")) == ["gvisor.version"]
    assert rules({"container_count": "2"}, record()) == ["gvisor.containers"]
    assert rules({}, record(), "--platform=ptrace") == ["gvisor.platform"]
    assert rules({}, record(setup={**SETUP, "platform": "ptrace"})) == []
    assert rules({}, record(), "--overlay2=none", "--directfs=false") == ["gvisor.overlay", "gvisor.directfs"]
    assert rules({}, record(), "--network=host") == ["gvisor.network"]
    assert rules({}, record(), "--network=sandbox") == []


def test_options_of_a_sandbox_are_told_with_runscs_own_defaults() -> None:
    assert runsc.setup(runsc.flags(["--network=none", "--ignore-cgroups"])) == SETUP
    assert runsc.flags(["-a", "--b=c=d", "boot"]) == {"a": "true", "b": "c=d"}


def test_ids_that_runsc_would_take_for_each_other_are_refused(tmp_path: Path) -> None:
    for name in ("web", "web-long", "other"):
        (tmp_path / f"{name}_sandbox:{name}.state").touch()
    ours = Runsc(settings(root=tmp_path))
    assert set(ours.ids()) == {"web", "web-long", "other"}
    ours.check_id("other", "could not x")
    with pytest.raises(InvalidRequest, match="'web-long'"):
        ours.check_id("web", "could not x")
    assert ours.state("we") is None


@pytest.mark.parametrize(
    ("kind", "sandbox", "annotations", "why"),
    [
        ({"network": "host"}, "c1", {}, "--network=host"),
        ({"overlay": "none"}, "c1", {}, "--overlay2=none"),
        ({}, "p1", {}, "shares its sandbox"),
        ({}, "c1", {"io.kubernetes.cri.container-type": "container"}, "which container of a pod"),
        ({}, "c1", {"io.kubernetes.cri.container-type": "sandbox"}, "pause container"),
        ({}, "c1", {"io.kubernetes.cri-o.ContainerType": "container"}, "CRI-O"),
    ],
)
def test_what_gvisor_cannot_dump_is_refused_first(
    tmp_path: Path, kind: dict[str, str], sandbox: str, annotations: dict[str, str], why: str
) -> None:
    (tmp_path / f"c1_sandbox:{sandbox}.state").touch()
    container = Container(id="c1", pid=0, status="running")
    source = Source(Runsc(settings(root=tmp_path)), container, {"annotations": annotations}, tmp_path, "no")
    source._setup = {**SETUP, **kind}
    with pytest.raises(NotSupported, match=why):
        source.check_kind()


def test_the_last_error_of_a_log_counts_by_its_first_line(tmp_path: Path) -> None:
    path = tmp_path / "log"
    assert _complaint(path) == ""
    records = [
        {"level": "warning", "msg": "hm"},
        {"level": "error", "msg": "first"},
        {"level": "error", "msg": "restoring container: EOF:\ngoroutine 1"},
    ]
    path.write_text("".join(map(json.dumps, records)) + '{"cut')
    assert _complaint(path) == "restoring container: EOF"


def test_the_nodes_kernel_does_not_matter_to_an_image_with_its_own() -> None:
    def host(flags: tuple[str, ...], mode: Literal["v1", "v2"], **more: Any) -> Profile:
        return Profile(
            arch="x86_64",
            kernel="6.1",
            cpu_flags=flags,
            page_size_bytes=4096,
            cgroup_mode=mode,
            boot_id="",
            **more,
        )

    spec = {"linux": {"namespaces": [{"type": "network"}], "maskedPaths": ["/proc/kcore"]}}
    needs = needs_of({}, record(spec={**SPEC, "linux": {"maskedPaths": ["/proc/not-here"]}}))
    old, new = host(("avx2", "sha_ni"), "v1"), host((), "v2")
    found = judge_image(needs, spec, dump_host=old, node=new)
    assert [(finding.rule, finding.severity) for finding in found] == [("cpu.features", "refuse")]
    assert "avx2, sha_ni" in found[0].message
    assert judge_image(needs, spec, dump_host=old, node=host(("avx2", "sha_ni"), "v2")) == ()


def test_settings_of_a_terminal_are_carried_to_another():
    def flags_of(descriptor: int) -> int:
        return termios.tcgetattr(descriptor)[3]

    with a_process_with_terminals(1) as (old, (old_fd,)), a_process_with_terminals(1) as (new, (new_fd,)):
        changed = termios.tcgetattr(old_fd)
        changed[3] &= ~(termios.ECHO | termios.ICANON)
        termios.tcsetattr(old_fd, termios.TCSANOW, changed)
        assert flags_of(old_fd) != flags_of(new_fd)
        terminal.write(new, terminal.read(old))
        assert termios.tcgetattr(old_fd) == termios.tcgetattr(new_fd)
        with pytest.raises(ValueError, match="bytes"):
            terminal.write(new, "00")


def test_a_terminal_is_found_beside_descriptors_that_come_and_go(monkeypatch: pytest.MonkeyPatch):
    real = Path.iterdir
    gone = Path("/proc/self/fd/2147483647")
    monkeypatch.setattr(Path, "iterdir", lambda path: [gone, *real(path)])
    with a_process_with_terminals(1) as (pid, _):
        assert terminal.read(pid)


@pytest.mark.parametrize("number", [0, 2])
def test_terminals_that_belong_to_nobody_in_particular_are_left_alone(number: int):
    with a_process_with_terminals(number) as (pid, _):
        assert terminal.read(pid) == ""


@contextlib.contextmanager
def a_process_with_terminals(number: int) -> Generator[tuple[int, list[int]]]:
    pairs = [os.openpty() for _ in range(number)]
    process = subprocess.Popen(
        ["/bin/cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=[slave for _, slave in pairs],
    )
    try:
        yield process.pid, [slave for _, slave in pairs]
    finally:
        process.communicate()
        for pair in pairs:
            for descriptor in pair:
                os.close(descriptor)
