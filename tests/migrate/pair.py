"""Two nodes of a lab, each with an agent, and a container with a live client that moves between them."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import trustme

from tests.netlab.nodes import NETNS, Kind, Lab, Node
from tests.netlab.pods import Pod, build_server, new_pod
from tests.netlab.traffic import Client, Tally
from tests.support.containers import (
    CHECKOUT,
    PYTHON,
    SEARCH_PATH,
    Output,
    bind,
    cgroup_hierarchies,
    command,
    host_binds,
    make_rootfs,
    make_spec,
    there,
    tool,
    until,
)

PORT = 7077
TORPOR = Path(sys.executable).parent / "torpor"


class Agent:
    """torpor on one node of the lab, with its agent."""

    def __init__(self, node: Node, lab: Lab, authority: trustme.CA, peers: dict[str, str]) -> None:
        self.node = node
        self.path = node.path / "agent"
        self.path.mkdir(parents=True)
        self.state_path = self.path / "state"
        self.config_path = self.path / "agent.toml"
        self.network_path = self.path / "pods.conf"
        self.network_path.write_text(json.dumps(node.cni_config()))
        certificate = authority.issue_cert(node.name)
        authority.cert_pem.write_to_path(self.path / "ca.pem")
        certificate.private_key_pem.write_to_path(self.path / "key.pem")
        certificate.cert_chain_pems[0].write_to_path(self.path / "cert.pem")
        lines = [
            f'node = "{node.name}"',
            f'listen = "{node.address}:{PORT}"',
            f'state = "{self.state_path}"',
            f'root = "{node.runc.root}"',
            f'cgroup = "/{lab.tag}/{node.name}"',
            f'leases = "{self.network_path}"',
            *([f'via = ["{node.address}", "{node.address6}"]'] if lab.kind == "routed" else []),
            "[tls]",
            f'certificate = "{self.path / "cert.pem"}"',
            f'key = "{self.path / "key.pem"}"',
            f'authority = "{self.path / "ca.pem"}"',
            *(f"[peers.{name}]\nmay_push = true\n{how}" for name, how in peers.items()),
        ]
        self.config_path.write_text("\n".join(lines) + "\n")
        self.log_path = self.path / "agent.log"
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def environment(self) -> dict[str, str]:
        """What torpor finds its configuration by."""
        return {
            **os.environ,
            "TORPOR_CONF": str(self.node.torpor.conf_path),
            "TORPOR_AGENT": str(self.config_path),
            "PATH": SEARCH_PATH,
        }

    def start(self, fault: Sequence[str | Path] = ()) -> None:
        """Start the agent, and wait until it listens. fault: the first words for `failing`."""
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                self.node.words(*_program(fault), "agent"),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=CHECKOUT,
                env=self.environment,
                start_new_session=True,
            )
        until(self._listens, what=f"the agent of {self.node.name} listens: {self.log_path.read_text()}")

    def _listens(self) -> bool:
        return f":{PORT}" in self.node("ss", "-ltn", check=False).stdout

    def kill(self) -> None:
        """Kill the agent with all its processes, and wait until they are gone."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None

    def popen(self, *words: str | Path, fault: Sequence[str | Path] = ()) -> subprocess.Popen[str]:
        """Start `torpor` on this node. fault: the first words for `failing`."""
        return subprocess.Popen(
            self.node.words(*_program(fault), *words),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=CHECKOUT,
            env=self.environment,
            start_new_session=True,
        )

    def __call__(self, *words: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run `torpor` on this node."""
        return self.node(TORPOR, *words, env=self.environment, check=check, timeout=60)

    def records(self) -> list[dict[str, str]]:
        """`torpor migrate --list`."""
        return json.loads(self("migrate", "--list", "--json").stdout)

    def ends(self) -> list[str]:
        """The ports of the pods' bridge, without the lab's own."""
        shown = json.loads(self.node("ip", "-j", "link", "show", "master", "cni0").stdout or "[]")
        return [link["ifname"] for link in shown if link["ifname"] != "vx"]

    def veths(self) -> list[str]:
        """Every veth on the node but its leg on the underlay."""
        shown = json.loads(self.node("ip", "-j", "link", "show", "type", "veth").stdout or "[]")
        return [link["ifname"] for link in shown if link["ifname"] != "eth0"]


def _program(fault: Sequence[str | Path]) -> list[str | Path]:
    return [sys.executable, "-m", "tests.migrate.failing", *fault] if fault else [TORPOR]


def _rules() -> dict[str, str]:
    """The firewall tables of namespaces that migrations made, where there are any."""
    found: dict[str, str] = {}
    for path in NETNS.glob("torpor-*"):
        listed = command(
            "nsenter", f"--net={path}", tool("nft"), "list", "tables", check=False
        ).stdout.strip()
        if listed:
            found[path.name] = listed
    return found


class Pair:
    """Two nodes and a client host, a container on the first, and what it says about where it runs."""

    def __init__(self, path: Path, kind: Kind = "l2") -> None:
        self.lab = Lab(kind, path / "lab", n_nodes=2)
        authority = trustme.CA()
        one, two = self.lab.nodes
        self.agents = [
            Agent(node, self.lab, authority, {other.name: f'address = "{other.address}:{PORT}"'})
            for node, other in ((one, two), (two, one))
        ]
        self.path = path
        self.shared = path / "shared"
        self.shared.mkdir()
        self.beats_path = self.shared / "beats"
        self.beats_path.touch()
        self.lower = make_rootfs(path / "lower")
        (self.lower / "shared").mkdir()
        server = build_server(path / "server") / "bin" / "server"
        (self.lower / "server").write_bytes(server.read_bytes())
        (self.lower / "server").chmod(0o755)
        self.bundles: list[Path] = []
        self.outputs: list[Output] = []
        self.pods: list[Pod] = []
        self.clients: list[Client] = []
        self.container_id = ""
        self._numbers = itertools.count()
        for agent in self.agents:
            agent.start()

    # --- the container ---------------------------------------------------------------------------------

    def start(self, name: str, *, mebibytes: int = 1, plain: bool = False) -> Pod:
        """Start a container with the lab's server on the first node. plain: its root is no overlay."""
        agent = self.agents[0]
        self.container_id = f"{self.lab.tag}-{name}"
        pod = new_pod(agent.node, name)
        self.pods.append(pod)
        bundle = self.path / "bundles" / str(next(self._numbers))
        for each in ("upper", "work", "rootfs"):
            (bundle / each).mkdir(parents=True)
        options = f"lowerdir={self.lower},upperdir={bundle / 'upper'},workdir={bundle / 'work'}"
        if plain:
            shutil.copytree(self.lower, bundle / "rootfs", symlinks=True, dirs_exist_ok=True)
        else:
            command("mount", "-t", "overlay", "overlay", "-o", options, bundle / "rootfs")
        self.bundles.append(bundle)
        spec = make_spec(
            [str(PYTHON), "-IS", "-u", "/workloads/migrant.py", "/server", str(mebibytes)],
            rootfs=str(bundle / "rootfs"),
            netns_path=pod.netns_path,
            cgroup=f"/{self.lab.tag}/{agent.node.name}/{self.container_id}",
            mounts=[*host_binds(), bind(self.shared, "/shared", writable=True)],
        )
        (bundle / "config.json").write_text(json.dumps(spec))
        self.outputs.append(agent.node.runc.run(bundle, self.container_id))
        until(lambda: self.beats(), what=f"it beats: {self.outputs[-1].text}")
        return pod

    def client(self, flows: Sequence[str]) -> Client:
        """A client on the client host."""
        client = Client(self.lab.client, flows)
        self.clients.append(client)
        return client

    def beats(self) -> list[tuple[str, int]]:
        """(node, ns) of every beat so far."""
        lines = self.beats_path.read_bytes().decode().split("\n")[:-1]
        return [(line.split("/")[2], int(line.rpartition(" ")[2])) for line in lines]

    def runs_on(self, within_s: float = 0.15) -> str:
        """Which node it runs on: where it beats; "" if nowhere. Both is an error."""
        since = time.time_ns()
        time.sleep(within_s)
        nodes = {node for node, ns in self.beats()[-400:] if ns > since}
        assert len(nodes) < 2, f"two copies run: {nodes}"
        return nodes.pop() if nodes else ""

    def settles_on(self, node: str) -> None:
        """Wait until it runs on a node. A full disk queue may hold a beat back for a moment."""
        until(lambda: self.runs_on() == node, what=f"it runs on {node}")

    def never_twice(self) -> list[str]:
        """The nodes it has run on, in order. Fails if it ran on two of them at a time."""
        beats = self.beats()
        assert [ns for _, ns in beats] == sorted(ns for _, ns in beats)
        order: list[str] = []
        for node, _ in beats:
            if not order or order[-1] != node:
                order.append(node)
        return order

    def status(self, agent: Agent) -> str:
        """What the node's runtime says of the container."""
        return str(agent.node.runc.state(self.container_id).get("status", ""))

    # --- moving ----------------------------------------------------------------------------------------

    def migrate(self, source: Agent, target: Agent) -> dict[str, Any]:
        """`torpor migrate`; its report."""
        done = source(
            "migrate", self.container_id, "--to", target.node.name, "--root", source.node.runc.root, "--json"
        )
        return json.loads(done.stdout)

    def answers_once(self, ips: Sequence[str]) -> list[str]:
        """The MAC addresses that answer for an address, asked from the client host."""
        neighbours = json.loads(self.lab.client("ip", "-j", "neigh", "show").stdout)
        return [each["lladdr"] for each in neighbours if each["dst"] in ips and "lladdr" in each]

    def leftovers(self, home: Agent, away: Agent) -> list[str]:
        """What is left of migrations, the container being at home, in words."""
        left = [f"{away.node.name} has the end {end}" for end in away.veths()]
        left += [f"{away.node.name} leases {ip}" for ip in away.node.leases()]
        if len(home.ends()) != 1 or len(home.veths()) != 1:
            left.append(f"{home.node.name} has the ends {home.veths()}, in the bridge {home.ends()}")
        if len(home.node.leases()) != 2:
            left.append(f"{home.node.name} leases {home.node.leases()}")
        if self.status(away):
            left.append(f"{away.node.name} has a container that is {self.status(away)}")
        for agent in self.agents:
            left += [f"{agent.node.name} has {path}" for path in there(agent.state_path, "departures/*")]
            for what in ("images/*/*", "staging/*"):
                left += [
                    f"{agent.node.name} has {path}" for path in there(agent.node.torpor.store_path, what)
                ]
        left += [f"{away.node.name} has {path}" for path in there(away.state_path, "arrivals/*")]
        n_spaces = sum(
            1
            for path in NETNS.iterdir()
            if path.name.startswith("torpor-") or path == self.pods[-1].netns_path
        )
        if n_spaces != 1:
            left.append(f"there are the namespaces {sorted(path.name for path in NETNS.iterdir())}")
        left += [f"{path} has the rules {rules}" for path, rules in _rules().items()]
        return left

    def forget(self) -> None:
        """Remove the container, wherever it is, and what belongs to it."""
        for client in self.clients:
            client.close()
        self.clients.clear()
        for agent in self.agents:
            agent.node.runc.delete(self.container_id)
        for agent in self.agents:
            until(
                lambda agent=agent: not agent.records(), what=f"{agent.node.name} tidies up {agent.records()}"
            )
        for pod in self.pods:
            if pod.netns_path.exists():
                pod.close()
        self.pods.clear()
        for bundle in self.bundles:
            command("umount", "--lazy", bundle / "rootfs", check=False)
        self.bundles.clear()
        self.beats_path.write_bytes(b"")
        self.container_id = ""

    def close(self) -> None:
        """Take it all down; the room takes the rest."""
        for client in self.clients:
            client.close()
        for agent in self.agents:
            agent.kill()
            agent.node.runc.delete(self.container_id or "none")
        for bundle in [*self.bundles, *self.path.glob("lab/*/agent/state/arrivals/*/bundle")]:
            command("umount", "--lazy", bundle / "rootfs", check=False)
        for path in NETNS.iterdir():
            command("ip", "netns", "delete", path.name, check=False)
        self.lab.close()
        for hierarchy in cgroup_hierarchies():
            for directory in sorted((hierarchy / self.lab.tag).glob("**/"), reverse=True):
                with contextlib.suppress(OSError):
                    directory.rmdir()


class Pairs:
    """One pair after the other: a new one where a test has not tidied up."""

    def __init__(self, path: Path, kind: Kind = "l2") -> None:
        self.path = path
        self.kind: Kind = kind
        self._pair: Pair | None = None
        self._numbers = itertools.count()

    def fresh(self) -> Pair:
        """A pair with nothing on it."""
        if self._pair is not None and self._pair.container_id:
            self._pair.close()
            self._pair = None
        if self._pair is None:
            self._pair = Pair(self.path / str(next(self._numbers)), self.kind)
        return self._pair

    def __enter__(self) -> Pairs:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pair is not None:
            self._pair.close()


def whole(tally: Tally) -> None:
    """Fail unless the client lost nothing."""
    assert tally.whole, (tally.lost, tally.repeated, tally.errors)
