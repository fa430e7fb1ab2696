"""What the verdict is asked about: this node as it is now, and what is known of an image of the store."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from compat import profile, verdict
from compat.probes.base import System
from compat.profile import Profile
from compat.rules.case import Origin, part
from engines.api import Finding, ImageCorrupt, Needs
from shim import admission, bundle, shape, state
from shim.checkpointable import without_io_uring
from shim.config import Config
from shim.images import layout
from shim.images.beneath import read_plain
from shim.images.documents import MAX_DOCUMENT_BYTES
from shim.images.manifest import Manifest, Use, seccomp_digest
from shim.images.store import Image, Store
from shim.network import Tcp
from shim.network import judge as network_judge
from shim.pod import identify
from shim.toolchain.find import default_prefix, search_path

PROFILE = "profile.json"
_ENGINES = ("criu", "runc", "runsc")
"""Programs whose versions decide whether a restore works."""


def stable(config: Config) -> Profile:
    """What this node is, from the cache: read anew after a boot and when a tool was replaced."""
    with contextlib.suppress(OSError):  # it is only slower
        state.make_private(config.state_path)
    return profile.load(config.state_path / PROFILE, _system(config))


def now(config: Config, bundle_path: Path) -> Profile:
    """The same, with the memory and the disk that are free. bundle_path: the new container's."""
    return profile.now(stable(config), replace(_system(config), bundle_path=bundle_path))


def _system(config: Config) -> System:
    path = search_path((config.tools_path or default_prefix()).absolute())
    found = {name: shutil.which(name, path=path) for name in _ENGINES}
    return System(
        tools={name: Path(place) for name, place in found.items() if place},
        search_path=path,
        store_path=config.store_path,
    )


def origin(
    image: Image, store: Store, spec: Mapping[str, Any] | None = None, *, use: Use | None = None
) -> Origin:
    """What is known of an image beside its needs.

    spec: the new container's, None if only a node is asked. use: what the restore asks for, None for what the
    image says of itself. Raises ImageCorrupt.
    """
    manifest = image.manifest
    diff = manifest.files.get(layout.ROOTFS_DIFF)
    return Origin(
        # Of a pod's image only the container that was asked to sleep has its specification there.
        dump_spec=_dump_spec(image, spec) if type(image) is Image else None,
        rootfs_bytes=diff.size_bytes if diff else 0,
        image_ref=manifest.source.image_ref,
        leave_running=manifest.leave_running,
        use=use or manifest.effective_use,
        used_by=store.consumed_by(image) or "",
    )


def image_ref(spec: Mapping[str, Any]) -> str:
    """The container image of a container, "" where its caller does not say."""
    return identify(spec.get("annotations") or {}).image_ref


def _dump_spec(image: Image, spec: Mapping[str, Any] | None) -> dict[str, Any] | None:
    try:
        dumped = shape.checked(json.loads(read_plain(image.path, layout.SPEC_DUMP, MAX_DOCUMENT_BYTES)))
    except FileNotFoundError:
        return None  # some archives carry none
    except (OSError, ValueError, RecursionError) as error:
        raise ImageCorrupt(
            f"could not read spec.dump of image '{image.reference}': {error}; import the image again"
        ) from error
    if spec is None:
        return dumped
    # The rule against io_uring only takes away, and is no edit of anybody's.
    recorded = image.manifest.security.seccomp_digest
    if recorded == seccomp_digest(part(part(without_io_uring(spec), "linux"), "seccomp")):
        dumped = {**dumped, "linux": {**part(dumped, "linux"), "seccomp": part(spec, "linux").get("seccomp")}}
    return dumped


def examine(
    config: Config,
    spec: bundle.Spec,
    needs: Needs,
    manifest: Manifest | None,
    *,
    bundle_path: Path,
    tcp: Tcp = "close",
    coming: Collection[str] = (),
    origin: Origin | None = None,
) -> tuple[Finding, ...]:
    """Judge whether what is in an image may run in a container of this spec, on this node.

    bundle_path: the new container's, whose root file system tells where its mounts really go. tcp: what is to
    become of connections; coming: addresses that the container will be given; origin: what else is known of
    the image. Raises ShimError if a namespace of the spec cannot be entered.
    """
    rootfs_path = bundle.rootfs_path(bundle_path, spec)
    findings = admission.check(
        spec,
        needs,
        manifest,
        allowed_hooks=config.allowed_hooks,
        rootfs_path=rootfs_path,
    )
    findings += verdict.judge(
        needs,
        spec,
        dump_host=manifest.host if manifest else None,
        rootfs_path=rootfs_path,
        node=now(config, rootfs_path or bundle_path),
        origin=origin,
        new_image_ref=image_ref(spec),
    )
    findings = tuple(_overruled(config, finding) for finding in findings)
    return findings + network_judge(needs, spec, tcp=tcp, coming=coming)


def _overruled(config: Config, finding: Finding) -> Finding:
    """A refusal that this node's configuration makes a warning."""
    if finding.severity != "refuse" or finding.rule not in config.overruled:
        return finding
    return replace(
        finding, severity="warn", message=f"{finding.message} (overruled by this node's configuration)"
    )
