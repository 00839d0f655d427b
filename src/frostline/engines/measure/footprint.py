"""How much memory a prefix needs: a dry run on tensors without data, keeping count of what lives."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from frostline.core import Cut, Graph, GraphNode, TensorSpec
from frostline.core.graph import references
from frostline.engines.base.operators import resolve_allowed
from frostline.engines.base.protocols import Footprint
from frostline.engines.base.runner import Runner, leaf_values
from frostline.errors import UnsafeArtifact

__all__ = (
    "BROKEN",
    "ROWS",
    "CutMemory",
    "Step",
    "bare_inputs",
    "does_not_run",
    "dry_run",
    "dry_step",
    "peaks",
    "storage_key",
    "tensors_in",
    "version_of",
)

ROWS = 8
"""The samples of the smallest run; every batch is a multiple of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CutMemory:
    """Memory on both sides of a cut.

    Attributes:
        to_here: memory of running from the input to the cut.
        rest: memory of running from the cut to the frost line, its inputs counted until their last use; nothing at the
            frost line itself.
    """

    to_here: Footprint
    rest: Footprint


def dry_run(
    graph: Graph, leaves: Sequence[torch.Tensor], cuts: Sequence[Cut], *, max_rows: int = 32
) -> dict[int, CutMemory]:
    """Run a prefix on shapes alone: the memory up to each cut and behind it, by its number.

    No tensor gets data, so that a graph that asks for too much is refused before it runs, and nothing that the
    graph says of itself is believed. It is run at every batch that may come, so that none takes more than the line.

    Args:
        graph: from the network's input to the frost line.
        leaves: its tensors, in the order of ``graph.leaves``.
        cuts: the places where it may stop, in their order; cut 1 first, whose tensors are the graph's inputs.
        max_rows: the largest batch, a multiple of 8; all multiples up to it are tried.

    Raises:
        UnsafeArtifact: It does not run on its input, does not give what its cuts declare, or its memory does not
            grow in line with the batch.
    """
    runner = Runner(graph, cuts=cuts, device="meta", resolve_op=resolve_allowed)
    bare = [torch.empty_like(leaf, device="meta") for leaf in leaves]
    rows = range(ROWS, max(max_rows, 2 * ROWS) + 1, ROWS)
    trails = [_Trail(graph, runner, bare, cuts, batch) for batch in rows]
    found = {}
    for cut in cuts:
        line = _line(rows, [trail.peak(cut) for trail in trails])
        if any(trail.peak(cut) > line.at(batch) for batch, trail in zip(rows, trails, strict=True)):
            raise UnsafeArtifact(f"the memory up to cut {cut.number} does not grow in line with the batch")
        found[cut.number] = CutMemory(to_here=line, rest=_line(rows, [trail.rest(cut) for trail in trails]))
    return found


def peaks(
    graph: Graph,
    leaves: Sequence[torch.Tensor],
    cuts: Sequence[Cut],
    within: AbstractContextManager[object],
    observe: Callable[[int, Sequence[Any]], None],
) -> dict[int, int]:
    """Run a prefix on the shapes of eight samples alone: the most bytes up to each cut, by its number.

    Args:
        graph: see ``dry_run``.
        leaves: see ``dry_run``.
        cuts: see ``dry_run``.
        within: entered while the graph runs.
        observe: see ``Runner.run``.

    Raises:
        UnsafeArtifact: see ``dry_run``.
    """
    runner = Runner(graph, cuts=cuts, device="meta", resolve_op=resolve_allowed)
    bare = [torch.empty_like(leaf, device="meta") for leaf in leaves]
    trail = _Trail(graph, runner, bare, cuts, ROWS, within, observe)
    return {cut.number: trail.peak(cut) for cut in cuts}


