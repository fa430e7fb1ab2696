"""Words and limits of a new specification that a runtime does not take, and neighbours that it does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.truth import sources
from tests.truth.node import resources
from tests.truth.place import World
from tests.truth.rights import linux, process, spec
from tests.truth.scenario import Scenario


def _namespace(kind: str) -> Callable[[World], object]:
    def edit(document: dict[str, Any]) -> None:
        document["linux"]["namespaces"].append({"type": kind})

    return spec(edit)


def _of(name: str, change: Callable[[World], object]) -> Scenario:
    return Scenario(kind="words", name=name, source=sources.PLAIN, change=change)


def _io(priority: int) -> Callable[[World], object]:
    return process(ioPriority={"class": "IOPRIO_CLASS_BE", "priority": priority})


SCENARIOS = (
    _of("a relative working directory", process(cwd="here")),
    _of("no arguments", process(args=[])),
    _of("an I/O priority of 8", _io(8)),
    _of("an I/O priority of 7", _io(7)),
    _of("processors for exec sessions beyond 1023", process(execCPUAffinity={"initial": "0-9999"})),
    _of("processors for exec sessions", process(execCPUAffinity={"initial": "0-1", "final": "0"})),
    _of("two namespaces of a kind", _namespace("pid")),
    _of("a namespace of no known kind", _namespace("bogus")),
    _of("time offsets without a time namespace", linux(timeOffsets={"monotonic": {"secs": 5}})),
    _of("a personality that nobody knows", linux(personality={"domain": "FOO"})),
    _of("a propagation that nobody knows", linux(rootfsPropagation="sideways")),
    _of(
        "a device of no known kind", linux(devices=[{"path": "/dev/x", "type": "q", "major": 1, "minor": 3}])
    ),
    _of("a rule for devices of no known kind", resources(devices=[{"allow": True, "type": "z"}])),
    _of("a share of the processor's cache", linux(intelRdt={"closID": "x", "l3CacheSchema": "L3:0=f"})),
    _of("a sysctl of no namespace", linux(sysctl={"vm.swappiness": "5"})),
    _of("a sysctl of the host name", linux(sysctl={"kernel.hostname": "x"})),
    _of("a sysctl of the domain name", linux(sysctl={"kernel.domainname": "x"})),
    _of("a sysctl of the network that is not there", linux(sysctl={"net.nonesuch": "5"})),
    _of("a word for a sysctl that is a number", linux(sysctl={"net.ipv4.ip_forward": "banana"})),
    _of("ports for a sysctl", linux(sysctl={"net.ipv4.ip_local_reserved_ports": "8080,9000-9010"})),
    _of("a sysctl of an interface", linux(sysctl={"net/ipv4/conf/lo/forwarding": "1"})),
    _of("one processor share", resources(cpu={"shares": 1})),
    _of("two processor shares", resources(cpu={"shares": 2})),
    _of("real time for the processor", resources(cpu={"realtimeRuntime": 950000, "realtimePeriod": 1000000})),
    _of("a burst over the quota", resources(cpu={"burst": 200000, "quota": 100000, "period": 100000})),
    _of("a burst of the quota", resources(cpu={"burst": 100000, "quota": 100000, "period": 100000})),
    _of("a swappiness of 200", resources(memory={"swappiness": 200})),
    _of("a swappiness of 100", resources(memory={"swappiness": 100})),
    _of("a leaf weight", resources(blockIO={"weight": 500, "leafWeight": 500})),
    _of("a class of packets", resources(network={"classID": 1048577})),
    _of("limits of RDMA", resources(rdma={"mlx5_1": {"hcaHandles": 3}})),
)
