"""The other ends of a container's connections: they wait while it sleeps, find it again, or hear its end."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from engines.api import Needs
from netmig import hold
from netmig.connections import Connection, farewell, guard, guard_name, unguard
from netmig.errors import NetworkError
from netmig.ns import Netns
from shim import identity
from shim.network import Plan, mac_of, plain

if TYPE_CHECKING:
    from netmig.identity import Address


def connections(needs: Needs) -> tuple[Connection, ...]:
    """The TCP connections of an image to others than itself."""
    return tuple(
        Connection(
            local=str(plain(need.address)),
            local_port=need.port,
            remote=str(plain(need.remote)),
            remote_port=need.remote_port,
        )
        for need in needs.sockets
        if need.protocol == "tcp" and need.remote and not plain(need.remote).is_loopback
    )


def guard_of(needs: Needs) -> str:
    """The name of the guard of an image's connections, "" if it has none."""
    run_id = needs.lock_table.removeprefix(hold.CRIU_PREFIX)
    return guard_name(run_id) if run_id and connections(needs) else ""


def guard_sleeping(needs: Needs, search_path: str) -> tuple[str, ...]:
    """Keep the peers of an image's connections waiting, on this node; what went wrong, in sentences.

    search_path: where the program nft is, if libnftables cannot be loaded.
    """
    table = guard_of(needs)
    if not table:
        return ()
    identity.use_nft(search_path)
    try:
        with Netns.open(identity.HOST) as host:
            guard(host, table, connections(needs))
    except NetworkError as error:
        return (
            f"peers of its connections may be told that they are closed, once its pod is removed: {error}",
        )
    return ()


def forget_sleeping(needs: Needs, search_path: str) -> None:
    """The peers of an image's connections wait no longer. Raises NetworkError."""
    table = guard_of(needs)
    if table:
        identity.use_nft(search_path)
        with Netns.open(identity.HOST) as host:
            unguard(host, table)


@contextlib.contextmanager
def waking(chosen: Plan, needs: Needs, search_path: str) -> Generator[Callable[[], None]]:
    """A restore is at work: what to call when the tasks are there and the network is about to open.

    Nothing of it can make a restore fail: peers that are not told learn it later.
    """
    with contextlib.ExitStack() as late:

        def at_restored() -> None:
            with contextlib.suppress(NetworkError):
                if chosen.guarded:
                    forget_sleeping(needs, search_path)
            with contextlib.suppress(NetworkError):
                if chosen.netns_path is not None and chosen.addresses and chosen.adopt is None:
                    _announce(chosen.netns_path, chosen.addresses, late)

        yield at_restored


def _announce(netns_path: Path, addresses: Sequence[Address], late: contextlib.ExitStack) -> None:
    """Say where addresses are that a plugin gave: peers remember the interface that had them before."""
    from netmig.claim import Announcer

    with Netns.open(netns_path) as netns:
        with netns.inside():
            macs = {one.ifname: mac_of(one.ifname) for one in addresses}
        present = [replace(one, mac=mac) for one in addresses if (mac := macs[one.ifname])]
        announcer = Announcer(netns, present)
        # Closing takes 10 ms, which nobody need wait for.
        late.callback(lambda: threading.Thread(target=announcer.close, name="close").start())
        announcer.send()


def say_farewell(netns_path: Path, needs: Needs) -> int:
    """Tell the peers that the connections of an image are closed, from the namespace with their addresses.

    Returns how many could be told; the others learn it when they send something.
    """
    with contextlib.suppress(NetworkError, OSError), Netns.open(netns_path) as netns:
        return farewell(netns, connections(needs))
    return 0
