"""Resident weights and the requests that wait for their memory: the facts that decide about evictions."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from frostline.batching import DRAINED_WITHIN_S, Evictable, FairShares
from frostline.node.scheduling.tenants import Account

__all__ = ("Key", "ResidentWeights", "WaitQueue", "Waiter")

Key = tuple[str, str, int]
"""The digest of a prefix, the name of an engine and the number of its cut."""

T = TypeVar("T")

# Seconds after its last use in which a tenant counts as a user: the pause between two of its requests.
_RECENT_S = 1.0
# Seconds for which a refused request keeps its place: twice the longest pause between the retries of our clients.
_KEPT_S = 10.0


@dataclass(slots=True, kw_only=True, eq=False)
class ResidentWeights(Generic[T]):
    """Weights that occupy memory: a prefix or an engine made from it.

    Attributes:
        value: prefix or engine.
        memory: releases the memory when it is closed.
        nbytes: size in bytes.
        owner: tenant for which it was made, whose quota it counts against.
        counted_bytes: bytes that count against that quota.
        used_at: time when it was made, or its last use ended.
        users: number of requests that use it now, by tenant; None stands for long uses that cannot be interrupted.
        recent: time when each tenant's last use ended.
        served_s: device seconds that it had so far, divided by its tenants' weights.
        asked_at: time when its eviction was decided; None if it may stay.
    """

    value: T
    memory: ExitStack
    nbytes: int
    owner: str
    counted_bytes: int
    used_at: float
    users: Counter[str | None] = field(default_factory=Counter)
    recent: dict[str, float] = field(default_factory=dict)
    served_s: float = 0.0
    asked_at: float | None = None

    def enter(self, user: str | None) -> None:
        """Count a use that begins."""
        self.users[user] += 1

    def leave(self, user: str | None, now: float) -> None:
        """Count a use that ends."""
        self.users[user] -= 1
        self.users = +self.users
        self.used_at = now
        if user is not None:
            self.recent[user] = now

    def is_leaving(self, now: float) -> bool:
        """Whether it is being evicted, so that no new use may begin."""
        return self.asked_at is not None and now - self.asked_at < DRAINED_WITHIN_S

    def stay(
        self, key: Hashable, engines: "Iterable[ResidentWeights[T]]", tag: Callable[[str], float], now: float
    ) -> Evictable:
        """The facts that decide about its eviction.

        Args:
            key: key of the weights.
            engines: engines that are evicted with it.
            tag: returns the fair-share tag of a tenant.
            now: current time.
        """
        parts = (self, *engines)
        used_by = {user for user in self.users if user is not None}
        used_by |= {tenant for tenant, at in self.recent.items() if now - at < _RECENT_S}
        return Evictable(
            key=key,
            owner=self.owner,
            nbytes=sum(part.nbytes for part in parts),
            counted_bytes=sum(part.counted_bytes for part in parts if part.owner == self.owner),
            idle_s=0.0 if self.users else now - self.used_at,
            served_s=self.served_s,
            tag=min(map(tag, used_by), default=0.0),
            asked_s=None if self.asked_at is None else now - self.asked_at,
        )


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
