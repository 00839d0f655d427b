"""The node: takes prefixes and answers requests for features, as plain method calls.

A job alone on its node needs no admission, fair shares or memory pools, since its window bounds what is under way.
"""

import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Self

from frostline.batching import ROWS, readable_bytes
from frostline.core import FeatureBatch, Samples, Skipped
from frostline.core.audit import AuditLog
from frostline.core.config import NodeSettings, TenantSettings
from frostline.core.errors import SettingError
from frostline.core.nouns import Closing
from frostline.core.system import __version__, imports_stay, usable_cores
from frostline.core.tokens import FollowedFile
from frostline.engines.machine import hardware_name, host_digest
from frostline.node.decode import StoredSamples
from frostline.node.device import HEADROOM
from frostline.node.feature_cache import NodeCache
from frostline.node.inspection import Inspector
from frostline.node.memory import CancelScope, PoolStatistics, cells_bytes
from frostline.node.operations import Listings, Trainings
from frostline.node.outputs import Decoded, EncodedOutput, Packing, PrefixRun
from frostline.node.pipeline import (
    BatchStream,
    EmbeddingInputs,
    Ending,
    RequestOutput,
    Stores,
    batches,
    checked_preprocess,
    embedding_inputs,
    max_numbers,
)
from frostline.node.prefixes import PieceUpload, Prefixes, Resident, Upload
from frostline.node.profiling import Profiler
from frostline.node.resources import RequestOpener, Resources
from frostline.node.statistics import Counters, NodeStatistics
from frostline.node.tenants import Account, Admission, TenantLimits, read_tenants, tenant_to_json
from frostline.node.torch_bridge import TorchBridge
from frostline.node.trials.queue import EngineMemory
from frostline.node.weights import WeightMemory
from frostline.preprocess import Preprocess
from frostline.profiles import Profile
from frostline.stores.local import FolderStore
from frostline.stores.protocols import Versioned
from frostline.stores.readahead import BlockReads
from frostline.wire.messages import EmbeddingRequest, FeatureRequest, Health, ProfileRequest

__all__ = (
    "DirectReads",
    "FolderStream",
    "Node",
)


# Bytes and samples of a batch: few enough that rows are handed on while others are read.
_BATCH_BYTES = 8 << 20
_BATCH_ROWS = 1024


