"""Batches for pipelines of NVIDIA DALI: encoded samples, which it decodes, or features."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

import numpy as np
from nvidia.dali import Pipeline, fn

from frostline.core.errors import SettingError
from frostline.datasets.targets import TEXTS
from frostline.loaders.adapters.base import Fed, FrameworkIterator, Parts

__all__ = ("DaliSource",)


class DaliSource:
    """What an external source of a pipeline reads: an epoch a pass, ``Pipeline.reset`` between them.

    Frostline prefetches in threads of this process, so DALI must call the source here (``parallel=False``, its
    default). Batches may be smaller than the pipeline's ``batch_size``, and not larger.

    Args:
        loader: loader of an epoch, so that each pass is that epoch; or several epochs, one a pass.
        columns: parts of a batch to give, of ``features``, ``labels``, ``ids`` and ``targets``: an output each, and
            where several tensors cross the frost line one for each of them, as for each of several declared targets.
            Texts are arrays of the bytes of their UTF-8.
        ahead: batches that the pipeline holds before it hands them out: its ``prefetch_queue_depth``.

    Raises:
        SettingError: there is no such column, ``ahead`` is negative, the loader's batches are no arrays, or a target
            is a list of texts.
    """

    def __init__(
        self,
        loader: Fed,
        *,
        columns: Sequence[str] = ("features", "labels"),
        ahead: int = 2,
    ) -> None:
        self._columns = tuple(columns)
        self._feed = FrameworkIterator(loader, columns, ahead)
        targets = self._feed.one.targets
        specs = () if targets is None or "targets" not in columns else targets.specs
        listed = next((spec.name for spec in specs if spec.kind == TEXTS), None)
        if listed is not None:
            raise SettingError(
                f"DALI has no lists of texts, as {listed!r} has: declare it as a MultiLabel, or leave it out"
            )
        self._counts = {"features": len(self._feed.one.tensors), "targets": max(1, len(specs))}

    def __call__(self) -> Iterator[tuple[Any, ...]]:
        """A pass, for ``fn.external_source(source=this, num_outputs=..., cycle="raise")``."""
        with closing(self._feed.batches()) as batches:
            for parts in batches:
                yield tuple(_outputs(parts))

    def read(self, **options: Any) -> list[Any]:
        """The outputs of an external source of this, for use in the definition of a pipeline.

        Args:
            options: options of ``fn.external_source``, such as ``device="gpu"``.
        """
        outputs = sum(self._counts.get(name, 1) for name in self._columns)
        return list(fn.external_source(source=self, num_outputs=outputs, cycle="raise", **options))

    def run(self, pipeline: Pipeline) -> Iterator[Any]:
        """What a pipeline gives in an epoch, run after run, counted as the loop has it; then it is reset.

        Raises:
            SettingError: batches are larger than the pipeline's.
        """
        rows = self._feed.one.batch_size
        if rows > pipeline.max_batch_size:
            raise SettingError(
                f"batches of {rows} rows do not fit a pipeline with batch_size={pipeline.max_batch_size}: give it "
                f"batch_size={rows}, or make the loader with fewer"
            )
        own = None
        try:
            while True:
                try:
                    found = pipeline.run()
                except StopIteration:
                    break
                own = own or self._feed.under_way
                self._feed.count_taken(own=own)
                yield found
            pipeline.reset()
        finally:
            self._feed.leave(own)

    def count_taken(self, batches: int = 1) -> None:
        """The loop has so many more batches, where it runs the pipeline itself."""
        self._feed.count_taken(batches)

    def state_dict(self) -> dict[str, Any]:
        """How far the loop is, by what it took; see ``ArrayLoader.state_dict``."""
        return self._feed.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next pass go on from there, before a pipeline has begun it; see ``ArrayLoader.load_state_dict``."""
        self._feed.load_state_dict(state)


def _outputs(parts: Parts) -> Iterator[Any]:
    """One after the other; encoded samples as a list of arrays of bytes, as DALI takes what differs in length."""
    for part in parts:
        for tensor in part if isinstance(part, tuple) else part.values() if isinstance(part, dict) else (part,):
            is_array = isinstance(tensor, np.ndarray) and not tensor.dtype.hasobject
            yield tensor if is_array else [_dense(row) for row in tensor]


def _dense(row: Any) -> Any:
    encoded = row.encode() if isinstance(row, str) else row
    return np.frombuffer(encoded, np.uint8) if isinstance(encoded, bytes) else encoded
