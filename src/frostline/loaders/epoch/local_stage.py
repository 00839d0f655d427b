"""What the trainer still does of the frozen part: decode at cut 0, have the rest run from the cut to the frost line."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from frostline.core import Cut, FeatureBatch, Samples, Skipped, View
from frostline.errors import SampleError
from frostline.prefetch.assemble import Memory, Slabs
from frostline.preprocess import Preprocess
from frostline.preprocess.apply import decode_into
from frostline.processors import usable_cores

__all__ = ("Rest", "TrainerSide", "decode")


class Rest(Protocol):
    """The frozen part from one cut to the frost line, ready to run."""

    def run(self, arrays: Sequence[npt.NDArray[np.generic]], size: int) -> tuple[npt.NDArray[np.generic], ...]:
        """The activations at the frost line.

        Args:
            arrays: what crosses the cut, one array ``[n, ...]`` for each tensor.
            size: rows of every run.
        """


class TrainerSide:
    """Turns what crosses a cut into activations at the frost line. Safe for several threads.

    Args:
        cuts: every cut by number; the last is the frost line, the pixels where there is no model.
        rest: makes the frozen part from a cut to the frost line, None where nothing is left of it
            (``jobs.partition``); None where there is no model.
        device: where the rest runs, in torch's words.
        device_batch: rows of every run, filled up with zeros: kernels may round otherwise for other batches.

    Attributes:
        device: as given.
    """

    def __init__(
        self,
        *,
        cuts: Sequence[Cut],
        rest: Callable[[Cut], Rest | None] | None = None,
        device: str = "cpu",
        device_batch: int = 32,
    ) -> None:
        self._cuts = tuple(cuts)
        self._rest = rest
        self._device_batch = device_batch
        self.device = device
        self._made: dict[int, Rest | None] = {}
        # One run at a time: several at once would only take each other's cores.
        self._running = threading.Lock()
        self._counting = threading.Lock()
        self._decode_s = 0.0
        self._compute_s = 0.0
        self._memory = Slabs(max_idle=len(usable_cores()) + 1)  # a piece for each thread that decodes

    @property
    def seconds(self) -> tuple[float, float]:
        """Seconds spent decoding (summed over threads) and computing so far."""
        return self._decode_s, self._compute_s

    def wants(self, cut: int) -> int:
        """Rows that make full use of a run from this cut; answers with fewer are better put together first."""
        with self._running:
            rest = self._rest_from(max(1, cut))
        return 1 if rest is None else self._device_batch

    def finish(
        self, batch: FeatureBatch, samples: Samples, *, cut: int, preprocess: Preprocess, view: View | None
    ) -> FeatureBatch:
        """The same rows at the frost line.

        Args:
            batch: as the node answered, unpacked.
            cut: where the store side stopped.
            samples: of the request, for the names of those that turn out to be unreadable.
            preprocess: run here at cut 0.
            view: which random view, where the preprocessing is random.
        """
        if cut == 0:
            started = time.perf_counter()
            batch = decode(preprocess, batch, samples, view, self._memory)
            self._count(decode_s=time.perf_counter() - started)
        if len(batch) == 0:
            return batch
        with self._running:
            rest = self._rest_from(max(1, cut))
            if rest is None:
                return batch
            started = time.perf_counter()
            tensors = rest.run(batch.tensors, self._device_batch)
            self._count(compute_s=time.perf_counter() - started)
        return replace(batch, tensors=tensors)

    def _rest_from(self, cut: int) -> Rest | None:
        """What is left from a cut, made when it is first needed; None where nothing is."""
        if self._rest is None or cut == self._cuts[-1].number:
            return None
        if cut not in self._made:
            self._made[cut] = self._rest(self._cuts[cut])
        return self._made[cut]

    def _count(self, *, decode_s: float = 0.0, compute_s: float = 0.0) -> None:
        with self._counting:
            self._decode_s += decode_s
            self._compute_s += compute_s


def decode(
    preprocess: Preprocess, batch: FeatureBatch, samples: Samples, view: View | None, memory: Memory
) -> FeatureBatch:
    """Decode the encoded samples of a batch; those that cannot be read move to ``skipped``.

    Args:
        preprocess: the steps.
        batch: the encoded samples, perhaps with other tensors, which come after the pixels.
        samples: they and perhaps others, for the names of those that cannot be read.
        view: which random view.
        memory: where pixels lie.
    """
    pixels = memory.empty((len(batch), *preprocess.shape), np.dtype(np.float32))
    kept: list[int] = []
    skipped = list(batch.skipped)
    for row, (id, encoded) in enumerate(zip(batch.ids.tolist(), batch.encoded, strict=True)):
        try:
            decode_into(preprocess, encoded, pixels[row], id=id, view=view)
            kept.append(row)
        except SampleError as error:
            object = samples.objects[int(np.flatnonzero(samples.ids == id)[0])]
            skipped.append(Skipped(id=id, object=object, reason=str(error)))
    whole = len(kept) == len(batch)
    tensors = (pixels, *batch.tensors)
    return FeatureBatch(
        ids=batch.ids if whole else batch.ids[kept],
        tensors=tensors if whole else tuple(tensor[kept] for tensor in tensors),
        skipped=tuple(skipped),
    )
