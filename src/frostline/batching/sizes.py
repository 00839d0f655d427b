"""Decides how many samples run at once, by what fits."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ("ROWS", "Limit", "batch_size", "padded", "readable_bytes", "stretches_of_bytes", "stretches_of_work")

ROWS = 8
"""Device batches are a multiple of this, in which vector units and convolutions work well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A bound on the rows of a batch: ``fixed_bytes + rows * bytes_per_row`` may be at most ``room_bytes``."""

    room_bytes: int
    fixed_bytes: int = 0
    bytes_per_row: int = 0

    @property
    def max_rows(self) -> float:
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
    fitting = min((limit.max_rows for limit in limits), default=float("inf"))
    return int(min(fitting, most, padded(wanted))) // ROWS * ROWS


def stretches_of_bytes(lengths: Sequence[int], *, max_rows: int, max_bytes: int) -> list[range]:
    """Cut rows of unequal length into stretches; a row that is longer than ``max_bytes`` stands alone."""
    stretches: list[range] = []
    start = held = 0
    for row, length in enumerate(lengths):
        if row > start and (held + length > max_bytes or row - start == max_rows):
            stretches.append(range(start, row))
            start, held = row, 0
        held += length
    return [*stretches, range(start, len(lengths))]


def stretches_of_work(needs_work: Sequence[bool], *, run_rows: int, max_rows: int) -> list[range]:
    """Cut rows into stretches; what lies ready costs a stretch nothing but its length.

    Args:
        needs_work: of each row.
        run_rows: most rows of a stretch that need work, so that they are done in one run.
        max_rows: of a stretch.
    """
    stretches: list[range] = []
    start = work = 0
    for row, is_work in enumerate(needs_work):
        if row - start == max_rows or work + is_work > run_rows:
            stretches.append(range(start, row))
            start, work = row, 0
        work += is_work
    return [*stretches, range(start, len(needs_work))] if start < len(needs_work) else stretches


def readable_bytes(nbytes: float) -> str:
    """Bytes for a sentence, such as ``1.5 MB``."""
    for unit in ("bytes", "kB", "MB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} GB"
