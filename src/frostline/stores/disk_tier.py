"""A local tier: keeps encoded samples of a store in a folder, so that they are read from there the next time."""

import hashlib
import os
import re
import secrets
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from frostline.core.declared import Count
from frostline.core.errors import SettingError
from frostline.core.files import make_private_folder, open_private, warn_not_kept
from frostline.stores.protocols import Buffer, ByteRange

__all__ = ("LocalTier", "TierStatistics", "tier_name")

# Only files of such names are its own: whatever else lies in the folder stays.
_NAME = re.compile(r"[0-9a-f]{40}")
_DIGEST_BYTES = 32
_PARTIAL = ".partial-"
# Nobody who asks for samples pauses for longer, but for whole epochs from elsewhere.
_IDLE_S = 3600.0
# Use is noted so coarsely that reading seldom writes.
_NOTED_EVERY_S = 600.0
# After a failed write, and where it is full, nothing is written for so long.
_REST_S = 60.0
# Of the budget, so much is filled: several processes write between two looks at the folder.
_FILLED = 7 / 8
_PROCESSES = 8
# Left free on the disk for everybody else.
_LEFT_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStatistics:
    """What this process did with a local tier since it was opened.

    Attributes:
        budget_bytes: the most bytes of its files.
        bytes: bytes of its files when the folder was last looked at, and what was written since.
        hits: samples found.
        misses: samples asked for and not found.
        kept: samples written.
        rejected: samples for which there was no space; give it more bytes if that grows.
        removed: samples removed for others, because nobody had used them for an hour.
        damaged: files that were not what was written; each counts as a miss too, and is removed.
    """

    budget_bytes: Count
    bytes: Count = 0
    hits: Count = 0
    misses: Count = 0
    kept: Count = 0
    rejected: Count = 0
    removed: Count = 0
    damaged: Count = 0


class _File(NamedTuple):
    used_s: float
    name: str
    nbytes: int


