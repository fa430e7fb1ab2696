"""Drives a CRI runtime as kubelet does: annotations on the pod only, /etc/hosts and logs of kubelet's own."""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from cri_api.v1 import api_pb2 as api
from cri_api.v1 import api_pb2_grpc

from tests.support import leaks
from tests.support.containers import until

CALL_TIMEOUT_S = 90.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """A host directory or file in the container."""

    container_path: str
    host_path: Path
    readonly: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Executed:
    """What a command in a container gave."""

    stdout: str
    stderr: str
    exit_code: int


class Cri:
    """A client of one CRI socket. path: where pods' logs and kubelet's own files go. tag: cgroup parent."""

    def __init__(self, socket: Path, path: Path, tag: str) -> None:
        self.channel = grpc.insecure_channel(f"unix:{socket}")
        self.runtime: Any = api_pb2_grpc.RuntimeServiceStub(self.channel)
        self.path = path
        self.tag = tag
        self.pods: list[Pod] = []

    def call(self, method: str, request: Any, *, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        """One call of the runtime service. Raises grpc.RpcError."""
        # A daemon that was restarted is waited for.
        return getattr(self.runtime, method)(request, timeout=timeout_s, wait_for_ready=True)

    def pod(
        self,
        name: str = "pod",
        *,
        namespace: str = "default",
        annotations: Mapping[str, str] | None = None,
        handler: str = "torpor",
        shared_pid: bool = False,
        hostname: str = "",
    ) -> Pod:
        """Run a pod sandbox. handler: the RuntimeClass' handler; shared_pid: shareProcessNamespace."""
        uid = secrets.token_hex(6)
        folder = self.path / f"{name}-{uid}"
        folder.mkdir(parents=True)
        config = api.PodSandboxConfig(
            metadata=api.PodSandboxMetadata(name=name, uid=uid, namespace=namespace, attempt=0),
            hostname=hostname or name,
            log_directory=str(folder / "logs"),
            dns_config=api.DNSConfig(servers=["192.0.2.53"], searches=[f"{namespace}.svc.cluster.local"]),
            labels={"io.kubernetes.pod.name": name, "io.kubernetes.pod.namespace": namespace},
            annotations=dict(annotations or {}),
            linux=api.LinuxPodSandboxConfig(
                cgroup_parent=f"/{self.tag}/pod{uid}",
                security_context=api.LinuxSandboxSecurityContext(namespace_options=_namespaces(shared_pid)),
            ),
        )
        request = api.RunPodSandboxRequest(config=config, runtime_handler=handler)
        pod = Pod(
            self, self.call("RunPodSandbox", request).pod_sandbox_id, config, folder, shared_pid=shared_pid
        )
        self.pods.append(pod)
        pod.write_hosts()
        return pod

    def close_pods(self) -> None:
        """Remove every pod that is left."""
        for pod in list(self.pods):
            pod.remove()

    def close(self) -> None:
        """Remove every pod and close the connection."""
        self.close_pods()
        self.channel.close()


@dataclass(eq=False)
class Pod:
    """A pod sandbox that runs."""

    cri: Cri
    id: str
    config: Any
    path: Path
    shared_pid: bool = False
    containers: list[Container] = field(default_factory=list["Container"])

    def info(self) -> Any:
        """Its verbose status: (status, decoded info)."""
        request = api.PodSandboxStatusRequest(pod_sandbox_id=self.id, verbose=True)
        answer = self.cri.call("PodSandboxStatus", request)
        return answer.status, json.loads(answer.info["info"])

    @property
    def ip(self) -> str:
        """Its address."""
        return str(self.info()[0].network.ip)

    @property
    def pid(self) -> int:
        """Pid of its pause container on the host."""
        return int(self.info()[1]["pid"])

    @property
    def hosts_path(self) -> Path:
        """The file that the containers see as /etc/hosts."""
        return self.path / "etc-hosts"

    def write_hosts(self) -> None:
        """Write /etc/hosts as kubelet does: after the address is known."""
        self.hosts_path.write_text(f"127.0.0.1 localhost\n{self.ip} {self.config.hostname}\n")

    def create(
        self,
        name: str,
        argv: Sequence[str],
        *,
        image: str,
        mounts: Sequence[Mount] = (),
        env: Mapping[str, str] | None = None,
        tty: bool = False,
        attempt: int = 0,
        security: Any = None,
    ) -> Container:
        """Create a container. attempt: how often kubelet has made it before. Raises grpc.RpcError.

        security: an api.LinuxContainerSecurityContext; its namespaces are set here.
        """
        ended = self.path / f"termination-{name}-{attempt}"
        ended.touch()
        wanted = [
            Mount(container_path="/etc/hosts", host_path=self.hosts_path),
            Mount(container_path="/dev/termination-log", host_path=ended),
            *mounts,
        ]
        context = security or api.LinuxContainerSecurityContext()
        context.namespace_options.CopyFrom(_namespaces(self.shared_pid))
        config = api.ContainerConfig(
            metadata=api.ContainerMetadata(name=name, attempt=attempt),
            image=api.ImageSpec(image=image),
            command=list(argv),
            envs=[api.KeyValue(key=key, value=value) for key, value in (env or {}).items()],
            mounts=[
                api.Mount(container_path=m.container_path, host_path=str(m.host_path), readonly=m.readonly)
                for m in wanted
            ],
            labels={"io.kubernetes.container.name": name},
            log_path=f"{name}/{attempt}.log",
            tty=tty,
            stdin=tty,
            linux=api.LinuxContainerConfig(security_context=context),
        )
        (Path(self.config.log_directory) / name).mkdir(parents=True, exist_ok=True)
        request = api.CreateContainerRequest(
            pod_sandbox_id=self.id, config=config, sandbox_config=self.config
        )
        container = Container(
            self.cri, self, self.cri.call("CreateContainer", request).container_id, name, attempt
        )
        self.containers.append(container)
        return container

    def run(self, name: str, argv: Sequence[str], **options: Any) -> Container:
        """Create a container and start it. options: those of `create`."""
        container = self.create(name, argv, **options)
        container.start()
        return container

    def remove(self) -> None:
        """Stop and remove the pod with all its containers, as kubelet does."""
        for container in list(self.containers):
            container.remove()
        self.cri.call("StopPodSandbox", api.StopPodSandboxRequest(pod_sandbox_id=self.id))
        self.cri.call("RemovePodSandbox", api.RemovePodSandboxRequest(pod_sandbox_id=self.id))
        leaks.remove_cgroup(self.config.linux.cgroup_parent)
        self.cri.pods.remove(self)


@dataclass(eq=False)
class Container:
    """A container of a pod."""

    cri: Cri
    pod: Pod
    id: str
    name: str
    attempt: int

    def start(self) -> None:
        """Start it. Raises grpc.RpcError."""
        self.cri.call("StartContainer", api.StartContainerRequest(container_id=self.id))

    def stop(self, *, timeout_s: int = 0) -> None:
        """SIGTERM, and SIGKILL after timeout_s; at once where that is 0."""
        self.cri.call("StopContainer", api.StopContainerRequest(container_id=self.id, timeout=timeout_s))

    def remove(self) -> None:
        """Kill and remove it: again for a while, as kubelet does, where its end is not known yet."""
        deadline = time.monotonic() + 20
        while True:
            with contextlib.suppress(grpc.RpcError):
                self.stop()
            try:
                self.cri.call("RemoveContainer", api.RemoveContainerRequest(container_id=self.id))
                break
            except grpc.RpcError as error:
                if "still running" not in str(error) or time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
        self.pod.containers.remove(self)

    def exec(self, *argv: str) -> Executed:
        """Run a command in it to its end."""
        request = api.ExecSyncRequest(container_id=self.id, cmd=list(argv), timeout=30)
        answer = self.cri.call("ExecSync", request)
        return Executed(
            stdout=answer.stdout.decode(), stderr=answer.stderr.decode(), exit_code=answer.exit_code
        )

    def status(self) -> Any:
        """Its CRI status."""
        return self._status().status

    def _status(self) -> Any:
        request = api.ContainerStatusRequest(container_id=self.id, verbose=True)
        return self.cri.call("ContainerStatus", request)

    @property
    def state(self) -> str:
        """CREATED, RUNNING, EXITED or UNKNOWN."""
        return api.ContainerState.Name(self.status().state).removeprefix("CONTAINER_")

    @property
    def pid(self) -> int:
        """Pid of its init on the host."""
        return int(json.loads(self._status().info["info"])["pid"])

    def exit_code(self, *, timeout_s: float = 60.0) -> int:
        """Wait until it has ended; its exit code."""
        until(lambda: self.state == "EXITED", timeout_s=timeout_s, what=f"{self.name} ends")
        return int(self.status().exit_code)

    def checkpoint(self, archive: Path) -> Path:
        """CheckpointContainer into `archive`, as kubelet's checkpoint API does. Raises grpc.RpcError."""
        request = api.CheckpointContainerRequest(container_id=self.id, location=str(archive), timeout=60)
        self.cri.call("CheckpointContainer", request)
        return archive

    def log(self) -> list[str]:
        """What it printed, line by line, standard output and error together."""
        path = Path(self.pod.config.log_directory) / self.name / f"{self.attempt}.log"
        # The last line may be half written yet.
        lines = path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []
        return [line.split(" ", 3)[3] for line in lines if line.count(" ") >= 3]

    def numbers(self, word: str = "tick") -> list[int]:
        """The numbers that it printed after `word`."""
        return list(_numbers(self.log(), word))

    def until_number(self, least: int, *, word: str = "tick", timeout_s: float = 20.0) -> int:
        """Wait until it has printed a number of at least `least`; the last one."""

        def reached() -> int:
            numbers = self.numbers(word)
            return numbers[-1] if numbers and numbers[-1] >= least else 0

        return until(reached, timeout_s=timeout_s, what=f"{self.name} says {word} {least}: {self.log()[-3:]}")


def _numbers(lines: Sequence[str], word: str) -> Iterator[int]:
    for line in lines:
        first, _, rest = line.strip().partition(" ")
        if first == word and rest.split(" ")[0].isdigit():
            yield int(rest.split(" ")[0])


def _namespaces(shared_pid: bool) -> Any:
    return api.NamespaceOption(
        network=api.NamespaceMode.POD,
        pid=api.NamespaceMode.POD if shared_pid else api.NamespaceMode.CONTAINER,
        ipc=api.NamespaceMode.POD,
    )
