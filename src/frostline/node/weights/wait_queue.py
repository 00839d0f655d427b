"""The line of those who wait for memory for weights, in which each stands by what its tenant has had of the device."""

from collections.abc import Iterator
from dataclasses import dataclass

from frostline.batching import FairShares
from frostline.node.scheduling.tenants import Account

__all__ = ("Key", "WaitQueue", "Waiter")

Key = tuple[str, str, int]
"""Digest of a prefix, name of an engine and number of its cut."""

# Who was asked to come again keeps its place for so long: twice the longest pause of Frostline's clients.
_KEPT_S = 10.0


@dataclass(slots=True, kw_only=True, eq=False)
class Waiter:
    """A place in the line.

    Attributes:
        key: of what is waited for.
        asker: for whom.
        number: the lower came first.
        nbytes: that are wanted.
        counted_bytes: of the tenant's quota.
        threads: that wait there now.
        seen_at: when the last of them went.
    """

    key: Key
    asker: Account
    number: int
    nbytes: int = 0
    counted_bytes: int = 0
    threads: int = 0
    seen_at: float = 0.0


class WaitQueue:
    """Who waits. Not for several threads.

    Its tenants count as having work under way until they have used what they waited for, so that the seconds which
    others had meanwhile are owed to them.

    Args:
        turns: where tenants stand; None where nobody tells them apart, and who came first is first.
    """

    def __init__(self, turns: FairShares | None) -> None:
        self._turns = turns
        self._places: dict[tuple[Key, str], Waiter] = {}
        self._came = 0

    def __iter__(self) -> Iterator[Waiter]:
        """Those who wait now, in their order."""
        present = [place for place in self._places.values() if place.threads]
        return iter(sorted(present, key=lambda one: (self.tag(one.asker.name), one.number)))

    def tag(self, tenant: str) -> float:
        """Where a tenant stands."""
        return 0.0 if self._turns is None else self._turns.tag(tenant)

    def join(self, key: Key, asker: Account, nbytes: int, counted_bytes: int, now: float) -> Waiter:
        """A thread waits, at the place that its tenant had where it has come again."""
        for one in [place for place in self._places.values() if not place.threads and now - place.seen_at > _KEPT_S]:
            self._remove(one)
        waiter = self._places.get((key, asker.name))
        if waiter is None:
            self._came += 1
            waiter = self._places[key, asker.name] = Waiter(key=key, asker=asker, number=self._came)
            if self._turns is not None:
                self._turns.arrive(asker.name)
        waiter.nbytes, waiter.counted_bytes = nbytes, counted_bytes
        waiter.threads += 1
        return waiter

    def stand_back(self, waiter: Waiter, now: float) -> None:
        """A thread waits no more; its place is kept for when it uses what it got, or comes again."""
        waiter.threads -= 1
        waiter.seen_at = now

    def used(self, key: Key, tenant: str) -> None:
        """A tenant has used what it may have waited for."""
        waiter = self._places.get((key, tenant))
        if waiter is not None and not waiter.threads:
            self._remove(waiter)

    def _remove(self, waiter: Waiter) -> None:
        del self._places[waiter.key, waiter.asker.name]
        if self._turns is not None:
            self._turns.depart(waiter.asker.name)
