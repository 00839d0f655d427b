"""Reads a data set, or features of it, as a data set of Ray Data: each read task has a range of the manifest's rows."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import ray
from ray.data import Datasource, ReadTask
from ray.data.block import Block, BlockAccessor, BlockMetadata

from frostline.core.config import check_type
from frostline.core.errors import SettingError
from frostline.core.units import log_named
from frostline.datasets import Dataset
from frostline.jobs.offload import offload
from frostline.jobs.workers import RowReader
from frostline.loaders.row_source import Arrays
from frostline.ray.tasks import row_ranges

if TYPE_CHECKING:
    from torch import nn

__all__ = ("RowDatasource", "read")

_LOG = log_named("frostline")
# A task that starts opens connections; this many rows make that a small part.
_MIN_ROWS = 256


def read(
    data: Dataset,
    model: "nn.Module | None" = None,
    *,
    near: str | Sequence[str] | None = None,
    batch_size: int = 256,
    label: str | None = None,
    targets: bool | None = None,
    **options: Any,
) -> "ray.data.Dataset":
    """A data set of Ray Data with a row for each readable sample: ``id``, ``label``, ``features`` and targets.

    The job is made once, here: the network is traced, brought to the nodes, and an engine chosen. Read tasks ask the
    nodes for ranges of the manifest's rows, in its order; one that Ray runs again gives the same rows again, and no
    row comes twice. With ``near="ray://NAMESPACE"`` they follow nodes that come and go. Samples without a row, and
    rows that are not finite where these are allowed, are logged by the task that read them, with the first by name:
    Ray brings that to whoever joined it, but not a Ray that ``frostline cluster up`` has started, which keeps it with
    its own logs.

    Args:
        data: the samples.
        model: network of which the frozen part runs at the nodes; None gives preprocessed pixels.
        near: the URLs as ``offload`` takes it; without nodes each process that runs read tasks reads and computes
            itself.
        batch_size: rows of a block.
        label: label of the hosts on which read tasks run, as ``KEY=VALUE``; None lets Ray choose.
        targets: True gives targets, as for ``Job.loader``.
        **options: keyword arguments of ``offload``, such as ``preprocess`` and ``accuracy``.

    Raises:
        SettingError: An argument makes no sense.
        FrostlineError: The job cannot be made; see ``offload``.
    """
    check_type("data", data, Dataset)
    if label is not None and not all(label.partition("=")):
        raise SettingError(f"label= takes KEY=VALUE, such as store=photos, not {label!r}")
    with offload(model, data, near=near, **options) as job:
        row_bytes = job.frost_line.bytes_per_sample
        reader, rows = job.row_reader(batch_size), len(job.data)
    remote: dict[str, Any] = {}
    if label is not None:
        key, _, value = label.partition("=")
        remote["ray_remote_args"] = {"label_selector": {key: value}}
    source = RowDatasource(reader, rows, row_bytes, targets=targets)
    found: ray.data.Dataset = ray.data.read_datasource(source, **remote)
    return found


class RowDatasource(Datasource):
    """A data source of Ray Data over the rows of a job's data.

    Args:
        reader: reader of the samples.
        rows: the number of rows.
        row_bytes: bytes of the features of a row.
        targets: True gives targets, as for ``Job.loader``.
    """

    def __init__(self, reader: RowReader, rows: int, row_bytes: int, *, targets: bool | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._reader = ray.put(reader)
        self._rows = rows
        self._row_bytes = row_bytes
        self._targets = targets

    def get_name(self) -> str:
        """The name of its tasks."""
        return "Frostline"

    def estimate_inmemory_data_size(self) -> int:
        """Bytes of all rows."""
        return self._rows * self._row_bytes

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: Any = None
    ) -> list[ReadTask]:
        """Tasks of neighbouring rows, at most so many.

        Args:
            parallelism: number of tasks that Ray wants.
            per_task_row_limit: maximum number of rows that a task gives.
            data_context: settings of Ray Data, which change nothing here.
        """
        del data_context
        return [
            self._task(rows, per_task_row_limit) for rows in row_ranges(self._rows, parallelism, min_rows=_MIN_ROWS)
        ]

    def _task(self, rows: range, limit: int | None) -> ReadTask:
        reader, targets = self._reader, self._targets
        about = BlockMetadata(
            num_rows=None,  # samples that cannot be read have no row
            size_bytes=len(rows) * self._row_bytes,
            input_files=None,
            exec_stats=None,
        )
        return ReadTask(lambda: _blocks(reader, rows, targets=targets), about, per_task_row_limit=limit)


def _blocks(reader: Any, rows: range, *, targets: bool | None) -> Iterator[Block]:
    """In a task: the blocks of some rows; what is amiss with them is logged, which Ray brings to who reads."""
    found: RowReader = ray.get(reader)
    wanted, before = np.array(rows, np.int64), found.received_bytes()
    for batch in found.batches(wanted, targets=targets):
        yield BlockAccessor.batch_to_block(_columns(batch))
    done = found.rows_done(wanted, before)
    if done.skipped:
        one = done.skipped[0]
        _LOG.warning(
            "%d of rows %d to %d could not be read, such as %s: %s",
            len(done.skipped),
            rows.start,
            rows.stop - 1,
            one.object,
            one.reason,
        )
    if done.nonfinite:
        _LOG.warning(
            "%d of rows %d to %d are not finite; %s",
            done.nonfinite,
            rows.start,
            rows.stop - 1,
            done.first_nonfinite,
        )


def _columns(batch: Arrays) -> dict[str, npt.NDArray[Any]]:
    features = batch.features if isinstance(batch.features, tuple) else (batch.features,)
    names = ["features", *(f"features_{number}" for number in range(1, len(features)))]
    columns = {"id": batch.ids, "label": batch.labels, **dict(zip(names, features, strict=True))}
    targets = batch.targets
    if targets is None:
        return columns
    named = targets if isinstance(targets, dict) else {"target": targets}
    return columns | {name: _column(values) for name, values in named.items()}


def _column(values: Any) -> npt.NDArray[Any]:
    """Values of one shape as they are; others as objects."""
    if isinstance(values, np.ndarray):
        return values
    column = np.empty(len(values), np.object_)
    column[:] = values
    return column
