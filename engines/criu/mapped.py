"""Lets the root of a user namespace read the image that it is made from.

CRIU opens some images when it is inside the new container's user namespace already, where an image that only
the node's root may read is closed to it. So it gets an entry of its own in the access lists of the image's
directory and files. Nobody gains a way to them: the directory above them stays as it is, and CRIU holds the
image's directory open.
"""

from __future__ import annotations

import os
import stat
import struct
from pathlib import Path

from engines.api import EngineUnavailable

_ATTRIBUTE = "system.posix_acl_access"
_VERSION = 2
_OWNER, _USER, _GROUP, _MASK, _OTHER = 0x01, 0x02, 0x04, 0x10, 0x20
_NOBODY = 0xFFFFFFFF


def admit(image_path: Path, root_id: int, words: str) -> None:
    """Let user `root_id` of the host read an image; nothing if it is root. Raises EngineUnavailable.

    words: what is being done, for the error.
    """
    if root_id == 0:
        return
    try:
        for directory, _, names in os.walk(image_path):  # the parents of its memory lie in it
            _grant(Path(directory), root_id, 0o5)
            for name in names:
                if stat.S_ISREG((entry := Path(directory, name)).lstat().st_mode):
                    _grant(entry, root_id, 0o4)
    except OSError as error:
        raise EngineUnavailable(
            f"{words}: {image_path} cannot be opened to user {root_id}, the root of the container's user "
            f"namespace ({error}); keep images on a file system with access control lists"
        ) from error


def _grant(path: Path, user: int, rights: int) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        mode = os.fstat(descriptor).st_mode
        entries = [
            (_OWNER, mode >> 6 & 7, _NOBODY),
            (_USER, rights, user),
            (_GROUP, mode >> 3 & 7, _NOBODY),
            (_MASK, mode >> 3 & 7 | rights, _NOBODY),
            (_OTHER, mode & 7, _NOBODY),
        ]
        packed = struct.pack("<I", _VERSION) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
        os.setxattr(descriptor, _ATTRIBUTE, packed)
    finally:
        os.close(descriptor)
