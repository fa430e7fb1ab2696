"""The addresses of a container that sleeps stay leased to it, where CNI's host-local gives them.

When its pod goes, the network plugin frees the pod's leases. So they are handed over beforehand to a
reservation, whose id is the image's, and from there to the pod in which the image wakes up. What is reserved
is on record:

    STORE/leases/<digest>.json

written before the hand-over and removed after the release, so that `prune` finds what belongs to an image
that was removed, or used up, whenever that was.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, cast

import msgspec

from netmig.errors import NetworkError
from netmig.identity import Address, global_addresses
from netmig.lease import RESERVED_PREFIX, HostLocal, Owner
from shim.errors import ShimError
from shim.identity import read as read_identity
from shim.images.beneath import read_plain
from shim.images.documents import MAX_DOCUMENT_BYTES
from shim.images.layout import SPEC_DUMP
from shim.images.spec import parse
from shim.images.store import BrokenImage, Image, Store

CNI_RESULTS = Path("/var/lib/cni/results")
"""Where libcni notes what each plugin was asked and answered."""

LEASES = "leases"  # below the image store
_SUFFIX = ".json"


class Lease(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One reserved address, and the network that gives it."""

    ip: str
    ifname: str
    network: str
    data_dir: str

    @property
    def store(self) -> HostLocal:
        return HostLocal(self.network, Path(self.data_dir))


class Reservation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The addresses of one image. image: its name, for people."""

    schema: Literal[1]
    image: str
    leases: tuple[Lease, ...]


Plugins = Mapping[str, tuple[HostLocal, Owner]]
"""Interface of a pod to the network's leases and the pod's owner in them."""


def owner_id(digest: str) -> str:
    """Whom the addresses of a sleeping image are leased to. digest: of its manifest."""
    return f"{RESERVED_PREFIX}{digest.removeprefix('sha256:')[:20]}"


def plugins_of(netns_path: Path, results: Path = CNI_RESULTS) -> Plugins:
    """The host-local networks that set up a pod's namespace, by libcni's notes of it."""
    found: dict[str, tuple[HostLocal, Owner]] = {}
    for path in sorted(results.glob("*")):
        note = _note(path)
        if not _is_same(Path(str(note.get("netns"))), netns_path):
            continue
        with contextlib.suppress(NetworkError, ValueError, KeyError, TypeError):
            conf = json.loads(base64.b64decode(note["config"]))
            owner = Owner(container_id=str(note["containerId"]), ifname=str(note["ifName"]))
            found[owner.ifname] = (HostLocal.of(conf), owner)
    return found


def sleep(store: Store, image: Image) -> tuple[str, ...]:
    """Reserve the addresses of an image whose container has been stopped, while its pod is still there.

    Returns the reserved ones: none if its network's addresses are not host-local's. Raises ShimError,
    ImageCorrupt, NetworkError.
    """
    identity = read_identity(image.path)
    path = _netns_path(image)
    if identity is None or path is None:
        return ()
    prune(store.path, sleeping(store))
    return keep(store.path, image.digest, str(image.reference), global_addresses(identity), plugins_of(path))


def sleeping(store: Store) -> Callable[[str], bool]:
    """Is there an image of a digest that may yet wake up? One that cannot be read may be of any digest."""
    digests: set[str] = set()
    for image in store.entries():
        if isinstance(image, BrokenImage):
            return lambda _: True
        if not store.consumed_by(image):
            digests.add(image.digest)
    return digests.__contains__


def _netns_path(image: Image) -> Path | None:
    spec = parse(read_plain(image.path, SPEC_DUMP, MAX_DOCUMENT_BYTES), what=SPEC_DUMP)
    paths = [one.path for one in spec.linux.namespaces or () if one.type == "network" and one.path]
    return Path(paths[0]) if paths else None


def keep(
    store_path: Path, digest: str, image: str, addresses: Iterable[Address], plugins: Plugins
) -> tuple[str, ...]:
    """Reserve a sleeping container's addresses; what no host-local gives is passed by.

    store_path: of the image store. Returns those reserved. Raises NetworkError if an address is not the pod's
    any more; what was reserved until then stays so.
    """
    wanted = [one for one in addresses if one.ifname in plugins]
    if not wanted:
        return ()
    leases = tuple(
        Lease(ip=one.ip, ifname=one.ifname, network=store.path.name, data_dir=str(store.path.parent))
        for one in wanted
        for store, _ in (plugins[one.ifname],)
    )
    _write(_path(store_path, digest), Reservation(schema=1, image=image, leases=leases))
    for lease in leases:
        store, owner = plugins[lease.ifname]
        ours = Owner(container_id=owner_id(digest), ifname=lease.ifname)
        if store.owner(lease.ip) is None:
            store.reserve(lease.ip, ours)
        else:
            store.hand_over(lease.ip, owner, ours)
    return tuple(lease.ip for lease in leases)


def read(store_path: Path) -> dict[str, Reservation]:
    """Every reservation, by the digest of its image. Raises ShimError for a record that cannot be read."""
    found: dict[str, Reservation] = {}
    for path in sorted((store_path / LEASES).glob(f"*{_SUFFIX}")):
        try:
            reservation = msgspec.json.decode(path.read_bytes(), type=Reservation)
        except FileNotFoundError:
            continue
        except (OSError, msgspec.MsgspecError) as error:
            raise ShimError(
                f"could not read lease record '{path}': {error}; free its addresses by `torpor net leases`, "
                "and remove it"
            ) from error
        found[f"sha256:{path.name.removesuffix(_SUFFIX)}"] = reservation
    return found


def release(store_path: Path, digest: str) -> tuple[str, ...]:
    """Give the addresses of an image back; those that a pod has got meanwhile stay with it. Idempotent.

    Returns those given back. Raises ShimError, NetworkError.
    """
    reservation = read(store_path).get(digest)
    if reservation is None:
        return ()
    freed = tuple(
        lease.ip
        for lease in reservation.leases
        if lease.store.release(lease.ip, Owner(container_id=owner_id(digest), ifname=lease.ifname))
    )
    _path(store_path, digest).unlink(missing_ok=True)
    return freed


def prune(store_path: Path, sleeps: Callable[[str], bool]) -> dict[str, tuple[str, ...]]:
    """Release the addresses of images that will not wake up any more.

    sleeps: whether there is an image of this digest that is not used up. Returns the addresses by image name.
    Raises ShimError, NetworkError.
    """
    return {
        reservation.image: release(store_path, digest)
        for digest, reservation in read(store_path).items()
        if not sleeps(digest)
    }


def _path(store_path: Path, digest: str) -> Path:
    return store_path / LEASES / f"{digest.removeprefix('sha256:')}{_SUFFIX}"


def _write(path: Path, reservation: Reservation) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_suffix(".new")
    with draft.open("wb") as file:
        file.write(msgspec.json.encode(reservation))
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _is_same(one: Path, other: Path) -> bool:
    """Two paths of one namespace: a pin, and perhaps /proc/PID/ns/net."""
    try:
        return one.samefile(other)
    except OSError:
        return False


def _note(path: Path) -> Mapping[str, Any]:
    try:
        found: object = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}
