"""Measures what codecs cost on the real activations at some cuts: seconds both ways, bytes and error."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from frostline.core import EXACT, Cut, FeatureBatch
from frostline.profiles import CodecCost
from frostline.wire.codecs import offered_codecs
from frostline.wire.packing import pack, unpack

__all__ = ("codec_costs", "codecs_at", "cuts_worth_packing")

# A codec makes activations up to ten times smaller (8 bits without the zeros behind a ReLU, compressed; see
# ``wire.codecs``), and those that it makes so small take the most time. A cut that ships more than four times what
# the encoded sample has, and than the smallest cut, stays behind one of them.
_TIMES = 4


def cuts_worth_packing(cuts: Sequence[Cut], encoded_bytes: float) -> tuple[Cut, ...]:
    """The cuts that may ship little enough to matter once they are packed.

    Args:
        cuts: cut 1 and higher.
        encoded_bytes: bytes of a sample at cut 0, the mean.
    """
    smallest = min((cut.bytes_per_sample for cut in cuts if cut.number > 0), default=0)
    maximum = _TIMES * max(encoded_bytes, smallest)
    return tuple(cut for cut in cuts if cut.number > 0 and cut.bytes_per_sample <= maximum)


def codecs_at(cut: Cut, codecs: Iterable[str]) -> tuple[str, ...]:
    """The codecs that may be worth it at a cut; never ``exact``, which costs nothing."""
    sensible = offered_codecs("int8", is_relu=cut.is_relu, dtypes=cut.dtypes)
    return tuple(codec for codec in codecs if codec in sensible and codec != EXACT)


def codec_costs(
    values: Mapping[int, tuple[npt.NDArray[np.generic], ...]],
    cuts: Sequence[Cut],
    codecs: Sequence[str],
    *,
    clock: Callable[[], float] = time.perf_counter,
    repeats: int = 3,
    cores: int = 1,
) -> tuple[CodecCost, ...]:
    """Pack and unpack what crosses some cuts with each codec that may be worth it there.

    Args:
        values: the values by the cut's number, arrays ``[n, ...]`` of a few real samples
            (``engines.measure.cut_values``).
        cuts: numbers of the cuts to measure.
        codecs: names; ``exact`` is not measured.
        clock: seconds of a monotonic clock.
        repeats: the measured runs, after one to warm up.
        cores: cores of a side: one packs with each at the same time, so that a sample takes that part of its time.

    Returns:
        Costs by cut and codec, in the order of both.
    """
    return tuple(
        _cost(cut.number, codec, values[cut.number], clock, repeats, cores)
        for cut in cuts
        for codec in codecs_at(cut, codecs)
    )


def _cost(
    cut: int,
    codec: str,
    tensors: tuple[npt.NDArray[np.generic], ...],
    clock: Callable[[], float],
    repeats: int,
    cores: int,
) -> CodecCost:
    rows = len(tensors[0])
    batch = FeatureBatch(ids=np.arange(rows), tensors=tensors)
    packed = pack(batch, codec)
    unpack(packed)
    marks = np.array([_timed(batch, codec, clock) for _ in range(repeats)]) / rows / cores
    encode_s, decode_s = np.median(marks, axis=0).tolist()
    low_s, high_s = np.percentile(marks.sum(1), (25, 75)).tolist()
    return CodecCost(
        cut=cut,
        codec=codec,
        bytes_per_sample=packed.nbytes / rows,
        encode_s=encode_s,
        decode_s=decode_s,
        spread_s=high_s - low_s,
        error=packed.error,
    )


def _timed(batch: FeatureBatch, codec: str, clock: Callable[[], float]) -> tuple[float, float]:
    """Seconds of packing and of unpacking a batch."""
    started = clock()
    packed = pack(batch, codec)
    between = clock()
    unpack(packed)
    return between - started, clock() - between
