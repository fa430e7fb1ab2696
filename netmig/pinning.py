"""What each CNI plugin must be told to give a pod the address it had, and which cannot.

Where the plugin itself gives the old address nothing else is needed: `status.podIP`, Services and policies
stay right. All this is from the plugins' own documents; only host-local and static were tried here.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from netmig.errors import NetworkError
from netmig.identity import Address, Identity, global_addresses

PRIMARY = "eth0"
"""Kubernetes' name of the interface that a pod is known by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pinning:
    """How a CNI plugin keeps a pod's addresses.

    annotations: for the new pod, before it is created. can_keep: whether they make it have the old address.
    sentence: what they do, or why it cannot be done and what to do instead. ipam: a piece of the network's
    own configuration that is needed beside them.
    """

    cni: str
    can_keep: bool
    sentence: str
    annotations: dict[str, str] = field(default_factory=dict[str, str])
    ipam: dict[str, Any] = field(default_factory=dict[str, Any])


def render(cni: str, identity: Identity, *, attachments: Mapping[str, str] | None = None) -> Pinning:
    """Say how a plugin is told to give this identity's addresses to another pod.

    cni: one of `CNIS`. attachments: interface to NetworkAttachmentDefinition ("name" or "namespace/name"),
    for multus and whereabouts, which give the interfaces besides the first. Raises NetworkError for an
    unknown plugin, an identity without addresses, and addresses that the plugin's annotation has no room for.
    """
    if cni not in CNIS:
        raise NetworkError(
            f"could not pin an address with CNI '{cni}': it is not known; use {', '.join(CNIS)}"
        )
    addresses = global_addresses(identity)
    if not addresses:
        raise NetworkError(
            f"could not pin an address with CNI '{cni}': the identity has none; take another image"
        )
    return CNIS[cni](addresses, attachments or {})


def _calico(addresses: tuple[Address, ...], _: Mapping[str, str]) -> Pinning:
    mine = _primary("calico", addresses, one_per_family=True)
    return Pinning(
        cni="calico",
        can_keep=True,
        sentence=(
            "Calico's IPAM gives these addresses if they lie in one of its pools and are free: the old pod "
            "must be gone before the new one is created; an IPReservation keeps others from them in between."
        ),
        annotations={
            "cni.projectcalico.org/ipAddrs": json.dumps([one.ip for one in mine]),
            "cni.projectcalico.org/hwAddr": mine[0].mac,
        },
    )


def _kube_ovn(addresses: tuple[Address, ...], _: Mapping[str, str]) -> Pinning:
    mine = _primary("kube-ovn", addresses, one_per_family=True)
    return Pinning(
        cni="kube-ovn",
        can_keep=True,
        sentence=(
            "Kube-OVN's controller gives these addresses if they lie in the subnet of the pod's namespace "
            "and nobody has them: the old pod must be gone first."
        ),
        annotations={
            "ovn.kubernetes.io/ip_address": ",".join(one.ip for one in mine),
            "ovn.kubernetes.io/mac_address": mine[0].mac,
        },
    )


def _ovn_kubernetes(addresses: tuple[Address, ...], _: Mapping[str, str]) -> Pinning:
    mine = _primary("ovn-kubernetes", addresses, one_per_family=True)
    element = {
        "name": "default",
        "namespace": "ovn-kubernetes",
        "ips": [f"{one.ip}/{one.prefix}" for one in mine],
        "mac": mine[0].mac,
    }
    return Pinning(
        cni="ovn-kubernetes",
        can_keep=True,
        sentence=(
            "OVN-Kubernetes gives these addresses only on a primary user-defined network of topology "
            "Layer2, with preconfigured-udn-addresses-enable, and if nobody has them; on the cluster's "
            "default network and in Layer3 networks it cannot, and k8s.ovn.org/pod-networks is its "
            "controller's to write."
        ),
        annotations={"v1.multus-cni.io/default-network": json.dumps([element])},
    )


def _multus(addresses: tuple[Address, ...], attachments: Mapping[str, str]) -> Pinning:
    return Pinning(
        cni="multus",
        can_keep=True,
        sentence=(
            "Multus hands these addresses to secondary networks whose configuration has the capabilities "
            "ips and mac and the IPAM static; the first interface is the cluster network's own matter."
        ),
        annotations={"k8s.v1.cni.cncf.io/networks": _selection("multus", addresses, attachments)},
        ipam={"type": "static"},
    )


def _whereabouts(addresses: tuple[Address, ...], attachments: Mapping[str, str]) -> Pinning:
    return Pinning(
        cni="whereabouts",
        can_keep=False,
        sentence=(
            "Whereabouts always gives the lowest free address and takes no request: exclude these from "
            "its range, and attach the pod to a network of the same segment whose IPAM is static (this "
            "annotation, by Multus)."
        ),
        annotations={"k8s.v1.cni.cncf.io/networks": _selection("whereabouts", addresses, attachments)},
        ipam={
            "type": "whereabouts",
            "exclude": [f"{one.ip}/{32 if one.version == 4 else 128}" for one in _secondary(addresses)],
        },
    )


