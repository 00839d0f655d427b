"""How much a graph computes and moves, and how many values it makes: a dry run that stops where that is too much."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from frostline.core import Cut, Graph
from frostline.engines.base.operators import resolve_allowed
from frostline.engines.base.runner import Runner
from frostline.engines.measure.footprint import BROKEN, ROWS, bare_inputs, does_not_run, peaks, tensors_in
from frostline.engines.measure.kernels import Multiplying, computed
from frostline.errors import OverBudget, UnsafeArtifact

__all__ = ("GraphLimits", "Operations", "count_operations", "count_operations_and_peaks")

# What a core computes while it moves a byte, about: 1e11 operations and 6e9 bytes a second.
_BYTE = 16
# A narrower number takes as long as one of 32 bits: it is widened for whatever is done with it.
_MIN_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphLimits:
    """The most that a graph may have and do.

    Attributes:
        max_nodes: Operations of the graph.
        max_values: Tensors that one run makes, every part of a split counted.
        max_run_s: Estimated seconds of a run of eight samples to the frost line.
        max_operation_s: Estimated seconds of any one operation in that run.
        operations_per_s: Operations that the device does in a second, for the estimates.
        cores: Cores that do them together; what no library computes runs on one of them. 1 for an accelerator.
        quick_dtypes: Types of numbers that it multiplies as fast, in torch's names (``hardware.quick_dtypes``).
    """

    max_nodes: int
    max_values: int
    max_run_s: float
    max_operation_s: float
    operations_per_s: float
    cores: int = 1
    quick_dtypes: Sequence[str] = ("float32",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operations:
    """What a run of eight samples up to a cut computes, in operations of a core; moved bytes are counted too.

    Attributes:
        total: All of it.
        heaviest: The most that one node does.
    """

    total: int
    heaviest: int


def count_operations(
    graph: Graph, leaves: Sequence[torch.Tensor], cuts: Sequence[Cut], limits: GraphLimits
) -> dict[int, Operations]:
    """Run a prefix on the shapes of eight samples alone: what it computes up to each cut, by the cut's number.

    Args:
        graph: from the network's input to the frost line.
        leaves: its tensors, in the order of ``graph.leaves``.
        cuts: the places where it may stop, cut 1 first.
        limits: where to stop.

    Raises:
        UnsafeArtifact: It does not run on its input, or has more nodes or values than it may.
        OverBudget: The graph computes more than it may.
    """
    if len(graph.nodes) > limits.max_nodes:
        raise UnsafeArtifact(f"the graph has {len(graph.nodes)} nodes, and this node takes up to {limits.max_nodes}")
    runner = Runner(graph, cuts=cuts, device="meta", resolve_op=resolve_allowed)
    counting = _Counting(graph, len(graph.inputs) + len(leaves), limits)
    bare = [torch.empty_like(leaf, device="meta") for leaf in leaves]
    try:
        with torch.no_grad(), counting:
            runner.run(bare_inputs(cuts[0], ROWS), bare, observe=counting.observe)
    except BROKEN as error:
        raise does_not_run(cuts[0], ROWS, error) from error
    return {cut.number: counting.upto(cut) for cut in cuts}


def count_operations_and_peaks(
    graph: Graph, leaves: Sequence[torch.Tensor], cuts: Sequence[Cut], limits: GraphLimits
) -> tuple[dict[int, Operations], dict[int, int]]:
    """What ``count_operations`` and ``footprint.peaks`` find, in one run."""
    counting = _Counting(graph, len(graph.inputs) + len(leaves), limits)
    found = peaks(graph, leaves, cuts, counting, counting.observe)
    return {cut.number: counting.upto(cut) for cut in cuts}, found


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not annotate it
    """Counts what passes on its way to torch's kernels, where composed operators are taken apart already."""

    def __init__(self, graph: Graph, first: int, limits: GraphLimits) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._graph = graph
        self._first = first
        self._limits = limits
        self._speed = Multiplying(cores=limits.cores, quick_dtypes=tuple(limits.quick_dtypes))
        self._now = 0
        self._values = 0
        self._after = [Operations(total=0, heaviest=0)]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here: to tell torch's compiler to skip this class would import it, for a second."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        self._now += _operations(func, args, kwargs, made, self._speed)
        return made

    def observe(self, index: int, values: Sequence[Any]) -> None:
        """Called after each node; see ``Runner.run``."""
        before, mine, self._now = self._after[-1], self._now, 0
        self._after.append(Operations(total=before.total + mine, heaviest=max(before.heaviest, mine)))
        self._values += max(1, len(tensors_in(values[self._first + index])))
        self._check(index, mine)

    def upto(self, cut: Cut) -> Operations:
        """What was counted up to a cut."""
        return self._after[cut.after + 1]

    def _check(self, index: int, mine: int) -> None:
        limits, op = self._limits, self._graph.nodes[index].op
        if self._values > limits.max_values:
            raise UnsafeArtifact(f"the graph makes more than the {limits.max_values} values that this node allows")
        mine_s, all_s = mine / limits.operations_per_s, self._after[-1].total / limits.operations_per_s
        if mine_s > limits.max_operation_s:
            raise OverBudget(
                f"{op} of {ROWS} samples would take about {mine_s:.3g} s, and this node allows an operation "
                f"{limits.max_operation_s:g} s: start it with more --max-operation, or freeze less"
            )
        if all_s > limits.max_run_s:
            raise OverBudget(
                f"a run of {ROWS} samples would take more than the {limits.max_run_s:g} s that this node allows: start "
                "it with more --max-run, or freeze less"
            )


def _operations(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], made: Any, speed: Multiplying) -> int:
    """Multiplications and additions, and what moving the bytes that are read and written costs."""
    if func.is_view:
        return 0
    moved = tensors_in([*args, *kwargs.values(), made])
    moved_bytes = sum(tensor.numel() * max(_MIN_BYTES, tensor.itemsize) for tensor in moved)
    return computed(func, args, kwargs, made, speed) + _BYTE * moved_bytes
