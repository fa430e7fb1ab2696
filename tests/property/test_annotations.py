"""Annotations come from whoever may make a pod: any set of them is read or refused in one sentence."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shim.annotations import read
from shim.errors import AdmissionRefused

NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12)
CONTAINERS = st.sampled_from(["", "app", "sidecar", "a.b"])
KEYS = st.one_of(
    st.builds(
        "torpor.dev/{}{}".format, st.sampled_from(["restore-from", "use", "network", "engine", "us"]), NAMES
    ),
    st.builds(
        "torpor.dev/{}.{}".format, st.sampled_from(["restore-from", "use", "checkpointable"]), CONTAINERS
    ),
    st.builds("restore.criu.org/checkpoint-path.{}".format, CONTAINERS),
    st.builds("org.criu.{}".format, NAMES),
    NAMES,
)
VALUES = st.one_of(NAMES, st.sampled_from(["clone", "move", "true", "/a/b", "ns/name"]))


@given(st.dictionaries(KEYS, VALUES, max_size=6), CONTAINERS, st.booleans())
def test_read_or_refused(asked: dict[str, str], container: str, foreign: bool):
    annotations = {**asked, "io.kubernetes.cri.container-name": container} if container else asked
    try:
        wish = read({"annotations": annotations}, foreign=foreign)
    except AdmissionRefused as error:
        assert str(error)
        return
    # Nothing of CRIU's own gets through, and what is asked stands in the annotations for this container.
    assert not any(key.startswith("org.criu.") for key in annotations)
    if wish.restore_from is not None:
        own = f"torpor.dev/restore-from.{container}"
        assert wish.restore_from == annotations.get(own, annotations.get("torpor.dev/restore-from"))
        assert wish.bare == (bool(container) and own not in annotations)
    if wish.foreign_path is not None:
        assert foreign
        assert ".." not in wish.foreign_path.parts
    assert not wish.applies_to("another") or not wish.bare


@given(st.dictionaries(KEYS, VALUES, max_size=6))
def test_sandboxes_ask_for_nothing(asked: dict[str, str]):
    annotations = {**asked, "io.kubernetes.cri.container-type": "sandbox"}
    if any(key.startswith("org.criu.") for key in annotations):
        return
    wish = read({"annotations": annotations}, foreign=True)
    assert wish.sandbox
    assert not wish.restores
