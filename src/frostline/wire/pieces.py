"""Pieces of a prefix's file: the numbers of its larger weights, which other prefixes may have too.

A piece is named by the SHA-256 of its bytes. A file is sent without the pieces that the node has: in front of what is
left of it stands a list of them, as JSON behind its length in eight bytes, little-endian.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from frostline.core.declared import Digest, Sized
from frostline.core.errors import BadRequest

__all__ = (
    "LENGTH_HEADER",
    "MAX_LIST_BYTES",
    "MEDIA_TYPE",
    "MIN_BYTES",
    "PREAMBLE_BYTES",
    "Names",
    "Piece",
    "list_bytes",
    "names_from_json",
    "pieces_from_json",
    "pieces_of",
    "without",
)

MEDIA_TYPE = "application/vnd.frostline.pieces"
"""The media type of a prefix's file without the pieces that the node has."""

LENGTH_HEADER = "Frostline-Length"
"""The header that tells the bytes of the whole file."""

_MAX_PIECES = 4096
"""The most pieces in one list; a ViT-H has 390 weights that are large enough."""

MAX_LIST_BYTES = 1 << 20
"""The most bytes of the list in front of a file."""

PREAMBLE_BYTES = 8

MIN_BYTES = 1 << 16
"""Smaller weights are sent: naming one takes a hundred bytes, and finding it a look-up."""

_HEX = frozenset("0123456789abcdef")
_NAME_LENGTH = 64

Names = Annotated[tuple[Digest, ...], Sized(0, _MAX_PIECES)]
"""Names of pieces as a client asks about them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Some bytes of a file, those of one tensor.

    Attributes:
        digest: SHA-256 of the bytes, in hexadecimal.
        start: place of the first byte in the file.
        stop: place after the last byte.
    """

    digest: str
    start: int
    stop: int


def pieces_of(body: bytes | memoryview) -> tuple[Piece, ...]:
    """The pieces of a safetensors file that may be left out, in their order; none where it is no such file."""
    whole = memoryview(body)
    first = PREAMBLE_BYTES + int.from_bytes(whole[:PREAMBLE_BYTES], "little")
    try:
        header = json.loads(bytes(whole[PREAMBLE_BYTES:first]))
        places = sorted(tuple(entry["data_offsets"]) for name, entry in header.items() if name != "__metadata__")
        large = [(first + start, first + stop) for start, stop in places if stop - start >= MIN_BYTES]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return ()
    return tuple(
        Piece(digest=hashlib.sha256(whole[start:stop]).hexdigest(), start=start, stop=stop)
        for start, stop in large[:_MAX_PIECES]
    )


def without(body: bytes, held: Sequence[Piece]) -> bytes:
    """What is sent of a file: the list of the pieces that the node has, and the bytes between them."""
    listed = json.dumps([[piece.start, piece.stop, piece.digest] for piece in held], separators=(",", ":")).encode()
    parts: list[bytes | memoryview] = [len(listed).to_bytes(PREAMBLE_BYTES, "little"), listed]
    view, done = memoryview(body), 0
    for piece in held:
        parts.append(view[done : piece.start])
        done = piece.stop
    return b"".join([*parts, view[done:]])


def list_bytes(preamble: bytes | bytearray) -> int:
    """The bytes of the list, from the eight bytes before it.

    Raises:
        BadRequest: the list is too long.
    """
    nbytes = int.from_bytes(preamble, "little")
    if nbytes > MAX_LIST_BYTES:
        raise BadRequest(f"a list of pieces has at most {MAX_LIST_BYTES} bytes")
    return nbytes


def pieces_from_json(listed: bytes | bytearray, length: int) -> tuple[Piece, ...]:
    """The list in front of a file, from wherever it came.

    Args:
        listed: JSON of the list.
        length: bytes of the whole file, in which the pieces follow each other behind the length of its header.

    Raises:
        BadRequest: The JSON is no such list.
    """
    found, done = [], PREAMBLE_BYTES
    for item in _bounded_list(listed):
        if not isinstance(item, list) or len(item) != 3:
            raise BadRequest("a piece is given by its start, its stop and its SHA-256")
        start, stop, digest = item
        if type(start) is not int or type(stop) is not int or not done <= start < stop <= length:
            raise BadRequest("pieces follow each other in the file, behind its first eight bytes")
        found.append(Piece(digest=_name(digest), start=start, stop=stop))
        done = stop
    return tuple(found)


def names_from_json(listed: bytes | bytearray) -> tuple[str, ...]:
    """The names of pieces that a client asks about.

    Raises:
        BadRequest: The JSON is no list of such names.
    """
    return tuple(map(_name, _bounded_list(listed)))


def _bounded_list(listed: bytes | bytearray) -> list[Any]:
    try:
        value = json.loads(listed)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the list of pieces is not JSON: {error}") from error
    if not isinstance(value, list) or len(value) > _MAX_PIECES:
        raise BadRequest(f"pieces come as a list of at most {_MAX_PIECES}")
    return value


def _name(value: object) -> str:
    if not isinstance(value, str) or len(value) != _NAME_LENGTH or not _HEX.issuperset(value):
        raise BadRequest("a piece is named by its SHA-256 in 64 lower-case hexadecimal digits")
    return value
