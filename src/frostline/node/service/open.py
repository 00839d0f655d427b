"""Opens the resources of a request: the store of its samples, their reader, and its prefix with an engine."""

import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack
from functools import partial
from weakref import WeakKeyDictionary

from frostline.config import NodeSettings
from frostline.core import OBJECTS, REFERENCE
from frostline.errors import BadRequest, OverBudget, SettingError
from frostline.node.request.decode import SampleReader, SharedDecoder
from frostline.node.request.local_tier import NodeTier
from frostline.node.request.validation import Stores, read_ahead
from frostline.node.scheduling.cancel_scope import CancelScope
from frostline.node.scheduling.memory_pool import Pool, Reservation
from frostline.node.scheduling.statistics import Counters
from frostline.node.scheduling.tenants import Account
from frostline.node.service.resources import Resources
from frostline.node.weights.prefix_registry import Prefixes, Resident
from frostline.preprocess import DecodeAudio, Preprocess
from frostline.preprocess.sounds import LACKS_SOUND, has_sound_packages
from frostline.preprocess.tokens import has_tokenizers, opened_tokenizer
from frostline.stores.base.protocols import Place, Versioned
from frostline.stores.cql.store import CqlStore
from frostline.stores.objects.disk_tier import TierStatistics
from frostline.stores.objects.local import FolderStore
from frostline.stores.objects.mmap import MmapFolder
from frostline.stores.reads.block_reads import BlockReads
from frostline.stores.reads.readahead import ReadAheadQueue, SecondReads
from frostline.stores.wrappers.hedging import HedgedReads
from frostline.wire.messages import FeatureRequest

__all__ = ("BlockReadRegistry", "RequestOpener")


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
        if reading != OBJECTS or isinstance(store, FolderStore | MmapFolder | CqlStore):
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


