"""Lets requests wait for room among the bytes under way: the threads around ``InFlightBudget``."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cachetools import LRUCache

from frostline.core import FeatureBatch
from frostline.io_service.budget import InFlightBudget, JobBytes
from frostline.wire.blocks import row_bytes
from frostline.wire.messages import FeatureRequest

__all__ = ("ByteLimiter",)

_MAX_KNOWN = 1024


class ByteLimiter:
    """Bytes under way, all jobs together. Safe for threads.

    Args:
        total_bytes: the bound; see ``InFlightBudget``.
    """

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self._budget = InFlightBudget(total_bytes)
        self._changed = threading.Condition()
        self._granted: set[int] = set()
        self._row_bytes: LRUCache[bytes, float] = LRUCache(_MAX_KNOWN)

    def bound(self, total_bytes: int, max_requests: int) -> None:
        """Let no more bytes and requests be under way from now on, beside one request of each job."""
        with self._changed:
            self.total_bytes = total_bytes
            self._budget.bound(total_bytes, max_requests)
            self._grant()

    @contextmanager
    def taken(self, job: str, request: FeatureRequest, scope: bytes, is_over: Callable[[], bool]) -> Iterator[int]:
        """Wait for room for an answer, unless it is over; yields the ticket under which its blocks are lent."""
        with self._changed:
            ticket = self._budget.ask(job, self._expected(request, scope))
            self._grant()
        try:
            with self._changed:
                self._changed.wait_for(lambda: ticket in self._granted or is_over())
            yield ticket
        finally:
            with self._changed:
                self._granted.discard(ticket)
                self._budget.end(ticket)
                self._grant()

    def lend(self, ticket: int, nbytes: int) -> None:
        """A job gets a block of so many bytes."""
        with self._changed:
            self._budget.lend(ticket, nbytes)

    def give_back(self, job: str, nbytes: int) -> None:
        """A job has done with so many bytes."""
        with self._changed:
            self._budget.give_back(job, nbytes)
            self._grant()

    def learn(self, scope: bytes, batch: FeatureBatch) -> None:
        """Remember what rows of a scope take, for the next request."""
        if not len(batch):
            return
        with self._changed:
            self._row_bytes[scope] = row_bytes(batch)

    def wake(self) -> None:
        """Have those who wait look again whether it is over."""
        with self._changed:
            self._changed.notify_all()

    def jobs(self) -> dict[str, JobBytes]:
        """What each job has under way."""
        with self._changed:
            return self._budget.jobs()

    @property
    def used_bytes(self) -> int:
        """Under way now."""
        with self._changed:
            return self._budget.used_bytes

    @property
    def peak_bytes(self) -> int:
        """The most that ever was."""
        with self._changed:
            return self._budget.peak_bytes

    def _grant(self) -> None:
        granted = self._budget.granted()
        if granted:
            self._granted.update(granted)
            self._changed.notify_all()

    def _expected(self, request: FeatureRequest, scope: bytes) -> int:
        """What an answer takes: known at cut 0, as of the last batch else, and to begin with as if it were cut 0."""
        if request.cut == 0 or scope not in self._row_bytes:
            return request.samples.encoded_bytes
        return round(self._row_bytes[scope] * len(request.samples))
