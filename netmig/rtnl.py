"""The one place that touches pyroute2, which has no types: messages of rtnetlink as plain data.

Imported late: pyroute2 takes 130 ms to load. Only the synchronous IPRoute is used, opened and used by one
thread: its other classes fork, create missing namespaces, or open their socket in the namespace of whichever
thread touches them first.
"""
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import base64
import errno
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, cast

from netmig.errors import NetworkError

T = TypeVar("T")
Kind = Literal["address", "route", "rule", "neighbour"]

_REQUEST, _ACK, _REPLACE, _EXCL, _CREATE, _APPEND, _DUMP = 0x1, 0x4, 0x100, 0x200, 0x400, 0x800, 0x300
_NEW: dict[Kind, int] = {
    "address": 20,
    "route": 24,
    "rule": 32,
    "neighbour": 28,
}  # RTM_NEW...; RTM_DEL... is next
_GET_NEIGHBOUR = 30
_INTERRUPTED = 0x10  # NLM_F_DUMP_INTR
_TRIES = 10
_NTF_PROXY = 8
_OF_LINKS = frozenset(
    {
        "IFLA_ADDRESS",
        "IFLA_GROUP",
        "IFLA_IFALIAS",
        "IFLA_IFNAME",
        "IFLA_LINK",
        "IFLA_LINKINFO",
        "IFLA_LINK_NETNSID",
        "IFLA_MASTER",
        "IFLA_MTU",
        "IFLA_PROP_LIST",
        "IFLA_TXQLEN",
    }
)


@dataclass(kw_only=True)
class Message:
    """A message of rtnetlink.

    header: its fixed fields. attributes: by the kernel's names; bytes as {"base64": ...}, nested ones as
    {"attrs": [[name, value], ...]} beside their own fixed fields.
    """

    header: dict[str, Any]
    attributes: dict[str, Any] = field(default_factory=dict[str, Any])


def open_route_socket() -> Any:
    """A pyroute2 IPRoute in the network namespace of the calling thread, which alone may use it."""
    from pyroute2 import IPRoute  # 130 ms, so not before it is needed

    # strict_check: the kernel itself filters dumps and refuses attributes that it does not know.
    ipr = IPRoute(ext_ack=True, strict_check=True, groups=0)
    # Release 0.9 sets this key for its other class of sockets only, and then trips over its absence.
    ipr.asyncore.status.setdefault("nlm_generator", False)
    return ipr


def links(ipr: Any, index: int = 0) -> list[Message]:
    """All interfaces, or one by its number. Raises NetworkError."""
    listed = _dumped(lambda: ipr.get_links(index) if index else ipr.get_links())
    return [_read(one, _OF_LINKS) for one in listed]


def link_named(ipr: Any, name: str) -> Message | None:
    """The interface of a name, or None."""
    from pyroute2.netlink.exceptions import NetlinkError

    try:
        return _read(next(iter(ipr.link("get", ifname=name))), _OF_LINKS)
    except NetlinkError as error:
        if error.code == errno.ENODEV:
            return None
        raise OSError(error.code, _words(error)) from error


def addresses(ipr: Any) -> list[Message]:
    """The addresses of all interfaces, in the kernel's order. Raises NetworkError."""
    return [_read(one) for one in _dumped(ipr.get_addr)]


def routes(ipr: Any, family: int, table: int = 0) -> list[Message]:
    """The routes of a family in all tables, or those of one. Raises NetworkError."""
    where = {"table": table} if table else {}
    return _of_family(family, _dumped(lambda: ipr.route("dump", family=family, **where)))


def has_route(ipr: Any, destination: str) -> bool:
    """Would this namespace know where to send a packet for an address?"""
    return way(ipr, destination) > 0


def way(ipr: Any, destination: str) -> int:
    """By which interface this namespace would send a packet for an address; 0 if it would not know."""
    from pyroute2.netlink.exceptions import NetlinkError

    try:
        return max((one.get_attr("RTA_OIF") or 0 for one in ipr.route("get", dst=destination)), default=0)
    except NetlinkError:
        return 0


def rules(ipr: Any, family: int) -> list[Message]:
    """The routing rules of a family. Raises NetworkError."""
    return _of_family(family, _dumped(lambda: ipr.get_rules(family=family)))


def neighbours(ipr: Any, family: int) -> list[Message]:
    """The neighbours of a family, and then its proxies, which the kernel lists only when asked for.

    Raises NetworkError.
    """
    from pyroute2.netlink.rtnl.ndmsg import ndmsg

    def proxies() -> Any:
        request = ndmsg()
        request["family"], request["flags"] = family, _NTF_PROXY
        return ipr.nlm_request(request, msg_type=_GET_NEIGHBOUR, msg_flags=_REQUEST | _DUMP)

    plain = _dumped(lambda: ipr.get_neighbours(family=family))
    return _of_family(family, [*plain, *_dumped(proxies)])


