"""The queue for memory for weights, ordered by the device time that each tenant has had."""

from collections.abc import Iterator
from dataclasses import dataclass

from frostline.batching import FairShares
from frostline.node.scheduling.tenants import Account

__all__ = ("Key", "WaitQueue", "Waiter")

Key = tuple[str, str, int]
"""The digest of a prefix, the name of an engine and the number of its cut."""

# Seconds for which a refused request keeps its place: twice the longest pause between the retries of our clients.
_KEPT_S = 10.0


@dataclass(slots=True, kw_only=True, eq=False)
class Waiter:
    """A place in the queue.

    Attributes:
        key: key of the awaited weights.
        asker: account of the tenant that waits.
        number: order of arrival.
        nbytes: size in bytes.
        counted_bytes: bytes that count against the tenant's quota.
        threads: number of threads that wait now.
        seen_at: time when the last of them left.
    """

    key: Key
    asker: Account
    number: int
    nbytes: int = 0
    counted_bytes: int = 0
    threads: int = 0
    seen_at: float = 0.0


class WaitQueue:
    """The requests that wait for memory. Not safe for threads.

    A tenant counts as having work until it has used what it waited for. Device time that others had meanwhile is thus
    owed to it.

    Args:
        fair_shares: order between tenants; None serves them in order of arrival.
    """

    def __init__(self, fair_shares: FairShares | None) -> None:
        self._fair_shares = fair_shares
        self._waiters: dict[tuple[Key, str], Waiter] = {}
        self._came = 0

    def __iter__(self) -> Iterator[Waiter]:
        """Iterate over the places with waiting threads, in order."""
        present = [waiter for waiter in self._waiters.values() if waiter.threads]
        return iter(sorted(present, key=lambda waiter: (self.tag(waiter.asker.name), waiter.number)))

    def tag(self, tenant: str) -> float:
        """The fair-share tag of a tenant."""
        return 0.0 if self._fair_shares is None else self._fair_shares.tag(tenant)

    def join(self, key: Key, asker: Account, nbytes: int, counted_bytes: int, now: float) -> Waiter:
        """Add a waiting thread, at the place that its tenant kept if it was here before."""
        for gone in [
            waiter for waiter in self._waiters.values() if not waiter.threads and now - waiter.seen_at > _KEPT_S
        ]:
            self._remove(gone)
        waiter = self._waiters.get((key, asker.name))
        if waiter is None:
            self._came += 1
            waiter = self._waiters[key, asker.name] = Waiter(key=key, asker=asker, number=self._came)
            if self._fair_shares is not None:
                self._fair_shares.arrive(asker.name)
        waiter.nbytes, waiter.counted_bytes = nbytes, counted_bytes
        waiter.threads += 1
        return waiter

    def stand_back(self, waiter: Waiter, now: float) -> None:
        """Remove a waiting thread; its place is kept until the tenant uses the weights or comes again."""
        waiter.threads -= 1
        waiter.seen_at = now

    def used(self, key: Key, tenant: str) -> None:
        """Drop a tenant's place, because it has used the weights."""
        waiter = self._waiters.get((key, tenant))
        if waiter is not None and not waiter.threads:
            self._remove(waiter)

    def _remove(self, waiter: Waiter) -> None:
        del self._waiters[waiter.key, waiter.asker.name]
        if self._fair_shares is not None:
            self._fair_shares.depart(waiter.asker.name)
