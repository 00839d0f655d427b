"""Packs the answers of one request, in the thread that waits for them."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from frostline.core import EXACT, FeatureBatch
from frostline.node.scheduling.statistics import Counters
from frostline.wire.codecs import PackingMemory, pack, packing_memory

__all__ = ("Packing",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """How the answers of a request are packed.

    Attributes:
        codec: name of the codec; ``exact`` leaves them as they are.
        tolerance: largest relative error allowed; None allows any.
        counters: counters of the request.
    """

    codec: str
    tolerance: float | None
    counters: Counters

    def memory(self, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[str]) -> PackingMemory:
        """The memory that packing takes for tensors of these shapes and dtypes."""
        return packing_memory(shapes, [np.dtype(dtype) for dtype in dtypes], self.codec)

    def __call__(self, batch: FeatureBatch) -> FeatureBatch:
        """Pack a batch for the wire."""
        if self.codec == EXACT:
            return batch
        started = time.perf_counter()
        packed = pack(batch, self.codec, self.tolerance)
        self.counters.add(encode_s=time.perf_counter() - started)
        return packed
