"""The memory for weights: what lies there, and who waits in line for what others have to give back."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Generic, Self, TypeVar, cast

from frostline.batching import FairShares, Stay, Wish, leaving, readable_bytes
from frostline.core import REFERENCE
from frostline.errors import OverBudget, Overloaded
from frostline.node.scheduling.memory_pool import Abandoned, Pool, Reservation
from frostline.node.scheduling.statistics import Counters
from frostline.node.scheduling.tenants import Account
from frostline.node.weights.resident import ResidentWeights
from frostline.node.weights.wait_queue import Key, Waiter, WaitQueue

__all__ = ("WeightMemory", "WeightReservation", "prefix_key")

T = TypeVar("T")

_RETRY_AFTER_S = 1.0
# What the device did for a prefix shows in time, and nobody tells of it.
_LOOK_S = 0.1


def prefix_key(digest: str) -> Key:
    """Under which a prefix itself lies; other keys of its digest are of its engines, and go with it."""
    return digest, REFERENCE, 0


class WeightMemory(Generic[T]):
    """What lies in the memory for weights, by key. Safe for threads.

    Args:
        memory: all that there is.
        turns: where tenants stand; None where nobody tells them apart.
        counters: told what is dropped.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        memory: Pool,
        turns: FairShares | None,
        counters: Counters,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._memory = memory
        self._counters = counters
        self._clock = clock
        self._changed = threading.Condition()
        self._held: dict[Key, ResidentWeights[T]] = {}
        self._rooms: dict[Key, WeightReservation[T]] = {}  # for what is being made
        self._line = WaitQueue(turns)
        self._is_closed = False

    def __len__(self) -> int:
        with self._changed:
            return sum(key == prefix_key(key[0]) for key in self._held)

    def __contains__(self, key: Key) -> bool:
        with self._changed:
            return key in self._held

    @property
    def total_bytes(self) -> int:
        """All that there is."""
        return self._memory.total_bytes

    @property
    def waiting(self) -> int:
        """How many wait for room, each key and tenant counted once."""
        with self._changed:
            return sum(1 for _ in self._line)

    def owned_bytes(self, owner: str) -> int:
        """What of all that is held counts against a tenant's quota."""
        with self._changed:
            return sum(one.counted_bytes for one in self._held.values() if one.owner == owner)

    def left_bytes(self, key: Key, asker: Account) -> float:
        """What a tenant's quota leaves beside what is held under a key."""
        with self._changed:
            held = self._held.get(key)
        most = asker.max_weight_bytes(self._memory.total_bytes)
        return most - held.counted_bytes if held is not None and held.owner == asker.name else most

    @contextmanager
    def using(self, key: Key, user: str | None) -> Iterator[T | None]:
        """What is held under a key, which stays while the context lasts; None where there is nothing.

        Args:
            key: of a prefix, or of an engine whose prefix is in use.
            user: the tenant; None where it uses it for long, and nobody should wait for that.

        Raises:
            Overloaded: It is to leave.
        """
        with self._changed:
            held = self._held.get(key)
            if held is not None:
                if held.is_leaving(self._clock()):
                    why = "others have waited for the memory of this prefix: ask again, and it will be asked for"
                    raise Overloaded(why, retry_after_s=_RETRY_AFTER_S)
                held.enter(user)
        try:
            yield None if held is None else held.value
        finally:
            if held is not None:
                with self._changed:
                    held.leave(user, self._clock())
                    if user is not None:
                        self._line.used(key, user)
                    if held.asked_at is not None and not held.users:
                        self._drop(key)
                    self._changed.notify_all()

    def served(self, digest: str, device_s: float) -> None:
        """The device ran for a prefix for so many seconds, divided by the weight of whose rows they were."""
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
        """Memory for what is to lie under a key, for which is waited in line; None where it lies there already.

        One that makes it is let in at a time.

        Args:
            key: names it.
            nbytes: that it takes.
            asker: for whom it is made.
            counted_bytes: of the tenant's quota.
            longest_s: that is waited.
            is_abandoned: looked at again after ``wake``.

        Raises:
            OverBudget: It can never fit, or is more than the tenant may have.
            Overloaded: It does not fit beside what is in use; its place in the line is kept for a while.
            Abandoned: Nobody wants it any more.
        """
        self._check(nbytes, counted_bytes, asker)
        until = self._clock() + longest_s
        with self._changed:
            waiter = self._line.join(key, asker, nbytes, counted_bytes, self._clock())
            try:
                while not self._is_there(key):
                    memory = self._granted(waiter)
                    if memory is not None:
                        room = self._rooms[key] = WeightReservation(
                            self, key, asker.name, nbytes, counted_bytes, memory
                        )
                        return room
                    if is_abandoned():
                        raise Abandoned
                    left_s = until - self._clock()
                    if left_s <= 0 or self._is_closed:
                        raise Overloaded(self._why(waiter), retry_after_s=_RETRY_AFTER_S)
                    self._changed.wait(min(left_s, _LOOK_S))
                return None
            finally:
                self._stand_back(waiter)

    def wake(self) -> None:
        """Have all who wait look whether they are still wanted."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """Let nobody wait any more."""
        self._is_closed = True
        self.wake()

    def more(self, nbytes: int) -> Reservation:
        """Memory beside some that a room has, which does not wait: it would keep what it has meanwhile.

        Raises:
            Overloaded: There is none, even without what nobody uses.
        """
        with self._changed:
            while self._free_bytes() < nbytes:
                unused = [(held.used_at, key) for key, held in self._held.items() if not self._users(key)]
                if not unused:
                    raise Overloaded("the prefixes in use leave no room for this one", retry_after_s=_RETRY_AFTER_S)
                self._drop(min(unused)[1])
            return self._taken(nbytes)

    def put(self, key: Key, value: T, room: "WeightReservation[T]", memory: ExitStack) -> None:
        """Hold it from now on."""
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
            room.counted_bytes = 0  # which what is held does now

    def ended(self, key: Key) -> None:
        """What has room under a key is held now, or will not be."""
        with self._changed:
            del self._rooms[key]
            self._changed.notify_all()

    def _check(self, nbytes: int, counted_bytes: int, asker: Account) -> None:
        with self._memory.changing() as budget:
            budget.check(nbytes)
        most = asker.max_weight_bytes(self._memory.total_bytes)
        if counted_bytes > most:
            raise OverBudget(
                f"this takes {readable_bytes(counted_bytes)} of weights, and tenant {asker.name} may have "
                f"{readable_bytes(most)} here: give it more weight_bytes, or start the node with more --memory"
            )

    def _is_there(self, key: Key) -> bool:
        return key in self._held and not self._held[key].is_leaving(self._clock())

    def _stand_back(self, waiter: Waiter) -> None:
        self._line.stand_back(waiter, self._clock())
        if not any(self._line):
            for held in self._held.values():  # nobody waits for its memory any more
                held.asked_at = None
        self._changed.notify_all()

    def _granted(self, waiter: Waiter) -> Reservation | None:
        """Memory, if it is its turn and there is enough; what has to leave for it is asked to."""
        stays = self._stays()
        for one in self._line:
            keys = None if one.key in self._rooms else leaving(self._wish(one), stays)
            if keys is None:  # others make it, or it is more than can leave: nobody behind has to wait for that
                continue
            if one is not waiter:
                return None
            for key in keys:
                self._ask(cast(Key, key))
            wish = self._wish(one)
            return self._taken(one.nbytes) if wish.lacking_bytes <= 0 and wish.over_bytes <= 0 else None
        return None

    def _stays(self) -> list[Stay]:
        """A prefix leaves with its engines; one of those that nobody uses may leave alone."""
        now, stays = self._clock(), []
        for key, held in self._held.items():
            if None in held.users or (key != prefix_key(key[0]) and held.users):
                continue
            engines = [self._held[other] for other in self._engines(key) if self._held[other].users]
            stays.append(held.stay(key, engines, self._line.tag, now))
        return stays

    def _wish(self, waiter: Waiter) -> Wish:
        tenant = waiter.asker.name
        held_bytes = sum(one.counted_bytes for one in self._held.values() if one.owner == tenant)
        coming_bytes = sum(room.counted_bytes for room in self._rooms.values() if room.owner == tenant)
        counted_bytes = held_bytes + coming_bytes + waiter.counted_bytes
        return Wish(
            tenant=tenant,
            tag=self._line.tag(tenant),
            lacking_bytes=waiter.nbytes - self._free_bytes(),
            over_bytes=counted_bytes - waiter.asker.max_weight_bytes(self._memory.total_bytes),
        )

    def _why(self, waiter: Waiter) -> str:
        if self._wish(waiter).over_bytes > 0:
            return f"the prefixes in use take what tenant {waiter.asker.name} may have here"
        return "the prefixes in use leave no room for this one"

    def _ask(self, key: Key) -> None:
        """Drop it, or have nobody begin to use it until nobody does and it can be dropped."""
        held, now = self._held.get(key), self._clock()
        if held is None:  # an engine, which went with its prefix
            return
        if not held.users:
            self._drop(key)
        elif not held.is_leaving(now):
            held.asked_at = now

    def _drop(self, key: Key) -> None:
        # Engines of a prefix are only used together with it, and without it they would keep its weights alive.
        for engine in [*self._engines(key), key]:
            self._held.pop(engine).memory.close()
        self._counters.add(evicted=1)

    def _engines(self, key: Key) -> list[Key]:
        """Of a prefix; an engine has none."""
        return [one for one in self._held if one[0] == key[0] and one != key] if key == prefix_key(key[0]) else []

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
    """Memory for what is being made. A context manager, which gives back what was not ``keep``-ed.

    Attributes:
        owner: the tenant for whom.
        nbytes: that there are.
        counted_bytes: of the tenant's quota.
    """

    def __init__(
        self, places: WeightMemory[T], key: Key, owner: str, nbytes: int, counted_bytes: int, memory: Reservation
    ) -> None:
        self.owner = owner
        self.counted_bytes = counted_bytes
        self._places = places
        self._key = key
        self.nbytes = nbytes
        self._first = memory
        self._memory = ExitStack()
        self._memory.enter_context(memory)

    def resize(self, nbytes: int) -> None:
        """Have so much, once it is known.

        Raises:
            Overloaded: There is not so much.
        """
        if nbytes > self.nbytes:
            self._memory.enter_context(self._places.more(nbytes - self.nbytes))
        else:
            self._first.shrink(nbytes)
        self.nbytes = nbytes

    def keep(self, value: T) -> None:
        """Have it lie there."""
        self._places.put(self._key, value, self, self._memory.pop_all())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._memory.close()
        self._places.ended(self._key)
