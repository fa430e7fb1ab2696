"""Containers for tests: bundles, a real runc, namespaces with veth pairs, live TCP clients.

Nothing here knows torpor. A container's rootfs is a few empty directories; the machine's own /usr and
Python are bound into it read-only, so that making one costs milliseconds.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

CHECKOUT = Path(__file__).resolve().parents[2]
WORKLOADS = CHECKOUT / "tests" / "workloads"
PREFIX = Path(os.environ.get("TORPOR_PREFIX", CHECKOUT / ".toolchain"))
SEARCH_PATH = f"{PREFIX / 'bin'}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
PYTHON = Path(os.path.realpath(getattr(sys, "_base_executable", sys.executable)))
CAPABILITIES = [
    *("CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FSETID", "CAP_FOWNER", "CAP_MKNOD", "CAP_NET_RAW", "CAP_SETGID"),
    *("CAP_SETUID", "CAP_SETFCAP", "CAP_SETPCAP", "CAP_NET_BIND_SERVICE", "CAP_SYS_CHROOT", "CAP_KILL"),
    "CAP_AUDIT_WRITE",
]

T = TypeVar("T")


def tool(name: str) -> Path:
    """The tool that the toolchain, else the system, has under this name."""
    found = shutil.which(name, path=SEARCH_PATH)
    if found is None:
        raise FileNotFoundError(f"no {name} in {SEARCH_PATH}")
    return Path(found)


def until(check: Callable[[], T], *, timeout_s: float = 20.0, what: str = "") -> T:
    """Poll `check` until it returns something true; its value. Fails after timeout_s seconds."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = check()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s} s: {what or check}")
        time.sleep(0.01)


def command(*argv: str | Path, check: bool = True, **more: Any) -> subprocess.CompletedProcess[str]:
    """Run a tool with the toolchain's PATH; its output as text."""
    environment = {**os.environ, "PATH": SEARCH_PATH, **more.pop("env", {})}
    done = subprocess.run(
        [str(word) for word in argv], capture_output=True, text=True, check=False, env=environment, **more
    )
    if check and done.returncode:
        raise AssertionError(f"{argv} exited {done.returncode}: {done.stdout}{done.stderr}")
    return done


# --- bundles -------------------------------------------------------------------------------------------


def bind(source: Path, destination: str, *, writable: bool = False) -> dict[str, Any]:
    """A bind mount for a spec. The source is resolved: CRIU cannot restore a bind of a link."""
    options = ["rbind", "rprivate", "rw" if writable else "ro"]
    return {"destination": destination, "type": "bind", "source": str(source.resolve()), "options": options}


def host_binds() -> list[dict[str, Any]]:
    """What a rootfs needs so that the machine's programs and the tests' workloads run in it."""
    binds = [bind(Path("/usr"), "/usr"), bind(WORKLOADS, "/workloads")]
    if not PYTHON.is_relative_to("/usr"):
        binds.append(bind(Path(sys.base_prefix), sys.base_prefix))
    return binds


