"""Lends the blocks of one answer to its session and sends them."""

import os
import socket

from frostline.io_service.byte_limiter import ByteLimiter
from frostline.io_service.handler import Delivered
from frostline.io_service.sessions import Gone, Session
from frostline.io_service.shared_memory import shared
from frostline.wire.frames import send

__all__ = ("Sender",)


class Sender:
    """Lends and sends the blocks of one answer. For one thread.

    Attributes:
        bytes_answered: sent so far.
        bytes_read: of them, those that were read for this answer.
    """

    def __init__(self, one: socket.socket, session: Session, answer: int, room: ByteLimiter) -> None:
        self._socket = one
        self._session = session
        self._answer = answer
        self._room = room
        self._block = 0
        self.bytes_answered = 0
        self.bytes_read = 0

    def __call__(self, delivered: Delivered) -> None:
        """Lend and send rows.

        Raises:
            Gone: Nobody takes them.
            Overloaded: There is no memory for them.
        """
        block = delivered.block
        descriptor = shared(block.parts)
        try:
            self._lend(delivered.ticket, block.nbytes)
            says = {"kind": "block", "block": self._block, "read_bytes": delivered.read_bytes, **block.says}
            send(self._socket, says, descriptor=descriptor)
        except OSError as error:
            self._session.back(self._answer, self._block)
            raise Gone from error
        finally:
            os.close(descriptor)
        self._block += 1
        self.bytes_answered += block.nbytes
        self.bytes_read += delivered.read_bytes

    def _lend(self, ticket: int, nbytes: int) -> None:
        self._room.lend(ticket, nbytes)
        try:
            self._session.lend(self._answer, self._block, nbytes)
        except Gone:
            self._room.give_back(self._session.job, nbytes)
            raise
