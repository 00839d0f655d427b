"""Runs a call while its client waits for it, and cancels it when the client disconnects."""

import math
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import TypeVar

import anyio
from anyio import CancelScope, CapacityLimiter, create_task_group, to_thread
from starlette.types import Receive

from frostline.errors import FrostlineError, Unavailable
from frostline.node.scheduling.memory_pool import Abandoned

__all__ = ("run_while_connected",)

T = TypeVar("T")


async def run_while_connected(
    receive: Receive,
    call: Callable[[], T],
    give_up: Callable[[], None],
    threads: CapacityLimiter,
    deadline_s: float = math.inf,
) -> T:
    """Run a call in a thread, and cancel it when the client disconnects or its deadline passes.

    Args:
        receive: ASGI receive function, which reports the disconnect; the body was read before.
        call: call to run.
        give_up: makes the call end soon; safe from any thread.
        threads: limiter of the threads.
        deadline_s: seconds after which the call is cancelled.

    Raises:
        FrostlineError: any error of the call.
        Unavailable: if it was cancelled.
    """
    async with create_task_group() as group:
        group.start_soon(_watch, receive, give_up, threads)
        if deadline_s < math.inf:
            group.start_soon(_expire, deadline_s, give_up, threads)
        made = await to_thread.run_sync(_outcome, call, limiter=threads)
        group.cancel_scope.cancel()
    if isinstance(made, FrostlineError):
        raise made
    return made


async def _watch(receive: Receive, give_up: Callable[[], None], threads: CapacityLimiter) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    with CancelScope(shield=True):
        await to_thread.run_sync(give_up, limiter=threads)


async def _expire(deadline_s: float, give_up: Callable[[], None], threads: CapacityLimiter) -> None:
    await anyio.sleep(deadline_s)
    with CancelScope(shield=True):
        await to_thread.run_sync(give_up, limiter=threads)


def _outcome(call: Callable[[], T]) -> T | FrostlineError:
    """Run the call; its error is returned as a value, because a task group would wrap it."""
    try:
        return call()
    except FrostlineError as error:
        return error
    except (Abandoned, CancelledError):
        return Unavailable("this was cancelled: its deadline has passed, its client has gone, or the node is stopping")
