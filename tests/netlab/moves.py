"""A move between two nodes, driven step by step by the engine's interface and netmig, without an agent.

What can be done while the pod runs is done before. In the critical path remain the dump, the switch (the pod
is taken off its old node and put, locked, on the new one), the copy of the image, the restore, and the
commit: the source dies, and only then the restored one runs.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path

from engines import registry
from engines.api import (
    CheckpointEngine,
    CheckpointRequest,
    EngineSettings,
    Phase,
    PhaseInfo,
    RestoreRequest,
)
from netmig.apply import apply, attach, detour, plug, plug_routed, unplug
from netmig.capture import capture
from netmig.claim import Announcer, announce_on
from netmig.hold import lock, tables
from netmig.identity import Identity, diff, global_addresses
from netmig.journal import Journal
from netmig.lease import HostLocal, Owner
from netmig.ns import Netns
from netmig.undo import undo_steps
from tests.netlab.nodes import BRIDGE, Node
from tests.netlab.pods import Pod, netns_path, sandbox_id
from tests.netlab.stage import POD, Stage
from tests.support.containers import PREFIX, SEARCH_PATH, Output, command, tool
from tests.support.criu import streams

TIMEOUT_S = 60.0


class Laps:
    """How long each step took, ms, by name."""

    def __init__(self) -> None:
        self.ms: dict[str, float] = {}
        self._since = time.monotonic()

    def lap(self, name: str) -> None:
        """The step of this name ends now."""
        now = time.monotonic()
        self.ms[name] = (now - self._since) * 1000
        self._since = now


class Mover:
    """Moves the pod of a stage between nodes. The stage's first node is its home.

    On a routed network a pod away from home is reached by way of its home, which keeps its lease.
    """

    def __init__(self, place: Stage) -> None:
        self.place = place
        self.home = place.node
        self.committed_s = 0.0  # when the last move was decided, on the monotonic clock
        self._detours: list[Journal] = []
        self._stack = contextlib.ExitStack()
        self._outputs: list[Output] = []

    def move(self, target: Node) -> dict[str, float]:
        """Move the pod; ms of each step. Raises whatever goes wrong; then the pod is where it was."""
        with contextlib.ExitStack() as stack:
            return _Move(self, target, stack).go()

    @property
    def routed(self) -> bool:
        """Whether each node has a pod network of its own."""
        return self.place.lab.kind == "routed"

    def engine(self, node: Node) -> CheckpointEngine:
        """The engine of a node."""
        settings = EngineSettings(
            runtime_path=tool("runc"),
            root_path=node.runc.root,
            state_path=node.path / "engine",
            search_path=SEARCH_PATH,
            python_path=PREFIX / "python",
        )
        return registry.create("criu", settings)

    def switch_routes(self, target: Node, source: Netns, identity: Identity) -> None:
        """On a routed network: the home sends on what comes for the pod, or does so no more."""
        addresses = global_addresses(identity)
        for journal in self._detours:
            undo_steps(journal)
        self._detours = []
        if target is self.home:
            return
        for version, via in ((4, target.address), (6, target.address6)):
            ours = [each for each in addresses if each.version == version]
            self._detours.append(detour(source, ours, via, bridge=BRIDGE))
        announce_on(source, BRIDGE, [each.ip for each in addresses])

    def leave(self, pod: Pod) -> None:
        """Remove what a pod that has moved left behind. A home on a routed network keeps the lease."""
        if self.routed and pod.node is self.home:
            command("ip", "-n", pod.netns_path.name, "link", "delete", "eth0")
            command("ip", "netns", "delete", pod.netns_path.name)
        else:
            pod.close()


def _bridged(identity: Identity) -> Identity:
    """The identity as at home: away, on a routed network, the pod's host end is in no bridge."""
    links = tuple(
        replace(link, host=replace(link.host, bridge=BRIDGE)) if link.host else link
        for link in identity.links
    )
    return replace(identity, links=links)


