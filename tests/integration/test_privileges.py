"""No privilege by restore, with images that CRIU really wrote: one test per field.

Each container is dumped with more than a plain spec grants. Its image must pass under the spec it was dumped
with, and be refused under the plain one, by the rule of that field and no other.
"""

from __future__ import annotations

import copy
from collections.abc import Generator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from compat import profile, verdict
from engines.api import ImageCorrupt, ImageNotFound
from engines.criu.inspect import inspect
from shim import admission
from shim.privileges import mask
from tests.support.admission import manifest
from tests.support.containers import CAPABILITIES, Lab, lab
from tests.support.dumped import PYCRIU, Edit, dumped, python

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Generator[Lab]:
    path = tmp_path_factory.mktemp("privileges")
    for folder in (path, *path.parents):  # a mapped root must be able to reach the bundle
        if folder.stat().st_mode & 0o001 == 0:
            folder.chmod(folder.stat().st_mode | 0o011)
    with lab(path) as made:
        yield made


def without_namespace(kind: str) -> Edit:
    def edit(spec: dict[str, Any]) -> None:
        entries = spec["linux"]["namespaces"]
        spec["linux"]["namespaces"] = [entry for entry in entries if entry["type"] != kind]
        if kind == "uts":
            spec.pop("hostname")

    return edit


# --- one test per field --------------------------------------------------------------------------------


def test_plain(place: Lab):
    found = dumped(place, "plain")
    assert found.check(found.spec) == ()
    assert found.check(found.plain) == ()
    first = found.needs.tasks[0]
    assert (first.pid, first.uids, first.no_new_privs) == (1, (0, 0, 0, 0), True)
    assert first.cap_bounding == mask(CAPABILITIES)
    assert found.needs.namespaces["network"] == "own"
    assert not found.needs.terminal
    node = profile.load(None)
    assert verdict.judge(found.needs, found.spec, dump_host=node, rootfs_path=found.rootfs_path) == ()
    assert verdict.judge_files(found.needs, found.spec, found.rootfs_path) == ()


def test_capabilities(place: Lab):
    def more(spec: dict[str, Any]) -> None:
        for kept in spec["process"]["capabilities"].values():
            kept.append("CAP_SYS_ADMIN")

    found = dumped(place, "capabilities", more)
    (message,) = found.passes_itself_but_not_under(found.plain, "privileges.capabilities")
    assert "CAP_SYS_ADMIN (bounding, permitted, effective, inheritable, ambient)" in message


def test_capabilities_of_a_single_thread(place: Lab):
    """Credentials are per thread: the second one drops everything, the first one's are what counts."""
    program = python(
        "import ctypes, threading, time",
        "class Header(ctypes.Structure): _fields_ = [('version', ctypes.c_uint32), ('pid', ctypes.c_int)]",
        "def drop():",
        "    libc = ctypes.CDLL(None, use_errno=True)",
        "    header, data = Header(0x20080522, 0), (ctypes.c_uint32 * 6)()",
        "    assert libc.capset(ctypes.byref(header), data) == 0, ctypes.get_errno()",
        "    dropped.set()",
        "    time.sleep(10000)",
        "dropped = threading.Event()",
        "threading.Thread(target=drop, daemon=True).start()",
        "dropped.wait()",
    )
    found = dumped(place, "thread", args=program)
    by_power = sorted(found.needs.tasks, key=lambda task: task.cap_permitted)
    assert [task.cap_permitted for task in by_power] == [0, mask(CAPABILITIES)]

    def powerless(spec: dict[str, Any]) -> None:
        for name in spec["process"]["capabilities"]:
            spec["process"]["capabilities"][name] = []

    new = copy.deepcopy(found.plain)
    powerless(new)
    messages = found.passes_itself_but_not_under(new, "privileges.capabilities")
    assert any(message.startswith(f"task {by_power[1].pid} ") for message in messages)


def mapped(spec: dict[str, Any]) -> None:
    """A user namespace. Without CAP_SYS_RESOURCE, which machines like the tests' lack, CRIU can dump a task
    that is not root only in one. The machine's Python may lie where a mapped root cannot go.
    """
    spec["linux"]["namespaces"].append({"type": "user"})
    for field in ("uidMappings", "gidMappings"):
        spec["linux"][field] = [{"containerID": 0, "hostID": 100000, "size": 65536}]
    kept = ("/usr", "/proc", "/dev")
    spec["mounts"] = [entry for entry in spec["mounts"] if entry["destination"].startswith(kept)]
    spec["linux"]["maskedPaths"] = [path for path in spec["linux"]["maskedPaths"] if path.startswith("/proc")]


