"""However broken torpor is, the calls that stop containers reach the real runtime."""

from pathlib import Path

import pytest

from shim.argv import parse
from shim.verbs.dispatch import serve


@pytest.mark.parametrize(
    ("verb", "status"), [("delete", None), ("state", None), ("features", None), ("start", 1), ("exec", 255)]
)
def test_a_misspelt_setting_stops_no_container_from_stopping(
    tmp_path: Path, verb: str, status: int | None, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.toml").write_text("colour = 1")
    (tmp_path / "config.toml").chmod(0o644)
    settings = {"RUNTIME": "/bin/true", "STATE": str(tmp_path), "CONFIG": str(tmp_path / "config.toml")}
    words = [verb] if verb == "features" else [verb, "c1"]
    assert serve(parse(words), settings) == status
    assert capfd.readouterr().out == ""


def test_a_damaged_state_does_not_keep_a_container_from_being_deleted(tmp_path: Path) -> None:
    root = tmp_path / "root"
    directory = tmp_path / "containers" / str(root).replace("/", "%2F") / "c1"
    directory.mkdir(parents=True)
    (directory / "state.json").write_text("{")
    settings = {"RUNTIME": "/bin/true", "STATE": str(tmp_path), "CONFIG": str(tmp_path / "none")}
    assert serve(parse(["--root", str(root), "delete", "--force", "c1"]), settings) is None
