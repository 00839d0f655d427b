"""Decides which connection has to go when another one comes and there is no place for it."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ("ConnectionLimits", "Crowd", "limits_of")

C = TypeVar("C", bound=Hashable)

_MAX_CONNECTIONS = 4096
# Descriptors that connections leave to files, stores and caches, where there are as many again.
_RESERVED = 256
_MAX_HEAD_BYTES = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """What connections may take before the node knows who asks.

    Attributes:
        head_s: A request's head must be whole so long after it began, or after its connection was made.
        head_bytes: Its size at most.
        max_unknown: Connections at once on which nobody who may use the node has asked for anything, of those that are
            older than ``young_s``.
        young_s: So long whoever has just connected is not sent away for their number: many trainers may begin at once.
        max_connections: Connections at once, of all kinds.
    """

    head_s: float = 10.0
    head_bytes: int = _MAX_HEAD_BYTES
    max_unknown: int = 1024
    young_s: float = 1.0
    max_connections: int = _MAX_CONNECTIONS


def limits_of(descriptors: int) -> ConnectionLimits:
    """The limits of a process that may have so many files and sockets open.

    Args:
        descriptors: The bound; below 0 there is none.
    """
    if descriptors < 0:
        return ConnectionLimits()
    most = max(2, min(_MAX_CONNECTIONS, descriptors - min(_RESERVED, descriptors // 2)))
    return ConnectionLimits(max_unknown=max(1, most // 4), max_connections=most)


class Crowd(Generic[C]):
    """The connections of a node: unknown, at work, or idle since somebody known was answered. For one thread.

    Args:
        limits: How many there may be.
    """

    def __init__(self, limits: ConnectionLimits) -> None:
        self._limits = limits
        # In the order in which they came to be what they are.
        self._unknown: dict[C, float] = {}
        self._idle: dict[C, None] = {}
        self._working: dict[C, None] = {}

    def __len__(self) -> int:
        return len(self._unknown) + len(self._idle) + len(self._working)

    def enter(self, connection: C, now_s: float) -> C | None:
        """Let a connection in.

        Args:
            connection: It has just been made.
            now_s: Monotonic seconds.

        Returns:
            The connection that must be closed for it: the oldest on which nobody was recognised, else the one that is
            idle for longest, else itself; None where there is a place.
        """
        gone: C | None = None
        oldest = next(iter(self._unknown), None)
        if len(self) >= self._limits.max_connections:
            gone = oldest or next(iter(self._idle), None) or connection
        elif oldest is not None and len(self._unknown) >= self._limits.max_unknown:
            gone = oldest if now_s - self._unknown[oldest] >= self._limits.young_s else None
        if gone is not None:
            self.leave(gone)
        if gone is not connection:
            self._unknown[connection] = now_s
        return gone

    def recognised(self, connection: C) -> None:
        """Somebody who may use the node has asked on it."""
        if connection in self._unknown or connection in self._idle:
            self.leave(connection)
            self._working[connection] = None

    def answered(self, connection: C) -> None:
        """What was asked is answered; one that is still unknown stays so."""
        if connection in self._working:
            self.leave(connection)
            self._idle[connection] = None

    def leave(self, connection: C) -> None:
        """It is closed, or about to be. Leaving twice does nothing."""
        for kind in (self._unknown, self._idle, self._working):
            kind.pop(connection, None)
