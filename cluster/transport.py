"""How two agents reach each other: mutual TLS, or a program's standard streams, which in the field is SSH.

With TLS a node is who its certificate says, signed by the authority of agent.toml; over standard streams it
is whoever was let in to start the program as root.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from cluster.channel import SILENCE_S, Channel, Lost
from cluster.config import Config, Tls, split
from cluster.messages import PROTOCOL, Answer, Hello
from shim.errors import UsageError

_CONNECT_S = 2.0
_WRONG_DATES = {9, 10}  # X509_V_ERR_CERT_NOT_YET_VALID and _HAS_EXPIRED
# A connection whose other end is gone is given up after as long as one that says nothing.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 2), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 3))


T = TypeVar("T")


class Pipes:
    """A stream of two descriptors, those of a program that is at its other ends, if there is one."""

    def __init__(self, source: int, sink: int, process: subprocess.Popen[bytes] | None = None) -> None:
        self._source, self._sink, self._process = source, sink, process
        self._timeout_s: float | None = None

    def recv_into(self, buffer: memoryview, /) -> int:
        """See `channel.Stream`."""
        self._wait(self._source, select.POLLIN)
        return os.readv(self._source, [buffer])

    def sendall(self, data: bytes | memoryview, /) -> None:
        """See `channel.Stream`."""
        view = memoryview(data)
        while view:
            self._wait(self._sink, select.POLLOUT)
            # Not more than a pipe is sure to have room for: a blocking write would know no timeout.
            view = view[os.write(self._sink, view[: select.PIPE_BUF]) :]

    def settimeout(self, timeout_s: float | None, /) -> None:
        """See `channel.Stream`."""
        self._timeout_s = timeout_s

    def close(self) -> None:
        """See `channel.Stream`."""
        os.close(self._sink)
        os.close(self._source)
        if self._process is not None:
            try:
                self._process.wait(timeout=_CONNECT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def _wait(self, descriptor: int, event: int) -> None:
        poll = select.poll()
        poll.register(descriptor, event)
        if not poll.poll(None if self._timeout_s is None else self._timeout_s * 1000):
            raise TimeoutError(None, f"silence for {self._timeout_s:g} s")


def connect(config: Config, name: str) -> Channel:
    """Reach a node and say who we are. Raises Lost, Refused, UsageError."""
    peer = config.peer(name)
    stream = _run(name, peer.command) if peer.command else _dial(config, name, peer.address)
    channel = Channel(stream, name)
    try:
        channel.ask(Hello(protocol=PROTOCOL, node=config.node), Answer)
    except BaseException:
        channel.close()
        raise
    return channel


def _run(name: str, command: tuple[str, ...]) -> Pipes:
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
    except OSError as error:
        raise Lost(f"could not reach node '{name}': {command[0]}: {error.strerror}") from error
    if process.stdin is None or process.stdout is None:
        raise Lost(f"could not reach node '{name}': {command[0]} has no streams")
    # Ours alone from here on: the objects would close them a second time.
    pipes = Pipes(os.dup(process.stdout.fileno()), os.dup(process.stdin.fileno()), process)
    process.stdout.close()
    process.stdin.close()
    return pipes


def _dial(config: Config, name: str, address: str) -> ssl.SSLSocket:
    try:
        plain = socket.create_connection(split(address), timeout=_CONNECT_S)
    except OSError as error:
        raise Lost(f"could not reach node '{name}' at {address}: {error.strerror or error}") from error
    try:
        _watch(plain)
        return context(config, server=False).wrap_socket(plain, server_hostname=name)
    except ssl.SSLCertVerificationError as error:
        plain.close()
        raise UsageError(
            f"could not trust node '{name}' at {address}: {error.verify_message}; its certificate must be "
            "signed by the authority of agent.toml and name the node"
        ) from error
    except OSError as error:
        plain.close()
        raise Lost(f"could not reach node '{name}' at {address}: {error.strerror or error}") from error


def accept(config: Config, plain: socket.socket) -> Channel:
    """Take a connection that a peer has made; its name is the one in its certificate. Raises Lost."""
    plain.settimeout(SILENCE_S)
    try:
        _watch(plain)
        stream = context(config, server=True).wrap_socket(plain, server_side=True)
    except OSError as error:
        plain.close()
        raise Lost(f"could not take a connection: {error.strerror or error}; see [tls] of both") from error
    names = _names(stream.getpeercert() or {})
    return Channel(stream, next((name for name in names if name in config.peers), ", ".join(names)))


def context(config: Config, *, server: bool) -> ssl.SSLContext:
    """TLS 1.3 with a certificate on both sides. Raises UsageError."""
    tls = config.tls or Tls(*(config.state,) * 3)
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    made.verify_mode = ssl.CERT_REQUIRED
    _using(tls.authority, lambda: made.load_verify_locations(tls.authority))
    # The last one does not say which of the two it is about.
    _using(
        tls.certificate,
        lambda: ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(tls.certificate),
    )
    _using(tls.key, lambda: made.load_cert_chain(tls.certificate, tls.key, _no_password))
    return made


def _no_password() -> str:
    raise OSError("it is encrypted, and nobody is there to be asked for the password")


def _using(path: Path, use: Callable[[], T]) -> T:
    try:
        return use()
    except OSError as error:
        raise UsageError(
            f"could not use {path}: {error.strerror or error}; see the table [tls] of agent.toml"
        ) from error


def check_own(config: Config) -> None:
    """Raises UsageError unless others will believe that this node is who it says: it asks itself."""
    if (error := _own_trouble(config)) is not None:
        why = error.verify_message if isinstance(error, ssl.SSLCertVerificationError) else error.strerror
        raise UsageError(
            f"could not be node '{config.node}' with its certificate: {why}; the authority of agent.toml "
            "must have signed it for that name, for servers and clients"
        ) from error


def check_date(config: Config) -> None:
    """Raises UsageError if others hang up because this node's certificate is too old, or not valid yet.

    With TLS 1.3 they do when our half of the handshake is over, so that all we hear is silence.
    """
    error = _own_trouble(config) if config.tls else None
    if isinstance(error, ssl.SSLCertVerificationError) and error.verify_code in _WRONG_DATES:
        raise UsageError(
            f"could not be node '{config.node}' with its certificate: {error.verify_message}; have the "
            "authority of agent.toml sign another one, or set the clock"
        ) from error


def _own_trouble(config: Config) -> ssl.SSLError | None:
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        context(config, server=False).wrap_bio(back, there, server_hostname=config.node),
        context(config, server=True).wrap_bio(there, back, server_side=True),
    )
    try:
        for end in ends * 2:
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
    except ssl.SSLError as error:
        return error
    return None


def _names(certificate: Any) -> list[str]:
    return [str(value).lower() for kind, value in certificate.get("subjectAltName", ()) if kind == "DNS"]


def _watch(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    with contextlib.suppress(OSError):
        timeout_ms = int(SILENCE_S * 1000)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)
