"""The memory for weights: what is resident, who waits for it, and what is evicted for them."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Generic, Self, TypeVar, cast

from frostline.batching import Claim, FairShares, kept_beside, readable_bytes
from frostline.core import REFERENCE
from frostline.core.errors import OverBudget, Overloaded
from frostline.node.memory import Cancelled, Pool, Reservation
from frostline.node.statistics import Counters
from frostline.node.tenants import Account

__all__ = (
    "Evictable",
    "Incoming",
    "Key",
    "ResidentWeights",
    "WaitQueue",
    "Waiter",
    "WeightMemory",
    "WeightReservation",
    "prefix_key",
    "to_evict",
)


# Unused for longer than this is not in use: the pause between two requests of a job that has one under way.
_IDLE_S = 1.0
# Device seconds at weight 1 that a stay lasts at least where others wait: several times what it takes a network to be
# read and made ready (0.16 s for ResNet-18, 0.3 s for ShuffleNet), so that most of the node's time goes into answers.
_TURN_S = 1.0
# Seconds that a stay lasts at most where others wait: clients that read slowly, or ask for little again and again, may
# never take a turn's worth of the device.
_STAY_S = 30.0
# What was asked to leave and is still in use after that time is asked again much later, and others leave instead.
_GONE_WITHIN_S = 10.0
_ASKED_AGAIN_S = 30.0

_DRAINED_WITHIN_S = 5.0
"""Requests that use what is to leave have so long to end; those that can be ended are ended then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evictable:
    """Something that is in memory.

    Attributes:
        key: key of the weights.
        owner: the tenant against whose quota it counts.
        nbytes: bytes that are free without it.
        counted_bytes: bytes that count against the owner's quota.
        idle_s: the time since it was used last; 0 while it is in use.
        served_s: device seconds, divided by its tenants' weights, that it had since it came.
        tag: the place where the lowest of the tenants stands that use it; see ``FairShares.tag``.
        asked_s: the time since it was asked to leave; None where it was not.
        stayed_s: the time since it came.
    """

    key: Hashable
    owner: str
    nbytes: int
    counted_bytes: int
    idle_s: float
    served_s: float
    tag: float
    asked_s: float | None = None
    stayed_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Incoming:
    """Something that is to come into memory.

    Attributes:
        tenant: tenant whose quota it will count against.
        tag: the place where that tenant stands.
        lacking_bytes: bytes of memory that are lacking; none where 0 or below.
        over_bytes: the bytes by which the tenant's quota is too small beside what it has; not at all where 0 or below.
    """

    tenant: str
    tag: float
    lacking_bytes: int
    over_bytes: float


def to_evict(incoming: Incoming, residents: Sequence[Evictable]) -> tuple[Hashable, ...] | None:
    """What has to leave for something that comes in.

    What is not in use may always leave, longest unused first. What is in use may once it had a turn's worth of the
    device, unless its tenant stands lower than the one that waits, or once it has stayed for half a minute; the most
    served first. So all take turns, each with device seconds in proportion to its tenant's weight, and who came late or
    has been without waits for no more than one turn of each other.

    Returns:
        The fewest weights that are enough, with those that have begun to leave; empty if too few may leave yet. None if
        even all that could ever leave would not be enough, so that waiting is useless.
    """
    able = [resident for resident in residents if not _is_stuck(resident)]
    if not _is_enough(incoming, able):
        return None
    ready = sorted((entry for entry in able if _may_leave(entry, incoming)), key=_order)
    chosen: list[Evictable] = []
    for entry in ready:
        if entry.owner == incoming.tenant and _missing_quota(incoming, chosen) > 0:
            chosen.append(entry)
    for entry in ready:
        if entry not in chosen and _missing_memory(incoming, chosen) > 0:
            chosen.append(entry)
    if not _is_enough(incoming, chosen):
        return ()
    for entry in tuple(chosen):  # a large one that came in later may do for several before it
        others = [other for other in chosen if other is not entry]
        if entry.asked_s is None and _is_enough(incoming, others):
            chosen = others
    return tuple(entry.key for entry in chosen)


def _is_enough(incoming: Incoming, gone: Sequence[Evictable]) -> bool:
    return _missing_quota(incoming, gone) <= 0 and _missing_memory(incoming, gone) <= 0


