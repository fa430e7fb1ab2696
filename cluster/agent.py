"""`torpor agent`: takes connections of other nodes, and brings to their end the migrations that were cut
short.

The process itself only listens: each connection, and each round of settling, has a process of its own, so
that nothing that happens to one container stops the others. Everything that matters is in the records on
disk.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from functools import partial

from cluster import away, settle, transport
from cluster.channel import Channel, Lost
from cluster.here import Here
from cluster.serve import serve
from shim.errors import ShimError

_TICK_S = 0.5


def stdio(here: Here) -> None:
    """Serve one peer on standard input and output. Raises Lost if it ends badly."""
    # A container that is restored gets the standard streams: the channel needs other numbers.
    source, sink = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1):
        os.dup2(nothing, number)
    os.close(nothing)
    _send_on(here)
    settle.settle_all(here)
    with contextlib.suppress(Lost):
        serve(here, Channel(transport.Pipes(source, sink), ""), trusted=True)


def run(here: Here) -> None:
    """Listen and settle until a signal ends it. Raises ShimError."""
    signal.signal(signal.SIGTERM, _end)
    _send_on(here)
    server = _listen(here)
    children: dict[int, str] = {}
    try:
        while True:
            while children:
                pid, _ = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    break
                children.pop(pid, None)
            ready, _, _ = select.select([server] if server else [], [], [], _TICK_S)
            if ready and server:
                connection, _ = server.accept()
                with connection:
                    children[_fork(partial(_answer, here, connection))] = "peer"
            if "settler" not in children.values() and any(settle.unfinished(here)):
                children[_fork(partial(_settle, here))] = "settler"
    except KeyboardInterrupt:
        return
    finally:
        if server:
            server.close()


def _send_on(here: Here) -> None:
    """What is away is reached by way of here, which the kernel has forgotten if the node was started anew."""
    try:
        for absence in away.absences(here):
            absence.send_on()
    except settle.Failures as error:
        print(f"torpor agent: {error}", file=sys.stderr, flush=True)


def _listen(here: Here) -> socket.socket | None:
    if not here.config.listen:
        return None
    transport.context(here.config, server=True)  # said now rather than to the first who comes
    host, port = transport.split(here.config.listen)
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise ShimError(
            f"could not listen at {here.config.listen}: {error.strerror}; see agent.toml"
        ) from error


def _answer(here: Here, connection: socket.socket) -> None:
    serve(here, transport.accept(here.config, connection.dup()), trusted=False)


def _settle(here: Here) -> None:
    for problem in settle.settle_all(here):
        print(f"torpor agent: {problem}", file=sys.stderr, flush=True)
        time.sleep(_TICK_S)


def _fork(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        work()
        status = 0
    except Lost:
        status = 0
    except BaseException as error:
        print(f"torpor agent: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(status)


def _end(number: int, frame: object) -> None:
    del number, frame
    raise KeyboardInterrupt
