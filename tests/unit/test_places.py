"""Where paths of a container lie on the node, whatever links a volume or a root file system has."""

from __future__ import annotations

from pathlib import Path

import pytest

from engines.places import Places, resolve, source


@pytest.mark.parametrize(
    ("path", "resolved"),
    [
        ("/abs/x", "/b/x"),
        ("/rel/x", "/b/x"),
        ("/up/x", "/x"),
        ("/out/x", "/etc/x"),
        ("/loop/x", "/loop/x"),
        ("/b/../c/./d/", "/c/d"),
        ("/", "/"),
    ],
)
def test_resolving_never_leaves_the_root(tmp_path: Path, path: str, resolved: str):
    (tmp_path / "b").mkdir()
    for name, target in {
        "abs": "/b",
        "rel": "b",
        "up": "../../..",
        "out": "/../../etc",
        "loop": "loop",
    }.items():
        (tmp_path / name).symlink_to(target)
    assert resolve(tmp_path, path) == resolved


@pytest.fixture
def places(tmp_path: Path) -> Places:
    """A container with a volume that has been made to lead out of it."""
    for name in ("root/etc", "root/vol", "volume/own", "secret"):
        (tmp_path / name).mkdir(parents=True)
    for name, target in {
        "up": "../secret",
        "absolute": str(tmp_path / "secret"),
        "etc": "/etc",
        "same": "/vol/own",
        "loop": "loop",
    }.items():
        (tmp_path / "volume" / name).symlink_to(target)
    (tmp_path / "root/link").symlink_to("/vol/own")
    return Places(tmp_path / "root", {"/vol": tmp_path / "volume", "/proc": None})


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("/vol", "volume"),
        ("/vol/log", "volume/log"),
        ("/vol/../../../secret/x", "root/secret/x"),
        ("/vol/..", "root"),
        ("/..", "root"),
        ("/", "root"),
        ("/vol/up/x", "root/secret/x"),
        ("/vol/etc/x", "root/etc/x"),
        ("/vol/same/x", "volume/own/x"),
        ("/link/x", "volume/own/x"),
        ("/vol/up", "volume/up"),  # the link itself
        ("/vol/up/.", "root/secret"),
        ("/proc/1/root/x", None),
        ("/vol/\0/x", "volume/\0/x"),
    ],
)
def test_no_path_leads_out_of_a_container(places: Places, tmp_path: Path, path: str, place: str | None):
    real = places.real(path)
    assert places.on_node(real) == (tmp_path / place if place else None)


def test_an_absolute_link_of_a_volume_leads_into_the_container(places: Places, tmp_path: Path):
    real = places.real("/vol/absolute/x")
    assert places.on_node(real) == tmp_path / "root" / str(tmp_path / "secret/x").lstrip("/")
    assert places.top("/vol/x") == places.top("/vol") == "/vol"
    assert places.top("/vol", beneath=True) == places.top("/volume") == "/"


def test_a_chain_of_links_longer_than_the_kernel_follows_leads_nowhere(tmp_path: Path):
    (tmp_path / "0").mkdir()
    for number in range(60):
        (tmp_path / str(number + 1)).symlink_to(f"/{number}")
    places = Places(tmp_path, {})
    assert places.real("/40/x") == "/0/x"
    for path in ("/41/x", "/60/x"):
        with pytest.raises(OSError, match="Too many"):
            places.real(path)


def test_where_a_mount_is_from(tmp_path: Path):
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert source({"type": "bind", "source": str(tmp_path / "link")}) == tmp_path.resolve() / "real"
    assert source({"options": ["rbind"], "source": "/x"}) == Path("/x")
    for mount in ({"type": "tmpfs", "source": "/x"}, {"type": "bind", "source": "x"}, {"type": "bind"}):
        assert source(mount) is None
