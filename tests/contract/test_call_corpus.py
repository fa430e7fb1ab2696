"""Every way in which runtime callers call a runtime: read right, and handed over untouched or served."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import re
import resource
import shutil
import signal
import subprocess
import sysconfig
import tomllib
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from shim import entry
from shim.argv import parse
from shim.launcher import base_python, launcher, package_root, write_launchers
from tests.contract.recorder.harness import EXIT_STATUS, Record, build_recorder, record, start

DATA = Path(__file__).parents[1] / "data" / "call_corpus.toml"
CALLS: list[dict[str, Any]] = tomllib.loads(DATA.read_text())["call"]
STATES = ("fresh", "started", "held")

ANNOTATIONS = {
    "plain": {"io.kubernetes.cri.container-name": "c"},
    "ours": {"torpor.dev/restore-from.c": "name"},
    "criu": {"org.criu.config": "/tmp/evil.conf"},
    "foreign": {"restore.criu.org/checkpoint-path.c": "/x.tar"},
}


def _over(cases: list[dict[str, Any]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=lambda case: f"{CALLS.index(case)}-{case['caller']}")


every_call = _over(CALLS)


@dataclass(frozen=True, kw_only=True)
class Node:
    """Launchers whose real runtime is the recorder; bundles; a stand-in for torpor's own verbs."""

    path: Path
    recorder: Path
    launcher: Path
    settings: dict[str, str]
    bundles: dict[str, str]

    def words(self, case: dict[str, Any]) -> list[str]:
        return [self.text(word) for word in case["call"].split()]

    def text(self, text: str) -> str:
        return text.format(**self.bundles)

    def options(self, case: dict[str, Any]) -> dict[str, str]:
        return {name: self.text(value) for name, value in case.get("options", {}).items()}

    def enter(self, state: str, root: str, container_id: str) -> None:
        """Put torpor's state of the container into one of STATES."""
        shutil.rmtree(self.settings["STATE"], ignore_errors=True)
        if state == "fresh":
            return
        try:
            directory = Path(entry.container_dir(self.settings, root, container_id))
        except ValueError:
            return
        directory.mkdir(parents=True)
        if state == "held":
            (directory / "held").touch()

    def record(
        self,
        argv: list[bytes],
        environment: list[bytes],
        prepare: Callable[[], object] = lambda: None,
    ) -> tuple[Record, Record]:
        """What the recorder sees when it is called itself, and when the launcher is called instead."""
        runtime = os.fsencode(self.recorder)
        direct = record(self.recorder, self.recorder, [runtime, *argv], environment, prepare)
        return direct, record(self.launcher, self.recorder, [b"torpor-runtime", *argv], environment, prepare)


# Stands where the verbs are: what reaches it is written down.
STAND_IN = """
import json, os
def serve(call, settings):
    with open(settings["STATE"] + ".served", "w") as file:
        json.dump({"verb": call.verb, "argv": call.argv, "site": settings["SITE"],
                   "X": os.environ.get("X")}, file)
    return 7
"""


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Node:
    path = tmp_path_factory.mktemp("corpus")
    bundles: dict[str, str] = {}
    for name, found in ANNOTATIONS.items():
        (path / name).mkdir()
        (path / name / "config.json").write_text(json.dumps({"annotations": found}))
        bundles[name] = str(path / name)
    hot = path / "site" / "shim"
    shutil.copytree(package_root() / "shim", hot, ignore=shutil.ignore_patterns("verbs", "__pycache__"))
    (hot / "verbs").mkdir()
    (hot / "verbs" / "__init__.py").touch()
    (hot / "verbs" / "dispatch.py").write_text(STAND_IN)
    recorder = build_recorder(path / "runtime")
    settings = {"RUNTIME": str(recorder), "STATE": str(path / "state")}
    write_launchers(
        path / "bin",
        python=base_python(),
        package_root=path / "site",
        site=Path(sysconfig.get_path("purelib")),
        settings=settings,
    )
    return Node(
        path=path,
        recorder=recorder,
        launcher=path / "bin" / "torpor-runtime",
        settings=settings,
        bundles=bundles,
    )


