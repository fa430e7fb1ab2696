"""Take back what a journal lists, the last step first. Can be cut off anywhere, and done again."""

from __future__ import annotations

import contextlib
from pathlib import Path

from netmig import messages, rtnl
from netmig.errors import NetworkError
from netmig.identity import NTF_PROXY, NUD_PERMANENT, Neighbour, Route
from netmig.journal import Created, Journal, Leased, Plugged, Proxied, Routed, Set, Shaped, Step
from netmig.lease import AddressTaken, HostLocal, Owner
from netmig.ns import Netns
from netmig.places import Place, open_place
from netmig.shape import go_back, plug


def undo_left(path: Path) -> tuple[Step, ...] | None:
    """Undo what the journal of a dead call lists, and remove it.

    Returns the steps, the last first; None if the call is at work still. Raises NetworkError.
    """
    journal = Journal.load(path)
    if journal is None:
        return None
    steps = tuple(reversed(journal.steps))
    try:
        undo_steps(journal)
    finally:
        journal.close()
    return steps


def undo_steps(journal: Journal, keep: int = 0) -> None:
    """Undo all steps but the first `keep`; without any left the journal goes.

    A step that cannot be undone does not hold up the others. Raises NetworkError that names them all; the
    journal stays then.
    """
    failed: list[str] = []
    for step in reversed(journal.steps[keep:]):
        try:
            _undo(step)
        except (OSError, NetworkError) as error:
            failed.append(str(error))
    if failed:
        raise NetworkError(
            f"could not undo all of network journal '{journal.path}': {'; '.join(failed)}; "
            "put that right, and recover again"
        )
    journal.drop(keep)


def _undo(step: Step) -> None:
    if isinstance(step, Created):
        Netns(Path(step.path), -1).remove()
        return
    if isinstance(step, Leased):
        _give_back(step)
        return
    with contextlib.ExitStack() as stack:
        host = _opened(stack, step.host)
        if host is None:
            return  # the node's namespace is gone, and everything in it
        match step:
            case Shaped():
                netns = _opened(stack, step.netns)
                if netns is not None:
                    go_back(netns, host, step.before)
            case Plugged():
                _unplug(host, step)
            case Routed():
                _unroute(host, step)
            case Proxied():
                _unproxy(host, step)
            case Set():
                with contextlib.suppress(NetworkError):  # the interface may be gone
                    host.set_sysctl(step.name, step.before)


def _give_back(step: Leased) -> None:
    """Let an address be whose it was; somebody else who has got it meanwhile keeps it."""
    store = HostLocal(step.network, Path(step.data_dir))
    ours = Owner(container_id=step.owner, ifname=step.ifname)
    if step.before is None:
        store.release(step.ip, ours)
        return
    theirs = Owner(container_id=step.before, ifname=step.ifname)
    with contextlib.suppress(AddressTaken):
        if store.owner(step.ip) is None:  # the plugin has freed it with the pod
            store.reserve(step.ip, theirs)
        else:
            store.hand_over(step.ip, ours, theirs)


def _opened(stack: contextlib.ExitStack, place: Place) -> Netns | None:
    netns = open_place(place)
    return stack.enter_context(netns) if netns is not None else None


def _unplug(host: Netns, step: Plugged) -> None:
    with host.ipr() as node:
        found = rtnl.link_named(node, step.end)
        if found is not None and found.header["index"] == step.index:
            plug(node, step.end, step.before, step.port)


def _unroute(host: Netns, step: Routed) -> None:
    names = host.names()
    indexes = {name: index for index, name in names.items()}
    with host.ipr() as node:
        family = messages.family_of(step.route.destination)
        listed = [messages.route_from(one, names) for one in rtnl.routes(node, family, step.route.table)]
        for route in listed:
            if route is not None and _same(route, step) and route not in step.before:
                rtnl.change(node, "route", messages.route_to(route, indexes), "delete")
        for route in step.before:
            if route not in listed and route.attributes.get("RTA_OIF") in {None, *indexes}:
                rtnl.change(node, "route", messages.route_to(route, indexes), "append")


def _same(route: Route, step: Routed) -> bool:
    ours = step.route
    return (route.destination, route.table, route.protocol) == (ours.destination, ours.table, ours.protocol)


def _unproxy(host: Netns, step: Proxied) -> None:
    with host.ipr() as node:
        found = rtnl.link_named(node, step.interface)
        if found is not None:
            index = found.header["index"]
            one = Neighbour(
                interface=step.interface, ip=step.ip, mac=None, state=NUD_PERMANENT, flags=NTF_PROXY
            )
            with contextlib.suppress(FileNotFoundError):
                rtnl.change(node, "neighbour", messages.neighbour_to(one, index), "delete")
