"""File names inside a checkpoint image, and how an image is named.

The names inside are the ones that containerd, CRI-O, Podman and checkpointctl share, so that their tools can
read what torpor wrote.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from engines.api import ImageCorrupt
from shim.errors import UsageError

CHECKPOINT = "checkpoint"  # directory: what the engine wrote
# Below `checkpoint/`, where its memory was copied beforehand: what the engine wrote then, and so on down. To
# CRIU it is a link; in an image it is always the directory itself, so that nothing leads out.
PARENT = "parent"
# Torpor's files inside `checkpoint/` when a runtime caller makes the archive. While they are written they
# lie in a directory; then each gets a prefix, because containerd copies an image directory as a flat list.
EXTRAS = "torpor"
EXTRAS_PREFIX = "torpor-"
MANIFEST = "manifest.json"
NEEDS = "needs.json"
CONFIG_DUMP = "config.dump"
SPEC_DUMP = "spec.dump"
NETWORK_STATUS = "network.status"
NETWORK = "network.json"  # the identity of the container's network namespace, where it was not its own
ROOTFS_DIFF = "rootfs-diff.tar"
DELETED_FILES = "deleted.files"
DUMP_LOG = "dump.log"
STATS_DUMP = "stats-dump"
TIMINGS = "timings.json"
PENDING = "pending.json"  # the source may still die or run on: nobody may restore yet

# Not in the digest: known only when the image is closed, and told, not trusted. A caller that names no work
# directory has the engine's log and statistics among the engine's files.
UNSEALED = frozenset(
    [
        MANIFEST,
        TIMINGS,
        PENDING,
        *(place + name for place in ("", "checkpoint/") for name in (DUMP_LOG, STATS_DUMP)),
    ]
)

_WRITERS = {"inventory.img": "criu", "checkpoint.img": "gvisor"}

NO_NAMESPACE = "_"  # directory of images that belong to no namespace; no valid namespace is spelled so
MAX_NAME_CHARS = 128

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?", re.ASCII)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}", re.ASCII)
_PAGES = re.compile(r"checkpoint/(?:parent/)*(?:(?:amdgpu-)?pages-[^/]*|pages)\.img", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Which image is meant. namespace: "" outside Kubernetes. digest: "sha256:..." or None for any."""

    namespace: str
    name: str
    digest: str | None = None

    def __str__(self) -> str:
        text = f"{self.namespace}/{self.name}" if self.namespace else self.name
        return f"{text}@{self.digest}" if self.digest else text

    @property
    def directory(self) -> str:
        """Where the image lies below the store's `images/`."""
        return f"{self.namespace or NO_NAMESPACE}/{self.name}"

    def with_digest(self, digest: str) -> Reference:
        """The same name, bound to one content."""
        return replace(self, digest=digest)


def writer_of(directory: Path, named: str | None) -> str:
    """The engine that wrote a directory, by the files that only it writes; never by a document alone.

    named: what a manifest says, None without one. It may name an engine built on that one ("criu-cuda" on
    "criu"). Raises ImageCorrupt if the files are of no engine or of several, or of another one.
    """
    found = [engine for name, engine in _WRITERS.items() if (directory / name).is_file()]
    if len(found) != 1:
        raise ImageCorrupt(
            "could not read the image: it holds neither an image of CRIU (inventory.img) nor one of gVisor "
            "(checkpoint.img), or both; name the directory or the archive that a checkpoint was written to"
        )
    if named is not None and named.partition("-")[0] != found[0]:
        raise ImageCorrupt(
            f"could not read the image: its manifest names engine {named[:40]!a}, but {found[0]} wrote it; "
            "make it again"
        )
    return named or found[0]


def is_page_file(name: str) -> bool:
    """Whether the file (relative to the image) holds memory pages: large, and hashed only once."""
    return _PAGES.fullmatch(name) is not None


def check_name(text: str, what: str = "image name") -> str:
    """Return `text` if it can name an image or a namespace, else raise UsageError.

    Letters, digits, '.', '_' and '-', with a letter or digit at both ends, no '..', at most 128 characters:
    such a name is one path component, cannot be taken for an option and reads the same everywhere.
    """
    if len(text) > MAX_NAME_CHARS:
        raise UsageError(
            f"could not use {what} {text[:32]!r}...: it has {len(text)} characters; use at most 128"
        )
    if _NAME.fullmatch(text) is None or ".." in text:
        raise UsageError(
            f"could not use {what} {text!r}: only letters, digits, '.', '_' and '-' are allowed, with a "
            "letter or digit at both ends and no '..'; choose another name"
        )
    return text


def parse_reference(text: str, *, namespace: str) -> Reference:
    """Read `[NAMESPACE/]NAME[@sha256:HEX]`.

    namespace: the namespace of a reference that names none ("" outside Kubernetes). Whether a pod may use an
    image of another namespace is for admission to judge. Raises UsageError.
    """
    path, at, digest = text.partition("@")
    if at and _DIGEST.fullmatch(digest) is None:
        raise UsageError(
            f"could not read image reference {text[:200]!r}: after '@' stands no digest; "
            "write sha256: and 64 hex digits"
        )
    own, slash, name = path.rpartition("/")
    if slash:
        namespace = check_name(own, "namespace")
    elif namespace:
        check_name(namespace, "namespace")
    return Reference(namespace=namespace, name=check_name(name), digest=digest or None)
