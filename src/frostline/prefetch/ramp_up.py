"""Decides how long a window's first requests are: short ones, and longer ones as answers come. Pure."""

from dataclasses import dataclass
from typing import Self

from frostline.config import LoaderSettings
from frostline.prefetch.requests import Deal, Dealer

__all__ = ("FIRST_REQUESTS", "Lengthening", "Lengths")

# Whole requests with which a ramp begins: one answer is on its way while another is read.
FIRST_REQUESTS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
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


class Lengthening:
    """Another dealer's requests, the first of them short; a ``Dealer`` for one window, and not for several threads.

    A request is answered when its last sample is there. Nothing new goes out before, so that whole ones leave a link
    and a processor without work while the first of them are read; a batch, too, has to wait for more than its samples.

    Args:
        dealer: says which way the next samples take.
        lengths: most samples in each request.
    """

    def __init__(self, dealer: Dealer, lengths: Lengths) -> None:
        self._dealer = dealer
        self._lengths = lengths
        self._dealt = 0

    def deal(self, left: int) -> Deal:
        """See ``Dealer``."""
        most = self._lengths.at(self._dealt)
        self._dealt += 1
        # After the beginning the dealer alone says how many.
        return self._dealer.deal(left if most == self._lengths.whole else min(left, most))
