"""JSON documents of an image: dataclasses, read strictly, written the same way every time.

The standard json module writes the bytes and msgspec checks the types: file names of a container need not be
UTF-8, and only the former carries them (as escaped surrogates) without loss.
"""

from __future__ import annotations

import json
from typing import Any, TypeVar, cast

import msgspec

from engines.api import ImageCorrupt, Needs

T = TypeVar("T")

NEEDS_SCHEMA = 1
MAX_DOCUMENT_BYTES = 64 << 20


class _NeedsDocument(msgspec.Struct, forbid_unknown_fields=True):
    schema: int
    needs: Needs


def encode(document: object) -> bytes:
    """Deterministic JSON: sorted keys, no superfluous blanks, ASCII, one final newline."""
    plain = msgspec.to_builtins(document)
    return json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode() + b"\n"


def decode(data: bytes, kind: type[T], *, schema: int, what: str) -> T:
    """Read a document whose `schema` field must be `schema`.

    what: the document in words, for the message. Raises ImageCorrupt.
    """
    try:
        plain = json.loads(data)
        if not isinstance(plain, dict):
            raise ImageCorrupt(f"could not read {what}: it is no JSON object; make the image again")
        found = cast("dict[str, Any]", plain).get("schema")
        if found != schema or isinstance(found, bool):
            raise ImageCorrupt(
                f"could not read {what}: its schema is {found!r} and this torpor knows {schema}; "
                "use the torpor that wrote it"
            )
        return msgspec.convert(plain, kind, strict=True)
    except (ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise ImageCorrupt(f"could not read {what}: {error}; make the image again") from error


def encode_needs(needs: Needs) -> bytes:
    """What needs.json holds."""
    return encode(_NeedsDocument(schema=NEEDS_SCHEMA, needs=needs))


def decode_needs(data: bytes, *, what: str) -> Needs:
    """Read needs.json. Raises ImageCorrupt."""
    return decode(data, _NeedsDocument, schema=NEEDS_SCHEMA, what=what).needs
