"""How each tool is tried for real. Called by smoke.py inside namespaces of its own."""

from __future__ import annotations

import contextlib
import json
import secrets
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Generator, Mapping
from pathlib import Path

from shim.toolchain.find import Tools

TIMEOUT_S = 60
_PROOF = "torpor-smoke-ok"


class SmokeFailure(Exception):
    """A tool does not work. The message says what it did."""


class Bench:
    """A folder to work in, and how to run a tool there."""

    def __init__(self, tools: Tools, path: Path) -> None:
        self.tools = tools
        self.path = path
        self.images_path: Path | None = None  # left by criu for those that read its images

    def environment(self) -> dict[str, str]:
        """A small environment with the toolchain first on PATH."""
        return {"PATH": self.tools.search_path, "HOME": str(self.path), "LC_ALL": "C.UTF-8"}

    def call(
        self,
        *command: str | Path,
        ok: bool = True,
        stdin: str = "",
        extra: Mapping[str, str] | None = None,
        log: Path | None = None,
    ) -> str:
        """Run a command to its end and return stdout. Raises SmokeFailure unless it exits 0.

        log: where the command tells errors; its output then goes nowhere, as a container that is to be
        dumped must not hold a file of ours.
        """
        # Files, not pipes: a conmon that is left behind would hold a pipe open.
        out_path = Path("/dev/null") if log else self.path / "stdout"
        err_path = Path("/dev/null") if log else self.path / "stderr"
        with out_path.open("w") as out, err_path.open("w") as err:
            done = subprocess.run(
                command,
                input=stdin,
                stdout=out,
                stderr=err,
                text=True,
                cwd=self.path,
                env={**self.environment(), **(extra or {})},
                timeout=TIMEOUT_S,
                check=False,
            )
        stdout = out_path.read_text(errors="replace")
        if ok and done.returncode != 0:
            told = log or err_path
            errors = told.read_text(errors="replace") if told.exists() else ""
            lines = (errors.strip() or stdout.strip()).splitlines() or ["no message"]
            name = Path(command[0]).name
            raise SmokeFailure(f"'{name}' exited with {done.returncode}: {lines[-1].strip()}")
        return stdout

    def bundle(self, *command: str, annotations: Mapping[str, str] | None = None) -> Path:
        """A bundle whose container has the system's own programs, bound read-only.

        command: what it runs, by default it prints a proof.
        """
        path = self.path / f"bundle-{secrets.token_hex(3)}"
        rootfs = path / "rootfs"
        (rootfs / "proc").mkdir(parents=True)
        (rootfs / "usr").mkdir()
        mounts = [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/usr", "type": "bind", "source": "/usr", "options": ["rbind", "ro"]},
        ]
        for name in ("bin", "lib", "lib64"):
            host = Path("/") / name
            if host.is_symlink():
                (rootfs / name).symlink_to(f"usr/{name}")
            elif host.is_dir():
                (rootfs / name).mkdir()
                mounts.append(
                    {
                        "destination": str(host),
                        "type": "bind",
                        "source": str(host),
                        "options": ["rbind", "ro"],
                    }
                )
        spec = {
            "ociVersion": "1.0.2",
            "process": {
                "user": {"uid": 0, "gid": 0},
                "args": command or ["/bin/sh", "-c", f"echo {_PROOF}"],
                "env": ["PATH=/usr/bin:/bin"],
                "cwd": "/",
            },
            "root": {"path": "rootfs"},
            "hostname": "smoke",
            "mounts": mounts,
            "annotations": annotations or {},
            "linux": {
                "cgroupsPath": f"/torpor-{path.name}",
                "namespaces": [{"type": kind} for kind in ("pid", "mount", "ipc", "uts", "network")],
            },
        }
        (path / "config.json").write_text(json.dumps(spec))
        return path


def _expect(condition: object, problem: str) -> None:
    if not condition:
        raise SmokeFailure(problem)


def _required(path: Path | None) -> Path:
    if path is None:
        raise SmokeFailure("a program that it needs was not found")
    return path


