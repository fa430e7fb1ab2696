"""`torpor net`: a pod's network identity, address leases, and what killed calls left."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from netmig import nft
from netmig.errors import NetworkError
from netmig.lease import DEFAULT_DATA_DIR, RESERVED_PREFIX, HostLocal, Lease
from netmig.pinning import CNIS, as_yaml, render
from netmig.recover import recover as recover_left
from shim import log
from shim.cli import tables
from shim.cli.node import Node, container_ids, this_node
from shim.errors import ShimError, UsageError
from shim.identity import HOST
from shim.images.layout import parse_reference
from shim.leases import prune, release, sleep, sleeping
from shim.state import NETWORK

if TYPE_CHECKING:
    from netmig.identity import Identity

_YOUNG_S = 120.0
"""A lease comes before its container: one as young as this says nothing."""

_NAMESPACE = click.option("--namespace", default="", help="Namespace of an image that is given without one.")
_AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON for machines.")


class _Group(click.Group):
    """Turns errors of the network into one sentence."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except NetworkError as error:
            raise ShimError(str(error)) from error


@click.group("net", cls=_Group)
def command() -> None:
    """Look at pods' addresses, keep them, and clean up after calls that were killed.

    A pod that wakes up can have the address that it had: `torpor net show` says what a pod has, `torpor net
    pin` what a network plugin must be told to give it to a new pod, `torpor net leases` who has which address
    of CNI's host-local, and `torpor net recover` undoes and releases what killed calls left.
    """


def _where(function: Callable[..., None]) -> Callable[..., None]:
    """The options by which a pod is named."""
    for option in (
        click.option("--root", help="State directory of the caller's runtime; looked for if not given."),
        click.option(
            "--netns", "netns_path", type=click.Path(path_type=Path), help="A network namespace by its path."
        ),
        click.option("--container", help="A container by its id, or the beginning of it."),
    ):
        function = option(function)
    return function


def _namespace(node: Node, container: str | None, netns_path: Path | None, root: str | None) -> Path:
    if netns_path is not None:
        return netns_path
    found = node.find_container(container or "", root)
    if found.state.pid <= 0:
        raise ShimError(
            f"could not look at the network of container '{found.state.container_id}': it does not run; "
            "name its namespace with --netns"
        )
    return Path(f"/proc/{found.state.pid}/ns/net")


def _capture(node: Node, path: Path) -> tuple[Identity, tuple[str, ...]]:
    """The identity of a namespace, and what holds it."""
    from netmig import hold
    from netmig.capture import capture
    from netmig.ns import Netns

    nft.use_program(node.tools.nft)
    with Netns.open(path) as netns, Netns.open(HOST) as host:
        return capture(netns, host), hold.tables(netns)


@command.command("show")
@_where
@_AS_JSON
def show(container: str | None, netns_path: Path | None, root: str | None, as_json: bool) -> None:
    """Show the network identity of a pod: interfaces, addresses, routes, and whether it is held.

    \b
      torpor net show --container web
      torpor net show --netns /run/netns/cni-1234
    """
    if (container is None) == (netns_path is None):
        raise UsageError("could not tell which pod to show: give one of --container and --netns")
    node = this_node()
    path = _namespace(node, container, netns_path, root)
    identity, held = _capture(node, path)
    if as_json:
        document = {"netns": str(path), "held_by": held, "identity": msgspec.to_builtins(identity)}
        click.echo(json.dumps(document, indent=2))
        return
    table = tables.table("INTERFACE", "KIND", "ADDRESSES", "MAC", "MTU", "HOST END")
    for link in identity.links:
        addresses = [f"{one.ip}/{one.prefix}" for one in identity.addresses if one.interface == link.name]
        end = f"{link.host.name} in {link.host.bridge or 'no bridge'}" if link.host else "-"
        table.add_row(link.name, link.kind, "\n".join(addresses) or "-", link.mac or "-", str(link.mtu), end)
    tables.console().print(table)
    click.echo(
        f"{len(identity.routes)} routes, {len(identity.rules)} rules, {len(identity.neighbours)} neighbours, "
        f"{len(identity.sysctls)} sysctls, {len(identity.nftables)} nftables objects"
    )
    for warning in identity.warnings:
        click.echo(f"warning: {warning}")
    for name in held:
        click.echo(f"held by table {name}: nothing gets in or out")