def as_user(spec: dict[str, Any]) -> None:
    mapped(spec)
    spec["process"]["user"] = {"uid": 1000, "gid": 1000, "additionalGids": [50]}
    spec["process"]["capabilities"] = {"bounding": CAPABILITIES}


def test_user(place: Lab):
    """Root in the image, a user of its own in the new spec."""
    found = dumped(place, "root", mapped)
    new = copy.deepcopy(found.spec)
    new["process"]["user"] = {"uid": 1000, "gid": 0}
    for kept in new["process"]["capabilities"].values():
        kept.remove("CAP_SETUID")
    refused = [finding for finding in found.check(new) if finding.rule == "privileges.user"]
    assert "runs as uid 0, but the new spec runs as uid 1000 without CAP_SETUID" in refused[0].message
    with pytest.raises(admission.WiderPrivileges, match=r"privileges\.user"):
        admission.refuse(found.check(new), what="root")


def test_user_that_is_not_root(place: Lab):
    """Another user in the image than in the new spec, and groups that the new one does not give."""
    found = dumped(place, "user", as_user)
    assert found.needs.tasks[0].uids == (1000, 1000, 1000, 1000)
    assert found.needs.tasks[0].groups == (50,)
    other = copy.deepcopy(found.spec)
    other["process"]["user"]["uid"] = 1001
    found.passes_itself_but_not_under(other, "privileges.user")
    fewer = copy.deepcopy(found.spec)
    fewer["process"]["user"]["additionalGids"] = []
    assert "is in group 50" in found.passes_itself_but_not_under(fewer, "privileges.groups")[0]
    root = copy.deepcopy(found.spec)
    root["process"]["user"] = {"uid": 0, "gid": 0}
    root["process"]["capabilities"] = {"bounding": CAPABILITIES, "permitted": CAPABILITIES}
    assert found.check(root) == ()


def test_no_new_privs(place: Lab):
    found = dumped(place, "no-new-privs", lambda spec: spec["process"].update(noNewPrivileges=False))
    found.passes_itself_but_not_under(found.plain, "privileges.no-new-privs")


SECCOMP = {
    "defaultAction": "SCMP_ACT_ALLOW",
    "syscalls": [{"names": ["ptrace"], "action": "SCMP_ACT_ERRNO", "errnoRet": 1}],
}


def test_seccomp(place: Lab):
    found = dumped(place, "seccomp")
    assert found.needs.tasks[0].seccomp_mode == "disabled"
    demanding = copy.deepcopy(found.plain)
    demanding["linux"]["seccomp"] = copy.deepcopy(SECCOMP)
    found.passes_itself_but_not_under(demanding, "privileges.seccomp")
    # Whatever the manifest says, the tasks of this image have no filter.
    forged = admission.check(demanding, found.needs, manifest(demanding), rootfs_path=found.rootfs_path)
    assert "has no seccomp filter" in forged[0].message


def test_seccomp_of_the_same_and_of_another_profile(place: Lab):
    found = dumped(place, "filter", lambda spec: spec["linux"].update(seccomp=copy.deepcopy(SECCOMP)))
    assert {task.seccomp_mode for task in found.needs.tasks} == {"filter"}
    assert all(len(task.seccomp_filters) == 1 for task in found.needs.tasks)
    assert found.check(found.plain) == ()
    stricter = copy.deepcopy(found.spec)
    stricter["linux"]["seccomp"]["syscalls"][0]["names"].append("mount")
    found.passes_itself_but_not_under(stricter, "privileges.seccomp")


def test_lsm(place: Lab):
    """No security module is active where these tests usually run, so the label is put in by hand."""
    found = dumped(place, "lsm")
    demanding = copy.deepcopy(found.plain)
    demanding["process"]["apparmorProfile"] = "container-default"
    found.passes_itself_but_not_under(demanding, "privileges.lsm")
    labelled = tuple(replace(task, lsm_profile="container-default (enforce)") for task in found.needs.tasks)
    assert found.check(demanding, replace(found.needs, tasks=labelled)) == ()
    other = tuple(replace(task, lsm_profile="unconfined") for task in found.needs.tasks)
    assert [f.rule for f in found.check(demanding, replace(found.needs, tasks=other))] == ["privileges.lsm"]


