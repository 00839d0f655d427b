"""Writes rows to an object store behind the callers' backs, many to an object, and makes room there within a bound."""

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from frostline.cache.shared.object_layout import PackedObject, Row, WriteBuffer, mark_of, pack_rows
from frostline.cache.shared.pruning import surplus
from frostline.errors import DataNotFound, FrostlineError
from frostline.stores.base.protocols import Dated, ObjectStore, Prunable

__all__ = ("PackedObjectWriter",)

# Large enough that an epoch's features are few objects, small enough to be written in a moment.
_BUNDLE_BYTES = 4 << 20
# What did not fill an object by then is written as it is.
_LINGER_S = 5.0
# How much others wrote is looked up this often.
_COUNT_EVERY_S = 300.0
# Where nothing could make room, nothing is looked for again so soon.
_CLEAR_EVERY_S = 60.0
# Use is noted so coarsely that it costs a store next to nothing; well within what counts as unused.
_NOTED_EVERY_S = 600.0
_MAX_NOTED = 1024
_MARK = b"\n"  # some stores take no empty objects
_REST_S = 30.0
# Whoever stops a node does not wait longer for a store that does not answer.
_LAST_WRITES_S = 10.0


class _Count(Protocol):
    def __call__(self, **amounts: int) -> None: ...


class PackedObjectWriter:
    """Rows that are on their way to the store. Safe for threads.

    Args:
        store: at the root of the cache.
        budget_bytes: under the root, by all nodes; what nobody used for long makes room.
        memory_bytes: most for rows that wait.
        idle_s: unused for so long, rows make room for others.
        written: told of each object, with the keys of its rows.
        removed: told of each object that made room.
        count: told of what it did.
        clock: seconds that never go back.
    """

    def __init__(
        self,
        store: ObjectStore,
        budget_bytes: int,
        memory_bytes: int,
        *,
        idle_s: float,
        written: Callable[[PackedObject, Sequence[bytes]], None],
        removed: Callable[[PackedObject], None],
        count: _Count,
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._budget_bytes = budget_bytes
        self._idle_s = idle_s
        self._written = written
        self._removed = removed
        self._count = count
        self._clock = clock
        self._changed = threading.Condition()
        # What is being written stands in memory twice.
        bundle_bytes = min(_BUNDLE_BYTES, memory_bytes // 4)
        self._write_buffer = WriteBuffer(max_bytes=memory_bytes // 2, bundle_bytes=bundle_bytes, linger_s=_LINGER_S)
        self._thread: threading.Thread | None = None
        self._is_closing = False
        self._rests_until_s = self._counted_s = self._cleared_s = -_COUNT_EVERY_S
        self._noted: dict[bytes, float] = {}
        self._to_note: list[bytes] = []
        self._bytes_there = 0

    @property
    def bytes_there(self) -> int:
        """Under the root, as far as this node knows."""
        return self._bytes_there

    def add(self, scope: bytes, rows: Sequence[Row]) -> None:
        """Have rows written, as far as there is room for them to wait."""
        with self._changed:
            refuses = self._is_closing or self._clock() < self._rests_until_s
            lost = len(rows) if refuses else self._write_buffer.add(scope, rows, self._clock())
            if len(rows) > lost:
                self._wake()
        self._count(rejected=lost)

    def note(self, scope: bytes) -> None:
        """Have it noted that somebody uses rows of this scope, so that they stay."""
        with self._changed:
            if self._is_closing or self._clock() - self._noted.get(scope, -_NOTED_EVERY_S) < _NOTED_EVERY_S:
                return
            if len(self._noted) >= _MAX_NOTED:
                self._noted.clear()
            self._noted[scope] = self._clock()
            self._to_note.append(scope)
            self._wake()

    def close(self) -> None:
        """Write what waits, if that takes some seconds at most. Calling it again does nothing."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(_LAST_WRITES_S)

    def _wake(self) -> None:
        if self._thread is None:
            # It must not keep a process that is about to end: what it writes can be computed again.
            self._thread = threading.Thread(target=self._run, name="frostline-shared-write", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _run(self) -> None:
        while (taken := self._next()) is not None:
            scope, rows = taken
            if rows:
                self._write(scope, rows)
            else:
                self._mark(scope)

    def _next(self) -> tuple[bytes, list[Row]] | None:
        """The next object's rows, when it is time, or a scope to note, without any; None at the end."""
        with self._changed:
            while True:
                if self._to_note:
                    return self._to_note.pop(), []
                taken = self._write_buffer.take(self._clock(), all=self._is_closing)
                if taken is not None or self._is_closing:
                    return taken
                self._changed.wait(self._write_buffer.due_in_s(self._clock()))

    def _mark(self, scope: bytes) -> None:
        if self._clock() < self._rests_until_s:
            return
        try:
            self._store.write(mark_of(scope), _MARK)
        except FrostlineError:
            self._failed()

    def _write(self, scope: bytes, rows: list[Row]) -> None:
        packed, data = pack_rows(scope, rows)
        try:
            if self._clock() < self._rests_until_s or not self._has_room(scope, len(data)):
                self._count(rejected=len(rows))
                return
            self._store.write(packed.name, data)
        except FrostlineError:
            self._failed()
            self._count(rejected=len(rows))
            return
        self._bytes_there += len(data)
        self._count(kept=len(rows), objects=1, bytes_written=len(data))
        self._written(packed, [key for key, _ in rows])

    def _has_room(self, scope: bytes, nbytes: int) -> bool:
        now_s = self._clock()
        is_due = now_s - self._counted_s >= _COUNT_EVERY_S
        if is_due:
            self._bytes_there = sum(entry.size for entry in self._listing())
            self._counted_s = now_s
        if self._bytes_there + nbytes > self._budget_bytes and (is_due or now_s - self._cleared_s >= _CLEAR_EVERY_S):
            self._clear(scope, nbytes)
        return self._bytes_there + nbytes <= self._budget_bytes

    def _clear(self, scope: bytes, nbytes: int) -> None:
        """Remove what nobody uses, where that makes room for so many bytes."""
        store, self._cleared_s = self._store, self._clock()
        if not isinstance(store, Prunable):
            return
        store.write(mark_of(scope), _MARK)  # the newest object tells the time by the store's own clock
        listing = self._listing()
        now_s = max((entry.modified_s for entry in listing), default=0.0)
        self._bytes_there = sum(entry.size for entry in listing)
        gone = surplus(listing, budget_bytes=self._budget_bytes, wanted_bytes=nbytes, now_s=now_s, idle_s=self._idle_s)
        for entry in gone:
            store.remove(entry.object)
            self._bytes_there -= entry.size
            self._count(cleared=1)
            packed = PackedObject.named(entry.object, entry.size)
            if packed is not None:
                self._removed(packed)
        if gone:  # and there may be more
            self._cleared_s = -_CLEAR_EVERY_S

    def _listing(self) -> list[Dated]:
        """All that lies under the root; without ages where the store tells none."""
        try:
            if isinstance(self._store, Prunable):
                return list(self._store.list_dated())
            return [Dated(entry.object, entry.size, 0.0) for entry in self._store.list()]
        except DataNotFound:
            return []

    def _failed(self) -> None:
        self._rests_until_s = self._clock() + _REST_S
        self._count(failed=1)
