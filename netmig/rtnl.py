"""The one place that touches pyroute2, which has no types: messages of rtnetlink as plain data.

Imported late: pyroute2 takes 130 ms to load. Only the synchronous IPRoute is used, opened and used by one
thread: its other classes fork, create missing namespaces, or open their socket in the namespace of whichever
thread touches them first.
"""
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

from typing import Any


def open_route_socket() -> Any:
    """A pyroute2 IPRoute in the network namespace of the calling thread, which alone may use it."""
    from pyroute2 import IPRoute  # 130 ms, so not before it is needed

    # strict_check: the kernel itself filters dumps and refuses attributes that it does not know.
    ipr = IPRoute(ext_ack=True, strict_check=True, groups=0)
    # Release 0.9 sets this key for its other class of sockets only, and then trips over its absence.
    ipr.asyncore.status.setdefault("nlm_generator", False)
    return ipr
