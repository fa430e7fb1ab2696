"""Real containers for the conformance suite, whatever the engine: see `engines.conformance.Place`."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from engines import registry
from engines.api import Capability, CheckpointEngine, EngineSettings, RestoreRequest
from engines.conformance import Absent
from engines.workloads.catalogue import Workload, find
from shim.conformance import spec
from shim.conformance.dialect import Dialect
from shim.conformance.host import cgroup_directories, mounts_below, processes_in
from shim.conformance.rootfs import of_machine, of_packages
from shim.conformance.streams import Output, borrowed
from shim.toolchain.find import Tools

_DIES_S = 20.0


class RuntimePlace:
    """Containers of one course, on overlay mounts in a directory of their own; `close` removes them all."""

    def __init__(self, engine_name: str, dialect: Dialect, tools: Tools, cache: Path) -> None:
        self._engine_name = engine_name
        self._dialect = dialect
        self._tools = tools
        self._cache = cache
        self._tag = f"torpor-conformance-{secrets.token_hex(4)}"
        # Short: unix sockets lie in it.
        self._path = Path(tempfile.mkdtemp(prefix="tc-"))
        # A container's mapped root must be able to reach its root file system.
        self._path.chmod(0o711)
        self._root = self._path / "runtime"
        self._workloads: dict[str, Workload] = {}
        self._outputs: dict[str, Output] = {}
        self._networks: list[str] = []
        self._closers: list[Any] = []
        self._stuck_word = f"sleep 4{secrets.randbelow(10**8):08}"
        self.image_root = self._path / "images"
        self.image_root.mkdir()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # --- engines ---------------------------------------------------------------------------------------

    def _settings(self, container_id: str, runtime_path: Path | None = None) -> EngineSettings:
        return EngineSettings(
            runtime_path=runtime_path or self._dialect.program,
            root_path=self._root,
            state_path=self._path / "state" / container_id,
            search_path=self._tools.search_path,
            python_path=self._tools.python_path,
            runtime_args=self._dialect.args,
        )

    def engine(self, container_id: str) -> CheckpointEngine:
        """The engine for a container."""
        return registry.create(self._engine_name, self._settings(container_id))

    def lacking(self, container_id: str, capability: Capability) -> CheckpointEngine | None:
        """Real engines cannot be had without a capability."""
        del container_id, capability
        return None

    def stuck(self, container_id: str) -> CheckpointEngine:
        """The engine with a runtime that never ends when it dumps or restores."""
        path = self._path / "stuck"
        path.write_text(
            "#!/bin/sh\n"
            f"for word; do case $word in checkpoint|restore) {self._stuck_word} & wait;; esac; done\n"
            f'exec {shlex.quote(str(self._dialect.program))} "$@"\n'
        )
        path.chmod(0o755)
        return registry.create(self._engine_name, self._settings(container_id, path))

    def stuck_processes(self) -> list[int]:
        """What is alive of the runtimes of stuck engines."""
        return processes_in(command=self._stuck_word)

    # --- containers ------------------------------------------------------------------------------------

    def _runtime(self, *words: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self._dialect.program, *self._dialect.args, "--root", self._root, *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            env=self._environment(),
        )

    def _environment(self) -> dict[str, str]:
        return {**os.environ, "PATH": self._tools.search_path}

    def _prepare(self, workload: Workload, netns_path: Path | None, upper: Path | None) -> str:
        container_id = f"{self._tag}-{len(self._workloads)}"
        self._workloads[container_id] = workload
        bundle = self.bundle(container_id)
        bundle.mkdir(parents=True, mode=0o711)
        mapped = "user-namespace" in workload.wishes
        lower = of_packages(workload.packages, self._cache) if workload.packages else of_machine(self._cache)
        if upper:
            subprocess.run(["cp", "-a", upper, bundle / "upper"], check=True)
        else:
            (bundle / "upper").mkdir()
            if mapped:
                _give(lower, bundle / "upper")
        for name in ("work", "rootfs"):
            (bundle / name).mkdir()
        options = f"lowerdir={lower},upperdir={bundle / 'upper'},workdir={bundle / 'work'}"
        subprocess.run(["mount", "-t", "overlay", "-o", options, "overlay", bundle / "rootfs"], check=True)
        document = spec.make(
            workload,
            rootfs_path=bundle / "rootfs",
            cgroups_path=f"/{self._tag}/{container_id}",
            netns_path=netns_path,
            mounts=[*([] if workload.packages else spec.machine_binds()), *self._shared(workload)],
        )
        (bundle / "config.json").write_text(json.dumps(document))
        return container_id

    def _shared(self, workload: Workload) -> list[dict[str, Any]]:
        """Directories of the node that a workload wishes to have."""
        found: list[dict[str, Any]] = []
        if "volume" in workload.wishes:
            (self._path / "volume").mkdir(exist_ok=True)
            found.append(spec.bind(self._path / "volume", "/volume", writable=True))
        if "outside-socket" in workload.wishes:
            folder = self._path / "outside"
            if not folder.exists():
                folder.mkdir()
                self._closers.append(_echo_server(folder / "server.sock").close)
            found.append(spec.bind(folder, "/outside", writable=True))
        return found

    def prepare(self, *, netns_path: Path | None = None) -> str:
        """A bundle for a new counter."""
        counter = find("counter")
        assert counter
        # Whatever container it takes the place of: a counter writes no files.
        return self._prepare(counter, netns_path, None)

    def successor(self, container_id: str) -> str:
        """A bundle for a container with the files of another as they are now; its id."""
        upper = self.bundle(container_id) / "upper"
        holds = "rootfs" in self.engine(container_id).capabilities
        return self._prepare(self._workloads[container_id], None, None if holds else upper)

    def start(self, *, netns_path: Path | None = None) -> str:
        """Start a counter; its id."""
        container_id = self.prepare(netns_path=netns_path)
        self._start(container_id)
        deadline = time.monotonic() + _DIES_S
        while self.progress(container_id) < 2:
            if time.monotonic() > deadline:
                raise AssertionError(f"the counter does not count: {self.output(container_id)!r}")
            time.sleep(0.01)
        return container_id

    def begin(self, workload: Workload) -> str:
        """Start a workload's container; its id. Raises Absent."""
        for wish in sorted(workload.wishes):
            if wish in self._dialect.lacks:
                raise Absent(self._dialect.lacks[wish])
        container_id = self._prepare(workload, None, None)
        self._start(container_id)
        return container_id

    def _output(self, container_id: str) -> Output:
        workload = self._workloads[container_id]
        console = self._path / f"console-{len(self._outputs)}" if "terminal" in workload.wishes else None
        output = self._outputs[container_id] = Output(console)
        return output

    def _start(self, container_id: str) -> None:
        output = self._output(container_id)
        words: list[str | Path] = ["run", "--detach", "--bundle", self.bundle(container_id)]
        if output.console_path:
            words += ["--console-socket", output.console_path]
        errors = None
        if "outside-file" in self._workloads[container_id].wishes:
            errors = os.open(self._path / "errors.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        done = subprocess.run(
            [self._dialect.program, *self._dialect.args, "--root", self._root, *words, container_id],
            stdin=subprocess.DEVNULL,
            stdout=output.write_fd,
            stderr=output.write_fd if errors is None else errors,
            check=False,
            env=self._environment(),
        )
        output.handed_over()
        if errors is not None:
            os.close(errors)
        if done.returncode:
            time.sleep(0.1)
            raise AssertionError(f"{self._dialect.name} could not start the container: {output.text[-300:]}")

    def restore(self, engine: CheckpointEngine, request: RestoreRequest) -> int:
        """Restore, with fresh standard streams; the pid of the container's init."""
        output = self._output(request.container_id)
        changed = request
        if output.console_path:
            changed = replace(request, console_socket_path=output.console_path)
        with borrowed(output):
            return engine.restore(changed).pid

    def bundle(self, container_id: str) -> Path:
        """The bundle of a container."""
        return self._path / "b" / container_id.rpartition("-")[2]

    def output(self, container_id: str) -> str:
        """What a container has printed since its start or restore."""
        output = self._outputs.get(container_id)
        return output.text if output else ""

    def ask(self, container_id: str) -> None:
        """Send SIGUSR1 to a container's init."""
        self._runtime("kill", container_id, "USR1")

    def progress(self, container_id: str) -> int:
        """The last number that a counter printed."""
        found = re.findall(r"^tick (\d+)\r?$", self.output(container_id), re.MULTILINE)
        return int(found[-1]) if found else 0

    def memory(self, container_id: str) -> str:
        """The checksum that a counter tells."""
        before = self.output(container_id).count("sum ")
        self.ask(container_id)
        deadline = time.monotonic() + _DIES_S
        while len(found := re.findall(r"^sum (\w+)\r?$", self.output(container_id), re.MULTILINE)) == before:
            if time.monotonic() > deadline:
                raise AssertionError(f"{container_id} does not answer")
            time.sleep(0.01)
        return found[-1]

    def pid(self, container_id: str) -> int:
        """The container's init on the host, 0 if there is no container."""
        done = self._runtime("state", container_id)
        if done.returncode:
            return 0
        document = json.loads(done.stdout)
        return int(document["pid"]) if document["id"] == container_id else 0

    # --- networks --------------------------------------------------------------------------------------

    def netns(self) -> Path | None:
        """A new network namespace, None without the program `ip`."""
        if self._tools.ip is None:
            return None
        name = f"{self._tag}-{len(self._networks)}"
        subprocess.run([self._tools.ip, "netns", "add", name], check=True)
        self._networks.append(name)
        subprocess.run([self._tools.ip, "-n", name, "link", "set", "lo", "up"], check=True)
        return Path("/run/netns") / name

    def netns_of(self, container_id: str) -> str:
        """A name of the network namespace the container is in."""
        return str(Path(f"/proc/{self.pid(container_id)}/ns/net").readlink())

    # --- ends ------------------------------------------------------------------------------------------

    def kill(self, container_id: str) -> None:
        """End and remove a container as a runtime caller does."""
        pid = self.pid(container_id)
        self._runtime("kill", container_id, "KILL")
        deadline = time.monotonic() + _DIES_S
        while pid and pid in processes_in(pids=[pid]) and time.monotonic() < deadline:
            time.sleep(0.01)
        self._runtime("delete", "--force", container_id)

    def residue(self, container_id: str) -> list[str]:
        """What is left of a container that is gone, in words."""
        left = [f"process {pid}" for pid in processes_in(cgroup=f"{self._tag}/{container_id}")]
        left += [f"mount {point}" for point in mounts_below(self._root / container_id)]
        left += [f"cgroup {path}" for path in cgroup_directories(f"{self._tag}/{container_id}")]
        if (self._root / container_id).exists():
            left.append("the runtime's state")
        return left

    def close(self) -> None:
        """Remove everything, whatever state it is in."""
        for path in _with_children(cgroup_directories(self._tag)):
            for name, value in (("freezer.state", "THAWED"), ("cgroup.freeze", "0")):
                with contextlib.suppress(OSError), (path / name).open("r+") as file:
                    file.write(value)
        for container_id in self._workloads:
            self._runtime("delete", "--force", container_id)
        for pid in processes_in(cgroup=self._tag):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for closer in self._closers:
            closer()
        for name in self._networks:
            subprocess.run([str(self._tools.ip), "netns", "delete", name], check=False, capture_output=True)
        for point in reversed(mounts_below(self._path)):
            subprocess.run(["umount", "--lazy", point], check=False, capture_output=True)
        deadline = time.monotonic() + 5
        while groups := cgroup_directories(self._tag):
            for directory in sorted(_with_children(groups), reverse=True):
                with contextlib.suppress(OSError):
                    directory.rmdir()
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
        shutil.rmtree(self._path, ignore_errors=True)


def _with_children(directories: Iterable[Path]) -> Iterator[Path]:
    """Directories and all below them. Some may go meanwhile, which `Path.glob` does not bear."""
    for top in directories:
        for where, _, _ in os.walk(top):
            yield Path(where)


def _give(lower: Path, upper: Path) -> None:
    """Make the top directories and account files of a root file system belong to a mapped root."""
    for path in (lower, *lower.iterdir(), *(lower / "etc").glob("passwd"), *(lower / "etc").glob("group")):
        if path.is_symlink():
            continue
        copy = upper / path.relative_to(lower)
        if path.is_dir():
            copy.mkdir(exist_ok=True)
            copy.chmod(path.stat().st_mode & 0o7777)
        else:
            shutil.copy2(path, copy)
        os.chown(copy, spec.MAPPED_ID, spec.MAPPED_ID)


def _echo_server(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(8)

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=echo, args=(connection,), daemon=True).start()

    def echo(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            while data := connection.recv(64):
                connection.sendall(data)

    threading.Thread(target=serve, daemon=True).start()
    return listener
