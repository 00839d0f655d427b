"""Runs a trained network over a data set, and writes what it says of each sample as a table."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import torch

from frostline.core.errors import ModelError
from frostline.core.events import Observer, PhaseStarted, ProgressMade
from frostline.core.units import printable
from frostline.datasets import Dataset
from frostline.datasets.formats.left_out import LeftOut, json_of
from frostline.loaders import Loader
from frostline.training.run_config import RunConfig, atomic_file
from frostline.training.settings import JobSettings
from frostline.training.setup import Setup, set_up
from frostline.training.start import StartedJob

__all__ = ("Predictions", "next_rows", "predict")

_LABELS, _NUMBERS = "labels", "numbers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictions:
    """What was predicted, in short.

    Attributes:
        run: folder of the run whose network was used.
        data: URL of the data.
        out: file that has the table; None where it went to ``stdout``.
        samples: number of samples with a prediction.
        skipped: number of samples that could not be read.
        left_out: parts of the data that are no samples, and have no row.
        nonfinite: number of samples for which the frozen layers gave Inf or NaN.
        first_nonfinite: the first row with Inf or NaN, in words: its sample, cut, dtype and engine; empty if there is
            none.
        counts: number of samples of each class or label, the most frequent first; empty for numbers.
        seconds: whole time.
        setup_s: seconds of it until the first sample was asked for.
        wire_bytes: bytes that came from the node.
    """

    run: str
    data: str
    out: str | None
    samples: int
    skipped: int
    left_out: tuple[LeftOut, ...]
    nonfinite: int
    first_nonfinite: str
    counts: Mapping[str, int]
    seconds: float
    setup_s: float
    wire_bytes: int

    def to_json(self) -> dict[str, Any]:
        """The same as plain values."""
        return {**asdict(self), "left_out": json_of(self.left_out)}


def predict(
    run: Path,
    job: JobSettings,
    on_event: Observer,
    *,
    batch_size: int,
    out: Path | None,
    stdout: BinaryIO,
    begun: StartedJob | None = None,
    began_at: float | None = None,
) -> Predictions:
    """Write a table with a row for each sample: its object, the prediction, and the probability where there is one.

    Args:
        run: folder of the run whose network is used.
        job: settings of the job, with that network.
        on_event: function that is called with each event.
        batch_size: number of samples that the head is given at a time.
        out: ``.csv`` or ``.parquet`` file, which appears when it is whole; None writes CSV to ``stdout``.
        stdout: stream for the table where there is no file.
        begun: work that has begun already, which the caller ends; None begins here.
        began_at: the time since when seconds count, as ``time.perf_counter`` does; now by default.

    Raises:
        UserError: The user can mend what is wrong: the run's folder, data, node or settings.
    """
    began_at = time.perf_counter() if began_at is None else began_at
    config = RunConfig.read(run)
    counts: Counter[str] = Counter()
    samples = 0
    with set_up(job, on_event, begun=begun) as setup, _table(out, stdout, job.learns) as write:
        setup_s = time.perf_counter() - began_at
        on_event(PhaseStarted(name="predicting"))
        for rows, scores in _scored(setup, batch_size):
            table = _rows(setup.data, rows, scores, job.learns, config.classes)
            write(table)
            counts.update(_named(table, job.learns))
            samples += len(table)
            on_event(ProgressMade(done=samples, total=len(setup.data)))
        statistics = setup.job.statistics()
    return Predictions(
        run=str(run),
        data=setup.data.url,
        out=None if out is None else str(out),
        samples=samples,
        skipped=len(statistics.skipped),
        left_out=setup.whole.manifest.left_out,
        nonfinite=statistics.nonfinite,
        first_nonfinite=statistics.first_nonfinite,
        counts=dict(counts.most_common()),
        seconds=time.perf_counter() - began_at,
        setup_s=setup_s,
        wire_bytes=statistics.wire_bytes,
    )


@torch.no_grad()
def _scored(setup: Setup, batch_size: int) -> Iterator[tuple[np.ndarray, torch.Tensor]]:
    """Rows of the data set, ``int64[n]``, and their scores, ``float32[n, outputs]``."""
    head = setup.job.head.eval()
    loader: Loader = setup.job.loader(
        batch_size=batch_size, data=setup.data, preprocess=setup.network.plain_preprocess, targets=False
    )
    begin = 0
    for batch in loader:
        scores = head(batch.features)
        if not isinstance(scores, torch.Tensor) or scores.ndim != 2:
            raise ModelError("the network must give a tensor of scores [batch, outputs], and it gives none")
        rows = next_rows(setup.data.samples.ids, np.asarray(batch.ids), begin)
        begin = int(rows[-1]) + 1
        yield rows, scores.float()


def next_rows(ids: npt.NDArray[np.int64], wanted: npt.NDArray[np.int64], begin: int) -> npt.NDArray[np.int64]:
    """Rows of ids that come in the order of their table, looked for near where the last ones stood.

    Args:
        ids: ids of the whole table, of which only a range is looked at.
        wanted: one id at least, in that order; between two of them others may be left out.
        begin: the first row at which one of them may stand.
    """
    width = len(wanted)
    while True:
        stretch = ids[begin : begin + width]
        rows = np.flatnonzero(np.isin(stretch, wanted))
        if len(rows) == len(wanted):
            return rows + begin
        assert begin + width < len(ids), "each id stands in the table, behind those before it"
        width *= 2


def _rows(data: Dataset, rows: np.ndarray, scores: torch.Tensor, task: str, classes: Sequence[str]) -> pa.Table:
    objects = pa.array([data.names[int(row)] for row in rows], pa.string())
    if task == _NUMBERS:
        values = scores.numpy()
        kept = values[:, 0].tolist() if values.shape[1] == 1 else values.tolist()
        return pa.table({"object": objects, "prediction": [_as_text(value) for value in kept]})
    names = classes or [str(number) for number in range(scores.shape[1])]
    if task == _LABELS:
        likely = scores.sigmoid()
        said = [[name for name, value in zip(names, row, strict=True) if value > 0.5] for row in likely.tolist()]
        return pa.table(
            {
                "object": objects,
                "prediction": [";".join(labels) for labels in said],
                "probabilities": [_as_text(row) for row in likely.tolist()],
            }
        )
    likely, best = scores.softmax(1).max(1)
    return pa.table(
        {
            "object": objects,
            "prediction": [names[number] for number in best.tolist()],
            "probability": pa.array(likely.numpy(), pa.float32()),
        }
    )


def _as_text(value: float | Sequence[float]) -> str:
    """Numbers as a column of text has them, with as many digits as a 32-bit float."""
    return f"{value:.9g}" if isinstance(value, float) else ";".join(f"{item:.9g}" for item in value)


def _named(table: pa.Table, task: str) -> Iterator[str]:
    if task != _NUMBERS:
        for prediction in table["prediction"].to_pylist():
            yield from prediction.split(";") if task == _LABELS and prediction else [prediction] * (task != _LABELS)


def _show(writer: pyarrow.csv.CSVWriter, table: pa.Table) -> None:
    for place, field in enumerate(table.schema):
        if field.type == pa.string():
            shown = pa.array([printable(text) for text in table[field.name].to_pylist()], pa.string())
            table = table.set_column(place, field, shown)
    writer.write_table(table)


@contextmanager
def _table(out: Path | None, stdout: BinaryIO, task: str) -> Iterator[Callable[[pa.Table], None]]:
    """Give what writes tables of one schema, one after another."""
    names = {_LABELS: ("object", "prediction", "probabilities"), _NUMBERS: ("object", "prediction")}.get(
        task, ("object", "prediction", "probability")
    )
    schema = pa.schema([(name, pa.float32() if name == "probability" else pa.string()) for name in names])
    if out is None:
        with pyarrow.csv.CSVWriter(stdout, schema) as writer:
            # A terminal follows what a file only holds.
            yield partial(_show, writer) if stdout.isatty() else writer.write_table
        return
    kind = pq.ParquetWriter if out.suffix == ".parquet" else pyarrow.csv.CSVWriter
    with atomic_file(out) as file, kind(file, schema) as writer:
        yield writer.write_table
