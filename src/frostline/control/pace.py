"""Decides when a job's next request may go, so that its requests and bytes a second stay within its share."""

import math
from dataclasses import dataclass

from frostline.control.amounts import Amounts

__all__ = ("Pace", "Used")

# What may be used at once after a pause, in seconds' worth: enough that threads which wake late lose nothing.
_SAVED_S = 0.25
# By how much a request's bytes change what the next ones are expected to bring.
_LEARNED = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Used:
    """What a job did since the report before.

    Attributes:
        seconds: how long that is.
        requests: requests that went.
        nbytes: bytes that came.
        waited_requests: whether a request waited because there were as many as it might make.
        waited_bytes: whether one waited because there were as many bytes as it might move.
    """

    seconds: float
    requests: int
    nbytes: int
    waited_requests: bool
    waited_bytes: bool


class _Bucket:
    """Tokens that come at a rate. It may owe some: what a request brings is known when it has come."""

    def __init__(self, now_s: float) -> None:
        self._per_s = math.inf
        self._left = 0.0
        self._at_s = now_s

    def change(self, per_s: float, now_s: float) -> None:
        self._fill(now_s)
        if self._per_s == math.inf:
            self._left = 0.0
        self._per_s = per_s
        self._left = min(self._left, self._maximum)

    def wait_s(self, now_s: float, least: float) -> float:
        """Seconds until there are so many tokens."""
        self._fill(now_s)
        lack = least - self._left
        if self._per_s == math.inf or lack <= 0:
            return 0.0
        return math.inf if self._per_s == 0 else lack / self._per_s

    def spend(self, amount: float, now_s: float) -> None:
        """Take tokens; a negative amount gives back what was taken in vain."""
        self._fill(now_s)
        if self._per_s < math.inf:
            self._left = min(self._maximum, self._left - amount)

    @property
    def _maximum(self) -> float:
        return max(1.0, _SAVED_S * self._per_s)

    def _fill(self, now_s: float) -> None:
        passed_s, self._at_s = max(0.0, now_s - self._at_s), max(now_s, self._at_s)
        if 0 < self._per_s < math.inf:
            self._left = min(self._maximum, self._left + passed_s * self._per_s)


class Pace:
    """The pace of one job's requests in one process. Not for several threads.

    A request is paid when it goes, with the bytes that requests before it brought, and what it brings beyond or below
    that when it has come. So requests go one after another as the share allows, not all at once when nothing is owed,
    and over seconds no more than the share is used.

    Args:
        now_s: monotonic seconds.

    Attributes:
        moved_bytes: bytes that have come so far.
        expected_bytes: bytes that the next request is paid with.
    """

    def __init__(self, now_s: float) -> None:
        self._requests = _Bucket(now_s)
        self._bytes = _Bucket(now_s)
        self._since_s = now_s
        self._counts = [0, 0]
        self._waited = [False, False]
        self._has_learned = False
        self.moved_bytes = 0
        self.expected_bytes = 0.0

    def change(self, share: Amounts, now_s: float) -> None:
        """Keep to another share from now on."""
        self._requests.change(share.requests_per_s, now_s)
        self._bytes.change(share.bytes_per_s, now_s)

    def ask(self, now_s: float) -> float:
        """Let a request go if it may, and return 0; else the seconds after which it is worth asking again."""
        waits_s = self._requests.wait_s(now_s, 1.0), self._bytes.wait_s(now_s, 0.0)
        if max(waits_s) > 0:
            self._waited = [before or wait_s > 0 for before, wait_s in zip(self._waited, waits_s, strict=True)]
            return max(waits_s)
        self._requests.spend(1.0, now_s)
        self._bytes.spend(self.expected_bytes, now_s)
        self._counts[0] += 1
        return 0.0

    def came(self, nbytes: int, now_s: float, paid_bytes: float = 0.0) -> None:
        """Count bytes that have come, of which so many were paid when their request went."""
        self._bytes.spend(nbytes - paid_bytes, now_s)
        self._counts[1] += nbytes
        self.moved_bytes += nbytes

    def ended(self, nbytes: int, unused_bytes: float, now_s: float) -> None:
        """A request has brought so many bytes, and so many that it was paid with did not come."""
        self._bytes.spend(-unused_bytes, now_s)
        if nbytes:
            self.expected_bytes += (_LEARNED if self._has_learned else 1.0) * (nbytes - self.expected_bytes)
            self._has_learned = True

    def used(self, now_s: float) -> Used:
        """What was done since the last call."""
        found = Used(
            seconds=now_s - self._since_s,
            requests=self._counts[0],
            nbytes=self._counts[1],
            waited_requests=self._waited[0],
            waited_bytes=self._waited[1],
        )
        self._since_s, self._counts, self._waited = now_s, [0, 0], [False, False]
        return found
