"""The network identity of a container beside its image: read during the dump, in a thread.

pyroute2 takes 130 ms to load, so it is loaded while the engine works, and never for a container that has the
host's network or one that its runtime makes.
"""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from engines.api import ImageCorrupt
from netmig.errors import NetworkError
from shim.images.beneath import read_plain
from shim.images.documents import MAX_DOCUMENT_BYTES
from shim.images.layout import NETWORK
from shim.images.seal import cause_of

if TYPE_CHECKING:
    from netmig.identity import Identity

HOST = Path("/proc/self/ns/net")


def is_ours(netns_path: Path) -> bool:
    """Whether a namespace is the one that this process is in, the host's."""
    try:
        return netns_path.stat().st_ino == HOST.stat().st_ino
    except FileNotFoundError:
        return False


def use_nft(search_path: str) -> None:
    """Let netmig find the program that stands in for libnftables."""
    from netmig import nft  # and ctypes with it

    found = shutil.which("nft", path=search_path)
    nft.use_program(Path(found) if found else None)


class Capture:
    """Reads the identity of a network namespace in a thread that begins at once.

    search_path: where the program nft is, if libnftables cannot be loaded.
    """

    def __init__(self, netns_path: Path, search_path: str) -> None:
        self.netns_path = netns_path
        self._search_path = search_path
        self._document: bytes | None = None
        self._cause = ""
        self._thread = threading.Thread(target=self._run, name="identity")
        self._thread.start()

    def _run(self) -> None:
        try:
            from netmig.capture import capture
            from netmig.identity import encode, global_addresses
            from netmig.ns import Netns

            use_nft(self._search_path)
            with Netns.open(self.netns_path) as netns, Netns.open(HOST) as host:
                found = capture(netns, host)
            if global_addresses(found):
                self._document = encode(found)
        except (NetworkError, OSError) as error:
            self._cause = str(error)

    def document(self) -> bytes | None:
        """The identity, as network.json holds it; None if there is no address to keep, or it was not read."""
        self._thread.join()
        return self._document

    @property
    def warnings(self) -> tuple[str, ...]:
        """What went wrong; the image is good without, but its address cannot be given to another pod."""
        self._thread.join()
        return (f"the image has no network identity: {self._cause}",) if self._cause else ()


def read(directory: Path, name: str = NETWORK) -> Identity | None:
    """The identity that lies in an image; None for one without, an older one for example.

    Raises ImageCorrupt.
    """
    if not os.path.lexists(directory / name):
        return None
    from netmig.identity import decode

    try:
        return decode(read_plain(directory, name, MAX_DOCUMENT_BYTES))
    except (OSError, NetworkError) as error:
        cause = cause_of(error) if isinstance(error, OSError) else error
        raise ImageCorrupt(f"could not read the network identity in {directory}: {cause}") from error