class DirectReads:
    """Reads encoded samples for this process. Safe for threads.

    Samples of a folder are read one after the other by the thread that takes the answer. Samples of a store that
    waits are read ahead of it, from the local tier or in blocks, as for any request.

    Args:
        opener: opener that opens stores and reads ahead.
        account: account whose counters count what is read.
        max_bytes: maximum bytes of a sample; larger ones are skipped.
    """

    def __init__(self, opener: RequestOpener, account: Account, max_bytes: int) -> None:
        self._opener = opener
        self._account = account
        self._max_bytes = max_bytes
        self._folders: dict[tuple[str, str], FolderStore] = {}
        self._answers: weakref.WeakSet[BatchStream | FolderStream] = weakref.WeakSet()
        self._lock = threading.Lock()

    def answer(self, request: FeatureRequest) -> "BatchStream | FolderStream":
        """The encoded samples of a request, in its order; work begins when the first batch is asked for.

        Raises:
            BadRequest: The samples do not lie under a root of this node.
        """
        folder = self._folders.get((request.data, request.reading))
        answer = self._waiting(request) if folder is None else self._at_once(request, folder)
        with self._lock:
            self._answers.add(answer)
        return answer

    def close(self) -> None:
        """Cancel every answer."""
        with self._lock:
            answers = list(self._answers)
        for answer in answers:
            answer.close()

    def _at_once(self, request: FeatureRequest, folder: FolderStore) -> "FolderStream":
        """The samples of a folder, whose reads end by themselves."""
        reader = StoredSamples(folder, request.samples, Counters(self._account.counters))
        cancelled = threading.Event()
        return FolderStream(self._batches(request.samples, reader, cancelled.is_set), cancelled.set)

    def _waiting(self, request: FeatureRequest) -> "BatchStream | FolderStream":
        """The samples of a store that may keep a reader waiting, who is then freed when the answer is closed."""
        preprocess, scope = checked_preprocess(request), CancelScope(())
        if request.data.startswith("file:"):
            store = self._opener.store(request, preprocess, self._account)
            if isinstance(store, FolderStore):
                self._folders[request.data, request.reading] = store
                return self._at_once(request, store)
        with ExitStack() as held:
            counters = Counters(self._account.counters)
            reader = self._opener.reader(request, preprocess, self._account, counters, scope, held)
            batches = self._batches(request.samples, reader, scope.is_cancelled)
            return BatchStream(batches, scope, partial(_close, held.pop_all()))

    def _batches(
        self, samples: Samples, reader: StoredSamples, is_cancelled: Callable[[], bool]
    ) -> Generator[FeatureBatch, None, None]:
        lengths = samples.lengths.tolist()
        reader.expect(row for row, length in enumerate(lengths) if length <= self._max_bytes)
        start = 0
        while start < len(lengths):
            found, nbytes, stop = [], 0, start
            while stop < min(len(lengths), start + _BATCH_ROWS) and not is_cancelled():
                if nbytes and nbytes + lengths[stop] > _BATCH_BYTES:
                    break
                found.append(self._read(reader, stop, lengths[stop]))
                nbytes, stop = nbytes + lengths[stop], stop + 1
            if is_cancelled():
                return
            there = [row for row, sample in enumerate(found, start) if not isinstance(sample, Skipped)]
            yield FeatureBatch(
                ids=samples.ids[there],
                encoded=tuple(sample for sample in found if not isinstance(sample, Skipped)),
                skipped=tuple(sample for sample in found if isinstance(sample, Skipped)),
            )
            start = stop

    def _read(self, reader: StoredSamples, row: int, length: int) -> "bytes | memoryview | Skipped":
        if length > self._max_bytes:
            return reader.record_skip(
                row, f"too large for the node: {readable_bytes(length)}; start it with more --memory"
            )
        return reader.read_encoded(row)


class FolderStream:
    """The batches of one answer from a folder.

    Args:
        batches: iterator that reads the samples.
        cancel: function that ends the reading after the sample that is being read; safe from any thread.
    """

    def __init__(self, batches: Iterator[FeatureBatch], cancel: Callable[[], None]) -> None:
        self._batches = batches
        self.close = cancel

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> FeatureBatch:
        return next(self._batches)


def _close(held: ExitStack, answer: BatchStream, ending: Ending) -> None:  # noqa: ARG001
    held.close()


def _nothing_follows(_: NodeSettings) -> None:
    pass


# Maximum rows of a batch of encoded samples.
_ENCODED_ROWS = 1024


