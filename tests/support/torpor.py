"""An installation of torpor for tests: launchers, state and store of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from shim.launcher import RUNSC_ARGS, base_python, write_launchers
from tests.support.containers import CHECKOUT, PREFIX, SEARCH_PATH, command, tool

CONF_VARIABLE = "TORPOR_CONF"


class Torpor:
    """Launchers in path/bin, state in path/run, images in path/store.

    more: further settings of runtime.conf, for example FOREIGN="1".
    """

    def __init__(self, path: Path, **more: str) -> None:
        self.path = path
        self.state_path = path / "run"
        self.store_path = path / "store"
        self.bin_path = path / "bin"
        self.conf_path = path / "runtime.conf"
        settings = {
            "RUNTIME": str(tool("runc")),
            "STATE": str(self.state_path),
            "STORE": str(self.store_path),
            "TOOLS": str(PREFIX),
            "SITE": sysconfig.get_path("purelib"),
            "CONFIG": str(path / "config.toml"),
            **_gvisor(),
            **more,
        }
        path.mkdir(parents=True, exist_ok=True)
        write_launchers(
            self.bin_path,
            python=base_python(),
            package_root=CHECKOUT,
            site=Path(settings["SITE"]),
            settings=settings,
            conf_path=self.conf_path,
        )
        self.runtime = self.bin_path / "torpor-runtime"
        self.runtime_runsc = self.bin_path / "torpor-runtime-runsc"

    def __call__(self, *words: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run the `torpor` command on this installation."""
        program = Path(sys.executable).parent / "torpor"
        environment = {**os.environ, CONF_VARIABLE: str(self.conf_path), "PATH": SEARCH_PATH}
        return command(program, *words, check=check, env=environment)

    def json(self, *words: str | Path) -> Any:
        """Run the `torpor` command with --json; its document."""
        return json.loads(self(*words, "--json").stdout)

    def import_archive(self, archive: Path, name: str, *, namespace: str = "") -> str:
        """`torpor images import`; the reference for an annotation inside that namespace."""
        more = ["--namespace", namespace] if namespace else []
        self("images", "import", archive, "--name", name, *more)
        return name

    def image_path(self, name: str, *, namespace: str = "") -> Path:
        """Where the store keeps the image."""
        return self.store_path / "images" / (namespace or "_") / name

    def remove_images(self) -> None:
        """Remove every image of the store, and what tests put beside them."""
        for manifest in self.store_path.glob("images/*/*/manifest.json"):
            namespace = manifest.parent.parent.name
            prefix = "" if namespace == "_" else f"{namespace}/"
            self("images", "rm", f"{prefix}{manifest.parent.name}", check=False)

    def audit(self) -> list[dict[str, Any]]:
        """The lines of the audit log."""
        path = self.store_path / "audit.log"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _gvisor() -> dict[str, str]:
    """The settings for runsc, if this machine has one."""
    try:
        return {"RUNSC": str(tool("runsc")), "RUNSC_ARGS": RUNSC_ARGS}
    except FileNotFoundError:
        return {}
