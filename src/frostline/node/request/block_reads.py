"""Keeps what a job of this process reads in blocks, for the requests that ask for its samples one by one."""

import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Executor

from frostline.core import OBJECTS
from frostline.node.scheduling.memory_pool import Pool, Reservation
from frostline.stores.base.protocols import Place, Versioned
from frostline.stores.cql.store import CqlStore
from frostline.stores.objects.local import FolderStore
from frostline.stores.objects.mmap import MappedFolder
from frostline.stores.reads.block_reads import BlockReads

__all__ = ("BlockShelf",)


class BlockShelf:
    """Reads in blocks under way, by the store that they read. Safe for threads.

    It does not keep them alive: whoever made them does, and closes them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool: Pool | None = None
        self._reads: weakref.WeakKeyDictionary[BlockReads, Versioned] = weakref.WeakKeyDictionary()

    def open(
        self,
        store: Versioned,
        reading: str,
        threads: Executor,
        max_bytes: int,
        is_here: Callable[[Place, str], bool],
    ) -> BlockReads | None:
        """Reads of a store in blocks; None where neighbours are no faster together, as in a folder or a table.

        Args:
            store: that is read.
            reading: how the bytes at the samples' addresses are found.
            threads: that wait for it.
            max_bytes: of all such reads together; the first ones say it.
            is_here: whether a place of an object of that version need not be read at all.
        """
        if reading != OBJECTS or isinstance(store, FolderStore | MappedFolder | CqlStore):
            return None
        with self._lock:
            pool = self._pool = self._pool or Pool(max_bytes)

            def room(nbytes: int) -> Reservation | None:
                return pool.take(nbytes) if nbytes <= pool.total_bytes else None

            reads = BlockReads(store, threads, room, is_here)
            self._reads[reads] = store
            return reads

    def over(self, store: Versioned, places: Sequence[Place]) -> Versioned | None:
        """What reads these places in blocks, with others; None where nobody does."""
        with self._lock:
            found = [reads for reads, read in self._reads.items() if read is store]
        return next((reads for reads in found if reads.holds(places)), None)
