"""`torpor compat` on a store with a few images and on profiles of nodes that do not exist."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result

from compat import labels, profile
from compat.profile import Profile
from engines.api import MountNeed, Needs, TaskNeeds
from shim.cli.compat import command
from shim.errors import ShimError, UsageError
from shim.images.documents import encode_needs
from shim.images.layout import CHECKPOINT, NEEDS, SPEC_DUMP, Reference
from shim.images.manifest import Program, Rootfs, build_manifest, source_of
from shim.images.spec import parse
from shim.images.store import Store
from tests.support.containers import make_spec

HERE = replace(profile.load(None), kernel="6.12.0", tools={"criu": "4.2.1"}, memory_bytes=1 << 40)
FITS = replace(HERE, node="fits", memory_available_bytes=1 << 40, rootfs_free_bytes=1 << 40)
ALIEN = replace(FITS, node="alien", arch="s390x")
SILENT = replace(FITS, node="silent", memory_bytes=None, memory_available_bytes=None)
NEEDS_OF_WEB = Needs(
    engine="criu",
    image_version="2",
    tasks=(
        TaskNeeds(
            pid=1, comm="web", uids=(0, 0, 0, 0), gids=(0, 0, 0, 0), groups=(), cap_inheritable=0,
            cap_permitted=0, cap_effective=0, cap_bounding=0, cap_ambient=0, no_new_privs=False,
            seccomp_mode="disabled",
        ),
    ),
    namespaces={"network": "own", "pid": "own"},
    mounts=tuple(
        MountNeed(destination=entry["destination"], fstype=entry["type"], source="", external=False)
        for entry in make_spec(["web"])["mounts"]
    ),
    arch=HERE.arch,
    page_size_bytes=HERE.page_size_bytes,
    memory_bytes=1 << 20,
)  # fmt: skip


class Place:
    """A node with a store, for the command."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.store = Store(path / "store")
        conf = path / "runtime.conf"
        conf.write_text(f"RUNTIME=/bin/true\nSTORE={self.store.path}\nSTATE={path / 'state'}\nTOOLS={path}\n")
        self.environment = {"TORPOR_CONF": str(conf)}

    def put(self, name: str, needs: Needs = NEEDS_OF_WEB, host: Profile | None = HERE) -> None:
        spec_data = json.dumps(make_spec(["web"])).encode()
        with self.store.staging() as staged:
            (staged / CHECKPOINT).mkdir()
            (staged / CHECKPOINT / "pages-1.img").write_bytes(b"p")
            (staged / NEEDS).write_bytes(encode_needs(needs))
            (staged / SPEC_DUMP).write_bytes(spec_data)
            manifest = build_manifest(
                spec_data=spec_data,
                source=source_of(parse(spec_data), container_id="c"),
                engine=Program(name=needs.engine),
                runtime=Program(name="runc"),
                torpor_version="0",
                leave_running=True,
                rootfs=Rootfs(kind="none"),
                host=host,
            )
            self.store.commit(staged, Reference(namespace="", name=name), manifest=manifest)

    def profile(self, node: Profile) -> str:
        path = self.path / f"{node.node}.json"
        path.write_bytes(msgspec.json.encode(node))
        return f"--node={path}"

    def __call__(self, *words: str) -> Result:
        return CliRunner().invoke(command, words, env=self.environment)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    found = Place(tmp_path)
    found.put("web")
    return found


@pytest.mark.parametrize(
    ("nodes", "status", "word"),
    [([FITS], 0, "yes"), ([ALIEN], 1, "no"), ([SILENT], 2, "unknown"), ([FITS, SILENT, ALIEN], 1, "no")],
)
def test_the_exit_status_is_the_verdict(place: Place, nodes: list[Profile], status: int, word: str):
    done = place("check", "web", *(place.profile(node) for node in nodes))
    assert done.exit_code == status, done.output
    assert word in done.output


def test_findings_have_a_rule_and_a_remedy(place: Place):
    done = place("check", "web", place.profile(ALIEN))
    assert f"refuse  cpu.architecture: the image was made on {HERE.arch}" in done.output
    assert "restore on a node with" in done.output


