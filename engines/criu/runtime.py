"""Asks the real runtime about containers."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from engines.api import EngineSettings, EngineUnavailable, InvalidRequest
from engines.criu.network import of_network

_ANSWER_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """A container as the runtime knows it. status: "created", "running", "paused" or "stopped"."""

    id: str
    pid: int
    status: str
    annotations: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """What a bundle says.

    netns: path of its network namespace, empty if the container makes its own. root_id: what the container's
    root is on the host, 0 without a user namespace. sysctls: of its network namespace. cgroup_views: where
    its control groups are mounted. cgroup_apart: it has a cgroup namespace.
    """

    rootfs_path: Path
    netns: str
    cgroups_path: str
    annotations: dict[str, str]
    root_id: int = 0
    sysctls: Mapping[str, str] = field(default_factory=dict[str, str])
    cgroup_views: tuple[str, ...] = ()
    cgroup_apart: bool = False


class Runtime:
    """The real runtime of one node and one state root."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings

    def argv(self, *args: str) -> list[str]:
        """A command line of the runtime."""
        settings = self._settings
        return [
            *(str(settings.runtime_path), *settings.runtime_args, "--root", str(settings.root_path)),
            *args,
        ]

    def state(self, container_id: str) -> Container | None:
        """A container's state, None if there is none. Raises EngineUnavailable."""
        try:
            done = subprocess.run(
                self.argv("state", container_id),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_ANSWER_S,
                check=False,
                env={**os.environ, "PATH": self._settings.search_path},
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise EngineUnavailable(
                f"could not ask the runtime {self._settings.runtime_path}: {error}; look at its path"
            ) from error
        if done.returncode:
            return None
        document = json.loads(done.stdout)
        return Container(
            id=str(document["id"]),
            pid=int(document["pid"]),
            status=str(document["status"]),
            annotations=document.get("annotations") or {},
        )

    def exists(self, container_id: str) -> bool:
        """Whether the runtime has state under this id, whole or not."""
        return (self._settings.root_path / container_id).exists()

    def bundle(self, bundle_path: Path, words: str) -> Bundle:
        """Read a bundle's config.json. Raises InvalidRequest."""
        try:
            spec = json.loads((bundle_path / "config.json").read_bytes())
            namespaces = spec.get("linux", {}).get("namespaces", [])
            netns = next((entry.get("path", "") for entry in namespaces if entry["type"] == "network"), "")
            views = [str(e["destination"]) for e in spec.get("mounts") or () if e.get("type") == "cgroup"]
            return Bundle(
                rootfs_path=bundle_path / spec["root"]["path"],
                netns=netns,
                cgroups_path=spec.get("linux", {}).get("cgroupsPath") or "",
                annotations=spec.get("annotations") or {},
                root_id=_root_id(spec.get("linux", {}).get("uidMappings") or []),
                sysctls=of_network(spec.get("linux", {}).get("sysctl") or {}),
                cgroup_views=tuple(map(os.path.normpath, views)),
                cgroup_apart=any(entry["type"] == "cgroup" for entry in namespaces),
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidRequest(
                f"{words}: {bundle_path} is no bundle ({error!r}); look at the path"
            ) from error

    def unknown_flag(self, log_path: Path) -> str | None:
        """The flag that the runtime says it does not know, None if it says no such thing."""
        try:
            text = log_path.read_text(errors="replace")
        except OSError:
            return None
        match = re.search(r"flag provided but not defined: -*([a-z-]+)", text)
        return f"--{match[1]}" if match else None


def _root_id(mappings: list[dict[str, int]]) -> int:
    return next((entry["hostID"] for entry in mappings if entry["containerID"] == 0), 0)
