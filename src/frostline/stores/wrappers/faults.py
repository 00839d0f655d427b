"""Stores around stores: each does what another does, later, seldom, at a rate, within a deadline, or not at all."""

import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TypeVar

from frostline.errors import StoreError, StoreUnavailable
from frostline.stores.base.protocols import Buffer, Entry, ObjectStore
from frostline.stores.wrappers.rate_limit import TokenBucket

__all__ = ("Deadlined", "Delayed", "Faulty", "Limited", "Wrapped")

T = TypeVar("T")
_MAX_HANGING = 256


class Wrapped:
    """What another store does, each call through ``_call``. Safe for threads where that store is.

    Of a listing only its beginning is such a call: what has begun is not begun again.

    Args:
        store: that does it.
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


class Delayed(Wrapped):
    """A store that is far away.

    Args:
        store: that is near.
        delay_s: before each call.
        wait: lets time pass.
    """

    def __init__(self, store: ObjectStore, delay_s: float, *, wait: Callable[[float], None] = time.sleep) -> None:
        super().__init__(store)
        self._delay_s = delay_s
        self._wait = wait

    def _call(self, call: Callable[[], T]) -> T:
        self._wait(self._delay_s)
        return call()


class Faulty(Wrapped):
    """A store that fails at times; with the same seed the same calls fail.

    Args:
        store: that does not.
        share: of the calls that fail, between 0 and 1.
        seed: which.
        error: what they fail with.
    """

    def __init__(
        self,
        store: ObjectStore,
        *,
        share: float,
        seed: int,
        error: Callable[[], StoreError] = lambda: StoreUnavailable("the store fails as it was told to"),
    ) -> None:
        super().__init__(store)
        self._share = share
        self._seed = seed
        self._error = error
        self._lock = threading.Lock()
        self._calls = 0

    def _call(self, call: Callable[[], T]) -> T:
        with self._lock:
            number = self._calls
            self._calls += 1
        if _drawn(self._seed, number) < self._share:
            raise self._error()
        return call()


class Limited(Wrapped):
    """A store that is asked so many times a second, and no more.

    Args:
        store: that is asked.
        per_s: requests a second.
        most: requests at once after a pause.
        now: what time it is.
        wait: lets time pass.
    """

    def __init__(
        self,
        store: ObjectStore,
        per_s: float,
        *,
        most: float = 1,
        now: Callable[[], float] = time.monotonic,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(store)
        self._now = now
        self._wait = wait
        self._lock = threading.Lock()
        self._bucket = TokenBucket.full(per_s, most=most, now_s=now())

    def _call(self, call: Callable[[], T]) -> T:
        with self._lock:
            self._bucket, wait_s = self._bucket.take(self._now())
        if wait_s:
            self._wait(wait_s)
        return call()


class Deadlined(Wrapped):
    """A store whose calls end in time: one that hangs is left to itself, and its caller told.

    Each call has a thread of its own, which a hanging one keeps.

    Args:
        store: that may hang.
        deadline_s: the longest that a call may take.
    """

    def __init__(self, store: ObjectStore, deadline_s: float) -> None:
        super().__init__(store)
        self._deadline_s = deadline_s
        self._room = threading.BoundedSemaphore(_MAX_HANGING)

    def _call(self, call: Callable[[], T]) -> T:
        if not self._room.acquire(timeout=self._deadline_s):
            raise StoreUnavailable(f"{self.url} hangs: {_MAX_HANGING} calls of it are without an answer")
        answer: Future[T] = Future()
        # Not a thread that the process waits for at its end.
        threading.Thread(target=self._answer, args=(answer, call), name="frostline-deadline", daemon=True).start()
        try:
            return answer.result(self._deadline_s)
        except TimeoutError as error:
            raise StoreUnavailable(f"{self.url} did not answer within {self._deadline_s:g} s") from error

    def _answer(self, answer: "Future[T]", call: Callable[[], T]) -> None:
        try:
            answer.set_result(call())
        except BaseException as error:  # noqa: BLE001 (whoever waits for the answer gets it)
            answer.set_exception(error)
        finally:
            self._room.release()


def _drawn(seed: int, number: int) -> float:
    """Between 0 and 1, the same for the same seed and number."""
    digest = hashlib.blake2b(f"{seed}/{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2**64
