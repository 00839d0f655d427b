"""Decides which connection is closed when a new one comes and there are too many."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ("ConnectionLimits", "ConnectionTable", "limits_of")

C = TypeVar("C", bound=Hashable)

_MAX_CONNECTIONS = 4096
# File descriptors left for files, stores and caches, if there are at least twice as many.
_RESERVED = 256
_MAX_HEAD_BYTES = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Limits of connections before the node knows who asks.

    Attributes:
        head_s: seconds within which a request's head must be complete, from its start or from the connection's.
        head_bytes: maximum size of a head.
        max_unknown: maximum number of connections older than ``young_s`` without a request of a known tenant.
        young_s: seconds for which a new connection is not closed because of ``max_unknown``, since many trainers may
            begin at once.
        max_connections: maximum number of connections.
    """

    head_s: float = 10.0
    head_bytes: int = _MAX_HEAD_BYTES
    max_unknown: int = 1024
    young_s: float = 1.0
    max_connections: int = _MAX_CONNECTIONS


def limits_of(descriptors: int) -> ConnectionLimits:
    """The limits of a process that may open so many files and sockets.

    Args:
        descriptors: maximum number of descriptors; a negative number means no limit.
    """
    if descriptors < 0:
        return ConnectionLimits()
    most = max(2, min(_MAX_CONNECTIONS, descriptors - min(_RESERVED, descriptors // 2)))
    return ConnectionLimits(max_unknown=max(1, most // 4), max_connections=most)


class ConnectionTable(Generic[C]):
    """The connections of a node: unknown, working, or idle after an answer to a known tenant. Not safe for threads.

    Args:
        limits: limits of the connections.
    """

    def __init__(self, limits: ConnectionLimits) -> None:
        self._limits = limits
        # Each dictionary is in the order in which connections entered that state.
        self._unknown: dict[C, float] = {}
        self._idle: dict[C, None] = {}
        self._working: dict[C, None] = {}

    def __len__(self) -> int:
        return len(self._unknown) + len(self._idle) + len(self._working)

    def enter(self, connection: C, now_s: float) -> C | None:
        """Admit a connection.

        Args:
            connection: new connection.
            now_s: monotonic seconds.

        Returns:
            The connection that must be closed for it: the oldest unknown one, else the one that has been idle longest,
            else the new one itself; None if there is space.
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
        """Note that a known tenant has asked on this connection."""
        if connection in self._unknown or connection in self._idle:
            self.leave(connection)
            self._working[connection] = None

    def answered(self, connection: C) -> None:
        """Note that its request was answered; an unknown connection stays unknown."""
        if connection in self._working:
            self.leave(connection)
            self._idle[connection] = None

    def leave(self, connection: C) -> None:
        """Remove a connection that is closed, or about to be. Calling it again does nothing."""
        for kind in (self._unknown, self._idle, self._working):
            kind.pop(connection, None)