def _missing_quota(incoming: Incoming, gone: Sequence[Evictable]) -> float:
    return incoming.over_bytes - sum(entry.counted_bytes for entry in gone if entry.owner == incoming.tenant)


def _missing_memory(incoming: Incoming, gone: Sequence[Evictable]) -> float:
    return incoming.lacking_bytes - sum(entry.nbytes for entry in gone)


def _may_leave(evictable: Evictable, incoming: Incoming) -> bool:
    if evictable.idle_s >= _IDLE_S or evictable.asked_s is not None or evictable.stayed_s >= _STAY_S:
        return True
    return evictable.served_s >= _TURN_S and evictable.tag >= incoming.tag


def _is_stuck(evictable: Evictable) -> bool:
    return evictable.asked_s is not None and _GONE_WITHIN_S <= evictable.asked_s < _ASKED_AGAIN_S


def _order(evictable: Evictable) -> tuple[int, float]:
    if evictable.asked_s is not None:
        return 0, -evictable.asked_s
    if evictable.idle_s >= _IDLE_S:
        return 1, -evictable.idle_s
    return 2, -evictable.served_s


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
        memory: stack that releases the memory when it is closed.
        nbytes: size in bytes.
        owner: tenant for which it was made, whose quota it counts against.
        counted_bytes: bytes that count against that quota.
        made_at: time when it was made.
        used_at: time when it was made, or its last use ended.
        users: number of requests that use it now, by tenant; None stands for long uses that cannot be interrupted.
        recent: time when each tenant's last use ended.
        served_s: device seconds that it had so far, divided by its tenants' weights.
        asked_at: time when its eviction was decided; None if it may stay.
        ends: functions that end uses that can be ended.
    """

    value: T
    memory: ExitStack
    nbytes: int
    owner: str
    counted_bytes: int
    made_at: float
    used_at: float
    users: Counter[str | None] = field(default_factory=Counter)
    recent: dict[str, float] = field(default_factory=dict)
    served_s: float = 0.0
    asked_at: float | None = None
    ends: list[Callable[[], None]] = field(default_factory=list)

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
        return self.asked_at is not None and now - self.asked_at < _GONE_WITHIN_S

    def is_overdue(self, now: float) -> bool:
        """Whether uses that can be ended are to be ended, because it was asked to leave."""
        return self.is_leaving(now) and self.asked_at is not None and now - self.asked_at >= _DRAINED_WITHIN_S

    def stay(
        self, key: Hashable, engines: "Iterable[ResidentWeights[T]]", tag: Callable[[str], float], now: float
    ) -> Evictable:
        """The facts that decide about its eviction.

        Args:
            key: key of the weights.
            engines: engines that are evicted with it.
            tag: function that returns the fair-share tag of a tenant.
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
            stayed_s=now - self.made_at,
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

    def drop_slot(self, key: Key, tenant: str) -> None:
        """Drop a tenant's place, because it has used the weights."""
        waiter = self._waiters.get((key, tenant))
        if waiter is not None and not waiter.threads:
            self._remove(waiter)

    def _remove(self, waiter: Waiter) -> None:
        del self._waiters[waiter.key, waiter.asker.name]
        if self._fair_shares is not None:
            self._fair_shares.depart(waiter.asker.name)


_RETRY_AFTER_S = 1.0
# Seconds between two checks of a waiting thread: device time changes the order without a notification.
_LOOK_S = 0.1


def prefix_key(digest: str) -> Key:
    """The key of a prefix itself; other keys with its digest belong to its engines, which are evicted with it."""
    return digest, REFERENCE, 0


