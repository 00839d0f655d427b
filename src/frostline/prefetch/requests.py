"""Decides which samples are asked for together, by which way, and how requests grow when an epoch begins."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np
import numpy.typing as npt

from frostline.config import LoaderSettings
from frostline.core import FeatureBatch, Route, Samples, SampleTable

__all__ = (
    "FIRST_REQUESTS",
    "Ask",
    "Deal",
    "Dealer",
    "Delivery",
    "PlannedRequest",
    "RampLengths",
    "RampUp",
    "WeightedRoutes",
    "plan_requests",
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlannedRequest:
    """Samples to ask for in one request.

    Attributes:
        positions: ``int64[n]``, places in the epoch, ascending; a gap is a sample that needs no asking.
        samples: the samples at those places.
        expected_bytes: payload that the answer should have. The window's bound is as good as this figure.
        route: the way that they take.
        epoch: epoch that they belong to, where a window asks for several: nothing of one is handed out before the last
            of the one before it.
        nodes: names of the nodes to ask, the owner of the samples first; none where any will do.
    """

    positions: npt.NDArray[np.int64]
    samples: Samples
    expected_bytes: int
    route: Route
    epoch: int = 0
    nodes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.positions) == 0 or len(self.positions) != len(self.samples):
            raise ValueError(f"a request has {len(self.positions)} positions for {len(self.samples)} samples")

    def __len__(self) -> int:
        return len(self.positions)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ask:
    """One request to make now.

    Attributes:
        number: names this attempt; an answer to an older attempt is not taken.
        attempt: 1, or more after failures and for a second request.
        samples: samples to ask for, in order; the request without those that arrived in earlier attempts.
        route: the way that they take; the same in every attempt.
        is_hedge: whether an earlier attempt is under way and late.
        epoch: epoch of the request.
        nodes: names of the nodes to ask, in order; every other attempt begins with the second.
    """

    number: int
    attempt: int
    samples: Samples
    route: Route
    is_hedge: bool
    epoch: int = 0
    nodes: tuple[str, ...] = ()


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


def plan_requests(
    table: SampleTable, rows: npt.NDArray[np.int64], positions: npt.NDArray[np.int64], dealer: Dealer
) -> Iterator[PlannedRequest]:
    """Divide what an epoch must ask for into requests. Lazy: a request is made when the window has room for it.

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
        yield PlannedRequest(positions=chosen, samples=samples, expected_bytes=expected, route=deal.route)


# Whole requests with which a ramp begins: one answer is on its way while another is read.
FIRST_REQUESTS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RampLengths:
    """How long the requests of a beginning are: a round of the shortest, a round of twice as many samples, and so on.

    Attributes:
        first: samples in a request of the first round.
        whole: samples in a request after the last round.
        round_requests: requests in a round.
    """

    first: int
    whole: int
    round_requests: int

    def __post_init__(self) -> None:
        if not 1 <= self.first <= self.whole or self.round_requests < 1:
            raise ValueError(f"requests cannot begin with {self.first} of {self.whole} samples")

    @classmethod
    def of(cls, settings: LoaderSettings) -> Self:
        """As many samples under way as in whole requests, in as many requests as there may be to begin with.

        A window that begins with two requests of 32 samples, and may have eight, begins with eight of 8; then come
        eight of 16: so many samples were under way in each round before, in two requests and in four.
        """
        whole, requests = settings.samples_per_request, settings.first_requests
        first = -(-FIRST_REQUESTS * whole // requests) if settings.ramp else whole
        return cls(first=min(first, whole), whole=whole, round_requests=requests)

    def at(self, number: int) -> int:
        """Samples in a request, by its number from 0."""
        rounds = min(number // self.round_requests, self.whole.bit_length())
        return min(self.first << rounds, self.whole)


class RampUp:
    """Another dealer's requests, the first of them short; a ``Dealer`` for one window, and not for several threads.

    A request is answered when its last sample is there. Nothing new goes out before, so that whole ones leave a link
    and a processor without work while the first of them are read; a batch, too, has to wait for more than its samples.

    Args:
        dealer: says which way the next samples take.
        lengths: most samples in each request.
    """

    def __init__(self, dealer: Dealer, lengths: RampLengths) -> None:
        self._dealer = dealer
        self._lengths = lengths
        self._dealt = 0

    def deal(self, left: int) -> Deal:
        """See ``Dealer``."""
        maximum = self._lengths.at(self._dealt)
        self._dealt += 1
        # After the beginning the dealer alone says how many.
        return self._dealer.deal(left if maximum == self._lengths.whole else min(left, maximum))


class WeightedRoutes:
    """Deals requests over a mixture of ways. Not for several threads.

    Each way is owed its share of every sample dealt; the next request goes where most is owed. After any number of
    samples a way is within one request of its share, and which way a sample took depends on nothing but the mixture
    and the samples before it.

    Args:
        shares: shares of the samples, by way; they sum to one.
        samples_per_request: most samples in one request.
        bytes_per_sample: payload of a sample that takes a way; 0 where the encoded sample itself travels.
    """

    def __init__(
        self, shares: Mapping[Route, float], *, samples_per_request: int, bytes_per_sample: Callable[[Route], int]
    ) -> None:
        self._samples_per_request = samples_per_request
        self._bytes_per_sample = bytes_per_sample
        self._dealt = 0
        self._probe: tuple[Route, int] | None = None
        self.change(shares)

    @property
    def dealt(self) -> int:
        """Samples dealt so far, in all mixtures."""
        return self._dealt

    def change(self, shares: Mapping[Route, float]) -> None:
        """Deal by another mixture from now on; what was dealt stays."""
        assert abs(sum(shares.values()) - 1) < 1e-6, "the shares of a mixture sum to one"
        self._shares = {route: share for route, share in shares.items() if share > 0}
        self._owed = dict.fromkeys(self._shares, 0.0)

    def probe(self, route: Route, rows: int) -> None:
        """Let the next request be this one, whatever the shares: its samples are wanted anyway."""
        self._probe = (route, rows)

    def deal(self, left: int) -> Deal:
        """See ``Dealer``."""
        route, rows = self._probe or (self._max_owed(left), self._samples_per_request)
        rows = min(rows, left)
        self._dealt += rows
        if self._probe is None:
            for way, share in self._shares.items():
                self._owed[way] += share * rows
            self._owed[route] -= rows
        self._probe = None
        return Deal(route=route, rows=rows, bytes_per_sample=self._bytes_per_sample(route))

    def _max_owed(self, left: int) -> Route:
        rows = min(self._samples_per_request, left)
        return max(self._shares, key=lambda route: self._owed[route] + self._shares[route] * rows)
