"""Finding the system's own Debian archive, and versions in what programs say."""

from __future__ import annotations

from pathlib import Path

import pytest

from shim.toolchain import apt
from shim.toolchain.lock import ToolchainError
from shim.toolchain.units import BY_NAME, parse_version

STANZAS = """\
Types: deb-src
URIs: http://source.example/debian

Types: deb
Enabled: no
URIs: http://off.example/debian

# the one in use
Types: deb deb-src
URIs: http://near.example/debian/ http://far.example/debian
Suites: bookworm
Components: main
"""


@pytest.mark.parametrize(
    ("name", "text", "mirror"),
    [
        ("sources.list.d/debian.sources", STANZAS, "http://near.example/debian"),
        ("sources.list", "# deb http://no.example/debian x main\ndeb http://a.example/debian x main\n", "a"),
        ("sources.list", "deb [arch=amd64 signed-by=/k.gpg] https://b.example/debian x main\n", "b"),
    ],
)
def test_the_systems_archive_is_found(tmp_path: Path, name: str, text: str, mirror: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    found = apt.system_mirror(tmp_path)
    assert (
        found == mirror
        or found.removeprefix("https://").removeprefix("http://") == f"{mirror}.example/debian"
    )


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("sources.list", "deb http://security.example/debian-security x main\n"),
        ("sources.list", "deb cdrom:[Debian]/debian x main\ndeb file:/srv/debian x main\n"),
        ("sources.list.d/debian.sources.dpkg-old", STANZAS),
        ("preferences", ""),
    ],
)
def test_a_system_without_one_is_asked_for_it(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    with pytest.raises(ToolchainError, match="give --mirror"):
        apt.system_mirror(tmp_path)


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("Version: 4.2.1\n", (4, 2, 1)),
        ("runc version 1.3.6+ds1\ncommit: 1.3.6\n", (1, 3, 6)),
        ("runsc version release-20231218.0\nspec: 1.1.0\n", (20231218, 0)),
        ("runsc version 0.0~20240729.0\n", (20240729, 0)),
        ("containerd github.com/containerd/containerd/v2 2.1.9+unknown \n", (2, 1, 9)),
        ("containerd github.com/containerd/containerd 1.6.20~ds1 1.6.20\n", (1, 6, 20)),
        ("nftables v1.0.6 (Lester Gooch #5)\n", (1, 0, 6)),
        ("ip utility, iproute2-6.1.0, libbpf 1.1.0\n", (6, 1, 0)),
        ("Segmentation fault\n", None),
    ],
)
def test_versions_are_understood(text: str, version: tuple[int, ...] | None) -> None:
    assert parse_version(text) == version


def test_nothing_lets_an_unverified_package_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apt.Suite, "_run", lambda *_: "")
    for check in (True, False):
        suite = apt.Suite(name="forky", path=tmp_path, mirror="http://x/debian", check_valid_until=check)
        suite.prepare()
        source = (tmp_path / "etc/sources.list").read_text()
        assert "signed-by=/usr/share/keyrings/debian-archive-keyring." in source
        assert "trusted" not in source
        assert ("check-valid-until=no" in source) == (not check)
    settings = (tmp_path / "apt.conf").read_text()
    assert 'APT::Get::AllowUnauthenticated "false";' in settings
    assert 'Acquire::AllowInsecureRepositories "false";' in settings


def test_criu_must_be_new_enough_for_sockets() -> None:
    assert BY_NAME["criu"].minimum == (4, 2)
