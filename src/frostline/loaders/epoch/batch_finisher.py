"""Gives a batch the declared targets of its rows, and maps its samples one by one."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from frostline.datasets.select.target_columns import TargetColumns
from frostline.loaders.epoch.numpy_batch import Arrays
from frostline.loaders.epoch.sample_map import Sample, SampleMap, joined_targets, stacked
from frostline.processors import in_background, usable_cores

__all__ = ("THREADS", "BatchFinisher", "Finish")

THREADS = "frostline-map"
"""The name that threads which map samples begin with."""

Finish = Callable[[Arrays, npt.NDArray[np.int64]], Arrays]
"""Finishes a batch, given the rows of the data set's table that it has."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchFinisher:
    """Finishes batches, in the thread that fills them.

    Attributes:
        targets: declared targets of the data set, by row; None where none are declared.
        sample_map: made to each sample; None leaves them as they are.
    """

    targets: TargetColumns | None = None
    sample_map: SampleMap | None = None

    @contextmanager
    def started(self) -> Iterator[Finish]:
        """What finishes batches; samples are mapped by as many threads as there are cores.

        It raises ``DataError`` where a target does not have the shape that its column has, and ``SettingError`` where
        the samples that were mapped make no batch.
        """
        cores = len(usable_cores())
        if self.sample_map is None or cores < 2:
            yield partial(self._finish, None)
            return
        threads = ThreadPoolExecutor(cores, THREADS, in_background)
        try:
            yield partial(self._finish, threads)
        finally:
            threads.shutdown(wait=False, cancel_futures=True)

    def _finish(self, threads: ThreadPoolExecutor | None, arrays: Arrays, rows: npt.NDArray[np.int64]) -> Arrays:
        if self.targets is not None:
            masks = arrays.targets  # which are there where they are declared, and no dict yet
            assert not isinstance(masks, dict)
            arrays = replace(arrays, targets=self.targets.at(rows, masks))
        return arrays if self.sample_map is None else _mapped(arrays, self.sample_map, threads)


def _mapped(arrays: Arrays, sample_map: SampleMap, threads: ThreadPoolExecutor | None) -> Arrays:
    ids = arrays.ids.tolist()
    samples = [_sample(arrays, row, id) for row, id in enumerate(ids)]
    each = map(sample_map, [samples]) if threads is None else threads.map(sample_map, _divided(samples))
    found = [sample for some in each for sample in some]
    return replace(
        arrays,
        features=stacked("features", [sample.features for sample in found], ids),
        labels=np.array([sample.label for sample in found], np.int64),
        targets=joined_targets([sample.target for sample in found], arrays.targets, ids),
    )


def _sample(arrays: Arrays, row: int, id: int) -> Sample:
    features = arrays.features
    return Sample(
        features=tuple(part[row] for part in features) if isinstance(features, tuple) else features[row],
        label=int(arrays.labels[row]),
        id=id,
        target=_target(arrays.targets, row),
    )


def _target(targets: Any, row: int) -> Any:
    if isinstance(targets, dict):
        return {name: values[row] for name, values in targets.items()}
    return None if targets is None else targets[row]


def _divided(samples: Sequence[Sample]) -> list[Sequence[Sample]]:
    """The samples in as many parts as there are cores, in their order."""
    size = -(-len(samples) // len(usable_cores()))
    return [samples[start : start + size] for start in range(0, len(samples), size)]
