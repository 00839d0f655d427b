"""Keeps features on disk, in one SQLite file bounded in bytes, safe against a kill, damage and a full disk."""

import os
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from frostline.cache.keys import RowLayout, Tensors, add_checksum, fill, verify_checksum
from frostline.core.declared import Count
from frostline.core.errors import OutOfSpace, SettingError
from frostline.core.files import is_full, make_private_file, make_private_folder, warn_not_kept
from frostline.core.nouns import Closing

__all__ = (
    "MIN_BYTES",
    "Database",
    "DiskStatistics",
    "FeatureStore",
    "Keys",
    "ScopeUsage",
    "damage",
    "idle_scopes",
    "is_busy",
    "stored_bytes",
    "typed_rows",
)


_PAGE_BYTES = 16_384
"""Of the file: a row of a few kilobytes lies in one page, so that reading it is one call."""

# What a page, a row within it and its place in the index take beside the row's bytes, rounded up.
_PAGE_HEADER_BYTES = 40
_ROW_BYTES = 24
_INDEX_BYTES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ScopeUsage:
    """The features of one scope.

    Attributes:
        number: number of the scope in the file.
        used_s: the time when somebody last asked for one of them or put one there.
        row_bytes: bytes of each.
    """

    number: int
    used_s: float
    row_bytes: int


def idle_scopes(scopes: Sequence[ScopeUsage], *, wanting: int, now_s: float, idle_s: float) -> list[ScopeUsage]:
    """The scopes to evict, longest unused first.

    What somebody used within ``idle_s`` stays, and new rows are turned away: an epoch reads every sample once in a
    new order, so with space for a share of a data set keeping what came first hits exactly that share, while dropping
    the oldest drops rows before they are wanted again (Mohan et al., "Analyzing and Mitigating Data Stalls in DNN
    Training", PVLDB 14(5), 2021). Nor can two jobs drive each other's features out for ever.

    Args:
        scopes: all of them.
        wanting: number of the scope for which space is wanted; it is not evicted for itself.
        now_s: the time by the clock of ``used_s``.
        idle_s: the time without use after which nobody is taken to want them any more.
    """
    idle = [scope for scope in scopes if scope.number != wanting and now_s - scope.used_s >= idle_s]
    return sorted(idle, key=lambda scope: (scope.used_s, scope.number))


