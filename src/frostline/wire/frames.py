"""Frames on a socket between processes of one machine: JSON, bytes behind it, and descriptors that travel with it.

A frame is sixteen bytes (a mark, the length of the JSON, the length of what follows it), a JSON object, and bytes. A
descriptor travels beside the first byte (``SCM_RIGHTS``), where the receiver says that it takes one; the system closes
any other that comes. Nothing of it is evaluated.
"""

import array
import json
import os
import socket
import struct
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from frostline.errors import FrostlineError

__all__ = ("BACK", "CLOSED", "PROTOCOL", "RECORD", "BrokenFrame", "Frame", "receive", "send")

PROTOCOL = 1
"""Of what is said in frames to an I/O service: raised where an older side would not understand it."""

RECORD = struct.Struct("<QII")
"""What a session says while it runs: the number of an answer, ``BACK`` or ``CLOSED``, and a number."""

BACK = 0
"""It has done with the block of that number."""

CLOSED = 1
"""It closed the answer, of which it got the blocks below that number."""

_HEADER = struct.Struct("<4sIQ")
_MARK = b"frst"
_MAX_JSON = 64 << 20
_DESCRIPTOR = socket.CMSG_SPACE(array.array("i").itemsize)


class BrokenFrame(FrostlineError):
    """What came is no frame."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Frame:
    """What came.

    Attributes:
        says: the JSON object.
        body: the bytes behind it.
        descriptor: descriptor of an open file, which is the receiver's to close; -1 where none came.
    """

    says: dict[str, Any]
    body: memoryview = field(default_factory=lambda: memoryview(b""))
    descriptor: int = -1

    def close(self) -> None:
        """Close the descriptor that nobody took."""
        if self.descriptor >= 0:
            os.close(self.descriptor)


def send(
    to: socket.socket, says: dict[str, Any], body: bytes | memoryview = b"", *, descriptor: int | None = None
) -> None:
    """Send a frame; the caller sees to it that nobody else sends on the socket meanwhile.

    Raises:
        OSError: The peer is gone, or takes nothing for longer than the socket waits.
    """
    text = json.dumps(says, separators=(",", ":")).encode()
    data = _HEADER.pack(_MARK, len(text), len(body)) + text
    if descriptor is None:
        to.sendall(data)
    else:
        sent = to.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))])
        to.sendall(memoryview(data)[sent:])
    if len(body):
        to.sendall(body)


def receive(come_from: socket.socket, *, max_bytes: int = 0, takes_descriptor: bool = False) -> Frame | None:
    """The next frame; None where the peer has ended between two of them.

    Args:
        come_from: a connected stream socket.
        max_bytes: maximum bytes that may stand behind the JSON.
        takes_descriptor: one may come; it is closed where the frame breaks off.

    Raises:
        BrokenFrame: The bytes are not a frame, or break off.
        OSError: The peer is gone, or sends nothing for longer than the socket waits.
    """
    header, descriptor = _header(come_from, takes_descriptor=takes_descriptor)
    if not header:
        return None
    try:
        text_bytes, body_bytes = _lengths(header + _exactly(come_from, _HEADER.size - len(header)), max_bytes)
        says = _object(_exactly(come_from, text_bytes))
        return Frame(says=says, body=_exactly(come_from, body_bytes), descriptor=descriptor)
    except BaseException:
        if descriptor >= 0:
            os.close(descriptor)
        raise


def _header(come_from: socket.socket, *, takes_descriptor: bool) -> tuple[bytes, int]:
    if not takes_descriptor:
        return come_from.recv(_HEADER.size), -1
    data, beside, _, _ = come_from.recvmsg(_HEADER.size, _DESCRIPTOR, socket.MSG_CMSG_CLOEXEC)
    found = array.array("i")
    for level, kind, content in beside:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            found.frombytes(content[: len(content) - len(content) % found.itemsize])
    return data, found[0] if found else -1


def _lengths(header: bytes, max_bytes: int) -> tuple[int, int]:
    mark, text_bytes, body_bytes = _HEADER.unpack(header)
    if mark != _MARK:
        raise BrokenFrame("what came does not begin like a frame of Frostline")
    if text_bytes > _MAX_JSON or body_bytes > max_bytes:
        raise BrokenFrame(f"a frame of {text_bytes} and {body_bytes} bytes is too long")
    return text_bytes, body_bytes


def _exactly(come_from: socket.socket, nbytes: int) -> memoryview:
    view = np.empty(nbytes, np.uint8).data
    filled = 0
    while filled < nbytes:
        got = come_from.recv_into(view[filled:])
        if not got:
            raise BrokenFrame("a frame broke off")
        filled += got
    return view


def _object(text: memoryview) -> dict[str, Any]:
    try:
        value = json.loads(bytes(text))
    except (ValueError, RecursionError) as error:
        raise BrokenFrame("a frame holds no JSON") from error
    if not isinstance(value, dict):
        raise BrokenFrame("a frame holds no JSON object")
    return value
