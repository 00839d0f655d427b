"""Writes rows to an object store behind the callers' backs, many to an object, within a bound."""

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from frostline.cache.bundles import Bundle, Row, bundled
from frostline.cache.outbox import Outbox
from frostline.errors import DataNotFound, FrostlineError
from frostline.stores.faces import ObjectStore

__all__ = ("BundleWriter",)

# Large enough that an epoch's features are few objects, small enough to be written in a moment.
_BUNDLE_BYTES = 4 << 20
# What did not fill an object by then is written as it is.
_LINGER_S = 5.0
# How much others wrote is looked up this often.
_COUNT_EVERY_S = 300.0
_REST_S = 30.0
# Whoever stops a node does not wait longer for a store that does not answer.
_LAST_WRITES_S = 10.0


class _Count(Protocol):
    def __call__(self, **amounts: int) -> None: ...


class BundleWriter:
    """Rows that are on their way to the store. Safe for threads.

    Args:
        store: at the root of the cache.
        budget_bytes: under the root, by all nodes, at which it writes no more.
        memory_bytes: most for rows that wait.
        written: told of each object, with the keys of its rows.
        count: told of what it did.
        clock: seconds that never go back.
    """

    def __init__(
        self,
        store: ObjectStore,
        budget_bytes: int,
        memory_bytes: int,
        *,
        written: Callable[[Bundle, Sequence[bytes]], None],
        count: _Count,
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._budget_bytes = budget_bytes
        self._written = written
        self._count = count
        self._clock = clock
        self._changed = threading.Condition()
        # What is being written stands in memory twice.
        bundle_bytes = min(_BUNDLE_BYTES, memory_bytes // 4)
        self._outbox = Outbox(most_bytes=memory_bytes // 2, bundle_bytes=bundle_bytes, linger_s=_LINGER_S)
        self._thread: threading.Thread | None = None
        self._is_closing = False
        self._rests_until_s = self._counted_s = -_COUNT_EVERY_S
        self._bytes_there = 0

    @property
    def bytes_there(self) -> int:
        """Under the root, as far as this node knows."""
        return self._bytes_there

    def add(self, scope: bytes, rows: Sequence[Row]) -> None:
        """Have rows written, as far as there is room for them to wait."""
        with self._changed:
            refuses = self._is_closing or self._clock() < self._rests_until_s
            lost = len(rows) if refuses else self._outbox.add(scope, rows, self._clock())
            if len(rows) > lost and self._thread is None:
                # It must not keep a process that is about to end: what it writes can be computed again.
                self._thread = threading.Thread(target=self._run, name="frostline-shared-write", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        self._count(turned_away=lost)

    def close(self) -> None:
        """Write what waits, if that takes some seconds at most. Calling it again does nothing."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(_LAST_WRITES_S)

    def _run(self) -> None:
        while (taken := self._next()) is not None:
            self._write(*taken)

    def _next(self) -> tuple[bytes, list[Row]] | None:
        """The next object's rows, when it is time; None at the end."""
        with self._changed:
            while True:
                taken = self._outbox.take(self._clock(), all=self._is_closing)
                if taken is not None or self._is_closing:
                    return taken
                self._changed.wait(self._outbox.due_in_s(self._clock()))

    def _write(self, scope: bytes, rows: list[Row]) -> None:
        bundle, data = bundled(scope, rows)
        try:
            if self._clock() < self._rests_until_s or not self._has_room(len(data)):
                self._count(turned_away=len(rows))
                return
            self._store.write(bundle.name, data)
        except FrostlineError:
            self._rests_until_s = self._clock() + _REST_S
            self._count(failed=1, turned_away=len(rows))
            return
        self._bytes_there += len(data)
        self._count(kept=len(rows), objects=1, bytes_written=len(data))
        self._written(bundle, [key for key, _ in rows])

    def _has_room(self, nbytes: int) -> bool:
        if self._clock() - self._counted_s >= _COUNT_EVERY_S:
            try:
                self._bytes_there = sum(one.size for one in self._store.list())
            except DataNotFound:
                self._bytes_there = 0
            self._counted_s = self._clock()
        return self._bytes_there + nbytes <= self._budget_bytes
