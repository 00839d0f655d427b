"""Decides how many samples run at once, and whose turn it is to use memory. Pure: no clock, no threads."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from frostline.errors import OverBudget

__all__ = ("ROWS", "Budget", "Limit", "batch_size", "padded", "readable_bytes", "stretches_of_bytes")

ROWS = 8
"""Device batches are a multiple of this, in which vector units and convolutions work well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A bound on the rows of a batch: ``fixed_bytes + rows * bytes_per_row`` may be at most ``room_bytes``."""

    room_bytes: int
    fixed_bytes: int = 0
    bytes_per_row: int = 0

    @property
    def most_rows(self) -> float:
        """The most rows that fit; infinite where a row takes nothing."""
        free = self.room_bytes - self.fixed_bytes
        if free < 0:
            return 0
        return free // self.bytes_per_row if self.bytes_per_row else float("inf")


def padded(rows: int) -> int:
    """The next multiple of ``ROWS``."""
    return -(-rows // ROWS) * ROWS


def batch_size(limits: Iterable[Limit], *, wanted: int, most: int) -> int:
    """The rows of a device batch.

    Args:
        limits: what has to fit.
        wanted: rows that there are to do.
        most: a bound beside them, a multiple of ``ROWS``.

    Returns:
        The largest multiple of ``ROWS`` within all bounds and not above ``wanted`` padded; 0 where not even
        ``ROWS`` rows fit.
    """
    fitting = min((limit.most_rows for limit in limits), default=float("inf"))
    return int(min(fitting, most, padded(wanted))) // ROWS * ROWS


def stretches_of_bytes(lengths: Sequence[int], *, most_rows: int, most_bytes: int) -> list[range]:
    """Cut rows of unequal length into stretches; a row that is longer than ``most_bytes`` stands alone."""
    stretches: list[range] = []
    start = held = 0
    for row, length in enumerate(lengths):
        if row > start and (held + length > most_bytes or row - start == most_rows):
            stretches.append(range(start, row))
            start, held = row, 0
        held += length
    return [*stretches, range(start, len(lengths))]


class Budget:
    """Who may use how much of a fixed amount of memory, first come first served. Not for several threads.

    A reservation is a number. It is granted at once or waits; later ones never overtake it, so that a large
    one is not starved by small ones.

    Args:
        total_bytes: never exceeded by what is granted.
    """

    def __init__(self, total_bytes: int) -> None:
        self._total = total_bytes
        self._reserved = 0
        self._peak = 0
        self._granted: dict[int, int] = {}
        self._waiting: deque[tuple[int, int]] = deque()
        self._next = 0

    @property
    def total_bytes(self) -> int:
        """All that there is."""
        return self._total

    @property
    def reserved_bytes(self) -> int:
        """What is granted now."""
        return self._reserved

    @property
    def peak_bytes(self) -> int:
        """The most that was ever granted at once."""
        return self._peak

    @property
    def waiting(self) -> int:
        """Reservations that wait."""
        return len(self._waiting)

    def ask(self, nbytes: int) -> int:
        """Ask for memory; look with ``is_granted`` whether it may be used.

        Raises:
            OverBudget: It can never be granted.
        """
        self.check(nbytes)
        self._next += 1
        self._waiting.append((self._next, nbytes))
        self._grant()
        return self._next

    def take(self, nbytes: int) -> int | None:
        """Memory that is there now, or None where it is not, or where somebody waits already."""
        if self._waiting or self._reserved + nbytes > self._total:
            return None
        return self.ask(nbytes)

    def check(self, nbytes: int) -> None:
        """Do nothing if so much could be granted at all.

        Raises:
            OverBudget: It is more than the total.
        """
        if nbytes > self._total:
            raise OverBudget(
                f"this needs {readable_bytes(nbytes)} at once, and the node has {readable_bytes(self._total)} "
                "for it: start the node with more --memory"
            )

    def is_granted(self, reservation: int) -> bool:
        """Whether the memory may be used."""
        return reservation in self._granted

    def shrink(self, reservation: int, nbytes: int) -> None:
        """Keep only so much of a granted reservation."""
        held = self._granted[reservation]
        assert 0 <= nbytes <= held, f"a reservation of {held} bytes cannot shrink to {nbytes}"
        self._granted[reservation] = nbytes
        self._reserved -= held - nbytes
        self._grant()

    def release(self, reservation: int) -> None:
        """Give back a reservation, granted or waiting. Giving back again does nothing."""
        held = self._granted.pop(reservation, None)
        if held is not None:
            self._reserved -= held
        else:
            self._waiting = deque(one for one in self._waiting if one[0] != reservation)
        self._grant()

    def _grant(self) -> None:
        while self._waiting and self._reserved + self._waiting[0][1] <= self._total:
            reservation, nbytes = self._waiting.popleft()
            self._granted[reservation] = nbytes
            self._reserved += nbytes
            self._peak = max(self._peak, self._reserved)


def readable_bytes(nbytes: float) -> str:
    """Bytes for a sentence, such as ``1.5 MB``."""
    for unit in ("bytes", "kB", "MB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} GB"
