"""Which processes of a sandbox count as left behind by an exec session."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from engines.api import EngineSettings
from engines.gvisor.births import Birth, from_exec, parse
from engines.gvisor.preflight import Source
from engines.gvisor.runsc import Container, Runsc, Task
from shim.argv import parse as parse_call
from shim.entry import container_dir, note_exec

EXEC_NS = 1000


def birth(pid: int, parent: int, session: int, born_ns: int = 0, *files: int) -> Birth:
    return Birth(
        pid=pid, parent=parent, session=session, born_ns=born_ns, host_files=frozenset(files), name="x"
    )


INIT = birth(1, 0, 1, 0, 1, 2, 3)


@pytest.mark.parametrize(
    ("other", "first_exec_ns", "found"),
    [
        (birth(5, 1, 1, 2000, 2), EXEC_NS, False),  # the container's own session
        (birth(5, 1, 5, 500), EXEC_NS, False),  # a daemon that is older
        (birth(5, 1, 5, 2000), EXEC_NS, True),
        (birth(5, 1, 5, 2000), None, False),
        (birth(5, 1, 4, 2000, 4), None, True),  # holds streams of a session
        (birth(5, 1, 4, 2000, 2), None, False),
    ],
)
def test_a_process_in_another_session_counts_if_it_is_younger_or_holds_streams(
    other: Birth, first_exec_ns: int | None, found: bool
) -> None:
    assert bool(from_exec((INIT, other), first_exec_ns)) is found


def test_descendants_are_of_their_eldest_and_a_pod_numbers_more_streams() -> None:
    daemon, worker = birth(5, 1, 5, 500), birth(9, 5, 9, 2000)
    assert from_exec((INIT, daemon, worker), EXEC_NS) is None
    left = birth(6, 1, 6, 1500)
    assert from_exec((INIT, left, birth(7, 6, 6, 1600)), EXEC_NS) == left
    second = birth(2, 0, 2, 0, 4, 5, 6)
    assert from_exec((INIT, second, birth(8, 2, 8, 10, 6)), None) is None
    assert from_exec((INIT, second, birth(8, 2, 8, 10, 7)), None)


def test_what_runsc_says_of_processes_is_read() -> None:
    told = {
        "fdlist": [{"number": 0, "path": "host:[4]"}, {"number": 1, "path": "/dev/null"}],
        "clone_ts": 77,
        "status": {"comm": "sleep", "pid": 8, "ppid": 1},
        "stat": {"pgid": 5, "sid": 5},
    }
    found = Birth(
        pid=8,
        parent=1,
        session=5,
        born_ns=77,
        host_files=frozenset({4}),
        name="sleep",
        holds=frozenset({("/dev/null", "open")}),
    )
    assert parse(f"PROCFS DUMP\n\n{json.dumps(told)}\n") == (found,)


def test_the_launcher_marks_the_first_exec_session_of_a_container(tmp_path: Path) -> None:
    places = {"STATE": str(tmp_path), "HANDLER": "RUNSC"}
    root = "/run/runsc"
    state_path = Path(container_dir(places, root, "c1"))
    runsc = Runsc(
        EngineSettings(
            runtime_path=Path("/bin/false"), root_path=Path(root), state_path=state_path, search_path="/bin"
        )
    )

    def call(*words: str) -> None:
        note_exec(parse_call(["--root", root, *words], "runsc"), places)

    assert runsc.first_exec_ns("c1") is None
    call("exec", "c1", "true")
    (mark,) = state_path.parent.iterdir()
    os.utime(mark, ns=(5, 5))
    call("exec", "c1", "true")
    call("delete", "c2")
    assert runsc.first_exec_ns("c1") == 5
    assert not state_path.exists()
    call("delete", "--force", "c1")
    assert runsc.first_exec_ns("c1") is None


@pytest.mark.parametrize(("pid", "warned"), [(500, False), (1300, True)])
def test_an_image_that_ended_processes_make_large_comes_with_a_warning(
    tmp_path: Path, pid: int, warned: bool
) -> None:
    settings = EngineSettings(
        runtime_path=Path("/bin/false"), root_path=tmp_path, state_path=tmp_path, search_path="/bin"
    )
    source = Source(Runsc(settings), Container(id="c1", pid=0, status="running"), {}, tmp_path, "no")
    source._tasks = {"c1": tuple(Task(pid=each, parent=0, uid=0, name="x") for each in (1, pid))}
    assert ["about 101 MiB" in said for said in source.warnings("20240729.0")] == ([True] if warned else [])


@pytest.mark.parametrize(
    ("version", "path", "warned"),
    [
        ("0.0~20240729.0", "anon_inode:[eventpoll]", True),
        ("release-20260817.0", "anon_inode:[eventpoll]", True),
        ("unknown", "anon_inode:[eventpoll]", True),
        ("release-20260914.0", "anon_inode:[eventpoll]", False),
        ("0.0~20240729.0", "/tmp/[eventpoll]", False),
        ("0.0~20240729.0", "socket:[5]", False),
    ],
)
def test_a_runsc_that_brings_closed_descriptors_back_is_named_where_something_polls(
    tmp_path: Path, version: str, path: str, warned: bool
) -> None:
    settings = EngineSettings(
        runtime_path=Path("/bin/false"), root_path=tmp_path, state_path=tmp_path, search_path="/bin"
    )
    source = Source(Runsc(settings), Container(id="c1", pid=0, status="running"), {}, tmp_path, "no")
    source._tasks = {"c1": (Task(pid=1, parent=0, uid=0, name="x"),)}
    document = {
        "status": {"pid": 1, "comm": "no\nde"},
        "stat": {"sid": 1},
        "clone_ts": 1,
        "fdlist": [{"path": path}],
    }
    source._births = parse(json.dumps(document))
    assert ["'no\\nde'" in said for said in source.warnings(version)] == ([True] if warned else [])
