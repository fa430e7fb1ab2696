"""What every verb works with: the parsed call, the configuration, and the container it is about."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from engines import registry
from engines.api import CheckpointEngine, EngineSettings
from shim import entry
from shim.argv import Call
from shim.config import Config, engine_settings
from shim.errors import UsageError
from shim.toolchain.find import Tools, find_tools

if TYPE_CHECKING:
    from shim.images.store import Store


@dataclass(frozen=True, kw_only=True)
class Context:
    """One call. settings: runtime.conf as it was read; config: what it means."""

    call: Call
    settings: Mapping[str, str]
    config: Config

    @property
    def container_id(self) -> str:
        """The id the call is about. Raises UsageError if there is none."""
        if not self.call.args:
            raise UsageError(f"{self.call.verb} needs a container id: {self.call.verb} [options] ID")
        return self.call.args[0]

    @cached_property
    def directory(self) -> Path:
        """Where torpor keeps its state of the container; it need not exist."""
        try:
            return Path(entry.container_dir(dict(self.settings), self.call.root, self.container_id))
        except ValueError as error:
            raise UsageError(f"could not {self.call.verb} a container: {error}") from None

    @cached_property
    def bundle_path(self) -> Path:
        """The bundle that the call names, or the working directory as for runc."""
        return Path(self.call.options.get("bundle") or ".").resolve()

    def option_path(self, name: str) -> Path | None:
        """An option that holds a path, made absolute; None if it was not given."""
        value = self.call.options.get(name)
        return Path(value).absolute() if value else None

    def other_options(self, served: Collection[str]) -> tuple[str, ...]:
        """The options that are not among those served here, as words for the runtime."""
        return tuple(
            f"--{name}={value}" if value else f"--{name}"
            for name, value in self.call.options.items()
            if name not in served
        )

    @cached_property
    def tools(self) -> Tools:
        """The tools of this node."""
        return find_tools(self.config.tools_path)

    @cached_property
    def store(self) -> Store:
        """The checkpoint image store."""
        from shim.images.store import Store  # half of all that there is to import

        return Store(self.config.store_path)

    @cached_property
    def engine_settings(self) -> EngineSettings:
        """Where an engine finds things, for this call's container."""
        return engine_settings(
            self.config, self.tools, self.call.root, self.directory, runtime_args=self.runtime_args
        )

    def engine(self, name: str) -> CheckpointEngine:
        """The engine of that name, set up for this container. Raises EngineUnavailable."""
        return registry.create(name, self.engine_settings)

    @property
    def runtime_args(self) -> tuple[str, ...]:
        """Global options to repeat when torpor calls the runtime itself (the root goes separately)."""
        return ("--systemd-cgroup",) if self.call.systemd_cgroup else ()

    @cached_property
    def handed_over(self) -> list[str]:
        """The arguments of this call as the real runtime understands them."""
        if self.config.handler != "RUNSC":
            return self.call.argv
        from shim.dialects.runsc import translate

        return translate(self.call, list(self.config.runtime_args))
