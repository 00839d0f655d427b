"""Keeps the block reads of jobs in this process, for the requests that ask for the samples one by one."""

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

__all__ = ("BlockReadRegistry",)


class BlockReadRegistry:
    """Open block reads by the store that they read. Safe for threads.

    It holds weak references only: the owner of a read keeps it alive and closes it.
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
        """Open block reads of a store; None if neighbours are no faster together, as in a folder or a table.

        Args:
            store: store to read from.
            reading: how the bytes at the samples' addresses are found.
            threads: executor whose threads wait for the store.
            max_bytes: memory limit of all block reads together; the first call sets it.
            is_here: whether a place of an object of that version is kept on this machine already.
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
        """The open block reads that hold these places of a store; None if there are none."""
        with self._lock:
            found = [reads for reads, read in self._reads.items() if read is store]
        return next((reads for reads in found if reads.holds(places)), None)
