"""The resources that a node's tenants share, and those of one request: its store, its reader and its engine."""

import threading
import weakref
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack, closing
from functools import partial
from typing import TypeVar
from weakref import WeakKeyDictionary

from frostline.batching import BatchingRule, FairMerging, FirstCome, Hapi
from frostline.core import OBJECTS, REFERENCE, FeatureBatch
from frostline.core.config import NodeSettings, TenantSettings, devices_of
from frostline.core.errors import BadRequest, OverBudget, SettingError
from frostline.core.units import log_named
from frostline.datasets.formats.cells_apart import CellsApart
from frostline.engines.machine import free_device_bytes, is_accelerator
from frostline.node.decode import NodeTier, ReadWatch, SampleReader, SharedDecoder
from frostline.node.device import Device, Devices
from frostline.node.feature_cache import shared_bytes
from frostline.node.memory import CancelScope, LockedFairShares, Pool, Readers, RequestMemory, Reservation, Shares
from frostline.node.pipeline import Stores, read_ahead
from frostline.node.prefixes import Prefixes, Resident
from frostline.node.statistics import PAGE_TENANTS, Counters, TenantStatistics
from frostline.node.tenants import (
    QUOTAS,
    Account,
    Gate,
    TenantLimits,
    Tenants,
    changed_settings,
    check_may_change,
    tenant_to_json,
)
from frostline.node.weights import WeightMemory
from frostline.preprocess import DecodeAudio, Preprocess
from frostline.preprocess.decoders import Decoders
from frostline.preprocess.sounds import LACKS_SOUND, has_sound_packages
from frostline.preprocess.tokens import has_tokenizers, opened_tokenizer
from frostline.stores.cql.store import CqlStore
from frostline.stores.disk_tier import TierStatistics
from frostline.stores.local import FolderStore, MmapFolder
from frostline.stores.protocols import ByteRange, Versioned
from frostline.stores.readahead import BlockReads, ReadAheadQueue, SecondReads
from frostline.stores.retry import HedgedReads
from frostline.wire.messages import FeatureRequest

__all__ = (
    "BlockReadRegistry",
    "RequestOpener",
    "Resources",
)


T = TypeVar("T")

# Samples being read or decoded at once: enough to decode some while others wait for the store.
_READERS = 16
_LOG = log_named("frostline.node")


