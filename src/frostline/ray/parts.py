"""Reads parts of a job's data in tasks of Ray, and hands each out once when it is whole."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from frostline.errors import FrostlineError, NodeUnreachable, Unavailable
from frostline.jobs.row_reader import RowReader, RowsDone

__all__ = ("PartRows", "parts_by_ray")

# Tasks handed to Ray for each of its processors: one runs, and the next one waits for it.
_PER_CPU = 2


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

    Ray is handed twice as many tasks as it has processors, so that few parts wait in memory.

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
    task = ray.remote(_part).options(num_cpus=1, max_retries=5, retry_exceptions=[Unavailable])
    waiting, at_once = iter(rows.items()), max(2, int(_PER_CPU * ray.cluster_resources().get("CPU", 1)))
    under_way: list[Any] = []
    while True:
        while len(under_way) < at_once and (part := next(waiting, None)) is not None:
            under_way.append(task.remote(there, *part))
        if not under_way:
            return
        (whole, *_), under_way = ray.wait(under_way, num_returns=1)
        yield _got(ray, whole)


def _got(ray: Any, whole: Any) -> PartRows:
    try:
        found: PartRows = ray.get(whole)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, FrostlineError):
            raise error.cause from error
        raise
    except ray.exceptions.RayError as error:
        raise NodeUnreachable(f"Ray lost a task again and again: {error}; see its logs, and run it again") from error
    return found


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
