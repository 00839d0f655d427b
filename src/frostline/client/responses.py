"""What answers of every connected transport have alike: one reads, any thread may close, and a closed one ends."""

import threading
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import Protocol, Self

from frostline.core import FeatureBatch
from frostline.errors import Unavailable

__all__ = ("Counts", "ResponseStream")


class Counts(Protocol):
    """Counts what is asked."""

    def counted(self, *, requests: int = 0) -> AbstractContextManager[None]:
        """Count requests, and the failure where there is one, and the seconds until it has ended."""


class ResponseStream(ABC):
    """The batches of one answer; the request is sent when the first is asked for.

    ``close`` may be called from any thread and frees one that waits in ``next``.

    Args:
        transport: transport that counts it.
    """

    def __init__(self, transport: Counts) -> None:
        self._counts = transport
        self._turn = threading.Lock()
        self._has_begun = False
        self._is_closed = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> FeatureBatch:
        try:
            with self._turn:
                return self._counted()
        finally:
            if self._is_closed:
                self._tidy()

    def close(self) -> None:
        """Abandon the rest."""
        self._is_closed = True
        self._break_off()
        self._tidy()

    @abstractmethod
    def _next(self, *, is_first: bool) -> FeatureBatch:
        """The next batch, for which the request is sent where it is the first; ``StopIteration`` after the last."""

    @abstractmethod
    def _break_off(self) -> None:
        """Free a thread that waits in ``_next``, from any thread."""

    @abstractmethod
    def _end(self) -> None:
        """Nothing more is read. Calling it again does nothing."""

    def _tidy(self) -> None:
        """Close the connection, unless another thread is still in ``next``: then that one does."""
        if self._turn.acquire(blocking=False):
            try:
                self._end()
            finally:
                self._turn.release()

    def _counted(self) -> FeatureBatch:
        if self._is_closed:
            raise StopIteration
        is_first, self._has_begun = not self._has_begun, True
        try:
            with self._counts.counted(requests=int(is_first)):
                return self._next(is_first=is_first)
        except Unavailable:
            if self._is_closed:  # it broke because it was closed
                raise StopIteration from None
            raise
