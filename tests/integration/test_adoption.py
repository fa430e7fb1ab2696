"""A namespace that a plugin set up is given the addresses of a container that sleeps, or stays as it was."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from netmig import hold, nft
from netmig.capture import capture
from netmig.identity import Identity, diff, encode
from netmig.lease import HostLocal, Owner
from shim.leases import owner_id
from tests.support.containers import CHECKOUT, SEARCH_PATH, tool
from tests.support.segment import Segment, segment

pytestmark = pytest.mark.engine

# Does what a restore does, and dies by its own hand after the step that argv names.
CHILD = """
import os, signal, sys
from pathlib import Path
from netmig import apply, claim, hold
from shim.adoption import Adoption, clear
from shim.errors import ShimError
from shim.identity import read
from netmig.lease import HostLocal, Owner
from shim import leases

last, image, netns, net, directory, search = sys.argv[1:]
if last == "clear":
    clear(Path(net), Path(directory), search)
    sys.exit()

def die(step):
    if step == last:
        os.kill(os.getpid(), signal.SIGKILL)

def dying(module, name, step):
    function = getattr(module, name)
    def wrapped(*args, **more):
        done = function(*args, **more)
        die(step)
        return done
    setattr(module, name, wrapped)

pods = HostLocal("pods", Path(net).parent / "networks")
if pods.path.exists():
    leases.plugins_of = lambda path: {"eth0": (pods, Owner(container_id="sandbox"))}
dying(HostLocal, "reserve", "lease")
dying(HostLocal, "hand_over", "lease")
dying(hold, "lock", "lock")
dying(apply, "apply", "apply")
dying(apply, "plug", "plug")
adoption = Adoption(
    read(Path(image)), Path(netns), network_path=Path(net), directory=Path(directory), search_path=search,
    table="CRIU-0123-4567", peers=("10.77.0.30",), digest="sha256:00", what="web",
)
if last == "foresee":
    print(*(f"{one.severity}: {one.message}" for one in adoption.foresee()), sep="\\n")
    sys.exit()
try:
    with adoption:
        die("enter")
        print(*(finding.message for finding in adoption.take()), sep="\\n")
        die("take")
        adoption.open()
        die("open")
        if last == "fail":
            raise ShimError("the engine failed")
        adoption.done()
        die("done")
except ShimError as error:
    sys.exit(str(error))
"""


class Place:
    """A segment with a container's old identity in an image, and a new pod on it."""

    def __init__(self, made: Segment, path: Path) -> None:
        self.segment, self.path = made, path
        old = made.add("old", 10)
        self.new = made.add("new", 11)
        made.add("peer", 30)
        self.old: Identity = capture(old.netns, made.node)
        made.unplug(old)  # the old pod is gone
        self.before = capture(self.new.netns, made.node)
        (path / "image").mkdir()
        (path / "image" / "network.json").write_bytes(encode(self.old))
        (path / "state").mkdir()

    def run(self, last: str) -> subprocess.CompletedProcess[str]:
        """A call on the node that ends with the step `last`."""
        argv = [sys.executable, "-c", CHILD, last, self.path / "image", self.new.netns.path]
        argv += [self.path / "net", self.path / "state", SEARCH_PATH]
        with self.segment.node.inside():
            return subprocess.run(
                [str(word) for word in argv],
                capture_output=True,
                text=True,
                check=False,
                cwd=CHECKOUT,
                env={**os.environ, "PATH": SEARCH_PATH},
            )

    def now(self) -> Identity:
        return capture(self.new.netns, self.segment.node)

    def bridges(self) -> list[str | None]:
        return [link.host.bridge for link in self.now().links if link.host]

    def left(self) -> list[Path]:
        return [path for path in (self.path / "net").glob("*/*") if path.is_file()]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    nft.use_program(tool("nft"))
    with segment(tmp_path / "ns") as made:
        yield Place(made, tmp_path)
    nft.use_program(None)


def test_a_pod_becomes_the_one_that_slept(place: Place) -> None:
    ended = place.run("none")
    assert ended.returncode == 0, ended.stderr
    first, second = ended.stdout.splitlines()
    assert "gave the pod 10.77.0.11, fd77::b, and it now has 10.77.0.10, fd77::a" in first
    assert "nobody keeps 10.77.0.10, fd77::a for the pod" in second
    assert diff(place.old, place.now()) == []
    assert hold.tables(place.new.netns) == ()
    assert place.bridges() == ["br0"]
    assert place.left() == []


def test_what_this_node_cannot_take_over_is_told(place: Place) -> None:
    foreign = json.loads(encode(place.old))
    foreign["sysctls"]["net/ipv4/of_another_kernel"] = "1"
    (place.path / "image" / "network.json").write_text(json.dumps(foreign))
    ended = place.run("none")
    assert ended.returncode == 0, ended.stderr
    assert "could not read sysctl 'net/ipv4/of_another_kernel'" in ended.stdout.splitlines()[2]


