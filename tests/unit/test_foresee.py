"""The CRIU engine's look at a container before a dump, and what it notes beside the images."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines import processes
from engines.api import Finding, InvalidRequest
from engines.criu import config, extras, forecast, foresee, images, journal, peers, tree, undo, watches
from engines.cuda import holders
from engines.harness import load_profile
from shim import state
from tests.support.containers import CHECKOUT, PREFIX

ODD = st.text(
    st.characters(blacklist_characters="/\0", blacklist_categories=("Cs",)), min_size=1, max_size=12
)


@given(st.lists(ODD, min_size=1, max_size=5))
def test_no_name_in_a_container_is_a_setting_of_criu(names: list[str]):
    path = "/" + "/".join(names)
    told = watches.sayable(path)
    assert told == path or (path.startswith(f"{told}/") and re.search(r"[^\w.,:+-]", path))
    assert len(config.dump_config("/s", watched=[told]).splitlines()) == (
        len(config.dump_config("/s").splitlines()) + 1
    )
    assert not re.search(r"[\s\"'#=\\\\]", told)


def test_a_watched_file_may_have_any_name(tmp_path: Path):
    """The path of an ordinary one is told whole, of an odd one the directory above it."""
    ordinary, odd = tmp_path / "plain", tmp_path / "x\naction-script "
    for folder in (ordinary, odd, tmp_path / "odd\udcff"):
        folder.mkdir()
    inodes = {
        (entry.stat().st_ino, watches._kernel_number(entry.stat().st_dev)) for entry in tmp_path.iterdir()
    }
    found = [f"{tmp_path}{end}" for end in ("", "/odd\udcff", "/plain")]
    if tmp_path.stat().st_dev != Path("/").stat().st_dev:
        pytest.skip("only the root file system is looked at")
    assert sorted(watches.watched_paths(os.getpid(), inodes)[0]) == found


EXPIRED = "pos:\t0\nclockid: 1\nticks: 3\nsettime flags: 00\nit_value: (0, 0)\nit_interval: (1, 2000000)\n"


def found_in(pid: int, bundle: Path) -> list[Finding]:
    """What is foreseen for a process of this machine, whose mounts are nobody's fault."""
    findings = foresee.look(pid, bundle).findings
    return [finding for finding in findings if finding.rule != "criu.foresee.mount"]


def test_an_obstacle_is_told_once_with_its_remedy():
    outlook = foresee.Outlook()
    outlook.add("tun", "process 1 has a tunnel", "end it")
    outlook.add("tun", "process 2 has a tunnel", "end it")
    outlook.add("pipe", "process 3 has a pipe", "end it")
    assert outlook.sentence() == "process 1 has a tunnel; process 3 has a pipe; end it"
    assert [finding.rule for finding in outlook.findings] == ["criu.foresee.tun", "criu.foresee.pipe"]


