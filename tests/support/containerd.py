"""A private containerd with its CRI plugin, apart from any that the machine runs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from cri_api.v1 import api_pb2 as api
from cri_api.v1 import api_pb2_grpc

from tests.support import leaks, oci
from tests.support.containers import SEARCH_PATH, command, tool, until
from tests.support.network import free_subnet

PREFIX_CNI = Path(tool("containerd")).resolve().parents[1] / "cni"
CNI_FOLDERS = [
    str(path) for path in (PREFIX_CNI, Path("/opt/cni/bin"), Path("/usr/lib/cni")) if path.is_dir()
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Handler:
    """A runtime of the CRI plugin: its binary, and the pod annotations that it may see."""

    binary: Path
    annotations: tuple[str, ...] = ("torpor.dev/*",)


class Containerd:
    """One daemon; everything it makes lies under `path` or carries `tag` in its name.

    path: a short absent directory (its sockets' names are limited). tag: the session's word.
    handlers: CRI runtime handlers by name; the first is the default.
    """

    def __init__(self, path: Path, tag: str, handlers: Mapping[str, Handler]) -> None:
        self.path = path
        self.tag = tag
        self.socket = path / "c.sock"
        self.bridge = f"tpr{os.getpid():x}"[:15]
        self.runc_root = path / "runc"
        self.imported: set[tuple[str, str]] = set()
        path.mkdir(parents=True, mode=0o711)
        (path / "cni").mkdir()
        (path / "config.toml").write_text(_config(self, handlers))
        (path / "cni" / "10-torpor.conflist").write_text(_network(self))
        self.log = (path / "containerd.log").open("w")
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [str(tool("containerd")), "--config", str(self.path / "config.toml")],
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=self.log,
            env={**os.environ, "PATH": SEARCH_PATH, leaks.TAG_VARIABLE: self.tag, "TMPDIR": "/tmp"},
            start_new_session=True,
        )

        def answers() -> bool:
            if process.poll() is not None:
                raise AssertionError(f"containerd ended: {self.tail()}")
            return self.socket.exists() and self._cri_is_ready()

        until(answers, timeout_s=60, what="containerd answers")
        return process

    def restart(self) -> None:
        """Stop the daemon and start it again; containers and their shims live on."""
        self._end()
        self.process = self._start()

    def ctr(
        self, *words: str | Path, namespace: str = "default", check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run ctr. words: its command and options; namespace: containerd's, not Kubernetes'."""
        return command(tool("ctr"), "-a", self.socket, "-n", namespace, *words, check=check)

    def image(self, name: str, *, namespace: str = "k8s.io") -> str:
        """Import the test image `name` (once); its reference."""
        if (name, namespace) not in self.imported:
            self.ctr("images", "import", oci.layout(name), namespace=namespace)
            if namespace == "k8s.io":
                until(lambda: self._knows(oci.reference(name)), what=f"the CRI plugin knows image {name}")
            self.imported.add((name, namespace))
        return oci.reference(name)

    def _image_status(self, reference: str) -> Any:
        with grpc.insecure_channel(f"unix:{self.socket}") as channel:
            service: Any = api_pb2_grpc.ImageServiceStub(channel)
            request = api.ImageStatusRequest(image=api.ImageSpec(image=reference))
            return service.ImageStatus(request, timeout=30)

    def _knows(self, reference: str) -> bool:
        """Whether the CRI plugin has learned of an image: it is told by an event."""
        return bool(self._image_status(reference).HasField("image"))

    def _cri_is_ready(self) -> bool:
        """Whether the CRI plugin serves: it recovers its containers after the socket is there."""
        try:
            self._image_status(oci.reference("pause"))
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.UNAVAILABLE:  # pyright: ignore[reportAttributeAccessIssue]
                return False
            raise
        return True

    def tail(self, n_lines: int = 20) -> str:
        """The last lines of the daemon's log."""
        return "\n".join((self.path / "containerd.log").read_text().splitlines()[-n_lines:])

    def _end(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def close(self) -> None:
        """Stop the daemon and remove everything that it and its shims made."""
        self._end()
        self.log.close()
        for pid, argv in list(leaks.processes(self.tag)):
            # Shims and containers outlive the daemon. Others that carry the tag belong to their own tests.
            if str(self.socket) in argv or str(self.path) in " ".join(argv) or self._in_cgroup(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        until(
            lambda: not [pid for pid, _ in leaks.processes(self.tag) if self._in_cgroup(pid)],
            what="all ended",
        )
        leaks.unmount(str(self.path))
        leaks.remove_cgroups(self.tag)
        command(tool("ip"), "link", "delete", self.bridge, check=False)

    def _in_cgroup(self, pid: int) -> bool:
        with contextlib.suppress(OSError):
            return self.tag in Path(f"/proc/{pid}/cgroup").read_text(errors="replace")
        return False


def _config(daemon: Containerd, handlers: Mapping[str, Handler]) -> str:
    path = daemon.path
    runtime = "plugins.'io.containerd.cri.v1.runtime'"
    parts = [
        f"""\
version = 3
root = '{path / "root"}'
state = '{path / "state"}'
[grpc]
address = '{daemon.socket}'
[plugins.'io.containerd.internal.v1.opt']
path = '{path / "opt"}'
[plugins.'io.containerd.nri.v1.nri']
disable = true
[plugins.'io.containerd.cri.v1.images'.pinned_images]
sandbox = '{oci.reference("pause")}'
[{runtime}]
# Without CAP_SYS_RESOURCE a lower score than the daemon's own cannot be set.
restrict_oom_score_adj = true
netns_mounts_under_state_dir = true
cdi_spec_dirs = []
[{runtime}.cni]
bin_dirs = {json.dumps(CNI_FOLDERS)}
conf_dir = '{path / "cni"}'
[{runtime}.containerd]
default_runtime_name = '{next(iter(handlers))}'
"""
    ]
    for name, handler in handlers.items():
        allowed = json.dumps(list(handler.annotations))
        parts.append(
            f"""\
[{runtime}.containerd.runtimes.{name}]
runtime_type = 'io.containerd.runc.v2'
pod_annotations = {allowed}
container_annotations = {allowed}
[{runtime}.containerd.runtimes.{name}.options]
BinaryName = '{handler.binary}'
Root = '{daemon.runc_root}'
"""
        )
    return "".join(parts)


def _network(daemon: Containerd) -> str:
    bridge: dict[str, object] = {
        "type": "bridge",
        "bridge": daemon.bridge,
        "isGateway": True,
        "ipMasq": False,
        "ipam": {
            "type": "host-local",
            "dataDir": str(daemon.path / "ipam"),
            "ranges": [[{"subnet": free_subnet()}]],
            "routes": [{"dst": "0.0.0.0/0"}],
        },
    }
    return json.dumps({"cniVersion": "1.0.0", "name": daemon.tag, "plugins": [bridge]})


def runc_options(binary: Path, daemon: Containerd) -> Sequence[str]:
    """Options of `ctr run` that choose the OCI runtime."""
    return ["--runc-binary", str(binary), "--runc-root", str(daemon.runc_root)]
