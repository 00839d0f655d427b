"""Measures what reading, decoding, every cut of a prefix and codecs cost on this node, on real samples."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, wait
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from frostline.batching import ROWS
from frostline.core import Cut
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

__all__ = ("Bench", "Loaded", "MeasuredReference", "NetworkProfile", "Networks", "cut_costs", "load", "under_engine")

_REPEATS = 3
# More of those, which take milliseconds: a neighbour that has the core for a while is seen in few of them.
_PACKINGS = 5
# Samples on which codecs are measured: those of EfficientNet-lite0 take 0.7 s where nothing may be lost and 1.4 s in
# all, with two cores that others use too (its run before takes 2.7 s).
_PACKED_ROWS = 4
# Prefixes whose costs are kept.
_MAX_KEPT = 64

Pair = tuple[int, str]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Loaded:
    """Decoded samples and how long they took.

    Attributes:
        rows: of the slab that they were put into.
        row_bytes: of one of them.
        read_s: reading, a sample, all threads at work.
        decode_s: decoding, a sample, all threads at work.
    """

    rows: int
    row_bytes: int
    read_s: float
    decode_s: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NetworkProfile:
    """What the network itself costs, whatever the data.

    Attributes:
        seconds: a sample up to each cut, ``float64[repeats, cuts]``.
        codecs: by the number of the cut and the codec's name.
    """

    seconds: npt.NDArray[np.float64]
    codecs: Mapping[Pair, CodecCost] = field(default_factory=dict)


class MeasuredReference:
    """See ``workshop.Reference``: the prefix in the node's own process, when it is this request's turn.

    Args:
        run: the prefix.
        network: what it costs.
        cuts: of the prefix.
    """

    def __init__(self, run: PrefixRun, network: NetworkProfile, cuts: Sequence[Cut]) -> None:
        self._run = run
        self._seconds = np.median(network.seconds, axis=0).tolist()
        self._cuts = cuts

    def seconds(self, cut: int) -> float:
        """See ``workshop.Reference``."""
        return float(self._seconds[cut - 1])

    def footprint(self, cut: int) -> Footprint:
        """See ``workshop.Reference``."""
        return self._run.reference_footprint(cut)

    def alone(self, call: Callable[[], T]) -> T:
        """See ``workshop.Reference``."""
        return self._run.alone(call)

    def features(self, samples: npt.NDArray[np.float32], cut: int) -> tuple[npt.NDArray[np.generic], ...]:
        """See ``workshop.Reference``; in runs of one size, since a sample's last bits may depend on it."""
        parts = []
        for start in range(0, len(samples), ROWS):
            some = np.resize(samples[start : start + ROWS], (ROWS, *samples.shape[1:]))
            parts.append(self._run.values(some, [self._cuts[cut - 1]])[cut])
        return tuple(np.concatenate(columns)[: len(samples)] for columns in zip(*parts, strict=True))


class Networks:
    """What was measured of prefixes, kept for the next job that asks; longest unused out first. Safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[object, ...], NetworkProfile] = OrderedDict()

    def get(self, key: tuple[object, ...]) -> NetworkProfile | None:
        """What is known of a prefix, on some hardware, by an engine, at a batch and after some preprocessing."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)

    def put(self, key: tuple[object, ...], network: NetworkProfile) -> None:
        """Keep it."""
        with self._lock:
            self._kept[key] = network
            self._kept.move_to_end(key)
            if len(self._kept) > _MAX_KEPT:
                self._kept.popitem(last=False)