class Resources:
    """All shared resources of a node. Safe for threads.

    Args:
        settings: settings of the node: its budget, its tenants and its batching rule.

    Attributes:
        counters: counters of the node.
        tenants: tenants of the node.
        pools: memory pools by name.
        devices: devices that run prefixes.
        readers: threads that read and decode samples.
        waiters: threads that only wait for stores, for reading ahead.
        gate: gate that admits requests.
        decoders: processes that decode for tenants; started by the first sample.
    """

    def __init__(self, settings: NodeSettings) -> None:
        self._threads = settings.decode_threads
        self._compute_threads = settings.compute_threads
        self.counters = Counters()
        self.tenants = Tenants(settings.tenants, self.counters)
        self._changing = threading.Lock()
        self._fair_shares = LockedFairShares(self.tenants.weights)
        # The other rules serve as baselines and know no tenants: memory too is given in order of arrival.
        self._memory_shares = fair_shares = self._fair_shares if settings.batching == "fair" else None
        named = devices_of(settings.device)
        free = [nbytes for nbytes in map(free_device_bytes, named) if nbytes is not None]
        device_bytes = min(free, default=None)
        self.pools = Shares.of(settings.memory_bytes - shared_bytes(settings), device_bytes).pools(fair_shares)
        self._work = self.pools["work"]
        parts = _device_pools(self.pools["device"], named)
        self.devices = Devices(
            [
                Device(
                    name=name,
                    memory=memory,
                    rule=_rule(settings, self.pools),
                    fair_shares=self._fair_shares,
                    counters=self.counters,
                )
                for name, memory in zip(settings.device.split(","), parts, strict=True)
            ]
        )
        self.readers = _readers(max(_READERS, settings.decode_threads), self.tenants)
        self.waiters = _readers(settings.read_threads, self.tenants)
        self.decoders = Decoders(self.pools["decode"].total_bytes, settings.decode_threads)
        self.gate = Gate(settings.max_requests, self.pools["messages"], self._work, self.tenants.accounts)

    def request_memory(self, account: Account, device_s: Callable[[], float] = float) -> RequestMemory:
        """A request's access to the memory for work.

        Args:
            account: account of the tenant that asks.
            device_s: function that returns the expected device seconds of the tenant's next batch; 0 where it needs no
                device.
        """
        total_bytes = self._work.total_bytes
        maximum = account.settings.work_bytes
        return RequestMemory(
            self._work, lambda: account.claim(device_s(), total_bytes), maximum, tenants=account.tenants
        )

    def weight_memory(self) -> "WeightMemory[T]":
        """Make the memory for weights, ordered by the tenants' fair shares; a node needs one."""
        return WeightMemory(self.pools["weights"], self._memory_shares, self.counters)

    def charge_rows(
        self, made: Generator[FeatureBatch, None, None], account: Account, counters: Counters
    ) -> Generator[FeatureBatch, None, None]:
        """Yield batches that never run on the device, and charge their tenant for the threads that they used.

        Without the charge they would always be next. A node whose threads all read and decode is as busy as one whose
        device runs.

        Args:
            made: batches of the request.
            account: account of the tenant that asks.
            counters: counters of this request alone.
        """
        paid_s = 0.0
        with closing(made):
            for batch in made:
                done = counters.totals()
                took_s = done.read_s / _READERS + done.decode_s / self._threads
                self._fair_shares.begin(account.name)
                self._fair_shares.charge(account.name, took_s - paid_s)
                paid_s = took_s
                yield batch
                del batch  # so that its memory is freed with the next step

    def charge_trial(self, account: Account, trial_s: float) -> None:
        """Charge a tenant for trials of engines, which use all threads of the node, as device seconds."""
        account.charge_trial(trial_s)
        self._fair_shares.owe(account.name, trial_s)

    def charge_training(self, account: Account, processor_s: float) -> None:
        """Charge a tenant for a head that is trained beside the node.

        Args:
            account: account of the tenant.
            processor_s: core seconds; they are divided by the node's compute threads.
        """
        train_s = processor_s / self._compute_threads
        account.charge_training(train_s)
        self._fair_shares.charge(account.name, train_s)

    def change_tenant(self, asker: Account, name: str, body: object) -> TenantSettings:
        """Change the weight and quotas of a tenant until the node ends, and log it as ``tenant_changed``.

        Args:
            asker: account that asks.
            name: name of the tenant to change.
            body: a PATCH, as JSON gave it; see ``tenant_limits.changed_settings``.

        Raises:
            Forbidden: The asker may change nothing.
            UnknownName: There is no such tenant.
            BadRequest: The change makes no sense.
        """
        check_may_change(self.tenants, asker)
        with self._changing:
            account = self.tenants.account(name)
            before, after = account.settings, changed_settings(account.settings, body)
            if before != after:
                account.change(after)
                self._change_weight(after)
                told = {"tenant": name, "by": asker.name, "before": tenant_to_json(before)}
                _LOG.info("tenant_changed", extra={"fields": {**told, "after": tenant_to_json(after)}})
        return after

    def renew_tenants(self, settings: NodeSettings) -> None:
        """Serve the tenants of these settings from now on, with what they say, and log who joined and left.

        What was changed while the node ran is as the settings say again.
        """
        with self._changing:
            before = {account.name for account in self.tenants.accounts}
            self.tenants.renew(settings.tenants)
            for tenant in settings.tenants:
                self._change_weight(tenant)
            names = {tenant.name for tenant in settings.tenants}
            told = {"joined": sorted(names - before), "left": sorted(before - names)}
            _LOG.info("tenants_renewed", extra={"fields": told})

    def _change_weight(self, tenant: TenantSettings) -> None:
        for shares in (self._fair_shares, self.readers, self.waiters):
            shares.change_weight(tenant.name, tenant.weight)

    def limits(self) -> list[TenantLimits]:
        """What each tenant uses, and may be bound to while the node runs."""
        return [
            TenantLimits(account, self._work, lambda: len(self.devices.in_service()))
            for account in self.tenants.accounts
        ]

    def statistics(
        self, asker: Account | None, weight_bytes: Callable[[str], int], first: int | None = None
    ) -> tuple[dict[str, TenantStatistics], int | None]:
        """The state of the tenants, by name, and the number of the first that follows; None where none does.

        Args:
            asker: account that asks; tenants that it may not see are left out. None sees all.
            weight_bytes: function that returns the bytes of a tenant's prefixes and engines.
            first: number of the first tenant of a page; None for all tenants.
        """
        accounts = self.tenants.accounts
        seen = [account for account in accounts if asker is None or asker.settings.sees_all or account is asker]
        shown = seen if first is None else seen[first : first + PAGE_TENANTS]
        after = len(shown) + (first or 0)
        found = {account.name: self._standing(account, weight_bytes(account.name)) for account in shown}
        return found, after if after < len(seen) else None

    def _standing(self, account: Account, weight_bytes: int) -> TenantStatistics:
        return TenantStatistics(
            weight=account.settings.weight,
            requests_in_progress=account.inside,
            work_bytes=self._work.held_bytes(account.name),
            weight_bytes=weight_bytes,
            quotas={name: getattr(account.settings, name) for name in QUOTAS},
            totals=account.counters.totals(),
        )


