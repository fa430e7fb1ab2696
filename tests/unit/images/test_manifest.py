from __future__ import annotations

import json
from dataclasses import replace

import pytest

from compat import profile, verdict
from engines.api import ImageCorrupt, Needs, TaskNeeds
from shim.images.documents import decode_needs, encode_needs
from shim.images.manifest import (
    Manifest,
    Program,
    Rootfs,
    build_manifest,
    digest_of,
    parse_manifest,
    source_of,
)
from shim.images.spec import parse

SPEC = {
    "ociVersion": "1.2.0",
    "process": {
        "terminal": True,
        "user": {"uid": 5, "gid": 6, "additionalGids": [9, 8]},
        "args": ["server", "--token=s3cret-arg"],
        "env": ["PASSWORD=s3cret-env"],
        "capabilities": {"bounding": ["CAP_KILL", "CAP_CHOWN"]},
        "rlimits": [{"type": "RLIMIT_NOFILE", "soft": 1, "hard": 2**64 - 1}],
        "noNewPrivileges": True,
        "apparmorProfile": "cri-default",
    },
    "root": {"path": "rootfs", "readonly": True},
    "hostname": "h",
    "mounts": [{"destination": "/proc", "type": "proc", "source": "proc"}],
    "annotations": {
        "io.kubernetes.cri.container-name": "web",
        "io.kubernetes.cri.sandbox-namespace": "shop",
        "io.kubernetes.cri.sandbox-name": "web-0",
        "io.kubernetes.cri.sandbox-uid": "u-1",
        "io.kubernetes.cri.image-name": "docker.io/web:1",
    },
    "linux": {
        "uidMappings": [{"containerID": 0, "hostID": 100000, "size": 65536}],
        "seccomp": {"defaultAction": "SCMP_ACT_ERRNO"},
        "devices": [{"path": "/dev/fuse", "type": "c", "major": 10, "minor": 229}],
        "futureField": {"x": 1},
    },
}


def make(**changes: object) -> Manifest:
    data = json.dumps(SPEC).encode()
    arguments: dict[str, object] = {
        "spec_data": data,
        "source": source_of(parse(data), container_id="c1"),
        "engine": Program(name="criu", version="4.2.1"),
        "runtime": Program(name="runc"),
        "torpor_version": "0",
        "leave_running": True,
        "rootfs": Rootfs(kind="overlay"),
        "host": profile.load(None),
        **changes,
    }
    return build_manifest(**arguments)  # type: ignore[arg-type]


def test_manifest_survives_its_file_and_is_the_same_every_time() -> None:
    manifest = make()
    data = manifest.to_bytes()
    assert parse_manifest(data) == manifest
    assert parse_manifest(data).to_bytes() == data
    assert data.endswith(b"}\n")
    assert digest_of(data) == digest_of(make(created=manifest.created).to_bytes())


def test_an_image_fits_the_node_that_made_it() -> None:
    """Dump and restore describe a node by the same rules."""
    host = parse_manifest(make().to_bytes()).host
    assert host == profile.load(None)
    needs = Needs(engine="criu", image_version="2", tasks=(), namespaces={"network": "own"})
    spec = {"linux": {"namespaces": [{"type": "network"}]}}
    assert verdict.judge(needs, spec, dump_host=host) == ()


def test_a_manifest_of_an_older_torpor_is_read() -> None:
    plain = json.loads(make().to_bytes())
    plain["network"] = []
    plain["host"]["cpu_model"] = "a processor"
    del plain["host"]["schema"]
    host = parse_manifest(json.dumps(plain).encode()).host
    assert host == replace(profile.load(None), cpu_model="a processor")


def test_no_secret_of_the_process_stands_in_it() -> None:
    assert b"s3cret" not in make().to_bytes()


def test_what_the_specification_granted_is_recorded() -> None:
    manifest = make()
    assert manifest.security.capabilities["bounding"] == ("CAP_CHOWN", "CAP_KILL")
    assert manifest.security.additional_gids == (8, 9)
    assert manifest.security.uid_map[0].host_id == 100000
    assert manifest.security.seccomp_digest.startswith("sha256:")
    assert manifest.security.rlimits[0].hard == 2**64 - 1
    assert manifest.rootfs.readonly
    assert manifest.terminal
    assert (manifest.source.container_name, manifest.source.pod_namespace) == ("web", "shop")
    assert manifest.source.runtime_caller == "containerd"


@pytest.mark.parametrize(
    ("use", "leave_running", "wanted"),
    [(None, True, "clone"), (None, False, "move"), ("clone", False, "clone"), ("move", True, "move")],
)
def test_use(use: str | None, leave_running: bool, wanted: str) -> None:
    assert make(use=use, leave_running=leave_running).effective_use == wanted


@pytest.mark.parametrize(
    ("data", "cause"),
    [
        (b"", "could not read"),
        (b"[]", "no JSON object"),
        (b"{}", "schema is None"),
        (b'{"schema":2}', "schema is 2 and this torpor knows 1"),
        (b'{"schema":true}', "schema is True"),
        (b'{"schema":1}', "missing required field"),
        (b"\xff\xfe", "could not read"),
        (b"[" * 100_000, "could not read"),
    ],
)
def test_unreadable_manifest_is_said_to_be_so(data: bytes, cause: str) -> None:
    with pytest.raises(ImageCorrupt, match=cause):
        parse_manifest(data)


def test_wrong_type_names_its_place() -> None:
    plain = json.loads(make().to_bytes())
    plain["source"]["pod_name"] = 3
    with pytest.raises(ImageCorrupt, match=r"\$\.source\.pod_name"):
        parse_manifest(json.dumps(plain).encode())


def test_needs_keep_names_that_are_not_utf8() -> None:
    task = TaskNeeds(
        pid=1,
        comm="caf\udce9",
        uids=(0, 0, 0, 0),
        gids=(0, 0, 0, 0),
        groups=(),
        cap_inheritable=0,
        cap_permitted=2**41 - 1,
        cap_effective=0,
        cap_bounding=0,
        cap_ambient=0,
        no_new_privs=False,
        seccomp_mode="disabled",
        rlimits={"RLIMIT_CORE": (0, 2**64 - 1)},
    )
    needs = Needs(engine="criu", image_version="2", tasks=(task,), namespaces={"network": "own"})
    assert decode_needs(encode_needs(needs), what="needs") == needs
    older = encode_needs(needs).replace(b'"dead_pids":[],', b"")
    assert b"dead_pids" not in older
    assert decode_needs(older, what="needs") == needs
    bad = encode_needs(replace(needs, namespaces={"network": "elsewhere"}))  # type: ignore[dict-item]
    with pytest.raises(ImageCorrupt, match=r"network|namespaces"):
        decode_needs(bad, what="needs")


@pytest.mark.parametrize("data", [b"{", b'{"process":3}', b"\xff", b"[" * 100_000])
def test_broken_specification(data: bytes) -> None:
    with pytest.raises(ImageCorrupt, match=r"config.json"):
        parse(data)
