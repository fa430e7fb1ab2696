"""The build id of a program or library: the linker's name for this very content."""

from __future__ import annotations

import os
import struct

_MAX_NOTES_BYTES = 1 << 16
_PT_NOTE = 4
_NT_GNU_BUILD_ID = 3


def build_id(descriptor: int) -> str:
    """Hex digits of an open file's build id, "" if it has none or is no little-endian ELF file.

    Raises OSError.
    """
    head = os.pread(descriptor, 64, 0)
    if len(head) < 64 or head[:4] != b"\x7fELF" or head[5] != 1:
        return ""
    wide = head[4] == 2
    (start,) = struct.unpack_from("<Q" if wide else "<I", head, 32 if wide else 28)
    size, count = struct.unpack_from("<HH", head, 54 if wide else 42)
    if size < (56 if wide else 32) or start >= 1 << 40:
        return ""
    table = os.pread(descriptor, size * count, start)
    for place in range(0, len(table) - size + 1, size):
        if struct.unpack_from("<I", table, place)[0] == _PT_NOTE:
            fields = struct.unpack_from("<Q16xQ" if wide else "<I8xI", table, place + (8 if wide else 4))
            if fields[0] < 1 << 40 and (found := _in_notes(descriptor, *fields)):
                return found
    return ""


def _in_notes(descriptor: int, start: int, size: int) -> str:
    notes = os.pread(descriptor, min(size, _MAX_NOTES_BYTES), start)
    place = 0
    while place + 12 <= len(notes):
        name_size, data_size, kind = struct.unpack_from("<III", notes, place)
        name = notes[place + 12 : place + 12 + name_size]
        data = place + 12 + (name_size + 3 & ~3)
        if kind == _NT_GNU_BUILD_ID and name == b"GNU\0" and data + data_size <= len(notes):
            return notes[data : data + data_size].hex()
        place = data + (data_size + 3 & ~3)
    return ""
