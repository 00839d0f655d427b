"""Bulk extraction: the features of every sample of a data set, in the manifest's order, to one Parquet file."""

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from frostline.core import Skipped
from frostline.errors import DataError, ModelError
from frostline.events import Counted, Observer, PhaseStarted
from frostline.loaders import Batch
from frostline.training.files import make_folder, writing
from frostline.training.settings import ExtractSettings
from frostline.training.setup import Setup, set_up

__all__ = ("Extracted", "extract")

_ROWS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Extracted:
    """What an extraction did.

    Attributes:
        out: the file.
        samples: rows in it.
        shape: of one sample's features.
        dtype: of the features.
        seconds: from the first request to the file's last byte.
        wire_bytes: store side to trainer, bodies and headers.
        codec_error: the largest relative error that a codec made in any sample; 0 where nothing was lost.
        skipped: samples that could not be read; they have no row.
    """

    out: str
    samples: int
    shape: tuple[int, ...]
    dtype: str
    seconds: float
    wire_bytes: int
    codec_error: float
    skipped: tuple[Skipped, ...]

    def to_json(self) -> dict[str, Any]:
        """A dictionary of plain values."""
        return {**asdict(self), "shape": list(self.shape), "skipped": [asdict(one) for one in self.skipped]}


def extract(settings: ExtractSettings, observe: Observer) -> Extracted:
    """Write the features of every readable sample; the file appears when it is whole.

    Raises:
        UserError: what the user can put right, a full disk among it.
        Unavailable: the node stayed away for longer than the loader's ``retry_for_s``.
    """
    make_folder(settings.out.parent)
    with set_up(settings.job, observe) as setup:
        started = time.perf_counter()
        if len(setup.job.frost_line.tensors) != 1:
            raise ModelError("extraction writes one tensor a sample, and several cross this frost line")
        observe(PhaseStarted(name="extracting"))
        rows = _write(settings.out, setup, iter(setup.job.loader(_ROWS)), observe)
        statistics = setup.job.statistics()
        return Extracted(
            out=str(settings.out),
            samples=rows,
            shape=setup.job.frost_line.shapes[0],
            dtype=setup.job.frost_line.dtypes[0],
            seconds=time.perf_counter() - started,
            wire_bytes=statistics.wire_bytes,
            codec_error=statistics.codec_error,
            skipped=statistics.skipped,
        )


def _write(out: Path, setup: Setup, batches: Iterator[Batch], observe: Observer) -> int:
    """Write all batches, and say how many rows they had."""
    names = dict(zip(setup.data.samples.ids.tolist(), setup.data.names, strict=True))
    tables = (_table(batch, names, setup.data.classes) for batch in batches)
    first = next(tables, None)
    if first is None:
        raise DataError(f"none of the {len(setup.data)} samples of {setup.data.url} can be read")
    rows = 0
    with writing(out) as file, pq.ParquetWriter(file, first.schema) as writer:
        for table in itertools.chain((first,), tables):
            writer.write_table(table)
            rows += table.num_rows
            observe(Counted(done=rows, total=len(setup.data)))
    return rows


def _table(batch: Batch, names: Mapping[int, str], classes: Sequence[str]) -> pa.Table:
    assert isinstance(batch.features, torch.Tensor)
    features = np.ascontiguousarray(batch.features.numpy())
    labels = batch.labels.tolist()
    return pa.table(
        {
            "id": pa.array(batch.ids.numpy()),
            "object": pa.array([names[id] for id in batch.ids.tolist()], pa.string()),
            "label": pa.array(batch.labels.numpy()),
            "class": pa.array([classes[label] for label in labels], pa.string()),
            "features": pa.FixedShapeTensorArray.from_numpy_ndarray(features),
        }
    )
