"""This node, as both halves of a migration see it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from cluster.config import Config
from engines import registry
from engines.api import CheckpointEngine, EngineSettings
from netmig.identity import Identity, global_addresses
from netmig.lease import Owner
from shim import bundle, log
from shim.cli.node import Node
from shim.config import engine_settings
from shim.errors import NoContainer, ShimError

_NOTES_BYTES = 16 << 20
NEEDED = frozenset({"phases", "verdict", "held-restore", "tcp-established", "external-netns"})
"""What an engine must be capable of to migrate a container."""


@dataclass(frozen=True, kw_only=True)
class Here:
    """agent.toml, and the node that runtime.conf describes."""

    config: Config
    node: Node

    def settings(self, engine: str, root: str, directory: str | Path) -> EngineSettings:
        """Settings of an engine for a container."""
        node = self.node.of_engine(engine)
        return engine_settings(node.config, node.tools, root, Path(directory))

    def engine(self, name: str, root: str, directory: str | Path) -> CheckpointEngine:
        """An engine for a container. Raises ShimError if it cannot migrate one, EngineUnavailable."""
        engine = registry.create(name, self.settings(name, root, directory))
        if lacking := sorted(NEEDED - engine.capabilities):
            raise ShimError(f"engine {name} cannot migrate: it lacks {', '.join(lacking)}")
        return engine

    def status(self, engine: str, root: str, container_id: str) -> str:
        """What the runtime says of a container, "" if it knows none. Raises ShimError if it does not tell."""
        try:
            config = self.node.of_engine(engine).config
            return bundle.runtime_state(config.runtime_path, root, container_id).status
        except NoContainer:
            return ""

    def check_runs(self, engine: str, root: str, container_id: str) -> None:
        """Raises ShimError unless a container runs: one that was paused meanwhile would wake up elsewhere."""
        if (status := self.status(engine, root, container_id)) != "running":
            raise ShimError(f"it is {status or 'gone'} now; only a running container migrates")

    def delete(self, engine: str, root: str, container_id: str) -> None:
        """Kill a container and let the runtime forget it."""
        config = self.node.of_engine(engine).config
        bundle.ask_runtime(config.runtime_path, ("--root", root), "delete", "--force", container_id)

    def lease(self, identity: Identity, owner: str) -> None:
        """Reserve a container's addresses for it. Raises NetworkError, UsageError; then none is."""
        self.config.check_leases()
        reserver = self.config.reserver()
        taken: list[tuple[str, Owner]] = []
        try:
            for address in global_addresses(identity):
                mine = Owner(container_id=owner, ifname=address.ifname)
                before = reserver.owner(address.ip)
                reserver.reserve(address.ip, mine)
                if before is None:
                    taken.append((address.ip, mine))
        except BaseException:
            for ip, mine in taken:
                reserver.release(ip, mine)
            raise

    def give_back(self, identity: Identity, owner: str) -> None:
        """Release a container's addresses. Idempotent."""
        reserver = self.config.reserver()
        for address in global_addresses(identity):
            reserver.release(address.ip, Owner(container_id=owner, ifname=address.ifname))

    def check_room(self, n_bytes: int) -> None:
        """Raises ShimError unless the agent's state has room for `n_bytes` and what there is to be noted."""
        space = os.statvfs(self.config.state)
        free, wanted = space.f_bavail * space.f_frsize, n_bytes + _NOTES_BYTES
        if free < wanted:
            raise ShimError(
                f"the file system of its state, {self.config.state}, has {free >> 20} MiB free and the "
                f"migration needs {wanted >> 20}; free some space"
            )

    def audit(self, event: str, **fields: object) -> None:
        """Tell the node's audit log."""
        log.audit(self.node.config.store_path, event, **fields)
