"""The target's half of a migration into a pod of a caller's own: what is its own, and what it leaves."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cluster import arrival, config, guest
from cluster.arrival import Arriving
from cluster.guest import Guest
from cluster.here import Here
from cluster.messages import Reserve
from cluster.records import IMAGE, Record
from cluster.serve import _Session
from netmig import identity as identities
from netmig.errors import NetworkError
from netmig.identity import Identity
from shim.errors import ShimError, UnknownImage
from shim.images.layout import Reference
from shim.promise import Plan, Promise

OURS, THEIRS = "0" * 16, "1" * 16
WEB = Reference(namespace="default", name="web")


class Images:
    """A store of names and digests."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.digests: dict[str, str] = {}

    def has(self, reference: Reference) -> bool:
        return reference.name in self.digests

    def resolve(self, reference: Reference) -> object:
        if self.digests.get(reference.name) != reference.digest:
            raise UnknownImage("none")
        return SimpleNamespace(reference=reference)

    def consumed_by(self, image: object) -> str | None:
        return None

    def remove(self, reference: Reference) -> None:
        del self.digests[reference.name]

    def recover(self) -> int:
        return 0


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Here:
    found = SimpleNamespace(store=Images(tmp_path / "store"), config=SimpleNamespace(restore_timeout_s=5.0))
    found.of_engine = lambda engine: found
    found.directory = lambda root, container_id: tmp_path / container_id
    monkeypatch.setattr(Here, "engine", lambda *args: None)
    monkeypatch.setattr(Here, "status", lambda *args: "")
    monkeypatch.setattr(Guest, "check_space", lambda *args: None)
    monkeypatch.setattr(guest.prospects, "stable", lambda *args: None)
    return Here(config=config.Config(node="b", state=tmp_path / "state"), node=cast("Any", found))


def wanted(here: Here, **fields: object) -> Reserve:
    asked: dict[str, Any] = {
        "migration": OURS,
        "container_id": "c",
        "engine": "criu",
        "spec": b"{}",
        "identity": identities.encode(Identity()),
        "owner": "c",
        "host": cast("Any", None),
        "memory_bytes": 1,
        "trial": False,
        "guest": "default/web",
        "container_name": "main",
        **fields,
    }
    return Reserve(**asked)


def reserve(here: Here, kind: type[Arriving] = Guest, **fields: object) -> Arriving:
    asked = wanted(here, **fields)
    record = Record(here.config.arrivals, asked.migration)
    with record.begun():
        return kind.reserve(here, record, "a", asked)[0]


def promise(here: Here) -> Promise:
    return Promise.of(here.node.store.path, WEB)


def images(here: Here) -> dict[str, str]:
    return cast("Images", here.node.store).digests


def test_what_was_promised_goes_with_its_image(here: Here) -> None:
    arriving = reserve(here)
    assert promise(here).is_of(OURS)
    assert promise(here).container_name == "main"
    arriving.record.write(IMAGE, "sha256:00")
    images(here)["web"] = "sha256:00"
    arriving.undo()
    assert not promise(here).exists()
    assert images(here) == {}
    assert not arriving.record.exists()


def test_what_belongs_to_others_of_the_name_stays(here: Here) -> None:
    arriving = reserve(here)
    promise(here).remove(OURS)
    promise(here).make(Plan(migration=THEIRS, name="main"))
    images(here)["web"] = "sha256:11"
    for digest in ("", "sha256:00"):  # before an image of its own had come, and after
        if digest:
            arriving.record.write(IMAGE, digest)
        arriving.undo()
        assert promise(here).is_of(THEIRS)
        assert images(here) == {"web": "sha256:11"}
        with arriving.record.begun():
            pass


def test_a_trial_promises_nothing(here: Here) -> None:
    arriving = reserve(here, trial=True)
    assert not promise(here).exists()
    arriving.undo()
    assert not arriving.record.exists()


@pytest.mark.parametrize("leads", [True, False])
def test_who_is_the_gateway_of_what_comes_says_so(
    here: Here, monkeypatch: pytest.MonkeyPatch, leads: bool
) -> None:
    monkeypatch.setattr("cluster.wiring.leads", lambda _: leads)
    monkeypatch.setattr(Here, "audit", lambda *_, **__: None)
    with contextlib.ExitStack() as stack:
        session = _Session(here, cast("Any", SimpleNamespace(peer="a")), stack)
        assert session._reserve(wanted(here)).leads is leads
        session.end()


def test_an_identity_that_is_none_leaves_no_record(here: Here) -> None:
    with pytest.raises(NetworkError, match="could not read a network identity"):
        reserve(here, identity=b"{}")
    assert not Record(here.config.arrivals, OURS).exists()
    assert not promise(here).exists()


def test_both_nodes_say_the_same_of_their_network(here: Here) -> None:
    with pytest.raises(ShimError, match="name `via` on both, or on neither"):
        reserve(here, routed=True)
    assert not Record(here.config.arrivals, OURS).exists()


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (b"[]", "it holds no JSON object"),
        (b"{", "line 1 column 2"),
        (b"\xff", "utf-8"),
        (json.dumps({"linux": 7}).encode(), r"got `int` - at `\$\.linux`"),
        (
            json.dumps({"mounts": [{"destination": "/x", "source": "a\0b"}]}).encode(),
            r"\$\.mounts\[0\]\.source",
        ),
    ],
)
def test_a_specification_of_another_shape_is_refused(here: Here, spec: bytes, words: str) -> None:
    with pytest.raises(ShimError, match=f"the container's config.json: .*{words}.*; correct it"):
        reserve(here, arrival.Arriving, guest="", spec=spec)
    assert not Record(here.config.arrivals, OURS).exists()
