"""Every rule of the verdict: a case where it says no (or warns), one where it says nothing, and one where
nobody can know. Together they name every rule there is.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from compat import verdict
from compat.rules import tools
from compat.rules.case import REGISTRY, Origin
from engines.api import DeviceNeed, FileNeed, Finding, SocketNeed
from tests.support.verdicts import (
    GPU,
    H100,
    HAVE_GPUS,
    ROOMY,
    SPEC,
    TASK,
    At,
    bind,
    edited,
    has,
    image,
    named,
    new,
    node,
    task,
)

MAPPING = {"containerID": 0, "hostID": 100000, "size": 65536}
IN_GROUPS = FileNeed(path="/sys/fs/cgroup/pids/tasks", size_bytes=0, mode=-1)
CERTAIN = None
"""Nobody needs to know more than the image and the specification say."""

# name: a case that it finds something in, how severe, one that it does not, one where nobody knows.
CASES: dict[str, tuple[At, str, At, At | None]] = {
    "cpu.architecture": (At(on=node(arch="aarch64")), "refuse", At(), CERTAIN),
    "cpu.xsave": (At(on=node(cpu_flags=("avx2",))), "refuse", At(), CERTAIN),
    "cpu.state": (
        At(image(xstate=("avx512",)), dumped_on=None),
        "refuse",
        At(image(xstate=("avx",))),
        CERTAIN,
    ),
    "cpu.features": (
        At(on=node(cpu_flags=("aes", "avx", "popcnt", "xsave"))),
        "refuse",
        At(on=node(cpu_flags=tuple(flag for flag in ROOMY.cpu_flags if flag != "erms"))),
        At(dumped_on=None),
    ),
    "cpu.xsave-size": (At(on=node(xsave_bytes=2432)), "warn", At(), CERTAIN),
    "kernel.page-size": (At(on=node(page_size_bytes=65536)), "refuse", At(dumped_on=None), CERTAIN),
    "kernel.droppable": (
        At(image(droppable_mappings=True), node(kernel="6.1.0-35-amd64")),
        "refuse",
        At(image(droppable_mappings=True)),
        At(image(droppable_mappings=True), node(kernel="custom")),
    ),
    "kernel.guard-pages": (
        At(image(guard_pages=True)),
        "refuse",
        At(image(guard_pages=True), node(kernel="6.16.1")),
        At(image(guard_pages=True), node(kernel="custom")),
    ),
    "kernel.shadow-stack": (
        At(image(shadow_stack=True)),
        "refuse",
        At(image(shadow_stack=True), node(cpu_flags=(*ROOMY.cpu_flags, "user_shstk"))),
        CERTAIN,
    ),
    "kernel.paths": (
        At(has("/proc/sysrq-trigger"), node(kernel="6.1")),
        "refuse",
        At(has("/proc/kcore"), node(kernel="6.1")),
        At(has("/proc/of-a-module"), node(kernel="6.1")),
    ),
    "kernel.namespaces": (
        At(image(namespaces={"time": "own"}), node(namespaces=("net", "pid"))),
        "refuse",
        At(image(namespaces={"time": "own"})),
        At(image(namespaces={"time": "own"}), node(namespaces=None)),
    ),
    "kernel.lsm": (
        At(task(lsm_profile="cri-containerd.apparmor.d"), node(lsm="selinux")),
        "refuse",
        At(task(lsm_profile="system_u:system_r:container_t:s0"), node(lsm="selinux")),
        At(task(lsm_profile="x"), node(lsm=None, unknown={"lsm": "no /sys"})),
    ),
    "kernel.capabilities": (
        At(task(cap_permitted=1 << 24), node(capabilities=1)),
        "refuse",
        At(task(cap_permitted=1 << 24)),
        At(task(cap_permitted=1), node(capabilities=None)),
    ),
    "cgroup.mode": (
        At(has("/sys/fs/cgroup", "cgroup"), dumped_on=node(cgroup_mode="hybrid")),
        "refuse",
        At(has("/sys/fs/cgroup", "cgroup2")),
        At(has("/sys/fs/cgroup", "tmpfs"), dumped_on=None),
    ),
    "cgroup.mount": (
        At(
            replace(has("/sys/fs/cgroup", "cgroup2"), namespaces={"user": "own"}),
            on=node(cgroup_mode="v2"),
            dumped_on=node(cgroup_mode="v2"),
        ),
        "refuse",
        At(
            replace(has("/sys/fs/cgroup", "cgroup2", external=True), namespaces={"user": "own"}),
            on=node(cgroup_mode="v2"),
            dumped_on=node(cgroup_mode="v2"),
        ),
        CERTAIN,
    ),
    "cgroup.open": (
        At(replace(has("/sys/fs/cgroup/pids", "cgroup"), files=(IN_GROUPS,)), dumped_on=None),
        "refuse",
        At(replace(has("/sys/fs/cgroup/pid", "cgroup"), files=(IN_GROUPS,)), dumped_on=None),
        CERTAIN,
    ),
    "image.damaged": (At(origin=Origin(damage="'a' is missing")), "refuse", At(), CERTAIN),
    "criu.absent": (
        At(on=node(tools={"runc": "1.3.6"})),
        "refuse",
        At(),
        At(on=node(tools={"runc": "1.3"}, unknown={"tools.criu": "it hangs"})),
    ),
    "criu.kernel": (
        At(on=node(kernel="6.18.0", tools={"criu": "3.17.1"})),
        "refuse",
        At(on=node(kernel="6.12.0", tools={"criu": "3.17.1"})),
        CERTAIN,
    ),
    "criu.image": (
        At(image(guard_pages=True), node(kernel="6.16", tools={"criu": "4.1.1"})),
        "refuse",
        At(dumped_on=node(tools={"criu": "4.2.0"})),
        At(on=node(tools={"criu": "4.0"}), dumped_on=node(tools={"criu": "4.1.1"})),
    ),
    "gvisor.release": (
        At(image(engine="gvisor", image_version="20250101.0")),
        "refuse",
        At(image(engine="gvisor", image_version="20240729.0")),
        At(image(engine="gvisor", image_version="20240729.0"), node(tools={})),
    ),
    "gpu.driver": (
        At(image(gpus=(GPU,)), ROOMY),
        "refuse",
        At(image(gpus=(GPU,)), HAVE_GPUS),
        At(image(gpus=(GPU,)), node(gpus=None, unknown={"gpus": "NVML hangs"})),
    ),
    "gpu.count": (
        At(image(gpus=(GPU, replace(GPU, uuid="GPU-2"))), HAVE_GPUS),
        "refuse",
        At(image(gpus=(GPU,)), HAVE_GPUS),
        CERTAIN,
    ),
    "gpu.model": (
        At(image(gpus=(replace(GPU, model="L4"),)), HAVE_GPUS),
        "refuse",
        At(image(gpus=(GPU,)), HAVE_GPUS),
        CERTAIN,
    ),
    "gpu.place": (
        At(
            image(gpus=(replace(GPU, uuid="GPU-9", driver="570.1"),)),
            replace(HAVE_GPUS, gpu_driver="570.1"),
        ),
        "refuse",
        At(image(gpus=(GPU,)), HAVE_GPUS),
        At(image(gpus=(GPU,)), replace(HAVE_GPUS, gpus=(replace(H100, uuid="GPU-????"),))),
    ),
    "gpu.memory": (
        At(image(gpus=(replace(GPU, memory_bytes=90 << 30),)), HAVE_GPUS),
        "refuse",
        At(image(gpus=(GPU,)), HAVE_GPUS),
        CERTAIN,
    ),
    "gpu.mig": (
        At(image(gpus=(GPU,)), replace(HAVE_GPUS, gpus=(replace(H100, mig=True),))),
        "refuse",
        At(image(gpus=(GPU,)), HAVE_GPUS),
        CERTAIN,
    ),
    "place.memory": (
        At(image(memory_bytes=9 << 30)),
        "refuse",
        At(image(memory_bytes=3 << 30)),
        At(image(memory_bytes=5 << 30)),
    ),
    "place.memory-limit": (
        At(spec=new(linux={"resources": {"memory": {"limit": 1 << 19}}})),
        "refuse",
        At(spec=new(linux={"resources": {"memory": {"limit": -1}}})),
        At(
            image(engine="gvisor", image_version="20240729.0"),
            spec=new(linux={"resources": {"memory": {"limit": 1 << 19}}}),
        ),
    ),
    "place.hugepages": (
        At(image(hugepages={"2097152": 5})),
        "refuse",
        At(image(hugepages={"2097152": 4})),
        At(image(hugepages={"2097152": 4}), node(hugepages=None)),
    ),
    "place.disk": (
        At(origin=Origin(rootfs_bytes=2 << 30)),
        "refuse",
        At(origin=Origin(rootfs_bytes=1 << 20)),
        At(on=node(rootfs_free_bytes=None), origin=Origin(rootfs_bytes=1)),
    ),
    "place.devices": (
        At(image(devices=(DeviceNeed(path="/dev/net/tun", kind="c", major=10, minor=200, access="rw"),))),
        "refuse",
        At(image(devices=(DeviceNeed(path="/dev/fuse", kind="c", major=10, minor=229, access="rw"),))),
        CERTAIN,
    ),
    "identity.once": (
        At(origin=Origin(use="move", used_by="c2")),
        "refuse",
        At(origin=Origin(use="move")),
        CERTAIN,
    ),
    "spec.terminal": (At(spec=new(process={"terminal": True})), "refuse", At(spec=SPEC), CERTAIN),
    "spec.network": (At(spec=new(linux={"namespaces": []})), "refuse", At(spec=SPEC), CERTAIN),
    "spec.ipc": (
        At(image(namespaces={"network": "own", "ipc": "own"}), spec=SPEC),
        "refuse",
        At(image(namespaces={"network": "own", "ipc": "host"}), spec=SPEC),
        CERTAIN,
    ),
    "spec.uts": (
        At(image(namespaces={"network": "own", "uts": "own"}), spec=SPEC),
        "refuse",
        At(image(namespaces={"network": "own", "uts": "host"}), spec=SPEC),
        CERTAIN,
    ),
    "place.pids-limit": (
        At(image(tasks=(TASK, TASK)), spec=new(linux={"resources": {"pids": {"limit": 5}}})),
        "refuse",
        At(image(tasks=(TASK, TASK)), spec=new(linux={"resources": {"pids": {"limit": 6}}})),
        CERTAIN,
    ),
    "place.pid-max": (
        At(task(pid=32768), node(pid_max=32768)),
        "refuse",
        At(task(pid=32767), node(pid_max=32768)),
        At(task(pid=32768), node(pid_max=None)),
    ),
    "mounts.mapped": (
        At(has("/data", external=True), spec=new(mounts=[{**bind("/data")[0], "uidMappings": [MAPPING]}])),
        "refuse",
        At(has("/data", external=True), spec=new(mounts=bind("/data"))),
        CERTAIN,
    ),
    "mounts.kind": (
        At(has("/data", "tmpfs"), spec=new(mounts=bind("/data"))),
        "refuse",
        At(has("/data", external=True), spec=new(mounts=bind("/data"))),
        CERTAIN,
    ),
    "spec.edit.ignored": (edited(process={"args": ["other"]}), "warn", edited(), CERTAIN),
    "spec.edit.image": (
        At(spec=SPEC, origin=Origin(image_ref="r/a@sha256:1"), image_ref="r/a@sha256:2", local=True),
        "warn",
        At(spec=SPEC, origin=Origin(image_ref="r/a@sha256:1"), image_ref="m/b@sha256:1", local=True),
        At(spec=SPEC, origin=Origin(image_ref="r/a@sha256:1"), image_ref="r/a@sha256:2"),
    ),
    "spec.edit.identity": (edited(process={"user": {"uid": 7}}), "refuse", edited(), CERTAIN),
    "spec.edit.capabilities": (
        At(
            task(cap_bounding=1),
            spec=SPEC,
            origin=Origin(dump_spec=new(process={"capabilities": {"bounding": ["CAP_CHOWN"]}})),
        ),
        "refuse",
        At(spec=SPEC, origin=Origin(dump_spec=new(process={"capabilities": {"bounding": ["CAP_CHOWN"]}}))),
        CERTAIN,
    ),
    "spec.edit.seccomp": (
        edited(linux={"seccomp": {"defaultAction": "SCMP_ACT_ERRNO"}}),
        "refuse",
        edited(),
        CERTAIN,
    ),
    "spec.edit.mounts": (
        At(
            has("/data", external=True),
            spec=new(mounts=bind("/data", "ro")),
            origin=Origin(dump_spec=new(mounts=bind("/data"))),
        ),
        "refuse",
        At(
            has("/data", external=True),
            spec=new(mounts=bind("/data")),
            origin=Origin(dump_spec=new(mounts=bind("/data"))),
        ),
        CERTAIN,
    ),
    "spec.edit.applied": (edited(hostname="other"), "ok", edited(), CERTAIN),
}
ELSEWHERE = {
    *("files.missing", "files.size", "files.mode", "files.build-id", "mounts.missing", "mounts.added"),
    *("mounts.source", "mounts.place", "mounts.reach", "files.locked", "spec.namespaces"),
    *("place.ports", "place.pids", "place.cpus", "place.names", "place.interface", "spec.limits"),
    *("files.immutable", "files.in-way", "files.read-only", "files.busy", "spec.words"),
}
"""Rules that look at this machine, tested in test_rules_here.py, test_rules_words.py and test_compat.py."""


def test_every_rule_is_in_this_table_or_below():
    known = {name for rule in REGISTRY for name in rule.names}
    assert known == set(CASES) | ELSEWHERE


@pytest.mark.parametrize("name", CASES)
def test_rule(name: str):
    no, severity, yes, unknown = CASES[name]
    assert named(no.found(), name) == [severity]
    assert all(found.remedy or found.severity == "ok" for found in no.found())
    assert named(yes.found(), name) == []
    if unknown is not None:
        assert named(unknown.found(), name) == ["unknown"]


def test_nothing_is_found_where_nothing_is_wrong():
    assert At().found() == ()
    assert At(spec=SPEC, origin=Origin(dump_spec=SPEC)).found() == ()


def test_every_rule_says_what_it_is_where_it_is_from_and_what_helps():
    for rule in REGISTRY:
        assert rule.source, rule.names
        assert rule.text.endswith((".", ")")), rule.names
        assert rule.text.count(". ") >= 1, f"{rule.names}: no remedy"


@pytest.mark.parametrize("rule", ["cpu", "cpu.features", "files", "spec.edit"])
def test_rules_are_explained_by_name_or_family(rule: str):
    assert verdict.explain(rule)


def test_an_unknown_rule_is_not_explained():
    assert verdict.explain("cpu.feat") == verdict.explain("") == verdict.explain("weather") == ()


def test_findings_come_with_the_worst_first():
    found = At(
        image(memory_bytes=5 << 30), node(arch="aarch64", xsave_bytes=900), spec=new(hostname="x"),
        origin=Origin(dump_spec=SPEC),
    ).found()  # fmt: skip
    severities = [finding.severity for finding in found]
    assert severities == sorted(severities, key=["refuse", "unknown", "warn", "ok"].index)
    assert severities[0] == "refuse"


@pytest.mark.parametrize(
    ("severities", "answer"),
    [((), "yes"), (("warn", "ok"), "yes"), (("warn", "unknown"), "unknown"), (("unknown", "refuse"), "no")],
)
def test_what_findings_come_to(severities: tuple[Any, ...], answer: str):
    findings = [Finding(rule="r", severity=severity, message="m") for severity in severities]
    assert verdict.answer(findings) == answer


def test_on_this_node_what_nobody_probed_is_no_finding():
    bare = node(lsm=None, memory_available_bytes=None, tools={}, capabilities=None)
    assert At(task(lsm_profile="x", cap_permitted=1), bare, local=True).found() == ()
    failed = replace(bare, unknown={"lsm": "permission denied"})
    assert named(At(task(lsm_profile="x"), failed, local=True).found(), "kernel.lsm") == ["unknown"]


# --- details of single rules ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "told", "severity"),
    [
        ("/sys/devices/system/cpu/cpu63/thermal_throttle", True, ["refuse"]),
        ("/sys/devices/virtual/powercap", True, ["refuse"]),
        ("/proc/kcore", True, []),
        ("/proc/of-a-module", True, []),
        ("/sys/devices/platform/of-one-machine", True, ["unknown"]),
        ("/proc/acpi", False, ["unknown"]),
        ("/proc/kcore", False, []),
    ],
)
def test_a_node_with_the_same_kernel_may_be_another_machine(path: str, told: bool, severity: list[str]):
    found = At(has(path), ROOMY if told else node(kernel_paths=None)).found()
    assert named(found, "kernel.paths") == severity


@pytest.mark.parametrize(
    ("flag", "switch"), [("xsavec", "hwcaps=-XSAVEC"), ("atomics", ""), ("mops", ""), ("sve", "")]
)
def test_what_the_linker_and_the_c_library_pick_at_start_up(flag: str, switch: str):
    (found,) = At(dumped_on=node(cpu_flags=(*ROOMY.cpu_flags, flag))).found()
    assert (found.rule, found.severity) == ("cpu.features", "refuse")
    assert found.remedy.endswith(switch or "restore on a node that has them")
    assert flag in found.message


def test_a_processor_that_could_not_be_read_at_the_dump_is_not_known():
    assert named(At(dumped_on=node(cpu_flags=())).found(), "cpu.features") == ["unknown"]


def test_a_written_processor_stands_in_for_one_that_nobody_recorded():
    """cpuinfo.img, which CRIU writes under --cpu-cap; edited, so that it names AVX-512."""
    needs = image(cpu_flags=("avx2", "avx512f"))
    assert named(At(needs, dumped_on=None).found(), "cpu.features") == ["refuse"]
    assert named(At(image(cpu_flags=("avx2",)), dumped_on=None).found(), "cpu.features") == []


@pytest.mark.parametrize(
    ("kernel", "criu", "severity"),
    [
        ("6.18.1", "4.2.1", []),
        ("6.18.1", "4.1.1", ["warn"]),
        ("6.14", "4.1", []),
        ("6.14", "4.0", ["refuse"]),
        ("6.12", "4.0", []),
    ],
)
def test_kernels_and_crius(kernel: str, criu: str, severity: list[str]):
    listening = SocketNeed(family="inet", protocol="tcp", state="listen", address="0.0.0.0", port=80)
    found = At(image(sockets=(listening,)), node(kernel=kernel, tools={"criu": criu})).found()
    assert named(found, "criu.kernel") == severity


def test_a_criu_that_does_not_work_there():
    found = At(on=node(criu_works=False, unknown={"criu_works": "vdso: unexpected"})).found()
    assert "vdso: unexpected" in found[0].message


def test_a_node_without_criu():
    bare = node(tools={"runc": "1.3.6"})
    assert named(At(on=bare, local=True).found(), "criu.absent") == ["refuse"]
    assert named(At(image(engine="gvisor", image_version="1"), bare).found(), "criu.absent") == []
    silent = replace(bare, unknown={"tools.criu": "it hangs"})
    (found,) = At(on=silent, local=True).found()
    assert (found.rule, found.severity, "it hangs" in found.message) == ("criu.absent", "unknown", True)
    never_asked = At(on=node(tools={}), local=True).found()
    assert never_asked == (), "the engine finds out itself"


def test_a_probe_of_control_groups_that_failed_is_no_answer():
    failed = node(unknown={"cgroup_mode": "nothing is mounted at /sys/fs/cgroup"})
    for case in (At(on=failed), At(on=failed, local=True), At(dumped_on=failed)):
        shown = replace(case, needs=has("/sys/fs/cgroup", "tmpfs")).found()
        assert named(shown, "cgroup.mode") == ["unknown"]
        assert named(case.found(), "cgroup.mode") == []


def test_droppable_mappings_lose_their_kind_under_an_older_criu():
    found = At(image(droppable_mappings=True), node(tools={"criu": "4.1.1"})).found()
    assert named(found, "criu.image") == ["warn"]


def test_values_of_the_environment_are_never_told():
    found = edited(process={"env": ["A=secret", "B=hidden"]}).found()
    assert "A, B" in found[0].message
    assert "secret" not in str(found)
    assert "hidden" not in str(found)


def test_what_callers_put_into_every_environment_is_nobodys_edit():
    names = ("HOSTNAME", "WEB_SERVICE_HOST", "WEB_SERVICE_PORT_HTTP", "WEB_PORT_80_TCP_ADDR", "WEB_PORT")
    assert edited(process={"env": ["A=1", *(f"{name}=x" for name in names)]}).found() == ()


OWN_NAMESPACES: dict[str, Any] = {"namespaces": [{"type": "uts"}, {"type": "network"}]}


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"annotations": {"a": "b"}}, {"spec.edit.applied": "ok"}),
        ({"hostname": "other", "linux": OWN_NAMESPACES}, {"spec.edit.ignored": "warn"}),
        ({"linux": {**OWN_NAMESPACES, "sysctl": {"net.a": "1"}}}, {"spec.edit.applied": "ok"}),
        ({"linux": {**OWN_NAMESPACES, "sysctl": {"kernel.a": "1"}}}, {"spec.edit.ignored": "warn"}),
        ({"linux": {"sysctl": {"net/a": "1"}}}, {"spec.edit.applied": "ok"}),
        ({"linux": {"resources": {"cpu": {"shares": 2}}}}, {"spec.edit.applied": "ok"}),
        ({"process": {"env": []}}, {"spec.edit.ignored": "warn"}),
        ({"process": {"cwd": "/x"}}, {"spec.edit.ignored": "warn"}),
        ({"process": {"capabilities": {"bounding": ["CAP_KILL"]}}}, {"spec.edit.capabilities": "warn"}),
        ({"process": {"user": {"uid": 0, "gid": 5}}}, {"spec.edit.identity": "refuse"}),
        ({"process": {"noNewPrivileges": True}}, {"spec.edit.identity": "refuse"}),
        ({"linux": {"seccomp": {"defaultAction": "SCMP_ACT_LOG"}}}, {"spec.edit.seccomp": "refuse"}),
        ({"process": {"apparmorProfile": "p"}}, {"spec.edit.identity": "refuse"}),
        ({"root": {"readonly": True}}, {"spec.edit.mounts": "refuse"}),
    ],
)
def test_edits_of_the_spec(sections: dict[str, Any], expected: dict[str, str]):
    assert {found.rule: found.severity for found in edited(**sections).found()} == expected


TUNED = {"env": ["GLIBC_TUNABLES=glibc.malloc.check=1:glibc.cpu.hwcaps=-AVX512F,-AVX512VL,-AVX512BW,-LZCNT"]}


@pytest.mark.parametrize(
    ("flags", "severity"),
    [
        (("avx512f", "avx512bw", "avx512vl", "avx512cd", "avx512_vbmi2"), []),
        (("abm",), []),
        (("avx512f", "avx512dq"), ["refuse"]),
        (("bmi2",), ["refuse"]),
    ],
)
def test_what_the_c_library_was_told_to_do_without(flags: tuple[str, ...], severity: list[str]):
    case = At(
        dumped_on=node(cpu_flags=(*ROOMY.cpu_flags, *flags)), origin=Origin(dump_spec=new(process=TUNED))
    )
    assert named(case.found(), "cpu.features") == severity
    assert named(replace(case, origin=Origin()).found(), "cpu.features") == ["refuse"]


def test_the_c_library_is_told_only_names_that_it_knows():
    found = At(dumped_on=node(cpu_flags=(*ROOMY.cpu_flags, "avx512_vbmi2", "bmi2"))).found()
    assert found[0].remedy.endswith("hwcaps=-AVX512BW,-AVX512F,-AVX512VL,-BMI2")


@pytest.mark.parametrize(
    ("made_by", "there", "severity"),
    [
        ("4.2.1", "4.1.1", ["refuse"]),
        ("4.1.1", "4.0", ["unknown"]),
        ("4.1.1", "4.2.1", []),
        ("", "4.2.1", ["unknown"]),
        (None, "4.2.1", ["unknown"]),
    ],
)
def test_an_older_criu_than_the_images(made_by: str | None, there: str, severity: list[str]):
    dumped_on = None if made_by is None else node(tools={"criu": made_by} if made_by else {})
    found = At(on=node(tools={"criu": there}), dumped_on=dumped_on).found()
    assert named(found, "criu.image") == severity


def test_the_known_table_of_kernels_is_sorted():
    since = [entry[0] for entry in cast("Any", tools)._CRIU_SINCE]
    assert since == sorted(since, reverse=True)


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"process": {"user": {"uid": 0, "umask": 0o77}}}, "the umask"),
        ({"linux": {"rootfsPropagation": "shared"}}, "the propagation of the root's mounts"),
        ({"domainname": "example"}, "the domain name"),
        ({"linux": {"devices": [{"path": "/dev/fuse"}]}}, "device nodes (/dev/fuse)"),
        (
            {"linux": {"namespaces": [*SPEC["linux"]["namespaces"], {"type": "cgroup"}]}},
            "the cgroup namespace",
        ),
        ({"linux": {"namespaces": [*SPEC["linux"]["namespaces"], {"type": "time"}]}}, "the time namespace"),
    ],
)
def test_what_a_restore_ignores_is_told(sections: dict[str, Any], said: str):
    (found,) = (one for one in edited(**sections).found() if one.rule == "spec.edit.ignored")
    assert f"changes {said}:" in found.message
    back = At(spec=SPEC, origin=Origin(dump_spec=new(**sections)))
    assert any(said in one.message for one in back.found()) == ("device" not in said)


def test_what_criu_does_not_keep_is_told_of_both_specifications():
    odd = new(
        linux={"personality": {"domain": "LINUX32"}},
        process={"ioPriority": {"class": "IOPRIO_CLASS_IDLE"}},
    )
    for old, now in ((odd, SPEC), (SPEC, odd), (odd, odd)):
        (found,) = At(spec=now, origin=Origin(dump_spec=old)).found()
        assert (found.rule, found.severity) == ("spec.edit.ignored", "warn")
        assert "an I/O priority and a personality" in found.message
    assert At(spec=SPEC, origin=Origin(dump_spec=SPEC)).found() == ()


def test_options_of_mounts_that_a_restore_ignores():
    def found(before: list[str], after: list[str], **more: Any) -> list[str]:
        specs = [new(mounts=[{"destination": "/d", "type": "tmpfs", "source": "tmpfs", "options": options}])
                 for options in (before, after)]  # fmt: skip
        at = At(replace(has("/d", "tmpfs"), **more), spec=specs[1], origin=Origin(dump_spec=specs[0]))
        return named(at.found(), "spec.edit.mounts")

    assert found(["size=1m", "nosuid"], ["nosuid", "size=64k"]) == ["warn"]
    assert found(["rw", "nosuid"], ["nosuid"]) == []
    assert found([], ["ro"]) == ["refuse"]


@pytest.mark.parametrize(
    ("kernel", "given", "found"),
    [("6.13", "own", ["refuse"]), ("6.14", "own", []), ("6.14", "host", ["refuse"])],
)
def test_a_pid_namespace_of_newer_kernels_has_a_limit_of_its_own(kernel: str, given: Any, found: list[str]):
    needs = image(dead_pids=(70000,), namespaces={"network": "own", "pid": given})
    spec = new(linux={"namespaces": [{"type": "network"}, *([{"type": "pid"}] if given == "own" else [])]})
    for asked in (None, spec):
        at = At(needs, node(kernel=kernel, pid_max=32768), spec=asked)
        assert named(at.found(), "place.pid-max") == found


def test_dead_tasks_take_processes_too():
    needs = image(tasks=(TASK,) * 4, dead_pids=(7, 8))
    for limit, found in ((8, ["refuse"]), (9, [])):
        at = At(needs, spec=new(linux={"resources": {"pids": {"limit": limit}}}))
        assert named(at.found(), "place.pids-limit") == found


@pytest.mark.parametrize(
    ("n_tasks", "kind", "least"), [(1, "host", 6), (1, "own", 7), (9, "host", 12), (9, "own", 13)]
)
def test_processes_that_a_restore_takes(n_tasks: int, kind: Any, least: int):
    needs = image(tasks=(TASK,) * n_tasks, namespaces={"network": "own", "pid": "own", "user": kind})

    def found(limit: int) -> list[str]:
        at = At(needs, spec=new(linux={"resources": {"pids": {"limit": limit}}}))
        return named(at.found(), "place.pids-limit")

    assert (found(least - 1), found(least)) == (["refuse"], [])
