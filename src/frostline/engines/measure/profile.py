"""How long a prefix takes up to each cut, and what crosses there: one instrumented run gives them all."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from frostline.core import Cut, Graph
from frostline.engines.base.protocols import Arrays, Between
from frostline.engines.base.runner import Runner, as_array, input_tensors

__all__ = ("cut_seconds", "cut_values")


def cut_seconds(
    graph: Graph,
    leaves: Sequence[torch.Tensor],
    cuts: Sequence[Cut],
    inputs: Arrays,
    *,
    repeats: int,
    clock: Callable[[], float],
    between: Between | None = None,
) -> npt.NDArray[np.float64]:
    """Seconds a sample from the network's input to each cut.

    A run is timed node by node; the sum up to a cut is within 10 % of a run of that part alone.

    Args:
        graph: from the network's input to the frost line.
        leaves: its tensors.
        cuts: cut 1 and higher.
        inputs: real samples, an array ``[n, ...]`` for each input of the network, or the one.
        repeats: measured runs, after one to warm up.
        clock: monotonic seconds.
        between: as for ``Runner.run``; what it takes is not measured.

    Returns:
        ``float64[repeats, len(cuts)]``.
    """
    device = _device_of(leaves)
    runner = Runner(graph, device=device)
    batch = input_tensors(inputs, device)
    rows = [_run(runner, batch, leaves, clock, between) for _ in range(repeats + 1)][1:]
    stops = [cut.after + 1 for cut in cuts]
    return np.array([[row[stop] for stop in stops] for row in rows]) / len(batch[0])


def cut_values(
    graph: Graph,
    leaves: Sequence[torch.Tensor],
    cuts: Sequence[Cut],
    inputs: Arrays,
    between: Between | None = None,
) -> dict[int, tuple[npt.NDArray[np.generic], ...]]:
    """What crosses each of some cuts for the same samples, from one run.

    Args:
        graph: from the network's input to the frost line.
        leaves: its tensors.
        cuts: any of cut 1 and higher.
        inputs: as for ``cut_seconds``.
        between: as for ``Runner.run``.

    Returns:
        By the cut's number one C-contiguous array ``[n, ...]`` for each tensor that crosses; copies, which nothing
        else holds.
    """
    device = _device_of(leaves)
    runner = Runner(graph, cuts=cuts, device=device)
    standing: dict[int, list[Cut]] = {}
    for cut in cuts:
        standing.setdefault(cut.after, []).append(cut)
    found: dict[int, tuple[npt.NDArray[np.generic], ...]] = {}

    def observe(index: int, values: Sequence[Any]) -> None:
        # Copied at once: the next operation may work in place.
        for cut in standing.get(index, ()):
            found[cut.number] = tuple(_copied(tensor) for tensor in runner.crossing(cut, values))

    batch = input_tensors(inputs, device)
    with torch.inference_mode():
        observe(-1, [*batch, *leaves])
        last = max(cuts, key=lambda cut: cut.after, default=None)
        runner.run(batch, leaves, upto=last, observe=observe, between=between)
    return found


def _copied(tensor: torch.Tensor) -> npt.NDArray[np.generic]:
    return as_array(tensor.clone(memory_format=torch.contiguous_format))


def _device_of(leaves: Sequence[torch.Tensor]) -> torch.device:
    return leaves[0].device if leaves else torch.device("cpu")


def _run(
    runner: Runner,
    batch: Sequence[torch.Tensor],
    leaves: Sequence[torch.Tensor],
    clock: Callable[[], float],
    between: Between | None,
) -> list[float]:
    """Seconds since the start, at the start and after each node."""
    marks: list[float] = []
    away_s = 0.0

    def observe(_: int, __: Sequence[Any]) -> None:
        if batch[0].is_cuda:
            torch.cuda.synchronize(batch[0].device)
        marks.append(clock() - away_s)

    def rest() -> None:
        nonlocal away_s
        began = clock()
        assert between is not None, "it is called where there is one"
        between()
        away_s += clock() - began

    with torch.inference_mode():
        start = clock()
        runner.run(batch, leaves, observe=observe, between=None if between is None else rest)
    return [0.0, *(mark - start for mark in marks)]
