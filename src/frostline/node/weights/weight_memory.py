"""The memory for weights: what is resident, and who waits for others to be evicted."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Generic, Self, TypeVar, cast

from frostline.batching import Evictable, FairShares, Incoming, readable_bytes, to_evict
from frostline.core import REFERENCE
from frostline.errors import OverBudget, Overloaded
from frostline.node.scheduling.memory_pool import Cancelled, Pool, Reservation
from frostline.node.scheduling.statistics import Counters
from frostline.node.scheduling.tenants import Account
from frostline.node.weights.resident import Key, ResidentWeights, Waiter, WaitQueue

__all__ = ("WeightMemory", "WeightReservation", "prefix_key")

T = TypeVar("T")

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
        clock: returns monotonic seconds.
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
        self._rooms: dict[Key, WeightReservation[T]] = {}  # for weights that are being made
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
    def using(self, key: Key, user: str | None) -> Iterator[T | None]:
        """Keep the weights under a key resident while the context lasts, and yield them; None if there are none.

        Args:
            key: key of a prefix, or of an engine whose prefix is in use.
            user: name of the tenant; None for a long use that nobody should wait for.

        Raises:
            Overloaded: if they are being evicted.
        """
        with self._changed:
            held = self._held.get(key)
            if held is not None:
                if held.is_leaving(self._clock()):
                    why = "the memory of this prefix is needed for others: ask again, and it will be asked for"
                    raise Overloaded(why, retry_after_s=_RETRY_AFTER_S)
                held.enter(user)
        try:
            yield None if held is None else held.value
        finally:
            if held is not None:
                with self._changed:
                    held.leave(user, self._clock())
                    if user is not None:
                        self._queue.used(key, user)
                    if held.asked_at is not None and not held.users:
                        self._drop(key)
                    self._changed.notify_all()

    def served(self, digest: str, device_s: float) -> None:
        """Count device seconds of a prefix, divided by the weight of the tenant that used them."""
        with self._changed:
            held = self._held.get(prefix_key(digest))
            if held is not None:
                held.served_s += device_s

    def room(
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
            is_abandoned: checked after every ``wake``; True cancels the wait.

        Raises:
            OverBudget: if they can never fit, or are more than the tenant may have.
            Overloaded: if they do not fit beside the weights in use; the place in the queue is kept for a while.
            Cancelled: if the wait was cancelled.
        """
        self._check(nbytes, counted_bytes, asker)
        until = self._clock() + longest_s
        with self._changed:
            waiter = self._queue.join(key, asker, nbytes, counted_bytes, self._clock())
            try:
                while not self._is_there(key):
                    memory = self._granted(waiter)
                    if memory is not None:
                        room = self._rooms[key] = WeightReservation(
                            self, key, asker.name, nbytes, counted_bytes, memory
                        )
                        return room
                    if is_abandoned():
                        raise Cancelled
                    left_s = until - self._clock()
                    if left_s <= 0 or self._is_closed:
                        raise Overloaded(self._why(waiter), retry_after_s=_RETRY_AFTER_S)
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
            Overloaded: if there is not enough, even after evicting all unused weights.
        """
        with self._changed:
            while self._free_bytes() < nbytes:
                unused = [(held.used_at, key) for key, held in self._held.items() if not self._users(key)]
                if not unused:
                    raise Overloaded("the prefixes in use leave no room for this one", retry_after_s=_RETRY_AFTER_S)
                self._drop(min(unused)[1])
            return self._taken(nbytes)

    def put(self, key: Key, value: T, room: "WeightReservation[T]", memory: ExitStack) -> None:
        """Make weights resident."""
        with self._changed:
            assert key not in self._held, "one is made at a time"
            self._held[key] = ResidentWeights(
                value=value,
                memory=memory,
                nbytes=room.nbytes,
                owner=room.owner,
                counted_bytes=room.counted_bytes,
                used_at=self._clock(),
            )
            room.counted_bytes = 0  # the resident weights count from now on

    def ended(self, key: Key) -> None:
        """Remove the reservation of a key; its weights are resident now, or will not be made."""
        with self._changed:
            del self._rooms[key]
            self._changed.notify_all()

    def _check(self, nbytes: int, counted_bytes: int, asker: Account) -> None:
        with self._memory.changing() as budget:
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
            keys = None if other.key in self._rooms else to_evict(self._incoming(other), residents)
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
        coming_bytes = sum(room.counted_bytes for room in self._rooms.values() if room.owner == tenant)
        counted_bytes = held_bytes + coming_bytes + waiter.counted_bytes
        return Incoming(
            tenant=tenant,
            tag=self._queue.tag(tenant),
            lacking_bytes=waiter.nbytes - self._free_bytes(),
            over_bytes=counted_bytes - waiter.asker.max_weight_bytes(self._memory.total_bytes),
        )

    def _why(self, waiter: Waiter) -> str:
        if self._incoming(waiter).over_bytes > 0:
            return f"the prefixes in use take what tenant {waiter.asker.name} may have here"
        return "the prefixes in use leave no room for this one"

    def _ask(self, key: Key) -> None:
        """Evict weights; if they are in use, refuse new uses until they can be evicted."""
        held, now = self._held.get(key), self._clock()
        if held is None:  # an engine that was evicted with its prefix
            return
        if not held.users:
            self._drop(key)
        elif not held.is_leaving(now):
            held.asked_at = now

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
            Overloaded: if there is not enough memory.
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._memory.close()
        self._weights.ended(self._key)
