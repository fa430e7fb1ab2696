"""What a dump of a running container would run into, and what its image would ask for, from /proc alone."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from engines.api import Finding
from engines.criu import cgroups, foresee, losses, tree
from engines.criu.runtime import Container
from engines.forecasts import Forecast
from engines.places import is_bind

_LISTEN, _ESTABLISHED = "0A", "01"
_N_NAMED = 4


def forecast(container: Container, bundle_path: Path, groups: cgroups.Groups) -> Forecast:
    """Findings of a container that is neither frozen nor touched. Raises nothing."""
    pids = tree.of(container.pid)
    outlook = foresee.look(container.pid, bundle_path)
    found = [
        *outlook.findings,
        *outlook.passing,
        *_sandboxes(pids, bundle_path),
        *_sessions(pids, groups),
        *_network(container.pid, pids),
        *_lost(container.pid, pids, bundle_path),
    ]
    return Forecast(findings=tuple(found), memory_bytes=sum(map(_memory, pids)))


def _warning(rule: str, message: str, remedy: str) -> Finding:
    return Finding(rule=f"criu.foresee.{rule}", severity="warn", message=message, remedy=remedy)


def _sandboxes(pids: Sequence[int], bundle_path: Path) -> Iterator[Finding]:
    """A Landlock domain is seen nowhere, and not restored; who makes one without rights sets this first."""
    try:
        spec: dict[str, Any] = json.loads((bundle_path / "config.json").read_bytes())
    except (OSError, ValueError):
        return
    process: dict[str, Any] = spec.get("process") or {}
    if process.get("noNewPrivileges"):
        return
    for pid in pids:
        with contextlib.suppress(OSError):
            if "\nNoNewPrivs:\t1\n" in tree.text(pid, "status"):
                yield _warning(
                    "sandbox",
                    f"process {pid} ('{tree.text(pid, 'comm').strip()}') has set no_new_privs by itself, as "
                    "programs do before they put themselves into a Landlock sandbox, which cannot be seen "
                    "and which no restore brings back",
                    "if it has done that, let it start anew instead; seccomp filters come back",
                )
                return


def _lost(init: int, pids: Sequence[int], bundle_path: Path) -> Iterator[Finding]:
    attributes = list(dict.fromkeys(losses.attributes(pids)))
    if attributes:
        yield _warning(
            "attributes",
            f"{_some(attributes)} will be as usual after a restore",
            "let the program set it again, if it matters",
        )
    options = sorted(set(losses.options(pids)))
    if options:
        yield _warning(
            "options",
            f"it has sockets with {_some(options)}, which no restore sets again",
            "let the program open them anew, if it matters",
        )
    with contextlib.suppress(OSError, ValueError):
        spec: dict[str, Any] = json.loads((bundle_path / "config.json").read_bytes())
        binds = [str(mount["destination"]) for mount in spec.get("mounts") or () if is_bind(mount)]
        if path := losses.on_tmpfs(init, binds):
            yield _warning(
                "tmpfs",
                f"'{path}' on a tmpfs has attributes (an access list, capabilities), which no restore "
                "brings back",
                "let the program set them again, if they matter",
            )
        if foresee.own(spec, "network") and (addresses := losses.addresses(init)):
            yield _warning(
                "addresses",
                f"its own network namespace has the addresses {_some(addresses)}, which no restore gives it",
                "give the container a network namespace by path",
            )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _N_NAMED} more" if len(names) > _N_NAMED else ""
    return ", ".join(names[:_N_NAMED]) + more


def _sessions(pids: Sequence[int], groups: cgroups.Groups) -> Iterator[Finding]:
    others = [pid for pid in cgroups.tasks(groups) if pid not in pids]
    if others:
        yield _warning(
            "session",
            f"{len(others)} processes of exec sessions (process {others[0]}) are not in the image",
            "end them first, if what they do is wanted",
        )


def _network(init: int, pids: Sequence[int]) -> Iterator[Finding]:
    inodes = {inode for pid in pids for inode in _sockets(pid)}
    bound: set[str] = set()
    connected = 0
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{init}/net/{name}").read_text().splitlines()[1:]:
                words = line.split()
                if words[9] not in inodes:
                    continue
                address = _address(words[1].partition(":")[0])
                if words[3] == _LISTEN and not address.is_unspecified and not address.is_loopback:
                    bound.add(f"{address} port {int(words[1].partition(':')[2], 16)}")
                connected += words[3] == _ESTABLISHED and not address.is_loopback
    if bound:
        yield _warning(
            "address",
            f"it listens on {', '.join(sorted(bound)[:_N_NAMED])}: it restores only where that address is",
            "let the program listen on all addresses, or restore with network: keep or keep-closed",
        )
    if connected:
        yield _warning(
            "connections",
            f"{connected} TCP connections with others will be closed by a restore",
            "checkpoint with --stop --keep-tcp and restore with network: keep, to have them go on",
        )


def _sockets(pid: int) -> Iterator[str]:
    with contextlib.suppress(OSError):
        for number in os.listdir(f"/proc/{pid}/fd"):  # noqa: PTH208
            with contextlib.suppress(OSError):
                link = os.readlink(f"/proc/{pid}/fd/{number}")  # noqa: PTH115
                if link.startswith("socket:["):
                    yield link[8:-1]


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """An address as /proc/net writes it: 32-bit words in the machine's own order."""
    raw = bytes.fromhex(text)
    return ipaddress.ip_address(b"".join(raw[n : n + 4][::-1] for n in range(0, len(raw), 4)))


def _memory(pid: int) -> int:
    """Bytes of a process that an image would hold: anonymous and shared memory, swapped out or not."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except OSError:
        return 0
    sizes = re.findall(r"^(?:RssAnon|RssShmem|VmSwap):\s+(\d+) kB", text, re.MULTILINE)
    return sum(int(size) << 10 for size in sizes)
