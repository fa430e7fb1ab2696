"""Network namespaces by descriptor: entered by one thread, the same whatever becomes of the path."""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import threading
from collections.abc import Generator
from pathlib import Path

import pytest

from netmig.errors import NetworkError
from netmig.ns import Netns
from netmig.places import Place, open_place, place_of

pytestmark = pytest.mark.engine

OWN = Path("/proc/thread-self/ns/net")


@pytest.fixture
def netns(tmp_path: Path) -> Generator[Netns]:
    made = Netns.create(tmp_path / "one")
    yield made
    made.remove()


def here() -> int:
    return OWN.stat().st_ino


def test_only_this_thread_goes_in(netns: Netns) -> None:
    home, entered, elsewhere = here(), threading.Event(), list[int]()

    def look() -> None:
        entered.wait()
        elsewhere.append(here())

    thread = threading.Thread(target=look)
    thread.start()
    with netns.inside():
        assert here() == netns.inode != home
        entered.set()
        thread.join()
        child = subprocess.run(["readlink", "/proc/self/ns/net"], capture_output=True, text=True, check=True)
        inner = socket.socket()
    assert child.stdout.strip() == f"net:[{netns.inode}]"
    assert here() == home
    assert elsewhere == [home]
    with inner, pytest.raises(OSError, match="unreachable"):
        inner.connect(("127.0.0.1", 9))  # its loopback device is down


def test_an_error_inside_leads_out(netns: Netns) -> None:
    home = here()
    gc.collect()  # what other tests left to it
    n_open = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(ZeroDivisionError), netns.inside(), netns.inside():
            raise ZeroDivisionError
        with pytest.raises(ZeroDivisionError), netns.ipr():
            raise ZeroDivisionError
    assert here() == home
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= n_open  # a thread of another test may close its own now


def test_handles_stay_where_they_were_opened(netns: Netns) -> None:
    with netns.ipr() as ipr:
        assert [one.get("ifname") for one in ipr.get_links()] == ["lo"]
        ipr.link("set", index=1, state="up")
    with netns.inside():
        assert "UP" in subprocess.run(["ip", "link"], capture_output=True, text=True, check=True).stdout


def test_sysctls_are_the_namespaces_own(netns: Netns, tmp_path: Path) -> None:
    name = "net/ipv4/ip_unprivileged_port_start"
    other = Netns.create(tmp_path / "two")
    try:
        netns.set_sysctl(name, "77")
        assert (netns.sysctl(name), other.sysctl(name)) == ("77", "1024")
    finally:
        other.remove()
    with pytest.raises(NetworkError, match="could not read sysctl 'net/none'"):
        netns.sysctl("net/none")
    with pytest.raises(NetworkError, match=r"could not set sysctl 'net/ipv4/ip_forward' .* to 'x': Invalid"):
        netns.set_sysctl("net/ipv4/ip_forward", "x")
    for strange in ("kernel/hostname", "net/../kernel/hostname"):
        with pytest.raises(ValueError, match="is not below net/"):
            netns.set_sysctl(strange, "x")


def test_what_is_not_there_or_there_already(netns: Netns, tmp_path: Path) -> None:
    with pytest.raises(NetworkError, match=r"could not open network namespace '.*none': No such file"):
        Netns.open(tmp_path / "none")
    with pytest.raises(NetworkError, match=r"could not create network namespace '.*one': File exists"):
        Netns.create(netns.path)
    plain = tmp_path / "plain"
    plain.touch()
    home, no_namespace = here(), Netns.open(plain)
    with no_namespace, pytest.raises(NetworkError, match="could not enter"), no_namespace.inside():
        raise AssertionError
    assert here() == home


def test_removed_again_and_again(tmp_path: Path) -> None:
    """A call that was killed between its two steps left a plain file."""
    path = tmp_path / "one"
    path.touch()
    Netns(path, -1).remove()
    assert not path.exists()
    Netns(path, -1).remove()
    made = Netns.create(path)
    made.close()
    made.close()
    made.remove()
    assert not path.exists()


def test_a_place_leads_to_the_same_namespace_only(netns: Netns) -> None:
    place = place_of(netns)
    found = open_place(place)
    assert found is not None
    with found:
        assert found.inode == netns.inode
    # The path was only right in the process that wrote it down, but it is the node's namespace.
    with Netns.open(OWN) as node:
        for path in ("/proc/self/ns/net", "/proc/999999999/ns/net"):
            again = open_place(Place(path=path, inode=node.inode))
            assert again is not None
            again.close()
    assert open_place(Place(path=place.path, inode=1)) is None
