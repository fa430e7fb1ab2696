"""When a call is torpor's: annotations in any spelling of JSON, state directories, settings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shim.argv import parse
from shim.entry import container_dir, decide, read_settings


def _create(bundle: Path, text: str, **settings: str) -> bool:
    (bundle / "config.json").write_text(text)
    return decide(
        parse(["create", "--bundle", str(bundle), "c1"]), {"STATE": str(bundle / "state"), **settings}
    )


@pytest.mark.parametrize(
    "text",
    [
        '{"annotations": {"torpor.dev/restore-from.c": "x"}}',
        '{"annotations": {"torpor.dev\\/restore-from.c": "x"}}',
        '{"annotations": {"\\u0074orpor.dev/restore-from.c": "x"}}',
        '{"annotations": {"torpor\\u002edev/restore-from.c": "x"}}',
        '{"annotations": {"torpor.dev\\u002Frestore-from.c": "x"}}',
        '{"annotations": {"org.criu.config": "x"}}',
        '{"annotations": {"org\\u002Ecriu.config": "x"}}',
        '{"annotations": {"\\u006f\\u0072\\u0067\\u002e\\u0063\\u0072\\u0069\\u0075\\u002econfig": "x"}}',
    ],
)
def test_an_annotation_is_found_in_every_spelling(tmp_path: Path, text: str) -> None:
    assert any(key.startswith(("torpor.dev/", "org.criu.")) for key in json.loads(text)["annotations"])
    assert _create(tmp_path, text)


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        '{"process": {"args": ["sh", "-c", "a \\u0026\\u0026 b \\u003e c \\u003c d"]}}',
        '{"process": {"args": ["caf\\u00e9 \\u2028 \\ud83d\\ude00 \\u0000"]}}',
        '{"root": {"path": "\\/var\\/lib\\/rootfs"}}',
        '{"process": {"args": ["\\\\u00", "\\\\u00zz"]}}',
    ],
)
def test_ordinary_escapes_are_not_taken_for_one(tmp_path: Path, text: str) -> None:
    assert not _create(tmp_path, text)


def test_other_tools_annotations_count_where_the_node_allows_them(tmp_path: Path) -> None:
    text = json.dumps({"annotations": {"restore.criu.org/checkpoint-path.c": "x"}})
    assert not _create(tmp_path, text)
    assert not _create(tmp_path, text, FOREIGN="0")
    assert _create(tmp_path, text, FOREIGN="1")


def test_the_working_directory_is_the_bundle_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text('{"annotations": {"torpor.dev/x": ""}}')
    assert decide(parse(["create", "c1"]), {})


def test_crun_may_name_another_configuration_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "other.json").write_text('{"annotations": {"org.criu.config": ""}}')
    call = parse(["create", "--bundle", str(tmp_path), "--config", "other.json", "c1"], "crun")
    assert decide(call, {})


@pytest.mark.parametrize("case", ["no bundle", "a directory", "no right"])
def test_a_configuration_that_cannot_be_read_is_the_runtimes_to_complain_about(
    tmp_path: Path, case: str
) -> None:
    if case == "a directory":
        (tmp_path / "config.json").mkdir()
    if case == "no right":
        (tmp_path / "config.json").symlink_to("config.json")
    bundle = tmp_path / "none" if case == "no bundle" else tmp_path
    assert not decide(parse(["create", "-b", str(bundle), "c1"]), {"STATE": str(tmp_path)})


def test_containers_of_different_roots_do_not_meet(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    settings = {"STATE": "/s"}
    real = container_dir(settings, str(tmp_path / "real"), "c1")
    assert container_dir(settings, str(tmp_path / "link"), "c1") == real
    assert container_dir(settings, "/a/b", "c1") == "/s/containers/%2Fa%2Fb/c1"
    assert container_dir(settings, "/a%2Fb", "c1") == "/s/containers/%2Fa%252Fb/c1"
    assert container_dir({}, "/r", "c1") == "/run/torpor/containers/%2Fr/c1"


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "/x"])
def test_a_container_id_cannot_lead_elsewhere(name: str) -> None:
    with pytest.raises(ValueError, match="container id"):
        container_dir({}, "/r", name)
    assert not decide(parse(["delete", name]), {})


def test_settings_are_lines_of_key_and_value(tmp_path: Path) -> None:
    path = tmp_path / "runtime.conf"
    path.write_bytes(b"# RUNTIME=/no\nRUNTIME=/a=b\n STATE = /s \n\nnonsense\nSTORE=/caf\xe9\n")
    assert read_settings(str(path)) == {"RUNTIME": "/a=b", "STATE": "/s", "STORE": "/caf\udce9"}
    assert read_settings(str(tmp_path / "none")) == {}
