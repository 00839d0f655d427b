"""The node's memory: its budget divided into shares, and threads that wait for their turn in one."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Self

from frostline.batching import Budget

__all__ = ("Abandoned", "Pool", "PoolStatistics", "Reservation", "Shares")


class Abandoned(Exception):
    """Nobody wants the answer any more; never leaves the node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """The budget of a node, divided for good, so that no work waits for memory while others wait for its own.

    A request goes through them in the order below and never waits in an earlier one than it holds: that is
    why nothing can stand still for ever.

    Attributes:
        messages: requests as they were sent, read and kept.
        weights: resident prefixes.
        work: batches from their first sample read until they are sent, and uploads while they are read.
        decode: encoded samples and what decoding them needs.
        device: activations of the one batch that runs.
    """

    messages: int
    weights: int
    work: int
    decode: int
    device: int

    @classmethod
    def of(cls, memory_bytes: int) -> "Shares":
        """Sixteenths: one, three, two, three, two; five are left to the allocator.

        Blocks that were freed between others that are in use still take memory. A node under a load of everything
        at once took up to 1.46 times what was reserved (``tests/node/test_node_memory.py`` with 400 MiB, ten runs).
        """
        part = memory_bytes // 16
        return cls(messages=part, weights=3 * part, work=2 * part, decode=3 * part, device=2 * part)

    def pools(self) -> "dict[str, Pool]":
        """An empty pool for each share, by its name."""
        return {name: Pool(nbytes) for name, nbytes in asdict(self).items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStatistics:
    """Where a share of the memory stands.

    Attributes:
        total_bytes: of the share; if ``waiting`` is rarely 0, give the node more memory.
        reserved_bytes: in use or promised now.
        peak_bytes: most of it at once so far; never above the total.
        waiting: pieces of work that wait for memory.
    """

    total_bytes: int
    reserved_bytes: int
    peak_bytes: int
    waiting: int


class Reservation:
    """Memory that may be used until it is given back. A context manager; safe for threads."""

    def __init__(self, pool: "Pool", number: int) -> None:
        self._pool = pool
        self._number = number

    def shrink(self, nbytes: int) -> None:
        """Keep only so much of it."""
        with self._pool.changing() as budget:
            budget.shrink(self._number, nbytes)

    def release(self) -> None:
        """Give it back. Calling it again does nothing."""
        with self._pool.changing() as budget:
            budget.release(self._number)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class Pool:
    """One share of the memory. Safe for threads, which wait in it first come first served.

    Args:
        total_bytes: of the share.
    """

    def __init__(self, total_bytes: int) -> None:
        self._budget = Budget(total_bytes)
        self._changed = threading.Condition()

    @property
    def total_bytes(self) -> int:
        """All that there is."""
        return self._budget.total_bytes

    def reserve(self, nbytes: int, is_abandoned: Callable[[], bool]) -> Reservation:
        """Wait for memory.

        Args:
            nbytes: how much.
            is_abandoned: looked at again after every change and ``wake``.

        Raises:
            OverBudget: The share can never hold it.
            Abandoned: It is no longer wanted.
        """
        with self._changed:
            number = self._budget.ask(nbytes)
            self._changed.wait_for(lambda: self._budget.is_granted(number) or is_abandoned())
            if is_abandoned():
                self._budget.release(number)
                self._changed.notify_all()
                raise Abandoned
        return Reservation(self, number)

    def take(self, nbytes: int) -> Reservation | None:
        """Memory that is there now, or None.

        Raises:
            OverBudget: The share can never hold it.
        """
        with self._changed:
            self._budget.check(nbytes)
            number = self._budget.take(nbytes)
        return None if number is None else Reservation(self, number)

    def wake(self) -> None:
        """Have all who wait look whether they are still wanted."""
        with self._changed:
            self._changed.notify_all()

    @contextmanager
    def changing(self) -> Iterator[Budget]:
        """The budget to change; those who wait look again afterwards."""
        with self._changed:
            yield self._budget
            self._changed.notify_all()

    def statistics(self) -> PoolStatistics:
        """Where it stands."""
        with self._changed:
            return PoolStatistics(
                total_bytes=self._budget.total_bytes,
                reserved_bytes=self._budget.reserved_bytes,
                peak_bytes=self._budget.peak_bytes,
                waiting=self._budget.waiting,
            )
