"""One SQLite file for features: its connections, its bound in bytes, and a new one where the old one is damaged."""

import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from frostline.cache.local.quota import PAGE_BYTES
from frostline.errors import OutOfSpace, SettingError
from frostline.private import make_private_file, make_private_folder

__all__ = ("MIN_BYTES", "Database", "damage", "is_busy", "is_damage", "typed")

MIN_BYTES = 16 << 20
"""Below this there would be no room beside the log."""

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


def is_damage(error: sqlite3.Error) -> bool:
    """The file is not what was written; other errors may pass, such as a full disk."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in _DAMAGE


def is_busy(error: sqlite3.Error) -> bool:
    """Another process was in the way."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}


def typed(rows: Iterable[tuple[Any, ...]], *kinds: type) -> Iterator[tuple[Any, ...]]:
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
        folder: made where it is missing.
        budget_bytes: most bytes of the file and its log together.

    Raises:
        SettingError: The folder cannot be used, or the budget is too small.
        OutOfSpace: The disk has no room for the database itself.
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
    def reading(self) -> Iterator[sqlite3.Connection]:
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
    def writing(self) -> Iterator[sqlite3.Connection]:
        """The same within a transaction: it is kept whole at the end, and not at all where an error ends it.

        Raises:
            sqlite3.DatabaseError: Others keep the log from being emptied, so there is no room in it.
        """
        with self._one_writes, self._turn(), self.reading() as connection:
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
                if not is_damage(error):
                    raise
                # It holds nothing, so that the next turn may begin with a new one.
                (self._folder / _TURN).unlink(missing_ok=True)
                raise _coded(sqlite3.SQLITE_BUSY, "the file for turns was damaged") from error
            yield

    def used_bytes(self, connection: sqlite3.Connection) -> int:
        """Of the file, without pages that are free to be written again."""
        pages: int = _value(connection, "PRAGMA page_count") - _value(connection, "PRAGMA freelist_count")
        return pages * PAGE_BYTES

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
    def number(self) -> int:
        """Of the file in use."""
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
            is_too_large = _value(connection, "PRAGMA page_count") * PAGE_BYTES > self._file_bytes
            self._give_back(connection, number)
            if is_too_large:  # it was made with a larger budget, and such a file does not shrink
                self.start_anew(number)
                return
        except OSError as error:
            raise SettingError(f"the cache folder {self._folder} cannot be used: {error.strerror}") from error
        except sqlite3.Error as error:
            if is_damage(error):
                self.start_anew(self._number)
                return
            if error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_FULL:
                raise OutOfSpace(f"the disk is full: there is no room for a cache in {self._folder}") from error
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
                f"page_size={PAGE_BYTES}",
                "journal_mode=WAL",
                "synchronous=OFF",
                "secure_delete=OFF",  # some builds overwrite what is deleted
                "trusted_schema=OFF",
                "cell_size_check=ON",
                f"cache_size=-{_PAGES_IN_MEMORY_KIB}",
                f"journal_size_limit={self._log_bytes}",
                f"wal_autocheckpoint={self._log_bytes // 4 // PAGE_BYTES}",
                f"max_page_count={self._file_bytes // PAGE_BYTES}",
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
    for (value,) in typed(connection.execute(statement), int):
        return int(value)
    raise damage("no answer")


def _number(path: Path) -> int:
    digits = path.stem.rpartition("-")[2]
    return int(digits) if digits.isdecimal() else 0
