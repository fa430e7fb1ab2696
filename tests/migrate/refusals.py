"""What keeps a migration from beginning: one sentence each, and the container does not even stand still."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme

from cluster.records import Departure, Record, new_name
from tests.migrate.pair import PORT, Pair, Pairs
from tests.migrate.scenes import Fault
from tests.netlab.nodes import NETNS, POD_NETWORK
from tests.support.containers import command

pytestmark = pytest.mark.engine

Prepare = Callable[[Pair], Callable[[], object]]
"""Brings about what stands against a migration, and returns how to put it right."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with Pairs(tmp_path_factory.mktemp("pairs")) as pairs:
        made = pairs.fresh()
        made.start("web")
        yield made
        made.forget()


def test_a_trial_touches_nothing(place: Pair) -> None:
    one, two = place.agents
    done = one("migrate", place.container_id, "--to", "node2", "--root", one.node.runc.root, "--dry-run")
    assert "node 'node2' would take container" in done.stdout
    assert place.leftovers(one, two) == []
    place.settles_on("node1")


def _ip(*words: str, back: str) -> Prepare:
    def prepare(place: Pair) -> Callable[[], object]:
        node = place.agents[1].node
        for line in words:
            node("ip", *line.split())
        return lambda: node("ip", *back.split())

    return prepare


def _sysctl(name: str, value: str, back: str) -> Prepare:
    def prepare(place: Pair) -> Callable[[], object]:
        node = place.agents[1].node
        node("sh", "-c", f"echo {value} >/proc/sys/{name}")
        return lambda: node("sh", "-c", f"echo {back} >/proc/sys/{name}")

    return prepare


def _leased(place: Pair) -> Callable[[], object]:
    path = place.agents[1].node.leases_path / POD_NETWORK / place.pods[0].ips[0]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"somebody\r\neth0")
    return path.unlink


def _out_of_range(place: Pair) -> Callable[[], object]:
    path = place.agents[1].network_path
    before = path.read_text()
    path.write_text(before.replace('"rangeStart": "10.88.0.10"', '"rangeStart": "10.88.0.199"'))
    assert path.read_text() != before
    return lambda: path.write_text(before)


def _no_network(place: Pair) -> Callable[[], object]:
    path = place.agents[1].network_path
    path.rename(path.with_name("aside"))
    return lambda: path.with_name("aside").rename(path)


def _full(number: int) -> Prepare:
    """The file system of an agent's state has no room."""

    def prepare(place: Pair) -> Callable[[], object]:
        path = place.agents[number].state_path
        command("mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", path)
        _again(place, number)
        return lambda: (command("umount", "--lazy", path), _again(place, number))

    return prepare


def _answered(place: Pair) -> Callable[[], object]:
    """Another host on the segment has the address, with a MAC address of its own."""
    ip = place.pods[0].ips[0]
    place.lab.client("ip", "address", "add", f"{ip}/32", "dev", "vx")
    return lambda: place.lab.client("ip", "address", "del", f"{ip}/32", "dev", "vx")


def _same_id(place: Pair) -> Callable[[], object]:
    node = place.agents[1].node
    state = node.runc.root / place.container_id
    state.mkdir(parents=True)
    source = place.agents[0].node.runc.root / place.container_id / "state.json"
    (state / "state.json").write_bytes(source.read_bytes())
    return lambda: ((state / "state.json").unlink(), state.rmdir())


def _spec(change: Callable[[dict[str, object]], None]) -> Prepare:
    def prepare(place: Pair) -> Callable[[], object]:
        path = place.bundles[0] / "config.json"
        before = path.read_bytes()
        document = json.loads(before)
        change(document)
        path.write_text(json.dumps(document))
        return lambda: path.write_bytes(before)

    return prepare


def _annotated(document: dict[str, object]) -> None:
    document["annotations"] = {"io.kubernetes.cri.container-type": "container"}


def _mounted(document: dict[str, object]) -> None:
    mounts = document["mounts"]
    assert isinstance(mounts, list)
    mounts.append({"destination": "/x", "type": "bind", "source": "/nowhere", "options": ["rbind"]})  # pyright: ignore[reportUnknownMemberType]


def _on_the_node(document: dict[str, Any]) -> None:
    for namespace in document["linux"]["namespaces"]:
        if namespace["type"] == "network":
            namespace["path"] = str(NETNS / "node1")


def _under_way(place: Pair) -> Callable[[], object]:
    """Somebody else migrates it, and has not come far."""
    one = place.agents[0]
    record = Record(one.state_path / "departures", new_name())
    at_work = contextlib.ExitStack()
    at_work.enter_context(record.begun())
    plan = Departure(
        migration=record.migration,
        container_id=place.container_id,
        root=str(one.node.runc.root),
        directory="",
        bundle="",
        peer="node2",
        engine="criu",
        netns="",
        identity=b"",
        owner="",
    )
    record.make(plan)
    return lambda: (record.remove(), at_work.close())