def test_an_ordinary_process_is_no_obstacle(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    process = subprocess.Popen(
        [sys.executable, "-ISc", "print(1, flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout
        process.stdout.readline()
        assert found_in(process.pid, tmp_path) == []
    finally:
        process.kill()
        process.communicate()


def test_a_process_that_is_gone_is_no_error(tmp_path: Path):
    assert foresee.look(2**22 - 1, tmp_path).findings == []


@given(st.text())
def test_what_is_said_is_one_printable_line(name: str):
    said = Finding(rule="a.b", severity="refuse", message=f"'{name}' is open").message
    assert said.isprintable()
    assert not name.isprintable() or name in said


def test_a_name_of_an_image_keeps_its_bytes():
    made = images.schema(PREFIX / "python").message("FILES")()
    made.type, made.id = 1, 1
    made.reg.id, made.reg.flags, made.reg.pos, made.reg.name = 1, 0, 0, "data/x"
    made.reg.fown.uid = made.reg.fown.euid = made.reg.fown.signum = made.reg.fown.pid = 0
    made.reg.fown.pid_type = 0
    raw = made.SerializeToString().replace(b"data/x", b"data/\xff")
    read = images.schema(PREFIX / "python").message("FILES")()
    read.ParseFromString(raw)
    assert os.fsencode(images.text(read.reg.name)) == b"data/\xff"


NAMED = (
    "import ctypes; ctypes.CDLL(None).prctl(15, bytes([255, 13, 12, 133]) + b') Z', 0, 0, 0)  # PR_SET_NAME"
)


def test_a_process_may_call_itself_anything(tmp_path: Path):
    """On a node with one such process, nothing that looks at all of them may end."""
    process = subprocess.Popen(
        [sys.executable, "-ISc", f"{NAMED}\nprint(1, flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout
        process.stdout.readline()
        assert found_in(process.pid, tmp_path) == []
        assert tree.inner(process.pid) == holders.inner_pids(process.pid)[-1]
        assert holders.comm(process.pid)
        assert forecast._memory(process.pid) > 0
        started = {start(process.pid) for start in (processes.start_time, state.start_time)}
        assert len({int(ticks) for ticks in started}) == 1
        call = journal.Journal(
            operation="restore",
            container_id="x",
            runtime="",
            runtime_args=[],
            root="",
            state=str(tmp_path),
            search_path="",
            image="",
        )
        assert undo.call_processes(call) == []
        assert not undo._doomed(process.pid)
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("granted", "own", "told"),
    [(True, True, False), (False, True, True), (False, False, False)],
    ids=["by the spec", "by the program", "by nobody"],
)
def test_who_may_have_a_sandbox_is_told(tmp_path: Path, *, granted: bool, own: bool, told: bool):
    (tmp_path / "config.json").write_text(json.dumps({"process": {"noNewPrivileges": granted}}))
    act = "import ctypes; ctypes.CDLL(None).prctl(38, 1, 0, 0, 0)" if own else ""  # PR_SET_NO_NEW_PRIVS
    process = subprocess.Popen(
        [sys.executable, "-ISc", f"{act}\nprint(1, flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout
        process.stdout.readline()
        found = list(forecast._sandboxes([process.pid], tmp_path))
        assert [finding.severity for finding in found] == ["warn"] * told
    finally:
        process.kill()
        process.communicate()


def test_names_of_processes_are_never_taken_for_text():
    """What /proc says of a process holds its name."""
    packages = ("engines", "shim", "netmig", "compat", "cluster")
    strict = re.compile(r"""["/](stat|status|comm|maps|smaps|mountinfo|cgroup)["']\)\.(read_text|open)\(\)""")
    found = [
        f"{path}: {line.strip()}"
        for package in packages
        for path in (CHECKOUT / package).rglob("*.py")
        for line in path.read_text().splitlines()
        if strict.search(line) and "proc/self/status" not in line
    ]
    assert [line for line in found if "/workloads/" not in line] == []


def test_what_a_process_has_is_found(tmp_path: Path):
    reader, writer = os.pipe2(os.O_DIRECT)
    program = "import os, sys; print(os.memfd_create('x'), flush=True); input()"
    process = subprocess.Popen(
        [sys.executable, "-ISc", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[writer]
    )
    try:
        assert process.stdout
        process.stdout.readline()
        (finding,) = found_in(process.pid, tmp_path)
        assert finding.rule == "criu.foresee.pipe"
        assert f"process {process.pid}" in finding.message
    finally:
        process.kill()
        process.communicate()
        os.close(reader)
        os.close(writer)


@pytest.mark.parametrize(
    ("text", "interval_ns"),
    [
        (EXPIRED, 1_002_000_000),
        (EXPIRED.replace("ticks: 3", "ticks: 0"), 0),
        (EXPIRED.replace("it_value: (0, 0)", "it_value: (0, 5)"), 0),
        (EXPIRED.replace("(1, 2000000)", "(0, 0)"), 0),
        ("", 0),
    ],
)
def test_which_timers_have_to_be_set_again(text: str, interval_ns: int):
    assert extras._expired(text) == interval_ns


def write_note(image: Path, **changed: object) -> None:
    note = {"schema": 1, "affinity": {}, "cgroups": {}, "timers": []} | changed
    (image / extras.NAME).write_text(json.dumps(note))


@pytest.mark.parametrize(
    "path",
    [
        "x",
        "",
        "/../x",
        "/..",
        "//..",
        "/a/../../x",
        "..",
        "/a\0b",
        "/\ud800",
        1,
        None,
        True,
        ["/x"],
        {"/x": 1},
    ],
)
def test_a_note_that_leads_out_of_the_cgroup_makes_the_image_a_damaged_one(tmp_path: Path, path: object):
    """Joined to the container's own, "x" is its neighbour."""
    write_note(tmp_path, cgroups={"1": {"devices": path}})
    with pytest.raises(ValueError, match="is damaged"):
        extras.read(tmp_path)


@pytest.mark.parametrize("path", ["/", "/x", "//x", "/x/y.service", "/a..b", "/.", "/\udcff"])
def test_a_process_comes_back_into_a_cgroup_below_its_container_s(tmp_path: Path, path: str):
    inside = tmp_path / "inside"
    inside.mkdir()
    write_note(tmp_path, cgroups={str(tree.inner(os.getpid())): {"x": path, "other": "/x"}})
    noted = extras.read(tmp_path)
    assert noted
    extras.apply(noted, os.getpid(), {"x": str(inside)})
    found = inside / path.strip("/") / "cgroup.procs"
    assert found.read_text() == str(os.getpid())
    assert {entry.name for entry in tmp_path.iterdir()} == {"inside", extras.NAME}


@pytest.mark.parametrize(
    "changed",
    [
        {"schema": 2},
        {"schema": None},
        *({"affinity": value} for value in (None, 1, "x", [1], {"x": []}, {"1": 1})),
        *({"cgroups": value} for value in (None, 1, "x", [1], {"x": {}}, {"1": 1}, {"1": ["/x"]})),
        *({"affinity": {"1": [value]}} for value in (-1, 10**9, "x", None, 1.5, True, [1])),
        *({"affinity": {key: [0]}} for key in ("", "-1", str(2**31), "9" * 5000)),
        *({"timers": value} for value in (None, 1, "x", [1], [[1, 2]], [[1, 2, 3, 4]], {"x": 1})),
        *({"timers": [[1, 2, value]]} for value in (2**63, -1, 3.5, None)),
        *({"timers": [[value, value, 3]]} for value in (2**31, -1, "x", None)),
    ],
)
def test_a_note_that_no_dump_writes_makes_the_image_a_damaged_one(tmp_path: Path, changed: dict[str, object]):
    write_note(tmp_path, **changed)
    with pytest.raises(ValueError, match="is damaged"):
        extras.read(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "1", "null", '"x"', "{}", "\xff", "[" * 100_000])
def test_a_note_that_is_none_makes_the_image_a_damaged_one(tmp_path: Path, text: str):
    (tmp_path / extras.NAME).write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match="is damaged"):
        extras.read(tmp_path)


def test_the_note_of_an_earlier_image_is_read(tmp_path: Path):
    write_note(tmp_path, timers=[[1, 3, 5]])
    (tmp_path / extras.NAME).rename(tmp_path / "torpor-extras.json")
    noted = extras.read(tmp_path)
    assert noted
    assert noted["timers"] == [(1, 3, 5)]


def test_an_image_without_notes_is_fine(tmp_path: Path):
    assert extras.read(tmp_path) is None


def test_the_other_end_of_a_socket_is_found():
    left, right = socket.socketpair()
    with left, right:
        ends = peers.of_namespace(Path("/proc/self/ns/net"))
        if not ends:
            pytest.skip("this kernel tells nothing about unix sockets")
        one, other = (os.fstat(end.fileno()).st_ino for end in (left, right))
        assert ends[one] == other
        assert peers.holders([other], without=()) == {other: os.getpid()}
        assert peers.holders([other], without=[os.getpid()]) == {}


def test_a_process_knows_its_threads():
    done = threading.Event()
    threading.Thread(target=done.wait).start()
    try:
        assert len(tree.threads(os.getpid())) >= 2
        assert os.getpid() in tree.of(os.getpid())
    finally:
        done.set()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "Expecting"),
        ("[]", "it is no"),
        ('{"schema": 2, "skip": {}}', "it is no"),
        ('{"schema": 1}', "it is no"),
        ('{"schema": 1, "skip": {"tcp": ""}}', "every name needs a reason"),
        ("[" * 100_000, "nested too deep; see"),
        ("1" * 5000, "value has 5000 digits; see"),
    ],
)
def test_a_profile_without_reasons_is_refused(tmp_path: Path, text: str, why: str):
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(InvalidRequest, match=f"could not read profile .*{why}"):
        load_profile(path)


# What a caller may have loaded: a library that starts a thread in every fork.
LOOK = """
import os, sys, threading, time
from pathlib import Path
os.register_at_fork(after_in_child=threading.Thread(target=time.sleep, args=(9,), daemon=True).start)
from engines.criu import foresee
print(*(finding.rule for finding in foresee.look(int(sys.argv[1]), Path(sys.argv[2])).findings))
"""
IN_NAMESPACE = """
import ctypes, sys
libc = ctypes.CDLL(None)
assert libc.unshare(0x10000000) == 0
libc.prctl(4, int(sys.argv[1]), 0, 0, 0)  # PR_SET_DUMPABLE
print(1, flush=True)
input()
"""


@pytest.mark.parametrize(("dumpable", "closed"), [(1, False), (0, True)])
def test_who_is_closed_to_its_own_user_namespace_is_known_whatever_the_caller_loaded(
    tmp_path: Path, dumpable: int, *, closed: bool
):
    process = subprocess.Popen(
        [sys.executable, "-ISc", IN_NAMESPACE, str(dumpable)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout
        assert process.stdout.readline() == b"1\n"
        words = [sys.executable, "-c", LOOK, str(process.pid), str(tmp_path)]
        said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    finally:
        process.kill()
        process.communicate()
    assert ("criu.foresee.user-namespace" in said) == closed
