"""CRIU's settings for one call, and the settings of the machine that would spoil one.

runc talks to CRIU over RPC. A file named by CRIU_CONFIG_FILE in runc's environment is read before the RPC
fields: enough for everything runc says nothing about, on dump and on restore, so that no container needs an
annotation. Yes-or-no settings that runc does send go as runc's own flags.
The system's and the user's default.conf are read before them, /etc/criu/runc.conf (or the file a container's
`org.criu.config` names) after, and wins: a directive in one of them that moves files or changes what becomes
of the tasks is refused.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

from engines.api import Finding

GHOST_LIMIT_BYTES = 4095 << 20
"""Largest unlinked file that is carried in an image. CRIU's default of 1 MiB fails many databases."""

SYSTEM_FILES = ("/etc/criu/default.conf", "/etc/criu/runc.conf")
ANNOTATION = "org.criu.config"

# CRIU's dump defaults: nobody passes these flags, and any busy server would fail without them. What becomes
# of connections is decided at restore. Unix sockets that lead out of the container (`--ext-unix-sk`) are not
# among them: the dump would pass and the restore fail.
DUMP_FLAGS = ("--tcp-established", "--tcp-skip-in-flight", "--file-locks", "--link-remap")

_SPOILERS = frozenset(
    """action-script address auto-dedup cgroup-dump-controller cgroup-props cgroup-props-file cgroup-root
    cgroup-yard check-only config daemon empty-ns enable-external-masters enable-external-sharing exec-cmd
    external freeze-cgroup images-dir inherit-fd join-ns lazy-pages leave-running leave-stopped log-file
    lsm-mount-context lsm-profile manage-cgroups network-lock no-default-config page-server pidfile port
    pre-dump-mode prev-images-dir ps-socket restore-detached restore-sibling root service-address shell-job
    skip-file-rwx-check skip-mnt status-fd stream tcp-close tcp-established tls track-mem tree unprivileged
    veth-pair work-dir
    """.split()  # noqa: SIM905
)
_HARMLESS = {("network-lock", "nftables"), ("manage-cgroups", "ignore"), ("tcp-established", "")}


def dump_config(script_path: str, *, watched: Iterable[str] = (), outside: Iterable[str] = ()) -> str:
    """The file for a dump.

    script_path: the action script of this call; watched: see `watches`; outside: mounts that are given again
    at a restore.
    """
    return "\n".join(
        [
            "network-lock nftables",
            f"action-script {script_path}",
            f"ghost-limit {GHOST_LIMIT_BYTES}",
            "tcp-established",
            "skip-in-flight",
            "link-remap",
            *(f"irmap-scan-path {path}" for path in watched),
            *(f"external mnt[{path}]:{path}" for path in outside),
            "",
        ]
    )


def restore_config(
    script_path: str,
    *,
    held: bool,
    tcp: Literal["keep", "close"],
    outside: Mapping[str, str] | None = None,
) -> str:
    """The file for a restore.

    held: tasks are left stopped; tcp: what becomes of connections; outside: mounts that the runtime does not
    give, and what is mounted there.
    """
    lines = ["network-lock nftables", f"action-script {script_path}"]
    lines += [f"external mnt[{path}]:{source}" for path, source in (outside or {}).items()]
    if held:
        lines.append("leave-stopped")
    if tcp == "close":
        lines.append("tcp-close")
    return "\n".join([*lines, ""])


def spoilers(path: Path) -> list[str]:
    """Directives in a CRIU configuration file that would spoil a call; empty if there is no such file."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return []
    found: list[str] = []
    for line in text.splitlines():
        statement = line.partition("#")[0].strip()
        if not statement:
            continue
        name, _, value = re.sub(r"[\s=]+", " ", statement).lstrip("-").partition(" ")
        if name in _SPOILERS and (name, value.strip("\"'")) not in _HARMLESS:
            found.append(name)
    return found


def files() -> tuple[str, ...]:
    """The configuration files that CRIU reads unasked: the machine's, and this user's."""
    home = os.environ.get("HOME")
    return (*SYSTEM_FILES, f"{home}/.criu/default.conf") if home else SYSTEM_FILES


def check_system(annotated: str | None = None) -> tuple[Finding, ...]:
    """Findings about the configuration files that CRIU reads unasked, and about the one a container names."""
    found: list[Finding] = []
    for name in [*files(), *([annotated] if annotated else [])]:
        if _writable_by_others(Path(name)):
            found.append(
                Finding(
                    rule="criu.config",
                    severity="refuse",
                    message=f"{name} can be written by others than root, and can make CRIU run what it names",
                    remedy=f"chown root {name} && chmod 644 {name}",
                )
            )
        bad = spoilers(Path(name))
        if bad:
            found.append(
                Finding(
                    rule="criu.config",
                    severity="refuse",
                    message=f"{name} sets {', '.join(bad)}, which overrides what a call needs",
                    remedy=f"remove {', '.join(bad)} from {name}",
                )
            )
    return tuple(found)


def _writable_by_others(path: Path) -> bool:
    try:
        status = path.stat()
    except OSError:
        return False
    return bool(status.st_mode & 0o022) or status.st_uid not in (0, os.geteuid())
