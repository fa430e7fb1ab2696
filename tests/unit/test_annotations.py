"""What annotations ask for, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shim.annotations import Wish, read
from shim.errors import AdmissionRefused
from shim.images.manifest import source_of
from shim.images.spec import parse

CONTAINERD = {
    "io.kubernetes.cri.container-type": "container",
    "io.kubernetes.cri.container-name": "app",
    "io.kubernetes.cri.sandbox-namespace": "shop",
}
CRIO = {
    "io.kubernetes.cri-o.ContainerType": "container",
    "io.kubernetes.cri-o.Name": "k8s_app_pod_shop_0a1b_0",
    "io.kubernetes.cri-o.SandboxName": "k8s_pod_shop_0a1b_0",
}
TYPES = ("io.kubernetes.cri.container-type", "io.kubernetes.cri-o.ContainerType")


def torpor(base: dict[str, str], pairs: dict[str, str]) -> Wish:
    annotations = {**base, **{f"torpor.dev/{key}": value for key, value in pairs.items()}}
    return read({"annotations": annotations}, foreign=False)


def test_nothing_asked():
    found = read({}, foreign=True)
    assert found == Wish()
    assert not found.restores


@pytest.mark.parametrize("base", [CONTAINERD, CRIO], ids=["containerd", "cri-o"])
def test_own_container_only(base: dict[str, str]):
    found = torpor(base, {"restore-from.app": "warm", "restore-from.sidecar": "other", "use.app": "clone"})
    assert (found.restore_from, found.bare, found.use) == ("warm", False, "clone")
    assert (found.container_name, found.namespace, found.sandbox) == ("app", "shop", False)
    assert not torpor(base, {"restore-from.sidecar": "other"}).restores


def test_crio_takes_the_short_name_from_metadata():
    metadata = {"io.kubernetes.cri-o.Metadata": '{"name":"web","attempt":1}'}
    assert torpor({**CRIO, **metadata}, {"restore-from.web": "warm"}).restore_from == "warm"


SPOOFED = {
    "io.kubernetes.cri.container-name": "other",
    "io.kubernetes.cri.sandbox-name": "other",
    "io.kubernetes.cri.sandbox-namespace": "victim",
    "io.kubernetes.cri-o.Name": "k8s_other_pod_victim_0a1b_0",
    "io.kubernetes.cri-o.ContainerName": "k8s_other_pod_victim_0a1b_0",
    "io.kubernetes.cri-o.Namespace": "victim",
    "io.kubernetes.cri-o.Metadata": '{"name":"other"}',
    "io.kubernetes.container.name": "other",
    "io.kubernetes.pod.namespace": "victim",
    "io.container.manager": "libpod",
}


def written_by(base: dict[str, str], pods: dict[str, str]) -> dict[str, str]:
    """Annotations of a pod, and over them those that the caller always writes, of which it knows more."""
    more: dict[str, str] = {"io.kubernetes.cri.sandbox-name": "pod"}
    if base is CRIO:
        more = {
            "io.kubernetes.cri-o.Metadata": '{"name":"app"}',
            "io.kubernetes.container.name": "app",
            "io.kubernetes.pod.namespace": "shop",
            "io.container.manager": "cri-o",
        }
    return {**pods, **base, **more}


@pytest.mark.parametrize("key", [*SPOOFED, "all"])
@pytest.mark.parametrize("base", [CONTAINERD, CRIO], ids=["containerd", "cri-o"])
def test_a_pod_cannot_say_that_it_is_another(base: dict[str, str], key: str):
    pods = SPOOFED if key == "all" else {key: SPOOFED[key]}
    annotations = written_by(base, pods)
    found = torpor(annotations, {"restore-from.app": "warm", "restore-from.other": "evil"})
    assert (found.container_name, found.namespace, found.restore_from) == ("app", "shop", "warm")
    source = source_of(parse(json.dumps({"annotations": annotations}).encode()), container_id="c")
    assert (source.container_name, source.pod_name, source.pod_namespace) == ("app", "pod", "shop")


@pytest.mark.parametrize("kind", ["container", "sandbox", "?"])
@pytest.mark.parametrize(
    ("base", "other"), [(CONTAINERD, TYPES[1]), (CRIO, TYPES[0])], ids=["containerd", "cri-o"]
)
def test_a_pod_cannot_say_that_its_caller_is_another(base: dict[str, str], other: str, kind: str):
    with pytest.raises(AdmissionRefused, match="no caller writes both"):
        torpor({**SPOOFED, other: kind, **base}, {"restore-from": "warm"})


def test_a_crio_restored_name_is_understood():
    """CRI-O joins the last two parts of the name of a container that it restores itself."""
    assert torpor({**CRIO, "io.kubernetes.cri-o.Name": "k8s_app_pod_shop_0a1b0"}, {}).namespace == "shop"
    labels = {"io.kubernetes.container.name": "app", "io.kubernetes.pod.namespace": "shop"}
    found = torpor({"io.kubernetes.cri-o.ContainerType": "container", **labels}, {})
    assert (found.container_name, found.namespace) == ("app", "shop")


@pytest.mark.parametrize("metadata", ["", "{", "[]", '{"name":1}', "[" * 100_000])
def test_damaged_metadata_is_passed_over(metadata: str):
    assert torpor({**CRIO, "io.kubernetes.cri-o.Metadata": metadata}, {}).container_name == "app"


def test_bare_key_waits_for_the_image_to_name_the_container():
    found = torpor(CONTAINERD, {"restore-from": "warm"})
    assert found.bare
    assert found.applies_to("app")
    assert not found.applies_to("sidecar")


def test_own_key_wins_over_bare():
    found = torpor(CONTAINERD, {"restore-from": "bare", "restore-from.app": "mine", "use": "move"})
    assert (found.restore_from, found.bare, found.use) == ("mine", False, "move")
    assert found.applies_to("whatever")


def test_outside_kubernetes_the_bare_key_always_applies():
    found = torpor({}, {"restore-from": "ns/warm@sha256:ab"})
    assert found.restore_from == "ns/warm@sha256:ab"
    assert not found.bare
    assert found.applies_to("anything")
    with pytest.raises(AdmissionRefused, match=r"names the container 'app'.*use 'torpor.dev/restore-from'"):
        torpor({}, {"restore-from.app": "warm"})


def test_container_name_with_dots():
    base = {**CONTAINERD, "io.kubernetes.cri.container-name": "a.b"}
    assert torpor(base, {"restore-from.a.b": "warm", "restore-from.a": "no"}).restore_from == "warm"


def test_all_keys():
    pairs = {
        "restore-from": "warm",
        "use": "clone",
        "on-restore-failure": "cold-start",
        "network": "keep",
        "engine": "criu",
        "checkpointable": "true",
    }
    found = torpor({}, pairs)
    assert (found.use, found.on_failure, found.network) == ("clone", "cold-start", "keep")
    assert (found.engine, found.checkpointable) == ("criu", True)
    assert torpor({}, {"checkpointable": "false"}).checkpointable is False


@pytest.mark.parametrize("kind", TYPES)
def test_sandbox_ignores_everything(kind: str):
    found = torpor({kind: "sandbox"}, {"restore-from": "warm", "use": "nonsense", "nonsense": "x"})
    assert found.sandbox
    assert not found.restores


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        (
            "restore-form",
            "warm",
            "'torpor.dev/restore-form' is unknown; did you mean 'torpor.dev/restore-from'",
        ),
        ("Use", "clone", "did you mean 'torpor.dev/use'"),
        ("restore-from.", "warm", "'torpor.dev/restore-from.' is unknown"),
        ("network", "keep-close", "must be one of keep, keep-closed, new; did you mean 'keep-closed'"),
        ("use", "clon", "must be one of clone, move; did you mean 'clone'"),
        ("use.sidecar", "x", "'torpor.dev/use.sidecar' is 'x'"),
        ("checkpointable", "True", "must be one of true, false; did you mean 'true'"),
        ("on-restore-failure", "cold_start", "did you mean 'cold-start'"),
        ("restore-from", "", "must be an image reference without blanks"),
        ("restore-from", "a b", "without blanks"),
        ("engine", "a\nb", "the name of an engine without blanks"),
    ],
)
def test_refused(key: str, value: str, sentence: str):
    with pytest.raises(AdmissionRefused) as caught:
        torpor(CONTAINERD, {key: value})
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("base", [{}, CONTAINERD, {"io.kubernetes.cri.container-type": "sandbox"}])
@pytest.mark.parametrize("key", ["org.criu.config", "org.criu.anything"])
def test_criu_annotations_are_refused_everywhere(base: dict[str, str], key: str):
    with pytest.raises(AdmissionRefused, match=r"would let the pod run programs as root"):
        read({"annotations": {**base, key: "/tmp/evil.conf"}}, foreign=True)


FOREIGN = {
    "restore.criu.org/checkpoint-path.app": "/var/lib/kubelet/checkpoints/c.tar",
    "restore.criu.org/checkpoint-path.sidecar": "/x.tar",
}


def test_foreign_annotations_only_where_allowed():
    annotations = {**CONTAINERD, **FOREIGN}
    assert not read({"annotations": annotations}, foreign=False).restores
    found = read({"annotations": annotations}, foreign=True)
    assert found.foreign_path == Path("/var/lib/kubelet/checkpoints/c.tar")
    assert found.restores
    assert not found.bare


@pytest.mark.parametrize("path", ["relative.tar", "/a/../b.tar", "", "/a\n.tar"])
def test_foreign_paths_must_be_plain(path: str):
    annotations = {**CONTAINERD, "restore.criu.org/checkpoint-path.app": path}
    with pytest.raises(AdmissionRefused, match=r"must be an absolute path"):
        read({"annotations": annotations}, foreign=True)


def test_two_sources_contradict():
    annotations = {**CONTAINERD, **FOREIGN, "torpor.dev/restore-from.app": "warm"}
    with pytest.raises(AdmissionRefused, match=r"remove one"):
        read({"annotations": annotations}, foreign=True)
    assert read({"annotations": annotations}, foreign=False).restore_from == "warm"


@pytest.mark.parametrize("annotations", [["a"], {"torpor.dev/use": 1}, "text"])
def test_malformed(annotations: Any):
    with pytest.raises(AdmissionRefused):
        read({"annotations": annotations}, foreign=False)
