"""What the trainer still computes of the frozen part: decode at cut 0, then run from the cut to the frost line."""

import threading
import time
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from frostline.core import Cut, FeatureBatch, Graph, Samples, Skipped, View
from frostline.engines.runner import Runner, leaf_values
from frostline.errors import SampleError
from frostline.preprocess import Preprocess
from frostline.preprocess.apply import decode_into

__all__ = ("TrainerSide", "decode")


class TrainerSide:
    """Turns what crosses a cut into activations at the frost line. Safe for several threads.

    Args:
        cut: where the store side stopped.
        frost_line: where the trainer takes over; the pixels where there is no model.
        rest: the frozen part between the two; None where there is nothing between.
        tensors: its weights by name.
        device: where ``rest`` runs, in torch's words.
        device_batch: rows of every run, filled up with zeros: kernels may round otherwise for other batches.
    """

    def __init__(
        self,
        *,
        cut: Cut,
        frost_line: Cut,
        rest: Graph | None,
        tensors: Mapping[str, torch.Tensor],
        device: torch.device | str = "cpu",
        device_batch: int = 32,
    ) -> None:
        self._cut = cut
        self._device_batch = device_batch
        self._device = torch.device(device)
        self._rest = rest if rest is not None and cut.number < frost_line.number and rest.nodes else None
        if self._rest is not None:
            self._leaves = [leaf.to(self._device) for leaf in leaf_values(self._rest, tensors)]
            self._runner = Runner(self._rest, device=self._device)
        self._busy = threading.Lock()
        self._decode_s = 0.0
        self._compute_s = 0.0

    @property
    def seconds(self) -> tuple[float, float]:
        """Seconds spent decoding and computing so far, summed over threads."""
        return self._decode_s, self._compute_s

    def finish(self, batch: FeatureBatch, samples: Samples, preprocess: Preprocess, view: View | None) -> FeatureBatch:
        """The same rows at the frost line.

        Args:
            batch: as the node answered.
            samples: of the request, for the names of those that turn out to be unreadable.
            preprocess: run here at cut 0.
            view: which random view, where the preprocessing is random.
        """
        if self._cut.number == 0:
            started = time.perf_counter()
            batch = decode(preprocess, batch, samples, view)
            self._count(decode_s=time.perf_counter() - started)
        if self._rest is None or len(batch) == 0:
            return batch
        started = time.perf_counter()
        tensors = self._run(batch.tensors)
        self._count(compute_s=time.perf_counter() - started)
        return FeatureBatch(ids=batch.ids, tensors=tensors, skipped=batch.skipped)

    def _run(self, arrays: Sequence[npt.NDArray[np.generic]]) -> tuple[npt.NDArray[np.generic], ...]:
        size = self._device_batch
        starts = range(0, len(arrays[0]), size)
        parts = [self._run_batch([array[start : start + size] for array in arrays]) for start in starts]
        return parts[0] if len(parts) == 1 else tuple(np.concatenate(columns) for columns in zip(*parts, strict=True))

    def _run_batch(self, arrays: Sequence[npt.NDArray[np.generic]]) -> tuple[npt.NDArray[np.generic], ...]:
        rows = len(arrays[0])
        inputs = [torch.from_numpy(_filled(array, self._device_batch)).to(self._device) for array in arrays]
        with torch.inference_mode():
            outputs = self._runner.run(inputs, self._leaves)
        return tuple(output[:rows].contiguous().cpu().numpy() for output in outputs)

    def _count(self, *, decode_s: float = 0.0, compute_s: float = 0.0) -> None:
        with self._busy:
            self._decode_s += decode_s
            self._compute_s += compute_s


def decode(preprocess: Preprocess, batch: FeatureBatch, samples: Samples, view: View | None) -> FeatureBatch:
    """Decode the encoded samples of a batch; those that cannot be read move to ``skipped``."""
    pixels = np.empty((len(batch), *preprocess.shape), np.float32)
    objects = dict(zip(samples.ids.tolist(), samples.objects, strict=True))
    kept: list[int] = []
    skipped = list(batch.skipped)
    for row, (id, encoded) in enumerate(zip(batch.ids.tolist(), batch.encoded, strict=True)):
        try:
            decode_into(preprocess, encoded, pixels[row], id=id, view=view)
            kept.append(row)
        except SampleError as error:
            skipped.append(Skipped(id=id, object=objects[id], reason=str(error)))
    whole = len(kept) == len(batch)
    return FeatureBatch(
        ids=batch.ids if whole else batch.ids[kept],
        tensors=(pixels if whole else pixels[kept],),
        skipped=tuple(skipped),
    )


def _filled(array: npt.NDArray[np.generic], rows: int) -> npt.NDArray[np.generic]:
    """The array with zeros behind it; a copy where torch could not take it as it is."""
    if len(array) == rows:
        return array if array.flags.writeable else array.copy()
    return np.concatenate([array, np.zeros((rows - len(array), *array.shape[1:]), array.dtype)])
