"""The node: takes prefixes in and answers requests for features, as plain method calls."""

import threading
import time
from collections.abc import Generator
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Self

from frostline.batching import ROWS
from frostline.config import NodeSettings
from frostline.core import FeatureBatch
from frostline.engines.machine.hardware import hardware_name, host_digest
from frostline.node.request.answer import BatchStream, Ending
from frostline.node.request.feature_cache import NodeCache
from frostline.node.request.outputs import Decoded, EncodedOutput
from frostline.node.request.packing import Packing
from frostline.node.request.pipeline import Kind, batches
from frostline.node.request.prefix_run import HEADROOM, PrefixRun
from frostline.node.request.validation import Stores, checked_preprocess
from frostline.node.scheduling.admission import Admission
from frostline.node.scheduling.cancel_scope import CancelScope
from frostline.node.scheduling.memory_pool import PoolStatistics, cells_bytes
from frostline.node.scheduling.statistics import Counters, NodeStatistics
from frostline.node.scheduling.tenants import Account
from frostline.node.service.listings import Listings
from frostline.node.service.open import Opening
from frostline.node.service.profiler import Profiler
from frostline.node.service.resources import Sharing
from frostline.node.service.trainings import Trainings
from frostline.node.trials.trial_policy import EngineMemory
from frostline.node.weights.inspection import Inspector
from frostline.node.weights.prefix_registry import Prefixes, Resident
from frostline.node.weights.torch_bridge import TorchDoor
from frostline.node.weights.uploads import Upload
from frostline.node.weights.weight_memory import WeightMemory
from frostline.processors import usable_cores
from frostline.profiles import Profile
from frostline.stores.reads.block_reads import BlockReads
from frostline.version import __version__
from frostline.wire.messages import FeatureRequest, Health, ProfileRequest

__all__ = ("Node",)

# Rows of a batch of encoded samples, which are small where there are many.
_ENCODED_ROWS = 1024


