"""How long a prefix takes up to each cut: one instrumented run gives them all."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from frostline.core import Cut, Graph
from frostline.engines.runner import Runner

__all__ = ("cut_seconds",)


def cut_seconds(
    graph: Graph,
    leaves: Sequence[torch.Tensor],
    cuts: Sequence[Cut],
    pixels: npt.NDArray[np.float32],
    *,
    repeats: int,
    clock: Callable[[], float],
) -> npt.NDArray[np.float64]:
    """Seconds a sample from pixels to each cut.

    A run is timed node by node; the sum up to a cut is within 10 % of a run of that part alone.

    Args:
        graph: from pixels to the frost line.
        leaves: its tensors.
        cuts: cut 1 and higher.
        pixels: ``float32[n, C, H, W]``, real samples.
        repeats: measured runs, after one to warm up.
        clock: monotonic seconds.

    Returns:
        ``float64[repeats, len(cuts)]``.
    """
    runner = Runner(graph, device=leaves[0].device if leaves else "cpu")
    batch = torch.from_numpy(pixels).to(leaves[0].device if leaves else "cpu")
    rows = [_run(runner, batch, leaves, clock) for _ in range(repeats + 1)][1:]
    stops = [cut.after + 1 for cut in cuts]
    return np.array([[row[stop] for stop in stops] for row in rows]) / len(pixels)


def _run(
    runner: Runner, batch: torch.Tensor, leaves: Sequence[torch.Tensor], clock: Callable[[], float]
) -> list[float]:
    """Seconds since the start, at the start and after each node."""
    marks: list[float] = []

    def observe(_: int, __: Sequence[Any]) -> None:
        if batch.is_cuda:
            torch.cuda.synchronize(batch.device)
        marks.append(clock())

    with torch.inference_mode():
        start = clock()
        runner.run([batch], leaves, observe=observe)
    return [0.0, *(mark - start for mark in marks)]
