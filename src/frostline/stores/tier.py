"""A local tier: keeps what was read of a store in a folder, so that it is read from there the next time."""

import fcntl
import hashlib
import os
import re
import secrets
import threading
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path

from frostline.errors import DataError, SettingError
from frostline.stores.faces import Buffer, ObjectStore
from frostline.stores.folder import error_of_system
from frostline.stores.urls import check_name
from frostline.stores.wrapped import Wrapped

__all__ = ("LocalTier",)

# Only files of such names are its own: whatever else lies in the folder stays.
_NAME = re.compile(r"[0-9a-f]{40}")
_DIGEST_BYTES = 32
_PARTIAL = ".partial-"
_LOCK = "lock"


class LocalTier(Wrapped):
    """A store whose reads are kept in a bounded folder. Safe for threads; one process at a time uses a folder.

    What was read stays as it was then, version and all: an object that changes is seen as it was, with its version of
    then, until its place is needed. Each file holds its own digest, and one that does not fit it counts as not there,
    so a kill or a crash at any moment costs no more than what was being written.

    Args:
        store: whose reads are kept.
        folder: that holds them; made where it is missing.
        budget_bytes: most bytes of its files.

    Raises:
        SettingError: the budget makes no sense.
        DataError: another process uses the folder.
        AccessDenied: the folder takes no writes.
    """

    def __init__(self, store: ObjectStore, folder: Path, *, budget_bytes: int) -> None:
        super().__init__(store)
        if budget_bytes < 1:
            raise SettingError(f"budget_bytes of a local tier must be at least 1, not {budget_bytes}")
        self._folder = folder
        self._budget_bytes = budget_bytes
        self._mutex = threading.Lock()
        self._hits = self._misses = 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._held = _held(folder)
            self._sizes = _found(folder)
        except OSError as error:
            raise error_of_system(error, str(folder)) from error
        self._nbytes = sum(self._sizes.values())
        self._make_room(0)

    def close(self) -> None:
        """Let other processes use the folder; closing again does nothing."""
        held, self._held = self._held, -1
        if held >= 0:
            os.close(held)

    def statistics(self) -> dict[str, int]:
        """Reads that were found and not found, files, and bytes that they take."""
        with self._mutex:
            return {"hits": self._hits, "misses": self._misses, "files": len(self._sizes), "bytes": self._nbytes}

    def read(self, object: str, offset: int, length: int) -> Buffer:
        """See ``Readable.read``."""
        return self.read_version(object, offset, length)[0]

    def read_version(self, object: str, offset: int, length: int) -> tuple[Buffer, str]:
        """See ``Versioned.read_version``; the version is that of when it was read."""
        name = _name(self.url, check_name(object), offset, length)
        kept = self._kept(name, length)
        if kept is not None:
            return kept
        data, version = self._store.read_version(object, offset, length)
        self._keep(name, data, version)
        return data, version

    def _kept(self, name: str, length: int) -> tuple[Buffer, str] | None:
        with self._mutex:
            if name not in self._sizes:
                self._misses += 1
                return None
            self._sizes.move_to_end(name)
        try:
            found = _opened((self._folder / name).read_bytes(), name, length)
        except OSError:
            found = None
        with self._mutex:
            self._hits += found is not None
            self._misses += found is None
        if found is None:
            self._drop(name)
        return found

    def _keep(self, name: str, data: Buffer, version: str) -> None:
        about = version.encode()
        size = _DIGEST_BYTES + 4 + len(about) + len(data)
        if size > self._budget_bytes:
            return
        partial = self._folder / f"{_PARTIAL}{secrets.token_hex(8)}"
        # A full disk, or a folder that is gone, costs the speed and not the read.
        with suppress(OSError):
            try:
                with partial.open("xb") as file:
                    for part in (_digest(name, about, data), len(about).to_bytes(4, "little"), about, data):
                        file.write(part)
                self._put(partial, name, size)
            finally:
                partial.unlink(missing_ok=True)

    def _put(self, partial: Path, name: str, size: int) -> None:
        with self._mutex:
            self._make_room(size)
            partial.replace(self._folder / name)
            self._nbytes += size - self._sizes.pop(name, 0)
            self._sizes[name] = size

    def _make_room(self, nbytes: int) -> None:
        # What was used longest ago goes first.
        while self._sizes and self._nbytes + nbytes > self._budget_bytes:
            name, size = self._sizes.popitem(last=False)
            (self._folder / name).unlink(missing_ok=True)
            self._nbytes -= size

    def _drop(self, name: str) -> None:
        with self._mutex, suppress(OSError):
            self._nbytes -= self._sizes.pop(name, 0)
            (self._folder / name).unlink(missing_ok=True)


def _name(url: str, object: str, offset: int, length: int) -> str:
    return hashlib.blake2b(f"{url}\0{object}\0{offset}\0{length}".encode(), digest_size=20).hexdigest()


def _digest(name: str, about: bytes, data: Buffer) -> bytes:
    made = hashlib.blake2b(name.encode() + about, digest_size=_DIGEST_BYTES)
    made.update(b"\0")
    made.update(data)
    return made.digest()


def _opened(file: bytes, name: str, length: int) -> tuple[Buffer, str] | None:
    start = _DIGEST_BYTES + 4
    stop = start + int.from_bytes(file[_DIGEST_BYTES:start], "little")
    about, data = file[start:stop], memoryview(file)[stop:]
    if len(data) != length or _digest(name, about, data) != file[:_DIGEST_BYTES]:
        return None
    return data, about.decode()


def _held(folder: Path) -> int:
    handle = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        # The system gives it back when the process ends, however it ends.
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(handle)
        raise DataError(f"another process uses the local tier {folder}: give each its own folder") from error
    return handle


def _found(folder: Path) -> OrderedDict[str, int]:
    found = []
    for entry in os.scandir(folder):
        if entry.name.startswith(_PARTIAL):
            Path(entry.path).unlink(missing_ok=True)
        elif _NAME.fullmatch(entry.name):
            status = entry.stat()
            found.append((status.st_mtime_ns, entry.name, status.st_size))
    return OrderedDict((name, size) for _, name, size in sorted(found))
