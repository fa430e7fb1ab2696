"""Settings are read strictly: a wrong key or an unsafe file is named, never ignored."""

from dataclasses import replace
from pathlib import Path

import pytest

from shim.config import load
from shim.dropins import CONFIG_TOML
from shim.errors import UsageError

SECONDS = "must be a number of seconds, above 0 and at most 86400"


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


def test_the_template_names_each_key(tmp_path: Path) -> None:
    """With its default: the file may be put to use by taking the marks away."""
    keys = "\n".join(line[1:] for line in CONFIG_TOML.splitlines() if line.startswith("#") and " = " in line)
    bare = load(settings(tmp_path))
    assert load(settings(tmp_path, keys)) == replace(bare, engine="criu")
    named = sorted(line.partition(" =")[0] for line in keys.splitlines())
    with pytest.raises(UsageError, match=f"known keys: {', '.join(named)}$"):
        load(settings(tmp_path, "x = 1"))


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("checkpoint_timeout = 3", "did you mean 'checkpoint_timeout_s'"),
        ("colour = 3", "unknown key 'colour'; known keys: "),
        ('checkpoint_timeout_s = "3"', "'checkpoint_timeout_s' must be a number of seconds"),
        ("checkpoint_timeout_s = true", SECONDS),
        ("checkpoint_timeout_s = -1", SECONDS),
        ("checkpoint_timeout_s = nan", SECONDS),
        ("checkpoint_timeout_s = inf", SECONDS),
        ("checkpoint_timeout_s = 1e400", SECONDS),
        (f"restore_timeout_s = {10**400}", SECONDS),
        (f"restore_timeout_s = 0x{'f' * 5000}", SECONDS),
        (f"restore_timeout_s = {'9' * 5000}", "is not TOML: .*5000 digits"),
        (f"engine = {'[' * 3000}", "is not TOML: .*recursion"),
        ("compress = 1", "'compress' must be true or false"),
        ('allowed_hooks = "/a"', "must be a list of absolute paths"),
        ('allowed_hooks = ["a"]', "must be a list of absolute paths"),
        ("engine = 3", "'engine' must be the name of an engine"),
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