BROKEN = (
    ArithmeticError,
    AssertionError,  # some of torch's kernels for shapes assert what comes in
    AttributeError,
    LookupError,
    MemoryError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What an operator of a hostile or broken graph may raise."""


def _line(rows: Sequence[int], peaks: Sequence[int]) -> Footprint:
    """The line from the smallest to the largest batch, rounded up.

    A peak is the most of several sums that grow in line with the batch, so that it lies below this line in between.
    """
    per_sample = max(0, -(-(peaks[-1] - peaks[0]) // (rows[-1] - rows[0])))
    return Footprint(fixed_bytes=max(0, peaks[0] - rows[0] * per_sample), bytes_per_sample=per_sample)


class _Trail:
    """What a dry run at one batch leaves: the most bytes at each step, where step 0 is the input itself."""

    def __init__(
        self,
        graph: Graph,
        runner: Runner,
        leaves: list[torch.Tensor],
        cuts: Sequence[Cut],
        rows: int,
        within: AbstractContextManager[object] | None = None,
        observe: Callable[[int, Sequence[Any]], None] | None = None,
    ) -> None:
        self._within, self._also = within or nullcontext(), observe
        self._graph = graph
        self._runner = runner
        self._standing = {cut.after: cut for cut in cuts}
        self._rows = rows
        self._first = len(graph.inputs) + len(leaves)
        self._places = {name: place for place, name in enumerate(_names(graph))}
        self._resting = {storage_key(leaf) for leaf in leaves}
        self._holders: Counter[StorageWeakRef] = Counter()
        self._live = 0
        self._peaks: list[int] = []
        try:
            self._run(leaves)
        except BROKEN as error:
            raise does_not_run(cuts[0], rows, error) from error
        self._upto = list(accumulate(self._peaks, max))
        self._from = [*reversed(list(accumulate(reversed(self._peaks), max))), 0]

    def peak(self, cut: Cut) -> int:
        return self._upto[cut.after + 1]

    def rest(self, cut: Cut) -> int:
        return self._from[cut.after + 2]

    def _run(self, leaves: list[torch.Tensor]) -> None:
        inputs = bare_inputs(self._standing[-1], self._rows)
        self._hold(inputs)
        self._peaks.append(self._live)
        self._check(-1, inputs)
        versions = [version_of(leaf) for leaf in leaves]
        with torch.no_grad(), self._within:
            self._runner.run(inputs, leaves, observe=self._observe)
        if [version_of(leaf) for leaf in leaves] != versions:
            raise UnsafeArtifact("the graph changes its own weights")

    def _observe(self, index: int, values: Sequence[Any]) -> None:
        self._hold(values[self._first + index])
        self._peaks.append(self._live + _scratch(self._graph.nodes[index], values, self._places))
        self._check(index, values)
        if self._also is not None:
            self._also(index, values)
        for slot in self._runner.last_uses[index]:
            self._release(values[slot])

    def _check(self, index: int, values: Sequence[Any]) -> None:
        if index in self._standing:
            cut = self._standing[index]
            for place, made in enumerate(self._runner.crossing(cut, values)):
                _check_declared(cut, place, made, self._rows)

    def _hold(self, value: Any) -> None:
        for tensor in tensors_in(value):
            key = storage_key(tensor)
            if key not in self._resting:
                self._live += 0 if self._holders[key] else tensor.untyped_storage().nbytes()
                self._holders[key] += 1

    def _release(self, value: Any) -> None:
        for tensor in tensors_in(value):
            key = storage_key(tensor)
            if key not in self._resting:
                self._holders[key] -= 1
                self._live -= 0 if self._holders[key] else tensor.untyped_storage().nbytes()


def _scratch(node: GraphNode, values: Sequence[Any], places: dict[str, int]) -> int:
    """Memory inside an operator that no result shows, at most.

    Attention may hold all its scores, and its mask as numbers; an expanded tensor is copied dense; a convolution that
    oneDNN does not take unfolds its input.
    """
    read = [values[places[name]] for name in references(node.args)]
    tensors = [tensor for value in read for tensor in tensors_in(value)]
    packet = node.op.split(".")[1] if "." in node.op else ""
    expanded = sum(
        tensor.numel() * tensor.itemsize for tensor in tensors if not all(tensor.stride()) and tensor.numel() > 1
    )
    if packet == "scaled_dot_product_attention" and len(tensors) >= 2:
        query, key = tensors[:2]
        scores = math.prod(query.shape[:-1]) * key.shape[-2]
        mask = sum(tensor.numel() for tensor in tensors[3:4])
        return expanded + (2 * scores + mask) * query.itemsize
    if packet in ("conv1d", "conv2d") and len(tensors) >= 2 and tensors[0].dtype != torch.float32:
        made = tensors_in(values[places[node.name]])[0]
        return expanded + made.numel() // max(1, made.shape[1]) * tensors[1][0].numel() * made.itemsize
    return expanded


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was written to, under whatever name; torch has no public word for it."""
    return tensor._version  # noqa: SLF001


def _check_declared(cut: Cut, place: int, made: Any, rows: int) -> None:
    shape, dtype = (rows, *cut.shapes[place]), f"torch.{cut.dtypes[place]}"
    if not isinstance(made, torch.Tensor) or made.shape != shape or str(made.dtype) != dtype:
        raise UnsafeArtifact(f"cut {cut.number} declares {cut.tensors[place]!r} otherwise than the graph gives it")


def does_not_run(cut: Cut, rows: int, error: BaseException) -> UnsafeArtifact:
    """The refusal of a graph that fails on so many samples of the shapes that cut 1 declares."""
    why = (str(error).partition("\n")[0] or type(error).__name__)[:300]
    shapes = [[rows, *shape] for shape in cut.shapes]
    return UnsafeArtifact(f"the graph does not run on inputs of shape {shapes}: {why}")


def bare_inputs(cut: Cut, rows: int) -> list[torch.Tensor]:
    """What comes in at cut 1, without data."""
    declared = zip(cut.shapes, cut.dtypes, strict=True)
    return [torch.empty((rows, *shape), dtype=getattr(torch, dtype), device="meta") for shape, dtype in declared]


def _names(graph: Graph) -> list[str]:
    """Names of all values in the order in which a runner keeps them."""
    return [*graph.inputs, *(name for name, _ in graph.leaves), *(node.name for node in graph.nodes)]


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors of a value of a run: one, none, or those of a list."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for item in value for tensor in tensors_in(item)] if isinstance(value, list | tuple) else []


def storage_key(tensor: torch.Tensor) -> StorageWeakRef:
    """Equal for tensors that share their storage."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What a forward pass makes.

    Attributes:
        nbytes: bytes of all that is made on the way, since going back needs most of it.
        shape: shape of the output.
        dtype: dtype of the output, such as ``float32``.
    """

    nbytes: int
    shape: tuple[int, ...]
    dtype: str


def dry_step(graph: Graph, tensors: Mapping[str, torch.Tensor], inputs: Sequence[TensorSpec], rows: int) -> Step:
    """Run a graph on shapes alone: no tensor gets data, so that one that asks for too much is found before it runs.

    Args:
        graph: with one output.
        tensors: tensors of its leaves, by name.
        inputs: a sample of each of its inputs.
        rows: rows of the batch.

    Raises:
        UnsafeArtifact: It does not run on such inputs, or gives no tensor.
    """
    runner = Runner(graph, device="meta", resolve_op=resolve_allowed)
    leaves = [torch.empty_like(leaf, device="meta") for leaf in leaf_values(graph, tensors)]
    made: dict[StorageWeakRef, int] = {}
    first = len(graph.inputs) + len(leaves)

    def observe(index: int, values: Sequence[Any]) -> None:
        made.update(
            {storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in tensors_in(values[first + index])}
        )

    try:
        batch = [torch.empty((rows, *spec.shape), dtype=getattr(torch, spec.dtype), device="meta") for spec in inputs]
        with torch.no_grad():
            [output] = runner.run(batch, leaves, observe=observe)
    except BROKEN as error:
        why = str(error).partition("\n")[0] or type(error).__name__
        raise UnsafeArtifact(f"the graph does not run on {rows} samples: {why}") from error
    if not isinstance(output, torch.Tensor):
        raise UnsafeArtifact("the graph gives no tensor")
    return Step(nbytes=sum(made.values()), shape=tuple(output.shape), dtype=str(output.dtype).removeprefix("torch."))
