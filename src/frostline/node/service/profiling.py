"""Measures reading, decoding, every cut of a prefix and codecs on this node, on real samples."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, wait
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from cachetools import LRUCache

from frostline.batching import ROWS
from frostline.core import Cut
from frostline.core.features import array_dtype
from frostline.engines.base.protocols import Footprint
from frostline.engines.choice.choice import Choice, interpolated
from frostline.engines.choice.codec_costs import codec_costs, codecs_at, worth_packing
from frostline.node.request.decode import SampleReader
from frostline.node.request.pipeline import Slab
from frostline.node.request.prefix_run import HEADROOM, PrefixRun
from frostline.node.scheduling.cancel_scope import CancelScope
from frostline.node.scheduling.statistics import Counters
from frostline.node.weights.prefix_registry import Resident
from frostline.profiles import CodecCost, CutCost
from frostline.wire.codecs import packing_memory

__all__ = (
    "Loaded",
    "MeasuredReference",
    "NetworkProfile",
    "Networks",
    "PrefixMeasurement",
    "cut_costs",
    "load",
    "under_engine",
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

    def sped_up(self, speed: float) -> "NetworkProfile":
        """The cost on several devices that are together so many times as fast."""
        return replace(self, seconds=self.seconds / speed)


class MeasuredReference:
    """A ``trial_processes.Reference``: the prefix in the node's own process, run when it is this request's turn.

    Args:
        run: prefix of the request.
        network: measured cost of the prefix.
        cuts: cuts of the prefix.
    """

    def __init__(self, run: PrefixRun, network: NetworkProfile, cuts: Sequence[Cut]) -> None:
        self._run = run
        self._seconds = np.median(network.seconds, axis=0).tolist()
        self._cuts = cuts

    def seconds(self, cut: int) -> float:
        """See ``trial_processes.Reference``."""
        return float(self._seconds[cut - 1])

    def footprint(self, cut: int) -> Footprint:
        """See ``trial_processes.Reference``."""
        return self._run.reference_footprint(cut)

    def alone(self, call: Callable[[], T]) -> T:
        """See ``trial_processes.Reference``."""
        return self._run.alone(call)

    def features(self, samples: npt.NDArray[np.float32], cut: int) -> tuple[npt.NDArray[np.generic], ...]:
        """See ``trial_processes.Reference``; all runs have one size, since a sample's last bits may depend on it."""
        parts = []
        for start in range(0, len(samples), ROWS):
            some = np.resize(samples[start : start + ROWS], (ROWS, *samples.shape[1:]))
            parts.append(self._run.values(some, [self._cuts[cut - 1]])[cut])
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
        room_bytes: memory for activations that are kept while codecs work on them.
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
        room_bytes: int,
    ) -> None:
        self._run = run
        self._cores = cores
        self._known = known
        self._missing: dict[int, list[str]] = {}
        have = {} if known is None else known.codecs
        fitting = [cut for cut in worth_packing(cuts, encoded_bytes) if _group_bytes([cut]) <= room_bytes]
        for cut in fitting:
            missing = [codec for codec in codecs_at(cut, codecs) if (cut.number, codec) not in have]
            if missing:
                self._missing[cut.number] = missing
        self._groups = _groups([cut for cut in fitting if cut.number in self._missing], room_bytes)

    @property
    def nbytes(self) -> int:
        """The maximum memory that the measurement takes beside the samples."""
        return max((_group_bytes(group) for group in self._groups), default=0)

    def network(self, slab: Slab) -> NetworkProfile:
        """Measure the missing costs, and return them with the known ones."""
        known = self._known
        seconds = self._run.seconds(slab, repeats=_REPEATS) if known is None else known.seconds
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


def sped_up_choice(choice: Choice, speed: float) -> Choice:
    """A choice whose trials cost what they do on several devices that are together so many times as fast."""
    return replace(choice, trials=tuple(replace(trial, seconds=trial.seconds / speed) for trial in choice.trials))


def under_engine(
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
    seconds = interpolated(reference_s[:last], {cut - 1: trial.seconds for cut, trial in trials.items()})
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


def _groups(cuts: Sequence[Cut], room_bytes: int) -> list[list[Cut]]:
    """Group cuts whose activations fit into memory together; each group takes one run."""
    groups: list[list[Cut]] = []
    for cut in cuts:
        if groups and _group_bytes([*groups[-1], cut]) <= room_bytes:
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