class RequestOpener:
    """Opens stores, readers and prefixes for requests. Safe for threads.

    Args:
        settings: settings of the node.
        stores: stores under the node's roots.
        prefixes: prefixes that the node holds.
        resources: memory and threads of the node.

    Attributes:
        stores: stores under the node's roots.
        prefixes: prefixes that the node holds.
    """

    def __init__(self, settings: NodeSettings, stores: Stores, prefixes: Prefixes, resources: Resources) -> None:
        self.stores = stores
        self.prefixes = prefixes
        self._waiters = resources.waiters
        self._ahead: Pool = resources.pools["ahead"]
        self._memory: Pool = resources.pools["decode"]
        self._decoders = threading.Semaphore(settings.decode_threads)
        self._blocks = BlockReadRegistry()
        self._tier = NodeTier(settings)
        self._settings = settings
        self._lock = threading.Lock()
        self._queues: dict[str, ReadAheadQueue] = {}
        self._late: WeakKeyDictionary[Versioned, HedgedReads] = WeakKeyDictionary()

    def tier_statistics(self) -> TierStatistics | None:
        """The statistics of the samples on the node's own disk."""
        return self._tier.statistics()

    def blocks(self, data: str, reading: str, account: Account, max_bytes: int) -> BlockReads | None:
        """Open block reads of a data set's samples; see ``BlockReadRegistry.open``.

        Raises:
            BadRequest: if it does not lie under a root of this node that the account may read.
        """
        store = self.stores.store(data, account.settings.roots, reading=reading)
        lane = self._waiters.lane(account.name)
        return self._blocks.open(store, reading, lane, max_bytes, partial(self._tier.has, data))

    def equipped(
        self, request: FeatureRequest, preprocess: Preprocess, account: Account, held: ExitStack
    ) -> Preprocess:
        """The preprocessing with what it needs: the tokenizer for texts, which came with the request's prefix.

        Raises:
            BadRequest: if the request names no prefix, or one with another tokenizer.
            OverBudget: if this node cannot tokenize, or decode sounds.
            Refused: see ``Prefixes.used``.
        """
        if (
            any(isinstance(part.steps[0], DecodeAudio) for part in preprocess.parts)
            and request.cut
            and not has_sound_packages()
        ):
            raise OverBudget(f"this node decodes no sounds: {LACKS_SOUND}")
        if preprocess.tokens is None or request.cut == 0:
            return preprocess
        if request.prefix is None:
            raise BadRequest("prefix: texts are tokenized with the tokenizer that came with a prefix; name it")
        if not has_tokenizers():
            raise OverBudget("this node has no package tokenizers, which texts need: pip install 'frostline[text]'")
        resident = held.enter_context(self.prefixes.used(request.prefix, asker=account))
        try:
            equipped = preprocess.with_tokenizer(resident.prefix.tokenizer)
            opened_tokenizer(equipped.tokenizer)
        except SettingError as error:
            raise BadRequest(f"preprocess: {error}") from error
        return equipped

    def reader(
        self,
        request: FeatureRequest,
        preprocess: Preprocess,
        account: Account,
        counters: Counters,
        scope: CancelScope,
        held: ExitStack,
        *,
        is_measured: bool = False,
        sent: Versioned | None = None,
    ) -> SampleReader:
        """Make a reader of the request's samples, which reads some of them ahead until ``held`` is closed.

        Samples that came with the request are in ``sent``.

        Raises:
            BadRequest: if they do not lie under a root of this node that the account may read.
        """
        store = self.store(request, preprocess, account) if sent is None else sent
        decoding = SharedDecoder(memory=self._memory, slots=self._decoders, counters=counters)
        samples = request.samples
        # The system reads a folder's next bytes ahead by itself.
        if sent is not None or isinstance(store, FolderStore | MmapFolder):
            return SampleReader(store, samples, preprocess, request.view, decoding, scope.is_cancelled)
        # A measurement must read every sample from the store, even those on the node's disk.
        here = None if is_measured else self._tier.of(request.data, request.reading, samples)
        places = list(map(Place, samples.objects, samples.offsets.tolist(), samples.lengths.tolist()))
        if here is not None:
            places = [place for row, place in enumerate(places) if not here.has(row)]
        ahead = self._blocks.over(store, places)
        if ahead is None:
            queue, second = self._queue(account.name), self._second_reads(store, account, counters)
            ahead = read_ahead(store, request, places, self._ahead, queue, second, scope, held)
        return SampleReader(ahead, samples, preprocess, request.view, decoding, scope.is_cancelled, here)

    def resident(
        self,
        request: FeatureRequest,
        preprocess: Preprocess,
        account: Account,
        held: ExitStack,
        engine: str = REFERENCE,
    ) -> Resident | None:
        """The request's prefix with an engine, which stay resident until ``held`` is closed; None if it names none.

        Raises:
            BadRequest: if the shape of the preprocessed samples is not the input shape of the prefix.
            Refused: see ``Prefixes.used``.
        """
        if request.prefix is None:
            return None
        used = self.prefixes.used(request.prefix, engine, request.cut, account, preprocess.levels)
        resident = held.enter_context(used)
        if preprocess.sample != resident.prefix.inputs[0]:
            raise BadRequest(
                f"preprocess gives samples of shape {list(preprocess.shape)} and {preprocess.dtype}, and the prefix "
                f"takes {list(resident.prefix.input_shape)} and {resident.prefix.inputs[0].dtype}"
            )
        return resident

    def _queue(self, tenant: str) -> ReadAheadQueue:
        maximum = {"maximum": self._settings.read_threads, "max_bytes": self._ahead.total_bytes}
        with self._lock:
            return self._queues.setdefault(
                tenant, ReadAheadQueue(self._ahead.take, self._waiters.lane(tenant), **maximum)
            )

    def _second_reads(self, store: Versioned, account: Account, counters: Counters) -> SecondReads | None:
        if self._settings.hedge_quantile == 1:
            return None
        with self._lock:
            late = self._late.setdefault(store, HedgedReads(self._settings.hedge_quantile))
        threads = self._waiters.lane(account.name, is_urgent=True)
        return SecondReads(late=late, threads=threads, made=partial(counters.add, hedged_reads=1))

    def store(self, request: FeatureRequest, preprocess: Preprocess, account: Account) -> Versioned:
        """The store of the request's samples.

        Raises:
            BadRequest: if they do not lie under a root of this node that the account may read.
        """
        return self.stores.store(
            request.data,
            account.settings.roots,
            reading=request.reading,
            objects=request.samples.objects,
            mapped=preprocess.stored is not None,
        )
