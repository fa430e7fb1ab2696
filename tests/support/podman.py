"""Podman with storage of its own, apart from the machine's."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support import leaks, oci
from tests.support.containers import command, tool

# Podman wants a policy and a registries file; the private ones allow local images only.
POLICY = {"default": [{"type": "insecureAcceptAnything"}]}


class Podman:
    """One Podman storage. path: absent directory; runtime: the OCI runtime it runs."""

    def __init__(self, path: Path, tag: str, runtime: Path) -> None:
        self.path = path
        self.tag = tag
        self.runtime = runtime
        self.closed = False
        path.mkdir(parents=True)
        (path / "policy.json").write_text(json.dumps(POLICY))
        (path / "registries.conf").write_text("")
        (path / "storage.conf").write_text('[storage]\ndriver = "overlay"\n')
        (path / "containers.conf").write_text(
            f"[engine]\n"
            f'conmon_path = ["{tool("conmon")}"]\n'
            f'helper_binaries_dir = ["{tool("netavark").parent}"]\n'
            f"[network]\n"
            f'network_config_dir = "{path}/net"\n'
        )
        archive = oci.layout("busybox")
        self("load", f"--signature-policy={path}/policy.json", "--input", archive)

    def __call__(self, *words: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run podman."""
        options: Sequence[str | Path] = [
            f"--root={self.path}/root",
            f"--runroot={self.path}/run",
            f"--tmpdir={self.path}/tmp",
            f"--runtime={self.runtime}",
            "--cgroup-manager=cgroupfs",
            "--events-backend=file",
        ]
        environment = {
            "PODMAN_IGNORE_CGROUPSV1_WARNING": "1",
            "CONTAINERS_CONF": f"{self.path}/containers.conf",
            "CONTAINERS_STORAGE_CONF": f"{self.path}/storage.conf",
            "CONTAINERS_REGISTRIES_CONF": f"{self.path}/registries.conf",
            leaks.TAG_VARIABLE: self.tag,
        }
        return command(tool("podman"), *options, *words, check=check, env=environment)

    def run(self, name: str, *argv: str, options: Sequence[str] = ()) -> None:
        """Start a detached container without a network."""
        more = [f"--cgroup-parent=/{self.tag}/podman", "--network=none", *options]
        self("run", "--detach", f"--name={name}", *more, oci.reference("busybox"), *argv)

    def inspect(self, name: str) -> Any:
        """What podman knows of the container."""
        return json.loads(self("inspect", name).stdout)[0]

    def numbers(self, name: str, word: str = "tick") -> list[int]:
        """The numbers that the container printed after `word`."""
        lines = self("logs", name).stdout.splitlines()
        return [int(line.split()[1]) for line in lines if line.startswith(f"{word} ")]

    def close(self) -> None:
        """Remove all containers and the storage."""
        if self.closed:
            return
        self.closed = True
        self("rm", "--all", "--force", "--time=0")
        with contextlib.suppress(AssertionError):
            self("system", "reset", "--force")
        leaks.unmount(str(self.path))
        leaks.remove_cgroups(f"{self.tag}/podman")