def change(
    ipr: Any, kind: Kind, message: Message, how: Literal["create", "replace", "append", "delete"]
) -> None:
    """Send a message and wait for the kernel's answer. Raises OSError with the kernel's own words."""
    from pyroute2.netlink.exceptions import NetlinkError
    from pyroute2.netlink.rtnl.fibmsg import fibmsg
    from pyroute2.netlink.rtnl.ifaddrmsg import ifaddrmsg
    from pyroute2.netlink.rtnl.ndmsg import ndmsg
    from pyroute2.netlink.rtnl.rtmsg import rtmsg

    classes = {"address": ifaddrmsg, "route": rtmsg, "rule": fibmsg, "neighbour": ndmsg}
    request = classes[kind]()
    for name, value in message.header.items():
        request[name] = value
    request["attrs"] = [(name, _write(value)) for name, value in message.attributes.items()]
    flags = {
        "create": _CREATE | _EXCL,
        "replace": _CREATE | _REPLACE,
        "append": _CREATE | _APPEND,
        "delete": 0,
    }
    number = _NEW[kind] + (how == "delete")
    try:
        # A generator in some releases, so it has to be run to its end.
        tuple(ipr.nlm_request(request, msg_type=number, msg_flags=_REQUEST | _ACK | flags[how]))
    except NetlinkError as error:
        raise OSError(error.code, _words(error)) from error


def link(
    ipr: Any, command: Literal["add", "set", "del", "property_add", "property_del"], **what: Any
) -> None:
    """Change an interface, in pyroute2's words. Raises OSError with the kernel's own words."""
    from pyroute2.netlink.exceptions import NetlinkError

    try:
        ipr.link(command, **what)
    except NetlinkError as error:
        raise OSError(error.code, _words(error)) from error


def port(ipr: Any, index: int, options: dict[str, int]) -> None:
    """Set options of a bridge port, by the kernel's names. Raises OSError."""
    from pyroute2.netlink.exceptions import NetlinkError

    words = {name.removeprefix("IFLA_BRPORT_").lower(): value for name, value in options.items()}
    try:
        ipr.brport("set", index=index, **words)
    except NetlinkError as error:
        raise OSError(error.code, _words(error)) from error


def namespace_number(ipr: Any, fd: int) -> int | None:
    """The number by which this namespace knows the one behind a descriptor, as in IFLA_LINK_NETNSID."""
    number = int(ipr.get_netnsid(fd=fd)["nsid"])
    return None if number in {-1, 0xFFFFFFFF} else number


def whole(dump: Callable[[], tuple[list[T], set[int]]]) -> list[T]:
    """What a dump lists. What changes between its parts can hide something: then it is done again.

    dump: what it lists, and the flags of all its messages. Raises NetworkError.
    """
    for _ in range(_TRIES):
        listed, flags = dump()
        if not any(one & _INTERRUPTED for one in flags):
            return listed
    raise NetworkError(
        f"could not list the network of this node: it changed while it was read, {_TRIES} times; try again "
        "when fewer pods come and go"
    )


def _dumped(ask: Callable[[], Iterable[Any]]) -> list[Any]:
    def dump() -> tuple[list[Any], set[int]]:
        listed = list(ask())
        return listed, {one["header"]["flags"] for one in listed}

    return whole(dump)


def _of_family(family: int, listed: Any) -> list[Message]:
    """A kernel without IPv6 knows no such request, and answers with what it has of other families."""
    return [message for one in listed if (message := _read(one)).header["family"] == family]


def _words(error: Any) -> str:
    text = error.args[1] if len(error.args) > 1 else ""
    return str(text or error)


def _read(message: Any, wanted: frozenset[str] | None = None) -> Message:
    """wanted: names of attributes; pyroute2 decodes one when it is looked at, and an interface has 60."""
    skip = ("attrs", "header", "event", "stats", "__align")
    header = {name: value for name, value in message.items() if name not in skip}
    return Message(
        header=header,
        attributes={one[0]: _plain(one[1]) for one in message["attrs"] if wanted is None or one[0] in wanted},
    )


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        pairs = cast("dict[str, Any]", value)
        skip = ("attrs", "header", "event")
        plain = {name: _plain(inner) for name, inner in pairs.items() if name not in skip}
        if "attrs" in pairs:
            plain["attrs"] = [[one[0], _plain(one[1])] for one in pairs["attrs"]]
        return plain
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in cast("list[Any]", value)]
    if isinstance(value, bytes | bytearray):
        return {"base64": base64.b64encode(value).decode()}
    return value


def _write(value: Any) -> Any:
    if isinstance(value, dict):
        pairs = cast("dict[str, Any]", value)
        if pairs.keys() == {"base64"}:
            return base64.b64decode(pairs["base64"])
        back = {name: _write(inner) for name, inner in pairs.items() if name != "attrs"}
        if "attrs" in pairs:
            back["attrs"] = [(one[0], _write(one[1])) for one in pairs["attrs"]]
        return back
    if isinstance(value, list | tuple):
        return [_write(inner) for inner in cast("list[Any]", value)]
    return value