def test_rlimits(place: Lab):
    entry = {"type": "RLIMIT_NOFILE", "soft": 512, "hard": 600}
    found = dumped(place, "rlimits", lambda spec: spec["process"].update(rlimits=[entry]))
    assert found.needs.tasks[0].rlimits["RLIMIT_NOFILE"] == (512, 600)
    assert found.check(found.plain) == ()
    tighter = copy.deepcopy(found.plain)
    tighter["process"]["rlimits"] = [{**entry, "hard": 599}]
    messages = found.passes_itself_but_not_under(tighter, "privileges.rlimits")
    assert "RLIMIT_NOFILE 600, but the new spec allows 599" in messages[0]


def test_user_namespace(place: Lab):
    found = dumped(place, "userns", mapped)
    assert found.needs.namespaces["user"] == "own"
    other = copy.deepcopy(found.spec)
    other["linux"]["uidMappings"][0]["hostID"] = 200000
    found.passes_itself_but_not_under(other, "privileges.user-namespace")
    none = copy.deepcopy(found.spec)
    none["linux"]["namespaces"] = [n for n in none["linux"]["namespaces"] if n["type"] != "user"]
    found.passes_itself_but_not_under(none, "privileges.user-namespace")
    plain = dumped(place, "no-userns")
    demanding = copy.deepcopy(plain.plain)
    demanding["linux"]["namespaces"].append({"type": "user"})
    plain.passes_itself_but_not_under(demanding, "privileges.user-namespace")


def test_devices(place: Lab):
    """A device of the container's own making, under the name of a harmless one, is known by its numbers."""

    def allowed(spec: dict[str, Any]) -> None:
        rule = {"allow": True, "type": "c", "major": 1, "minor": 11, "access": "rw"}
        spec["linux"]["resources"] = {"devices": [{"allow": False, "access": "rwm"}, rule]}
        node = {"path": "/dev/log-device", "type": "c", "major": 1, "minor": 11, "fileMode": 0o666}
        spec["linux"]["devices"] = [node]

    opening = python(
        "import os", "os.rename('/dev/log-device', '/dev/full2')", "kept = open('/dev/full2', 'wb')"
    )
    found = dumped(place, "devices", allowed, opening)
    opened = {(need.major, need.minor): need for need in found.needs.devices}
    assert opened[(1, 11)].path == "/dev/full2"
    assert opened[(1, 11)].access == "w"
    assert opened[(1, 3)].path == "/dev/null"
    messages = found.passes_itself_but_not_under(found.plain, "privileges.devices")
    assert "'/dev/full2' (c 1:11)" in messages[0]


@pytest.mark.parametrize("kind", ["network", "pid", "ipc", "uts"])
def test_host_namespaces(place: Lab, kind: str):
    found = dumped(place, f"host-{kind}", without_namespace(kind))
    assert found.needs.namespaces[kind] == "host"
    messages = found.passes_itself_but_not_under(found.plain, "privileges.namespaces")
    assert f"lives in the host's {kind} namespace" in messages[0]


def test_host_namespace_of_a_joined_one(place: Lab):
    network = place.network("j")
    found = dumped(
        place,
        "joined",
        lambda spec: [
            entry.update(path=str(network.pod_path))
            for entry in spec["linux"]["namespaces"]
            if entry["type"] == "network"
        ],
    )
    assert found.needs.namespaces["network"] == "external"
    assert found.check(found.spec) == ()
    node = profile.load(None)
    rules = {
        f.rule for f in verdict.judge(found.needs, found.plain, dump_host=node, rootfs_path=found.rootfs_path)
    }
    assert rules == {"spec.network"}


def test_nested_namespace(place: Lab):
    """A task with a network namespace of its own inside the container, which only CAP_SYS_ADMIN allows."""

    def admin(spec: dict[str, Any]) -> None:
        for kept in spec["process"]["capabilities"].values():
            kept.append("CAP_SYS_ADMIN")

    program = python(
        "import ctypes, os, time",
        "if os.fork() == 0:",
        "    assert ctypes.CDLL(None, use_errno=True).unshare(0x00020000) == 0",
        "    print('ready', flush=True)",
        "    time.sleep(10000)",
        "time.sleep(0.5)",
    )
    found = dumped(place, "nested", admin, program)
    assert len({task.namespaces["mount"] for task in found.needs.tasks}) == 2
    assert found.check(found.spec) == ()
    refused = found.check(found.plain)
    assert "privileges.namespaces" in {finding.rule for finding in refused}


