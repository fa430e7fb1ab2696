"""A namespace that hears and says nothing, ARP included, though its interfaces are plugged in.

That is for a pod that is complete before its address may be used here: to open it takes no lock of the
kernel's that others hold for long. `netmig.hold` is for the time in which an engine works on its sockets.
"""

from __future__ import annotations

from contextlib import suppress

from netmig import nft
from netmig.errors import NetworkError
from netmig.ns import Netns

TABLE = "torpor-hold-arrival"
_FAMILIES = ("inet", "arp")


def mute(netns: Netns) -> bool:
    """Let nothing in or out. Again does no harm. False if this kernel cannot."""
    try:
        nft.run(netns, "\n".join(_table(family, "drop") for family in _FAMILIES))
    except NetworkError:
        return False
    return True


def is_muted(netns: Netns) -> bool:
    """Whether a namespace was made mute, and not tidied since."""
    listed = nft.run(netns, "list tables") if nft.available() else []
    return any(entry["table"]["name"] == TABLE for entry in listed if "table" in entry)


def unmute(netns: Netns) -> None:
    """Let it hear and be heard. Raises NetworkError."""
    nft.run(netns, "\n".join(_table(family, "accept") for family in _FAMILIES))


def tidy(netns: Netns) -> None:
    """Remove what made it mute, which it is no more. Idempotent; nobody waits for it."""
    # Added first: it need not be there.
    lines = [f"add table {family} {TABLE}\ndelete table {family} {TABLE}" for family in _FAMILIES]
    with suppress(NetworkError):
        nft.run(netns, "\n".join(lines))


def _table(family: str, policy: str) -> str:
    chains = "\n".join(
        f"chain {hook} {{ type filter hook {hook} priority -500; policy {policy}; }}"
        for hook in ("input", "output")
    )
    return f"table {family} {TABLE} {{\n{chains}\n}}"
