"""Whatever the spelling, a command line is read as runc reads it."""

from __future__ import annotations

import os
import random
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shim.argv import parse
from shim.dialects import crun, runc
from shim.entry import decide
from tests.support.containers import tool

WORDS = st.lists(
    st.one_of(
        st.text(max_size=8),
        st.sampled_from(["-", "--", "--help", "-b", "--bundle", "--root", "create", "delete", "--x=y", "-="]),
    ),
    max_size=10,
)


@given(words=WORDS, dialect=st.sampled_from(["runc", "crun", "runsc"]))
def test_any_words_are_read_without_an_exception(words: list[str], dialect: str) -> None:
    call = parse(words, dialect)
    assert call.argv == words
    assert call.global_args == words[: len(call.global_args)]
    decide(call, {"STATE": "/nonexistent"})


def _options(text: str) -> list[tuple[str, list[str], str]]:
    """(long name, spellings, kind) of each option in a grammar's table."""
    found: list[tuple[str, list[str], str]] = []
    for word in text.split():
        kind = word[-1] if word[-1] in "=#" else ""
        spellings = word.removesuffix(kind).split("|")
        found.append((spellings[0], spellings, kind))
    return found


VALUES = st.text(
    st.characters(blacklist_categories=["Cs"], blacklist_characters="\0"), min_size=1, max_size=12
)
PLAIN_IDS = st.from_regex(r"[a-z0-9][a-z0-9_.+-]{0,20}", fullmatch=True)


@st.composite
def calls(draw: st.DrawFn) -> tuple[list[str], str, dict[str, str], str]:
    """A verb with options in spellings of runc, options first: (words, verb, expected options, id)."""
    verb = draw(st.sampled_from(sorted(set(runc.VERBS) - {"features"})))
    chosen = draw(st.lists(st.sampled_from(_options(runc.VERBS[verb]) or [("", [], "")]), max_size=6))
    words: list[str] = []
    expected: dict[str, str] = {}
    spelling_of: dict[str, str] = {}
    for name, spellings, kind in chosen:
        if not name:
            continue
        spelling = spelling_of.setdefault(name, draw(st.sampled_from(spellings)))
        dashes = draw(st.sampled_from(["-", "--"]))
        if kind:
            value = str(draw(st.integers(-5, 99))) if kind == "#" else draw(VALUES)
            # A separate value that looks like an option of this verb would be sorted as one.
            joined = draw(st.booleans()) or value.startswith("-")
            words += [f"{dashes}{spelling}={value}"] if joined else [f"{dashes}{spelling}", value]
            expected[name] = value
        elif draw(st.booleans()):
            words.append(f"{dashes}{spelling}=true")
            expected[name] = ""
        else:
            words.append(f"{dashes}{spelling}=false")
            expected.pop(name, None)
    container = draw(PLAIN_IDS)
    return [*words, container], verb, expected, container


@given(call=calls())
def test_every_spelling_means_the_same(call: tuple[list[str], str, dict[str, str], str]) -> None:
    words, verb, expected, container = call
    read = parse(["--log-format=json", "-root", "/r", verb, *words])
    assert (read.verb, read.options, read.args, read.problem) == (verb, expected, [container], "")
    assert read.root == "/r"


@given(call=calls())
def test_where_the_id_stands_does_not_matter(call: tuple[list[str], str, dict[str, str], str]) -> None:
    words, verb, expected, container = call
    if verb in ("exec", "ps", "run"):  # what follows the id belongs to the command inside
        return
    read = parse([verb, container, *words[:-1]])
    assert (read.options, read.args) == (expected, [container])


@given(words=WORDS, verb=st.sampled_from(sorted(crun.VERBS)))
def test_nothing_gets_lost_between_options_and_positionals(words: list[str], verb: str) -> None:
    call = parse([verb, "--", *words], "crun")
    assert call.args == words


# runc itself as the judge: what it calls incorrect usage, and which container and bundle it goes for. The
# containers are only broken state files, so whatever the words say, nothing happens.
VOCABULARY = {
    "state": ["--help", "-h", "-x"],
    "start": ["--", "-help=false", "-a"],
    "kill": ["-a", "--all", "--all=false", "-all", "-all=maybe", "9", "--a", "-KILL", "-9"],
    "delete": ["--force", "-f", "-f=true", "--f=0", "-force=false"],
    "ps": ["-f", "--format", "json", "--format=json"],
    "exec": ["-p", "--process", "/x", "--process=/x", "-d", "-e", "A=b", "--preserve-fds", "3", "-l"],
    "pause": ["-x"],
    "checkpoint": ["--image-path", "/x", "--image-path=/x", "--status-fd", "3", "--status-fd=y"],
    "create": ["-b", "/nonA", "--bundle", "/nonB", "--bundle=/nonA", "--no-pivot", "--pid-file", "/p"],
}  # fmt: skip
GLOBAL = ["--debug", "--log=/dev/null", "-log-format=json", "-systemd-cgroup", "--debug=false", "--nope"]


@pytest.mark.engine
@pytest.mark.parametrize("seed", range(150))
def test_runc_agrees(tmp_path: Path, seed: int) -> None:
    # Not Hypothesis: one call costs milliseconds, and a seed in the test's name is as good as a shrunk case.
    chance = random.Random(seed)
    root = tmp_path / "root"
    for name in ("good", "other"):
        (root / name).mkdir(parents=True)
        (root / name / "state.json").write_text("{")
    verb = chance.choice(sorted(VOCABULARY))
    words = [
        chance.choice([*VOCABULARY[verb], "good", "none", "--", "-"]) for _ in range(chance.randint(0, 5))
    ]
    options = [chance.choice(GLOBAL) for _ in range(chance.choice([0, 0, 1, 2]))]
    argv = ["--root", str(root), *options, verb, *words]

    (tmp_path / "empty").mkdir()
    run = subprocess.run(
        [tool("runc"), *argv],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path / "empty",
        stdin=subprocess.DEVNULL,
    )
    said = run.stdout + run.stderr
    refused = "Incorrect Usage" in said or "NAME:\n" in said

    call = parse(argv)
    fits = {"kill": range(1, 3), "ps": range(1, 99), "exec": range(1, 99)}.get(verb, range(1, 2))
    assert (bool(call.problem) or call.wants_help or len(call.args) not in fits) == refused
    if refused or any(word.startswith("--log") for word in options):
        return
    if verb == "create":
        bundle = call.options.get("bundle")
        assert (f"chdir {bundle}:" if bundle else "config.json not found") in said
    elif call.args[0] == "good":
        assert "unexpected EOF" in said
    elif verb != "delete":
        assert "unexpected EOF" not in said
    assert os.listdir(tmp_path / "empty") == []
