"""The steps of the show, told as they happen, with times."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from shim.demo import rootfs
from shim.errors import ShimError
from shim.launcher import base_python, package_root, write_launchers
from shim.toolchain.find import Tools

T = TypeVar("T")

START_S = 30.0

CONTAINERD = """version = 3
root = '{base}/containerd/root'
state = '{base}/containerd/state'
disabled_plugins = [
  'io.containerd.cri.v1.images', 'io.containerd.cri.v1.runtime', 'io.containerd.grpc.v1.cri',
]
[grpc]
  address = '{socket}'
"""


@dataclass
class Show:
    """One run of the main job. tell: prints a line. base: a directory of its own, removed by the caller."""

    tools: Tools
    base: Path
    tell: Callable[[str], None]
    begun: float = field(default_factory=time.monotonic)

    @property
    def socket(self) -> Path:
        """Where the private containerd answers."""
        return self.base / "containerd.sock"

    @property
    def namespace(self) -> str:
        """A containerd namespace, hence a cgroup, that no other run has."""
        return f"torpor-demo-{os.getpid()}"

    def run(self) -> None:
        """Sleep and wake. Raises ShimError with the step that failed."""
        with self._step("a root file system from this machine's Python"):
            python = rootfs.make(_made(self.base / "lower"))
            (self.base / "lower" / "workload.py").write_bytes(
                Path(__file__).with_name("workload.py").read_bytes()
            )
        launcher = self._launcher()
        with contextlib.ExitStack() as cleanup:
            with self._step("containerd starts, unmodified; its OCI runtime is torpor-runtime"):
                cleanup.enter_context(self._containerd())
            cleanup.callback(self._remove_cgroups)
            before = cleanup.enter_context(contextlib.ExitStack())
            with self._step("container 'before' starts: 64 MiB of memory, a file, a listening socket"):
                before.enter_context(self._container("before", launcher, python))
                first = self._wait_for(lambda: self._ticks("before")[4:])
                # Held open, so that the kernel does not give its number to the next one.
                pid = self._ctr("task", "ls").split("before")[1].split()[0]
                cleanup.enter_context(Path(f"/proc/{pid}/ns/net").open())
            self.tell(f"      {first[-1]}")
            with self._step("torpor checkpoint before --name demo --stop"):
                root = str(self.base / "runc" / self.namespace)
                answer = self._torpor("checkpoint", "before", "--name", "demo", "--stop", "--root", root)
            self.tell(f"      {answer.splitlines()[-1]}")
            asleep = self._ticks("before")[-1]
            with self._step("container 'before' is deleted, its root file system unmounted"):
                before.close()
            with self._step("container 'after' is created with torpor.dev/restore-from=demo"):
                asked = ("--annotation", "torpor.dev/restore-from=demo")
                cleanup.enter_context(self._container("after", launcher, python, *asked))
                awake = self._wait_for(lambda: self._ticks("after"))[0]
            self.tell(f"      last line before: {asleep}")
            self.tell(f"      first line after: {awake}")
            _compare(asleep, awake)
            self.tell(
                f"The counter goes on: {asleep.split()[1]} -> {awake.split()[1]}, same memory, same file, "
                f"another network namespace. {time.monotonic() - self.begun:.1f} s in all."
            )

    # --- the parts -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _step(self, words: str) -> Generator[None]:
        start = time.monotonic()
        yield
        self.tell(f"{start - self.begun:5.1f} s  {words}  ({time.monotonic() - start:.2f} s)")

    def _launcher(self) -> Path:
        if self.tools.runc is None or self.tools.containerd is None or self.tools.ctr is None:
            raise ShimError(
                "could not run the demo: runc or containerd is missing; run `torpor toolchain install`"
            )
        write_launchers(
            _made(self.base / "bin"),
            python=base_python(),
            package_root=package_root(),
            site=Path(next(entry for entry in sys.path if entry.endswith("site-packages"))),
            settings={
                "RUNTIME": str(self.tools.runc),
                "TOOLS": str(self.tools.prefix),
                "STATE": str(self.base / "state"),
                "STORE": str(self.base / "store"),
                "CONFIG": str(self.base / "config.toml"),
            },
            conf_path=self.base / "runtime.conf",
        )
        return self.base / "bin" / "torpor-runtime"

    @contextlib.contextmanager
    def _containerd(self) -> Generator[None]:
        config = self.base / "containerd.toml"
        config.write_text(CONTAINERD.format(base=self.base, socket=self.socket))
        with (self.base / "containerd.log").open("wb") as output:
            process = subprocess.Popen(
                [str(self.tools.containerd), "--config", str(config)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, "PATH": self.tools.search_path},
                start_new_session=True,
            )
        try:
            self._wait_for(lambda: self.socket.exists() and self._answers())
            yield
        finally:
            process.terminate()
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _answers(self) -> bool:
        try:
            self._ctr("version")
        except ShimError:
            return False
        return True

    @contextlib.contextmanager
    def _overlay(self, name: str) -> Generator[Path]:
        """What a snapshotter mounts: the same container image below, a fresh upper directory on top."""
        root = _made(self.base / name / "rootfs")
        upper, work = _made(self.base / name / "upper"), _made(self.base / name / "work")
        options = f"lowerdir={self.base / 'lower'},upperdir={upper},workdir={work}"
        self._call(["mount", "-t", "overlay", "overlay", "-o", options, str(root)])
        try:
            yield root
        finally:
            self._call(["umount", "--lazy", str(root)])

    @contextlib.contextmanager
    def _container(self, name: str, launcher: Path, python: str, *options: str) -> Generator[None]:
        """A running container, gone afterwards whatever happened to it."""
        with self._overlay(name) as root:
            self._ctr(
                *("run", "--detach", *options),
                *("--runc-binary", str(launcher), "--runc-root", str(self.base / "runc")),
                *("--log-uri", f"file://{self.base / name / 'log'}"),
                *("--rootfs", str(root), name, python, "/workload.py"),
            )
            try:
                yield
            finally:
                with contextlib.suppress(ShimError):
                    self._ctr("task", "kill", "--signal", "KILL", name)
                self._wait_for(lambda: "STOPPED" in self._ctr("task", "ls"))
                self._ctr("task", "delete", name)
                self._ctr("container", "delete", name)

    def _remove_cgroups(self) -> None:
        """The runtime removes the cgroup of a container, not the one above it."""
        top = Path("/sys/fs/cgroup")
        for path in (*top.glob(self.namespace), *top.glob(f"*/{self.namespace}")):
            with contextlib.suppress(OSError):
                path.rmdir()

    def _ticks(self, name: str) -> list[str]:
        """Whole lines of the container's output."""
        try:
            text = (self.base / name / "log").read_text()
        except FileNotFoundError:
            return []
        lines = [line for line in text.split("\n")[:-1] if line]
        for line in lines:
            if not line.startswith("tick "):
                raise ShimError(
                    f"could not run the demo: the container said {line!r} ({self.base / name / 'log'})"
                )
        return lines

    def _ctr(self, *args: str) -> str:
        return self._call(
            [str(self.tools.ctr), "--address", str(self.socket), "--namespace", self.namespace, *args],
            env={**os.environ, "PATH": self.tools.search_path},
        )

    def _torpor(self, *args: str) -> str:
        return self._call(
            [sys.executable, "-m", "shim.cli.main", *args],
            env={**os.environ, "TORPOR_CONF": str(self.base / "runtime.conf")},
        )

    def _call(self, argv: list[str], env: dict[str, str] | None = None) -> str:
        answer = subprocess.run(
            argv, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=120
        )
        if answer.returncode:
            cause = answer.stderr.strip().rpartition("\n")[2]
            raise ShimError(f"could not run the demo: `{' '.join(argv[:2])} ... {argv[-1]}` failed: {cause}")
        return answer.stdout

    def _wait_for(self, ready: Callable[[], T]) -> T:
        deadline = time.monotonic() + START_S
        while not (found := ready()):
            if time.monotonic() > deadline:
                raise ShimError(
                    f"could not run the demo: nothing happened for {START_S:.0f} s; logs: {self.base}"
                )
            time.sleep(0.02)
        return found


def _made(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    return path


def _compare(asleep: str, awake: str) -> None:
    """The proof. Raises ShimError."""
    before, after = asleep.split(), awake.split()
    if int(after[1]) <= int(before[1]) or after[3:8:2] != before[3:8:2]:
        raise ShimError(f"the demo failed: {asleep!r} did not go on in {awake!r}")
    if before[-1] == after[-1]:
        raise ShimError("the demo failed: the new container is in the old network namespace")


def _end(number: int, frame: object) -> None:
    del frame
    sys.exit(128 + number)


def run(tools: Tools, tell: Callable[[str], None]) -> None:
    """Run the show in a directory of its own that is removed at the end. Raises ShimError."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)
    large = "/var/tmp"  # noqa: S108  # /tmp may be a small tmpfs
    with tempfile.TemporaryDirectory(prefix="torpor-demo-", dir=large, ignore_cleanup_errors=True) as name:
        base = Path(name)
        base.chmod(0o711)
        Show(tools, base, tell).run()
