"""Runs a graph of texts at each text's own length: rows are sorted into buckets, and what comes out is padded again."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from frostline.core import Cut, Graph
from frostline.core.token_lengths import Lengths, at_length, buckets, needed_for, weightless
from frostline.engines.base.operators import resolve
from frostline.engines.base.protocols import Between
from frostline.engines.base.runner import Runner

__all__ = ("LengthRunner",)

# Tokens of a run on a CPU, about: enough for its cores' arithmetic. Each bucket always has the same rows in a run, so
# that a text's last bits depend on its length alone, and not on the texts beside it.
_TOKENS_AT_ONCE = 64


class LengthRunner:
    """A graph that takes ``int64[n, 2, max_length]``, ids and mask, ready to run up to any of its cuts.

    What no weight enters, such as a mask, is computed at the whole length; everything else at the least bucket that
    holds a text, with zeros behind it. Immutable but for what it keeps; threads may share it.

    Args:
        graph: graph of the network at the whole length.
        cuts: places where a run may stop, cut 1 (the input) first.
        leaves: values of ``graph.leaves``, where the graph runs.
        lengths: how the graph becomes one for fewer tokens.
        device: device on which the leaves are.
        resolve_op: see ``Runner``.
    """

    def __init__(
        self,
        graph: Graph,
        cuts: Sequence[Cut],
        leaves: Sequence[torch.Tensor],
        lengths: Lengths,
        *,
        device: torch.device | str = "cpu",
        resolve_op: Callable[[str], Callable[..., Any]] = resolve,
    ) -> None:
        self._graph, self._cuts, self._leaves, self._lengths = graph, cuts, leaves, lengths
        self._device, self._resolve = torch.device(device), resolve_op
        named = zip(graph.leaves, leaves, strict=True)
        self._light = weightless(
            graph, (name for (name, _), leaf in named if leaf.is_floating_point() and leaf.numel() > 1)
        )
        self._buckets = buckets(lengths.max_length)
        self._runners: dict[int, tuple[Runner, Sequence[Cut]]] = {}

    def takes(self, cut: int) -> bool:
        """Whether a run up to a cut is any shorter: nothing may cross that has the tokens in two dimensions.

        Such are scores of attention, in which a zero is no padding.
        """
        crossing = zip(self._cuts[cut - 1].tensors, self._lengths.shapes[cut - 1], strict=True)
        heavy = [grows for name, grows in crossing if name not in self._light]
        return bool(heavy) and all(sum(map(bool, grows)) <= 1 for grows in heavy)

    def run(self, batch: torch.Tensor, cut: int, between: Between | None = None) -> tuple[torch.Tensor, ...]:
        """What crosses a cut, with the shapes that it declares.

        Args:
            batch: ids and mask ``int64[n, 2, max_length]``, padded on the right.
            cut: number of a cut that ``takes`` allows.
            between: see ``Runner.run``.
        """
        stop = self._cuts[cut - 1]
        crossing = zip(stop.tensors, stop.shapes, stop.dtypes, strict=True)
        light = [name for name in stop.tensors if name in self._light]
        whole = dict(zip(light, self._whole(batch, light, between), strict=True))
        made = [
            whole[name]
            if name in whole
            else torch.zeros((len(batch), *shape), dtype=getattr(torch, dtype), device=self._device)
            for name, shape, dtype in crossing
        ]
        for length, rows, filled in self._runs(batch):
            runner, cuts = self._runner(length)
            some = batch[filled][:, :, :length].contiguous()
            given = runner.run([some], self._leaves, upto=cuts[cut - 1], between=between)
            for name, out, value in zip(stop.tensors, made, given, strict=True):
                if name not in whole:
                    _put(out, rows, value)
        return tuple(made)

    def _whole(self, batch: torch.Tensor, names: Sequence[str], between: Between | None) -> tuple[Any, ...]:
        """Values that no weight enters, at the whole length."""
        if not names:
            return ()
        part = Runner(needed_for(self._graph, names), device=self._device, resolve_op=self._resolve)
        return part.run([batch], self._leaves, between=between)

    def _runs(self, batch: torch.Tensor) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Runs to be made: their length, the rows that they are for, and the rows with some again to fill it up."""
        places = torch.arange(1, batch.shape[2] + 1, device=batch.device)
        tokens = (batch[:, 1].ne(0) * places).amax(1)
        bounds = torch.tensor(self._buckets, device=batch.device)
        taken = torch.searchsorted(bounds, tokens)
        for number in sorted(set(taken.tolist())):
            rows, length = (taken == number).nonzero()[:, 0], self._buckets[number]
            at_once = max(1, _TOKENS_AT_ONCE // length) if self._device.type == "cpu" else len(rows)
            for some in torch.split(rows, at_once):
                yield length, some, torch.cat([some, some[-1:].expand(at_once - len(some))])

    def _runner(self, length: int) -> tuple[Runner, Sequence[Cut]]:
        if length not in self._runners:
            graph, cuts = at_length(self._graph, self._cuts, self._lengths, length)
            self._runners[length] = Runner(graph, cuts=cuts, device=self._device, resolve_op=self._resolve), cuts
        return self._runners[length]


def _put(out: torch.Tensor, rows: torch.Tensor, value: torch.Tensor) -> None:
    """Write the first rows of what a run gave into some rows, at the beginning of every dimension."""
    corner = out[(slice(None), *(slice(0, size) for size in value.shape[1:]))]
    corner[rows] = value[: len(rows)]
