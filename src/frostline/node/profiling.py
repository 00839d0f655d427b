"""Measures what reading, decoding and every cut of a prefix cost on this node, on real samples."""

import time
from collections.abc import Sequence
from concurrent.futures import Executor, wait
from dataclasses import dataclass

import numpy as np

from frostline.core import Cut
from frostline.node.leash import Leash
from frostline.node.pipeline import Slab
from frostline.node.prefixes import Resident
from frostline.node.runs import HEADROOM, PrefixRun
from frostline.node.samples import SampleReader
from frostline.node.statistics import Counters
from frostline.profiles import CutCost

__all__ = ("Loaded", "cut_costs", "load")

_REPEATS = 3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Loaded:
    """Decoded samples and how long they took.

    Attributes:
        slab: ``float32[n, C, H, W]``, ``n`` a multiple of eight; samples are repeated to fill it.
        read_s: reading, a sample, all threads at work.
        decode_s: decoding, a sample, all threads at work.
    """

    slab: Slab
    read_s: float
    decode_s: float


def load(reader: SampleReader, slab: Slab, rows: int, readers: Executor, leash: Leash, counters: Counters) -> Loaded:
    """Read and decode the first samples of a request, as a batch of a request is.

    Args:
        reader: of the request.
        slab: of zeros.
        rows: how many samples.
        readers: threads that read and decode.
        leash: of the request.
        counters: the reader's own.
    """
    reader.pixels_into(0, slab[0])  # not measured: the first image makes Pillow load its readers
    before = counters.totals()
    started = time.perf_counter()
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
    return Loaded(slab=slab, read_s=seconds * share, decode_s=seconds * (1 - share))


def cut_costs(loaded: Loaded, run: PrefixRun | None, resident: Resident | None) -> Sequence[CutCost]:
    """The cost at cuts 0 and 1, and at every later one where there is a prefix."""
    free = CutCost(number=0, seconds=0.0, spread_s=0.0, fixed_bytes=0, bytes_per_sample=0)
    if run is None or resident is None:
        return [free, _pixels(loaded)]
    seconds = run.seconds(loaded.slab, repeats=_REPEATS)
    middle = np.median(seconds, axis=0).tolist()
    low, high = np.percentile(seconds, (25, 75), axis=0)
    costs = zip(resident.prefix.cuts, middle, (high - low).tolist(), strict=True)
    return [free, *(_cost(cut, loaded.decode_s + to_here_s, spread_s, resident) for cut, to_here_s, spread_s in costs)]


def _pixels(loaded: Loaded) -> CutCost:
    return CutCost(
        number=1, seconds=loaded.decode_s, spread_s=0.0, fixed_bytes=0, bytes_per_sample=loaded.slab[0].nbytes
    )


def _cost(cut: Cut, seconds: float, spread_s: float, resident: Resident) -> CutCost:
    footprint = resident.engine.footprint(cut.number)
    return CutCost(
        number=cut.number,
        seconds=seconds,
        spread_s=spread_s,
        fixed_bytes=resident.engine.weight_bytes + int(footprint.fixed_bytes * HEADROOM),
        bytes_per_sample=int(footprint.bytes_per_sample * HEADROOM) + cut.bytes_per_sample,
    )
