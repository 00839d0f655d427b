"""Makes the parts of a copy in tasks of Ray: one whose process dies is run again, and writes the same once more."""

import uuid
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

from frostline.datasets.copy.parts import CopyPart, CopyPlan, PartCopier, PartRunner
from frostline.ray.tasks import RETRIED, results

__all__ = ("made_by_ray",)


def made_by_ray(ray: Any) -> PartRunner:
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
    look, make = (ray.remote(task).options(**RETRIED) for task in (_look, _make))
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
