"""`torpor agent`: takes connections of other nodes, and brings to their end the migrations that were cut
short.

The process itself only listens: each connection, and each round of settling, has a process of its own, so
that nothing that happens to one container stops the others. Everything that matters is in the records on
disk.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Generator
from functools import partial
from typing import IO

from cluster import away, settle, transport
from cluster.channel import Channel, Lost
from cluster.here import Here
from cluster.records import Record, all_of
from cluster.serve import serve
from netmig.errors import NetworkError
from shim.errors import ShimError, UsageError
from shim.state import make_private

_TICK_S = 0.5
_AGAIN_S = 60.0  # a trouble that lasts is told again
_LOOK_S = 10.0  # for how long what somebody has flushed may be missing
_N_STRANGERS = 32
"""Connections at once of those who have not proved yet that they may be here."""
_STRANGE_S = 10.0
"""For how long one may be a stranger."""


def stdio(here: Here) -> None:
    """Serve one peer on standard input and output. Raises Lost if it ends badly."""
    # A container that is restored gets the standard streams: the channel needs other numbers.
    source, sink = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1):
        os.dup2(nothing, number)
    os.close(nothing)
    _send_on(here)
    settle.settle_begun(here)
    if list(settle.unfinished(here)):  # beside: it may dial nodes that are off, and the peer waits

        def beside() -> None:
            # The peer waits for the ends of all three, too.
            os.close(source)
            os.close(sink)
            os.dup2(0, 2)
            settle.settle_all(here)

        _fork(beside, None)
    with contextlib.suppress(Lost):
        serve(here, Channel(transport.Pipes(source, sink), ""), trusted=True)


def run(here: Here) -> None:
    """Listen and settle until a signal ends it. Raises ShimError."""
    signal.signal(signal.SIGTERM, _end)
    with _alone(here), contextlib.ExitStack() as stack:
        try:
            here.config.check_leases()
        except (ShimError, NetworkError) as error:  # what was begun is brought to its end all the same
            _say(f"{error}; nothing is taken until then")
        _send_on(here)
        server = _listen(here)
        if server is not None:
            stack.enter_context(server)
            _say(f"node '{here.config.node}' listens at {here.config.listen}")
        listener = _Listener(here, server)
        said_at: dict[str, float] = {}
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                for trouble in listener.round():
                    now = time.monotonic()
                    if now - said_at.get(trouble, -_AGAIN_S) >= _AGAIN_S:
                        _say(f"{trouble}; it is tried again")
                        said_at[trouble] = now


class _Listener:
    """The parent of all: takes connections, and has what was cut short settled."""

    def __init__(self, here: Here, server: socket.socket | None) -> None:
        self._here = here
        self._server = server
        self._children: dict[int, str] = {}
        self._strangers: dict[int, int] = {}  # what ends when a peer has proved itself, and the child
        self._look_at = 0.0

    def round(self) -> list[str]:
        """Wait for a tick or a connection, and do what there is to be done; what stood against it.

        Nothing of the node's may end the agent: a full table of processes or files, or a damaged directory.
        """
        troubles: list[str] = []
        try:
            while self._children:
                pid, _ = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    break
                self._children.pop(pid, None)
            servers = [self._server] if self._server else []
            ready, _, _ = select.select([*servers, *self._strangers], [], [], _TICK_S)
            for known in self._strangers.keys() & ready:
                del self._strangers[known]
                os.close(known)
            for server in servers:
                if server in ready:
                    self._take(server)
            if time.monotonic() >= self._look_at and "looker" not in self._children.values():
                self._look_at = time.monotonic() + _LOOK_S
                if any(map(Record.exists, all_of(self._here.config.away))):
                    self._children[_fork(partial(away.keep_passing, self._here), self._server)] = "looker"
            idle = "settler" not in self._children.values()
            if idle and list(settle.unfinished(self._here, troubles)):
                self._children[_fork(partial(_settle, self._here), self._server)] = "settler"
        except OSError as error:
            troubles.append(settle.told(error))
            time.sleep(_TICK_S)
        return troubles

    def _take(self, server: socket.socket) -> None:
        connection, address = server.accept()
        with connection:
            ours, theirs = os.pipe()
            try:
                pid = _fork(partial(_answer, self._here, connection, str(address[0]), theirs), server)
            except OSError:
                os.close(ours)
                raise
            finally:
                os.close(theirs)
        self._children[pid] = "peer"
        self._strangers[ours] = pid
        if len(self._strangers) > _N_STRANGERS:
            oldest = next(iter(self._strangers))
            if (pid := self._strangers.pop(oldest)) in self._children:
                os.kill(pid, signal.SIGKILL)  # it has done nothing yet
                _say(f"more than {_N_STRANGERS} wait to say who they are: hung up on the first of them")
            os.close(oldest)


def _alone(here: Here) -> IO[str]:
    """Be the only agent with this state, as long as what is returned is open. Raises UsageError."""
    path = here.config.state
    try:
        make_private(path)
        lock = (path / "agent.lock").open("a")
        # Not flock: the children would keep that if we are killed, and our successor could not start.
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UsageError(
            f"could not start the agent: another one works in {path}; end it, or name another `state` in "
            "agent.toml"
        ) from None
    except OSError as error:
        raise UsageError(
            f"could not start the agent: {settle.told(error)}, or name another `state` in agent.toml"
        ) from error
    return lock


def _send_on(here: Here) -> None:
    """What is away is reached by way of here, which the kernel has forgotten if the node was started anew."""
    with _said():
        for record in all_of(here.config.away):
            with _said():  # one that fails does not stop the others
                if record.exists():
                    away.Absence(here, record).send_on()


@contextlib.contextmanager
def _said() -> Generator[None]:
    try:
        yield
    except Exception as error:
        _say(settle.told(error))


def _listen(here: Here) -> socket.socket | None:
    if not here.config.listen:
        return None
    transport.check_own(here.config)  # said now rather than to the first who comes
    if here.config.tls and here.config.tls.key.stat().st_mode & 0o007:
        _say(f"{here.config.tls.key} is readable by all, and whoever has it is this node; chmod 600 it")
    host, port = transport.split(here.config.listen)
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise ShimError(
            f"could not listen at {here.config.listen}: {error.strerror}; see agent.toml"
        ) from error


def _answer(here: Here, connection: socket.socket, host: str, proved: int) -> None:
    def known() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        os.close(proved)

    signal.signal(signal.SIGALRM, _late)
    signal.setitimer(signal.ITIMER_REAL, _STRANGE_S)
    try:
        channel = transport.accept(here.config, connection.dup())
    except Lost as error:
        _say(f"{host}: {error}")
        return
    serve(here, channel, trusted=False, known=known)


def _late(number: int, frame: object) -> None:
    del number, frame
    raise Lost(f"could not take a connection: no word of a node for {_STRANGE_S:g} s")


def _settle(here: Here) -> None:
    for problem in settle.settle_all(here):
        _say(problem)
        time.sleep(_TICK_S)


def _say(words: str) -> None:
    print(f"torpor agent: {words}", file=sys.stderr, flush=True)


def _fork(work: Callable[[], None], server: socket.socket | None) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if server is not None:
            server.close()  # we may outlive the agent, and its successor could not listen
        work()
        status = 0
    except Lost:
        status = 0
    except BaseException as error:
        _say(settle.told(error) if isinstance(error, Exception) else str(error))
    finally:
        os._exit(status)


def _end(number: int, frame: object) -> None:
    del number, frame
    raise KeyboardInterrupt
