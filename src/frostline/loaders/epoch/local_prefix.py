"""Runs at the trainer what is left of the frozen part behind a cut, in eager torch."""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from frostline.core import Graph
from frostline.engines.base.runner import Runner, leaf_values

__all__ = ("TorchRest",)


class TorchRest:
    """The frozen part from one cut to the frost line, ready to run.

    Args:
        graph: of that part.
        tensors: weights by the names in ``graph.leaves``.
        device: where it runs, in torch's words.
    """

    def __init__(self, graph: Graph, tensors: Mapping[str, torch.Tensor], device: str) -> None:
        self._device = torch.device(device)
        self._leaves = [leaf.to(self._device) for leaf in leaf_values(graph, tensors)]
        self._runner = Runner(graph, device=self._device)

    def run(self, arrays: Sequence[npt.NDArray[np.generic]], size: int) -> tuple[npt.NDArray[np.generic], ...]:
        """See ``loaders.epoch.local_stage.Rest``."""
        starts = range(0, len(arrays[0]), size)
        parts = [self._run_batch([array[start : start + size] for array in arrays], size) for start in starts]
        return parts[0] if len(parts) == 1 else tuple(np.concatenate(columns) for columns in zip(*parts, strict=True))

    def _run_batch(self, arrays: Sequence[npt.NDArray[np.generic]], size: int) -> tuple[npt.NDArray[np.generic], ...]:
        rows = len(arrays[0])
        inputs = [torch.from_numpy(_filled(array, size)).to(self._device) for array in arrays]
        with torch.inference_mode():
            outputs = self._runner.run(inputs, self._leaves)
        return tuple(output[:rows].contiguous().cpu().numpy() for output in outputs)


def _filled(array: npt.NDArray[np.generic], rows: int) -> npt.NDArray[np.generic]:
    """The array with zeros behind it; a copy where torch could not take it as it is."""
    if len(array) == rows:
        return array if array.flags.writeable else array.copy()
    return np.concatenate([array, np.zeros((rows - len(array), *array.shape[1:]), array.dtype)])