def test_a_matrix_of_images_and_nodes(place: Place):
    place.put("big", replace(NEEDS_OF_WEB, memory_bytes=2 << 40))
    done = place("check", "--all", place.profile(FITS), place.profile(ALIEN), "--json")
    verdicts = {(row["image"], row["node"]): row["verdict"] for row in json.loads(done.stdout)["verdicts"]}
    assert verdicts == {
        ("web", "fits"): "yes",
        ("web", "alien"): "no",
        ("big", "fits"): "no",
        ("big", "alien"): "no",
    }
    table = place("check", "--all", place.profile(FITS), place.profile(ALIEN)).output.splitlines()
    assert table[0].split() == ["IMAGE", "fits", "alien"]
    assert sorted(line.split() for line in table[1:3]) == [["big", "no", "no"], ["web", "yes", "no"]]


def test_this_node_is_the_default(place: Place):
    found = json.loads(place("check", "web", "--json").stdout)["verdicts"]
    assert [row["node"] for row in found] == ["this node"]


def test_edits_of_the_specification(place: Place):
    bundle = place.path / "bundle"
    bundle.mkdir()

    def check(**process: Any) -> list[str]:
        spec = make_spec(["web"])
        spec["process"].update(process)
        (bundle / "config.json").write_text(json.dumps(spec))
        done = place("check", "web", f"--bundle={bundle}", place.profile(FITS), "--json")
        found = json.loads(done.stdout)["verdicts"][0]["findings"]
        return [finding["rule"] for finding in found if finding["severity"] != "ok"]

    assert check() == []
    assert check(args=["other"]) == ["spec.edit.ignored"]
    assert check(user={"uid": 5, "gid": 0}) == ["spec.edit.identity"]


def test_explain(place: Place):
    done = place("check", "--explain", "cpu.features")
    assert done.exit_code == 0
    assert "GLIBC_TUNABLES" in done.output
    assert "Known from: glibc" in done.output
    family = place("check", "--explain", "kernel")
    assert {"kernel.page-size", "kernel.lsm"} <= set(family.output.split())
    wrong = place("check", "--explain", "cpu.feature")
    assert isinstance(wrong.exception, UsageError)
    assert "did you mean 'cpu.features'?" in str(wrong.exception)


def test_no_image_and_no_profile(place: Place):
    assert isinstance(place("check").exception, UsageError)
    path = place.path / "broken.json"
    path.write_text("{}")
    assert isinstance(place("check", "web", f"--node={path}").exception, ShimError)


def test_profile(place: Place):
    out = place.path / "profile.json"
    assert place("profile", "-o", str(out)).exit_code == 0
    found = profile.read(out.read_bytes(), what="it")
    assert found.arch == HERE.arch
    assert found.criu_features is not None or found.unknown["criu_features"]
    assert json.loads(place("profile", "--json").stdout)["schema"] == found.schema
    assert f"kernel {found.kernel}" in " ".join(place("profile").output.split())


# --- labels --------------------------------------------------------------------------------------------


def test_labels_of_a_node_and_the_affinity_of_an_image(place: Place):
    printed = dict(line.split("=", 1) for line in place("labels", place.profile(FITS)).output.splitlines())
    assert printed == labels.of_node(FITS)
    assert printed["torpor.dev/kernel"] == "6012"
    assert all(len(value) <= 63 for value in printed.values())
    snippet = place("labels", "web").output
    assert "requiredDuringSchedulingIgnoredDuringExecution" in snippet
    assert f'values: ["{HERE.arch}"]' in snippet


def chosen(needs: Needs, node: Profile) -> bool:
    found = labels.of_node(node)
    return all(demand.met_by(found) for demand in labels.of_image(needs, HERE, labels.Origin()))


@pytest.mark.parametrize(
    ("needs", "node"),
    [
        ({}, ALIEN),
        ({}, replace(FITS, page_size_bytes=65536)),
        ({}, replace(FITS, cpu_flags=("fpu",))),
        ({}, replace(FITS, tools={})),
        ({"droppable_mappings": True}, replace(FITS, kernel="6.1.0-35-amd64")),
        ({"guard_pages": True}, replace(FITS, kernel="6.12.5")),
        ({"namespaces": {"time": "own"}}, replace(FITS, namespaces=("net",))),
        ({"engine": "gvisor", "image_version": "20250101.0"}, replace(FITS, tools={"runsc": "20240729.0"})),
    ],
)
def test_a_node_that_would_refuse_is_not_chosen(needs: dict[str, Any], node: Profile):
    assert chosen(NEEDS_OF_WEB, FITS)
    assert not chosen(replace(NEEDS_OF_WEB, **needs), node)


def test_a_newer_kernel_is_chosen():
    assert chosen(replace(NEEDS_OF_WEB, droppable_mappings=True), replace(FITS, kernel="7.0.1"))
