"""`torpor compat` on a store with a few images and on profiles of nodes that do not exist."""

from __future__ import annotations

import json
import os
import re
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
from shim.errors import ShimError
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
    assert "did you mean 'cpu.features'?" in wrong.output


def test_no_image_and_no_profile(place: Place):
    assert "give an image, or --all" in place("check").output
    path = place.path / "broken.json"
    path.write_text("{}")
    assert "could not read profile" in place("check", "web", f"--node={path}").output


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
    return all(demand.met_by(found) for demand in labels.of_image(needs, HERE))


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


# --- questions that are none ---------------------------------------------------------------------------


def test_a_damaged_image_is_no(place: Place):
    (image,) = place.store.list()
    pages = image.checkpoint_path / "pages-1.img"
    pages.chmod(0o600)
    pages.write_bytes(b"")
    cut = place("check", "web", place.profile(FITS))
    assert (cut.exit_code, "'checkpoint/pages-1.img' has 0 bytes of 1" in cut.output) == (1, True)
    pages.unlink()
    lost = place("check", "web", place.profile(FITS), place.profile(SILENT))
    assert lost.exit_code == 1
    assert lost.output.count("image.damaged: the image is damaged: 'checkpoint/pages-1.img' is missing") == 2


def test_all_images_are_told_of_the_damaged_too(place: Place):
    for damaged in ("unread", "unmade"):
        place.put(damaged)
    (place.store.path / "images/_/unread/manifest.json").write_text("{")
    (place.store.path / "images/_/unmade/pending.json").touch()
    alone = place("check", "unread", place.profile(FITS))
    done = place("check", "--all", place.profile(FITS), "--json")
    assert (alone.exit_code, done.exit_code) == (3, 3)
    assert [row["image"] for row in json.loads(done.stdout)["verdicts"]] == ["web"]
    assert alone.stderr in done.stderr
    assert "could not use image 'unmade@sha256:" in done.stderr
    place.store.remove(Reference(namespace="", name="unread"))
    assert place("check", "--all", place.profile(FITS)).exit_code == 0, "one that is being made is none yet"


def test_an_empty_store_is_told(tmp_path: Path):
    done = Place(tmp_path)("check", "--all")
    assert (done.exit_code, done.stderr) == (0, "no images in this node's store\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nothing"], "could not find image 'nothing'"),
        ([], "give an image"),
        (["web", "--node=/nowhere"], "does not exist"),
        (["web", "--no-such-option"], "No such option"),
        (["--explain", "no.such"], "there is no rule"),
    ],
)
def test_what_cannot_be_answered_ends_with_3(place: Place, words: list[str], said: str):
    done = place("check", *words)
    assert done.exit_code == 3, done.output
    assert said in done.output


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schema": None}, "schema"),
        ({"schema": 77}, "its schema is 77"),
        ({"memory_bytes": -1}, "its memory_bytes is below zero"),
        ({"hugepages": {"2097152": -1}}, "its hugepages.2097152 is below zero"),
        ({"node": "a\nb"}, "its 'node' has a character"),
        ({"tools": {"criu": "4.2\x1b"}}, "its 'criu' has a character"),
    ],
)
def test_a_profile_that_no_node_has(place: Place, change: dict[str, Any], said: str):
    document = {**json.loads(msgspec.json.encode(FITS)), **change}
    path = place.path / "odd.json"
    path.write_text(json.dumps({name: value for name, value in document.items() if value is not None}))
    done = place("check", "web", f"--node={path}")
    assert done.exit_code == 3, done.output
    assert said in done.output


@pytest.mark.parametrize("change", [{"kernel": "weird"}, {"tools": {**FITS.tools, "criu": "four"}}])
def test_versions_that_nobody_understands(place: Place, change: dict[str, Any]):
    done = place("check", "web", place.profile(replace(FITS, **change)))
    assert (done.exit_code, "criu.kernel" in done.output) == (2, True), done.output


def test_two_nodes_of_one_name(place: Place):
    paths = [place.path / "one.json", place.path / "two.json"]
    for path, found in zip(paths, (FITS, replace(ALIEN, node=FITS.node)), strict=True):
        path.write_bytes(msgspec.json.encode(found))
    done = place("check", "web", *(f"--node={path}" for path in paths), "--json")
    verdicts = {row["node"]: row["verdict"] for row in json.loads(done.stdout)["verdicts"]}
    assert verdicts == {f"fits ({paths[0]})": "yes", f"fits ({paths[1]})": "no"}