def dropping(kept: Sequence[str], *lines: str) -> list[str]:
    """A program that uses its privileges, and keeps only these capabilities."""
    return python(
        "import ctypes, fcntl, os, socket",
        "libc = ctypes.CDLL(None, use_errno=True)",
        "def do(name, *words):",
        "    words = [word.encode() if isinstance(word, str) else word for word in words]",
        "    assert getattr(libc, name)(*words) == 0, (name, words, os.strerror(ctypes.get_errno()))",
        "class Header(ctypes.Structure): _fields_ = [('version', ctypes.c_uint32), ('pid', ctypes.c_int)]",
        *lines,
        f"kept = {mask(kept)}",
        "do('prctl', 47, 4, 0, 0, 0)",
        "for number in range(41):",
        "    if not kept >> number & 1: libc.prctl(24, number, 0, 0, 0)",
        "halves = [kept & 0xffffffff] * 3 + [kept >> 32] * 3",
        "header, data = Header(0x20080522, 0), (ctypes.c_uint32 * 6)(*halves)",
        "do('capset', ctypes.byref(header), data)",
    )


def privileged(spec: dict[str, Any]) -> None:
    for kept in spec["process"]["capabilities"].values():
        kept += ["CAP_SYS_ADMIN", "CAP_SYS_NICE"]
    spec["linux"]["resources"] = {"devices": [{"allow": True, "access": "rwm"}]}


@pytest.mark.parametrize(
    ("name", "lines", "rules"),
    [
        ("over", ["do('mount', 'proc', '/proc', 'proc', 14, None)"], {"mounts"}),
        ("second", ["do('mount', 'proc', '/data', 'proc', 0, None)"], {"mounts"}),
        ("part", ["do('mount', '/proc/sys', '/data', None, 4096, None)"], {"mounts"}),
        ("tmpfs", ["do('mount', 'new', '/data', 'tmpfs', 0, None)"], {"mounts"}),
        ("flags", ["do('mount', None, '/dev/shm', None, 32, None)"], {"mounts"}),
        (
            "kind",
            ["do('umount2', '/dev/shm', 2)", "do('mount', 'p', '/dev/shm', 'proc', 14, None)"],
            {"mounts"},
        ),
        ("uncovered", ["do('umount2', '/sys/firmware', 2)"], {"masked-paths"}),
        (
            "writable",
            ["do('umount2', '/sys/firmware', 2)", "do('mount', 'new', '/sys/firmware', 'tmpfs', 0, None)"],
            {"masked-paths"},
        ),
        (
            "exchanged",
            [
                "do('umount2', '/proc/bus', 2)",
                "do('mount', '/proc/sys', '/proc/bus', None, 4096, None)",
                "do('mount', None, '/proc/bus', None, 4096 | 32 | 1, None)",
            ],
            {"mounts"},
        ),
    ],
)
def test_mounts_of_the_containers_own_making(place: Lab, name: str, lines: list[str], rules: set[str]):
    """A task that mounted something while it might, and then gave the capability up."""
    found = dumped(place, f"mount-{name}", privileged, dropping(CAPABILITIES, *lines))
    assert found.needs.tasks[0].cap_bounding == mask(CAPABILITIES)
    assert "privileges.mounts" not in {finding.rule for finding in found.check(found.spec)}
    refused = [finding for finding in found.check(found.plain) if finding.severity == "refuse"]
    assert {finding.rule for finding in refused} == {f"privileges.{rule}" for rule in rules}


@pytest.mark.parametrize(
    ("rule", "line"),
    [
        ("scheduling", "os.nice(-15)"),
        ("descriptors", "kept_open = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)"),
        ("descriptors", "kept_open = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, 0)"),
    ],
    ids=["nice", "raw", "packet"],
)
def test_what_outlives_its_capability(place: Lab, request: pytest.FixtureRequest, rule: str, line: str):
    fewer = [name for name in CAPABILITIES if name != "CAP_NET_RAW"]
    name = request.node.callspec.id
    found = dumped(place, f"outlives-{name}", privileged, dropping(fewer, line))
    new = copy.deepcopy(found.plain)
    new["process"]["capabilities"] = dict.fromkeys(new["process"]["capabilities"], fewer)
    found.passes_itself_but_not_under(new, f"privileges.{rule}")


