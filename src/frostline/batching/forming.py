"""Decides which waiting rows run together next on the device."""

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

__all__ = (
    "ROWS",
    "BatchingRule",
    "FairMerging",
    "FirstCome",
    "Hapi",
    "Limit",
    "QueueHead",
    "QueuedRequest",
    "Turn",
    "allotted",
    "batch_size",
    "padded",
    "readable_bytes",
    "stretches_of_bytes",
    "stretches_of_work",
)

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


def batch_size(limits: Iterable[Limit], *, wanted: int, maximum: int) -> int:
    """The rows of a device batch.

    Args:
        limits: limits of memory that the rows must fit.
        wanted: rows that there are to do.
        maximum: a bound beside them, a multiple of ``ROWS``.

    Returns:
        The largest multiple of ``ROWS`` within all bounds and not above ``wanted`` padded; 0 where not even
        ``ROWS`` rows fit.
    """
    fitting = min((limit.max_rows for limit in limits), default=float("inf"))
    return int(min(fitting, maximum, padded(wanted))) // ROWS * ROWS


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
        needs_work: whether each row needs work.
        run_rows: most rows of a stretch that need work, so that they are done in one run.
        max_rows: maximum rows of a stretch.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedRequest:
    """Rows of one request that wait for the device.

    Attributes:
        number: names it; the lower came first.
        tenant: tenant that owns it.
        kind: rows of one kind may run together: the same prefix, cut, engine and rows of a run.
        rows: still to run.
        run_rows: rows of a run of this kind, at least ``rows``.
        is_apart: it runs with no rows of others.
        bytes_per_row: memory of a run for each row.
        model_bytes: memory of a run whatever its rows, weights counted.
    """

    number: int
    tenant: str
    kind: Hashable
    rows: int
    run_rows: int
    is_apart: bool = False
    bytes_per_row: int = 0
    model_bytes: int = 0

    def __post_init__(self) -> None:
        assert 1 <= self.rows <= self.run_rows, f"{self.rows} rows do not wait for runs of {self.run_rows}"


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueHead:
    """So many of the rows that wait under a number, the first of them."""

    number: int
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One run of the device.

    Attributes:
        parts: requests whose rows it runs: first the one whose turn it is, then those that fill it up.
        rows: rows of the run; rows left over are zeros.
    """

    parts: tuple[QueueHead, ...]
    rows: int

    def __post_init__(self) -> None:
        assert 1 <= sum(part.rows for part in self.parts) <= self.rows, "a run holds its parts, and is not empty"


class BatchingRule(Protocol):
    """Decides the next run. Not for several threads."""

    def next(self, waiting: Sequence[QueuedRequest], tag: Callable[[str], float]) -> Turn:
        """The next run.

        Args:
            waiting: requests that wait, first come first; at least one.
            tag: where a tenant stands; the least is next.
        """


class FairMerging:
    """The least tag is next, and rows of the same kind fill its run up, in the order of their own turns.

    Those that fill up are charged for it, so that they have had part of their share and not more of it. A piece of
    which a part has run goes on when its turn comes.
    """

    def next(self, waiting: Sequence[QueuedRequest], tag: Callable[[str], float]) -> Turn:
        """See ``BatchingRule``."""
        tags = {tenant: tag(tenant) for tenant in {request.tenant for request in waiting}}
        lead, *others = sorted(waiting, key=lambda item: (tags[item.tenant], item.number))
        parts = [QueueHead(number=lead.number, rows=lead.rows)]
        room = 0 if lead.is_apart else lead.run_rows - lead.rows
        for other in others:
            if room and other.kind == lead.kind and not other.is_apart:
                parts.append(QueueHead(number=other.number, rows=min(room, other.rows)))
                room -= parts[-1].rows
        return Turn(parts=tuple(parts), rows=lead.run_rows)


class FirstCome:
    """A fixed batch of one request after another: what ``FairMerging`` and ``Hapi`` have to be better than."""

    def next(self, waiting: Sequence[QueuedRequest], tag: Callable[[str], float]) -> Turn:  # noqa: ARG002 (no order but one)
        """See ``BatchingRule``."""
        first = min(waiting, key=lambda item: item.number)
        return Turn(parts=(QueueHead(number=first.number, rows=first.rows),), rows=first.run_rows)


def allotted(waiting: Sequence[QueuedRequest], free_bytes: int) -> dict[int, int]:
    """The rows of each request's batch, by its number; requests that found no room are not named.

    HAPI's batch adaptation ("Accelerating Transfer Learning with Near-Data Computation on Cloud Object Stores",
    arXiv 2210.08650): with ``M_r`` bytes a row and ``model_r`` for the model of request ``r``, choose ``b_r`` to

        maximise sum_r b_r M_r   subject to   sum_r (b_r M_r + model_r) <= free,   b_min <= b_r <= requested_r,

    and where there is no such choice, leave out a request, here the last that came, and solve again.

    Batches are multiples of ``ROWS`` and ``b_min`` is one ``ROWS``; otherwise kernels would work on odd sizes.
    """
    asking = list(waiting)
    while asking:
        found = _solved(asking, free_bytes)
        if found is not None:
            return found
        asking.pop()
    return {}


def _solved(asking: Sequence[QueuedRequest], free_bytes: int) -> dict[int, int] | None:
    from scipy.optimize import Bounds, LinearConstraint, milp  # takes a second to import, and few nodes need it

    room = free_bytes - sum(request.model_bytes for request in asking)
    nbytes = [request.bytes_per_row * ROWS for request in asking]
    if sum(nbytes) > room:  # not even the smallest batches fit
        return None
    # In shares of the room, since the solver's tolerances are absolute.
    takes = np.array(nbytes, np.float64) / max(1, room)
    maximum = np.array([padded(request.rows) // ROWS for request in asking])
    found = milp(
        -takes,
        constraints=LinearConstraint(takes[np.newaxis], ub=1.0),
        bounds=Bounds(1, maximum),
        integrality=np.ones(len(asking)),
    )
    assert found.x is not None, f"the smallest batches fit, so there is a choice: {found.message}"
    eights = np.clip(np.floor(found.x + 0.5).astype(int), 1, maximum).tolist()
    return _within(room, asking, eights)


def _within(room: int, asking: Sequence[QueuedRequest], eights: list[int]) -> dict[int, int]:
    """The solver's answer held to the byte: it may be beyond the bound by its tolerance."""
    rows = {request.number: ROWS * count for request, count in zip(asking, eights, strict=True)}
    while (over := sum(request.bytes_per_row * rows[request.number] for request in asking) - room) > 0:
        shrinking = [request for request in asking if rows[request.number] > ROWS]
        nearest = min(shrinking, key=lambda item: abs(item.bytes_per_row * ROWS - over))
        rows[nearest.number] -= ROWS
    return rows


class Hapi:
    """Rounds of HAPI's programme: the batches that it chose run one after another, then it is solved again.

    Its requests share an accelerator at the same time, for which the programme divides the memory; here they take
    turns on it in the order in which they came. Tenants have no shares. How many rows a sample runs with depends on
    who else asks, so that features may differ in their last bits.

    Args:
        free_bytes: for models and activations.
    """

    def __init__(self, free_bytes: int) -> None:
        self._free_bytes = free_bytes
        self._round: deque[tuple[int, int]] = deque()

    def next(self, waiting: Sequence[QueuedRequest], tag: Callable[[str], float]) -> Turn:  # noqa: ARG002 (no shares)
        """See ``BatchingRule``."""
        present = {request.number: request for request in sorted(waiting, key=lambda item: item.number)}
        while self._round and self._round[0][0] not in present:
            self._round.popleft()
        if not self._round:
            first = next(iter(present))
            # One that finds no room even alone runs in the smallest batches: the node has checked that those fit.
            self._round.extend((allotted(list(present.values()), self._free_bytes) or {first: ROWS}).items())
        number, rows = self._round.popleft()
        one = present[number]
        return Turn(parts=(QueueHead(number=number, rows=min(rows, one.rows)),), rows=min(rows, one.run_rows))
