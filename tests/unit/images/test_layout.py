from __future__ import annotations

from pathlib import Path

import pytest

from engines.api import ImageCorrupt
from shim.errors import UsageError
from shim.images.layout import Reference, is_page_file, parse_reference, writer_of

DIGEST = "sha256:" + "a" * 64


@pytest.mark.parametrize(
    ("text", "namespace", "wanted"),
    [
        ("web", "", Reference(namespace="", name="web")),
        ("web", "shop", Reference(namespace="shop", name="web")),
        ("shop/web", "other", Reference(namespace="shop", name="web")),
        (f"web@{DIGEST}", "shop", Reference(namespace="shop", name="web", digest=DIGEST)),
        (f"shop/web@{DIGEST}", "", Reference(namespace="shop", name="web", digest=DIGEST)),
        ("Web.2_b-3", "", Reference(namespace="", name="Web.2_b-3")),
    ],
)
def test_reference(text: str, namespace: str, wanted: Reference) -> None:
    found = parse_reference(text, namespace=namespace)
    assert found == wanted
    assert parse_reference(str(found), namespace="") == found


@pytest.mark.parametrize(
    "text",
    [
        "",
        "..",
        "../etc",
        "a/../b",
        "a/b/c",
        "/a",
        "a/",
        "-a",
        "a-",
        ".a",
        "a..b",
        "a b",
        "a\0b",
        "a\n",
        "a:b",
        "é",
        "٣",
        "_/a",
        "x" * 300,
        "a@sha256:short",
        f"a@{DIGEST.upper()}",
        "a@",
        f"a@{DIGEST}\n",
        f"@{DIGEST}",
    ],
)
def test_name_that_is_no_plain_component_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="could not"):
        parse_reference(text, namespace="ns")


def test_namespace_of_the_caller_is_checked_too() -> None:
    with pytest.raises(UsageError, match="namespace"):
        parse_reference("a", namespace="../etc")


def test_page_files() -> None:
    pages = ["checkpoint/pages-1.img", "checkpoint/amdgpu-pages-7.img", "checkpoint/pages.img"]
    pages += ["checkpoint/parent/pages-1.img", "checkpoint/parent/parent/pages-1.img"]
    others = [
        "checkpoint/pages_meta.img",
        "checkpoint/pagemap-1.img",
        "pages-1.img",
        "checkpoint/x/pages-1.img",
        "checkpoint/xparent/pages-1.img",
        "checkpoint/parent/x/pages-1.img",
    ]
    assert all(map(is_page_file, pages))
    assert not any(map(is_page_file, others))


@pytest.mark.parametrize(
    ("files", "named", "engine"),
    [
        (("inventory.img",), None, "criu"),
        (("inventory.img",), "criu", "criu"),
        (("inventory.img",), "criu-cuda", "criu-cuda"),
        (("checkpoint.img",), None, "gvisor"),
        (("inventory.img",), "gvisor", ""),
        (("inventory.img",), "fake", ""),
        (("inventory.img",), "", ""),
        (("checkpoint.img",), "criu", ""),
        (("inventory.img", "checkpoint.img"), "criu", ""),
        ((), "fake", ""),
        ((), None, ""),
    ],
)
def test_files_tell_who_wrote_an_image(
    tmp_path: Path, files: tuple[str, ...], named: str | None, engine: str
) -> None:
    """A document beside them can choose among the engines that build on that one, and no other."""
    for name in files:
        (tmp_path / name).touch()
    if engine:
        assert writer_of(tmp_path, named) == engine
    else:
        with pytest.raises(ImageCorrupt):
            writer_of(tmp_path, named)