def stored_bytes(row_bytes: int) -> float:
    """What a row takes in the file, rounded up: rows share a page as far as they fit whole, or fill several."""
    payload = _PAGE_BYTES - _PAGE_HEADER_BYTES
    if row_bytes + _ROW_BYTES > payload:
        return row_bytes + _PAGE_BYTES + _INDEX_BYTES
    return _PAGE_BYTES / (payload // (row_bytes + _ROW_BYTES)) + _INDEX_BYTES


MIN_BYTES = 16 << 20
"""Below this there would be no space beside the log."""

# Raise it whenever the tables change: a file of another format is left and replaced.
_FORMAT = 1
_SCHEMA = """
CREATE TABLE IF NOT EXISTS scopes (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    digest BLOB NOT NULL UNIQUE,
    used REAL NOT NULL,
    row_bytes INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS features (
    number INTEGER PRIMARY KEY, scope INTEGER NOT NULL, row BLOB NOT NULL, value BLOB NOT NULL
);
CREATE UNIQUE INDEX IF NOT EXISTS places ON features (scope, row);
"""
# More at once would only wait for each other's disk, and each keeps some pages in memory.
_MAX_CONNECTIONS = 8
_PAGES_IN_MEMORY_KIB = 512
# What a transaction writes stands in memory once more.
_MAX_BATCH_BYTES = 4 << 20
# Another process may be writing a batch.
_PATIENCE_S = 5.0
_TRIES = 4
# The last four say that a file holds what our statements never put there.
_DAMAGE = {
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_NOTADB,
    sqlite3.SQLITE_ERROR,
    sqlite3.SQLITE_FORMAT,
    sqlite3.SQLITE_CONSTRAINT,
    sqlite3.SQLITE_MISMATCH,
    sqlite3.SQLITE_TOOBIG,
}
_NAME = "features-{:06}.sqlite"
_TURN = "turn"
_BESIDE = ("", "-wal", "-shm")

# A connection that a fork took along must be neither used nor closed in the child.
_left_alone: list[sqlite3.Connection] = []


def _is_damage(error: sqlite3.Error) -> bool:
    """The file is not what was written; other errors may pass, such as a full disk."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in _DAMAGE


def is_busy(error: sqlite3.Error) -> bool:
    """Another process was in the way."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}


def typed_rows(rows: Iterable[tuple[Any, ...]], *kinds: type) -> Iterator[tuple[Any, ...]]:
    """The rows of an answer, whose values are of the kinds that were put there.

    Raises:
        sqlite3.DatabaseError: One is not: the file is damaged.
    """
    for row in rows:
        if tuple(map(type, row)) != kinds:
            raise damage("a value is of another kind than was written")
        yield row


def damage(what: str) -> sqlite3.DatabaseError:
    """An error that says that the file is not what was written, which SQLite itself did not notice."""
    return _coded(sqlite3.SQLITE_CORRUPT, what)


class Database:
    """The newest features file of a folder. Safe for threads, for several processes at once, and over a fork.

    Its log is written before the file (SQLite's WAL), so that a process may be killed at any moment. Nothing is
    forced to the disk: after a power failure the file may be damaged, which is noticed and costs what it held.

    Args:
        folder: the folder, made where it is missing.
        budget_bytes: the most bytes of the file and its log together.

    Raises:
        SettingError: The folder cannot be used, or the budget is too small.
        OutOfSpace: The disk has no space for the database itself.
    """

    def __init__(self, folder: Path, budget_bytes: int) -> None:
        if budget_bytes < MIN_BYTES:
            raise SettingError(f"a cache on disk needs at least {MIN_BYTES} bytes, not {budget_bytes}")
        self._folder = folder
        self._log_bytes = min(budget_bytes // 4, 64 << 20)
        self._file_bytes = budget_bytes - self._log_bytes
        self._turns = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        self._lock = threading.Lock()
        self._one_writes = threading.Lock()  # so that only other processes can be in the way
        self._idle: list[sqlite3.Connection] = []
        self._pid = os.getpid()
        self._number = 0
        self._is_closed = False
        self._begin()

    @property
    def file_bytes(self) -> int:
        """Most bytes of the file."""
        return self._file_bytes

    @property
    def batch_bytes(self) -> int:
        """Most bytes to write in one transaction, which the log must hold."""
        return min(self._log_bytes // 4, _MAX_BATCH_BYTES)

    @contextmanager
    def read_transaction(self) -> Iterator[sqlite3.Connection]:
        """A connection that no one else uses meanwhile."""
        with self._turns:
            connection, number = self._take()
            try:
                yield connection
            except UnicodeDecodeError as error:  # in what SQLite says of a damaged file, where it quotes from it
                raise damage("the file is damaged") from error
            finally:
                self._give_back(connection, number)

    @contextmanager
    def write_transaction(self) -> Iterator[sqlite3.Connection]:
        """The same within a transaction: it is kept whole at the end, and not at all where an error ends it.

        Raises:
            sqlite3.DatabaseError: Another process holds the write-ahead log, so that it cannot be emptied and is full.
        """
        with self._one_writes, self._turn(), self.read_transaction() as connection:
            self._empty_log(connection)
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):
                    connection.execute("ROLLBACK")
                raise

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Be the only process that writes, the log's emptying included, which SQLite's own lock does not cover.

        Processes that emptied it at the same time sent each other away. The lock is that of an empty database, since
        SQLite waits for one no longer than it is told to, and the system gives it back whatever becomes of a process.
        """
        make_private_file(self._folder / _TURN)
        with closing(sqlite3.connect(self._folder / _TURN, timeout=_PATIENCE_S, isolation_level=None)) as turn:
            try:
                turn.execute("BEGIN IMMEDIATE")
            except sqlite3.DatabaseError as error:
                if not _is_damage(error):
                    raise
                # It holds nothing, so that the next turn may begin with a new one.
                (self._folder / _TURN).unlink(missing_ok=True)
                raise _coded(sqlite3.SQLITE_BUSY, "the file for turns was damaged") from error
            yield

    def used_bytes(self, connection: sqlite3.Connection) -> int:
        """Bytes of the file, without pages that are free to be written again."""
        pages: int = _value(connection, "PRAGMA page_count") - _value(connection, "PRAGMA freelist_count")
        return pages * _PAGE_BYTES

    def start_anew(self, damaged: int) -> None:
        """Leave a damaged file and begin another.

        The new one has another name, so that a process that still reads the old one takes no harm.

        Args:
            damaged: ``number`` of the file as it was when the damage was met; where it has been left since, nothing
                is done.
        """
        with self._lock:
            if self._number != damaged:
                return
            idle, self._idle = self._idle, []
            self._number += 1
        for connection in idle:
            connection.close()
        self._begin()

    @property
    def folder(self) -> Path:
        """Where the file lies."""
        return self._folder

    @property
    def number(self) -> int:
        """The number of the file in use."""
        return self._number

    def close(self) -> None:
        """Close what is not in use now; the rest closes when it is given back."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _begin(self) -> None:
        try:
            make_private_folder(self._folder)
            self._number = max(self._number, *(_number(path) for path in self._files()), 1)
            connection, number = self._take()
            is_too_large = _value(connection, "PRAGMA page_count") * _PAGE_BYTES > self._file_bytes
            self._give_back(connection, number)
            if is_too_large:  # it was made with a larger budget, and such a file does not shrink
                self.start_anew(number)
                return
        except OSError as error:
            if is_full(error):
                raise OutOfSpace(f"the disk is full: there is no space for a cache in {self._folder}") from error
            raise SettingError(f"the cache folder {self._folder} cannot be used: {error.strerror}") from error
        except sqlite3.Error as error:
            if _is_damage(error):
                self.start_anew(self._number)
                return
            if error.sqlite_errorcode in _NO_SPACE:
                raise OutOfSpace(f"the disk is full: there is no space for a cache in {self._folder}") from error
            raise SettingError(f"the cache folder {self._folder} cannot be used: {error}") from error
        for path in self._files():
            if _number(path) < self._number:
                for beside in _BESIDE:
                    path.with_name(path.name + beside).unlink(missing_ok=True)

    def _files(self) -> list[Path]:
        return sorted(self._folder.glob(_NAME.replace("{:06}", "??????")))

    def _take(self) -> tuple[sqlite3.Connection, int]:
        with self._lock:
            if self._pid != os.getpid():
                _left_alone.extend(self._idle)
                self._idle, self._pid = [], os.getpid()
            if self._idle:
                return self._idle.pop(), self._number
            number = self._number
        return self._connect(self._folder / _NAME.format(number)), number

    def _give_back(self, connection: sqlite3.Connection, number: int) -> None:
        with self._lock:
            if number == self._number and not self._is_closed:
                self._idle.append(connection)
                return
        connection.close()

    def _connect(self, path: Path) -> sqlite3.Connection:
        make_private_file(path)  # SQLite gives what stands beside it the same rights
        connection = sqlite3.connect(path, timeout=_PATIENCE_S, isolation_level=None, check_same_thread=False)
        connection.text_factory = bytes  # nothing that was written is text
        try:
            for pragma in (
                f"page_size={_PAGE_BYTES}",
                "journal_mode=WAL",
                "synchronous=OFF",
                "secure_delete=OFF",  # some builds overwrite what is deleted
                "trusted_schema=OFF",
                "cell_size_check=ON",
                f"cache_size=-{_PAGES_IN_MEMORY_KIB}",
                f"journal_size_limit={self._log_bytes}",
                f"wal_autocheckpoint={self._log_bytes // 4 // _PAGE_BYTES}",
                f"max_page_count={self._file_bytes // _PAGE_BYTES}",
            ):
                connection.execute(f"PRAGMA {pragma}")
            self._prepare(connection)
        except UnicodeDecodeError as error:
            connection.close()
            raise damage("the file is damaged") from error
        except BaseException:
            connection.close()
            raise
        return connection

    def _prepare(self, connection: sqlite3.Connection) -> None:
        format = _value(connection, "PRAGMA user_version")
        if format == _FORMAT:
            return
        if format or _value(connection, "PRAGMA page_count") > 1:
            raise _coded(sqlite3.SQLITE_NOTADB, "the file has another format")
        connection.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} PRAGMA user_version={_FORMAT}; COMMIT;")

    def _empty_log(self, connection: sqlite3.Connection) -> None:
        log = self._folder / (_NAME.format(self._number) + "-wal")
        with suppress(FileNotFoundError):
            for _ in range(_TRIES):
                if log.stat().st_size <= self._log_bytes // 2:
                    return
                is_busy = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
                if is_busy:  # another process empties it: the next writer's turn comes when it is done
                    connection.executescript("BEGIN IMMEDIATE; COMMIT;")
            if log.stat().st_size > self._log_bytes // 2:
                raise _coded(sqlite3.SQLITE_BUSY, "others keep the log from being emptied")


def _coded(code: int, message: str) -> sqlite3.DatabaseError:
    error = sqlite3.DatabaseError(message)
    error.sqlite_errorcode = code
    return error


def _value(connection: sqlite3.Connection, statement: str) -> int:
    for (value,) in typed_rows(connection.execute(statement), int):
        return int(value)
    raise damage("no answer")


def _number(path: Path) -> int:
    digits = path.stem.rpartition("-")[2]
    return int(digits) if digits.isdecimal() else 0


Keys = Sequence[bytes | None]
"""Names of rows within a scope; a row without one is neither found nor kept."""

_Mask = npt.NDArray[np.bool_]

# Nobody who asks for features pauses for longer between two requests, but for whole epochs from their own cache.
_IDLE_S = 60.0
# Use is noted so coarsely that reading seldom writes.
_NOTED_EVERY_S = 10.0
# Only its own file is said to be full; what stands beside that cannot be written, or made larger.
_NO_SPACE = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_SHMSIZE)
# After a failed write, such as on a full disk, the next attempt waits.
_REST_S = 30.0
_ASKED_AT_ONCE = 256
# Fewer would be evicted again for the very next rows.
_MIN_CLEARED = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskStatistics:
    """What a cache on disk did since it was opened.

    Attributes:
        bytes: the bytes, taken in its file now.
        budget_bytes: the most that file and log may take together.
        hits: rows found.
        misses: rows asked for and not found.
        kept: rows written.
        rejected: rows that found no space; if it grows, give the cache more bytes.
        cleared: rows dropped for others, because nobody had asked for their like for a while.
        damaged: rows whose bytes were not those that were written; each counts as a miss too, and is dropped.
        resets: times that the file itself was damaged and left for a new one.
        failed: reads and writes that the disk refused; look whether it is full.
    """

    bytes: Count = 0
    budget_bytes: Count = 0
    hits: Count = 0
    misses: Count = 0
    kept: Count = 0
    rejected: Count = 0
    cleared: Count = 0
    damaged: Count = 0
    resets: Count = 0
    failed: Count = 0