class WeightMemory(Generic[T]):
    """The resident weights, by key. Safe for threads.

    Args:
        memory: pool for weights.
        fair_shares: order between tenants; None serves them in order of arrival.
        counters: counters of the node.
        clock: clock that returns monotonic seconds.
    """

    def __init__(
        self,
        memory: Pool,
        fair_shares: FairShares | None,
        counters: Counters,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._memory = memory
        self._counters = counters
        self._clock = clock
        self._changed = threading.Condition()
        self._held: dict[Key, ResidentWeights[T]] = {}
        self._reservations: dict[Key, WeightReservation[T]] = {}  # for weights that are being made
        self._queue = WaitQueue(fair_shares)
        self._is_closed = False

    def __len__(self) -> int:
        with self._changed:
            return sum(key == prefix_key(key[0]) for key in self._held)

    def __contains__(self, key: Key) -> bool:
        with self._changed:
            return key in self._held

    @property
    def total_bytes(self) -> int:
        """The size of the memory."""
        return self._memory.total_bytes

    @property
    def waiting(self) -> int:
        """The number of waiting requests; each key and tenant counts once."""
        with self._changed:
            return sum(1 for _ in self._queue)

    def owned_bytes(self, owner: str) -> int:
        """The bytes of all resident weights that count against a tenant's quota."""
        with self._changed:
            return sum(held.counted_bytes for held in self._held.values() if held.owner == owner)

    def prefixes_of(self, owner: str) -> list[str]:
        """Digests of the prefixes that count against a tenant's quota."""
        with self._changed:
            mine = [key for key, held in self._held.items() if held.owner == owner]
        return [key[0] for key in mine if key == prefix_key(key[0])]

    def left_bytes(self, key: Key, asker: Account) -> float:
        """The bytes that a tenant's quota leaves beside the weights under a key."""
        with self._changed:
            held = self._held.get(key)
        maximum = asker.max_weight_bytes(self._memory.total_bytes)
        return maximum - held.counted_bytes if held is not None and held.owner == asker.name else maximum

    @contextmanager
    def pin(self, key: Key, user: str | None, end: Callable[[], None] | None = None) -> Iterator[T | None]:
        """Keep the weights under a key resident while the context lasts, and yield them; None if there are none.

        Args:
            key: key of a prefix, or of an engine whose prefix is in use.
            user: name of the tenant; None for a long use that nobody should wait for.
            end: function that makes the context end soon, called where others wait for the memory and it does not end
                by itself in time; from any thread, and more than once.

        Raises:
            Overloaded: The weights are being evicted.
        """
        with self._changed:
            held = self._held.get(key)
            if held is not None:
                if held.is_leaving(self._clock()):
                    why = "the memory of this prefix is needed for others: ask again, and it will be asked for"
                    raise Overloaded(why, retry_after_s=_RETRY_AFTER_S)
                held.enter(user)
                if end is not None:
                    held.ends.append(end)
        try:
            yield None if held is None else held.value
        finally:
            if held is not None:
                with self._changed:
                    held.leave(user, self._clock())
                    if end in held.ends:
                        held.ends.remove(end)
                    if user is not None:
                        self._queue.drop_slot(key, user)
                    if held.asked_at is not None and not held.users:
                        self._drop(key)
                    self._changed.notify_all()

    def charge_prefix(self, digest: str, device_s: float) -> None:
        """Count device seconds of a prefix, divided by the weight of the tenant that used them."""
        with self._changed:
            held = self._held.get(prefix_key(digest))
            if held is not None:
                held.served_s += device_s

    def reserve(
        self,
        key: Key,
        nbytes: int,
        asker: Account,
        *,
        counted_bytes: int,
        longest_s: float,
        is_abandoned: Callable[[], bool] = lambda: False,
    ) -> "WeightReservation[T] | None":
        """Wait in the queue for memory for weights that are to be made; None if they are resident already.

        Only one request at a time makes the weights of a key.

        Args:
            key: key of the weights.
            nbytes: size in bytes.
            asker: account of the tenant for which they are made.
            counted_bytes: bytes that count against the tenant's quota.
            longest_s: maximum wait in seconds.
            is_abandoned: function that is called after every ``wake``; True cancels the wait.

        Raises:
            OverBudget: The weights can never fit, or are more than the tenant may have.
            Overloaded: The weights do not fit beside those in use; the place in the queue is kept for a while.
            Cancelled: The wait was cancelled.
        """
        self._check(nbytes, counted_bytes, asker)
        until = self._clock() + longest_s
        with self._changed:
            waiter = self._queue.join(key, asker, nbytes, counted_bytes, self._clock())
            try:
                while not self._is_there(key):
                    memory = self._granted(waiter)
                    if memory is not None:
                        reservation = self._reservations[key] = WeightReservation(
                            self, key, asker.name, nbytes, counted_bytes, memory
                        )
                        return reservation
                    if is_abandoned():
                        raise Cancelled
                    left_s = until - self._clock()
                    if left_s <= 0 or self._is_closed:
                        raise Overloaded(self._why(waiter), retry_after_s=_RETRY_AFTER_S)
                    self._end_overdue()
                    self._changed.wait(min(left_s, _LOOK_S))
                return None
            finally:
                self._stand_back(waiter)

    def wake(self) -> None:
        """Make all waiting threads check whether they are still wanted."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """Refuse all waiting requests."""
        self._is_closed = True
        self.wake()

    def more(self, nbytes: int) -> Reservation:
        """Reserve more memory for a reservation. It does not wait, because it would block what it holds meanwhile.

        Raises:
            Overloaded: Memory is too short, even after evicting all unused weights.
        """
        with self._changed:
            while self._free_bytes() < nbytes:
                unused = [(held.used_at, key) for key, held in self._held.items() if not self._users(key)]
                if not unused:
                    raise Overloaded("the prefixes in use leave no memory for this one", retry_after_s=_RETRY_AFTER_S)
                self._drop(min(unused)[1])
            return self._taken(nbytes)

    def put(self, key: Key, value: T, reservation: "WeightReservation[T]", memory: ExitStack) -> None:
        """Make weights resident."""
        with self._changed:
            assert key not in self._held, "one is made at a time"
            self._held[key] = ResidentWeights(
                value=value,
                memory=memory,
                nbytes=reservation.nbytes,
                owner=reservation.owner,
                counted_bytes=reservation.counted_bytes,
                made_at=self._clock(),
                used_at=self._clock(),
            )
            reservation.counted_bytes = 0  # the resident weights count from now on

    def end_reservation(self, key: Key) -> None:
        """Remove the reservation of a key; its weights are resident now, or will not be made."""
        with self._changed:
            del self._reservations[key]
            self._changed.notify_all()

    def _check(self, nbytes: int, counted_bytes: int, asker: Account) -> None:
        with self._memory.lock_budget() as budget:
            budget.check(nbytes)
        maximum = asker.max_weight_bytes(self._memory.total_bytes)
        if counted_bytes > maximum:
            raise OverBudget(
                f"this takes {readable_bytes(counted_bytes)} of weights, and tenant {asker.name} may have "
                f"{readable_bytes(maximum)} here: raise its weight_bytes, or start the node with more --memory"
            )

    def _is_there(self, key: Key) -> bool:
        return key in self._held and not self._held[key].is_leaving(self._clock())

    def _stand_back(self, waiter: Waiter) -> None:
        self._queue.stand_back(waiter, self._clock())
        if not any(self._queue):
            for held in self._held.values():  # no request waits for its memory any more
                held.asked_at = None
        self._changed.notify_all()

    def _granted(self, waiter: Waiter) -> Reservation | None:
        """Reserve memory if it is this waiter's turn and there is enough; begin evictions that it needs."""
        residents = self._evictable()
        for other in self._queue:
            waits = other.key in self._reservations or not self._leaves_others_their_parts(other)
            keys = None if waits else to_evict(self._incoming(other), residents)
            if keys is None:  # it is being made, or cannot be granted: those behind it need not wait for it
                continue
            if other is not waiter:
                return None
            for key in keys:
                self._ask(cast(Key, key))
            incoming = self._incoming(other)
            return self._taken(other.nbytes) if incoming.lacking_bytes <= 0 and incoming.over_bytes <= 0 else None
        return None

    def _evictable(self) -> list[Evictable]:
        """The candidates for eviction: prefixes with their engines, and unused engines alone."""
        now, residents = self._clock(), []
        for key, held in self._held.items():
            if None in held.users or (key != prefix_key(key[0]) and held.users):
                continue
            engines = [self._held[other] for other in self._engines(key) if self._held[other].users]
            residents.append(held.stay(key, engines, self._queue.tag, now))
        return residents

    def _incoming(self, waiter: Waiter) -> Incoming:
        tenant = waiter.asker.name
        held_bytes = sum(held.counted_bytes for held in self._held.values() if held.owner == tenant)
        coming_bytes = sum(
            reservation.counted_bytes for reservation in self._reservations.values() if reservation.owner == tenant
        )
        counted_bytes = held_bytes + coming_bytes + waiter.counted_bytes
        return Incoming(
            tenant=tenant,
            tag=self._queue.tag(tenant),
            lacking_bytes=waiter.nbytes - self._free_bytes(),
            over_bytes=counted_bytes - waiter.asker.max_weight_bytes(self._memory.total_bytes),
        )

    def _leaves_others_their_parts(self, waiter: Waiter) -> bool:
        """Whether all that is being made may be that much more: it comes as slowly as its senders like."""
        coming: Counter[str] = Counter()
        for reservation in self._reservations.values():
            coming[reservation.owner] += reservation.nbytes
        claim = Claim(tenant=waiter.asker.name, tenants=waiter.asker.tenants)
        kept_bytes = kept_beside(self._memory.total_bytes, waiter.nbytes, claim, coming)
        return not kept_bytes or coming.total() + waiter.nbytes + kept_bytes <= self._memory.total_bytes

    def _why(self, waiter: Waiter) -> str:
        if self._incoming(waiter).over_bytes > 0:
            return f"the prefixes in use take what tenant {waiter.asker.name} may have here"
        return "the prefixes in use leave no memory for this one"

    def _ask(self, key: Key) -> None:
        """Evict weights; if they are in use, refuse new uses until they can be evicted."""
        held, now = self._held.get(key), self._clock()
        if held is None:  # an engine that was evicted with its prefix
            return
        if not held.users:
            self._drop(key)
        elif not held.is_leaving(now):
            held.asked_at = now

    def _end_overdue(self) -> None:
        """End what uses weights that were asked to leave long ago: clients read as slowly as they like."""
        ends: list[Callable[[], None]] = []
        for held in self._held.values():
            if held.is_overdue(self._clock()):
                ends += held.ends
                held.ends.clear()
        if ends:  # in a thread of its own, since this one holds the lock, and what ends leaves through it
            threading.Thread(target=lambda: [end() for end in ends], name="frostline-end", daemon=True).start()

    def _drop(self, key: Key) -> None:
        # Engines are used only together with their prefix, and would keep its weights alive without it.
        for engine in [*self._engines(key), key]:
            self._held.pop(engine).memory.close()
        self._counters.add(evicted=1)

    def _engines(self, key: Key) -> list[Key]:
        """The keys of a prefix's engines; an engine has none."""
        return (
            [other for other in self._held if other[0] == key[0] and other != key] if key == prefix_key(key[0]) else []
        )

    def _users(self, key: Key) -> int:
        return self._held[key].users.total()

    def _free_bytes(self) -> int:
        now = self._memory.statistics()
        return now.total_bytes - now.reserved_bytes

    def _taken(self, nbytes: int) -> Reservation:
        memory = self._memory.take(nbytes)
        assert memory is not None, "nothing else takes from this memory"
        return memory


class WeightReservation(Generic[T]):
    """Memory for weights that are being made. A context manager, which releases it unless ``keep`` was called.

    Attributes:
        owner: tenant for which they are made.
        nbytes: size in bytes.
        counted_bytes: bytes that count against the tenant's quota.
    """

    def __init__(
        self, weights: WeightMemory[T], key: Key, owner: str, nbytes: int, counted_bytes: int, memory: Reservation
    ) -> None:
        self.owner = owner
        self.counted_bytes = counted_bytes
        self._weights = weights
        self._key = key
        self.nbytes = nbytes
        self._first = memory
        self._memory = ExitStack()
        self._memory.enter_context(memory)

    def resize(self, nbytes: int) -> None:
        """Change the size, once it is known.

        Raises:
            Overloaded: Memory is too short.
        """
        if nbytes > self.nbytes:
            self._memory.enter_context(self._weights.more(nbytes - self.nbytes))
        else:
            self._first.shrink(nbytes)
        self.nbytes = nbytes

    def keep(self, value: T) -> None:
        """Make the value resident in this memory."""
        self._weights.put(self._key, value, self, self._memory.pop_all())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._memory.close()
        self._weights.end_reservation(self._key)
