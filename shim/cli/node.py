"""What the commands know of the node they run on: its settings, and where a container is."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from engines import registry
from shim import bundle, entry
from shim.config import GVISOR, Config, load
from shim.errors import ShimError, UsageError
from shim.images.store import Store
from shim.toolchain.find import Tools, find_tools

SYSTEM_CONF = Path("/etc/torpor/runtime.conf")

ROOTS = (
    "/run/containerd/runc",
    "/run/containerd-runc",
    "/run/runc",
    "/run/runsc",
    "/run/crio/runc",
    "/run/user/0/runc",
    "/var/run/docker/runtime-runc",
)
"""Where callers keep their runtime's state: the directory itself, or one below it for each namespace."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """A container on this node. root: the runtime's --root; node: this one, as its runtime's calls see it."""

    root: str
    node: Node
    state: bundle.RuntimeState


@dataclass(frozen=True)
class Node:
    """This node. conf_path: its runtime.conf, None if it has none yet.

    handler: the key of the runtime that is meant, "RUNTIME" (runc) or "RUNSC".
    """

    conf_path: Path | None
    handler: str = "RUNTIME"

    @cached_property
    def settings(self) -> dict[str, str]:
        """The hot settings; without a runtime.conf, the runc that the toolchain or the system has."""
        settings = entry.read_settings(str(self.conf_path)) if self.conf_path else {}
        if not settings.get("RUNTIME"):
            tools = find_tools()
            if tools.runc is None:
                raise ShimError("could not find runc on this node; run `torpor toolchain install`")
            settings = {"TOOLS": str(tools.prefix), **settings, "RUNTIME": str(tools.runc)}
        return {**settings, "HANDLER": self.handler}

    def of_engine(self, engine: str) -> Node:
        """This node with the runtime through which an engine works."""
        return replace(self, handler="RUNSC" if engine == GVISOR else "RUNTIME")

    @cached_property
    def config(self) -> Config:
        """What the settings mean. Raises UsageError."""
        found = load(self.settings)
        _check_names(found)
        return found

    @cached_property
    def tools(self) -> Tools:
        """The tools of this node."""
        return find_tools(self.config.tools_path)

    @cached_property
    def store(self) -> Store:
        """The checkpoint image store of this node."""
        return Store(self.config.store_path)

    def directory(self, root: str, container_id: str) -> Path:
        """Where torpor keeps its state of a container."""
        try:
            return Path(entry.container_dir(self.settings, root, container_id))
        except ValueError as error:
            raise UsageError(f"could not use the container id: {error}") from None

    def find_container(self, name: str, root: str | None) -> Found:
        """A container by its id, or by an unambiguous beginning of it.

        root: the runtime's --root, None to look in every place that callers use. Raises ShimError if there is
        none or more than one.
        """
        if not name:
            raise UsageError(
                "could not find a container: the id is empty; see `torpor ps`, or your caller's list"
            )
        found = [
            (where, container_id, handler)
            for where in ([str(Path(root).absolute())] if root else _roots())
            for container_id, handler in _containers(Path(where))
            if container_id.startswith(name)
        ]
        exact = [candidate for candidate in found if candidate[1] == name]
        candidates = exact or found
        if not candidates:
            where = f"under {root}" if root else f"under any of {', '.join(ROOTS)}; give its --root"
            raise ShimError(f"could not find container '{name}' {where}")
        if len(candidates) > 1:
            listed = ", ".join(f"{container} ({where})" for where, container, _ in candidates[:4])
            raise ShimError(
                f"'{name}' fits {len(candidates)} containers: {listed}; give more of the id, or --root"
            )
        where, container_id, handler = candidates[0]
        node = replace(self, handler=handler)
        return Found(
            root=where,
            node=node,
            state=bundle.runtime_state(node.config.runtime_path, where, container_id),
        )


def _check_names(config: Config) -> None:
    """Raises UsageError for an engine or a rule in config.toml that there is not.

    Here and not in `load`, for a runtime's calls need none of what is imported for it: an engine that is not
    there they refuse by name, and a rule that is not there stays without effect.
    """
    path = config.settings.get("CONFIG", "config.toml")
    if config.engine not in {None, GVISOR} and config.engine not in (known := registry.names()):
        raise UsageError(f"{path}: there is no engine '{config.engine}'; known engines: {', '.join(known)}")
    if config.overruled:
        from compat.verdict import explain

        known = [name for rule in explain("cpu") for name in rule.names if name.startswith("cpu.")]
        for name in config.overruled:
            if name not in known:
                raise UsageError(f"{path}: there is no rule '{name}' to overrule; known: {', '.join(known)}")


def container_ids() -> set[str]:
    """Ids of all containers that any runtime in the usual places knows, pods' sandboxes among them."""
    return {container_id for where in _roots() for container_id, _ in _containers(Path(where))}


def name_only(reference: object) -> str:
    """An image reference without its digest, for tables."""
    return str(reference or "").partition("@")[0]


def short_time(moment: object) -> str:
    """An RFC 3339 time to the second, for tables."""
    return str(moment or "")[:19] + "Z" if moment else ""


def this_node() -> Node:
    """The node that TORPOR_CONF, this installation or the system describes, in this order."""
    given = os.environ.get("TORPOR_CONF")
    if given:
        if not Path(given).is_file():
            raise UsageError(f"TORPOR_CONF names {given}, which is no file")
        return Node(Path(given))
    own = Path(sys.prefix) / "etc" / "torpor" / "runtime.conf"
    return Node(next((path for path in (own, SYSTEM_CONF) if path.is_file()), None))


def _containers(root: Path) -> list[tuple[str, str]]:
    """The containers under a runtime's root, each with the key of its runtime."""
    try:
        names = sorted(os.listdir(root))  # noqa: PTH208
    except OSError:
        return []
    found: list[tuple[str, str]] = []
    for name in names:
        if (root / name / "state.json").is_file():
            found.append((name, "RUNTIME"))
        elif name.endswith(".state") and (cut := name.rfind("_sandbox:")) > 0:
            found.append((name[:cut], "RUNSC"))
    return found


def _roots() -> list[str]:
    roots: list[str] = []
    for place in map(Path, ROOTS):
        roots.append(str(place))
        try:
            roots += [str(path) for path in sorted(place.iterdir()) if path.is_dir()]
        except OSError:
            continue
    return roots
