"""Keeps features in an object store, where several nodes find them; rows are written behind the callers' backs.

Keeps features in an object store, where several nodes find them; nothing that goes wrong there reaches a caller.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from cachetools import LRUCache

from frostline.cache.keys import RowLayout, Tensors, add_checksum, fill, verify_checksum
from frostline.cache.shared_layout import (
    ObjectIndex,
    PackedObject,
    Row,
    WriteBuffer,
    keys_of,
    mark_of,
    pack_rows,
    runs_of,
    surplus,
)
from frostline.core.declared import Count
from frostline.core.errors import DataNotFound, FrostlineError, ObjectNotFound
from frostline.core.system import in_background
from frostline.stores.protocols import Buffer, Dated, ObjectStore, Prunable

__all__ = (
    "PackedObjectWriter",
    "SharedStatistics",
    "SharedStore",
)


# Large enough that an epoch's features are few objects, small enough to be written in a moment.
_BUNDLE_BYTES = 4 << 20
# What did not fill an object by then is written as it is.
_LINGER_S = 5.0
# How much others wrote is looked up this often.
_COUNT_EVERY_S = 300.0
# Where nothing could be evicted, nothing is looked for again so soon.
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
        store: the store at the root of the cache.
        budget_bytes: the bytes under the root, by all nodes; what nobody used for long is evicted.
        memory_bytes: the most for rows that wait.
        idle_s: the time unused after which rows are evicted for others.
        written: function that is told of each object, with the keys of its rows.
        removed: function that is told of each object that was evicted.
        count: function that is told of what it did.
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
        """Bytes under the root, as far as this node knows."""
        return self._bytes_there

    def add(self, scope: bytes, rows: Sequence[Row]) -> None:
        """Have rows written, as far as there is space for them to wait."""
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
            if self._clock() < self._rests_until_s or not self._fits(scope, len(data)):
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

    def _fits(self, scope: bytes, nbytes: int) -> bool:
        now_s = self._clock()
        is_due = now_s - self._counted_s >= _COUNT_EVERY_S
        if is_due:
            self._bytes_there = sum(entry.size for entry in self._listing())
            self._counted_s = now_s
        if self._bytes_there + nbytes > self._budget_bytes and (is_due or now_s - self._cleared_s >= _CLEAR_EVERY_S):
            self._clear(scope, nbytes)
        return self._bytes_there + nbytes <= self._budget_bytes

    def _clear(self, scope: bytes, nbytes: int) -> None:
        """Remove what nobody uses, where that frees so many bytes."""
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
            packed = PackedObject.parse(entry.object, entry.size)
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


_Mask = npt.NDArray[np.bool_]
_Rows = list[tuple[int, memoryview]]

# Reads under way at once hide a store some milliseconds away.
_READERS = 16
# What other nodes wrote since is looked for this often, while features are missing.
_LOOK_EVERY_S = 10.0
# Of what waits to be written and of what is remembered, each has this part of the memory.
_PARTS = 2
_MAX_LOOKS = 1024
# Several times what lies between two notes of use (``writer``), and longer than a job pauses.
_IDLE_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedStatistics:
    """What this node did with features in the object store.

    Attributes:
        bytes: the bytes under the URL, by all nodes, as far as this one knows.
        budget_bytes: the most that there may be; what nobody used for long is evicted.
        indexed_rows: rows whose place is remembered.
        hits: rows found there.
        kept: rows written there.
        objects: the written there.
        bytes_read: bytes read of values and of lists of keys.
        bytes_written: bytes written of whole objects.
        cleared: objects removed by this node, because nobody had used their like for long and others needed the space.
        rejected: rows that found no space there, or came faster than the store takes them.
        damaged: rows and lists of keys that are not what was written.
        late: rows for which a request waited in vain; if it grows, the store is too far away.
        failed: calls that the store refused or did not answer.
    """

    bytes: Count = 0
    budget_bytes: Count = 0
    indexed_rows: Count = 0
    hits: Count = 0
    kept: Count = 0
    objects: Count = 0
    bytes_read: Count = 0
    bytes_written: Count = 0
    cleared: Count = 0
    rejected: Count = 0
    damaged: Count = 0
    late: Count = 0
    failed: Count = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Look:
    since_s: float
    result: "Future[None]"


class SharedStore:
    """Features by scope and row, in objects that never change. Safe for threads, and for several nodes at once.

    Anybody may remove objects at any time. Rows that are there twice, because two nodes computed them at the same
    time, do no harm.

    Args:
        store_at: function that opens the store at the root of the cache, or at a folder within it.
        budget_bytes: the most bytes under the root, by all nodes; several that write at once may go a little beyond.
        memory_bytes: the most for rows that wait to be written, and to remember where rows lie.
        wait_s: the longest that one call of ``get_into`` takes.
        idle_s: features that nobody used for so long are evicted for others.
        clock: seconds that never go back.
    """

    def __init__(
        self,
        store_at: Callable[[str], ObjectStore],
        *,
        budget_bytes: int,
        memory_bytes: int,
        wait_s: float,
        idle_s: float = _IDLE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store_at = store_at
        self._store = store_at("")
        self._budget_bytes = budget_bytes
        self._wait_s = wait_s
        self._clock = clock
        self._lock = threading.Lock()
        self._known = ObjectIndex.within(memory_bytes // _PARTS)
        self._counts: Counter[str] = Counter()
        self._looks: LRUCache[bytes, _Look] = LRUCache(_MAX_LOOKS)
        self._rests_until_s = -1.0
        self._readers = ThreadPoolExecutor(_READERS, "frostline-shared-read", in_background)
        self._looker = ThreadPoolExecutor(1, "frostline-shared-look", in_background)
        # Its own threads, so that looking does not hold up whoever reads rows.
        self._heads = ThreadPoolExecutor(_READERS, "frostline-shared-look", in_background)
        self._writer = PackedObjectWriter(
            self._store,
            budget_bytes,
            memory_bytes // _PARTS,
            idle_s=idle_s,
            written=self._add,
            removed=self._forget,
            count=self._count,
            clock=clock,
        )

    def contains(self, scope: bytes, keys: Sequence[bytes | None]) -> _Mask:
        """Which rows are known to be there, without asking the store: ``bool[n]``."""
        places = [place for place, key in enumerate(keys) if key is not None]
        with self._lock:
            found = self._known.find(scope, [key for key in keys if key is not None])
        mask = np.zeros(len(keys), np.bool_)
        mask[[place for place, there in zip(places, found, strict=True) if there is not None]] = True
        return mask

    def get_into(self, scope: bytes, keys: Sequence[bytes | None], layout: RowLayout, out: Tensors) -> _Mask:
        """Read rows, if that is done soon.

        Args:
            scope: digest of what they depend on.
            keys: keys of the rows, each once; None for those that are not wanted.
            layout: layout of a row.
            out: arrays ``[n, ...]`` of that layout; the rows that are found are written at their keys' places.

        Returns:
            ``bool[n]``, which were found.
        """
        found = np.zeros(len(keys), np.bool_)
        until_s = self._clock() + self._wait_s
        if self._clock() < self._rests_until_s:
            return found
        self._look(scope, until_s)
        views = layout.views(out)
        for place, body in self._read_all(scope, keys, layout.nbytes, until_s):
            fill(views, place, body)
            found[place] = True
        if found.any():
            self._writer.note(scope)
        self._count(hits=int(found.sum()))
        return found

    def offer(self, scope: bytes, keys: Sequence[bytes | None], tensors: Tensors) -> None:
        """Have rows written that are not there yet, soon, by another thread.

        Args:
            scope: digest of what they depend on.
            keys: keys of the rows; those without one are left out.
            tensors: arrays ``[n, ...]``; read before this returns.
        """
        named = [key for key in keys if key is not None]
        with self._lock:
            # Else it would be written again what is there, but not known yet.
            is_ready = self._known.is_looked_through(scope) and self._known.fits(scope, len(named))
            known = dict(zip(named, self._known.find(scope, named), strict=True))
        if not is_ready:
            self._count(rejected=len(named))
            return
        bodies = zip(keys, RowLayout.of(tensors).bodies(tensors), strict=True)
        new = [(key, add_checksum(scope + key, body)) for key, body in bodies if key is not None and known[key] is None]
        self._writer.add(scope, new)

    def statistics(self) -> SharedStatistics:
        """What it did so far."""
        with self._lock:
            return SharedStatistics(
                bytes=self._writer.bytes_there,
                budget_bytes=self._budget_bytes,
                indexed_rows=len(self._known),
                **self._counts,
            )

    def close(self) -> None:
        """Write what waits, within some seconds, and read no more. Calling it again does nothing."""
        self._writer.close()
        for pool in (self._looker, self._heads, self._readers):
            pool.shutdown(wait=False, cancel_futures=True)

    # Looking for what others wrote

    def _look(self, scope: bytes, until_s: float) -> None:
        """See to it that a scope is looked through now and then; only the first time is waited for."""
        now_s = self._clock()
        with self._lock:
            is_first = not self._known.is_looked_through(scope)
            look = self._looks.get(scope)
            if look is None or (look.result.done() and (is_first or now_s - look.since_s >= _LOOK_EVERY_S)):
                look = _Look(since_s=now_s, result=self._looker.submit(self._look_through, scope))
                self._looks[scope] = look
        if is_first:
            wait([look.result], max(0.0, min(until_s, look.since_s + self._wait_s) - now_s))

    def _look_through(self, scope: bytes) -> None:
        """List a scope's objects, and learn the keys of those that are new."""
        with self._lock:
            known = self._known.names(scope)
        try:
            entries = [(f"{scope.hex()}/{entry.object}", entry.size) for entry in self._store_at(scope.hex()).list()]
        except DataNotFound:
            entries = []
        except FrostlineError:
            self._failed()
            return
        packed_objects = [PackedObject.parse(name, size) for name, size in entries if name not in known]
        new = [packed for packed in packed_objects if packed is not None]
        for packed, keys in zip(new, self._heads.map(self._keys, new), strict=True):
            if keys is not None:
                self._add(packed, keys)
        with self._lock:
            self._known.note(scope)

    def _keys(self, packed: PackedObject) -> list[bytes] | None:
        head = self._read(packed, 0, packed.head_bytes)
        keys = None if head is None else keys_of(packed, head)
        if head is not None and keys is None:
            self._count(damaged=1)
        return keys

    def _add(self, packed: PackedObject, keys: Sequence[bytes]) -> None:
        with self._lock:
            self._known.add(packed, keys)

    # Reading

    def _read_all(self, scope: bytes, keys: Sequence[bytes | None], row_bytes: int, until_s: float) -> _Rows:
        """The rows that came in time, each with its place among the keys."""
        asks = self._asks(scope, keys)
        reads = {
            self._readers.submit(self._rows, packed, run, keys, places, row_bytes): len(run)
            for packed, places in asks.items()
            for run in runs_of(list(places))
        }
        done, late = wait(reads, max(0.0, until_s - self._clock()))
        for read in late:
            read.cancel()
        if late:
            self._count(late=sum(reads[read] for read in late))
            self._rest()
        return [row for read in done for row in read.result()]

    def _asks(self, scope: bytes, keys: Sequence[bytes | None]) -> dict[PackedObject, dict[int, int]]:
        """Which rows of which objects are wanted, and the place of each among the keys."""
        wanted = [(place, key) for place, key in enumerate(keys) if key is not None]
        with self._lock:
            found = self._known.find(scope, [key for _, key in wanted])
        asks: dict[PackedObject, dict[int, int]] = {}
        for (place, _), there in zip(wanted, found, strict=True):
            if there is not None:
                asks.setdefault(there[0], {})[there[1]] = place
        return asks

    def _rows(
        self, packed: PackedObject, run: range, keys: Sequence[bytes | None], places: dict[int, int], row_bytes: int
    ) -> _Rows:
        """The rows of one run of an object that are what was written."""
        data = self._read(packed, packed.offset(run.start), len(run) * packed.value_bytes)
        if data is None:
            return []
        found: _Rows = []
        view, size = memoryview(data), packed.value_bytes
        for number, row in enumerate(run):
            key = keys[places[row]]
            assert key is not None
            body = verify_checksum(packed.scope + key, view[number * size : (number + 1) * size], row_bytes)
            if body is None:
                self._forget(packed, row)
                self._count(damaged=1)
            else:
                found.append((places[row], body))
        return found

    def _read(self, packed: PackedObject, offset: int, length: int) -> Buffer | None:
        """Bytes of an object; None where it is gone or the store fails."""
        try:
            data = self._store.read(packed.name, offset, length)
        except ObjectNotFound:
            self._forget(packed)
            return None
        except FrostlineError:
            self._failed()
            return None
        self._count(bytes_read=len(data))
        return data

    def _forget(self, packed: PackedObject, row: int | None = None) -> None:
        with self._lock:
            self._known.forget(packed, row)

    def _failed(self) -> None:
        self._count(failed=1)
        self._rest()

    def _rest(self) -> None:
        self._rests_until_s = self._clock() + _REST_S

    def _count(self, **amounts: int) -> None:
        with self._lock:
            self._counts.update(amounts)
