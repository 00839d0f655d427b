"""How much memory one training step of a graph takes: a dry run on tensors without data, in which everything stays."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from frostline.core import Graph, TensorSpec
from frostline.engines.base.operators import resolve_allowed
from frostline.engines.base.runner import Runner, leaf_values
from frostline.engines.measure.footprint import BROKEN, storage_key, tensors_in
from frostline.errors import UnsafeArtifact

__all__ = ("Step", "dry_step")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What a forward pass makes.

    Attributes:
        nbytes: of all that is made on the way, since going back needs most of it.
        shape: of the output.
        dtype: of the output, such as ``float32``.
    """

    nbytes: int
    shape: tuple[int, ...]
    dtype: str


def dry_step(graph: Graph, tensors: Mapping[str, torch.Tensor], inputs: Sequence[TensorSpec], rows: int) -> Step:
    """Run a graph on shapes alone: no tensor gets data, so that one that asks for too much is found before it runs.

    Args:
        graph: with one output.
        tensors: of its leaves, by name.
        inputs: a sample of each of its inputs.
        rows: of the batch.

    Raises:
        UnsafeArtifact: It does not run on such inputs, or gives no tensor.
    """
    runner = Runner(graph, device="meta", resolve_op=resolve_allowed)
    leaves = [torch.empty_like(leaf, device="meta") for leaf in leaf_values(graph, tensors)]
    made: dict[StorageWeakRef, int] = {}
    first = len(graph.inputs) + len(leaves)

    def observe(index: int, values: Sequence[Any]) -> None:
        made.update({storage_key(one): one.untyped_storage().nbytes() for one in tensors_in(values[first + index])})

    try:
        batch = [torch.empty((rows, *one.shape), dtype=getattr(torch, one.dtype), device="meta") for one in inputs]
        with torch.no_grad():
            [output] = runner.run(batch, leaves, observe=observe)
    except BROKEN as error:
        why = str(error).partition("\n")[0] or type(error).__name__
        raise UnsafeArtifact(f"the graph does not run on {rows} samples: {why}") from error
    if not isinstance(output, torch.Tensor):
        raise UnsafeArtifact("the graph gives no tensor")
    return Step(nbytes=sum(made.values()), shape=tuple(output.shape), dtype=str(output.dtype).removeprefix("torch."))
