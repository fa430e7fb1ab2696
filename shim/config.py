"""What the administrator set: the hot settings of runtime.conf and the rest of config.toml.

The hot settings are read by the entry point with nothing but `os`; everything else stands in a TOML file
that only the calls torpor serves itself ever open.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, cast, get_type_hints

from engines.api import EngineSettings
from shim.errors import AdmissionRefused, UsageError
from shim.toolchain.find import Tools

DEFAULT_STATE = "/run/torpor"
DEFAULT_STORE = "/var/lib/torpor"
LONGEST_S = 86400.0
"""The longest deadline that may be set: a day."""
GVISOR = "gvisor"


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Settings of one node.

    handler: the key of the real runtime in runtime.conf, "RUNTIME" (runc) or "RUNSC"; runtime_path: its
    path; runtime_args: global options that each of its calls gets. settings: runtime.conf as it was read.
    state_path: tmpfs directory of per-container state.
    store_path: the checkpoint image store. tools_path: prefix of the private toolchain, None: the system's.
    engine: engine for a dump that asks for none, None to take the first whose probe is clean.
    checkpoint_timeout_s, restore_timeout_s: deadline of one engine call, seconds.
    compress: see `engines.api.EngineSettings`.
    allowed_hooks: OCI hooks (absolute paths) that may run at a restore.
    foreign_annotations: obey `restore.criu.org/` annotations, whose archives must lie under archive_roots
    (directories that only root may write).
    overruled: rules of the processor (`cpu.*`) that only warn here, since the programs are built portable.
    """

    runtime_path: Path
    handler: str = "RUNTIME"
    runtime_args: tuple[str, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict[str, str])
    state_path: Path = Path(DEFAULT_STATE)
    store_path: Path = Path(DEFAULT_STORE)
    tools_path: Path | None = None
    engine: str | None = None
    checkpoint_timeout_s: float = 120.0
    restore_timeout_s: float = 120.0
    compress: bool = False
    allowed_hooks: tuple[str, ...] = ()
    foreign_annotations: bool = False
    archive_roots: tuple[Path, ...] = (Path("/var/lib/kubelet/checkpoints"),)
    overruled: tuple[str, ...] = ()

    def of_engine(self, name: str) -> Config:
        """The same node, seen from the runtime through which an engine works. Raises UsageError."""
        handler = "RUNSC" if name == GVISOR else "RUNTIME"
        return self if handler == self.handler else load({**self.settings, "HANDLER": handler})

    def check_engine(self, name: str, words: str) -> None:
        """Raises AdmissionRefused if an engine does not work through this runtime. words: what was tried."""
        if (name == GVISOR) != (self.handler == "RUNSC"):
            runtime = "runsc" if self.handler == "RUNSC" else "runc"
            fitting = "torpor-runsc" if name == GVISOR else "torpor"
            raise AdmissionRefused(
                f"{words}: engine {name} does not work through {runtime}, which runs this container; use "
                f"another engine, or a container of the runtime class {fitting}"
            )


_FROM_TOML = frozenset(
    {
        "engine",
        "checkpoint_timeout_s",
        "restore_timeout_s",
        "compress",
        "allowed_hooks",
        "archive_roots",
        "overruled",
    }
)


def _convert(path: Path, key: str, value: Any, wanted: Any) -> Any:
    if wanted is float:
        kind = f"a number of seconds, above 0 and at most {LONGEST_S:.0f}"
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= LONGEST_S:
            return float(value)
    elif wanted is bool:
        kind = "true or false"
        if isinstance(value, bool):
            return value
    elif key == "engine":
        kind = "the name of an engine"
        if isinstance(value, str):
            return value
    else:
        start = "cpu." if key == "overruled" else "/"
        kind = f"a list of {'absolute paths' if start == '/' else 'rules'}, which begin with '{start}'"
        items = cast("list[Any]", value)
        if isinstance(value, list) and all(
            isinstance(item, str) and item.startswith(start) for item in items
        ):
            return tuple(map(Path, items)) if key == "archive_roots" else tuple(items)
    raise UsageError(f"{path}: '{key}' must be {kind}")


def _trusted(path: Path) -> None:
    status = path.stat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise UsageError(
            f"{path} decides what root runs: it must belong to root and be writable by nobody else "
            f"(chown root {path}; chmod 644 {path})"
        )


def load(settings: Mapping[str, str]) -> Config:
    """The configuration that the hot settings and their config.toml give.

    settings: KEY=VALUE pairs of runtime.conf. Raises UsageError naming the file and the key.
    """
    handler = settings.get("HANDLER") or "RUNTIME"
    if not settings.get(handler):
        name = "runsc" if handler == "RUNSC" else "runc"
        raise UsageError(f"runtime.conf names no {handler}: set it to the absolute path of {name}")
    config = Config(
        runtime_path=Path(settings[handler]),
        handler=handler,
        settings=settings,
        runtime_args=tuple(settings.get("RUNSC_ARGS", "").split()) if handler == "RUNSC" else (),
        state_path=Path(settings.get("STATE") or DEFAULT_STATE),
        store_path=Path(settings.get("STORE") or DEFAULT_STORE),
        tools_path=Path(settings["TOOLS"]) if settings.get("TOOLS") else None,
        foreign_annotations=settings.get("FOREIGN", "") == "1",
    )
    toml_path = Path(settings.get("CONFIG") or "/etc/torpor/config.toml")
    if not toml_path.exists():
        return _fitting(config)
    import tomllib  # most nodes have no such file
    from difflib import get_close_matches

    _trusted(toml_path)
    try:
        document = tomllib.loads(toml_path.read_text())
    except (ValueError, RecursionError) as error:  # a number of too many digits is one, too
        raise UsageError(f"{toml_path} is not TOML: {error}") from None
    hints = get_type_hints(Config)
    known = sorted(entry.name for entry in fields(Config) if entry.name in _FROM_TOML)
    changes: dict[str, Any] = {}
    for key, value in document.items():
        if key not in _FROM_TOML:
            near = get_close_matches(key, known, 1)
            hint = f"; did you mean '{near[0]}'?" if near else f"; known keys: {', '.join(known)}"
            raise UsageError(f"{toml_path}: unknown key '{key}'{hint}")
        changes[key] = _convert(toml_path, key, value, hints[key])
    return _fitting(replace(config, **changes))


def _fitting(config: Config) -> Config:
    """The node's engine is for runc's containers; there is one for runsc's."""
    return replace(config, engine=GVISOR) if config.handler == "RUNSC" else config


def engine_settings(
    config: Config, tools: Tools, root: str, directory: Path, *, runtime_args: tuple[str, ...] = ()
) -> EngineSettings:
    """Where an engine finds things, for one container of one caller."""
    return EngineSettings(
        runtime_path=config.runtime_path,
        root_path=Path(root),
        state_path=directory,
        search_path=tools.search_path,
        python_path=tools.python_path,
        runtime_args=(*config.runtime_args, *runtime_args),
        compress=config.compress,
    )