def _criu(bench: Bench) -> str:
    criu = _required(bench.tools.criu)
    bench.call(criu, "check")
    folder = bench.path / "criu"
    folder.mkdir()
    # Namespaces of their own: pids are free at the restore, and the network lock touches nobody else.
    namespaces = ["unshare", "--net", "--pid", "--mount", "--fork", "--mount-proc", "--kill-child"]
    script = Path(__file__).with_name("smoke_criu.py")
    out = bench.call(*namespaces, sys.executable, "-IS", script, criu, folder)
    _expect(_PROOF in out, f"dump and restore of a process with a TCP connection: {out.strip()}")
    bench.images_path = folder / "images"
    return "dumped and restored a process with an established TCP connection"


def _pycriu(bench: Bench) -> str:
    if bench.images_path is None:
        raise SmokeFailure("there is no image to read, because criu does not work")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import pycriu; "
        "image = pycriu.images.load(open(sys.argv[2], 'rb')); print(image['magic'], len(image['entries']))"
    )
    out = bench.call(
        sys.executable, "-I", "-c", code, _required(bench.tools.python_path), bench.images_path / "pstree.img"
    )
    _expect(out.split()[:1] == ["PSTREE"], f"it read {out.strip()!r} from an image")
    return "decoded a CRIU image"


def _oci(bench: Bench, program: Path | None, *options: str) -> str:
    runtime = _required(program)
    bundle = bench.bundle()
    root = bench.path / f"{runtime.name}-state"
    try:
        out = bench.call(runtime, "--root", root, *options, "run", "--bundle", bundle, bundle.name)
    finally:
        bench.call(runtime, "--root", root, *options, "delete", "--force", bundle.name, ok=False)
    _expect(_PROOF in out, f"its container printed {out.strip()!r}")
    return "ran a container"


def _runc(bench: Bench) -> str:
    runc = _required(bench.tools.runc)
    message = _oci(bench, runc)
    if bench.images_path is None:
        return f"{message}; it could not dump one, because criu does not work"
    settings = bench.path / "runc-criu.conf"
    settings.write_text("network-lock nftables\n")  # the default needs the program iptables-restore
    bundle = bench.bundle("/bin/sleep", "1000", annotations={"org.criu.config": str(settings)})
    log = bench.path / "runc.log"
    command = (runc, f"--root={bench.path / 'runc-state'}", f"--log={log}")
    places = ("--image-path", bench.path / "runc-images", "--work-path", bench.path / "runc-work")
    try:
        bench.call(*command, "run", "--detach", "--bundle", bundle, bundle.name, log=log)
        bench.call(*command, "checkpoint", *places, bundle.name, log=log)
        bench.call(*command, "restore", "--detach", *places, "--bundle", bundle, bundle.name, log=log)
        status = json.loads(bench.call(*command, "state", bundle.name)).get("status")
        _expect(status == "running", f"a restored container is {status}")
    finally:
        bench.call(*command, "delete", "--force", bundle.name, ok=False)
    return f"{message}, dumped one and restored it"


def _runsc(bench: Bench) -> str:
    options = ("--network=none", "--ignore-cgroups", "--platform=systrap")
    return _oci(bench, bench.tools.runsc, *options)


@contextlib.contextmanager
def _running(bench: Bench, *command: str | Path) -> Generator[subprocess.Popen[bytes]]:
    with (bench.path / "daemon.log").open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=bench.path, env=bench.environment()
        )
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _containerd(bench: Bench) -> str:
    containerd, ctr = _required(bench.tools.containerd), _required(bench.tools.ctr)
    _required(bench.tools.containerd_shim)
    folder = bench.path / "containerd"
    folder.mkdir()
    socket = folder / "sock"
    (folder / "config.toml").write_text(
        f"""version = 2
root = "{folder}/root"
state = "{folder}/state"
disabled_plugins = ["io.containerd.grpc.v1.cri"]
[grpc]
  address = "{socket}"
"""
    )
    bundle = bench.bundle()
    mounts = [
        f"--mount=type=bind,src={host},dst={host},options=rbind:ro"
        for host in ("/usr", "/bin", "/lib", "/lib64")
        if Path(host).is_dir() and not Path(host).is_symlink()
    ]
    with _running(bench, containerd, "--config", folder / "config.toml") as process:
        deadline = time.monotonic() + 30
        while True:
            try:
                bench.call(ctr, "--address", socket, "version")
                break
            except SmokeFailure as failure:
                log = (bench.path / "daemon.log").read_text(errors="replace").strip().splitlines()
                _expect(process.poll() is None, f"it ended: {log[-1] if log else failure}")
                _expect(time.monotonic() < deadline, f"it did not answer: {failure}")
                time.sleep(0.05)
        out = bench.call(
            *(ctr, "--address", socket, "--namespace", "torpor-smoke", "run", "--rm"),
            *("--cgroup", f"/torpor-{bundle.name}", "--rootfs"),
            *(*mounts, bundle / "rootfs", bundle.name, "/bin/sh", "-c", f"echo {_PROOF}"),
        )
        _expect(_PROOF in out, f"its container printed {out.strip()!r}")
    return "started, and ran a container"


