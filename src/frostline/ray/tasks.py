"""Hands tasks to Ray, a few at a time: parts of a job's data to read, and parts of a copy to make."""

import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from frostline.core.errors import FrostlineError, NodeUnreachable, Unavailable
from frostline.datasets.copy.parts import CopyPart, CopyPlan, PartCopier, PartRunner
from frostline.jobs.workers import RowReader, RowsDone

__all__ = (
    "PartRows",
    "parts_by_ray",
    "ray_runner",
    "results",
    "row_ranges",
)


# Neighbouring rows of this many have one owner among the nodes, so no task should have half of them.
_BLOCK = 64


def row_ranges(rows: int, tasks: int, *, min_rows: int) -> list[range]:
    """Neighbouring rows for each task, all of them once; of as many tasks as are wanted, or fewer.

    Args:
        rows: the number of rows.
        tasks: number of tasks that are wanted.
        min_rows: minimum rows of every task but the last.
    """
    each = max(min_rows, -(-rows // max(1, tasks)))
    each = -(-each // _BLOCK) * _BLOCK
    return [range(start, min(rows, start + each)) for start in range(0, rows, each)]


T = TypeVar("T")

_RETRIED = {"num_cpus": 1, "max_retries": 5, "retry_exceptions": [Unavailable]}
"""Options of a task that Ray runs again where its process dies, or what it asks is away for too long."""

# Tasks handed to Ray for each of its processors: one runs, and the next one waits for it.
_PER_CPU = 2


def results(ray: Any, start: Callable[[T], Any], parts: Iterable[T]) -> Iterator[tuple[T, Any]]:
    """Parts with the results of their tasks, in the order in which these end.

    Ray is handed twice as many tasks as it has processors, so that few results wait in memory.

    Args:
        ray: the package, of a process that has joined it.
        start: function that hands the task of a part to Ray, and gives the reference of its result.
        parts: the parts, taken as tasks end.

    Raises:
        FrostlineError: A task failed with it.
        NodeUnreachable: Ray has lost a task too often.
    """
    waiting, at_once = iter(parts), max(2, int(_PER_CPU * ray.cluster_resources().get("CPU", 1)))
    under_way: dict[Any, T] = {}
    while True:
        for part in waiting:
            under_way[start(part)] = part
            if len(under_way) >= at_once:
                break
        if not under_way:
            return
        (whole, *_), _ = ray.wait(list(under_way), num_returns=1)
        yield under_way.pop(whole), _got(ray, whole)


def _got(ray: Any, whole: Any) -> Any:
    try:
        return ray.get(whole)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, FrostlineError):
            raise error.cause from error
        raise
    except ray.exceptions.RayError as error:
        raise NodeUnreachable(f"Ray lost a task again and again: {error}; see its logs, and run it again") from error


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PartRows:
    """The rows of a part that could be read."""

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
        reader: reader of the rows.
        rows: rows of each part, by its number.

    Raises:
        FrostlineError: A part cannot be read; as the job itself would say.
        NodeUnreachable: Ray has lost a task too often.
    """
    there = ray.put(reader)
    task = ray.remote(_part).options(**_RETRIED)
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
        done=reader.rows_done(rows, before),
    )


def ray_runner(ray: Any) -> PartRunner:
    """Has the parts of a copy made in tasks of Ray, for ``runner=`` of whatever copies.

    What is there of a part is a task of its own, whose result Ray keeps. So the one that writes begins with the same
    however often it is run: it writes the same bytes to the same names, and its counts are those of a single run.

    Args:
        ray: the package, of a process that has joined it.
    """
    return partial(_made, ray)


def _made(ray: Any, plan: CopyPlan, parts: Iterable[CopyPart]) -> Iterator[tuple[CopyPart, Any]]:
    # In a list it is not fetched for every task, but once by a process.
    key, there = uuid.uuid4().hex, [ray.put(plan)]
    look, make = (ray.remote(task).options(**_RETRIED) for task in (_look, _make))
    return results(ray, lambda part: make.remote(key, there, part, look.remote(key, there, part)), parts)


def _look(key: str, plan: list[Any], part: CopyPart) -> Any:
    """In a task: what is there of a part."""
    return _OPENED.copier(key, plan).look(part)


def _make(key: str, plan: list[Any], part: CopyPart, before: Any) -> Any:
    """In a task: the result of a part that was written."""
    return _OPENED.copier(key, plan).make(part, before).result()


class _Opened:
    """The copy that is open in this process, which runs one task at a time: its connections stay for the next part."""

    def __init__(self) -> None:
        self._key = ""
        self._copier: PartCopier | None = None
        self._stack = ExitStack()

    def copier(self, key: str, plan: list[Any]) -> PartCopier:
        if self._copier is None or self._key != key:
            import ray

            self._stack.close()
            found: CopyPlan = ray.get(plan[0])
            self._key, self._copier = key, found.open(self._stack)
        return self._copier


_OPENED = _Opened()
