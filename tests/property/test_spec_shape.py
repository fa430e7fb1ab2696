"""Any JSON may stand in a bundle's config.json: it is refused in one sentence, or the verdict is given."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from compat import verdict
from compat.rules.case import Origin
from engines.api import FileNeed, SocketNeed
from shim import admission, bundle, network
from shim.errors import ShimError
from tests.support.containers import bind, make_spec
from tests.unit.test_compat import NEEDS, NODE

RICH = make_spec(["app"], mounts=[bind(Path("/usr"), "/vol")])
RICH["linux"].update(
    resources={
        "memory": {"limit": 1 << 30, "swap": 1 << 30},
        "cpu": {"cpus": "0", "mems": "0", "quota": 50000, "period": 100000},
        "pids": {"limit": 50},
        "devices": [{"allow": False, "access": "rwm"}],
        "hugepageLimits": [{"pageSize": "2MB", "limit": 0}],
    },
    devices=[{"path": "/dev/x", "type": "c", "major": 1, "minor": 3, "fileMode": 438, "uid": 0}],
    seccomp={"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [{"names": ["kexec_load"], "action": "x"}]},
    uidMappings=[{"containerID": 0, "hostID": 0, "size": 65536}],
    gidMappings=[{"containerID": 0, "hostID": 0, "size": 65536}],
    sysctl={"kernel.msgmax": "1"},
)
RICH["process"].update(
    rlimits=[{"type": "RLIMIT_NOFILE", "soft": 1, "hard": 2}],
    scheduler={"policy": "SCHED_OTHER", "nice": 1},
    oomScoreAdj=1,
)
RICH["hooks"] = {"prestart": [{"path": "/bin/x", "args": ["x"]}]}
NEEDS_MUCH = replace(
    NEEDS,
    namespaces={"network": "own", "user": "own", "pid": "own"},
    files=(FileNeed(path="/vol/bin/ls", size_bytes=1, mode=0o644),),
    sockets=(SocketNeed(family="inet", protocol="tcp", state="listen", address="0.0.0.0", port=7),),
    memory_bytes=1 << 20,
)
ANY = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(1 << 70), 1 << 70),
        st.floats(),
        st.text(max_size=4),
        st.sampled_from(["/", "..", "\0", "\ud800", "rbind", "0-", "-1", "a\nb"]),
    ),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something stands in a document."""
    yield path
    entries = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    for key, part in entries:
        yield from places(part, (*path, key))


PLACES = list(places(RICH))[1:]


def with_value(path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    document = copy.deepcopy(RICH)
    at: Any = document
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return document


@pytest.fixture(scope="module")
def bundle_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bundle")
    (path / "rootfs").mkdir()
    return path


def judged(bundle_path: Path, document: object) -> bool:
    """Whether a config.json was judged; else it was refused in a sentence."""
    (bundle_path / "config.json").write_text(json.dumps(document))
    try:
        spec = bundle.read_spec(bundle_path)
    except ShimError as error:
        assert str(error)
        return False
    root = bundle.rootfs_path(bundle_path, spec)
    origin = Origin(dump_spec=RICH)
    for path in (root, None):
        verdict.judge(NEEDS_MUCH, spec, dump_host=NODE, node=NODE, rootfs_path=path, origin=origin)
    verdict.judge(NEEDS_MUCH, RICH, dump_host=NODE, node=NODE, origin=Origin(dump_spec=spec))
    admission.check(spec, NEEDS_MUCH, None, rootfs_path=root)
    network.judge(NEEDS_MUCH, spec, tcp="close")
    return True


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(PLACES), ANY)
@example(("linux",), None)
@example(("linux", "namespaces"), "x")
@example(("linux", "resources", "memory", "limit"), "x")
@example(("linux", "resources", "pids", "limit"), "x")
@example(("linux", "uidMappings"), [{"x": 1}])
@example(("mounts", 0), "x")
@example(("mounts",), None)
@example(("process", "capabilities"), {"": 1})
@example(("linux", "resources", "blockIO"), {"throttleReadBpsDevice": None})
def test_no_json_makes_a_traceback(bundle_path: Path, path: tuple[Any, ...], value: Any):
    judged(bundle_path, with_value(path, value))


@pytest.mark.parametrize("document", [None, [], "x", 1, [{}]])
def test_what_is_no_object_is_refused(bundle_path: Path, document: object):
    assert not judged(bundle_path, document)


def test_a_whole_one_and_an_empty_one_are_judged(bundle_path: Path):
    assert judged(bundle_path, RICH)
    assert judged(bundle_path, {})
