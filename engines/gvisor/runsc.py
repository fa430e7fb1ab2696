"""Asks runsc about containers and sandboxes.

runsc takes the beginning of an id for the id, so what it answers is compared, and an id that is the beginning
of another one is refused. The options a sandbox runs with are read from its own command line.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines.api import EngineSettings, EngineUnavailable, InvalidRequest
from engines.gvisor.births import Birth, parse

_ANSWER_S = 30.0
_STATE_NAME = re.compile(r"(?P<container>.+)_sandbox:(?P<sandbox>.+)\.state")
_EXEC_MARK = "%exec"  # of the launcher (shim/entry.py), beside a container's directory
_VERSION = re.compile(r"(\d{8}(?:\.\d+)?)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """A container as runsc knows it. pid: of its sandbox; status: created, running, paused or stopped."""

    id: str
    pid: int
    status: str
    bundle_path: Path = Path()


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A process inside a sandbox. parent: 0 for a container's first process and for exec sessions."""

    pid: int
    parent: int
    uid: int
    name: str


class Runsc:
    """runsc with one state root."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings

    def argv(self, *args: str) -> list[str]:
        """A command line of runsc."""
        settings = self._settings
        return [
            *(str(settings.runtime_path), *settings.runtime_args, "--root", str(settings.root_path)),
            *args,
        ]

    def ask(self, *args: str) -> tuple[int, str, str]:
        """Run a short verb: exit status, output, first line of its complaint. Raises EngineUnavailable."""
        try:
            done = subprocess.run(
                self.argv(*args),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_ANSWER_S,
                check=False,
                env={**os.environ, "PATH": self._settings.search_path},
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise EngineUnavailable(
                f"could not ask the runtime {self._settings.runtime_path}: {error}; look at its path"
            ) from error
        return done.returncode, done.stdout, done.stderr.strip().partition("\n")[0]

    def version(self) -> str:
        """The date of its release, empty if it does not say. Raises EngineUnavailable."""
        match = _VERSION.search(self.ask("--version")[1])
        return match[1] if match else ""

    def ids(self) -> dict[str, str]:
        """Every container of the state root, with the id of its sandbox."""
        try:
            names = os.listdir(self._settings.root_path)  # noqa: PTH208
        except OSError:
            return {}
        matches = [match for name in names if (match := _STATE_NAME.fullmatch(name))]
        return {match["container"]: match["sandbox"] for match in matches}

    def fellows(self, container_id: str) -> tuple[Container, ...]:
        """The other containers of a container's sandbox. Raises EngineUnavailable."""
        ids = self.ids()
        sandbox = ids.get(container_id)
        others = sorted(name for name, its in ids.items() if its == sandbox and name != container_id)
        return tuple(found for other in others if (found := self.state(other)))

    def check_id(self, container_id: str, words: str) -> None:
        """Raises InvalidRequest for an id that runsc could take for another one."""
        longer = sorted(
            other for other in self.ids() if other.startswith(container_id) and other != container_id
        )
        if longer:
            raise InvalidRequest(
                f"{words}: its id is the beginning of that of '{longer[0]}', and runsc cannot tell them "
                "apart; delete the other one first, or use ids of one length"
            )

    def state(self, container_id: str) -> Container | None:
        """A container's state, None if there is none. Raises EngineUnavailable."""
        if container_id not in self.ids():
            return None
        status, answer, _ = self.ask("state", container_id)
        if status:
            return None
        document = json.loads(answer)
        if document["id"] != container_id:
            return None
        return Container(
            id=container_id,
            pid=int(document["pid"]),
            status=str(document["status"]),
            bundle_path=Path(document.get("bundle") or ""),
        )

    def tasks(self, container_id: str) -> tuple[Task, ...] | None:
        """The processes of a container, None if it does not answer. Raises EngineUnavailable."""
        status, answer, _ = self.ask("ps", container_id)
        if status:
            return None
        rows = [line.split(maxsplit=7) for line in answer.splitlines()[1:]]
        return tuple(
            Task(pid=int(row[1]), parent=int(row[2]), uid=int(row[0]), name=row[7] if len(row) > 7 else "")
            for row in rows
            if len(row) >= 3
        )

    def births(self, container_id: str) -> tuple[Birth, ...] | None:
        """The processes of a container's whole sandbox, None if it does not say. Raises EngineUnavailable.

        To be asked of a paused sandbox: nobody knows what runsc makes of processes that end meanwhile.
        """
        status, answer, _ = self.ask("trace", "procfs", self.ids().get(container_id, container_id))
        try:
            return None if status else parse(answer) or None
        except (ValueError, KeyError, TypeError):
            return None

    def first_exec_ns(self, container_id: str) -> int | None:
        """When the launcher saw the first exec session of a container; None if it saw none."""
        try:
            return (self._settings.state_path.parent / f"{container_id}{_EXEC_MARK}").stat().st_mtime_ns
        except OSError:
            return None


def flags(words: list[str]) -> dict[str, str]:
    """The options among words such as `--network=none`; one without a value is "true"."""
    found: dict[str, str] = {}
    for word in words:
        if word.startswith("-"):
            name, equals, value = word.lstrip("-").partition("=")
            found[name] = value if equals else "true"
    return found


def sandbox_flags(pid: int) -> dict[str, str]:
    """The options that a sandbox runs with; empty if it is gone."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return {}
    return flags(words[1 : words.index("boot")]) if "boot" in words else {}


def setup(options: Mapping[str, str]) -> dict[str, str]:
    """What an image depends on, from a sandbox's options: runsc's own defaults where they say nothing."""
    return {
        "platform": options.get("platform", "systrap"),
        "network": options.get("network", "sandbox"),
        "overlay": options.get("overlay2", "root:self"),
        "directfs": options.get("directfs", "true"),
    }


def read_spec(bundle_path: Path, words: str) -> dict[str, Any]:
    """A bundle's config.json. Raises InvalidRequest."""
    try:
        document = json.loads((bundle_path / "config.json").read_bytes())
        Path(document["root"]["path"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidRequest(f"{words}: {bundle_path} is no bundle ({error!r}); look at the path") from error
    return document