def make_spec(
    args: Sequence[str],
    *,
    rootfs: str = "rootfs",
    netns_path: Path | None = None,
    cgroup: str = "",
    mounts: Sequence[Mapping[str, Any]] = (),
    terminal: bool = False,
    hostname: str = "box",
    annotations: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """An OCI spec: Docker's default capabilities, every namespace its own, netns by path if given."""
    network: dict[str, Any] = {"type": "network"}
    if netns_path:
        network["path"] = str(netns_path)
    sets = ("bounding", "effective", "permitted", "inheritable", "ambient")
    capabilities = dict.fromkeys(sets, CAPABILITIES)

    def virtual(destination: str, kind: str, *options: str) -> dict[str, Any]:
        return {"destination": destination, "type": kind, "source": kind, "options": list(options)}

    return {
        "ociVersion": "1.0.2",
        "process": {
            "terminal": terminal,
            "user": {"uid": 0, "gid": 0},
            "args": list(args),
            "env": ["PATH=/usr/sbin:/usr/bin:/sbin:/bin", "TERM=xterm", "HOME=/root"],
            "cwd": "/",
            "capabilities": capabilities,
            "noNewPrivileges": True,
        },
        "root": {"path": rootfs, "readonly": False},
        "hostname": hostname,
        "annotations": dict(annotations or {}),
        "mounts": [
            virtual("/proc", "proc", "nosuid", "noexec", "nodev"),
            virtual("/dev", "tmpfs", "nosuid", "strictatime", "mode=755", "size=65536k"),
            virtual("/dev/pts", "devpts", "nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620"),
            virtual("/dev/shm", "tmpfs", "nosuid", "noexec", "nodev", "mode=1777", "size=65536k"),
            virtual("/dev/mqueue", "mqueue", "nosuid", "noexec", "nodev"),
            virtual("/sys", "sysfs", "nosuid", "noexec", "nodev", "ro"),
            *map(dict, mounts),
        ],
        "linux": {
            "cgroupsPath": cgroup,
            "namespaces": [
                {"type": "pid"},
                {"type": "ipc"},
                {"type": "uts"},
                {"type": "mount"},
                network,
            ],
            "maskedPaths": ["/proc/kcore", "/proc/keys", "/proc/timer_list", "/sys/firmware"],
            "readonlyPaths": ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"],
        },
    }


def make_rootfs(path: Path) -> Path:
    """An empty rootfs into which `host_binds` can be mounted."""
    for name in ("proc", "dev", "sys", "tmp", "root", "usr", "workloads", "data", "etc"):
        (path / name).mkdir(parents=True, exist_ok=True)
    (path / "tmp").chmod(0o1777)
    for name in ("bin", "sbin", "lib", "lib64"):
        with contextlib.suppress(FileExistsError):
            (path / name).symlink_to(f"usr/{name}")
    return path


def make_bundle(path: Path, args: Sequence[str], *, rootfs: Path | None = None, **spec: Any) -> Path:
    """Write a bundle: `config.json`, and a rootfs unless another bundle's is named.

    args: the program; `python` as its first word means this machine's. spec: see `make_spec`.
    """
    path.mkdir(parents=True, exist_ok=True)
    root = rootfs or make_rootfs(path / "rootfs")
    words = [str(PYTHON), *args[1:]] if args[0] == "python" else list(args)
    mounts = [*host_binds(), *spec.pop("mounts", ())]
    document = make_spec(words, rootfs=str(root), mounts=mounts, **spec)
    (path / "config.json").write_text(json.dumps(document, indent=1))
    return path


def live(*options: str) -> list[str]:
    """The arguments of tests/workloads/live.py inside a container."""
    return ["python", "-IS", "-u", "/workloads/live.py", *options]


# --- a real runc ---------------------------------------------------------------------------------------


class Output:
    """Reads one pipe in a thread, so that a container never blocks on a full pipe."""

    def __init__(self) -> None:
        self.read_fd, self.write_fd = os.pipe()
        self.text = ""
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with open(self.read_fd, "rb", buffering=0) as stream:
            while data := stream.read(65536):
                self.text += data.decode(errors="replace")

    def handed_over(self) -> None:
        """Close our copy of the writing end: after this, end of file means that nobody has it."""
        os.close(self.write_fd)

    def ended(self) -> bool:
        return not self._thread.is_alive()

    def ticks(self) -> list[int]:
        return [int(number) for number in re.findall(r"^tick (\d+)$", self.text, re.MULTILINE)]

    def last_tick(self) -> int:
        return next(iter(reversed(self.ticks())), 0)


class Runc:
    """The real runc with a state root of its own."""

    def __init__(self, root: Path, program: Path | None = None) -> None:
        self.root = root
        self.program = program or tool("runc")

    def __call__(
        self, *args: str | Path, check: bool = True, **more: Any
    ) -> subprocess.CompletedProcess[str]:
        return command(self.program, "--root", self.root, *args, check=check, **more)

    def run(self, bundle: Path, container_id: str) -> Output:
        """Start a container detached with pipes as its standard output and error."""
        output = Output()
        with open(os.devnull) as nothing:
            done = subprocess.run(
                [self.program, "--root", self.root, "run", "--detach", "--bundle", bundle, container_id],
                stdin=nothing,
                stdout=output.write_fd,
                stderr=output.write_fd,
                check=False,
                env={**os.environ, "PATH": SEARCH_PATH},
            )
        output.handed_over()
        assert done.returncode == 0, output.text
        return output

    def state(self, container_id: str) -> dict[str, Any]:
        """`runc state`; empty if there is no such container."""
        done = self("state", container_id, check=False)
        return json.loads(done.stdout) if done.returncode == 0 else {}

    def pid(self, container_id: str) -> int:
        return int(self.state(container_id).get("pid", 0))

    def pids(self, container_id: str) -> list[int]:
        done = self("ps", "--format", "json", container_id, check=False)
        return json.loads(done.stdout) or [] if done.returncode == 0 else []

    def delete(self, container_id: str) -> None:
        self("delete", "--force", container_id, check=False)


class Lab:
    """A place for the containers of one test; `close` removes them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tag = secrets.token_hex(3)
        self.runc = Runc(path / "runc")
        self.ids: list[str] = []
        self._closers: list[Callable[[], object]] = []

    def new_id(self, name: str = "c") -> str:
        """A container id that no other test uses."""
        container_id = f"tt-{self.tag}-{name}{len(self.ids)}"
        self.ids.append(container_id)
        return container_id

    def bundle(self, name: str, args: Sequence[str], **spec: Any) -> Path:
        spec.setdefault("cgroup", f"/tt-{self.tag}/{name}")
        return make_bundle(self.path / "bundles" / name, args, **spec)

    def network(self, name: str = "n") -> Network:
        network = Network(f"tt{self.tag}{name}")
        self._closers.append(network.close)
        return network

    def client(self, network: Network, port: int) -> Client:
        client = Client(network, port)
        self._closers.append(client.close)
        return client

    def on_close(self, closer: Callable[[], object]) -> None:
        self._closers.append(closer)

    def close(self) -> None:
        for closer in reversed(self._closers):
            closer()
        thaw(self.tag)
        for container_id in self.ids:
            self.runc.delete(container_id)
        for hierarchy in cgroup_hierarchies():
            for directory, _, _ in os.walk(hierarchy / f"tt-{self.tag}", topdown=False):
                with contextlib.suppress(OSError):
                    os.rmdir(directory)


@contextlib.contextmanager
def lab(path: Path) -> Generator[Lab]:
    """A `Lab` in a directory, closed at the end."""
    place = Lab(path)
    try:
        yield place
    finally:
        place.close()


# --- networks ------------------------------------------------------------------------------------------


class Network:
    """Two network namespaces joined by a veth pair: `pod` for the container, `peer` for a client."""

    def __init__(self, name: str, *, pod_address: str = "10.77.0.2", peer_address: str = "10.77.0.1") -> None:
        self.pod, self.peer = f"{name}p", f"{name}c"
        self.pod_address, self.peer_address = pod_address, peer_address
        self.pod_path, self.peer_path = Path("/run/netns", self.pod), Path("/run/netns", self.peer)
        for namespace in (self.pod, self.peer):
            command("ip", "netns", "add", namespace)
            command("ip", "-n", namespace, "link", "set", "lo", "up")
        command(*f"ip -n {self.pod} link add eth0 type veth peer name eth0 netns {self.peer}".split())
        for namespace, address in ((self.pod, pod_address), (self.peer, peer_address)):
            command(*f"ip -n {namespace} address add {address}/24 dev eth0".split())
            command(*f"ip -n {namespace} link set eth0 up".split())

    def tables(self) -> list[str]:
        """Names of the nftables tables in the pod's namespace."""
        listing = command("ip", "netns", "exec", self.pod, tool("nft"), "list", "tables").stdout
        return re.findall(r"^table \S+ (\S+)$", listing, re.MULTILINE)

    def close(self) -> None:
        command("ip", "-n", self.pod, "link", "delete", "eth0", check=False)
        for namespace in (self.pod, self.peer):
            command("ip", "netns", "delete", namespace, check=False)


class Client:
    """A live TCP client in a network's peer namespace (tests/workloads/echo_client.py)."""

    def __init__(self, network: Network, port: int) -> None:
        self._process = subprocess.Popen(
            [
                *("ip", "netns", "exec", network.peer, PYTHON, "-IS", WORKLOADS / "echo_client.py"),
                *(network.pod_address, str(port)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PATH": SEARCH_PATH},
        )
        assert self._process.stdout
        assert self._process.stdout.readline() == "ready\n", "the client could not connect"

    def ask(self) -> tuple[int, float, str]:
        """Records received, seconds since the last one, error or "-"."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write("?\n")
        self._process.stdin.flush()
        received, silence_s, error = self._process.stdout.readline().split()
        return int(received), float(silence_s), error

    def goes_on(self, *, within_s: float = 60.0) -> None:
        """Fail unless new records arrive within so many seconds, and in order.

        TCP tries again after as long as it has waited: an outage of 3 s may end 3 s later.
        """
        before, _, error = self.ask()
        assert error == "-", f"the client's connection broke: {error}"

        def more() -> bool:
            received, _, error = self.ask()
            assert error == "-", f"the client's connection broke: {error}"
            return received > before + 5

        until(more, timeout_s=within_s, what=f"the client goes on (records {before}, {self.ask()})")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


# --- what may be left behind ---------------------------------------------------------------------------


def cgroup_hierarchies() -> list[Path]:
    """Mount points of all cgroup hierarchies, v1 and v2."""
    with open("/proc/self/mounts") as mounts:
        rows = [line.split() for line in mounts]
    return [Path(row[1]) for row in rows if row[2] in ("cgroup", "cgroup2")]


def cgroups(tag: str) -> list[Path]:
    """The cgroup directories under a lab's tag that are there now."""
    found: list[Path] = []
    for hierarchy in cgroup_hierarchies():
        found += [Path(path) for path in (hierarchy / f"tt-{tag}").glob("*/")]
    return found


def frozen(tag: str) -> list[Path]:
    """Those of a lab's cgroups that are frozen."""
    bad: list[Path] = []
    for directory in cgroups(tag):
        for name, idle in (("freezer.state", "THAWED"), ("cgroup.freeze", "0")):
            with contextlib.suppress(OSError):  # there is no such file, or the group has gone meanwhile
                if (directory / name).read_text().strip() != idle:
                    bad.append(directory)
    return bad


def thaw(tag: str) -> None:
    """Thaw whatever is frozen under a lab's tag, so that it can be killed."""
    for directory in frozen(tag):
        for name, value in (("freezer.state", "THAWED"), ("cgroup.freeze", "0")):
            with contextlib.suppress(OSError):
                (directory / name).write_text(value)


def there(path: Path, pattern: str) -> list[Path]:
    """What matches below a directory. Unlike `Path.glob`, it bears that directories go meanwhile."""
    return [path / name for name in glob.glob(pattern, root_dir=path, include_hidden=True)]


def mounts_under(*words: str) -> list[str]:
    """Mount points of this machine whose path has one of the words in it."""
    lines = Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()
    return [point for line in lines if any(word in (point := line.split()[4]) for word in words)]


def processes_with(*words: str) -> list[tuple[int, str]]:
    """Processes whose command line or cgroup has one of the words in it: (pid, command line).

    Zombies do not count: whoever is to reap them is not under test.
    """
    found: list[tuple[int, str]] = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            groups = (entry / "cgroup").read_text(errors="replace")
        except OSError:
            continue
        if status(int(entry.name), "State")[:1] in ("", "Z", "X"):
            continue
        if any(word in line or word in groups for word in words):
            found.append((int(entry.name), line))
    return found


def status(pid: int, field: str) -> str:
    """One field of /proc/PID/status, empty if the process is gone."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except OSError:
        return ""
    match = re.search(rf"^{field}:\s*(.*)$", text, re.MULTILINE)
    return match[1] if match else ""


def kill_and_wait(pid: int, number: int = signal.SIGKILL, *, timeout_s: float = 20.0) -> None:
    """Send a signal and wait until the process is gone or a zombie."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
    until(lambda: status(pid, "State")[:1] in ("", "Z"), timeout_s=timeout_s, what=f"{pid} dies")