def test_oom_score(place: Lab):
    """The score of a pod that must die first, in an image of one that may live longer."""
    found = dumped(place, "oom", lambda spec: spec["process"].update(oomScoreAdj=900))
    assert {task.oom_score_adj for task in found.needs.tasks} == {900}
    assert found.check(found.plain) == ()
    first = copy.deepcopy(found.plain)
    first["process"]["oomScoreAdj"] = 1000
    found.passes_itself_but_not_under(first, "privileges.oom-score")
    first["process"]["oomScoreAdj"] = 950  # the kubelet's sum on a node with more memory
    assert [finding.severity for finding in found.check(first)] == ["warn"]


def test_a_terminal_and_control_groups_are_mounts_of_the_runtimes(place: Lab):
    def groups(spec: dict[str, Any]) -> None:
        options = ["nosuid", "noexec", "nodev", "relatime", "ro"]
        top = {"destination": "/sys/fs/cgroup", "type": "cgroup", "source": "cgroup", "options": options}
        spec["mounts"].append(top)

    found = dumped(place, "groups", groups)
    assert any(mount.fstype in {"cgroup", "cgroup2"} for mount in found.needs.mounts)
    assert found.check(found.spec) == ()
    found.passes_itself_but_not_under(found.plain, "privileges.mounts")


def test_read_only_and_masked_paths(place: Lab):
    def open_up(spec: dict[str, Any]) -> None:
        spec["linux"]["maskedPaths"] = []
        spec["linux"]["readonlyPaths"] = []

    found = dumped(place, "open", open_up)
    assert found.check(found.spec) == ()
    rules = {finding.rule for finding in found.check(found.plain)}
    assert rules == {"privileges.masked-paths", "privileges.read-only"}
    sealed = copy.deepcopy(found.spec)
    sealed["root"]["readonly"] = True
    found.passes_itself_but_not_under(sealed, "privileges.read-only")


# --- the reader ----------------------------------------------------------------------------------------


def test_reader_refuses_damage(place: Lab, tmp_path: Path):
    found = dumped(place, "damage")
    with pytest.raises(ImageNotFound):
        inspect(tmp_path / "absent", PYCRIU)
    for name in ("inventory.img", "pstree.img", "core-1.img", "mm-1.img", "files.img", "seccomp.img"):
        path = found.image_path / name
        kept = path.read_bytes()
        if len(kept) <= 12:  # an empty list of filters cannot be cut short
            continue
        for damage in (kept[:-1], kept[:6], b"", b"\0" * len(kept), kept[:8] + b"\xff" * (len(kept) - 8)):
            path.write_bytes(damage)
            with pytest.raises(ImageCorrupt, match=name):
                inspect(found.image_path, PYCRIU)
        path.unlink()
        if name != "seccomp.img":
            path.symlink_to("/etc/hostname")
            with pytest.raises(ImageCorrupt):
                inspect(found.image_path, PYCRIU)
            path.unlink()
        path.write_bytes(kept)
    assert inspect(found.image_path, PYCRIU) == found.needs


def test_reader_tells_files_and_sockets(place: Lab):
    program = python(
        "import os, socket",
        "server = socket.socket()",
        "server.bind(('127.0.0.1', 7007))",
        "server.listen()",
        "grown = open('/data/grown', 'w+'); grown.write('12345'); grown.flush()",
        "log = open('/data/log', 'a')",
        "gone = open('/data/gone', 'w'); os.unlink('/data/gone')",
    )
    found = dumped(place, "reader", args=program)
    files = {need.path: need for need in found.needs.files}
    assert files["/data/grown"].size_bytes == 5
    assert files["/data/grown"].mode == 0o644
    assert files["/data/log"].size_bytes == -1
    assert [need.use for path, need in files.items() if "gone" in path] == ["deleted"]
    assert [(s.protocol, s.state, s.address, s.port) for s in found.needs.sockets] == [
        ("tcp", "listen", "127.0.0.1", 7007)
    ]
    assert found.needs.memory_bytes > 1 << 20
    assert found.needs.xsave is not None
    before = verdict.judge_files(found.needs, found.spec, found.rootfs_path)
    assert before == ()
    built = [need for need in found.needs.files if need.build_id]
    assert len(built) > 2
    others = replace(found.needs, files=tuple(replace(need, build_id="00" * 20) for need in built))
    another = verdict.judge_files(others, found.spec, found.rootfs_path)
    assert {finding.rule for finding in another} == {"files.build-id"}
    (found.rootfs_path / "data/grown").write_text("123456")
    changed = verdict.judge_files(found.needs, found.spec, found.rootfs_path)
    assert [finding.rule for finding in changed] == ["files.size"]