class Bench:
    """Measures one prefix on loaded samples.

    Args:
        run: the prefix up to its last cut.
        cuts: of the prefix.
        codecs: that are asked for.
        encoded_bytes: of a sample as it is stored, the mean.
        cores: that this node may use.
        known: what was measured before; None where nothing was.
        room_bytes: for activations that are kept while codecs work on them.
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
        """The most memory that measuring takes beside the samples."""
        return max((_group_bytes(group) for group in self._groups), default=0)

    def network(self, slab: Slab) -> NetworkProfile:
        """What is known, and what was missing of it."""
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
    reader: SampleReader, slab: Slab, rows: int, readers: Executor, leash: CancelScope, counters: Counters
) -> Loaded:
    """Read and decode the first samples of a request, as a batch of a request is, and see how long that takes.

    Args:
        reader: of the request.
        slab: of zeros; samples are repeated to fill it.
        rows: how many samples.
        readers: threads that read and decode.
        leash: of the request.
        counters: the reader's own.
    """
    reader.pixels_into(0, slab[0])  # not measured: the first image makes Pillow load its readers
    before = counters.totals()
    started = time.perf_counter()
    reader.expect(range(rows))
    samples = [leash.submit(readers, reader.pixels_into, row, slab[row]) for row in range(rows)]
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
    """The cost at cuts 0 and 1, and at every later one where there is a prefix."""
    if network is None or resident is None:
        free = CutCost(number=0, seconds=0.0, spread_s=0.0, fixed_bytes=0, bytes_per_sample=0)
        return [free, _pixels(loaded)]
    middle = np.median(network.seconds, axis=0).tolist()
    low, high = np.percentile(network.seconds, (25, 75), axis=0)
    cuts = zip(resident.prefix.cuts, middle, (high - low).tolist(), strict=True)
    costs = [_cost(cut, loaded.decode_s + to_here_s, spread_s, resident) for cut, to_here_s, spread_s in cuts]
    rest = costs[0].rest_fixed_bytes, costs[0].rest_bytes_per_sample
    return [_encoded(*rest), *costs]


def under_engine(
    costs: Sequence[CutCost], network: NetworkProfile, cuts: Sequence[Cut], decode_s: float, choice: Choice
) -> Sequence[CutCost]:
    """The same costs where another engine than the reference runs the prefix.

    Its seconds are known at the cuts at which it was tried, and lie between them as the reference's do; its memory up
    to a cut is that up to the next one at which it was tried. What is left behind a cut is the trainer's, and stays; so
    do cuts behind the last one at which it was tried, where the job does not stop.

    Args:
        costs: of the reference, from cut 0.
        network: the reference's seconds.
        cuts: of the prefix.
        decode_s: of a sample.
        choice: the engine, with its trials.
    """
    trials = {one.cut: one for one in choice.trials if one.engine == choice.engine}
    reference_s = np.median(network.seconds, axis=0).tolist()
    last = max(trials)
    seconds = interpolated(reference_s[:last], {cut - 1: one.seconds for cut, one in trials.items()})
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


def _encoded(rest_fixed_bytes: int, rest_bytes_per_sample: int) -> CutCost:
    return CutCost(
        number=0,
        seconds=0.0,
        spread_s=0.0,
        fixed_bytes=0,
        bytes_per_sample=0,
        rest_fixed_bytes=rest_fixed_bytes,
        rest_bytes_per_sample=rest_bytes_per_sample,
    )


def _pixels(loaded: Loaded) -> CutCost:
    return CutCost(number=1, seconds=loaded.decode_s, spread_s=0.0, fixed_bytes=0, bytes_per_sample=loaded.row_bytes)


def _cost(cut: Cut, seconds: float, spread_s: float, resident: Resident) -> CutCost:
    engine = resident.reference
    here, rest = engine.footprint(cut.number), engine.rest_footprint(cut.number)
    return CutCost(
        number=cut.number,
        seconds=seconds,
        spread_s=spread_s,
        fixed_bytes=engine.weight_bytes + int(here.fixed_bytes * HEADROOM),
        bytes_per_sample=int(here.bytes_per_sample * HEADROOM) + cut.bytes_per_sample,
        rest_fixed_bytes=engine.weight_bytes + int(rest.fixed_bytes * HEADROOM),
        rest_bytes_per_sample=int(rest.bytes_per_sample * HEADROOM),
    )


def _groups(cuts: Sequence[Cut], room_bytes: int) -> list[list[Cut]]:
    """Cuts whose activations are kept at the same time; each group takes a run of its own."""
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
    """What packing a cut's samples takes with the codec that takes most, and unpacking them."""
    kinds = [np.dtype(dtype) for dtype in cut.dtypes]
    memory = packing_memory(cut.shapes, kinds, "fp16+sparse+zstd")
    return memory.fixed_bytes + _PACKED_ROWS * (memory.bytes_per_sample + cut.bytes_per_sample)
