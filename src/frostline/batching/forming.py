"""Decides which waiting rows run together next on the device."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ("BatchingRule", "FirstCome", "Merging", "QueueHead", "QueuedRequest", "Turn")


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedRequest:
    """Rows of one request that wait for the device.

    Attributes:
        number: names it; the lower came first.
        tenant: whose it is.
        kind: rows of one kind may run together: the same prefix, cut, engine and rows of a run.
        rows: still to run.
        run_rows: of a run of this kind, at least ``rows``.
        is_apart: it runs with no rows of others.
        bytes_per_row: what a run takes for each row.
        model_bytes: what it takes whatever the rows, weights counted.
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
        parts: whose rows it runs: first those of the one whose turn it is, then those that fill it up.
        rows: of the run; what is left over are zeros.
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
            waiting: what waits, first come first; at least one.
            tag: where a tenant stands; the least is next.
        """


class Merging:
    """The least tag is next, and rows of the same kind fill its run up, in the order of their own turns.

    Those that fill up are charged for it, so that they have had part of their share and not more of it. A piece of
    which a part has run goes on when its turn comes.
    """

    def next(self, waiting: Sequence[QueuedRequest], tag: Callable[[str], float]) -> Turn:
        """See ``BatchingRule``."""
        tags = {tenant: tag(tenant) for tenant in {one.tenant for one in waiting}}
        lead, *others = sorted(waiting, key=lambda one: (tags[one.tenant], one.number))
        parts = [QueueHead(number=lead.number, rows=lead.rows)]
        room = 0 if lead.is_apart else lead.run_rows - lead.rows
        for other in others:
            if room and other.kind == lead.kind and not other.is_apart:
                parts.append(QueueHead(number=other.number, rows=min(room, other.rows)))
                room -= parts[-1].rows
        return Turn(parts=tuple(parts), rows=lead.run_rows)


class FirstCome:
    """A fixed batch of one request after another: what ``Merging`` and ``Hapi`` have to be better than."""

    def next(self, waiting: Sequence[QueuedRequest], tag: Callable[[str], float]) -> Turn:  # noqa: ARG002 (no order but one)
        """See ``BatchingRule``."""
        first = min(waiting, key=lambda one: one.number)
        return Turn(parts=(QueueHead(number=first.number, rows=first.rows),), rows=first.run_rows)