@command.command("pin")
@click.argument("cni", type=click.Choice(sorted(CNIS)), metavar="CNI")
@click.option("--image", "reference", help="A checkpoint image: [NAMESPACE/]NAME.")
@_NAMESPACE
@_where
@click.option(
    "--attachment",
    "attachments",
    multiple=True,
    metavar="INTERFACE=NAME",
    help="NetworkAttachmentDefinition of an interface besides the first, for multus and whereabouts.",
)
@_AS_JSON
def pin(
    cni: str,
    reference: str | None,
    namespace: str,
    container: str | None,
    netns_path: Path | None,
    root: str | None,
    attachments: tuple[str, ...],
    as_json: bool,
) -> None:
    """Say what the network plugin CNI must be told to give a new pod the address of an old one.

    Prints the annotations for the new pod, to be set before it is created. The exit status is 1 if this
    plugin cannot keep an address; what to do instead is told.

    \b
      torpor net pin calico --image team/web
      torpor net pin multus --container web --attachment net1=storage/fast
    """
    if sum(given is not None for given in (reference, container, netns_path)) != 1:
        raise UsageError("could not tell whose address to pin: give one of --image, --container and --netns")
    named: dict[str, str] = {}
    for text in attachments:
        interface, sign, name = text.partition("=")
        if not (interface and sign and name):
            raise UsageError(f"could not use --attachment {text}: it is not INTERFACE=NAME")
        named[interface] = name
    node = this_node()
    identity = (
        _image_identity(node, reference, namespace)
        if reference is not None
        else _capture(node, _namespace(node, container, netns_path, root))[0]
    )
    pinning = render(cni, identity, attachments=named)
    if as_json:
        click.echo(json.dumps(asdict(pinning), indent=2))
    else:
        click.echo(as_yaml(pinning), nl=False)
    if not pinning.can_keep:
        raise click.exceptions.Exit(1)


def _image_identity(node: Node, reference: str, namespace: str) -> Identity:
    from shim.identity import read

    image = node.store.resolve(parse_reference(reference, namespace=namespace))
    identity = read(image.path)
    if identity is None:
        raise ShimError(
            f"could not pin the address of image '{reference}': it has no network identity; "
            "make the checkpoint again, or name the pod while it runs"
        )
    return identity


@command.command("leases")
@click.argument("networks", metavar="[NETWORK]...", nargs=-1)
@click.option(
    "--data-dir",
    type=click.Path(path_type=Path),
    default=DEFAULT_DATA_DIR,
    show_default=True,
    help="Where host-local keeps its leases (dataDir of the network's configuration).",
)
@click.option("--free", is_flag=True, help="Free the stale ones.")
@_AS_JSON
def leases(networks: tuple[str, ...], data_dir: Path, free: bool, as_json: bool) -> None:
    """List who has which address of CNI's host-local on this node.

    A lease is `stale` if its container is unknown to every runtime, no network namespace has its address, and
    it is older than two minutes: a pod died without its network being told. `reserved` ones wait for a pod
    that sleeps or moves; `young` ones may be of a pod that is only coming to be. Networks that other plugins
    give addresses to are not shown.
    """
    node = this_node()
    stores = [HostLocal(name, data_dir) for name in networks or _networks(data_dir)]
    for path in [store.path for store in stores] or [data_dir]:
        # A node on which host-local never gave an address has not even the default directory.
        if not path.is_dir() and path != DEFAULT_DATA_DIR:
            raise ShimError(f"could not list leases: there is no directory {path}; correct the name")
    rows = [(store, lease) for store in stores for lease in store.leases()]
    states = _states([lease for _, lease in rows])
    if free:
        for image, addresses in prune(node.config.store_path, sleeping(node.store)).items():
            _audit(node, "lease freed", f"image {image}", *addresses)
        for store, lease in rows:
            if states[lease] == "stale" and store.release(lease.ip, lease.owner):
                states[lease] = "freed"
                _audit(node, "lease freed", lease.owner.container_id, lease.ip)
    if as_json:
        documents = [
            {
                "network": store.path.name,
                "address": lease.ip,
                "container": lease.owner.container_id,
                "interface": lease.owner.ifname,
                "age_s": round(lease.age_s, 1),
                "state": states[lease],
            }
            for store, lease in rows
        ]
        click.echo(json.dumps(documents, indent=2))
        return
    if not rows:
        click.echo(f"no leases of host-local below {data_dir}")
        return
    table = tables.table("NETWORK", "ADDRESS", "STATE", "CONTAINER", "INTERFACE", "AGE")
    for store, lease in rows:
        name = lease.owner.container_id
        # A sandbox's id is 64 digits; its beginning is what other lists show.
        short = name[:13] if len(name) > 24 else name
        cells = (store.path.name, lease.ip, states[lease], short, lease.owner.ifname)
        table.add_row(*map(tables.plain, cells), f"{lease.age_s:.0f} s")
    tables.console().print(table)


