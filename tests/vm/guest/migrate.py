"""`torpor migrate` where the kernel can track memory. In the machine: `python -m tests.vm.guest.migrate`.

Two nodes of the lab, each a network namespace of the machine, and a container whose memory hardly changes.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path

import trustme

from tests.migrate.pair import PORT, Agent
from tests.netlab import room
from tests.netlab.nodes import NETNS, Lab
from tests.netlab.pods import Containers, new_pod
from tests.support.containers import there, until
from tests.vm.guest.counter import ROOT, fill_rootfs

MEBIBYTES = 64
SLOW_S = 300.0  # Python starts many times here, on one emulated processor
KINDS = ("images/*/*", "staging/*")
# Text that CRIU cannot take for empty pages, in one shell's memory only; on demand it says what it has. It
# forks for nothing else: who was just forked, and is no other program yet, has a new copy of all that.
HOLD = f"""\
sleep 999999 | {{
    ballast=$(head -c {MEBIBYTES * 3 // 4 << 20} /dev/urandom | base64 -w 0)
    i=0
    while :; do
        i=$((i + 1)); echo $i >> /data/count
        if [ -e /data/ask ]; then
            echo "$ballast" | md5sum > /data/new; rm /data/ask; mv /data/new /data/sum
        fi
        read -t 0.2 never
    done
}}
"""


def data(agent: Agent, container_id: str) -> Path:
    """The container's /data."""
    return Path(f"/proc/{agent.node.runc.pid(container_id)}/root/data")


def count(agent: Agent, container_id: str) -> int:
    path = data(agent, container_id) / "count"
    numbers = path.read_text().split() if path.exists() else []
    return int(numbers[-1]) if numbers else 0


def checksum(agent: Agent, container_id: str) -> str:
    here = data(agent, container_id)
    (here / "sum").unlink(missing_ok=True)
    (here / "ask").touch()
    until(lambda: (here / "sum").exists(), timeout_s=SLOW_S, what="it sums up its memory")
    return (here / "sum").read_text()


def migrate(source: Agent, target: Agent, *more: str) -> str:
    """What `torpor migrate` prints."""
    words = ("migrate", "web", "--to", target.node.name, "--root", source.node.runc.root, *more)
    process = source.popen(*words)
    out, err = process.communicate()
    assert process.returncode == 0, err
    return out


def kill_while_copying(source: Agent, target: Agent) -> None:
    """A source that dies before the freeze: the container runs on, and nothing is left."""
    process = source.popen("migrate", "web", "--to", target.node.name, "--root", source.node.runc.root)

    def copies() -> bool:
        assert process.poll() is None, f"it ended before: {process.communicate()}"
        return bool(there(source.state_path, "departures/*/before-0/checkpoint/*"))

    until(copies, timeout_s=SLOW_S, what="its memory is copied")
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    until(lambda: not left(source, target), timeout_s=SLOW_S, what=f"gone: {left(source, target)}")
    last = count(source, "web")
    until(lambda: count(source, "web") > last + 1, timeout_s=SLOW_S, what="it counts on")


def left(source: Agent, target: Agent) -> list[Path]:
    """What there is of a migration."""
    places = (
        *(there(agent.node.torpor.store_path, kind) for agent in (source, target) for kind in KINDS),
        there(source.state_path, "departures/*"),
        there(target.state_path, "arrivals/*"),
    )
    return [path for place in places for path in place]


def main() -> None:
    """There and back: a container that came by a pre-dump leaves by one."""
    os.environ[room.VARIABLE] = f"netlab-{os.getpid()}"
    NETNS.mkdir(exist_ok=True)
    lab = Lab("l2", ROOT / "lab", n_nodes=2)
    authority = trustme.CA()
    one, two = lab.nodes
    agents = [
        Agent(node, lab, authority, {other.name: f'address = "{other.address}:{PORT}"'})
        for node, other in ((one, two), (two, one))
    ]
    fill_rootfs(ROOT / "lower")
    for applet in ("base64", "md5sum", "rm"):
        (ROOT / "lower/bin" / applet).symlink_to("busybox")
    containers = Containers(lab)
    pod = new_pod(one, "web")
    argv = ["/bin/sh", "-c", HOLD]
    containers.run(one, "web", containers.bundle(one, "web", ROOT / "lower", argv, pod.netns_path))
    until(lambda: count(agents[0], "web") > 3, timeout_s=SLOW_S, what="it counts")
    for agent in agents:
        with contextlib.suppress(AssertionError):  # emulation is slower than that waits
            agent.start()
    for agent in agents:
        until(
            lambda agent=agent: f":{PORT}" in agent.node("ss", "-ltn").stdout,
            timeout_s=SLOW_S,
            what=f"{agent.node.name} listens: {agent.log_path.read_text()}",
        )
    was = checksum(agents[0], "web")
    assert "would take" in migrate(agents[0], agents[1], "--dry-run")
    kill_while_copying(agents[0], agents[1])
    for source, target in (agents, agents[::-1]):
        last = count(source, "web")
        report = json.loads(migrate(source, target, "--json"))
        print(json.dumps(report))
        assert "pre-dump" in report["phases_ms"], report
        assert report["image_bytes"] > MEBIBYTES << 20, report
        assert report["frozen_bytes"] < MEBIBYTES << 20 >> 3, report
        until(lambda t=target, n=last: count(t, "web") > n, timeout_s=SLOW_S, what="it counts on")
        assert checksum(target, "web") == was, "its memory is another one"
        assert [path.parent.name for path in left(source, target)] == ["arrivals"]
    for agent in agents:
        agent.kill()
    containers.remove(one, "web")


if __name__ == "__main__":
    main()
