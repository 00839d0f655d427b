"""Answers requests for profiles: reading, decoding, cuts, codecs and engines on a job's first samples."""

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from cachetools import LRUCache

from frostline.batching import ROWS, batch_size, pad_rows
from frostline.core import EXACT, REFERENCE, Cut
from frostline.core.config import NodeSettings
from frostline.core.nouns import array_dtype
from frostline.core.system import usable_cores
from frostline.engines.choice import Choice, interpolate_seconds
from frostline.engines.codec_costs import codec_costs, codecs_at, cuts_worth_packing
from frostline.engines.machine import hardware_name, host_digest
from frostline.engines.protocols import Footprint, Pixels, evaluation_inputs, levels_of
from frostline.node.decode import SampleReader
from frostline.node.device import HEADROOM
from frostline.node.memory import CancelScope
from frostline.node.outputs import PrefixRun
from frostline.node.pipeline import Slab, checked_preprocess
from frostline.node.prefixes import Resident
from frostline.node.resources import RequestOpener, Resources
from frostline.node.statistics import Counters
from frostline.node.tenants import Account
from frostline.node.torch_bridge import TorchBridge
from frostline.node.trials.queue import Requester
from frostline.preprocess import Preprocess
from frostline.profiles import CodecCost, CutCost, Profile
from frostline.wire.messages import FeatureRequest, ProfileRequest
from frostline.wire.packing import packing_memory

__all__ = (
    "Loaded",
    "MeasuredReference",
    "NetworkProfile",
    "Networks",
    "PrefixMeasurement",
    "Profiler",
    "costs_under_engine",
    "cut_costs",
    "load",
)


_REPEATS = 3
# Packing takes milliseconds, so it is repeated more often: another process then disturbs few of the runs.
_PACKINGS = 5
# Samples on which codecs are measured: those of EfficientNet-lite0 take 0.7 s lossless and 1.4 s in all, with two
# shared cores (the network's run takes 2.7 s).
_PACKED_ROWS = 4
# Maximum number of prefixes whose costs are cached.
_MAX_KEPT = 64