class LocalTier:
    """Samples in a bounded folder, by name. Safe for threads, and for up to eight processes that use one folder.

    Each file holds its own digest, and one that does not fit it counts as not there, so a kill or a crash at any moment
    costs no more than what was being written. What nobody used for an hour is evicted; what is in use stays, and what
    finds no space is not kept: of data larger than the budget a share is found in every epoch, while whatever gives up
    the oldest would find nothing.

    Args:
        folder: folder that holds them; made where it is missing, for its user alone.
        budget_bytes: the most bytes of its files; less where the disk would have no gigabyte left.
        clock: seconds since the epoch, as files have them.

    Raises:
        SettingError: the budget makes no sense, or the folder cannot be used.
    """

    def __init__(self, folder: Path, *, budget_bytes: int, clock: Callable[[], float] = time.time) -> None:
        if budget_bytes < 1:
            raise SettingError(f"budget_bytes of a local tier must be at least 1, not {budget_bytes}")
        self._folder = folder
        self._budget_bytes = budget_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._rests_until_s = 0.0
        try:
            make_private_folder(folder)
            self._bytes, self._allowance = 0, 0
            self._look(0)
        except OSError as error:
            said = os.strerror(error.errno or 0)
            raise SettingError(f"samples cannot be kept in {folder}: {said}; name another folder") from error

    def statistics(self) -> TierStatistics:
        """What it did so far."""
        with self._lock:
            return TierStatistics(budget_bytes=self._budget_bytes, bytes=self._bytes, **self._counts)

    def has(self, name: str) -> bool:
        """Whether a sample is kept; it may be gone, or found damaged, when it is read."""
        return (self._folder / name).exists()

    def get(self, name: str, length: int) -> Buffer | None:
        """A sample's bytes; None where it is not kept."""
        data = None
        with suppress(OSError):
            with (self._folder / name).open("rb") as file:
                data, used_s = file.read(), os.fstat(file.fileno()).st_mtime
            if not 0 <= self._clock() - used_s <= _NOTED_EVERY_S:  # a clock that was set back stands before it
                os.utime(self._folder / name, (self._clock(),) * 2)
        found = None if data is None else _opened(data, name, length)
        if data is not None and found is None:
            (self._folder / name).unlink(missing_ok=True)
        self._count(hits=found is not None, misses=found is None, damaged=found is None and data is not None)
        return found

    def put(self, name: str, data: Buffer) -> None:
        """Keep a sample, if there is space. A full disk, or a folder that is gone, costs the speed and no more."""
        nbytes = _DIGEST_BYTES + len(data)
        if not self._fits(nbytes):
            self._count(rejected=1)
            return
        partial = self._folder / f"{_PARTIAL}{secrets.token_hex(8)}"
        try:
            with open_private(partial, "xb") as file:
                file.write(_digest(name, data))
                file.write(data)
            partial.replace(self._folder / name)
        except OSError as error:
            warn_not_kept(self._folder, error)
            self._rests_until_s = self._clock() + _REST_S
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            return
        with self._lock:
            self._bytes += nbytes
        self._count(kept=1)

    def _fits(self, nbytes: int) -> bool:
        with self._lock:
            if 0 < self._rests_until_s - self._clock() <= _REST_S:  # longer where the clock was set back
                return False
            if self._allowance < nbytes:
                with suppress(OSError):
                    self._look(nbytes)
            if self._allowance < nbytes:
                self._rests_until_s = self._clock() + _REST_S
                return False
            self._allowance -= nbytes
            return True

    def _look(self, nbytes: int) -> None:
        """See what lies there, remove what has to go, and work out what this process may write until it looks again."""
        now_s, files = self._clock(), self._files()
        total = sum(file.nbytes for file in files)
        disk_bytes = total + shutil.disk_usage(self._folder).free - _LEFT_BYTES
        bound = min(self._budget_bytes, disk_bytes)
        maximum = int(bound * _FILLED)
        for file in sorted(files):
            # A share at once, so that it is not done again for the next sample.
            is_wanted = total + max(nbytes, maximum // _PROCESSES) > maximum and now_s - file.used_s >= _IDLE_S
            if total <= bound and not is_wanted:
                break
            (self._folder / file.name).unlink(missing_ok=True)
            total -= file.nbytes
            self._counts["removed"] += 1
        self._bytes = total
        left = maximum - total
        # The others may do the same before anybody looks again: together they stay within the bound.
        self._allowance = max(left, maximum // _PROCESSES) // _PROCESSES if left >= nbytes else 0
        if left >= nbytes:
            self._allowance = max(self._allowance, nbytes)

    def _files(self) -> list[_File]:
        found = []
        for entry in os.scandir(self._folder):
            with suppress(FileNotFoundError):  # another process has removed it
                status = entry.stat()
                if _NAME.fullmatch(entry.name):
                    found.append(_File(status.st_mtime, entry.name, status.st_size))
                elif entry.name.startswith(_PARTIAL) and self._clock() - status.st_mtime > _REST_S:  # of a killed one
                    Path(entry.path).unlink(missing_ok=True)
        return found

    def _count(self, **amounts: int) -> None:
        with self._lock:
            self._counts.update(amounts)


def tier_name(url: str, place: ByteRange, version: str) -> str:
    """What a sample is called in a tier: another version of its object is another sample."""
    said = "\0".join((url, *map(str, place), version))
    return hashlib.blake2b(said.encode(errors="surrogatepass"), digest_size=20).hexdigest()


def _digest(name: str, data: Buffer) -> bytes:
    made = hashlib.blake2b(name.encode(), digest_size=_DIGEST_BYTES)
    made.update(data)
    return made.digest()


def _opened(file: bytes, name: str, length: int) -> Buffer | None:
    data = memoryview(file)[_DIGEST_BYTES:]
    return data if len(data) == length and _digest(name, data) == file[:_DIGEST_BYTES] else None