@every_call
def test_a_call_is_read_as_the_runtime_reads_it(node: Node, case: dict[str, Any]) -> None:
    call = parse(node.words(case))
    assert call.verb == case["verb"]
    assert call.root == case.get("root", "/run/runc")
    if "id" in case:
        assert call.args[0] == case["id"]
    options = node.options(case)
    assert {name: call.options.get(name) for name in options} == options


@every_call
@pytest.mark.parametrize("state", STATES)
def test_torpor_serves_what_is_its_own_and_nothing_else(node: Node, case: dict[str, Any], state: str) -> None:
    node.enter(state, case.get("root", "/run/runc"), case.get("id", "c1"))
    call = parse(node.words(case))
    assert entry.decide(call, node.settings) == (state in case.get("serve", ()))


@_over([case for case in CALLS if len(case.get("serve", ())) < len(STATES)])
def test_what_is_not_ours_reaches_the_runtime_untouched(node: Node, case: dict[str, Any]) -> None:
    states = [state for state in STATES if state not in case.get("serve", ())]
    node.enter(states[0], case.get("root", "/run/runc"), case.get("id", "c1"))
    argv = [word.encode() for word in node.words(case)]
    direct, through = node.record(argv, [b"PATH=/usr/bin:/bin", b"HOME=/root"])
    assert through == direct
    assert through.status == EXIT_STATUS
    assert through.same_process
    assert through.argv == [os.fsencode(node.recorder), *argv]


@_over([case for case in CALLS if case.get("serve")])
def test_what_is_ours_reaches_torpor(node: Node, case: dict[str, Any]) -> None:
    node.enter(case["serve"][0], case.get("root", "/run/runc"), case.get("id", "c1"))
    document = Path(node.settings["STATE"] + ".served")
    document.unlink(missing_ok=True)
    words = node.words(case)
    _, status = start(
        node.launcher, [b"torpor-runtime", *[word.encode() for word in words]], [b"X=y"], lambda: None
    )
    assert status == 7
    seen = json.loads(document.read_text())
    assert seen == {
        "verb": case["verb"],
        "argv": words,
        "site": sysconfig.get_path("purelib"),
        "X": "y",
    }


START = [b"--root", b"/run/runc", b"start", b"c1"]
ENVIRONMENTS: dict[str, list[bytes]] = {
    "none": [],
    "ordinary": [b"PATH=/bin", b"LANG=C.UTF-8", b"NOTIFY_SOCKET=/run/n", b"LISTEN_FDS=2"],
    "C locale": [b"LC_ALL=C", b"PATH=/bin"],
    "POSIX locale": [b"LANG=POSIX"],
    "LC_CTYPE of C": [b"A=1", b"LC_CTYPE=C", b"B=2"],
    "an empty LC_CTYPE": [b"LC_CTYPE=", b"B=2"],
    "LC_CTYPE of C.UTF-8": [b"A=1", b"LC_CTYPE=C.UTF-8", b"B=2"],
    "two LC_CTYPE": [b"LC_CTYPE=C", b"A=1", b"LC_CTYPE=de_DE"],
    "an unknown locale": [b"LC_ALL=xx_YY.nonsense"],
    "names that are no identifiers": [b"x-y=1", b"my.var=2", b"1=3", b"BASH_FUNC_f%%=() { :; }", b" =4"],
    "bytes that are no UTF-8": [b"A\xff=\xfe\x80", b"B=\xc3", b"C=line\nline", b"D=" + bytes(range(1, 256))],
    "entries twice and out of order": [b"Z=1", b"A=1", b"Z=2", b"A="],
    "entries without a name or a sign": [b"=x", b"lonely", b"", b"A=1"],
    "for Python": [b"PYTHONPATH=/x", b"PYTHONHOME=/x", b"PYTHONINSPECT=1", b"PYTHONCOERCECLOCALE=0"],
    "for the shell": [b"ENV=/x", b"PWD=/nowhere", b"OLDPWD=/y", b"IFS=x", b"PS4=+", b"SHLVL=3", b"_=/z"],
    "large": [b"V%d=%s" % (number, b"x" * 1000) for number in range(500)],
}  # fmt: skip


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_the_environment_arrives_to_the_byte(node: Node, name: str) -> None:
    node.enter("fresh", "/run/runc", "c1")
    direct, through = node.record(START, ENVIRONMENTS[name])
    assert through.environment == ENVIRONMENTS[name]
    assert through == direct