Pair = tuple[int, str]
T = TypeVar("T")
Arrays = tuple[npt.NDArray[np.generic], ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Loaded:
    """The cost of loading decoded samples.

    Attributes:
        rows: rows of the slab that holds them.
        row_bytes: size of one row in bytes.
        read_s: seconds of reading per sample, with all threads at work.
        decode_s: seconds of decoding per sample, with all threads at work.
    """

    rows: int
    row_bytes: int
    read_s: float
    decode_s: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NetworkProfile:
    """The cost of a network itself, whatever the data.

    Attributes:
        seconds: seconds per sample up to each cut, ``float64[repeats, cuts]``.
        codecs: costs by number of the cut and name of the codec.
    """

    seconds: npt.NDArray[np.float64]
    codecs: Mapping[Pair, CodecCost] = field(default_factory=dict)

    def speed_up(self, speed: float) -> "NetworkProfile":
        """The cost on several devices that are together so many times as fast."""
        return replace(self, seconds=self.seconds / speed)


class MeasuredReference:
    """A ``trial_processes.Reference``: the prefix in the node's own process, run when it is this request's turn.

    Args:
        run: prefix of the request.
        seconds: function that returns the measured seconds per sample up to each cut, a row for each measurement.
        cuts: cuts of the prefix.
        known: function that returns the eight samples of that measurement, as the network takes them, and what they
            gave at the last cut; None where they are not those that judge engines.
    """

    def __init__(
        self,
        run: PrefixRun,
        seconds: Callable[[], npt.NDArray[np.float64]],
        cuts: Sequence[Cut],
        known: Callable[[], tuple[Pixels, Arrays]] | None = None,
    ) -> None:
        self._run = run
        self._seconds = cache(seconds)
        self._cuts = cuts
        self._known = known

    def seconds(self, cut: int) -> float:
        """See ``trial_processes.Reference``."""
        return float(np.median(self._seconds()[:, cut - 1]))

    def footprint(self, cut: int) -> Footprint:
        """See ``trial_processes.Reference``."""
        return self._run.reference_footprint(cut)

    def run_exclusive(self, call: Callable[[], T]) -> T:
        """See ``trial_processes.Reference``."""
        return self._run.run_exclusive(call)

    def features(self, samples: npt.NDArray[np.float32], cut: int) -> tuple[npt.NDArray[np.generic], ...]:
        """See ``trial_processes.Reference``; all runs have one size, since a sample's last bits may depend on it."""
        parts = []
        for start in range(0, len(samples), ROWS):
            some, made = _filled_up(samples[start : start + ROWS]), None
            if self._known is not None and cut == self._cuts[-1].number:
                judging, features = self._known()
                made = features if np.array_equal(some, judging) else None
            parts.append(self._run.values(some, [self._cuts[cut - 1]])[cut] if made is None else made)
        return tuple(np.concatenate(columns)[: len(samples)] for columns in zip(*parts, strict=True))


class Networks:
    """A cache of measured network profiles that drops the least recently used. Safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: LRUCache[tuple[object, ...], NetworkProfile] = LRUCache(_MAX_KEPT)

    def get(self, key: tuple[object, ...]) -> NetworkProfile | None:
        """The profile of a prefix at a batch size and a preprocessing; None if it is not cached."""
        with self._lock:
            return self._kept.get(key)

    def put(self, key: tuple[object, ...], network: NetworkProfile) -> None:
        """Cache a profile."""
        with self._lock:
            self._kept[key] = network


class PrefixMeasurement:
    """Measures one prefix on loaded samples.

    Args:
        run: prefix up to its last cut.
        cuts: cuts of the prefix.
        codecs: names of the codecs to measure.
        encoded_bytes: mean size in bytes of a sample as it is stored.
        cores: number of cores that this node may use.
        known: earlier measurement to complete; None if there is none.
        activation_bytes: memory for activations that are kept while codecs work on them.
    """

    def __init__(
        self,
        run: PrefixRun,
        cuts: Sequence[Cut],
        *,
        codecs: Sequence[str],
        encoded_bytes: float,
        cores: int,
        known: NetworkProfile | None,
        activation_bytes: int,
    ) -> None:
        self._run = run
        self._cores = cores
        self._known = known
        self._missing: dict[int, list[str]] = {}
        have = {} if known is None else known.codecs
        fitting = [cut for cut in cuts_worth_packing(cuts, encoded_bytes) if _group_bytes([cut]) <= activation_bytes]
        for cut in fitting:
            missing = [codec for codec in codecs_at(cut, codecs) if (cut.number, codec) not in have]
            if missing:
                self._missing[cut.number] = missing
        self._groups = _groups([cut for cut in fitting if cut.number in self._missing], activation_bytes)

    @property
    def nbytes(self) -> int:
        """The maximum memory that the measurement takes beside the samples."""
        return max((_group_bytes(group) for group in self._groups), default=0)

    def network(self, slab: Slab) -> NetworkProfile:
        """Measure the missing costs, and return them with the known ones."""
        known = self._known
        seconds = self._run.timed_run(slab, repeats=_REPEATS)[0] if known is None else known.seconds
        codecs = {} if known is None else dict(known.codecs)
        for group in self._groups:
            values = self._run.values(slab[:_PACKED_ROWS], group)
            for cut in group:
                costs = codec_costs(values, [cut], self._missing[cut.number], repeats=_PACKINGS, cores=self._cores)
                codecs.update({(cost.cut, cost.codec): cost for cost in costs})
        return NetworkProfile(seconds=seconds, codecs=codecs)


def load(
    reader: SampleReader, slab: Slab, rows: int, readers: Executor, scope: CancelScope, counters: Counters
) -> Loaded:
    """Read and decode the first samples of a request, as for a batch, and measure how long that takes.

    Args:
        reader: reader of the request.
        slab: array of zeros for the samples, which are repeated to fill it.
        rows: number of samples.
        readers: executor whose threads read and decode.
        scope: cancel scope of the request.
        counters: counters of the reader.
    """
    reader.pixels_into(0, slab[0])  # not measured: Pillow loads its plugins with the first image
    before = counters.totals()
    started = time.perf_counter()
    reader.expect(range(rows))
    samples = [scope.submit(readers, reader.pixels_into, row, slab[row]) for row in range(rows)]
    try:
        for sample in samples:
            sample.result()
    finally:
        wait(samples)
    seconds = (time.perf_counter() - started) / rows
    totals = counters.totals()
    read_s, decode_s = totals.read_s - before.read_s, totals.decode_s - before.decode_s
    share = read_s / (read_s + decode_s) if read_s + decode_s else 1.0
    slab[rows:] = np.resize(slab[:rows], (len(slab) - rows, *slab.shape[1:]))
    return Loaded(rows=len(slab), row_bytes=slab[0].nbytes, read_s=seconds * share, decode_s=seconds * (1 - share))


def cut_costs(loaded: Loaded, network: NetworkProfile | None, resident: Resident | None) -> Sequence[CutCost]:
    """The cost at cuts 0 and 1, and at every later cut if there is a prefix."""
    if network is None or resident is None:
        free = CutCost(number=0, seconds=0.0, spread_s=0.0, fixed_bytes=0, bytes_per_sample=0)
        return [free, _pixels(loaded)]
    middle = np.median(network.seconds, axis=0).tolist()
    low, high = np.percentile(network.seconds, (25, 75), axis=0)
    cuts = zip(resident.prefix.cuts, middle, (high - low).tolist(), strict=True)
    costs = [_cost(cut, loaded.decode_s + to_here_s, spread_s, resident) for cut, to_here_s, spread_s in cuts]
    rest = costs[0].remaining_fixed_bytes, costs[0].remaining_bytes_per_sample
    return [_encoded(*rest), *costs]


def speed_up_choice(choice: Choice, speed: float) -> Choice:
    """A choice whose trials cost what they do on several devices that are together so many times as fast."""
    return replace(choice, trials=tuple(replace(trial, seconds=trial.seconds / speed) for trial in choice.trials))


def costs_under_engine(
    costs: Sequence[CutCost], network: NetworkProfile, cuts: Sequence[Cut], decode_s: float, choice: Choice
) -> Sequence[CutCost]:
    """The same costs if another engine than the reference runs the prefix.

    The engine's seconds are known at the cuts where it was tried, and are interpolated between them in proportion to
    the reference's. Its memory up to a cut is that up to the next cut where it was tried. The cost of the rest behind a
    cut belongs to the trainer and does not change; nor do cuts behind the last tried one, where the job does not stop.

    Args:
        costs: costs of the reference, from cut 0.
        network: profile with the reference's seconds.
        cuts: cuts of the prefix.
        decode_s: seconds of decoding a sample.
        choice: engine, with its trials.
    """
    trials = {trial.cut: trial for trial in choice.trials if trial.engine == choice.engine}
    reference_s = np.median(network.seconds, axis=0).tolist()
    last = max(trials)
    seconds = interpolate_seconds(reference_s[:last], {cut - 1: trial.seconds for cut, trial in trials.items()})
    changed = list(costs)
    for cut, to_here_s in list(zip(cuts[:last], seconds, strict=True))[1:]:
        trial = trials[min(number for number in trials if number >= cut.number)]
        changed[cut.number] = replace(
            costs[cut.number],
            seconds=decode_s + to_here_s,
            spread_s=trial.spread_s,
            fixed_bytes=trial.weight_bytes + int(trial.fixed_bytes * HEADROOM),
            bytes_per_sample=int(trial.bytes_per_sample * HEADROOM) + cut.bytes_per_sample,
        )
    return changed


def _encoded(remaining_fixed_bytes: int, remaining_bytes_per_sample: int) -> CutCost:
    return CutCost(
        number=0,
        seconds=0.0,
        spread_s=0.0,
        fixed_bytes=0,
        bytes_per_sample=0,
        remaining_fixed_bytes=remaining_fixed_bytes,
        remaining_bytes_per_sample=remaining_bytes_per_sample,
    )


def _pixels(loaded: Loaded) -> CutCost:
    return CutCost(number=1, seconds=loaded.decode_s, spread_s=0.0, fixed_bytes=0, bytes_per_sample=loaded.row_bytes)


def _cost(cut: Cut, seconds: float, spread_s: float, resident: Resident) -> CutCost:
    engine = resident.reference
    here, rest = engine.footprint(cut.number), engine.remaining_footprint(cut.number)
    return CutCost(
        number=cut.number,
        seconds=seconds,
        spread_s=spread_s,
        fixed_bytes=engine.weight_bytes + int(here.fixed_bytes * HEADROOM),
        bytes_per_sample=int(here.bytes_per_sample * HEADROOM) + cut.bytes_per_sample,
        remaining_fixed_bytes=engine.weight_bytes + int(rest.fixed_bytes * HEADROOM),
        remaining_bytes_per_sample=int(rest.bytes_per_sample * HEADROOM),
    )


def _groups(cuts: Sequence[Cut], activation_bytes: int) -> list[list[Cut]]:
    """Group cuts whose activations fit into memory together; each group takes one run."""
    groups: list[list[Cut]] = []
    for cut in cuts:
        if groups and _group_bytes([*groups[-1], cut]) <= activation_bytes:
            groups[-1].append(cut)
        else:
            groups.append([cut])
    return groups


def _group_bytes(cuts: Sequence[Cut]) -> int:
    return sum(_PACKED_ROWS * cut.bytes_per_sample for cut in cuts) + max(map(_working_bytes, cuts))


def _working_bytes(cut: Cut) -> int:
    """The memory for packing and unpacking a cut's samples with the codec that needs most."""
    kinds = [array_dtype(dtype) for dtype in cut.dtypes]
    memory = packing_memory(cut.shapes, kinds, "fp16+sparse+zstd")
    return memory.fixed_bytes + _PACKED_ROWS * (memory.bytes_per_sample + cut.bytes_per_sample)


_FLOAT = np.dtype(np.float32).itemsize
_NOTHING = Loaded(rows=0, row_bytes=0, read_s=0.0, decode_s=0.0)


class Profiler:
    """Measures profiles for jobs. Safe for threads; the cost of the network itself is cached per prefix.

    Args:
        settings: settings of the node.
        opener: opener of the resources of requests.
        resources: memory and threads of the node.
        bridge: bridge to torch and to the trials of engines.
    """

    def __init__(
        self, settings: NodeSettings, opener: RequestOpener, resources: Resources, bridge: TorchBridge
    ) -> None:
        self._settings = settings
        self._opener = opener
        self._resources = resources
        self._bridge = bridge
        self._networks = Networks()

    def profile(self, wanted: ProfileRequest, account: Account, scope: CancelScope, held: ExitStack) -> Profile:
        """See ``Node.profile``; its memory is released when ``held`` is closed."""
        request, counters = wanted.features, Counters()
        preprocess = self._opener.load_tokenizer(request, checked_preprocess(request), account, held)
        reader = self._opener.reader(request, preprocess, account, counters, scope, held, is_measured=True)
        resident = self._opener.open_prefix(request, preprocess, account, held)
        run = (
            PrefixRun(resident, len(resident.prefix.cuts), self._resources.devices, scope, account)
            if resident
            else None
        )
        if wanted.only_engine:
            return self._engine(wanted, preprocess, resident, reader, account, scope, held)
        rows = self._profiled_rows(request, run)
        shape = (pad_rows(rows), *preprocess.shape)
        # The node's hardware and reference engine never change, so they are not part of the key.
        key = (request.prefix, pad_rows(rows), preprocess.digest)
        request_memory, nbytes = (
            self._resources.request_memory(account),
            2 * np.dtype(preprocess.dtype).itemsize * math.prod(shape),
        )
        measurement = (
            self._measurement(wanted, run, resident, nbytes, self._networks.get(key)) if run and resident else None
        )
        nbytes += 0 if measurement is None else measurement.nbytes
        # Samples for trials take no more than a batch may, unless the profile needed more already.
        max_bytes = max(nbytes, request_memory.batch_bytes)
        tried = _shape_of_tried(wanted, preprocess, max_bytes) if measurement is not None else ()
        kind = np.dtype(np.float32 if preprocess.levels is None else np.uint8)
        tried_bytes = kind.itemsize * math.prod(tried) if tried else 0
        # The samples for trials are read when those of the measurement have been freed.
        reservation = held.enter_context(request_memory.reserve(max(nbytes, tried_bytes), scope.is_cancelled))
        slab = np.zeros(shape, preprocess.dtype)
        readers = self._resources.readers.executor_for(account.name)
        loaded = load(reader, slab, rows, readers, scope, counters)
        network = None if measurement is None else measurement.network(slab)
        del slab
        if network is not None:
            self._networks.put(key, network)
        codecs = [] if network is None else [codec for codec in network.codecs.values() if codec.codec in wanted.codecs]
        speed = self._resources.devices.speed
        shared = None if network is None else network.speed_up(speed)
        costs = cut_costs(loaded, shared, resident)
        if network is None or shared is None or resident is None or run is None:
            return self._profile_of(loaded, costs, codecs, Choice(engine=REFERENCE, trials=()))
        reference = MeasuredReference(run, lambda: network.seconds, resident.prefix.cuts)
        frost_line = len(resident.prefix.cuts)
        if not _can_be_tried(preprocess) or not self._bridge.trials.are_wanted(
            wanted, partial(reference.seconds, frost_line)
        ):
            return self._profile_of(loaded, costs, codecs, Choice(engine=REFERENCE, trials=()))
        reservation.shrink(tried_bytes)  # trials may take minutes, in other processes
        pixels: Pixels = np.zeros(tried, kind)
        kept = load(reader, pixels, len(pixels), readers, scope, counters)
        requester = self._requester(request, account, scope)
        choice = self._bridge.trials.choose_engine(
            wanted, resident.prefix, pixels, reference, requester, preprocess.levels
        )
        if choice.engine != REFERENCE:
            decode_s = (kept if levels_of(choice.engine) else loaded).decode_s
            costs = costs_under_engine(costs, shared, resident.prefix.cuts, decode_s, speed_up_choice(choice, speed))
        return self._profile_of(loaded, costs, codecs, choice)

    def _engine(
        self,
        wanted: ProfileRequest,
        preprocess: Preprocess,
        resident: Resident | None,
        reader: SampleReader,
        account: Account,
        scope: CancelScope,
        held: ExitStack,
    ) -> Profile:
        """Choose the engine only, on samples that are read for its trials."""
        request_memory, choice = self._resources.request_memory(account), Choice(engine=REFERENCE, trials=())
        if resident is None:
            return self._profile_of(_NOTHING, (), (), choice)
        run = PrefixRun(resident, len(resident.prefix.cuts), self._resources.devices, scope, account)
        run.check()
        shape = _shape_of_tried(wanted, preprocess, request_memory.batch_bytes)
        is_wanted = shape[0] and wanted.accuracy != EXACT and _can_be_tried(preprocess)

        @cache
        def pixels() -> Pixels:
            made: Pixels = np.zeros(shape, np.dtype(np.float32 if preprocess.levels is None else np.uint8))
            held.enter_context(request_memory.reserve(made.nbytes, scope.is_cancelled))
            load(reader, made, len(made), self._resources.readers.executor_for(account.name), scope, Counters())
            return made

        @cache
        def measured() -> tuple[Pixels, npt.NDArray[np.float64], Arrays]:
            # A job waits, and an engine that is worth it differs by more than two runs do: one run of the reference
            # is timed, and what it gives is what engines are judged by.
            judging = _filled_up(evaluation_inputs(pixels(), preprocess.levels)[:ROWS])
            return judging, *run.timed_run(judging, repeats=1)

        reference = MeasuredReference(
            run, lambda: measured()[1], resident.prefix.cuts, known=lambda: (measured()[0], measured()[2])
        )
        if is_wanted and self._bridge.trials.are_wanted(wanted, partial(reference.seconds, len(resident.prefix.cuts))):
            requester = self._requester(wanted.features, account, scope)
            choice = self._bridge.trials.choose_engine(
                wanted, resident.prefix, pixels(), reference, requester, preprocess.levels
            )
        return self._profile_of(_NOTHING, (), (), choice)

    def _requester(self, request: FeatureRequest, account: Account, scope: CancelScope) -> Requester:
        assert request.prefix is not None, "the prefix was found by its name"
        engine_bytes = self._opener.prefixes.left_bytes(request.prefix, account)
        return Requester(
            name=account.name,
            check=account.check_trials,
            is_abandoned=scope.is_cancelled,
            spent=partial(self._resources.charge_trial, account),
            max_engine_bytes=engine_bytes,
        )

    def _measurement(
        self,
        wanted: ProfileRequest,
        run: PrefixRun,
        resident: Resident,
        loaded_bytes: int,
        known: NetworkProfile | None,
    ) -> PrefixMeasurement:
        work_bytes = self._resources.pools["work"].total_bytes
        return PrefixMeasurement(
            run,
            resident.prefix.cuts,
            codecs=wanted.codecs,
            encoded_bytes=wanted.features.samples.encoded_bytes / len(wanted.features.samples),
            cores=len(usable_cores()),
            known=known,
            activation_bytes=min(work_bytes // 2, work_bytes - loaded_bytes),
        )

    def _profile_of(
        self, loaded: Loaded, cuts: Sequence[CutCost], codecs: Sequence[CodecCost], choice: Choice
    ) -> Profile:
        rows = [trial.rows for trial in choice.trials if trial.engine == choice.engine != REFERENCE]
        return Profile(
            hardware=hardware_name(self._settings.device),
            host=host_digest(),
            cores=usable_cores(),
            engine=choice.engine,
            device=self._settings.device.partition(":")[0],
            device_batch=max(ROWS, *rows) if rows else loaded.rows,
            read_s=loaded.read_s,
            cuts=tuple(cuts),
            codecs=tuple(codecs),
            trials=choice.trials,
        )

    def _profiled_rows(self, request: FeatureRequest, run: PrefixRun | None) -> int:
        if run is not None:
            run.check()
        limits = [] if run is None else [run.limit]
        maximum = batch_size(limits, wanted=len(request.samples), maximum=self._settings.device_batch)
        return min(len(request.samples), maximum)


def _filled_up(samples: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Eight rows, the samples over and over, since a sample's last bits may depend on the size of its run."""
    return np.resize(samples, (ROWS, *samples.shape[1:]))


def _can_be_tried(preprocess: Preprocess) -> bool:
    """Engines are tried on floats: tokens and other whole numbers have the reference."""
    return preprocess.dtype == "float32"


def _shape_of_tried(wanted: ProfileRequest, preprocess: Preprocess, max_bytes: int) -> tuple[int, ...]:
    """The shape of all samples for trials: pixels if available, else the input of the network."""
    channels, *sides = preprocess.shape
    row_bytes = math.prod(preprocess.shape) * (_FLOAT if preprocess.levels is None else 1)
    rows = min(len(wanted.features.samples), max_bytes // row_bytes)
    return (rows, channels, *sides) if preprocess.levels is None else (rows, *sides, channels)
