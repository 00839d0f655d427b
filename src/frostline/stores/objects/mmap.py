"""A folder's sealed objects, read from memory maps: the bytes are viewed where the page cache holds them."""

import mmap
import os
import stat
import threading
from dataclasses import dataclass
from pathlib import Path

from cachetools import LRUCache

from frostline.errors import ObjectNotFound
from frostline.stores.base.protocols import Buffer
from frostline.stores.objects.local import FolderStore, error_of_system, etag

__all__ = ("MmapFolder",)

# A map takes address space and a descriptor's place in the kernel, no memory of its own.
_MAX_MAPPED = 64
_WRITABLE = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH

Identity = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True, eq=False)
class _Mapped:
    identity: Identity
    pages: mmap.mmap


class MmapFolder:
    """Reads objects that nobody may write to (``FolderStore.seal``) from memory maps, and others as ever.

    A file that is cut short while it is mapped takes down the process that reads it, which is why only sealed ones
    are mapped. Safe for threads and forks.

    Args:
        folder: folder that holds the objects.
    """

    def __init__(self, folder: FolderStore) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._mapped: LRUCache[str, _Mapped] = LRUCache(_MAX_MAPPED)

    def read(self, object: str, offset: int, length: int) -> Buffer:
        """See ``Readable.read``. Views of a map keep it alive, also when its object was replaced."""
        return self.read_version(object, offset, length)[0]

    def read_version(self, object: str, offset: int, length: int) -> tuple[Buffer, str]:
        """See ``Versioned.read_version``."""
        path = self._folder.path_of(object)
        try:
            identity = _sealed_identity(path)
            mapped = None if identity is None else self._mapped_file(object, path, identity)
        except OSError as error:
            raise error_of_system(error, object) from error
        if mapped is None or not length:
            return self._folder.read_version(object, offset, length)
        pages = mapped.pages
        if offset + length > len(pages):
            raise ObjectNotFound(
                f"{object} has {len(pages)} bytes and ends before byte {offset + length}: it has changed"
            )
        start = offset - offset % mmap.PAGESIZE
        pages.madvise(mmap.MADV_WILLNEED, start, offset + length - start)
        _, _, size, mtime_ns = mapped.identity
        return memoryview(pages)[offset : offset + length], etag(mtime_ns, size)

    def _mapped_file(self, object: str, path: Path, identity: Identity) -> _Mapped | None:
        with self._lock:
            known = self._mapped.get(object)
            if known is None or known.identity != identity:
                known = self._map(object, path)
                if known is None:
                    return None
                self._mapped[object] = known
            return known

    def _map(self, object: str, path: Path) -> _Mapped | None:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._folder.check_opened(handle, object)
            status = os.fstat(handle)
            # It may have been replaced since it was looked at; an empty file cannot be mapped.
            if status.st_mode & _WRITABLE or not status.st_size:
                return None
            return _Mapped(_identity(status), mmap.mmap(handle, 0, access=mmap.ACCESS_READ))
        finally:
            os.close(handle)


def _sealed_identity(path: Path) -> Identity | None:
    status = path.stat()
    return None if status.st_mode & _WRITABLE or not stat.S_ISREG(status.st_mode) else _identity(status)


def _identity(status: os.stat_result) -> Identity:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