def _not_listed(place: Pair) -> Callable[[], object]:
    path = place.agents[1].config_path
    before = path.read_text()
    path.write_text(before.replace("may_push = true", "may_push = false"))
    _again(place)
    return lambda: (path.write_text(before), _again(place))


def _stranger(place: Pair) -> Callable[[], object]:
    """The source's certificate is of another authority."""
    agent = place.agents[0]
    names = {name: (agent.path / name).read_bytes() for name in ("cert.pem", "key.pem")}
    forged = trustme.CA().issue_cert(agent.node.name)
    forged.private_key_pem.write_to_path(agent.path / "key.pem")
    forged.cert_chain_pems[0].write_to_path(agent.path / "cert.pem")
    return lambda: [(agent.path / name).write_bytes(data) for name, data in names.items()]


def _impostor(place: Pair) -> Callable[[], object]:
    """The target's certificate is of the right authority, and names another node."""
    path = place.agents[0].config_path
    before = path.read_text()
    path.write_text(before.replace("[peers.node2]", "[peers.other]"))
    return lambda: path.write_text(before)


def _away(place: Pair) -> Callable[[], object]:
    place.agents[1].kill()
    return place.agents[1].start


def _again(place: Pair, number: int = 1) -> None:
    place.agents[number].kill()
    place.agents[number].start()


CASES: dict[str, tuple[Prepare, str]] = {
    "address-leased": (_leased, "container 'somebody' (eth0) has it"),
    "address-out-of-range": (_out_of_range, "its ranges are 10.88.0.199 to 10.88.0.199"),
    "mistyped-leases": (_no_network, "no directory that host-local has made"),
    "full": (_full(1), "MiB free and the migration needs 16; free some space"),
    "full-here": (_full(0), "MiB free and the migration needs"),
    "address-answered": (_answered, "is in use by"),
    "no-bridge": (
        _ip("link set cni0 down", "link set cni0 name br7", back="link set br7 name cni0 up"),
        "bridge 'cni0' is not on this node",
    ),
    "smaller-mtu": (_ip("link set cni0 mtu 1400", back="link set cni0 mtu 1450"), "raise the MTU"),
    "ipv6-off": (_sysctl("net/ipv6/conf/all/disable_ipv6", "1", "0"), "IPv6 is off here"),
    "same-id": (_same_id, "already; delete that one"),
    "no-volume": (_spec(_mounted), "it has no '/nowhere'"),
    "pod": (_spec(_annotated), "torpor.dev/restore-from"),
    "node-network": (_spec(_on_the_node), "it has the node's own network"),
    "under-way": (_under_way, "a migration of it to 'node2' is under way"),
    "not-listed": (_not_listed, "may not send containers here"),
    "forged": (_stranger, "could not "),
    "impostor": (_impostor, "could not "),
    "no-agent": (_away, "is its agent running?"),
}


@pytest.mark.parametrize("case", CASES)
def test_refused(place: Pair, case: str) -> None:
    prepare, words = CASES[case]
    one, two = place.agents
    put_right = prepare(place)
    peer = "other" if case == "impostor" else "node2"
    since = len(place.beats())
    try:
        done = one("migrate", place.container_id, "--to", peer, "--root", one.node.runc.root, check=False)
    finally:
        put_right()
    assert done.returncode == 1
    said = done.stderr.strip().splitlines()[-1]
    print(said)
    assert words in said
    assert said.startswith("Error: could not ")
    beats = [ns for _, ns in place.beats()[since:]]
    assert len(beats) > 10
    assert place.never_twice() == ["node1"]
    assert place.leftovers(one, two) == [], said


@pytest.mark.skipif(not os.environ.get("TORPOR_SOAK"), reason="long: see ./run soak")
def test_one_that_is_paused_before_it_freezes(place: Pair, tmp_path: Path) -> None:
    """It would come up running."""
    one, two = place.agents
    fault = Fault(place, "source", "after cluster.cargo:send_base", "cut", tmp_path)
    fault.reached()
    one.node.runc("pause", place.container_id)
    (tmp_path / "go").touch()
    said = fault.end()
    assert place.status(one) == "paused"
    one.node.runc("resume", place.container_id)
    assert "it is paused now; only a running container migrates" in said
    assert place.leftovers(one, two) == []
    place.settles_on("node1")


def test_an_unknown_node(place: Pair) -> None:
    one = place.agents[0]
    words = ("migrate", place.container_id, "--to", "nowhere", "--root", one.node.runc.root)
    done = one(*words, check=False)
    assert "agent.toml knows node2" in done.stderr


def test_a_container_that_is_not_there(place: Pair) -> None:
    one = place.agents[0]
    done = one("migrate", "nobody", "--to", "node2", "--root", one.node.runc.root, check=False)
    assert "could not find container 'nobody'" in done.stderr


def test_the_file_must_be_roots_own(place: Pair, tmp_path: Path) -> None:
    path = tmp_path / "agent.toml"
    path.write_text(f'node = "x"\nlisten = "127.0.0.1:{PORT}"\n')
    path.chmod(0o666)
    done = place.agents[0]("agent", "--config", path, check=False)
    assert "it must be root's" in done.stderr