class Node:
    """Runs beside a store. A context manager; safe for threads.

    Everything that a request makes is reserved before it is made, so that the node stays within its budget
    whatever is asked: see ``node.scheduling.memory_pool.Shares``.

    Args:
        settings: what it may use.
        roots: URLs under which it serves data.
        inspector: Looks at prefixes apart, before the node does; the caller closes it. None where those that upload
            them run in this process too.

    Attributes:
        trainings: beside it.
        listings: for clients.

    Raises:
        SettingError: A root is no URL that Frostline reads.
    """

    def __init__(self, settings: NodeSettings, roots: tuple[str, ...], inspector: Inspector | None = None) -> None:
        self._settings = settings
        self._stores = Stores(
            roots,
            cells_bytes(settings.memory_bytes),
            follows_links=settings.follow_links,
            deadline_s=settings.store_deadline_s,
        )
        self._sharing = Sharing(settings)
        self._pools = self._sharing.pools
        run_bytes = int(self._pools["device"].total_bytes / HEADROOM)
        room = EngineMemory(weights_bytes=self._pools["weights"].total_bytes, run_bytes=run_bytes)
        self._door = TorchDoor(settings, room, inspector)
        self._places: WeightMemory[Resident] = self._sharing.places()
        self._prefixes = Prefixes(self._places, settings.device_batch, self._door, self._sharing.counters)
        self._cache = NodeCache(settings, roots)
        self._opening = Opening(settings, self._stores, self._prefixes, self._sharing)
        self._profiler = Profiler(settings, self._opening, self._sharing, self._door)
        self.trainings = Trainings(settings, self._prefixes.used, self._sharing.trained)
        self.listings = Listings(settings, self._stores)
        self._answers: set[BatchStream] = set()
        self._lock = threading.Lock()
        self._started = time.monotonic()

    @property
    def settings(self) -> NodeSettings:
        """What it may use."""
        return self._settings

    def health(self, asker: Account | None = None) -> Health:
        """What the node says of itself, and of its roots those under which the asker may read."""
        return Health(
            version=__version__,
            host=host_digest(),
            hardware=hardware_name(self._settings.device),
            memory_bytes=self._settings.memory_bytes,
            roots=self._stores.allowed(None if asker is None else asker.settings.roots),
            cores=usable_cores(),
        )

    def identify(self, token: str | None) -> Account:
        """Whose token it is; see ``Tenants.identify`` for what may be raised."""
        return self._sharing.tenants.identify(token)

    def statistics(self, asker: Account | None = None) -> NodeStatistics:
        """Where the node stands; of other tenants only what the asker may see. None sees all."""
        return NodeStatistics(
            uptime_s=time.monotonic() - self._started,
            requests_in_work=self._sharing.gate.inside,
            prefixes=len(self._prefixes),
            waiting_for_device=self._sharing.device.waiting,
            memory=self._memory(),
            totals=self._sharing.counters.totals(),
            tenants=self._sharing.statistics(asker, self._prefixes.owned_bytes),
            cache=self._cache.statistics(),
            shared_cache=self._cache.shared_statistics(),
            local_tier=self._opening.tier_statistics(),
        )

    def holds_prefix(self, digest: str) -> bool:
        """Whether a prefix need not be uploaded."""
        return digest in self._prefixes

    def put_prefix(self, digest: str, artifact: bytes) -> None:
        """Take a prefix in; one that is held already is left as it is.

        Raises:
            BadRequest: The artifact is not what the digest names.
            UnsafeArtifact: It is no prefix, or names what is not allowed.
            OverBudget: It can never fit.
            Overloaded: It does not fit beside the prefixes in use now, or too many requests are in work.
        """
        if self.holds_prefix(digest):
            return
        with self.upload(digest, len(artifact)) as upload:
            upload.begin()
            upload.write(artifact)
            upload.finish()

    def upload(self, digest: str, length: int, account: Account | None = None) -> Upload:
        """Receive a prefix of that many bytes piece by piece; see ``Gate.enter`` for what may be raised."""
        admission = self.admit(0, account)
        return Upload(self._prefixes, digest, self._sharing.lane(admission.account), length, admission)

    def admit(self, body_bytes: int = 0, account: Account | None = None) -> Admission:
        """Let a request in before its body is read; see ``Gate.enter`` for what may be raised."""
        return self._sharing.gate.enter(body_bytes, account or self._sharing.tenants.everybody)

    def features(self, request: FeatureRequest, admission: Admission | None = None) -> BatchStream:
        """Answer a request. Work begins when the first batch is asked for.

        Args:
            request: what is wanted.
            admission: where the request was let in already; the answer ends it.

        Returns:
            The batches in the order of the request. A batch's memory counts as used until the next is asked for.
            Close it where it is not read to its end.

        Raises:
            Overloaded: Too many requests are in work.
            Refused: The request does not make sense, or can never fit.
        """
        leash = self.leash()
        with ExitStack() as held:
            account = held.enter_context(self.admit() if admission is None else admission).account
            counters = Counters(account.counters)
            kind = self._kind(request, account, counters, leash, held)
            made = self._made(kind, account, counters, leash)
            closing = held.pop_all()
        answer = BatchStream(self._counted(made, account), leash, partial(self._ended, closing, account))
        with self._lock:
            self._answers.add(answer)
        return answer

    def blocks(self, data: str, reading: str, max_bytes: int) -> BlockReads | None:
        """What reads samples in blocks before requests of this process ask for them; None where that is no faster.

        Args:
            data: URL of the data set's root.
            reading: how the bytes at its samples' addresses are found.
            max_bytes: that were read and not asked for yet, beside the node's budget.

        Raises:
            BadRequest: It does not lie under a root of this node.
        """
        return self._opening.blocks(data, reading, self._sharing.tenants.everybody, max_bytes)

    def leash(self) -> CancelScope:
        """What ties a request's work together, so that all of it can be given up."""
        return CancelScope((*self._pools.values(), self._door))

    def profile(
        self, wanted: ProfileRequest, admission: Admission | None = None, leash: CancelScope | None = None
    ) -> Profile:
        """Measure reading, decoding, every cut of the prefix and some codecs on the request's first samples.

        What the network itself costs is measured once for each prefix; reading and decoding belong to the data.

        Raises:
            Overloaded: Too many requests are in work.
            Refused: The request does not make sense, or can never fit.
            StoreError: The samples cannot be read.
            Abandoned: Its leash was cut.
        """
        leash = leash or self.leash()
        with ExitStack() as held:
            account = held.enter_context(self.admit() if admission is None else admission).account
            return self._profiler.profile(wanted, account, leash, held)

    def warm(self) -> None:
        """Get ready for a first network; it may come meanwhile."""
        self._door.warm()

    def close(self) -> None:
        """End every answer and stop the threads. Calling it again does nothing."""
        self._sharing.gate.shut()
        self._places.close()
        self.trainings.close()
        self.listings.close()
        self._door.close()
        with self._lock:
            answers = list(self._answers)
        for answer in answers:
            answer.close()
        self._sharing.readers.close()
        self._sharing.waiters.close()
        self._sharing.device.close()
        self._cache.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _memory(self) -> dict[str, PoolStatistics]:
        """Each share of the memory; for weights is waited in a line of their own."""
        shares = {name: pool.statistics() for name, pool in self._pools.items()}
        return {**shares, "weights": replace(shares["weights"], waiting=self._places.waiting)}

    def _kind(
        self, request: FeatureRequest, account: Account, counters: Counters, leash: CancelScope, held: ExitStack
    ) -> Kind:
        preprocess = checked_preprocess(request)
        reader = self._opening.reader(request, preprocess, account, counters, leash, held)
        lane = self._sharing.lane(account)
        if request.cut == 0:
            return EncodedOutput(request.samples, reader, lane, _ENCODED_ROWS)
        is_run = request.cut > 1
        resident = self._opening.resident(request, preprocess, account, held, request.engine) if is_run else None
        run = PrefixRun(resident, request.cut, self._sharing.device, leash, account) if resident else None
        packing = Packing(codec=request.codec, tolerance=request.tolerance, counters=counters)
        most = self._settings.device_batch if resident is None else resident.rows
        fewest = most if self._settings.batching == "fixed" else ROWS
        kept = self._cache.of(request, preprocess, None if run is None else run.crossing, counters)
        return Decoded(
            request.samples,
            reader,
            preprocess.shape,
            lane,
            packing,
            max_rows=most,
            run=run,
            min_rows=fewest,
            kept=kept,
        )

    def _made(
        self, kind: Kind, account: Account, counters: Counters, leash: CancelScope
    ) -> Generator[FeatureBatch, None, None]:
        if isinstance(kind, Decoded) and kind.has_run:
            lane = self._sharing.lane(account, lambda: kind.device_s)
            return batches(kind, lane, self._sharing.readers.lane(account.name), leash)
        return self._sharing.charged(
            batches(kind, self._sharing.lane(account), self._sharing.readers.lane(account.name), leash),
            account,
            counters,
        )

    def _counted(
        self, made: Generator[FeatureBatch, None, None], account: Account
    ) -> Generator[FeatureBatch, None, None]:
        with closing(made):
            for batch in made:
                counts = {"samples": len(batch), "skipped": len(batch.skipped), "bytes_answered": batch.nbytes}
                account.counters.add(batches=1, **counts)
                yield batch
                del batch  # its memory is given back with the next step

    def _ended(self, held: ExitStack, account: Account, answer: BatchStream, ending: Ending) -> None:
        account.counters.add(**{ending: 1})  # first, so that a node that has no work has counted it all
        with self._lock:
            self._answers.discard(answer)
        held.close()
