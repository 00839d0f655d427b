"""Keeps features on disk: bounded in bytes, each value checked when it is read, safe against a kill and a full disk."""

import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from frostline.cache.local.database import Database, damage, is_busy, is_damage, typed
from frostline.cache.local.quota import ScopeUsage, idle_shelves, stored_bytes
from frostline.cache.rows import RowLayout, Tensors, fill, opened, sealed
from frostline.errors import OutOfSpace, SettingError

__all__ = ("DiskStatistics", "FeatureStore", "Keys")

Keys = Sequence[bytes | None]
"""Names of rows within a scope; a row without one is neither found nor kept."""

_Mask = npt.NDArray[np.bool_]

# Nobody who asks for features pauses for longer between two requests, but for whole epochs from their own cache.
_IDLE_S = 60.0
# Use is noted so coarsely that reading seldom writes.
_NOTED_EVERY_S = 10.0
# After a failed write, such as on a full disk, the next attempt waits.
_REST_S = 30.0
_ASKED_AT_ONCE = 256
# Fewer would make room again for the very next rows.
_MIN_CLEARED = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskStatistics:
    """What a cache on disk did since it was opened.

    Attributes:
        bytes: taken in its file now.
        budget_bytes: most that file and log may take together.
        hits: rows found.
        misses: rows asked for and not found.
        kept: rows written.
        rejected: rows that found no room; if it grows, give the cache more bytes.
        cleared: rows dropped for others, because nobody had asked for their like for a while.
        damaged: rows whose bytes were not those that were written; each counts as a miss too, and is dropped.
        resets: times that the file itself was damaged and left for a new one.
        failed: reads and writes that the disk refused; look whether it is full.
    """

    bytes: int = 0
    budget_bytes: int = 0
    hits: int = 0
    misses: int = 0
    kept: int = 0
    rejected: int = 0
    cleared: int = 0
    damaged: int = 0
    resets: int = 0
    failed: int = 0