def _audit(node: Node, event: str, owner: str, *addresses: str) -> None:
    log.audit(node.config.store_path, event, container=owner, verdict=", ".join(addresses))


def _networks(data_dir: Path) -> list[str]:
    if not data_dir.is_dir():
        return []
    return sorted(path.name for path in data_dir.iterdir() if path.is_dir())


def _states(found: list[Lease]) -> dict[Lease, str]:
    from netmig.census import in_use

    alive = container_ids()
    unknown = [lease for lease in found if lease.owner.container_id not in alive]
    seen = in_use(lease.ip for lease in unknown)
    states: dict[Lease, str] = {}
    for lease in found:
        if lease.owner.container_id in alive or lease.ip in seen:
            states[lease] = "in use"
        elif lease.owner.container_id.startswith(RESERVED_PREFIX):
            states[lease] = "reserved"
        else:
            states[lease] = "young" if lease.age_s < _YOUNG_S else "stale"
    return states


@command.command("reserve")
@click.argument("reference", metavar="IMAGE")
@_NAMESPACE
def reserve_addresses(reference: str, namespace: str) -> None:
    """Keep the addresses that the container in IMAGE had, until it wakes up or IMAGE is removed.

    To be called while its pod is there. `torpor checkpoint --stop --keep-tcp` does it by itself.
    """
    node = this_node()
    image = node.store.resolve(parse_reference(reference, namespace=namespace))
    kept = sleep(node.store, image)
    if not kept:
        raise ShimError(
            f"could not reserve the addresses of image '{reference}': host-local gave its pod none; "
            "see `torpor net pin` for other plugins"
        )
    _audit(node, "lease reserved", f"image {image.reference}", *kept)
    click.echo(f"reserved {', '.join(kept)}")


@command.command("release")
@click.argument("reference", metavar="IMAGE")
@_NAMESPACE
def release_addresses(reference: str, namespace: str) -> None:
    """Give the addresses that are reserved for IMAGE back, for a network plugin that is told to give them.

    Again does no harm.
    """
    node = this_node()
    image = node.store.resolve(parse_reference(reference, namespace=namespace))
    freed = release(node.config.store_path, image.digest)
    if freed:
        _audit(node, "lease freed", f"image {image.reference}", *freed)
    click.echo(f"released {', '.join(freed)}" if freed else "nothing is reserved for it")


@command.command("recover")
@click.option("--dry-run", is_flag=True, help="Only say what would be done.")
@_AS_JSON
def recover(dry_run: bool, as_json: bool) -> None:
    """Undo and release what calls that were killed left of the network.

    A call writes down each change and each hold before it makes it. What belongs to a call at work is left
    alone, and so are both sides of a migration that awaits its decision. The exit status is 1 if something
    could not be undone. Doing it again does no harm.
    """
    node = this_node()
    nft.use_program(node.tools.nft)
    found = recover_left(node.config.state_path / NETWORK, dry_run=dry_run)
    for one in found:
        if not dry_run and one.outcome in {"undone", "released", "failed"}:
            verdict = f"{one.outcome}: {one.detail}"
            log.audit(node.config.store_path, f"net {one.kind}", container=one.owner, verdict=verdict)
    if as_json:
        documents = [{**asdict(one), "path": str(one.path)} for one in found]
        click.echo(json.dumps(documents, indent=2))
    elif not found:
        click.echo("nothing is left of any call")
    else:
        table = tables.table("WHAT", "OF", "OUTCOME", "DETAIL")
        for one in found:
            would_be = dry_run and one.outcome in {"undone", "released"}
            outcome = f"would be {one.outcome}" if would_be else one.outcome
            table.add_row(one.kind, tables.plain(one.owner), outcome, tables.plain(one.detail))
        tables.console().print(table)
    if any(one.outcome == "failed" for one in found):
        raise click.exceptions.Exit(1)
