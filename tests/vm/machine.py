"""Small virtual machines for tests: qemu in software emulation, booted once, then cloned at once.

A clone is the saved machine with its disks opened for throw-away writing. One processor only: with two,
emulation races with the kernel's patching of its own code and some boots die. Nothing in here proves
speed: never assert a duration.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shlex
import socket
import struct
import subprocess
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.vm.build import AGENT_UNIT, Image, locked

EMULATOR = "qemu-system-x86_64"
PORT_NAME = "torpor.vm"
PAYLOAD_BYTES = 2 << 30  # of the sparse second disk: the same for every clone of a saved state
BOOT_TIMEOUT_S = 180.0
COMMAND_TIMEOUT_S = 120.0
MARGIN_S = 30.0  # what the host waits longer than the guest: then the machine itself is stuck
KERNEL_ARGUMENTS = (
    f"console=ttyS0 quiet panic=-1 systemd.unit={AGENT_UNIT} mitigations=off audit=0 cryptomgr.notests "
    "random.trust_cpu=on nokaslr tsc=reliable no_timer_check "
    "transparent_hugepage=never"  # one touched byte must make one page dirty, not two megabytes
)


class MachineError(Exception):
    """A machine or a command in it failed; the message ends with the machine's console."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What is saved under one name. cpu: a model of qemu."""

    cpu: str = "max"
    memory_mib: int = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """A machine saved right after its boot: the base of all clones."""

    image: Image
    kind: Kind
    disk_path: Path
    memory_path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What a command left. status: exit status, negative for a signal, as subprocess tells it."""

    status: int
    out: str
    err: str


class Machine:
    """A running machine. Make one with `boot` or `clone`; end it with `kill`, or use it in a `with`."""

    def __init__(
        self, image: Image, kind: Kind, disk: Path, payload: Path, saved_memory: Path | None
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="torpor-vm-")
        self._console = Path(self._folder.name) / "console"
        self._errors = Path(self._folder.name) / "qemu.err"
        self._agent, agent = socket.socketpair()
        self._monitor, monitor = socket.socketpair()
        snapshot = "off" if saved_memory is None else "on"
        command = [
            # it dies with the thread that starts it, and so with the test run
            *("setpriv", "--pdeathsig", "KILL", EMULATOR),
            *_hardware(kind),
            *("-kernel", str(image.kernel_path), "-initrd", str(image.initrd_path)),
            *("-append", KERNEL_ARGUMENTS),
            *("-drive", f"file={disk},format=qcow2,if=none,id=root,cache=unsafe,snapshot={snapshot}"),
            *("-drive", f"file={payload},format=raw,if=none,id=payload,cache=unsafe,snapshot={snapshot}"),
            *("-serial", f"file:{self._console}"),
            *("-chardev", f"socket,id=agent,fd={agent.fileno()}"),
            *("-chardev", f"socket,id=monitor,fd={monitor.fileno()}", "-mon", "chardev=monitor,mode=control"),
        ]
        if saved_memory is not None:
            command += ["-incoming", f"exec:exec cat {shlex.quote(str(saved_memory))}"]
        with agent, monitor, self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                pass_fds=(agent.fileno(), monitor.fileno()),
            )
        self._monitor_lines = self._monitor.makefile("rb")
        with self._killed_on_error():
            self._monitor.settimeout(BOOT_TIMEOUT_S)
            self._monitor_line()  # the greeting
            self.monitor("qmp_capabilities")

    @classmethod
    def boot(cls, image: Image, kind: Kind, disk: Path, payload: Path) -> Machine:
        """Start a machine from its disk and wait until it answers. Raises MachineError."""
        machine = cls(image, kind, disk, payload, None)
        with machine._killed_on_error():
            machine._receive(BOOT_TIMEOUT_S)
        return machine

    @classmethod
    def clone(cls, state: State, payload: Path) -> Machine:
        """Start a copy of a saved machine, with `payload` as its second disk. Raises MachineError."""
        machine = cls(state.image, state.kind, state.disk_path, payload, state.memory_path)
        with machine._killed_on_error():
            machine._call("wake", os.urandom(64), BOOT_TIMEOUT_S, time_s=time.time())
        return machine

    def run(
        self,
        command: str | Sequence[str | Path],
        *,
        timeout_s: float = COMMAND_TIMEOUT_S,
        check: bool = True,
        env: Mapping[str, str] | None = None,
        input_bytes: bytes = b"",
    ) -> Output:
        """Run a program (a list) or a bash script (a string, under `set -e`) as root.

        timeout_s: after that its session is killed, which is an error. Raises MachineError, also for an
        exit status other than 0 where `check` is set.
        """
        words = ["bash", "-ec", command] if isinstance(command, str) else [str(word) for word in command]
        head, body = self._call("run", input_bytes, timeout_s, command=words, env=dict(env or {}))
        n_out = head["n_out_bytes"]
        output = Output(
            status=head["status"],
            out=body[:n_out].decode(errors="replace"),
            err=body[n_out:].decode(errors="replace"),
        )
        if head["timed_out"]:
            raise self._failed(f"timed out after {timeout_s:.0f} s: {command}", output)
        if check and output.status != 0:
            raise self._failed(f"exit status {output.status}: {command}", output)
        return output

    def put(self, path: str | Path, data: bytes | str, mode: int = 0o644) -> None:
        """Write a file in the machine, with its parents."""
        body = data.encode() if isinstance(data, str) else data
        self._call("put", body, COMMAND_TIMEOUT_S, path=str(path), mode=mode)

    def get(self, path: str | Path) -> bytes:
        """Read a file of the machine."""
        return self._call("get", b"", COMMAND_TIMEOUT_S, path=str(path))[1]

    def mount_payload(self) -> None:
        """Mount what `payload.write` put on the second disk at the paths that it has on the host."""
        self._call("mount", b"", COMMAND_TIMEOUT_S)

    def monitor(self, command: str, **arguments: object) -> Any:
        """Send a command to qemu's monitor (QMP), return its answer. Raises MachineError."""
        self._monitor.sendall(json.dumps({"execute": command, "arguments": arguments}).encode())
        while True:  # events come in between
            answer = self._monitor_line()
            if "error" in answer:
                raise self._broken(f"{command}: {answer['error']}")
            if "return" in answer:
                return answer["return"]

    def save_memory(self, path: Path) -> None:
        """Write the machine's memory and devices to a file; the machine stands still afterwards."""
        self.run("sync; echo 3 > /proc/sys/vm/drop_caches")
        self.monitor("migrate-set-parameters", **{"max-bandwidth": 8 << 30})
        self.monitor("migrate", uri=f"exec:exec cat > {shlex.quote(str(path))}")
        while (status := self.monitor("query-migrate").get("status")) != "completed":
            if status in ("failed", "cancelled"):
                raise self._broken("the machine could not be saved")
            time.sleep(0.02)

    def console(self) -> str:
        """The end of what the kernel and qemu said."""
        files = (self._console, self._errors)
        return "\n".join(file.read_text(errors="replace")[-4000:] for file in files if file.exists()).strip()

    def kill(self) -> None:
        """End the machine at once, as a power cut would."""
        self._process.kill()
        self._process.wait()
        self._monitor_lines.close()
        self._monitor.close()
        self._agent.close()
        self._folder.cleanup()

    def __enter__(self) -> Machine:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @contextlib.contextmanager
    def _killed_on_error(self) -> Generator[None]:
        try:
            yield
        except BaseException:
            self.kill()
            raise

    def _monitor_line(self) -> dict[str, Any]:
        try:
            line = self._monitor_lines.readline()
        except OSError as problem:
            raise self._broken(f"qemu's monitor does not answer: {problem}") from problem
        if not line:
            raise self._broken("qemu ended")
        return json.loads(line)

    def _call(
        self, action: str, body: bytes, timeout_s: float, **fields: object
    ) -> tuple[dict[str, Any], bytes]:
        text = json.dumps({"action": action, "timeout_s": timeout_s, **fields}).encode()
        try:
            self._agent.settimeout(timeout_s + MARGIN_S)
            self._agent.sendall(struct.pack("<II", len(text), len(body)) + text + body)
        except OSError as problem:
            raise self._broken(f"no request could be sent: {problem}") from problem
        head, answer = self._receive(timeout_s + MARGIN_S)
        if "error" in head:
            raise MachineError(f"{action}: {head['error']}")
        return head, answer

    def _receive(self, timeout_s: float) -> tuple[dict[str, Any], bytes]:
        self._agent.settimeout(timeout_s)
        n_head, n_body = struct.unpack("<II", self._read(8))
        return json.loads(self._read(n_head)), self._read(n_body)

    def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            try:
                chunk = self._agent.recv(min(size - len(data), 1 << 20))
            except OSError as problem:
                raise self._broken(f"no answer: {problem}") from problem
            if not chunk:  # a kernel panic ends qemu, and the caller hears of it here
                raise self._broken("the machine ended")
            data += chunk
        return bytes(data)

    def _failed(self, what: str, output: Output) -> MachineError:
        return MachineError(f"{what}\n--- stdout\n{output.out[-6000:]}\n--- stderr\n{output.err[-6000:]}")

    def _broken(self, what: str) -> MachineError:
        return MachineError(f"{what}\n--- console\n{self.console()}")