class FeatureStore:
    """Features by scope and row, in a folder. A context manager.

    Safe for threads and for several processes with the same folder. Nothing that goes wrong on the disk reaches the
    caller once it is open: what cannot be read is a miss, what cannot be written is turned away, and both are counted.

    Args:
        folder: made where it is missing; for this cache alone.
        budget_bytes: most bytes on disk; 16 MiB or more.
        idle_s: features for which nobody asked for so long make room for others.
        clock: seconds since the epoch: notes of use outlive the process.

    Raises:
        SettingError: The folder cannot be used, or the budget is too small.
        OutOfSpace: The disk has no room for the cache itself.
    """

    def __init__(
        self, folder: Path, budget_bytes: int, *, idle_s: float = _IDLE_S, clock: Callable[[], float] = time.time
    ) -> None:
        self._database = Database(folder, budget_bytes)
        self._budget_bytes = budget_bytes
        self._idle_s = idle_s
        self._clock = clock
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._noted: dict[bytes, float] = {}
        self._rests_until_s = 0.0

    @property
    def scratch_bytes(self) -> int:
        """Most memory that ``put`` takes beside the rows themselves."""
        return self._database.batch_bytes

    def contains(self, scope: bytes, keys: Keys) -> _Mask:
        """Which rows are kept: ``bool[n]``. One that is may be gone or found damaged when it is read."""
        found = np.zeros(len(keys), np.bool_)
        with self._survived(), self._database.reading() as connection:
            for places in _chunks(keys):
                query = f"SELECT row FROM features WHERE scope = {_SCOPE} AND row IN ({_marks(places)})"  # noqa: S608
                for (row,) in typed(connection.execute(query, (scope, *places)), bytes):
                    found[_place(places, row)] = True
        return found

    def get_into(self, scope: bytes, keys: Keys, layout: RowLayout, out: Tensors) -> _Mask:
        """Read rows.

        Args:
            scope: digest of what they depend on.
            keys: keys of the rows, each once.
            layout: layout of a row.
            out: arrays ``[n, ...]`` of that layout; the rows that are found are written at their keys' places.

        Returns:
            ``bool[n]``, which were found.
        """
        found = np.zeros(len(keys), np.bool_)
        damaged: list[bytes] = []
        views, row_bytes = layout.views(out), layout.nbytes
        with self._survived(), self._database.reading() as connection:
            for places in _chunks(keys):
                query = f"SELECT row, value FROM features WHERE scope = {_SCOPE} AND row IN ({_marks(places)})"  # noqa: S608
                for row, value in typed(connection.execute(query, (scope, *places)), bytes, bytes):
                    place = _place(places, row)
                    body = opened(scope + row, value, row_bytes)
                    if body is None:
                        damaged.append(row)
                        continue
                    fill(views, place, body)
                    found[place] = True
        self._drop(scope, damaged)
        self._note(scope)
        self._count(hits=int(found.sum()), misses=int(len(keys) - found.sum()))
        return found

    def put(self, scope: bytes, keys: Keys, tensors: Tensors) -> int:
        """Keep rows as far as there is room; rows that are kept already stay as they are.

        Args:
            scope: digest of what they depend on.
            keys: keys of the rows.
            tensors: arrays ``[n, ...]``; read before this returns.

        Returns:
            How many were added.
        """
        layout = RowLayout.of(tensors)
        rows = ((key, body) for key, body in zip(keys, layout.bodies(tensors), strict=True) if key is not None)
        named = sum(key is not None for key in keys)
        size = int(self._database.batch_bytes // max(1, layout.nbytes))
        added, offered = 0, 0
        if size and self._clock() >= self._rests_until_s:
            while offered < named:
                batch = [(key, sealed(scope + key, body)) for key, body in islice(rows, size)]
                written = self._write(scope, batch, layout.nbytes)
                if written is None:
                    break
                offered, added = offered + len(batch), added + written
        self._count(rejected=named - offered)
        return added

    def statistics(self) -> DiskStatistics:
        """What it did so far."""
        used = 0
        with self._survived(), self._database.reading() as connection:
            used = self._database.used_bytes(connection)
        with self._lock:
            return DiskStatistics(bytes=used, budget_bytes=self._budget_bytes, **self._counts)

    def close(self) -> None:
        """Close the file. Calling it again does nothing."""
        self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write(self, scope: bytes, batch: Sequence[tuple[bytes, bytes]], row_bytes: int) -> int | None:
        """Write rows in one transaction: how many were added, or None where the disk refused."""
        added = room = cleared = 0
        is_written = False
        with self._survived(writing=True):
            with self._database.writing() as connection:
                number = self._shelf(connection, scope, row_bytes)
                room, cleared = self._make_room(connection, number, len(batch), row_bytes)
                query = "INSERT OR IGNORE INTO features (scope, row, value) VALUES (?, ?, ?)"
                added = connection.executemany(query, [(number, *row) for row in batch[:room]]).rowcount
            is_written = True  # it ends whole, or with an error
        if not is_written:
            return None
        self._noted[scope] = self._clock()
        self._count(kept=added, rejected=max(0, len(batch) - room), cleared=cleared)
        return added

    def _shelf(self, connection: sqlite3.Connection, scope: bytes, row_bytes: int) -> int:
        """The number of a scope, whose use is noted."""
        query = (
            "INSERT INTO scopes (digest, used, row_bytes) VALUES (?, ?, ?) "
            "ON CONFLICT (digest) DO UPDATE SET used = excluded.used RETURNING number"
        )
        found = list(typed(connection.execute(query, (scope, self._clock(), row_bytes)), int))
        if len(found) != 1:
            raise damage("a scope has no number, or two")
        return int(found[0][0])

    def _make_room(self, connection: sqlite3.Connection, wanting: int, rows: int, row_bytes: int) -> tuple[int, int]:
        """For how many of the rows there is room, and how many others were dropped for them."""
        each = stored_bytes(row_bytes)
        cleared = 0
        while (missing := rows * each - self._free_bytes(connection)) > 0:
            scope = self._idle_scope(connection, wanting)
            if scope is None:
                break
            count = max(_MIN_CLEARED, int(missing / stored_bytes(scope.row_bytes)) + 1)
            some = "SELECT number FROM features INDEXED BY places WHERE scope = ? LIMIT ?"
            query = f"DELETE FROM features WHERE number IN ({some})"  # noqa: S608
            dropped = connection.execute(query, (scope.number, count)).rowcount
            cleared += dropped
            if dropped < count:
                gone = connection.execute("DELETE FROM scopes WHERE number = ?", (scope.number,)).rowcount
                if gone != 1:
                    raise damage("a scope cannot be removed")
        return min(rows, max(0, int(self._free_bytes(connection) / each))), cleared

    def _free_bytes(self, connection: sqlite3.Connection) -> int:
        return self._database.file_bytes - self._database.used_bytes(connection)

    def _idle_scope(self, connection: sqlite3.Connection, wanting: int) -> ScopeUsage | None:
        query = "SELECT number, used, row_bytes FROM scopes"
        found = list(typed(connection.execute(query), int, float, int))
        if any(row_bytes < 0 for _, _, row_bytes in found):
            raise damage("a row has less than no bytes")
        scopes = [ScopeUsage(number=number, used_s=used, row_bytes=row_bytes) for number, used, row_bytes in found]
        idle = idle_shelves(scopes, wanting=wanting, now_s=self._clock(), idle_s=self._idle_s)
        return idle[0] if idle else None

    def _note(self, scope: bytes) -> None:
        """Note that somebody wants features of this scope, so that they stay."""
        now_s = self._clock()
        if now_s - self._noted.get(scope, 0.0) < _NOTED_EVERY_S or now_s < self._rests_until_s:
            return
        self._noted[scope] = now_s
        with self._survived(writing=True), self._database.writing() as connection:
            connection.execute("UPDATE scopes SET used = ? WHERE digest = ?", (now_s, scope))

    def _drop(self, scope: bytes, rows: Sequence[bytes]) -> None:
        if not rows:
            return
        self._count(damaged=len(rows))
        with self._survived(writing=True), self._database.writing() as connection:
            query = f"DELETE FROM features WHERE scope = {_SCOPE} AND row = ?"  # noqa: S608
            connection.executemany(query, [(scope, row) for row in rows])

    @contextmanager
    def _survived(self, *, writing: bool = False) -> Iterator[None]:
        """Counts what goes wrong on the disk, and leaves a file that is damaged."""
        number = self._database.number
        try:
            yield
        except sqlite3.DatabaseError as error:
            if not getattr(error, "sqlite_errorcode", 0):
                raise  # a mistake of ours
            if is_damage(error):
                self._start_anew(number)
                return
            self._count(failed=1)
            if writing and not is_busy(error):
                self._rests_until_s = self._clock() + _REST_S

    def _start_anew(self, number: int) -> None:
        try:
            self._database.start_anew(number)
        except (OutOfSpace, SettingError):
            self._count(failed=1)
        self._count(resets=1)

    def _count(self, **amounts: int) -> None:
        with self._lock:
            self._counts.update(amounts)


_SCOPE = "(SELECT number FROM scopes WHERE digest = ?)"


def _chunks(keys: Keys) -> Iterator[dict[bytes, int]]:
    """Places by key, so many at a time as one query takes."""
    named = ((key, place) for place, key in enumerate(keys) if key is not None)
    while chunk := dict(islice(named, _ASKED_AT_ONCE)):
        yield chunk


def _place(places: dict[bytes, int], row: bytes) -> int:
    if row not in places:
        raise damage("a row came that was not asked for")
    return places[row]


def _marks(places: dict[bytes, int]) -> str:
    return ", ".join("?" * len(places))
