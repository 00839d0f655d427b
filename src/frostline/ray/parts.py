"""Reads parts of a job's data in tasks of Ray, and hands each out once when it is whole."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from frostline.jobs.row_reader import RowReader, RowsDone
from frostline.ray.tasks import RETRIED, results

__all__ = ("PartRows", "parts_by_ray")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PartRows:
    """The rows of a part that could be read.

    Attributes:
        number: number of the part.
        ids: ids of the samples.
        features: their features, one tensor a sample.
        done: cost of reading them.
    """

    number: int
    ids: npt.NDArray[np.int64]
    features: npt.NDArray[Any]
    done: RowsDone


def parts_by_ray(ray: Any, reader: RowReader, rows: Mapping[int, npt.NDArray[np.int64]]) -> Iterator[PartRows]:
    """Parts in the order in which they become whole.

    A task whose process dies, or whose nodes are away for too long, is run again by Ray; what it had read then is
    lost, and so no row comes twice.

    Args:
        ray: the package, of a process that has joined it.
        reader: reads rows.
        rows: rows of each part, by its number.

    Raises:
        FrostlineError: A part cannot be read; as the job itself would say.
        NodeUnreachable: Ray has lost a task too often.
    """
    there = ray.put(reader)
    task = ray.remote(_part).options(**RETRIED)
    for _, part in results(ray, lambda part: task.remote(there, *part), rows.items()):
        yield part


def _part(reader: RowReader, number: int, rows: npt.NDArray[np.int64]) -> PartRows:
    """In a task: the rows of a part."""
    before = reader.received_bytes()
    batches = list(reader.batches(rows, targets=False))
    features = [batch.features for batch in batches if not isinstance(batch.features, tuple)]
    return PartRows(
        number=number,
        ids=np.concatenate([np.zeros(0, np.int64), *(batch.ids for batch in batches)]),
        features=np.concatenate(features) if features else np.zeros(0),
        done=reader.done(rows, before),
    )