def test_a_bundle_without_its_root(place: Place):
    bundle = place.path / "bundle"
    bundle.mkdir()
    (bundle / "config.json").write_text(json.dumps(make_spec(["web"])))
    done = place("check", "web", f"--bundle={bundle}")
    assert done.exit_code == 3
    assert f"its root file system '{bundle}/rootfs' is not there" in done.output
    (bundle / "config.json").write_text('{"linux": "x"}')
    assert place("check", "web", f"--bundle={bundle}").exit_code == 3


def test_a_profile_is_written_into_what_is_there(place: Place, monkeypatch: pytest.MonkeyPatch):
    """A device, a FIFO or a link is not replaced by a file."""
    monkeypatch.setattr("compat.profile.full", lambda *_: HERE)  # pyright: ignore[reportUnknownLambdaType]
    link, target = place.path / "link", place.path / "target"
    target.write_text("x")
    link.symlink_to(target)
    assert place("profile", "-o", str(link)).exit_code == 0
    assert link.is_symlink() and profile.read(target.read_bytes(), what="it").arch == HERE.arch
    null = place.path / "null"
    null.symlink_to("/dev/null")
    assert place("profile", "-o", str(null)).exit_code == 0
    assert null.is_char_device()
    fifo = place.path / "fifo"
    os.mkfifo(fifo)
    end = os.open(fifo, os.O_RDWR | os.O_NONBLOCK)
    assert place("profile", "-o", str(fifo)).exit_code == 0
    assert fifo.is_fifo() and os.read(end, 1 << 20)
    os.close(end)


def test_a_profile_that_cannot_be_written(place: Place):
    done = place("profile", "-o", "/nowhere/x")
    assert isinstance(done.exception, ShimError)
    assert str(done.exception) == "could not write profile '/nowhere/x': No such file or directory"


def test_a_manifest_with_a_profile_of_the_future(place: Place):
    (image,) = place.store.list()
    manifest = image.path / "manifest.json"
    document = json.loads(manifest.read_bytes())
    document["host"]["schema"] = 77
    manifest.chmod(0o600)
    manifest.write_text(json.dumps(document))
    done = place("check", "web", place.profile(FITS))
    assert (done.exit_code, "schema of its node's profile is 77" in done.output) == (3, True), done.output


@pytest.mark.parametrize("source", ["fifo", "/dev/zero"])
def test_what_is_no_file_is_not_waited_for(place: Place, source: str):
    os.mkfifo(place.path / "fifo")
    said = place("check", "web", "--node", str(place.path / source))
    assert (said.exit_code, "could not read profile" in said.output) == (3, True)


def test_a_bundle_whose_specification_is_no_file(place: Place):
    (place.path / "odd").mkdir()
    os.mkfifo(place.path / "odd/config.json")
    said = place("check", "web", "--bundle", str(place.path / "odd"))
    assert (said.exit_code, "no regular file" in said.output) == (3, True)


def test_labels_of_a_foreign_profile_are_labels():
    odd = replace(FITS, lsm="a b\nc=d", arch="x" * 80, namespaces=("us er", "pid"))
    for key, value in labels.of_node(odd).items():
        assert re.fullmatch(r"torpor\.dev/[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?", key)
        assert re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?", value)


def test_what_could_not_be_probed_is_neither_labelled_nor_demanded():
    blind = replace(HERE, cgroup_mode="v2", unknown={"cgroup_mode": "busy"})
    assert "torpor.dev/cgroup" not in labels.of_node(blind)
    mount = MountNeed(destination="/sys/fs/cgroup", fstype="cgroup2", source="", external=False)
    needs = Needs(engine="criu", image_version="", tasks=(), namespaces={}, mounts=(mount,))
    for dump_host, wanted in ((replace(HERE, cgroup_mode="v2"), True), (blind, False)):
        found = {demand.key for demand in labels.of_image(needs, dump_host)}
        assert ("torpor.dev/cgroup" in found) == wanted