class FeatureStore(Closing):
    """Features by scope and row, in a folder. A context manager.

    Safe for threads and for several processes with the same folder. Nothing that goes wrong on the disk reaches the
    caller once it is open: what cannot be read is a miss, what cannot be written is turned away, and both are counted.

    Args:
        folder: the folder, made where it is missing; for this cache alone.
        budget_bytes: the most bytes on disk; 16 MiB or more.
        idle_s: features for which nobody asked for so long are evicted for others.
        clock: seconds since the epoch: notes of use outlive the process.

    Raises:
        SettingError: The folder cannot be used, or the budget is too small.
        OutOfSpace: The disk has no space for the cache itself.
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

    @classmethod
    def try_open(cls, folder: Path, budget_bytes: int) -> Self | None:
        """The cache in a folder; None where the disk has no space for it, which is logged: the work goes on without.

        Raises:
            SettingError: The folder cannot be used, or the budget is too small.
        """
        try:
            return cls(folder, budget_bytes)
        except OutOfSpace as error:
            warn_not_kept(folder, error)
            return None

    def contains(self, scope: bytes, keys: Keys) -> _Mask:
        """Which rows are kept: ``bool[n]``. One that is may be gone or found damaged when it is read."""
        found = np.zeros(len(keys), np.bool_)
        with self._survived(), self._database.read_transaction() as connection:
            for places in _chunks(keys):
                query = f"SELECT row FROM features WHERE scope = {_SCOPE} AND row IN ({_marks(places)})"  # noqa: S608
                for (row,) in typed_rows(connection.execute(query, (scope, *places)), bytes):
                    found[_place(places, row)] = True
        return found

    def has_any(self, keys: Keys) -> bool:
        """Whether features of one of these rows are kept, in any scope."""
        query = (
            "SELECT 1 FROM scopes JOIN features INDEXED BY places ON features.scope = scopes.number "
            "WHERE features.row = ? LIMIT 1"
        )
        kept = 0
        with self._survived(), self._database.read_transaction() as connection:
            kept = sum(1 for key in keys if key is not None and connection.execute(query, (key,)).fetchone())
        return kept > 0

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
        with self._survived(), self._database.read_transaction() as connection:
            for places in _chunks(keys):
                query = f"SELECT row, value FROM features WHERE scope = {_SCOPE} AND row IN ({_marks(places)})"  # noqa: S608
                for row, value in typed_rows(connection.execute(query, (scope, *places)), bytes, bytes):
                    place = _place(places, row)
                    body = verify_checksum(scope + row, value, row_bytes)
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
        """Keep rows as far as there is space; rows that are kept already stay as they are.

        Args:
            scope: digest of what they depend on.
            keys: keys of the rows.
            tensors: arrays ``[n, ...]``; read before this returns.

        Returns:
            Number of rows that were added.
        """
        layout = RowLayout.of(tensors)
        rows = ((key, body) for key, body in zip(keys, layout.bodies(tensors), strict=True) if key is not None)
        named = sum(key is not None for key in keys)
        size = int(self._database.batch_bytes // max(1, layout.nbytes))
        added, offered = 0, 0
        if size and not self._rests():
            while offered < named:
                batch = [(key, add_checksum(scope + key, body)) for key, body in islice(rows, size)]
                written = self._write(scope, batch, layout.nbytes)
                if written is None:
                    break
                offered, added = offered + len(batch), added + written
        self._count(rejected=named - offered)
        return added

    def statistics(self) -> DiskStatistics:
        """What it did so far."""
        used = 0
        with self._survived(), self._database.read_transaction() as connection:
            used = self._database.used_bytes(connection)
        with self._lock:
            return DiskStatistics(bytes=used, budget_bytes=self._budget_bytes, **self._counts)

    def close(self) -> None:
        """Close the file. Calling it again does nothing."""
        self._database.close()

    def _write(self, scope: bytes, batch: Sequence[tuple[bytes, bytes]], row_bytes: int) -> int | None:
        """Write rows in one transaction: how many were added, or None where the disk refused."""
        added = fitting = cleared = 0
        is_written = False
        with self._survived(writing=True):
            with self._database.write_transaction() as connection:
                number = self._shelf(connection, scope, row_bytes)
                fitting, cleared = self._evict(connection, number, len(batch), row_bytes)
                query = "INSERT OR IGNORE INTO features (scope, row, value) VALUES (?, ?, ?)"
                added = connection.executemany(query, [(number, *row) for row in batch[:fitting]]).rowcount
            is_written = True  # it ends whole, or with an error
        if not is_written:
            return None
        self._noted[scope] = self._clock()
        self._count(kept=added, rejected=max(0, len(batch) - fitting), cleared=cleared)
        return added

    def _shelf(self, connection: sqlite3.Connection, scope: bytes, row_bytes: int) -> int:
        """The number of a scope, whose use is noted."""
        query = (
            "INSERT INTO scopes (digest, used, row_bytes) VALUES (?, ?, ?) "
            "ON CONFLICT (digest) DO UPDATE SET used = excluded.used RETURNING number"
        )
        found = list(typed_rows(connection.execute(query, (scope, self._clock(), row_bytes)), int))
        if len(found) != 1:
            raise damage("a scope has no number, or two")
        return int(found[0][0])

    def _evict(self, connection: sqlite3.Connection, wanting: int, rows: int, row_bytes: int) -> tuple[int, int]:
        """For how many of the rows there is space, and how many others were dropped for them."""
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
        found = list(typed_rows(connection.execute(query), int, float, int))
        if any(row_bytes < 0 for _, _, row_bytes in found):
            raise damage("a row has less than no bytes")
        scopes = [ScopeUsage(number=number, used_s=used, row_bytes=row_bytes) for number, used, row_bytes in found]
        idle = idle_scopes(scopes, wanting=wanting, now_s=self._clock(), idle_s=self._idle_s)
        return idle[0] if idle else None

    def _rests(self) -> bool:
        """Whether the disk was full a moment ago; a clock that was set back does not prolong it."""
        return 0 < self._rests_until_s - self._clock() <= _REST_S

    def _note(self, scope: bytes) -> None:
        """Note that somebody wants features of this scope, so that they stay."""
        now_s = self._clock()
        if 0 <= now_s - self._noted.get(scope, 0.0) < _NOTED_EVERY_S or self._rests():
            return
        self._noted[scope] = now_s
        with self._survived(writing=True), self._database.write_transaction() as connection:
            connection.execute("UPDATE scopes SET used = ? WHERE digest = ?", (now_s, scope))

    def _drop(self, scope: bytes, rows: Sequence[bytes]) -> None:
        if not rows:
            return
        self._count(damaged=len(rows))
        with self._survived(writing=True), self._database.write_transaction() as connection:
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
            if _is_damage(error):
                self._start_anew(number)
                return
            self._count(failed=1)
            if writing and not is_busy(error):
                warn_not_kept(self._database.folder, error)
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
