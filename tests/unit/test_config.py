"""Settings are read strictly: a wrong key or an unsafe file is named, never ignored."""

from pathlib import Path

import pytest

from shim.config import load
from shim.errors import UsageError


def settings(tmp_path: Path, toml: str | None = None) -> dict[str, str]:
    path = tmp_path / "config.toml"
    if toml is not None:
        path.write_text(toml)
        path.chmod(0o644)
    return {"RUNTIME": "/usr/sbin/runc", "CONFIG": str(path)}


def test_defaults(tmp_path: Path) -> None:
    config = load(settings(tmp_path))
    assert config.runtime_path == Path("/usr/sbin/runc")
    assert config.store_path == Path("/var/lib/torpor")
    assert not config.foreign_annotations
    assert config.engine is None


def test_everything_can_be_set(tmp_path: Path) -> None:
    hot = {
        **settings(
            tmp_path,
            'engine = "criu"\ncheckpoint_timeout_s = 5\nrestore_timeout_s = 2.5\nallowed_hooks = ["/a"]\n'
            'archive_roots = ["/srv"]\ncompress = true\n',
        ),
        "STATE": "/s",
        "STORE": "/t",
        "TOOLS": "/u",
        "FOREIGN": "1",
    }
    config = load(hot)
    assert (config.state_path, config.store_path, config.tools_path) == (Path("/s"), Path("/t"), Path("/u"))
    assert (config.checkpoint_timeout_s, config.restore_timeout_s) == (5.0, 2.5)
    assert config.allowed_hooks == ("/a",)
    assert config.archive_roots == (Path("/srv"),)
    assert config.compress
    assert config.foreign_annotations


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("checkpoint_timeout = 3", "did you mean 'checkpoint_timeout_s'"),
        ("colour = 3", "unknown key 'colour'; known keys: "),
        ('checkpoint_timeout_s = "3"', "'checkpoint_timeout_s' has a value of the wrong kind"),
        ("checkpoint_timeout_s = true", "wrong kind"),
        ("compress = 1", "wrong kind"),
        ("checkpoint_timeout_s = -1", "wrong kind"),
        ('allowed_hooks = "/a"', "wrong kind"),
        ('allowed_hooks = ["a"]', "must be a list of absolute paths"),
        ("engine = 3", "wrong kind"),
        ("engine = [", "is not TOML"),
        ('overruled = ["privileges.users"]', "begin with 'cpu.'"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, toml: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load(settings(tmp_path, toml))


def test_a_file_that_others_may_write_is_refused(tmp_path: Path) -> None:
    hot = settings(tmp_path, 'engine = "criu"')
    Path(hot["CONFIG"]).chmod(0o666)
    with pytest.raises(UsageError, match="writable by nobody else"):
        load(hot)


def test_no_runtime_is_named() -> None:
    with pytest.raises(UsageError, match="names no RUNTIME"):
        load({})
