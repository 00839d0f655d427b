"""The node: takes prefixes in and answers requests for features, as plain method calls."""

import math
import os
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, closing
from functools import partial
from types import TracebackType
from typing import Self

import numpy as np

from frostline.batching import ROWS, batch_size, padded
from frostline.config import NodeSettings
from frostline.core import REFERENCE, FeatureBatch
from frostline.engines.choice import Choice
from frostline.engines.hardware import hardware_name, host_digest
from frostline.engines.identity import levels_of
from frostline.errors import BadRequest
from frostline.node.admission import Admission
from frostline.node.answers import Answer, Ending
from frostline.node.cached import NodeCache
from frostline.node.kinds import Decoded, Encoded
from frostline.node.leash import Leash
from frostline.node.memory import cells_bytes
from frostline.node.packing import Packing
from frostline.node.patrons import Patron
from frostline.node.pipeline import Kind, Slab, batches
from frostline.node.prefixes import Prefixes, Resident
from frostline.node.profiling import Bench, Loaded, Network, Networks, cut_costs, load, under_engine
from frostline.node.requests import Stores, checked_preprocess, read_ahead
from frostline.node.runs import HEADROOM, PrefixRun
from frostline.node.samples import Decoding, SampleReader
from frostline.node.sharing import Sharing
from frostline.node.statistics import Counters, NodeStatistics
from frostline.node.tenants import Account
from frostline.node.trainings import Trainings
from frostline.node.trials import Room, trials_of
from frostline.node.uploads import Upload
from frostline.preprocess import Preprocess
from frostline.profiles import CodecCost, CutCost, Profile
from frostline.stores.faces import Versioned
from frostline.version import __version__
from frostline.wire.messages import FeatureRequest, Health, ProfileRequest

__all__ = ("Node",)

# Rows of a batch of encoded samples, which are small where there are many.
_ENCODED_ROWS = 1024
# Samples on which engines are tried take at most this part of the room for batches, where nothing else took more.
_PART = 4


