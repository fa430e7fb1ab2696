"""What filters packets here: CRIU locks a container's network with it while it is dumped and restored."""

from __future__ import annotations

import shutil
from typing import Any

from compat.probes.base import System, probe


@probe("netfilter")
def read(system: System) -> dict[str, Any]:
    """What CRIU would use: nftables where there is nft, else iptables, or "" if there is neither."""
    if shutil.which("nft", path=system.search_path):
        return {"netfilter": "nftables"}
    iptables = shutil.which("iptables-restore", path=system.search_path)
    return {"netfilter": "iptables" if iptables else ""}