@pytest.mark.parametrize("last", ["enter", "lock", "apply", "plug", "take", "open"])
def test_a_call_that_was_killed_is_taken_back(place: Place, last: str) -> None:
    assert place.run(last).returncode == -signal.SIGKILL
    assert bool(hold.tables(place.new.netns)) == (last != "enter")
    if last in {"take", "open"}:
        assert diff(place.old, place.now()) == [], "it was given the addresses"
    for _ in range(2):
        ended = place.run("clear")
        assert ended.returncode == 0, ended.stderr
        as_before(place)


@pytest.mark.parametrize("last", ["lease", "apply", "open", "fail"])
def test_leases_are_given_back(place: Place, last: str) -> None:
    """One address waited for the image, the other one was nobody's."""
    store = asleep(place)
    before = owners(store)
    ended = place.run(last)
    assert ended.returncode == (1 if last == "fail" else -signal.SIGKILL), ended.stderr
    if last != "fail":
        assert owners(store) != before
    for _ in range(2):
        recover(place)
        assert owners(store) == before
        as_before(place)


def test_the_leases_of_a_pod_that_woke_up_are_its_own(place: Place) -> None:
    store = asleep(place)
    assert place.run("done").returncode == -signal.SIGKILL
    recover(place)
    assert owners(store) == {"10.77.0.10": "sandbox", "fd77::a": "sandbox"}


def test_a_lease_that_the_plugin_freed_meanwhile_waits_again(place: Place) -> None:
    store = asleep(place)
    before = owners(store)
    assert place.run("take").returncode == -signal.SIGKILL
    for ip in owners(store):
        store.release(ip, Owner(container_id="sandbox"))
    store.reserve("fd77::a", Owner(container_id="somebody"))
    recover(place)
    assert owners(store) == {**before, "fd77::a": "somebody"}
    assert place.left() == []


def asleep(place: Place) -> HostLocal:
    """Leases of a network on this node: one of the image's addresses is kept for it."""
    store = HostLocal("pods", place.path / "networks")
    store.reserve("10.77.0.10", Owner(container_id=owner_id("sha256:00")))
    return store


def recover(place: Place) -> None:
    ended = place.run("clear")
    assert ended.returncode == 0, ended.stderr


def owners(store: HostLocal) -> dict[str, str]:
    return {lease.ip: lease.owner.container_id for lease in store.leases()}


def test_what_was_done_stays_done(place: Place) -> None:
    assert place.run("done").returncode == -signal.SIGKILL
    assert place.run("clear").returncode == 0
    assert diff(place.old, place.now()) == []
    assert place.left() == []


def test_a_restore_that_fails_gives_back_what_it_took(place: Place) -> None:
    ended = place.run("fail")
    assert (ended.returncode, ended.stderr) == (1, "the engine failed\n")
    as_before(place)


def as_before(place: Place) -> None:
    assert diff(place.before, place.now()) == []
    assert place.bridges() == ["br0"]
    assert hold.tables(place.new.netns) == ()
    assert place.left() == []


def test_a_taken_address_is_found_before_anything_is_touched(place: Place) -> None:
    place.segment.add("thief", 10, mac=99)
    ended = place.run("none")
    assert "could not restore image 'web' with its network: address 10.77.0.10 is in use" in ended.stderr
    as_before(place)


def test_a_trial_says_what_the_restore_would(place: Place) -> None:
    ended = place.run("foresee")
    assert ended.stdout.startswith("warn: the network plugin gave the pod"), ended.stderr
    store = asleep(place)
    assert place.run("foresee").stdout.startswith("warn: ")
    store.reserve("fd77::a", Owner(container_id="somebody"))
    before = owners(store)
    assert "refuse: could not lease address fd77::a: container 'somebody'" in place.run("foresee").stdout
    assert owners(store) == before
    place.segment.add("thief", 10, mac=99)
    assert "refuse: address 10.77.0.10 is in use by" in place.run("foresee").stdout
    as_before(place)


def test_a_narrower_bridge_is_found_before_anything_is_touched(place: Place) -> None:
    wide = json.loads(encode(place.old))
    for link in wide["links"]:
        link["mtu"] = 9000 if link["name"] == "eth0" else link["mtu"]
    (place.path / "image" / "network.json").write_text(json.dumps(wide))
    ended = place.run("none")
    assert "carries 1500 bytes here and the pod's 'eth0' 9000" in ended.stderr
    as_before(place)


def test_a_peer_without_a_way_is_found_before_anything_is_touched(place: Place) -> None:
    lone = json.loads(encode(place.old))
    lone["addresses"] = [one for one in lone["addresses"] if not one["ip"].startswith("10.")]
    lone["routes"] = []
    (place.path / "image" / "network.json").write_text(json.dumps(lone))
    ended = place.run("none")
    assert "there is no route to 10.77.0.30" in ended.stderr
    as_before(place)
