"""A container whose migration is undecided is let run on neither side by who does not know of that."""

from __future__ import annotations

from pathlib import Path

import pytest

from shim import state
from shim.argv import parse
from shim.entry import container_dir, decide
from shim.state import ContainerState
from shim.verbs.dispatch import serve

DECIDE = "decide with torpor migrate --resolve source or target"


class Place:
    """torpor's state of container c1, and the words that the migration keeps."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.root = str(path / "root")
        self.word_path = path / "word"
        self.settings = {
            "RUNTIME": "/bin/true",
            "HANDLER": "RUNTIME",
            "STATE": str(path),
            "CONFIG": str(path / "none"),
            "STORE": str(path / "store"),
        }
        self.directory = Path(container_dir(self.settings, self.root, "c1"))
        self.directory.mkdir(parents=True)

    def holds(self) -> None:
        """It was restored, and waits."""
        found = ContainerState(
            container_id="c1",
            root=self.root,
            bundle="/b",
            phase="held",
            engine="criu",
            image="migration@sha256:" + "0" * 64,
            digest="sha256:" + "0" * 64,
            use="move",
            created="2026-01-01T00:00:00.000Z",
        )
        state.save(self.directory, found)

    def serves(self, verb: str) -> int | None:
        """The status of a call; None if it is the runtime's."""
        call = parse(["--root", self.root, verb, "c1"])
        return serve(call, self.settings) if decide(call, self.settings) else None


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.mark.parametrize("word", ["reserved", "preparing", "prepared"])
@pytest.mark.parametrize("verb", ["start", "resume"])
def test_what_comes_waits_for_the_decision(
    place: Place, word: str, verb: str, capfd: pytest.CaptureFixture[str]
) -> None:
    place.holds()
    state.note_standing(place.directory, place.word_path)
    place.word_path.write_text(f"{word}\n")
    assert place.serves(verb) == 1
    said = capfd.readouterr().err
    assert f"could not {verb} container 'c1': it comes from another node, and nobody has decided yet" in said
    assert DECIDE in said
    found = state.load(place.directory)
    assert found is not None
    assert found.phase == "held"


@pytest.mark.parametrize("word", ["committed", "running", "settled", ""])
def test_what_was_decided_to_run_here_may(place: Place, word: str) -> None:
    assert not state.is_coming(place.directory)
    state.note_standing(place.directory, place.word_path)
    assert not state.is_coming(place.directory)  # its record is gone, and so is what it was about
    place.word_path.write_text(f"{word}\n")
    assert not state.is_coming(place.directory)


@pytest.mark.parametrize(
    ("word", "words"), [("hold", DECIDE), ("commit", "it has left for another node"), ("abort", ""), ("", "")]
)
def test_what_leaves_is_not_resumed(
    place: Place, word: str, words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert place.serves("resume") is None
    state.note_verdict(place.directory, place.word_path)
    assert place.serves("resume") is None  # nothing was asked of the other node yet
    place.word_path.write_text(f"{word}\n")
    assert place.serves("resume") == (1 if words else None)
    assert words in capfd.readouterr().err
