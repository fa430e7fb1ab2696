"""The new spec grants something else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.truth import sources
from tests.truth.place import World
from tests.truth.scenario import Scenario, Source, as_it_is


def spec(edit: Callable[[dict[str, Any]], object]) -> Callable[[World], object]:
    """Change the new spec alone."""
    return lambda world: edit(world.spec)


def process(**fields: Any) -> Callable[[World], object]:
    """Change fields of the new spec's process."""
    return lambda world: world.spec["process"].update(fields)


def linux(**fields: Any) -> Callable[[World], object]:
    """Change fields of the new spec's Linux section."""
    return lambda world: world.spec["linux"].update(fields)


def _fewer_capabilities(document: dict[str, Any]) -> None:
    for name, kept in document["process"]["capabilities"].items():
        document["process"]["capabilities"][name] = [word for word in kept if word != "CAP_NET_RAW"]


def _another_user(document: dict[str, Any]) -> None:
    document["process"]["user"] = {"uid": 1000, "gid": 1000}
    sets = ("bounding", "effective", "permitted", "inheritable", "ambient")
    document["process"]["capabilities"] = {name: [] for name in sets}


def _more_masked(document: dict[str, Any]) -> None:
    document["linux"]["maskedPaths"].append("/proc/scsi" if False else "/proc/interrupts")


def _fewer_masked(document: dict[str, Any]) -> None:
    document["linux"]["maskedPaths"].remove("/proc/timer_list")


def _other_mapping(document: dict[str, Any]) -> None:
    mapping = [{"containerID": 0, "hostID": 200000, "size": 65536}]
    document["linux"]["uidMappings"] = document["linux"]["gidMappings"] = mapping


def _add_user_namespace(document: dict[str, Any]) -> None:
    document["linux"]["namespaces"].append({"type": "user"})
    mapping = [{"containerID": 0, "hostID": 100000, "size": 65536}]
    document["linux"]["uidMappings"] = document["linux"]["gidMappings"] = mapping


def _without_device(document: dict[str, Any]) -> None:
    del document["linux"]["devices"], document["linux"]["resources"]


def _labels(document: dict[str, Any]) -> None:
    document["annotations"]["io.kubernetes.cri.container-name"] = "another"


def _hook(document: dict[str, Any]) -> None:
    document["hooks"] = {"prestart": [{"path": "/bin/false", "args": ["false"]}]}


def _of(
    name: str, source: Source, change: Callable[[World], object] = as_it_is, *, short: bool = False
) -> Scenario:
    return Scenario(kind="spec", name=name, source=source, change=change, short=short)


_LIMIT = [{"type": "RLIMIT_NOFILE", "hard": 512, "soft": 512}]
_MORE = [{"type": "RLIMIT_NOFILE", "hard": 20000, "soft": 20000}]

_SYSCTLS = Source(
    name="sysctls",
    args=sources.PLAIN.args,
    edit=lambda document, _: document["linux"].update(
        sysctl={"net.ipv4.ip_unprivileged_port_start": "77", "kernel.msgmax": "12345"}
    ),
)
_OTHER_SYSCTLS = {"net.ipv4.ip_unprivileged_port_start": "78", "kernel.msgmax": "12346"}

SCENARIOS = (
    _of("nothing is changed", sources.PLAIN, short=True),
    _of("another program and environment", sources.PLAIN, process(args=["sleep", "1"], env=["A=1"])),
    _of("another host name", sources.PLAIN, spec(lambda document: document.update(hostname="other"))),
    _of("sysctls, as they were", _SYSCTLS),
    _of("other sysctls", _SYSCTLS, linux(sysctl=_OTHER_SYSCTLS), short=True),
    _of("other labels", sources.PLAIN, spec(_labels), short=True),
    _of("a working directory that is missing", sources.PLAIN, process(cwd="/nowhere")),
    _of("more capabilities", sources.PLAIN, spec(lambda document: sources.grant(document, "CAP_SYS_PTRACE"))),
    _of("a capability less", sources.PLAIN, spec(_fewer_capabilities), short=True),
    _of("another user", sources.PLAIN, spec(_another_user)),
    _of("another user, who may become the old one", sources.PLAIN, process(user={"uid": 1000, "gid": 1000})),
    _of("new privileges may be gained", sources.PLAIN, process(noNewPrivileges=False)),
    _of("fewer open files", sources.PLAIN, process(rlimits=_LIMIT)),
    _of("as many open files as before", sources.PLAIN, process(rlimits=_MORE)),
    _of("a higher OOM score", sources.PLAIN, process(oomScoreAdj=500)),
    _of("a terminal that the image lacks", sources.PLAIN, process(terminal=True)),
    _of("a terminal, as it was", sources.TERMINAL),
    _of("no terminal, where the image has one", sources.TERMINAL, process(terminal=False)),
    _of("a filter of system calls, as it was", sources.SECCOMP),
    _of("a filter that the image lacks", sources.PLAIN, spec(sources.filtered)),
    _of(
        "no filter, where the image has one",
        sources.SECCOMP,
        spec(lambda document: document["linux"].pop("seccomp")),
    ),
    _of("a profile of AppArmor", sources.PLAIN, process(apparmorProfile="torpor-truth")),
    _of("a path more is hidden", sources.PLAIN, spec(_more_masked)),
    _of("a path less is hidden", sources.PLAIN, spec(_fewer_masked)),
    _of("a read-only root", sources.PLAIN, spec(lambda document: document["root"].update(readonly=True))),
    _of("an open device, as it was", sources.DEVICE),
    _of("an open device that the new spec lacks", sources.DEVICE, spec(_without_device)),
    _of("a user namespace, as it was", sources.USER_NAMESPACE),
    _of("a volume that the root of a user namespace cannot reach", sources.CLOSED_VOLUME),
    _of("a user namespace with other ids", sources.USER_NAMESPACE, spec(_other_mapping)),
    _of("a user namespace that the image lacks", sources.PLAIN, spec(_add_user_namespace)),
    _of(
        "no user namespace, where the image has one",
        sources.USER_NAMESPACE,
        spec(lambda document: sources.drop_namespace(document, "user")),
    ),
    _of(
        "the host's ipc in place of its own", sources.PLAIN, spec(lambda d: sources.drop_namespace(d, "ipc"))
    ),
    _of(
        "the host's pids in place of its own", sources.PLAIN, spec(lambda d: sources.drop_namespace(d, "pid"))
    ),
    _of("a hook that fails", sources.PLAIN, spec(_hook)),
)