class Node(Closing):
    """A node, which runs beside a store. A context manager; safe for threads.

    All memory of a request is reserved before it is used, so that the node stays within its budget: see
    ``node.memory.Shares``.

    Args:
        settings: settings of the node.
        roots: URLs under which it serves data.
        inspector: checks uploaded prefixes in another process; the caller closes it. None if the uploading code runs in
            this process too.
        audit: log of who read, brought and changed what, and was refused; closed with the node. None keeps none.

    Attributes:
        audit: the log.
        trainings: trainings beside the node.
        listings: listings for clients.
        on_renewal: function that is called with the settings of the node after its tenants were renewed.

    Raises:
        SettingError: A root is not a URL that Frostline reads.
    """

    def __init__(
        self,
        settings: NodeSettings,
        roots: tuple[str, ...],
        inspector: Inspector | None = None,
        audit: AuditLog | None = None,
    ) -> None:
        self._settings = settings
        self.audit = audit or AuditLog(None)
        self._stores = Stores(
            roots,
            cells_bytes(settings.memory_bytes),
            follows_links=settings.follow_links,
            deadline_s=settings.store_deadline_s,
            tenants=lambda: max(1, len(self._settings.tenants)),
        )
        self._resources = Resources(settings)
        self._pools = self._resources.pools
        run_bytes = int(self._resources.devices.memory.total_bytes / HEADROOM)
        memory = EngineMemory(weights_bytes=self._pools["weights"].total_bytes, run_bytes=run_bytes)
        self._bridge = TorchBridge(settings, memory, inspector)
        self._weights: WeightMemory[Resident] = self._resources.weight_memory()
        self._prefixes = Prefixes(self._weights, settings.device_batch, self._bridge, self._resources.counters)
        self._cache = NodeCache(settings, roots)
        self._opener = RequestOpener(settings, self._stores, self._prefixes, self._resources)
        self._profiler = Profiler(settings, self._opener, self._resources, self._bridge)
        self.trainings = Trainings(
            settings, self._prefixes.pin, self._resources.charge_training, lambda: self._resources.tenants.weights
        )
        self.listings = Listings(settings, self._stores)
        self._answers: set[BatchStream] = set()
        self._lock = threading.Lock()
        self._tenants_file: FollowedFile | None = None
        self.on_renewal: Callable[[NodeSettings], None] = _nothing_follows
        self._started = time.monotonic()

    @property
    def settings(self) -> NodeSettings:
        """The settings of the node."""
        return self._settings

    def health(self, asker: Account | None = None) -> Health:
        """Describe the node, and those of its roots that the asker may read."""
        return Health(
            version=__version__,
            host=host_digest(),
            hardware=hardware_name(self._settings.device),
            memory_bytes=self._settings.memory_bytes,
            roots=self._stores.allowed_roots(None if asker is None else asker.settings.roots),
            cores=usable_cores(),
            trouble=self.trouble(asker),
            decoding=self._decoding(),
            operations_per_s=self._bridge.operations_per_s,
        )

    def _decoding(self) -> str:
        decoders = self._opener.decoders
        if decoders is None:
            return "in the node's process"
        confined_by = decoders.statistics().confined_by
        return f"apart, confined by {confined_by}" if confined_by else "apart"

    def trouble(self, asker: Account | None = None) -> str:
        """Why an account, or anybody, should ask the node for nothing now; empty where it may. Waits for nothing."""
        if self._resources.gate.is_draining:
            return "draining"
        return self._opener.trouble(asker)

    def not_ready(self) -> str:
        """Why no new requests should come; empty where they may. It may wait for a disk that hangs.

        That is the node's trouble; or all its requests are under way; or a folder that it serves cannot be listed.
        """
        trouble = self.trouble()
        if trouble:
            return trouble
        if self._resources.gate.is_full:
            return "as many requests are under way as may be"
        reason = self._stores.unreadable_reason()
        # Whoever reaches the port may ask.
        return (
            "a folder that it serves cannot be listed"
            if reason and self._resources.tenants.has_restricted_tenants
            else reason
        )

    def drain(self) -> None:
        """Take no more requests, and say so; those under way go on."""
        self._resources.gate.drain()

    def identify(self, token: str | None, address: str = "") -> Account:
        """The account of a token; see ``TokenTable.owner`` for the arguments and errors."""
        if self._tenants_file is not None:
            self._tenants_file.look()
        return self._resources.tenants.identify(token, address)

    def follow_tenants(self, path: Path) -> FollowedFile:
        """Serve the tenants that a file says, as it changes; see ``read_tenants``.

        Args:
            path: the file, which was read when the node was made.

        Returns:
            The watcher of the file, which looks at it by itself while requests come.
        """

        def read() -> None:
            settings = replace(self._settings, tenants=read_tenants(path))
            if not settings.tenants:
                raise SettingError(f"{path} names no tenant: end the node where nobody is to use it")
            self._resources.renew_tenants(settings)
            self._settings = settings
            self.audit.write_change("tenants renewed", tenants=[tenant.name for tenant in settings.tenants])
            self.on_renewal(settings)

        self._tenants_file = FollowedFile(path, read)
        return self._tenants_file

    def limits(self) -> list[TenantLimits]:
        """What each tenant uses, and may be bound to while the node runs."""
        return self._resources.limits()

    def statistics(self, asker: Account | None = None, first: int | None = None) -> NodeStatistics:
        """The state of the node, with the tenants that the asker may see; an asker of None sees all.

        Of a page of tenants ``first`` is the number of the first one.
        """
        tenants, following = self._resources.statistics(asker, self._prefixes.owned_bytes, first)
        wrong, slowed = self._resources.tenants.wrong_tokens()
        return NodeStatistics(
            uptime_s=time.monotonic() - self._started,
            cpu_s=time.process_time(),
            requests_in_progress=self._resources.gate.inside,
            prefixes=len(self._prefixes),
            waiting_for_device=self._resources.devices.waiting,
            devices_in_service=len(self._resources.devices.in_service()),
            memory=self._memory(),
            totals=self._resources.counters.totals(),
            tenants=tenants,
            next=following,
            may_change=asker is not None and asker.settings.may_change,
            cache=self._cache.statistics(),
            shared_cache=self._cache.shared_statistics(),
            local_tier=self._opener.tier_statistics(),
            latencies=self._resources.counters.latencies(),
            wrong_tokens=wrong,
            slowed_addresses=slowed,
            decoders=None if (decoders := self._opener.decoders) is None else decoders.statistics(),
        )

    def change_tenant(self, asker: Account, name: str, body: object) -> TenantSettings:
        """See ``Resources.change_tenant``."""
        after = self._resources.change_tenant(asker, name, body)
        self.audit.write_change("change", by=asker.name, tenant=name, after=tenant_to_json(after))
        return after

    def holds_prefix(self, digest: str) -> bool:
        """Whether a prefix is held, so that it need not be uploaded."""
        return digest in self._prefixes

    def put_prefix(self, digest: str, artifact: bytes) -> None:
        """Take a prefix; do nothing if it is held already.

        Raises:
            BadRequest: The artifact does not match the digest.
            UnsafeArtifact: The artifact is not a prefix, or names something that is not allowed.
            OverBudget: The prefix can never fit.
            Overloaded: The prefix does not fit beside those in use, or too many requests are under way.
        """
        if self.holds_prefix(digest):
            return
        with self.upload(digest, len(artifact)) as upload:
            upload.begin()
            upload.write(artifact)
            upload.finish()

    def upload(self, digest: str, length: int, account: Account | None = None, *, is_in_pieces: bool = False) -> Upload:
        """Receive a prefix of that many bytes chunk by chunk; see ``Gate.enter`` for the errors.

        Args:
            digest: digest of the prefix.
            length: size of the whole file in bytes.
            account: account of the tenant that uploads it.
            is_in_pieces: the pieces that the node has are left out.
        """
        if account is not None:
            account.check_may("upload", digest)
        admission = self.admit(0, account)
        kind = PieceUpload if is_in_pieces else Upload
        return kind(self._prefixes, digest, self._resources.request_memory(admission.account), length, admission)

    def held_pieces(self, account: Account | None = None) -> set[str]:
        """The pieces of the prefixes that a tenant uploaded; see ``wire.pieces``.

        Raises:
            Forbidden: The tenant may upload nothing, and so need not know.
        """
        asker = account or self._resources.tenants.everybody
        asker.check_may("upload")
        return self._prefixes.held_pieces(asker)

    def admit(self, body_bytes: int = 0, account: Account | None = None) -> Admission:
        """Admit a request before its body is read; see ``Gate.enter`` for the errors."""
        return self._resources.gate.enter(body_bytes, account or self._resources.tenants.everybody)

    def features(
        self,
        request: FeatureRequest,
        admission: AbstractContextManager[Admission] | None = None,
        *,
        preprocess: Preprocess | None = None,
        sent: Versioned | None = None,
    ) -> BatchStream:
        """Answer a request. Work begins when the first batch is asked for.

        Args:
            request: request for features.
            admission: admission of the request if it was admitted already; the answer exits it as it ends.
            preprocess: preprocessing of a request that this process made itself; None checks the request first.
            sent: store with the samples, where they came with the request; None reads them from the data.

        Returns:
            The batches in the order of the request. A batch's memory is released when the next one is asked for. Close
            the stream if it is not read to its end.

        Raises:
            Overloaded: Too many requests are under way.
            Refused: The request is not valid, or can never fit.
        """
        scope = self.cancel_scope()
        with ExitStack() as held:
            account = held.enter_context(self.admit() if admission is None else admission).account
            action = "read" if request.prefix is None else "compute"
            account.check_may(action, request.prefix)
            counters = Counters(account.counters)
            preprocess = preprocess or checked_preprocess(request)
            output = self._output(request, preprocess, account, counters, scope, held, sent)
            made = self._made(output, account, counters, scope)
            self._audit(action, account, request)
            closing = held.pop_all()
        answer = BatchStream(self._counted(made, account), scope, partial(self._ended, closing, account))
        with self._lock:
            self._answers.add(answer)
        return answer

    def _audit(self, action: str, account: Account, request: FeatureRequest) -> None:
        """Note who has samples of which data read, and what for."""
        if self.audit.is_kept:  # a job's own node keeps none, and its samples go the shortest way
            prefix, samples = request.prefix, len(request.samples)
            self.audit.note(action, tenant=account.name, data=request.data, prefix=prefix, samples=samples)

    def embeddings(self, wanted: EmbeddingRequest, admission: Admission) -> tuple[BatchStream, EmbeddingInputs]:
        """Answer a request for embeddings of inputs that came with it; see ``features``. The caller ends its admission.

        Raises:
            UnknownPrefix: The network is not held.
            BadRequest: The inputs are not of the network's kind.
            OverBudget: The answer would be too large.
        """
        admission.account.check_may("compute", wanted.model)
        with self._prefixes.pin(wanted.model, asker=admission.account) as resident:
            most, scope = max_numbers(self._settings.memory_bytes), self.cancel_scope()
            account = admission.account
            memory, apart = self._opener.decode_memory(account), self._opener.decode_apart(account)
            inputs = embedding_inputs(wanted, resident, most, memory, scope.is_cancelled, apart)
        return self.features(inputs.request, nullcontext(admission), sent=inputs.sent), inputs

    def direct_reads(self) -> DirectReads:
        """Read encoded samples for this process without admission and memory pools; the caller closes it."""
        largest_bytes = self._resources.pools["work"].total_bytes // 2
        return DirectReads(self._opener, self._resources.tenants.everybody, largest_bytes)

    def blocks(self, data: str, reading: str, max_bytes: int) -> BlockReads | None:
        """Open block reads of samples for later requests of this process; None if they are no faster.

        Args:
            data: URL of the data set's root.
            reading: the way that the bytes at its samples' addresses are found.
            max_bytes: maximum bytes that are read and not yet asked for; they do not count against the node's budget.

        Raises:
            BadRequest: The data does not lie under a root of this node.
        """
        return self._opener.blocks(data, reading, self._resources.tenants.everybody, max_bytes)

    def cancel_scope(self) -> CancelScope:
        """Make a cancel scope for the work of one request."""
        return CancelScope((*self._pools.values(), self._bridge))

    def profile(
        self, wanted: ProfileRequest, admission: Admission | None = None, scope: CancelScope | None = None
    ) -> Profile:
        """Measure reading, decoding, every cut of the prefix and some codecs on the request's first samples.

        The cost of the network itself is measured once per prefix; reading and decoding depend on the data.

        Raises:
            Overloaded: Too many requests are under way.
            Refused: The request is not valid, or can never fit.
            StoreError: The samples cannot be read.
            Cancelled: The request's scope was cancelled.
        """
        scope = scope or self.cancel_scope()
        with ExitStack() as held:
            account = held.enter_context(self.admit() if admission is None else admission).account
            account.check_may("compute", wanted.features.prefix)
            self._audit("measure", account, wanted.features)
            return self._profiler.profile(wanted, account, scope, held)

    def warm(self) -> None:
        """Import what the first network and its usual engine need; requests are served meanwhile."""
        self.listings.warm()  # a job asks for it first
        if (decoders := self._opener.decoders) is not None:
            decoders.warm()
        with imports_stay():
            self._bridge.warm()

    def close(self) -> None:
        """Cancel every answer and stop the threads. Calling it again does nothing."""
        self._resources.gate.shut()
        self._weights.close()
        self.trainings.close()
        self.listings.close()
        self._bridge.close()
        with self._lock:
            answers = list(self._answers)
        for answer in answers:
            answer.close()
        self._resources.readers.close()
        self._resources.decoders.close()
        self._resources.waiters.close()
        self._resources.devices.close()
        self._cache.close()
        self.audit.close()

    def _memory(self) -> dict[str, PoolStatistics]:
        """The state of each memory share; requests wait for weights in a queue of their own."""
        shares = {name: pool.statistics() for name, pool in self._pools.items()}
        shares["device"] = self._resources.devices.memory_statistics()
        return {**shares, "weights": replace(shares["weights"], waiting=self._weights.waiting)}

    def _output(
        self,
        request: FeatureRequest,
        preprocess: Preprocess,
        account: Account,
        counters: Counters,
        scope: CancelScope,
        held: ExitStack,
        sent: Versioned | None,
    ) -> RequestOutput:
        preprocess = self._opener.load_tokenizer(request, preprocess, account, held, scope.revoke)
        reader = self._opener.reader(request, preprocess, account, counters, scope, held, sent=sent)
        request_memory = self._resources.request_memory(account)
        if request.cut == 0:
            return EncodedOutput(request.samples, reader, request_memory, _ENCODED_ROWS)
        is_run = request.cut > 1
        resident = run = None
        if is_run:
            resident = self._opener.open_prefix(request, preprocess, account, held, request.engine, scope.revoke)
        if resident is not None:
            run = PrefixRun(resident, request.cut, self._resources.devices, scope, account)
        packing = Packing(codec=request.codec, tolerance=request.tolerance, counters=counters)
        maximum = self._settings.device_batch if resident is None else resident.rows
        fewest = maximum if self._settings.batching == "fixed" else ROWS
        kept = None
        if self._cache.is_on and sent is None:
            kept = self._cache.of(request, preprocess, None if run is None else run.crossing, counters)
        return Decoded(
            request.samples,
            reader,
            preprocess.sample,
            request_memory,
            packing,
            max_rows=maximum,
            run=run,
            min_rows=fewest,
            fixed_rows=request.fixed_rows or self._settings.batching != "fair" or self._settings.device != "cpu",
            kept=kept,
        )

    def _made(
        self, output: RequestOutput, account: Account, counters: Counters, scope: CancelScope
    ) -> Generator[FeatureBatch, None, None]:
        if isinstance(output, Decoded) and output.has_run:
            request_memory = self._resources.request_memory(account, lambda: output.device_s)
            return batches(output, request_memory, self._resources.readers.executor_for(account.name), scope)
        return self._resources.charge_rows(
            batches(
                output,
                self._resources.request_memory(account),
                self._resources.readers.executor_for(account.name),
                scope,
            ),
            account,
            counters,
        )

    def _counted(
        self, made: Generator[FeatureBatch, None, None], account: Account
    ) -> Generator[FeatureBatch, None, None]:
        with closing(made):
            for batch in made:
                counts = {"samples": len(batch), "skipped": len(batch.skipped), "bytes_sent": batch.nbytes}
                account.counters.add(batches=1, **counts)
                made_at = time.perf_counter()
                yield batch
                account.counters.observe("send", time.perf_counter() - made_at)
                del batch  # so that its memory is freed with the next step

    def _ended(self, held: ExitStack, account: Account, answer: BatchStream, ending: Ending) -> None:
        account.counters.add(**{ending: 1})  # first, so that an idle node has counted all its answers
        with self._lock:
            self._answers.discard(answer)
        held.close()