def saved(image: Image, kind: Kind) -> State:
    """Boot a machine of this kind and keep its state beside the image; done once. Raises MachineError.

    A state is good for the qemu and the command line it was made with only: both are in its name.
    """
    version = subprocess.run([EMULATOR, "--version"], capture_output=True, text=True, check=True).stdout
    recipe = repr((version, _hardware(kind), KERNEL_ARGUMENTS, PAYLOAD_BYTES))
    stem = image.path / hashlib.sha256(recipe.encode()).hexdigest()[:16]
    disk, memory = stem.with_suffix(".qcow2"), stem.with_suffix(".memory")
    state = State(image=image, kind=kind, disk_path=disk, memory_path=memory)
    with locked(image.path / "lock"):
        if not memory.exists():
            _save(state)
    return state


def _save(state: State) -> None:
    blank = state.disk_path.with_suffix(".blank")
    memory = state.memory_path.with_suffix(".part")
    with blank.open("wb") as handle:
        handle.truncate(PAYLOAD_BYTES)
    state.disk_path.unlink(missing_ok=True)
    # the backing file by its bare name, so that the folder may move
    base = ("-F", "raw", "-b", state.image.disk_path.name)
    subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", *base, str(state.disk_path)], check=True)
    try:
        with Machine.boot(state.image, state.kind, state.disk_path, blank) as machine:
            machine.save_memory(memory)
        state.disk_path.chmod(0o444)
        memory.chmod(0o444)
        memory.rename(state.memory_path)
    finally:
        blank.unlink()


def _hardware(kind: Kind) -> list[str]:
    """The part of the command line that a saved state and its clones must have in common."""
    return [
        *("-accel", "tcg,tb-size=256", "-M", "q35", "-cpu", kind.cpu, "-smp", "1"),
        *("-m", str(kind.memory_mib), "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"),
        *("-device", "virtio-blk-pci,drive=root", "-device", "virtio-blk-pci,drive=payload"),
        *("-device", "virtio-serial-pci", "-device", f"virtserialport,chardev=agent,name={PORT_NAME}"),
    ]
