"""Keeps plain copies of compressed tars in a cache folder: each is unpacked once, within bounds, and whole or not."""

import gzip
import hashlib
import io
import os
import secrets
import shutil
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, Self
from urllib.parse import quote, unquote

from frostline.core.units import in_bytes
from frostline.errors import BadRequest, DataError, ObjectNotFound
from frostline.file_cache import lock
from frostline.private import make_private_file, make_private_folder, open_private
from frostline.stores.base.protocols import Entry, Versioned, is_other_version
from frostline.stores.objects.local import error_of_system

__all__ = ("CompressedTar", "TarCopies")

_PIECE = 4 << 20
# gzip makes nothing smaller than a thousandth. A tar of texts of one byte, each with its header, is 150 times as large
# as its compressed file, so that what exceeds this was made to fill a disk.
_MAX_TIMES = 500
_ALWAYS_FITS = 16 << 20
# So much of the disk stays free for everybody else.
_SHARE_OF_FREE = 2
_IDLE_S = 7 * 86_400.0
_PARTIAL = ".partial-"


class CompressedTar(NamedTuple):
    """A compressed tar as it was listed: what samples in it have for their object.

    Attributes:
        file: name of the object.
        size: its compressed size in bytes.
        version: its etag; empty where the store has none.
    """

    file: str
    size: int
    version: str

    @classmethod
    def of(cls, entry: Entry) -> Self:
        """The tar of an entry of a listing."""
        return cls(entry.object, entry.size, entry.etag)

    @classmethod
    def parse(cls, object: str) -> Self:
        """The inverse of ``str``.

        Raises:
            BadRequest: the name is not that of a compressed tar.
        """
        file, mark, rest = object.rpartition("#")
        size, _, version = rest.partition(".")
        if not mark or not size.isascii() or not size.isdigit() or len(size) > 18:
            raise BadRequest(f"samples.objects: {object[:200]!a} is no compressed tar")
        return cls(file, int(size), unquote(version))

    def __str__(self) -> str:
        return f"{self.file}#{self.size}.{quote(self.version, safe='')}"


class TarCopies:
    """Plain copies of compressed tars. Safe for threads and for several processes with the same folder.

    A copy that nobody opened for a week is removed when another tar is unpacked, and one of an older version of the
    same tar at once.

    Args:
        folder: made where it is missing, for its user alone.
        free_bytes: gives the bytes that are free on the disk of a folder; half of them may be taken by a copy.
        clock: seconds since the epoch.
    """

    def __init__(
        self,
        folder: Path,
        *,
        free_bytes: Callable[[Path], int] = lambda folder: shutil.disk_usage(folder).free,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._folder = folder
        self._free_bytes = free_bytes
        self._clock = clock

    def path_of(self, store: Versioned, url: str, tar: CompressedTar) -> Path:
        """The copy of a tar, made now where there is none. Whoever comes meanwhile waits.

        Args:
            store: store that holds the tar.
            url: address of the folder that it lies in.
            tar: compressed tar.

        Raises:
            DataError: it is damaged or cut off, or would be larger than any tar of samples, or than the disk allows.
            ObjectNotFound: it is not what it was when it was listed.
            OutOfSpace: the disk is full.
            StoreError: the store failed.
        """
        place = _digest(url, tar.file)
        path = self._folder / f"{place}-{_digest(str(tar.size), tar.version)}.tar"
        with _of_system(path):
            if _is_there(path):
                return path
            with self._alone(place):
                if not _is_there(path):
                    self._unpack(store, tar, path)
                    self._tidy(place, path)
        return path

    @contextmanager
    def _alone(self, place: str) -> Iterator[None]:
        make_private_folder(self._folder)
        path = self._folder / f"{place}.lock"
        make_private_file(path)
        with path.open("rb") as file:
            lock(file.fileno())
            yield

    def _unpack(self, store: Versioned, tar: CompressedTar, path: Path) -> None:
        part = path.with_name(f"{_PARTIAL}{secrets.token_hex(8)}")
        largest = _MAX_TIMES * tar.size + _ALWAYS_FITS
        room = self._free_bytes(self._folder) // _SHARE_OF_FREE
        nbytes = 0
        try:
            with open_private(part, "xb") as file:
                for piece in _plain(store, tar):
                    nbytes += len(piece)
                    if nbytes > min(largest, room):
                        raise DataError(_too_large(tar, nbytes, room, self._folder))
                    file.write(piece)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)

    def _tidy(self, place: str, newest: Path) -> None:
        idle = self._clock() - _IDLE_S
        for path in self._folder.iterdir():
            with suppress(FileNotFoundError):  # another process tidies too
                is_older = path.suffix == ".tar" and path.name.startswith(f"{place}-") and path != newest
                if is_older or path.stat().st_mtime < idle:
                    path.unlink()


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode(errors="surrogateescape")).hexdigest()[:24]


def _is_there(path: Path) -> bool:
    """Whether a copy is there, which counts as use of it."""
    try:
        os.utime(path)
    except FileNotFoundError:
        return False
    return True


def _too_large(tar: CompressedTar, nbytes: int, room: int, folder: Path) -> str:
    if nbytes <= room:
        return (
            f"{tar.file} would unpack to more than {_MAX_TIMES} times its {in_bytes(tar.size)}, as no tar of samples "
            "does: unpack it yourself, to a plain tar, if it is right"
        )
    return (
        f"{tar.file} would unpack to more than {in_bytes(room)}, half of what is free in {folder}: set XDG_CACHE_HOME "
        "to a larger disk, or unpack it yourself, to a plain tar"
    )


@contextmanager
def _of_system(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise error_of_system(error, str(path)) from error


def _plain(store: Versioned, tar: CompressedTar) -> Iterator[bytes]:
    """The bytes of the plain tar, one after another."""
    try:
        with gzip.GzipFile(fileobj=io.BufferedReader(_Compressed(store, tar), _PIECE)) as file:
            while piece := file.read(_PIECE):
                yield piece
    except EOFError as error:
        raise DataError(f"{tar.file} is cut off: make it again") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{tar.file} is not compressed by gzip, or damaged: make it again") from error


class _Compressed(io.RawIOBase):
    """The bytes of a compressed tar as they lie in its store. For one thread."""

    def __init__(self, store: Versioned, tar: CompressedTar) -> None:
        self._store = store
        self._tar = tar
        self._place = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        length = min(len(buffer), self._tar.size - self._place)
        if not length:
            return 0
        data, version = self._store.read_version(self._tar.file, self._place, length)
        if is_other_version(self._tar.version, version):
            raise ObjectNotFound(f"{self._tar.file} has changed since it was listed")
        buffer[:length] = data
        self._place += length
        return length
