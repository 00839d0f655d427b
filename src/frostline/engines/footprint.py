"""How much memory a prefix needs: a dry run on tensors without data, keeping count of what lives."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from frostline.core import Cut, Graph
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


def dry_run(graph: Graph, leaves: Sequence[torch.Tensor], cuts: Sequence[Cut]) -> dict[int, Footprint]:
    """Run a prefix on shapes alone: the memory up to each cut, by its number.

    Nothing is allocated, so that a graph that asks for too much is refused before it runs, and nothing that
    the graph says of itself is believed.

    Args:
        graph: from pixels to the frost line.
        leaves: its tensors, in the order of ``graph.leaves``.
        cuts: the places where it may stop; cut 1 first, whose shape is the input's.

    Raises:
        UnsafeArtifact: It does not run on its input, or does not give what its cuts declare.
    """
    runner = Runner(graph, device="meta", resolve_op=resolve_allowed)
    bare = [torch.empty_like(leaf, device="meta") for leaf in leaves]
    small, large = (_Trail(runner, bare, (batch, *cuts[0].shapes[0])) for batch in (_BATCH, 2 * _BATCH))
    for cut in cuts:
        small.check(cut, graph)
    return {cut.number: _line(small.peak(cut.after), large.peak(cut.after)) for cut in cuts}


_BATCH = 8


def _line(low: int, high: int) -> Footprint:
    """The line through the peaks at two batch sizes, rounded up."""
    per_sample = max(0, -(-(high - low) // _BATCH))
    return Footprint(fixed_bytes=max(0, low - _BATCH * per_sample), bytes_per_sample=per_sample)


class _Trail:
    """What a dry run leaves: live bytes at the start and after each node, and every value's shape."""

    def __init__(self, runner: Runner, leaves: list[torch.Tensor], shape: tuple[int, ...]) -> None:
        self._resting = {_key(leaf) for leaf in leaves}
        self._leaves = len(leaves)
        batch = torch.empty(shape, device="meta")
        self._live = [batch.nbytes]
        self._made: list[Any] = [batch]
        try:
            with torch.no_grad():
                runner.run([batch], leaves, observe=self._observe)
        except (IndexError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
            why = str(error).partition("\n")[0] or type(error).__name__
            raise UnsafeArtifact(f"the graph does not run on an input of shape {list(shape)}: {why}") from error

    def peak(self, after: int) -> int:
        return max(self._live[: after + 2])

    def check(self, cut: Cut, graph: Graph) -> None:
        places = {graph.inputs[0]: 0, **{node.name: index + 1 for index, node in enumerate(graph.nodes)}}
        for name, shape, dtype in zip(cut.tensors, cut.shapes, cut.dtypes, strict=True):
            place = places.get(name, cut.after + 2)
            made = self._made[place] if place <= cut.after + 1 else None
            if not isinstance(made, torch.Tensor) or made.shape != (_BATCH, *shape):
                raise UnsafeArtifact(f"cut {cut.number} declares a tensor {name!r} that the graph does not give")
            if str(made.dtype) != f"torch.{dtype}":
                raise UnsafeArtifact(f"cut {cut.number} declares {dtype} and the graph gives {made.dtype}")

    def _observe(self, index: int, values: Sequence[Any]) -> None:
        live = {
            key: tensor.untyped_storage().nbytes()
            for value in values
            for tensor in _tensors(value)
            if (key := _key(tensor)) not in self._resting
        }
        self._live.append(sum(live.values()))
        self._made.append(values[1 + self._leaves + index])


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for one in value for tensor in _tensors(one)] if isinstance(value, list | tuple) else []


def _key(tensor: torch.Tensor) -> StorageWeakRef:
    """Equal for tensors that share their storage."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
