"""The new container has another network."""

from __future__ import annotations

from collections.abc import Callable

from tests.support.containers import PYTHON, Network
from tests.truth import sources
from tests.truth.place import World
from tests.truth.scenario import Scenario, Source, as_it_is


def _other_address(world: World) -> None:
    world.network("10.77.0.9")


def _same_address(world: World) -> None:
    world.network("10.77.0.2")


def _taken(kind: str) -> Callable[[World], object]:
    """Somebody else in the pod has the port already."""

    def change(world: World) -> None:
        network = world.network("10.77.0.2")
        _listen(world, network, kind)

    return change


def _listen(world: World, network: Network, kind: str) -> None:
    bind = f"s = socket.socket(socket.AF_INET, socket.{kind}); s.bind(('0.0.0.0', 7000))"
    listen = "s.listen(); " if kind == "SOCK_STREAM" else ""
    text = f"import socket; {bind}; {listen}print(1, flush=True); input()"
    world.beside("ip", "netns", "exec", network.pod, PYTHON, "-IS", "-c", text)


def _other_port(world: World) -> None:
    network = world.network("10.77.0.2")
    text = "import socket; s = socket.create_server(('0.0.0.0', 7001)); print(1, flush=True); input()"
    world.beside("ip", "netns", "exec", network.pod, PYTHON, "-IS", "-c", text)


def _own(world: World) -> None:
    for entry in world.spec["linux"]["namespaces"]:
        if entry["type"] == "network":
            entry.pop("path", None)


def _host(world: World) -> None:
    sources.drop_namespace(world.spec, "network")


def _host_to_own(world: World) -> None:
    world.spec["linux"]["namespaces"].append({"type": "network"})


def _gone(world: World) -> None:
    network = world.network()
    network.close()
    world.closers.pop()


def _kept(world: World) -> None:
    world.tcp = "keep"


def _kept_elsewhere(address: str) -> Callable[[World], object]:
    def change(world: World) -> None:
        world.network(address)
        world.tcp = "keep"

    return change


def _kept_port_taken(world: World) -> None:
    _taken("SOCK_STREAM")(world)
    world.tcp = "keep"


def _of(
    name: str, source: Source, change: Callable[[World], object] = as_it_is, *, short: bool = False
) -> Scenario:
    return Scenario(kind="network", name=name, source=source, change=change, short=short)


SCENARIOS = (
    _of("a listener on all addresses, the same namespace", sources.JOINED),
    _of("a listener on all addresses, another address", sources.JOINED, _other_address, short=True),
    _of("another port of the pod is taken", sources.JOINED, _other_port),
    _of("the listener's port is taken", sources.JOINED, _taken("SOCK_STREAM")),
    _of("the pod's namespace in place of one of its own", sources.PLAIN, _same_address, short=True),
    _of("the host's network in place of one of its own", sources.PLAIN, _host),
    _of("an own network in place of the pod's", sources.JOINED, _own),
    _of("the host's network in place of the pod's", sources.JOINED, _host),
    _of("the host's network, as it was", sources.HOST_NETWORK),
    _of("an own network in place of the host's", sources.HOST_NETWORK, _host_to_own),
    _of("the pod's namespace is gone", sources.JOINED, _gone),
    _of("a listener on an address that is there", sources.BOUND, _same_address),
    _of("a listener on an address that is missing", sources.BOUND, _other_address, short=True),
    _of("a UDP socket on an address that is there", sources.DATAGRAMS, _same_address),
    _of("a UDP socket on an address that is missing", sources.DATAGRAMS, _other_address),
    _of("a UDP socket whose port is taken", sources.DATAGRAMS, _taken("SOCK_DGRAM")),
    _of("a listener on loopback in a network of its own", sources.LOOPBACK),
    _of("a connection, closed, at another address", sources.TALKING, _other_address),
    _of("a connection, kept, in the same namespace", sources.TALKING, _kept),
    _of("a connection, kept, in another with its address", sources.TALKING, _kept_elsewhere("10.77.0.2")),
    _of("a connection, kept, at another address", sources.TALKING, _kept_elsewhere("10.77.0.9")),
    _of("a connection, kept, its port taken", sources.TALKING, _kept_port_taken),
)