@pytest.mark.parametrize(
    "words",
    [
        [b"start", b"\xff\xfe\x80"],
        [b"start", b"caf\xc3\xa9", b"", b" ", b"a\nb"],
        [b"--root", bytes(range(1, 256)), b"start", b"c1"],
        [b"dance", b"x" * 100_000],
        [b"exec", b"c1", b"-IS", b"-c", b"--", b"-"],
        [b"-c", b"print(1)"],
    ],
    ids=["no UTF-8", "odd", "every byte", "long", "for Python", "like Python's -c"],
)
@pytest.mark.parametrize("environment", [[], [b"LC_ALL=C"], [b"LANG=C.UTF-8"]], ids=["none", "C", "C.UTF-8"])
def test_arguments_arrive_to_the_byte(node: Node, words: list[bytes], environment: list[bytes]) -> None:
    node.enter("fresh", "/run/runc", "c1")
    direct, through = node.record(words, environment)
    assert through.argv[1:] == words
    assert through == direct


IGNORABLE = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)


@pytest.mark.parametrize("ignored", range(2 ** len(IGNORABLE)))
def test_ignored_signals_stay_ignored_and_others_do_not(node: Node, ignored: int) -> None:
    node.enter("fresh", "/run/runc", "c1")

    def prepare() -> None:
        for bit, number in enumerate(IGNORABLE):
            signal.signal(number, signal.SIG_IGN if ignored >> bit & 1 else signal.SIG_DFL)

    direct, through = node.record(START, [], prepare)
    assert through == direct


def _mask_and_pending() -> None:
    signal.pthread_sigmask(
        signal.SIG_SETMASK, {signal.SIGTERM, signal.SIGINT, signal.SIGRTMIN, signal.SIGPIPE}
    )
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGRTMIN)


def _everything_blocked() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())


def _surroundings() -> None:
    os.chdir("/proc/self")
    os.chdir("/usr/share")
    os.umask(0o137)
    os.nice(3)
    os.setsid()
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 2048))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


@pytest.fixture(scope="module")
def pipe() -> Generator[tuple[int, int]]:
    reading, writing = os.pipe()
    yield reading, writing
    os.close(reading)
    os.close(writing)


def _descriptors(pipe: tuple[int, int]) -> None:
    """Descriptors 3 to 9, as LISTEN_FDS and --preserve-fds pass them, and some high ones."""
    file = os.open("/etc/passwd", os.O_RDONLY)
    os.lseek(file, 10, os.SEEK_SET)
    # Out of the way first: the pipe may lie on the very numbers that are filled here.
    file, reading, writing = (fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 300) for number in (file, *pipe))
    for number in (3, 5, 7, 9, 200):
        os.dup2(file, number)
    for number in (4, 6):
        os.dup2(reading, number)
    for number in (8, 10):
        os.dup2(writing, number)
    os.set_blocking(8, False)


def _standard_streams_closed() -> None:
    for number in range(3):
        os.close(number)


def _only_input_closed() -> None:
    os.close(0)


def _death_signal() -> None:
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG, as containerd's shim does