class Node:
    """Runs beside a store. A context manager; safe for threads.

    Everything that a request makes is reserved before it is made, so that the node stays within its budget
    whatever is asked: see ``node.memory.Shares``.

    Args:
        settings: what it may use.
        roots: URLs under which it serves data.

    Attributes:
        trainings: beside it.

    Raises:
        SettingError: A root is no URL that Frostline reads.
    """

    def __init__(self, settings: NodeSettings, roots: tuple[str, ...]) -> None:
        self._settings = settings
        self._stores = Stores(roots, cells_bytes(settings.memory_bytes))
        self._sharing = Sharing(settings)
        self._pools = self._sharing.pools
        run_bytes = int(self._pools["device"].total_bytes / HEADROOM)
        self._trials = trials_of(settings, Room(weights_bytes=self._pools["weights"].total_bytes, run_bytes=run_bytes))
        self._prefixes = Prefixes(
            self._pools["weights"], settings.device, settings.device_batch, self._trials, self._sharing.counters
        )
        self._networks = Networks()
        self._cache = NodeCache(settings, roots)
        self._decoders = threading.Semaphore(settings.decode_threads)
        self.trainings = Trainings(settings, self._prefixes.used, self._sharing.trained)
        self._answers: set[Answer] = set()
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
            cores=_cores(),
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
            memory={name: pool.statistics() for name, pool in self._pools.items()},
            totals=self._sharing.counters.totals(),
            tenants=self._sharing.statistics(asker, self._prefixes.owned_bytes),
            cache=self._cache.statistics(),
            shared_cache=self._cache.shared_statistics(),
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
        with self.upload(len(artifact)) as upload:
            upload.begin()
            upload.write(artifact)
            upload.finish(digest)

    def upload(self, length: int, account: Account | None = None) -> Upload:
        """Receive a prefix of that many bytes piece by piece; see ``Gate.enter`` for what may be raised."""
        admission = self.admit(0, account)
        return Upload(self._prefixes, self._sharing.lane(admission.account), length, admission)

    def admit(self, body_bytes: int = 0, account: Account | None = None) -> Admission:
        """Let a request in before its body is read; see ``Gate.enter`` for what may be raised."""
        return self._sharing.gate.enter(body_bytes, account or self._sharing.tenants.everybody)

    def features(self, request: FeatureRequest, admission: Admission | None = None) -> Answer:
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
        answer = Answer(self._counted(made, account), leash, partial(self._ended, closing, account))
        with self._lock:
            self._answers.add(answer)
        return answer

    def leash(self) -> Leash:
        """What ties a request's work together, so that all of it can be given up."""
        return Leash((*self._pools.values(), self._trials))

    def profile(
        self, wanted: ProfileRequest, admission: Admission | None = None, leash: Leash | None = None
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
            return self._profile(wanted, account, leash, held)

    def close(self) -> None:
        """End every answer and stop the threads. Calling it again does nothing."""
        self._sharing.gate.shut()
        self.trainings.close()
        self._trials.close()
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

    def _kind(
        self, request: FeatureRequest, account: Account, counters: Counters, leash: Leash, held: ExitStack
    ) -> Kind:
        preprocess = checked_preprocess(request)
        store = self._read_ahead(request, preprocess, account, held)
        reader = self._reader(store, request, preprocess, counters, leash)
        lane = self._sharing.lane(account)
        if request.cut == 0:
            return Encoded(request.samples, reader, lane, _ENCODED_ROWS)
        resident = self._resident(request, preprocess, account, held, request.engine) if request.cut > 1 else None
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
            most_rows=most,
            run=run,
            fewest_rows=fewest,
            kept=kept,
        )

    def _store(self, request: FeatureRequest, preprocess: Preprocess, account: Account) -> Versioned:
        return self._stores.store(
            request.data,
            account.settings.roots,
            reading=request.reading,
            objects=request.samples.objects,
            mapped=preprocess.stored is not None,
        )

    def _read_ahead(
        self, request: FeatureRequest, preprocess: Preprocess, account: Account, held: ExitStack
    ) -> Versioned:
        store, threads = self._store(request, preprocess, account), self._sharing.waiters.lane(account.name)
        return read_ahead(store, request, self._pools["ahead"], threads, held)

    def _reader(
        self, store: Versioned, request: FeatureRequest, preprocess: Preprocess, counters: Counters, leash: Leash
    ) -> SampleReader:
        decoding = Decoding(memory=self._pools["decode"], turns=self._decoders, counters=counters)
        return SampleReader(store, request.samples, preprocess, request.view, decoding, leash.is_cut)

    def _resident(
        self,
        request: FeatureRequest,
        preprocess: Preprocess,
        account: Account,
        held: ExitStack,
        engine: str = REFERENCE,
    ) -> Resident | None:
        """The request's prefix with an engine, which stay until ``held`` is closed."""
        if request.prefix is None:
            return None
        used = self._prefixes.used(request.prefix, engine, request.cut, account, preprocess.levels)
        resident = held.enter_context(used)
        if preprocess.shape != tuple(resident.prefix.input_shape):
            raise BadRequest(
                f"preprocess gives samples of shape {list(preprocess.shape)}, "
                f"and the prefix takes {list(resident.prefix.input_shape)}"
            )
        return resident

    def _profile(self, wanted: ProfileRequest, account: Account, leash: Leash, held: ExitStack) -> Profile:
        request, counters = wanted.features, Counters()
        preprocess = checked_preprocess(request)
        reader = self._reader(
            self._read_ahead(request, preprocess, account, held), request, preprocess, counters, leash
        )
        resident = self._resident(request, preprocess, account, held)
        run = PrefixRun(resident, len(resident.prefix.cuts), self._sharing.device, leash, account) if resident else None
        rows = self._profiled_rows(request, run)
        shape = (padded(rows), *preprocess.shape)
        # Hardware and engine are this node's for good, so that they need not be in the key.
        key = (request.prefix, padded(rows), preprocess.digest)
        lane, nbytes = self._sharing.lane(account), 2 * _FLOAT * math.prod(shape)
        bench = self._bench(wanted, run, resident, nbytes, self._networks.get(key)) if run and resident else None
        nbytes += 0 if bench is None else bench.nbytes
        most_bytes = max(nbytes, lane.total_bytes // _PART)
        tried = _shape_of_tried(wanted, preprocess, most_bytes) if bench and self._trials.are_wanted(wanted) else ()
        kind = np.dtype(np.float32 if preprocess.levels is None else np.uint8)
        tried_bytes = kind.itemsize * math.prod(tried) if tried else 0
        # What engines are tried on is read when the rest has gone.
        room = held.enter_context(lane.reserve(max(nbytes, tried_bytes), leash.is_cut))
        slab = np.zeros(shape, np.float32)
        readers = self._sharing.readers.lane(account.name)
        loaded = load(reader, slab, rows, readers, leash, counters)
        network = None if bench is None else bench.network(slab)
        del slab
        if network is not None:
            self._networks.put(key, network)
        codecs = [] if network is None else [one for one in network.codecs.values() if one.codec in wanted.codecs]
        costs = cut_costs(loaded, network, resident)
        if network is None or resident is None or not tried:
            return self._profile_of(loaded, costs, codecs, Choice(engine=REFERENCE, trials=()))
        room.shrink(tried_bytes)  # trials may take minutes, elsewhere
        pixels: Slab = np.zeros(tried, kind)
        kept = load(reader, pixels, len(pixels), readers, leash, counters)
        patron = self._patron(request, account, leash)
        choice = self._trials.wanted(wanted, resident.prefix, pixels, patron, preprocess.levels)
        if choice.engine != REFERENCE:
            decode_s = (kept if levels_of(choice.engine) else loaded).decode_s
            costs = under_engine(costs, network, resident.prefix.cuts, decode_s, choice)
        return self._profile_of(loaded, costs, codecs, choice)

    def _patron(self, request: FeatureRequest, account: Account, leash: Leash) -> Patron:
        assert request.prefix is not None, "the prefix was found by its name"
        room_bytes = self._prefixes.room_bytes(request.prefix, account)
        return Patron(
            name=account.name,
            check=account.check_trials,
            is_abandoned=leash.is_cut,
            spent=partial(self._sharing.tried, account),
            room_bytes=room_bytes,
        )

    def _bench(
        self, wanted: ProfileRequest, run: PrefixRun, resident: Resident, loaded_bytes: int, known: Network | None
    ) -> Bench:
        room_bytes = self._pools["work"].total_bytes
        return Bench(
            run,
            resident.prefix.cuts,
            codecs=wanted.codecs,
            encoded_bytes=wanted.features.samples.encoded_bytes / len(wanted.features.samples),
            cores=len(_cores()),
            known=known,
            room_bytes=min(room_bytes // 2, room_bytes - loaded_bytes),
        )

    def _profile_of(
        self, loaded: Loaded, cuts: Sequence[CutCost], codecs: Sequence[CodecCost], choice: Choice
    ) -> Profile:
        rows = [one.rows for one in choice.trials if one.engine == choice.engine != REFERENCE]
        return Profile(
            hardware=hardware_name(self._settings.device),
            host=host_digest(),
            cores=_cores(),
            engine=choice.engine,
            device=self._settings.device.partition(":")[0],
            device_batch=max(rows, default=loaded.rows),
            read_s=loaded.read_s,
            cuts=tuple(cuts),
            codecs=tuple(codecs),
            trials=choice.trials,
        )

    def _profiled_rows(self, request: FeatureRequest, run: PrefixRun | None) -> int:
        if run is not None:
            run.check()
        limits = [] if run is None else [run.limit]
        most = batch_size(limits, wanted=len(request.samples), most=self._settings.device_batch)
        return min(len(request.samples), most)

    def _made(
        self, kind: Kind, account: Account, counters: Counters, leash: Leash
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

    def _ended(self, held: ExitStack, account: Account, answer: Answer, ending: Ending) -> None:
        account.counters.add(**{ending: 1})  # first, so that a node that has no work has counted it all
        with self._lock:
            self._answers.discard(answer)
        held.close()


def _shape_of_tried(wanted: ProfileRequest, preprocess: Preprocess, most_bytes: int) -> tuple[int, ...]:
    """Of all samples on which engines are tried: pixels where they can be had, else what the network takes."""
    channels, *sides = preprocess.shape
    row_bytes = math.prod(preprocess.shape) * (_FLOAT if preprocess.levels is None else 1)
    rows = min(len(wanted.features.samples), most_bytes // row_bytes)
    return (rows, channels, *sides) if preprocess.levels is None else (rows, *sides, channels)


def _cores() -> tuple[int, ...]:
    """Numbers of the processor cores that this process may use."""
    return tuple(sorted(os.sched_getaffinity(0)))


_FLOAT = np.dtype(np.float32).itemsize
