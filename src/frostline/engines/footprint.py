"""How much memory a prefix needs: a dry run on tensors without data, keeping count of what lives."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from frostline.core import Cut, Graph, Node
from frostline.core.graph import references
from frostline.engines.operators import resolve_allowed
from frostline.engines.runner import Runner
from frostline.errors import UnsafeArtifact

__all__ = ("Footprint", "dry_run")


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Memory of one run at its peak: ``fixed_bytes + batch * bytes_per_sample``, weights not counted."""

    fixed_bytes: int
    bytes_per_sample: int

    def at(self, batch: int) -> int:
        """Bytes for one batch of this many samples."""
        return self.fixed_bytes + batch * self.bytes_per_sample


def dry_run(
    graph: Graph, leaves: Sequence[torch.Tensor], cuts: Sequence[Cut], *, most_rows: int = 32
) -> dict[int, Footprint]:
    """Run a prefix on shapes alone: the memory up to each cut, by its number.

    No tensor gets data, so that a graph that asks for too much is refused before it runs, and nothing that the
    graph says of itself is believed. It is run at every batch that may come, so that none takes more than the line.

    Args:
        graph: from pixels to the frost line.
        leaves: its tensors, in the order of ``graph.leaves``.
        cuts: the places where it may stop; cut 1 first, whose shape is the input's.
        most_rows: the largest batch, a multiple of 8; all multiples up to it are tried.

    Raises:
        UnsafeArtifact: It does not run on its input, does not give what its cuts declare, or its memory does not
            grow in line with the batch.
    """
    runner = Runner(graph, device="meta", resolve_op=resolve_allowed)
    bare = [torch.empty_like(leaf, device="meta") for leaf in leaves]
    rows = range(_BATCH, max(most_rows, 2 * _BATCH) + 1, _BATCH)
    small, large, *others = [_Trail(graph, runner, bare, (batch, *cuts[0].shapes[0])) for batch in rows]
    found = {}
    for cut in cuts:
        small.check(cut)
        line = found[cut.number] = _line(small.peak(cut.after), large.peak(cut.after))
        if any(trail.peak(cut.after) > line.at(batch) for batch, trail in zip(rows[2:], others, strict=True)):
            raise UnsafeArtifact(f"the memory up to cut {cut.number} does not grow in line with the batch")
    return found


_BATCH = 8
# What an operator of a hostile or broken graph may raise on shapes.
_BROKEN = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)


def _line(low: int, high: int) -> Footprint:
    """The line through the peaks at two batch sizes, rounded up."""
    per_sample = max(0, -(-(high - low) // _BATCH))
    return Footprint(fixed_bytes=max(0, low - _BATCH * per_sample), bytes_per_sample=per_sample)


class _Trail:
    """What a dry run at one batch leaves: the most bytes up to each node, and every value's shape."""

    def __init__(self, graph: Graph, runner: Runner, leaves: list[torch.Tensor], shape: tuple[int, ...]) -> None:
        self._graph = graph
        self._rows = shape[0]
        self._first = 1 + len(leaves)
        self._places = {name: place for place, name in enumerate(_names(graph))}
        self._resting = {_key(leaf) for leaf in leaves}
        self._last_uses = runner.last_uses
        self._holders: Counter[StorageWeakRef] = Counter()
        self._live = 0
        self._made: list[Any] = []
        self._peaks: list[int] = []
        try:
            batch = torch.empty(shape, device="meta")
            self._hold(batch)
            self._made.append(batch)
            self._peaks.append(self._live)
            with torch.no_grad():
                runner.run([batch], leaves, observe=self._observe)
        except _BROKEN as error:
            why = str(error).partition("\n")[0] or type(error).__name__
            raise UnsafeArtifact(f"the graph does not run on an input of shape {list(shape)}: {why}") from error

    def peak(self, after: int) -> int:
        return max(self._peaks[: after + 2])

    def check(self, cut: Cut) -> None:
        for name, shape, dtype in zip(cut.tensors, cut.shapes, cut.dtypes, strict=True):
            place = self._places.get(name, -1)
            step = 0 if place == 0 else place - self._first + 1
            made = self._made[step] if 0 <= step <= cut.after + 1 and place >= 0 else None
            if not isinstance(made, torch.Tensor) or made.shape != (self._rows, *shape):
                raise UnsafeArtifact(f"cut {cut.number} declares a tensor {name!r} that the graph does not give")
            if str(made.dtype) != f"torch.{dtype}":
                raise UnsafeArtifact(f"cut {cut.number} declares {dtype} and the graph gives {made.dtype}")

    def _observe(self, index: int, values: Sequence[Any]) -> None:
        made = values[self._first + index]
        self._hold(made)
        self._made.append(made)
        self._peaks.append(self._live + _scratch(self._graph.nodes[index], values, self._places))
        for slot in self._last_uses[index]:
            self._release(values[slot])

    def _hold(self, value: Any) -> None:
        for tensor in _tensors(value):
            key = _key(tensor)
            if key not in self._resting:
                self._live += 0 if self._holders[key] else tensor.untyped_storage().nbytes()
                self._holders[key] += 1

    def _release(self, value: Any) -> None:
        for tensor in _tensors(value):
            key = _key(tensor)
            if key not in self._resting:
                self._holders[key] -= 1
                self._live -= 0 if self._holders[key] else tensor.untyped_storage().nbytes()


def _scratch(node: Node, values: Sequence[Any], places: dict[str, int]) -> int:
    """Memory inside an operator that no result shows, at most.

    Attention may hold all its scores; an expanded tensor is copied dense; a convolution that oneDNN does not take
    unfolds its input.
    """
    read = [values[places[name]] for name in references(node.args)]
    tensors = [tensor for value in read for tensor in _tensors(value)]
    packet = node.op.split(".")[1] if "." in node.op else ""
    expanded = sum(one.numel() * one.itemsize for one in tensors if not all(one.stride()) and one.numel() > 1)
    if packet == "scaled_dot_product_attention" and len(tensors) >= 2:
        query, key = tensors[:2]
        return expanded + 2 * math.prod(query.shape[:-1]) * key.shape[-2] * query.itemsize
    if packet in ("conv1d", "conv2d") and len(tensors) >= 2 and tensors[0].dtype != torch.float32:
        made = _tensors(values[places[node.name]])[0]
        return expanded + made.numel() // max(1, made.shape[1]) * tensors[1][0].numel() * made.itemsize
    return expanded


def _names(graph: Graph) -> list[str]:
    """Names of all values in the order in which a runner keeps them."""
    return [*graph.inputs, *(name for name, _ in graph.leaves), *(node.name for node in graph.nodes)]


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for one in value for tensor in _tensors(one)] if isinstance(value, list | tuple) else []


def _key(tensor: torch.Tensor) -> StorageWeakRef:
    """Equal for tensors that share their storage."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
