"""Hands tasks to Ray, a few at a time, and gives what they return as they end."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from frostline.errors import FrostlineError, NodeUnreachable, Unavailable

__all__ = ("RETRIED", "results")

T = TypeVar("T")

RETRIED = {"num_cpus": 1, "max_retries": 5, "retry_exceptions": [Unavailable]}
"""Options of a task that Ray runs again where its process dies, or what it asks is away for too long."""

# Tasks handed to Ray for each of its processors: one runs, and the next one waits for it.
_PER_CPU = 2


def results(ray: Any, start: Callable[[T], Any], parts: Iterable[T]) -> Iterator[tuple[T, Any]]:
    """Parts with the results of their tasks, in the order in which these end.

    Ray is handed twice as many tasks as it has processors, so that few results wait in memory.

    Args:
        ray: the package, of a process that has joined it.
        start: hands the task of a part to Ray, and gives the reference of its result.
        parts: taken as tasks end.

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
