"""Decides which way each request takes, so that every way gets its share of the samples. Pure."""

from collections.abc import Callable, Mapping

from frostline.core import Route
from frostline.prefetch.requests import Deal

__all__ = ("Mixer",)


class Mixer:
    """Deals requests over a mixture of ways. Not for several threads.

    Each way is owed its share of every sample dealt; the next request goes where most is owed. After any number of
    samples a way is within one request of its share, and which way a sample took depends on nothing but the mixture
    and the samples before it.

    Args:
        shares: of the samples, by way; they sum to one.
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
            for one, share in self._shares.items():
                self._owed[one] += share * rows
            self._owed[route] -= rows
        self._probe = None
        return Deal(route=route, rows=rows, bytes_per_sample=self._bytes_per_sample(route))

    def _max_owed(self, left: int) -> Route:
        rows = min(self._samples_per_request, left)
        return max(self._shares, key=lambda route: self._owed[route] + self._shares[route] * rows)
