"""What the trainer still computes of the frozen part: decode at cut 0, then run from the cut to the frost line."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

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
        cuts: every cut by number; the last is the frost line, the pixels where there is no model.
        rest: the frozen part from a cut to the frost line; None where there is no model.
        tensors: its weights by name.
        device: where the rest runs, in torch's words.
        device_batch: rows of every run, filled up with zeros: kernels may round otherwise for other batches.

    Attributes:
        device: as given.
    """

    def __init__(
        self,
        *,
        cuts: Sequence[Cut],
        rest: Callable[[Cut], Graph] | None = None,
        tensors: Mapping[str, torch.Tensor] | None = None,
        device: torch.device | str = "cpu",
        device_batch: int = 32,
    ) -> None:
        self._cuts = tuple(cuts)
        self._rest = rest
        self._tensors = tensors or {}
        self._device_batch = device_batch
        self.device = torch.device(device)
        self._made: dict[int, _Rest | None] = {}
        # One run at a time: several at once would only take each other's cores.
        self._running = threading.Lock()
        self._counting = threading.Lock()
        self._decode_s = 0.0
        self._compute_s = 0.0

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
        self, batch: FeatureBatch, cut: int, samples: Samples, preprocess: Preprocess, view: View | None
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
            batch = decode(preprocess, batch, samples, view)
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

    def _rest_from(self, cut: int) -> "_Rest | None":
        """What is left from a cut, made when it is first needed; None where nothing is."""
        if self._rest is None or cut == self._cuts[-1].number:
            return None
        if cut not in self._made:
            graph = self._rest(self._cuts[cut])
            self._made[cut] = _Rest(graph, self._tensors, self.device) if graph.nodes else None
        return self._made[cut]

    def _count(self, *, decode_s: float = 0.0, compute_s: float = 0.0) -> None:
        with self._counting:
            self._decode_s += decode_s
            self._compute_s += compute_s


class _Rest:
    """The frozen part from one cut to the frost line, ready to run."""

    def __init__(self, graph: Graph, tensors: Mapping[str, torch.Tensor], device: torch.device) -> None:
        self._device = device
        self._leaves = [leaf.to(device) for leaf in leaf_values(graph, tensors)]
        self._runner = Runner(graph, device=device)

    def run(self, arrays: Sequence[npt.NDArray[np.generic]], size: int) -> tuple[npt.NDArray[np.generic], ...]:
        starts = range(0, len(arrays[0]), size)
        parts = [self._run_batch([array[start : start + size] for array in arrays], size) for start in starts]
        return parts[0] if len(parts) == 1 else tuple(np.concatenate(columns) for columns in zip(*parts, strict=True))

    def _run_batch(self, arrays: Sequence[npt.NDArray[np.generic]], size: int) -> tuple[npt.NDArray[np.generic], ...]:
        rows = len(arrays[0])
        inputs = [torch.from_numpy(_filled(array, size)).to(self._device) for array in arrays]
        with torch.inference_mode():
            outputs = self._runner.run(inputs, self._leaves)
        return tuple(output[:rows].contiguous().cpu().numpy() for output in outputs)


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