class _Move:
    def __init__(self, mover: Mover, target: Node, stack: contextlib.ExitStack) -> None:
        self.mover = mover
        self.place = mover.place
        self.old = self.place.pod
        self.new = Pod(node=target, name=POD, ips=self.old.ips, mac=self.old.mac)
        self.image = self.old.node.path / "image"
        self.copy = target.path / "image"
        for path in (self.image, self.copy):
            shutil.rmtree(path, ignore_errors=True)
        self.stack = stack
        self.laps = Laps()
        self.prepared, self.committed = threading.Event(), threading.Event()
        self.failure: BaseException | None = None
        self._prepare()

    def _open(self, path: Path) -> Netns:
        return self.stack.enter_context(Netns.open(path))

    def _prepare(self) -> None:
        """What is done while the pod still runs."""
        old, new = self.old, self.new
        self.source, self.target = self._open(old.node.netns_path), self._open(new.node.netns_path)
        self.old_netns = self._open(old.netns_path)
        self.identity = _bridged(capture(self.old_netns, self.source))
        self.laps.lap("capture")
        if not self.mover.routed:
            leases = HostLocal.of(new.node.cni_config())
            for ip in old.ips:
                leases.reserve(ip, Owner(container_id=sandbox_id(new.node, POD)))
        self.attached = attach(self.old_netns, self.source)
        self.new_netns = self.stack.enter_context(Netns.create(netns_path(new.node, POD)))
        self.laps.lap("lease")
        # On a routed network the pod keeps its old gateway, which the new node answers for with its own MAC.
        away = self.mover.routed and new.node is not self.mover.home
        self.applied = apply(
            self.identity,
            self.new_netns,
            self.target,
            adopt=False,
            neighbours=not self.mover.routed,
            routed=away,
        )
        self.away = away
        self.laps.lap("apply")
        self.announcer = self.stack.enter_context(Announcer(self.new_netns, global_addresses(self.identity)))
        self.bundle = self.place.bundle(new)

    def go(self) -> dict[str, float]:
        container_id = self.place.container_id
        restoring = threading.Thread(target=self._restore)

        def at_dump(phase: Phase, info: PhaseInfo) -> None:
            self.laps.lap("stop" if phase == "frozen" else "dump")
            if phase != "dumped":
                return
            assert info.lock_table
            self._switch(info.lock_table)
            self.laps.lap("switch")
            shutil.copytree(self.image, self.copy)
            self.laps.lap("copy")
            restoring.start()
            self.prepared.wait()
            if self.failure is not None:
                raise self.failure
            self.laps.lap("restore")

        self.laps.lap("prepare")
        self.mover.engine(self.old.node).checkpoint(
            CheckpointRequest(
                container_id=container_id,
                bundle_path=self.place.bundle_path,
                image_path=self.image,
                timeout_s=TIMEOUT_S,
                on_phase=at_dump,
            )
        )
        self.laps.lap("source dies")
        self.mover.committed_s = time.monotonic()
        self.committed.set()
        restoring.join()
        if self.failure is not None:
            raise self.failure
        self.laps.lap("release")
        self._settle()
        return self.laps.ms

    def _switch(self, table: str) -> None:
        """The network's share of the critical path."""
        unplug(self.attached, self.source)
        lock(self.new_netns, table)
        if self.away:
            plug_routed(self.applied, self.target, global_addresses(self.identity))
        else:
            plug(self.applied, self.target)
        if self.mover.routed:
            home = self.source if self.away else self.target
            self.mover.switch_routes(self.new.node, home, self.identity)
        if not self.away:
            self.announcer.send()

    def _restore(self) -> None:
        def at_restore(phase: Phase, info: PhaseInfo) -> None:
            del phase, info
            self.prepared.set()
            self.committed.wait()

        output = Output()
        self.place.containers.outputs.append(output)
        try:
            with streams(output):
                self.mover.engine(self.new.node).restore(
                    RestoreRequest(
                        container_id=self.place.container_id,
                        bundle_path=self.bundle,
                        image_path=self.copy,
                        timeout_s=TIMEOUT_S,
                        tcp="keep",
                        on_phase=at_restore,
                    )
                )
        except BaseException as error:
            self.failure = error
        finally:
            self.prepared.set()

    def _settle(self) -> None:
        """The pod is on its new node: nothing is locked, it is who it was, and the old node forgets it."""
        left = tables(self.new_netns)
        assert not left, f"the pod is still locked by {left}"
        now = _bridged(capture(self.new_netns, self.target))
        differences = [line for line in diff(self.identity, now) if "neighbour" not in line]
        assert not differences, f"the pod is not who it was: {differences}"
        self.place.containers.remove(self.old.node, self.place.container_id)
        self.mover.leave(self.old)
        self.place.pod, self.place.bundle_path = self.new, self.bundle
