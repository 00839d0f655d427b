"""Decides which samples are asked for together: stretches of one epoch's order, and their values on the way."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from frostline.core import FeatureBatch, Route, Samples, SampleTable

__all__ = ("Ask", "Deal", "Dealer", "Delivery", "Stretch", "stretches")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stretch:
    """Samples to ask for in one request.

    Attributes:
        positions: ``int64[n]``, places in the epoch, ascending; a gap is a sample that needs no asking.
        samples: the samples at those places.
        expected_bytes: payload that the answer should have. The window's bound is as good as this figure.
        route: the way that they take.
        epoch: that they belong to, where a window asks for several: nothing of one is handed out before the last of
            the one before it.
    """

    positions: npt.NDArray[np.int64]
    samples: Samples
    expected_bytes: int
    route: Route
    epoch: int = 0

    def __post_init__(self) -> None:
        if len(self.positions) == 0 or len(self.positions) != len(self.samples):
            raise ValueError(f"a stretch has {len(self.positions)} positions for {len(self.samples)} samples")

    def __len__(self) -> int:
        return len(self.positions)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ask:
    """One request to make now.

    Attributes:
        number: names this attempt; an answer to an older attempt is not taken.
        attempt: 1, or more after failures and for a second request.
        samples: what to ask for, in order; the stretch without what arrived in earlier attempts.
        route: the way that they take; the same in every attempt.
        is_hedge: whether an earlier attempt is under way and late.
        epoch: of the stretch.
    """

    number: int
    attempt: int
    samples: Samples
    route: Route
    is_hedge: bool
    epoch: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Delivery:
    """Rows handed out together.

    Attributes:
        positions: ``int64[len(batch)]``, places in the epoch of the batch's rows, ascending.
        stop: every asked-for sample at a place below this has now been handed out or skipped; with ``slack=0`` no
            other one has.
        reach: samples at places below this that need no asking may be handed out too; ``stop`` with ``slack=0``.
        batch: the rows, and the samples skipped among them.
    """

    positions: npt.NDArray[np.int64]
    stop: int
    reach: int
    batch: FeatureBatch

    def span(self, *, before: int) -> tuple[int, int]:
        """The places from its first row to its last one that lie before a place; none where no row does."""
        first, stop = (int(self.positions[0]), int(self.positions[-1]) + 1) if len(self.positions) else (before, before)
        return min(first, before), min(stop, before)


@dataclass(frozen=True, slots=True, kw_only=True)
class Deal:
    """What the next request is.

    Attributes:
        route: the way that its samples take.
        rows: samples in it.
        bytes_per_sample: payload of one sample; 0 where the encoded sample itself travels.
    """

    route: Route
    rows: int
    bytes_per_sample: int


class Dealer(Protocol):
    """Says which way the next samples take. It is asked when the window has room, and not before."""

    def deal(self, left: int) -> Deal:
        """The next request, of one sample to ``left``; whoever asks makes it."""


def stretches(
    table: SampleTable, rows: npt.NDArray[np.int64], positions: npt.NDArray[np.int64], dealer: Dealer
) -> Iterator[Stretch]:
    """Divide what an epoch must ask for into requests. Lazy: a stretch is made when the window has room for it.

    Args:
        table: the data set.
        rows: ``int64[n]``, rows of the table to ask for; leave out what the cache holds.
        positions: ``int64[n]``, the place in the epoch of each of them, ascending.
        dealer: chooses each request's length and way.
    """
    start = 0
    while start < len(positions):
        deal = dealer.deal(len(positions) - start)
        chosen = positions[start : start + deal.rows]
        samples = table.take(rows[start : start + deal.rows])
        expected = deal.bytes_per_sample * len(samples) if deal.bytes_per_sample else samples.encoded_bytes
        start += len(chosen)
        yield Stretch(positions=chosen, samples=samples, expected_bytes=expected, route=deal.route)