def _readers(threads: int, tenants: Tenants) -> Readers:
    # With several tenants, no tenant gets more than half of the threads, in case its store is slow; and where several
    # stores are, there is one for each other tenant.
    weights = tenants.weights
    if len(weights) <= 1:
        return Readers(threads, threads, weights)
    return Readers(threads, max(1, threads // 2), weights, spare=threads)


def _device_pools(pool: Pool, named: Sequence[str]) -> Sequence[Pool]:
    """The memory for activations of each device: accelerators have their own, parts of a processor share the node's."""
    if len(named) == 1:
        return [pool]
    each_bytes = pool.total_bytes if is_accelerator(named[0]) else pool.total_bytes // len(named)
    return [Pool(each_bytes) for _ in named]


def _rule(settings: NodeSettings, pools: dict[str, Pool]) -> BatchingRule:
    if settings.batching == "hapi":
        return Hapi(pools["device"].total_bytes + pools["weights"].total_bytes)
    return FairMerging() if settings.batching == "fair" else FirstCome()


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
        is_here: Callable[[ByteRange, str], bool],
    ) -> BlockReads | None:
        """Open block reads of a store; None if neighbours are no faster together, as in a folder or a table.

        Args:
            store: store to read from.
            reading: the way that the bytes at the samples' addresses are found.
            threads: executor whose threads wait for the store.
            max_bytes: memory limit of all block reads together; the first call sets it.
            is_here: True if a place of an object of that version is kept on this machine already.
        """
        if reading != OBJECTS or isinstance(store, FolderStore | MmapFolder | CqlStore):
            return None
        with self._lock:
            pool = self._pool = self._pool or Pool(max_bytes)

            def reserve(nbytes: int) -> Reservation | None:
                return pool.take(nbytes) if nbytes <= pool.total_bytes else None

            reads = BlockReads(store, threads, reserve, is_here)
            self._reads[reads] = store
            return reads

    def over(self, store: Versioned, places: Sequence[ByteRange]) -> Versioned | None:
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
        self._reads: dict[str, ReadWatch] = {}
        self._decoders = threading.Semaphore(settings.decode_threads)
        self._processes = resources.decoders
        self._tenants = resources.tenants
        self._blocks = BlockReadRegistry()
        self._tier = NodeTier(settings)
        self._settings = settings
        self._lock = threading.Lock()
        self._queues: dict[str, ReadAheadQueue] = {}
        self._late: WeakKeyDictionary[Versioned, HedgedReads] = WeakKeyDictionary()

    @property
    def decoders(self) -> Decoders | None:
        """Processes that decode, where somebody may ask who is not the node's own user; None decodes in this one."""
        return self._processes if self._tenants.has_restricted_tenants and Decoders.are_possible() else None

    def _reads_of(self, account: Account) -> ReadWatch:
        with self._lock:
            return self._reads.setdefault(account.name, ReadWatch())

    def trouble(self, asker: Account | None) -> str:
        """Why the stores are suspected; empty where they are not. See ``ReadWatch.trouble``.

        A tenant may name what is not there, and has stores of its own: what becomes of its reads is told to it alone,
        and is trouble for all only where several tenants have some.

        Args:
            asker: account that asks; None for anybody.
        """
        with self._lock:
            watched = dict(self._reads)
        if not self._tenants.has_restricted_tenants:
            return next(filter(None, (watch.trouble() for watch in watched.values())), "")
        own = "" if asker is None or asker.name not in watched else watched[asker.name].trouble()
        count = sum(bool(watch.trouble()) for watch in watched.values())
        return own or (f"stores of {count} tenants cannot be read" if count > 1 else "")

    def decode_memory(self, account: Account) -> RequestMemory:
        """A tenant's access to the memory for decoding."""
        claim = partial(account.decode_claim, self._memory.total_bytes)
        return RequestMemory(self._memory, claim, tenants=account.tenants)

    def _ahead_of(self, account: Account) -> Callable[[int], Reservation | None]:
        """What reserves memory for a tenant to read ahead in, beside what is kept for others; None for none now."""
        total_bytes = self._ahead.total_bytes

        def reserve(nbytes: int) -> Reservation | None:
            return self._ahead.take(nbytes, account.decode_claim(total_bytes)) if nbytes <= total_bytes else None

        return reserve

    def decode_apart(self, account: Account) -> Callable[..., tuple[int, float]] | None:
        """``Decoders.decode_into`` in processes of a tenant; None where samples are decoded in this one."""
        decoders = self.decoders
        return None if decoders is None else partial(decoders.decode_into, tenant=account.name)

    def _cells_apart(self, account: Account) -> CellsApart | None:
        """What decodes columns of Parquet files in processes of a tenant; None where it is done in this one."""
        decoders = self.decoders
        return None if decoders is None else CellsApart(partial(decoders.run, tenant=account.name), account.name)

    def tier_statistics(self) -> TierStatistics | None:
        """The statistics of the samples on the node's own disk."""
        return self._tier.statistics()

    def blocks(self, data: str, reading: str, account: Account, max_bytes: int) -> BlockReads | None:
        """Open block reads of a data set's samples; see ``BlockReadRegistry.open``.

        Raises:
            BadRequest: The data set does not lie under a root of this node that the account may read.
        """
        store = self.stores.store(data, account.settings.roots, reading=reading, decoder=self._cells_apart(account))
        executor = self._waiters.executor_for(account.name)
        return self._blocks.open(store, reading, executor, max_bytes, partial(self._tier.has, data))

    def load_tokenizer(
        self,
        request: FeatureRequest,
        preprocess: Preprocess,
        account: Account,
        held: ExitStack,
        end: Callable[[], None] | None = None,
    ) -> Preprocess:
        """The preprocessing with what it needs: the tokenizer for texts, which came with the request's prefix.

        It stays resident until ``held`` is closed; for ``end`` see ``WeightMemory.pin``.

        Raises:
            BadRequest: The request names no prefix, or one with another tokenizer.
            OverBudget: This node cannot tokenize, or decode sounds.
            Refused: see ``Prefixes.pin``.
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
        resident = held.enter_context(self.prefixes.pin(request.prefix, asker=account, end=end))
        try:
            equipped = preprocess.with_tokenizer(resident.prefix.tokenizer)
            if self.decoders is None:
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
            BadRequest: The samples do not lie under a root of this node that the account may read.
        """
        store = self.store(request, preprocess, account) if sent is None else sent
        decoding = SharedDecoder(
            memory=self.decode_memory(account),
            slots=self._decoders,
            counters=counters,
            reads=self._reads_of(account),
            apart=self.decode_apart(account),
        )
        samples = request.samples
        # The system reads a folder's next bytes ahead by itself.
        if sent is not None or isinstance(store, FolderStore | MmapFolder):
            return SampleReader(store, samples, preprocess, request.view, decoding, scope.is_cancelled)
        # A measurement must read every sample from the store, even those on the node's disk.
        here = None if is_measured else self._tier.of(request.data, request.reading, samples)
        places = list(map(ByteRange, samples.objects, samples.offsets.tolist(), samples.lengths.tolist()))
        if here is not None:
            places = [place for row, place in enumerate(places) if not here.has(row)]
        ahead = self._blocks.over(store, places)
        if ahead is None:
            queue, second = self._queue(account), self._second_reads(store, account, counters)
            ahead = read_ahead(store, request, places, self._ahead_of(account), queue, second, scope, held)
        return SampleReader(ahead, samples, preprocess, request.view, decoding, scope.is_cancelled, here)

    def open_prefix(
        self,
        request: FeatureRequest,
        preprocess: Preprocess,
        account: Account,
        held: ExitStack,
        engine: str = REFERENCE,
        end: Callable[[], None] | None = None,
    ) -> Resident | None:
        """The request's prefix with an engine, which stay resident until ``held`` is closed; None if it names none.

        For ``end`` see ``WeightMemory.pin``.

        Raises:
            BadRequest: The shape of the preprocessed samples is not the input shape of the prefix.
            Refused: see ``Prefixes.pin``.
        """
        if request.prefix is None:
            return None
        used = self.prefixes.pin(request.prefix, engine, request.cut, account, preprocess.levels, end)
        resident = held.enter_context(used)
        if preprocess.sample != resident.prefix.inputs[0]:
            raise BadRequest(
                f"preprocess gives samples of shape {list(preprocess.shape)} and {preprocess.dtype}, and the prefix "
                f"takes {list(resident.prefix.input_shape)} and {resident.prefix.inputs[0].dtype}"
            )
        return resident

    def _queue(self, account: Account) -> ReadAheadQueue:
        maximum = {"maximum": self._settings.read_threads, "max_bytes": self._ahead.total_bytes}
        threads = self._waiters.executor_for(account.name)
        with self._lock:
            return self._queues.setdefault(account.name, ReadAheadQueue(self._ahead_of(account), threads, **maximum))

    def _second_reads(self, store: Versioned, account: Account, counters: Counters) -> SecondReads | None:
        if self._settings.hedge_quantile == 1:
            return None
        with self._lock:
            late = self._late.setdefault(store, HedgedReads(self._settings.hedge_quantile))
        threads = self._waiters.executor_for(account.name, is_urgent=True)
        return SecondReads(late=late, threads=threads, made=partial(counters.add, hedged_reads=1))

    def store(self, request: FeatureRequest, preprocess: Preprocess, account: Account) -> Versioned:
        """The store of the request's samples.

        Raises:
            BadRequest: The samples do not lie under a root of this node that the account may read.
        """
        return self.stores.store(
            request.data,
            account.settings.roots,
            reading=request.reading,
            objects=request.samples.objects,
            mapped=preprocess.stored is not None,
            decoder=self._cells_apart(account),
        )