def _podman(bench: Bench) -> str:
    podman, runc = _required(bench.tools.podman), _required(bench.tools.runc)
    _required(bench.tools.conmon)
    folder = bench.path / "podman"
    bundle = bench.bundle()
    configuration = bench.tools.prefix / "etc" / "containers" / "containers.conf"
    extra = {"PODMAN_IGNORE_CGROUPSV1_WARNING": "1"}
    if configuration.is_file():
        extra["CONTAINERS_CONF"] = str(configuration)
    places = [
        f"--root={folder}/root",
        f"--runroot={folder}/run",
        f"--tmpdir={folder}/libpod",
        "--storage-driver=vfs",
    ]
    options = ["--cgroup-manager=cgroupfs", "--events-backend=file", f"--runtime={runc}"]
    volumes = [
        f"--volume={host}:{host}:ro"
        for host in ("/usr", "/bin", "/lib", "/lib64")
        if Path(host).is_dir() and not Path(host).is_symlink()
    ]
    out = bench.call(
        *(podman, *places, *options, "run", "--rm", "--network=none", *volumes),
        *("--rootfs", bundle / "rootfs", "/bin/sh", "-c", f"echo {_PROOF}"),
        extra=extra,
    )
    _expect(_PROOF in out, f"its container printed {out.strip()!r}")
    return "ran a container"


def _checkpointctl(bench: Bench) -> str:
    if bench.images_path is None:
        raise SmokeFailure("there is no image to read, because criu does not work")
    archive = bench.path / "checkpoint.tar"
    config = {
        "id": "a" * 64,
        "name": "smoke",
        "rootfsImageName": "none",
        "runtime": "runc",
        "engine": "Podman",
    }
    (bench.path / "config.dump").write_text(json.dumps(config))
    (bench.path / "spec.dump").write_text((bench.bundle() / "config.json").read_text())
    with tarfile.open(archive, "w") as tar:
        for name in ("config.dump", "spec.dump"):
            tar.add(bench.path / name, name)
        tar.add(bench.images_path, "checkpoint")
    out = bench.call(_required(bench.tools.checkpointctl), "inspect", archive)
    _expect("smoke" in out, f"it said {out.strip()!r} of an archive")
    return "read a checkpoint archive"


def _nft(bench: Bench) -> str:
    nft = _required(bench.tools.nft)
    out = bench.call("unshare", "--net", "sh", "-c", '"$0" add table inet smoke && "$0" list tables', nft)
    _expect("table inet smoke" in out, f"it listed {out.strip()!r} after adding a table")
    return "added a table in a network namespace of its own"


def _ip(bench: Bench) -> str:
    ip = _required(bench.tools.ip)
    out = bench.call("unshare", "--net", "sh", "-c", '"$0" link set lo up && "$0" -json address show lo', ip)
    _expect("127.0.0.1" in out, f"it showed {out.strip()!r}")
    return "set up a loopback device"


def _cni(bench: Bench) -> str:
    folder = _required(bench.tools.cni_path)
    for name in ("bridge", "host-local", "loopback", "portmap"):
        out = bench.call(folder / name, stdin='{"cniVersion": "1.0.0"}', extra={"CNI_COMMAND": "VERSION"})
        _expect("supportedVersions" in out, f"plugin {name} answered {out.strip()!r}")
    return "the plugins answered"


SMOKE: dict[str, Callable[[Bench], str]] = {
    "criu": _criu,
    "pycriu": _pycriu,
    "runc": _runc,
    "runsc": _runsc,
    "crun": lambda bench: _oci(bench, bench.tools.crun),
    "containerd": _containerd,
    "podman": _podman,
    "checkpointctl": _checkpointctl,
    "nft": _nft,
    "ip": _ip,
    "cni": _cni,
}
