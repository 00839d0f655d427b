"""Asks a store that refuses again, at a rate just under what it allows, and makes straggling reads a second time."""

import builtins
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

from frostline.core.errors import StoreError, StoreThrottled, StoreUnavailable
from frostline.core.request_timing import AdaptiveRate, HedgeTimer, TokenBucket
from frostline.stores.protocols import Buffer, Dated, Described, Entry, ObjectStore, Prunable, Sectioned

__all__ = (
    "HedgedReads",
    "Retrying",
    "RetryingSections",
    "Wrapped",
)


T = TypeVar("T")


class Wrapped:
    """What another store does, each call through ``_call``. Safe for threads where that store is.

    Of a listing only its beginning is such a call: what has begun is not begun again.
    """

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._store!r})"

    @property
    def url(self) -> str:
        """The canonical URL of the other store's root."""
        return self._store.url

    def read(self, object: str, offset: int, length: int) -> Buffer:
        """See ``Readable.read``."""
        return self._call(lambda: self._store.read(object, offset, length))

    def read_version(self, object: str, offset: int, length: int) -> tuple[Buffer, str]:
        """See ``Versioned.read_version``."""
        return self._call(lambda: self._store.read_version(object, offset, length))

    def list(self) -> Iterator[Entry]:
        """See ``Listable.list``."""
        first, rest = self._call(self._begun)
        if first is not None:
            yield first
            yield from rest

    def write(self, object: str, data: Buffer) -> None:
        """See ``Writable.write``."""
        self._call(lambda: self._store.write(object, data))

    def _begun(self) -> tuple[Entry | None, Iterator[Entry]]:
        rest = iter(self._store.list())
        return next(rest, None), rest

    def _call(self, call: Callable[[], T]) -> T:
        return call()


_TRIES = 3
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0


class Retrying(Wrapped):
    """A store that is asked again when it refuses for its rate, and no faster than it allows (``AdaptiveRate``).

    Until it refuses nothing waits. A call that fails otherwise, and may go well the next time, is tried again as long,
    with longer pauses each time, where the store has ever answered: it may be starting again. One that never has is
    tried three times, since its address may be wrong. Safe for threads; travels by pickle, without what it learned.

    Args:
        store: store that may refuse.
        retry_for_s: the time that a call is refused, or fails, before its caller is told.
        requests_per_s: calls that are let through each second, a tenth of them at once; those made again count too.
        now: clock.
        wait: function that lets time pass.
    """

    def __init__(
        self,
        store: ObjectStore,
        *,
        retry_for_s: float = 60.0,
        requests_per_s: float = math.inf,
        now: Callable[[], float] = time.monotonic,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(store)
        self._retry_for_s = retry_for_s
        self._now = now
        self._wait = wait
        self._gate = threading.Lock()
        self._lock = threading.Lock()
        self._rate = AdaptiveRate()
        self._has_answered = False
        self._requests_per_s = requests_per_s
        self._bucket: TokenBucket | None = None
        if requests_per_s < math.inf:
            self._bucket = TokenBucket.create(requests_per_s, maximum=max(1.0, requests_per_s / 10), now_s=now())

    def __reduce__(self) -> tuple[Callable[..., "Retrying"], tuple[ObjectStore]]:
        made = partial(type(self), retry_for_s=self._retry_for_s, requests_per_s=self._requests_per_s)
        return made, (self._store,)

    def statistics(self) -> AdaptiveRate:
        """What is known of the rate that the store allows."""
        with self._lock:
            return self._rate

    def _call(self, call: Callable[[], T]) -> T:
        give_up_s, failures = self._now() + self._retry_for_s, 0
        while True:
            sent_at_s = self._admitted()
            try:
                answer = call()
            except StoreThrottled as error:
                now_s, self._has_answered = self._now(), True
                with self._lock:
                    self._rate = self._rate.slow_down(now_s, sent_at_s=sent_at_s, wait_s=error.retry_after_s)
                if now_s >= give_up_s:
                    raise
            except StoreUnavailable:
                failures += 1
                if (failures >= _TRIES and not self._has_answered) or self._now() >= give_up_s:
                    raise
                self._wait(min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**failures))
            except StoreError:
                self._has_answered = True
                raise
            else:
                self._has_answered = True
                with self._lock:
                    self._rate = self._rate.speed_up(self._now())
                return answer

    def _admitted(self) -> float:
        if not self._rate.is_bounded and self._bucket is None:
            return self._now()
        # One at a time, so that those behind it wait by the rate as it then is.
        with self._gate:
            with self._lock:
                now_s = self._now()
                self._rate, wait_s = self._rate.admit(now_s)
                if self._bucket is not None:
                    self._bucket, limit_s = self._bucket.take(now_s)
                    wait_s = max(wait_s, limit_s)
            if wait_s:
                self._wait(wait_s)
            return self._now()