def _cilium(addresses: tuple[Address, ...], _: Mapping[str, str]) -> Pinning:
    mine = _primary("cilium", addresses)
    return Pinning(
        cni="cilium",
        can_keep=False,
        sentence=(
            "Cilium keeps the MAC but gives a pod whatever address is free: restore with the network mode "
            "new, or keep the address on a second interface (see multus)."
        ),
        annotations={"cni.cilium.io/mac-address": mine[0].mac},
    )


def _node_range(cni: str, name: str) -> Callable[[tuple[Address, ...], Mapping[str, str]], Pinning]:
    def pinning(addresses: tuple[Address, ...], _: Mapping[str, str]) -> Pinning:
        return Pinning(
            cni=cni,
            can_keep=False,
            sentence=(
                f"{name} gives each node a range of its own and takes no request: on the same node the "
                "lease keeps the address (see host-local); on another node only the routed mode does, and "
                "status.podIP then differs."
            ),
        )

    return pinning


def _host_local(addresses: tuple[Address, ...], _: Mapping[str, str]) -> Pinning:
    return Pinning(
        cni="host-local",
        can_keep=True,
        sentence=(
            "torpor writes the lease into host-local's own store, and the sandbox gets the address by one "
            "ADD with this IPAM; the node's range must contain it, so on another node the ranges must be "
            "of one segment."
        ),
        ipam=_static_ipam(addresses),
    )


def _static(addresses: tuple[Address, ...], _: Mapping[str, str]) -> Pinning:
    return Pinning(
        cni="static",
        can_keep=True,
        sentence=(
            "The network's configuration names the addresses, so every pod of it gets them: keep it for one."
        ),
        ipam=_static_ipam(addresses),
    )


CNIS: dict[str, Callable[[tuple[Address, ...], Mapping[str, str]], Pinning]] = {
    "calico": _calico,
    "cilium": _cilium,
    "flannel": _node_range("flannel", "Flannel"),
    "host-local": _host_local,
    "kindnet": _node_range("kindnet", "kindnet"),
    "kube-ovn": _kube_ovn,
    "multus": _multus,
    "ovn-kubernetes": _ovn_kubernetes,
    "static": _static,
    "whereabouts": _whereabouts,
}
"""The plugins that `render` knows."""


def _static_ipam(addresses: tuple[Address, ...]) -> dict[str, Any]:
    mine = _primary("static", addresses)
    return {"type": "static", "addresses": [{"address": f"{one.ip}/{one.prefix}"} for one in mine]}


def _primary(
    cni: str, addresses: tuple[Address, ...], *, one_per_family: bool = False
) -> tuple[Address, ...]:
    """The addresses of the interface that the pod is known by."""
    mine = tuple(one for one in addresses if one.ifname == PRIMARY)
    if not mine:
        raise NetworkError(
            f"could not pin an address with CNI '{cni}': {PRIMARY} has none; this plugin gives no other "
            "interface"
        )
    versions = [one.version for one in mine]
    if one_per_family and len(set(versions)) != len(versions):
        raise NetworkError(
            f"could not pin the addresses with CNI '{cni}': {PRIMARY} has {len(mine)} "
            f"({', '.join(one.ip for one in mine)}), and it takes one of each family; add the others by hand"
        )
    return mine


def _secondary(addresses: tuple[Address, ...]) -> tuple[Address, ...]:
    return tuple(one for one in addresses if one.ifname != PRIMARY)


def _selection(cni: str, addresses: tuple[Address, ...], attachments: Mapping[str, str]) -> str:
    """The network selection of Kubernetes' multi-network specification, one element for each interface."""
    elements: dict[str, dict[str, Any]] = {}
    for one in _secondary(addresses):
        if one.ifname not in attachments:
            raise NetworkError(
                f"could not pin the addresses of '{one.ifname}' with CNI '{cni}': which network is it? "
                f"Say --attachment {one.ifname}=NAME, as in the old pod's k8s.v1.cni.cncf.io/networks"
            )
        namespace, _, name = attachments[one.ifname].rpartition("/")
        where = {"namespace": namespace} if namespace else {}
        element = elements.setdefault(
            one.ifname, {"name": name, **where, "interface": one.ifname, "ips": [], "mac": one.mac}
        )
        element["ips"].append(f"{one.ip}/{one.prefix}")
    if not elements:
        raise NetworkError(
            f"could not pin an address with CNI '{cni}': the pod has no interface besides {PRIMARY}; "
            "see the plugin that gives that one"
        )
    return json.dumps(list(elements.values()))


def as_yaml(pinning: Pinning) -> str:
    """The piece of a pod's manifest, and of the network's configuration, with the sentence above it."""
    words = f"{pinning.cni} {'keeps' if pinning.can_keep else 'cannot keep'} the address. {pinning.sentence}"
    lines = textwrap.wrap(words, 98, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)
    if pinning.annotations:
        lines += ["metadata:", "  annotations:"]
        lines += [f"    {key}: {_quoted(value)}" for key, value in sorted(pinning.annotations.items())]
    if pinning.ipam:
        lines += ["# in the network's own configuration (JSON):", f'# "ipam": {json.dumps(pinning.ipam)}']
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
