"""Measure what a plan needs: the link, on the connection that carries the data, and the trainer's own speed."""

import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from frostline.client.transport import Transport
from frostline.core import FeatureBatch, Samples, View
from frostline.engines.hardware import hardware_name, host_digest
from frostline.engines.profile import cut_seconds
from frostline.loaders.trainer_side import decode
from frostline.models.artifact import Prefix
from frostline.planning import Link
from frostline.preprocess import Preprocess
from frostline.profiles import CutCost, Profile
from frostline.wire.messages import FeatureRequest

__all__ = ("LinkSample", "measure_link", "profile_trainer")

_ENGINE = "torch-eager"
_ROUND_TRIPS = 3
_REPEATS = 2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LinkSample:
    """A measured link, and the encoded samples that crossed it meanwhile."""

    link: Link
    encoded: FeatureBatch


def measure_link(transport: Transport, request: FeatureRequest) -> LinkSample:
    """Fetch a few encoded samples, which real work would fetch too, and time it.

    Args:
        transport: to the node.
        request: for cut 0.
    """
    round_trips = []
    for _ in range(_ROUND_TRIPS):
        started = time.perf_counter()
        transport.health()
        round_trips.append(time.perf_counter() - started)
    before = transport.statistics().bytes_received
    started = time.perf_counter()
    batches = list(transport.features(request))
    seconds = time.perf_counter() - started
    received = transport.statistics().bytes_received - before
    # A round trip and the node's own reading are in the time; taking one round trip off keeps a short fetch
    # over a long link from looking like a thin one.
    busy_s = max(seconds - min(round_trips), seconds / 10)
    link = Link(bytes_per_s=max(1.0, received / busy_s), round_trip_s=min(round_trips))
    return LinkSample(link=link, encoded=_joined(batches))


def profile_trainer(
    prefix: Prefix, preprocess: Preprocess, sample: FeatureBatch, samples: Samples, view: View | None
) -> Profile:
    """Measure decoding and every cut of the prefix here, on real samples.

    Args:
        prefix: the frozen part.
        preprocess: how samples are decoded.
        sample: a few encoded samples.
        samples: the same, with their names.
        view: which random view, where the preprocessing is random.
    """
    started = time.perf_counter()
    pixels = decode(preprocess, sample, samples, view).tensors[0]
    decode_s = (time.perf_counter() - started) / max(1, len(sample))
    leaves = [prefix.tensors[path] for _, path in prefix.graph.leaves]
    seconds = cut_seconds(prefix.graph, leaves, prefix.cuts, _eight(pixels), repeats=_REPEATS, clock=time.perf_counter)
    middle = np.median(seconds, axis=0)
    spread = np.subtract(*np.percentile(seconds, (75, 25), axis=0))
    cuts = [CutCost(number=0, seconds=0.0, spread_s=0.0, fixed_bytes=0, bytes_per_sample=0)]
    for cut, to_here_s, spread_s in zip(prefix.cuts, middle.tolist(), spread.tolist(), strict=True):
        cuts.append(
            CutCost(
                number=cut.number, seconds=decode_s + to_here_s, spread_s=spread_s, fixed_bytes=0, bytes_per_sample=0
            )
        )
    return Profile(
        hardware=hardware_name("cpu"),
        host=host_digest(),
        engine=_ENGINE,
        device_batch=len(_eight(pixels)),
        read_s=0.0,
        cuts=tuple(cuts),
    )


def _eight(pixels: npt.NDArray[np.generic]) -> npt.NDArray[np.float32]:
    """Whole eights of rows, repeated where there are too few."""
    rows = max(8, len(pixels) // 8 * 8)
    return np.resize(pixels, (rows, *pixels.shape[1:])).astype(np.float32, copy=False)


def _joined(batches: list[FeatureBatch]) -> FeatureBatch:
    return FeatureBatch(
        ids=np.concatenate([batch.ids for batch in batches]) if batches else np.zeros(0, np.int64),
        encoded=[one for batch in batches for one in batch.encoded],
        skipped=tuple(one for batch in batches for one in batch.skipped),
    )