class RetryingSections(Retrying):
    """The same over a store whose folders are listed one by one, that tells of single objects and removes old ones."""

    def describe(self, object: str) -> Entry:
        """See ``Described.describe``."""
        assert isinstance(self._store, Described), "made for a store that tells of single objects"
        return self._call(partial(self._store.describe, object))

    def sections(self) -> tuple[Sequence[Entry], tuple[str, ...]]:
        """See ``Sectioned.sections``."""
        return self._call(self._sectioned.sections)

    def list_section(self, folder: str) -> Sequence[Entry]:
        """See ``Sectioned.list_section``."""
        return self._call(partial(self._sectioned.list_section, folder))

    def list_dated(self) -> Iterator[Dated]:
        """See ``Prunable.list_dated``."""
        return iter(self._call(lambda: builtins.list(self._prunable.list_dated())))

    def remove(self, object: str) -> None:
        """See ``Prunable.remove``."""
        self._call(partial(self._prunable.remove, object))

    @property
    def _prunable(self) -> Prunable:
        assert isinstance(self._store, Prunable), "made for a store whose objects can be removed"
        return self._store

    @property
    def _sectioned(self) -> Sectioned:
        assert isinstance(self._store, Sectioned), "made for a store that is listed folder by folder"
        return self._store


# Until so many reads have ended that one can be late, and while enough were made twice, this is looked at again.
_LOOK_AGAIN_S = 1.0


class HedgedReads:
    """How long the reads of one store take. Safe for threads.

    A read is compared with those before it that were as large, by powers of two. The few that are larger than nearly
    all are not made twice: nothing is known of such reads.

    Args:
        quantile: see ``HedgeTimer``.
        now: seconds of a monotonic clock.

    Attributes:
        now: seconds of a monotonic clock.
    """

    def __init__(self, quantile: float, now: Callable[[], float] = time.monotonic) -> None:
        self.now = now
        self._hedge_timer = HedgeTimer(quantile)
        self._lock = threading.Lock()

    def record_read(self, nbytes: int, begun_at: float) -> None:
        """A read that began then has ended well."""
        with self._lock:
            self._hedge_timer.record(None, nbytes.bit_length(), self.now() - begun_at)

    def wait_s(self, nbytes: int, begun_at: float | None) -> float:
        """How long to wait for a read before asking ``is_late``; it began then, or not yet."""
        with self._lock:
            late_after_s = self._hedge_timer.late_after_s(None, nbytes.bit_length())
        if late_after_s is None:
            return _LOOK_AGAIN_S
        return late_after_s if begun_at is None else max(0.0, begun_at + late_after_s - self.now())

    def is_late(self, nbytes: int, begun_at: float) -> bool:
        """Whether to make the read a second time: then that is counted as done."""
        with self._lock:
            late_after_s = self._hedge_timer.late_after_s(None, nbytes.bit_length())
            is_late = late_after_s is not None and self.now() - begun_at >= late_after_s
            if is_late:
                self._hedge_timer.count_hedge(None)
        return is_late
