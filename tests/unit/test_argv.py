"""How command lines of runc, crun and runsc are read, beyond what callers send (see the call corpus)."""

from __future__ import annotations

import pytest

from shim.argv import parse
from shim.dialects.runsc import translate


def test_an_empty_command_line_has_no_verb() -> None:
    call = parse([])
    assert (call.verb, call.args, call.problem, call.root) == ("", [], "", "/run/runc")


def test_global_options() -> None:
    words = ["--root=/r", "-log", "/l", "--log-format", "json", "--debug", "--systemd-cgroup", "state", "x"]
    call = parse(words)
    assert (call.root, call.log, call.log_format) == ("/r", "/l", "json")
    assert call.debug
    assert call.systemd_cgroup
    assert call.global_args == words[:-2]
    assert call.argv == words


def test_a_flag_can_be_unset() -> None:
    assert not parse(["--debug", "--debug=false", "state", "x"]).debug


def test_repeated_options_keep_their_order_and_the_last_one_counts() -> None:
    call = parse(["exec", "-e", "A=1", "-e", "B=2", "x", "env"])
    assert call.pairs == [("env", "A=1"), ("env", "B=2")]
    assert call.options == {"env": "B=2"}
    assert call.args == ["x", "env"]


@pytest.mark.parametrize(
    ("words", "args"),
    [
        (["kill", "x", "--all", "9"], ["9", "x"]),  # runc takes the word after a flag along with it
        (["kill", "-a", "x", "9"], ["x", "9"]),
        (["kill", "x", "-9"], ["x", "-9"]),
        (["kill", "--", "x", "-a"], ["x", "-a"]),
        (["state", "x", "--"], ["x"]),
        (["state", "-"], ["-"]),
    ],
)
def test_positionals_as_runc_sorts_them(words: list[str], args: list[str]) -> None:
    call = parse(words)
    assert call.args == args
    assert not call.problem


@pytest.mark.parametrize(
    "words",
    [
        ["--dance", "state", "x"],
        ["---root", "state", "x"],
        ["-=x", "state", "x"],
        ["--root"],
        ["--debug=maybe", "state", "x"],
        ["state", "-x", "c1"],
        ["create", "--preserve-fds", "many", "x"],
        ["create", "-b", "/a", "--bundle", "/b", "x"],
        ["delete", "--force=perhaps", "x"],
        ["restore", "--lsm-mount-context"],
    ],
)
def test_what_runc_would_refuse_is_a_problem(words: list[str]) -> None:
    assert parse(words).problem


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["-v"], ["create", "-h"], ["create", "x", "--help"]])
def test_help_is_noticed(words: list[str]) -> None:
    assert parse(words).wants_help


def test_help_for_the_command_inside_is_not_ours() -> None:
    assert not parse(["exec", "x", "ls", "--help"]).wants_help


def test_a_user_has_a_root_of_his_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1000")
    assert parse(["state", "x"]).root == "/run/user/1000/runc"
    assert parse(["--root", "/r", "state", "x"]).root == "/r"


@pytest.mark.parametrize(
    ("words", "options", "args"),
    [
        (["create", "-b/b", "x"], {"bundle": "/b"}, ["x"]),
        (["create", "x", "--bundle=/b", "--no-pivot"], {"bundle": "/b", "no-pivot": ""}, ["x"]),
        (["create", "--bun", "/b", "-f", "other.json", "x"], {"bundle": "/b", "config": "other.json"}, ["x"]),
        (["exec", "-dtu", "root", "x", "-d"], {"detach": "", "tty": "u"}, ["root", "x", "-d"]),
        (["kill", "-a", "--", "x", "9"], {"all": ""}, ["x", "9"]),
        (["restore", "--tcp-close", "-d", "x"], {"tcp-close": "", "detach": ""}, ["x"]),
    ],
)
def test_crun_reads_as_getopt_does(words: list[str], options: dict[str, str], args: list[str]) -> None:
    call = parse(["--cgroup-manager=cgroupfs", "--root", "/r", *words], "crun")
    assert (call.root, call.options, call.args, call.problem) == ("/r", options, args, "")


@pytest.mark.parametrize(
    "words",
    [
        ["create", "--no-pivot=1", "x"],
        ["create", "--no", "x"],
        ["create", "-Z", "x"],
        ["create", "x", "--bundle"],
        ["--dance", "state", "x"],
    ],
)
def test_what_crun_would_refuse_is_a_problem(words: list[str]) -> None:
    assert parse(words, "crun").problem


def test_crun_knows_its_own_root_and_help() -> None:
    assert parse(["state", "x"], "crun").root == "/run/crun"
    assert parse(["state", "-?"], "crun").wants_help


EXTRA = ["--platform=systrap", "--network=none"]


@pytest.mark.parametrize(
    ("words", "translated"),
    [
        (
            "--root /r --log /l --log-format json --rootless=auto create --bundle /b --pid-file /p --no-pivot"
            " --no-new-keyring --preserve-fds 1 c1",
            "--root=/r --log=/l --log-format=json EXTRA create --bundle=/b --pid-file=/p c1",
        ),
        ("--debug start c1", "--debug EXTRA start c1"),
        ("kill -a c1 9", "EXTRA kill --all c1 9"),
        ("delete -f c1", "EXTRA delete --force c1"),
        ("ps -f json c1", "EXTRA ps --format=json c1"),
        (
            "exec -p /p -d -t --preserve-fds 2 -e A=1 -e B=2 --ignore-paused c1 ls -l",
            "EXTRA exec --process=/p --detach -pass-fd=3:3 -pass-fd=4:4 --env=A=1 --env=B=2 c1 ls -l",
        ),
        (
            "checkpoint --image-path /i --work-path /w --file-locks --shell-job --leave-running c1",
            "EXTRA checkpoint --image-path=/i --work-path=/w --leave-running c1",
        ),
        # What gVisor cannot do is left in, for gVisor to refuse.
        ("checkpoint --pre-dump --image-path /i c1", "EXTRA checkpoint --pre-dump --image-path=/i c1"),
        (
            "restore --image-path /i -no-subreaper --lsm-profile a:b --no-pivot --detach c1",
            "EXTRA restore --image-path=/i --no-subreaper --detach c1",
        ),
        ("events --stats c1", "EXTRA events --stats c1"),
        ("--version", "EXTRA --version"),
        ("create --dance c1", "EXTRA create --dance c1"),
    ],
)
def test_runsc_gets_only_what_it_knows(words: str, translated: str) -> None:
    expected = translated.replace("EXTRA", " ".join(EXTRA)).split()
    assert translate(parse(words.split(), "runsc"), EXTRA) == expected