@pytest.mark.parametrize(
    "prepare",
    [
        _mask_and_pending,
        _everything_blocked,
        _surroundings,
        _standard_streams_closed,
        _only_input_closed,
        _death_signal,
    ],
)
def test_the_process_is_handed_on_as_it_was(node: Node, prepare: Callable[[], object]) -> None:
    node.enter("fresh", "/run/runc", "c1")
    direct, through = node.record(START, [b"A=1"], prepare)
    assert through == direct
    assert through.same_process


def test_descriptors_are_handed_on(node: Node, pipe: tuple[int, int]) -> None:
    node.enter("fresh", "/run/runc", "c1")
    direct, through = node.record(START, [b"LISTEN_FDS=7"], lambda: _descriptors(pipe))
    for number in (4, 6, 8, 10):  # the caller's own 0 to 2 may be pipes too, or none
        assert re.search(rb"^fd %d .*pipe:" % number, through.facts, re.MULTILINE)
    assert through == direct


def test_standard_input_is_not_read(node: Node, tmp_path: Path) -> None:
    """`update --resources -` finds every byte of its input."""
    text = tmp_path / "input"
    text.write_text("x" * 10_000)
    descriptor = os.open(text, os.O_RDONLY)
    try:
        direct, through = node.record([b"update", b"-"], [], lambda: os.dup2(descriptor, 0))
    finally:
        os.close(descriptor)
    assert b"fd 0 flags 0" in through.facts
    assert b"offset 0 " in through.facts
    assert through == direct


def _launcher_with(node: Node, tmp_path: Path, **changes: Path) -> Path:
    arguments = {
        "python": base_python(),
        "root": node.path / "site",
        "conf_path": tmp_path / "none",
        **changes,
    }
    path = tmp_path / "torpor-runtime"
    path.write_bytes(
        launcher(**arguments, key="RUNTIME", runtime=str(node.recorder), machine=platform.machine())
    )
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    "changes",
    [
        {"python": Path("/nonexistent/python3.9")},
        {"python": Path("/etc/passwd")},
        {"root": Path("/nonexistent")},
        {},
    ],
    ids=["no interpreter", "an interpreter that cannot be run", "no torpor", "no runtime.conf"],
)
def test_a_broken_installation_still_runs_containers(
    node: Node, tmp_path: Path, changes: dict[str, Path]
) -> None:
    path = _launcher_with(node, tmp_path, **changes)
    node.enter("fresh", "/run/runc", "c1")
    direct = record(node.recorder, node.recorder, [os.fsencode(node.recorder), *START], [b"A=1"])
    assert record(path, node.recorder, [b"torpor-runtime", *START], [b"A=1"]) == direct


def test_a_machine_without_a_program_of_its_own_gets_a_script(node: Node, tmp_path: Path) -> None:
    path = tmp_path / "torpor-runtime"
    path.write_bytes(
        launcher(
            base_python(),
            node.path / "site",
            node.path / "etc" / "torpor" / "runtime.conf",
            "RUNTIME",
            str(node.recorder),
            "riscv64",
        )
    )
    path.chmod(0o755)
    node.enter("fresh", "/run/runc", "c1")
    seen = record(path, node.recorder, [b"torpor-runtime", *START, b"a b", b"$(c)"], [b"A=1"])
    assert seen.argv[1:] == [*START, b"a b", b"$(c)"]
    assert seen.status == EXIT_STATUS
    assert seen.same_process


def test_a_missing_runtime_is_said_in_the_callers_log(node: Node, tmp_path: Path) -> None:
    write_launchers(
        tmp_path / "bin",
        python=base_python(),
        package_root=package_root(),
        site=Path(sysconfig.get_path("purelib")),
        settings={"RUNTIME": "/nonexistent/runc"},
    )
    log = tmp_path / "log.json"
    run = subprocess.run(
        [tmp_path / "bin" / "torpor-runtime", "--log", log, "--log-format", "json", "start", "c1"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 1
    assert "could not run runtime '/nonexistent/runc'" in run.stderr
    assert json.loads(log.read_text())["level"] == "error"
