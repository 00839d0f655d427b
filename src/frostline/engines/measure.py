"""Measures a prefix: its memory, its operations, and the time and bytes up to each of its cuts.

The factors were measured against a core's 5e10 operations a second, on a processor without instructions for 16 bits.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from frostline.core import Cut, Graph, GraphNode, TensorSpec
from frostline.core.errors import OverBudget, UnsafeArtifact
from frostline.core.graph import references
from frostline.engines.graph_runner import Runner, as_array, input_tensors, leaf_values, resolve_allowed
from frostline.engines.protocols import Arrays, Between, Footprint

__all__ = (
    "BROKEN",
    "LONG_RUN_S",
    "ROWS",
    "CutMemory",
    "GemmPeak",
    "GraphLimits",
    "Operations",
    "SeesOperators",
    "Step",
    "count_operations",
    "count_operations_and_peaks",
    "cut_values",
    "dry_run",
    "dry_step",
    "kernel_operations",
    "node_operations",
    "observed_memory",
    "peaks",
    "storage_key",
    "tensors_in",
    "timed_run",
    "version_of",
)

LONG_RUN_S = 0.5
"""Seconds of a run of which the making ready of kernels, in a first run, is a small part."""

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
        graph: the graph from the network's input to the frost line.
        leaves: the tensors, in the order of ``graph.leaves``.
        cuts: the places where it may stop, in their order; cut 1 first, whose tensors are the graph's inputs.
        max_rows: the largest batch, a multiple of 8; all multiples up to it are tried.

    Raises:
        UnsafeArtifact: The prefix does not run on its input, does not give the tensors that its cuts declare, or its
            memory does not grow in line with the batch.
    """
    runner = Runner(graph, cuts=cuts, device="meta", resolve_op=resolve_allowed)
    bare = [torch.empty_like(leaf, device="meta") for leaf in leaves]
    rows = range(ROWS, max(max_rows, 2 * ROWS) + 1, ROWS)
    trails = [_Trail(graph, runner, bare, cuts, _bare_inputs(cuts[0], batch)) for batch in rows]
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
        within: the context, entered while the graph runs.
        observe: see ``Runner.run``.

    Raises:
        UnsafeArtifact: see ``dry_run``.
    """
    runner = Runner(graph, cuts=cuts, device="meta", resolve_op=resolve_allowed)
    bare = [torch.empty_like(leaf, device="meta") for leaf in leaves]
    trail = _Trail(graph, runner, bare, cuts, _bare_inputs(cuts[0], ROWS), within, observe)
    return {cut.number: trail.peak(cut) for cut in cuts}


def observed_memory(
    graph: Graph, leaves: Sequence[torch.Tensor], cuts: Sequence[Cut], inputs: Sequence[torch.Tensor] | None = None
) -> dict[int, CutMemory]:
    """Run a prefix of one's own on a few samples: the memory up to each cut and behind it, by its number.

    What does not grow with the batch is counted for each sample. Running on shapes alone would import torch's
    compiler first, which takes longer than these samples.

    Args:
        graph: see ``dry_run``.
        leaves: see ``dry_run``.
        cuts: see ``dry_run``.
        inputs: the samples, a tensor ``[n, ...]`` for each input; two samples of zeros by default.

    Raises:
        UnsafeArtifact: The prefix does not run on these samples, or does not give the tensors that its cuts declare.
    """
    inputs = _bare_inputs(cuts[0], 2, device="cpu") if inputs is None else inputs
    runner = Runner(graph, cuts=cuts, device=inputs[0].device, resolve_op=resolve_allowed)
    trail, rows = _Trail(graph, runner, list(leaves), cuts, list(inputs)), len(inputs[0])

    def each(peak: int) -> Footprint:
        return Footprint(fixed_bytes=0, bytes_per_sample=-(-peak // rows))

    return {cut.number: CutMemory(to_here=each(trail.peak(cut)), rest=each(trail.rest(cut))) for cut in cuts}


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
        inputs: list[torch.Tensor],
        within: AbstractContextManager[object] | None = None,
        observe: Callable[[int, Sequence[Any]], None] | None = None,
    ) -> None:
        self._within, self._also = within or nullcontext(), observe
        self._graph = graph
        self._runner = runner
        self._standing = {cut.after: cut for cut in cuts}
        self._rows = len(inputs[0])
        self._first = len(graph.inputs) + len(leaves)
        self._places = {name: place for place, name in enumerate(_names(graph))}
        self._resting = {storage_key(leaf) for leaf in leaves}
        self._holders: Counter[StorageWeakRef] = Counter()
        self._live = 0
        self._peaks: list[int] = []
        try:
            self._run(inputs, leaves)
        except BROKEN as error:
            raise _does_not_run(cuts[0], self._rows, error) from error
        self._upto = list(accumulate(self._peaks, max))
        self._from = [*reversed(list(accumulate(reversed(self._peaks), max))), 0]

    def peak(self, cut: Cut) -> int:
        return self._upto[cut.after + 1]

    def rest(self, cut: Cut) -> int:
        return self._from[cut.after + 2]

    def _run(self, inputs: list[torch.Tensor], leaves: list[torch.Tensor]) -> None:
        self._hold(inputs)
        self._peaks.append(self._live)
        self._check(-1, inputs)
        versions = [version_of(leaf) for leaf in leaves]
        with torch.no_grad(), self._within:
            self._runner.run(inputs, leaves, observe=self._observe)
        # Buffers that have values may be put back by others meanwhile, as when a head is tried.
        if any(leaf.is_meta and version_of(leaf) != version for leaf, version in zip(leaves, versions, strict=True)):
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
            for place, made in enumerate(self._runner.crossing_values(cut, values)):
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
    """How often a tensor was written to, under whatever name, for which torch has no public word.

    0 for one that was made in inference mode, of which torch does not count it.
    """
    return 0 if tensor.is_inference() else tensor._version  # noqa: SLF001


def _check_declared(cut: Cut, place: int, made: Any, rows: int) -> None:
    shape, dtype = (rows, *cut.shapes[place]), f"torch.{cut.dtypes[place]}"
    if not isinstance(made, torch.Tensor) or made.shape != shape or str(made.dtype) != dtype:
        raise UnsafeArtifact(f"cut {cut.number} declares {cut.tensors[place]!r} otherwise than the graph gives it")


def _does_not_run(cut: Cut, rows: int, error: BaseException) -> UnsafeArtifact:
    """The refusal of a graph that fails on so many samples of the shapes that cut 1 declares."""
    why = (str(error).partition("\n")[0] or type(error).__name__)[:300]
    shapes = [[rows, *shape] for shape in cut.shapes]
    return UnsafeArtifact(f"the graph does not run on inputs of shape {shapes}: {why}")


def _bare_inputs(cut: Cut, rows: int, *, device: str = "meta") -> list[torch.Tensor]:
    """What comes in at cut 1: without data, or zeros.

    Raises:
        UnsafeArtifact: The declared tensor is larger than any tensor can be.
    """
    declared = zip(cut.shapes, cut.dtypes, strict=True)
    try:
        return [torch.zeros((rows, *shape), dtype=getattr(torch, dtype), device=device) for shape, dtype in declared]
    except BROKEN as error:
        raise _does_not_run(cut, rows, error) from error


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
        graph: the graph with one output.
        tensors: tensors of its leaves, by name.
        inputs: a sample of each of its inputs.
        rows: rows of the batch.

    Raises:
        UnsafeArtifact: The graph does not run on such inputs, or gives no tensor.
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


# No library multiplies these: torch's own loops do, on one core whatever there are. The first factor is for rows times
# columns that lie together, as layers have them; the second for all other products, and the third for convolutions.
_HALF = (8, 40, 24)
_LONG = (80, 80, 80)
_OTHER = (4, 4, 4)
_FACTORS = {torch.bfloat16: _HALF, torch.float16: _HALF, torch.float64: (0, 0, 4), torch.int64: _LONG}
# Convolutions are quick where many channels become many. Of fewer pairs than these, each costs more.
_MANY_PAIRS, _MAX_THIN = 1024, 32
# For each number of a window, or for each number that is made.
_POOL, _BICUBIC, _UPSAMPLE = 64, 1024, 512


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmPeak:
    """What a device multiplies at its full speed.

    Attributes:
        cores: Cores that the operations of a second are of; 1 for an accelerator.
        quick_dtypes: Types of numbers, in torch's names.
    """

    cores: int = 1
    quick_dtypes: tuple[str, ...] = ("float32",)


def kernel_operations(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], made: Any, speed: GemmPeak) -> int:
    """What a kernel computes, in additions and multiplications of 32-bit floats.

    Args:
        func: overload of the operator.
        args: the arguments by position.
        kwargs: the arguments by name.
        made: result of the call.
        speed: the kinds of numbers that the device multiplies quickly.
    """
    name, count = func.__name__, sum(tensor.numel() for tensor in tensors_in(made)[:1])
    if func.overloadpacket in flop_registry:
        flops = int(flop_registry[func.overloadpacket](*args, **kwargs, out_val=made))
        return flops * _factor(name, tensors_in(args), args, speed)
    if "pool" in name and len(args) > 1 and isinstance(args[1], list | tuple):
        return _POOL * count * _window(name, args[0].shape, args[1])
    if "upsample" in name:
        return count * (_BICUBIC if "bicubic" in name else _UPSAMPLE)
    return 0


def _factor(name: str, tensors: Sequence[torch.Tensor], args: Sequence[Any], speed: GemmPeak) -> int:
    is_convolution = name.startswith("convolution")
    thin = _thinness(tensors[1], args) if is_convolution else 1
    dtype = tensors[0].dtype
    if str(dtype).removeprefix("torch.") in speed.quick_dtypes:
        return thin
    near, far, convolution = _FACTORS.get(dtype, _OTHER)
    if is_convolution:
        return max(thin, convolution * speed.cores)
    return max(1, (near if _lie_together(*tensors[-2:]) else far) * speed.cores)


def _thinness(weight: torch.Tensor, args: Sequence[Any]) -> int:
    outputs, inputs = weight.shape[:2]
    pairs = max(1, inputs * outputs // max(1, int(args[8])))
    return min(_MAX_THIN, max(1, _MANY_PAIRS // pairs))


def _lie_together(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether the rows of one and the columns of the other lie together."""
    return left.stride(-1) == 1 and right.stride(-2) == 1


def _window(name: str, shape: Sequence[int], sides: Sequence[Any]) -> int:
    """The numbers that each result of a pool is made of, about."""
    if "adaptive" in name:
        pairs = zip(shape[-len(sides) :], sides, strict=True)
        return math.prod(-(-int(before) // max(1, int(after))) + 2 for before, after in pairs)
    found = math.prod(int(side) for side in sides)
    return found if len(sides) > 1 else found**2


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
        max_run_s: The estimated seconds of a run of eight samples to the frost line.
        max_operation_s: The estimated seconds of any one operation in that run.
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
        graph: the graph from the network's input to the frost line.
        leaves: the tensors, in the order of ``graph.leaves``.
        cuts: the places where it may stop, cut 1 first.
        limits: the place to stop.

    Raises:
        UnsafeArtifact: The prefix does not run on its input, or has more nodes or values than allowed.
        OverBudget: The graph computes more than it may.
    """
    if len(graph.nodes) > limits.max_nodes:
        raise UnsafeArtifact(f"the graph has {len(graph.nodes)} nodes, and this node takes up to {limits.max_nodes}")
    runner = Runner(graph, cuts=cuts, device="meta", resolve_op=resolve_allowed)
    counting = _Counting(graph, len(graph.inputs) + len(leaves), limits)
    bare = [torch.empty_like(leaf, device="meta") for leaf in leaves]
    try:
        with torch.no_grad(), counting:
            runner.run(_bare_inputs(cuts[0], ROWS), bare, observe=counting.observe)
    except BROKEN as error:
        raise _does_not_run(cuts[0], ROWS, error) from error
    return {cut.number: counting.upto(cut) for cut in cuts}


def node_operations(graph: Graph, leaves: Sequence[torch.Tensor], inputs: Sequence[TensorSpec]) -> tuple[int, ...]:
    """What each node of a network computes for eight samples, in operations of a core: a run on shapes alone.

    Args:
        graph: whole network, of the user's own, so that any operator may be in it.
        leaves: the tensors, in the order of ``graph.leaves``.
        inputs: a sample of each of its inputs.

    Raises:
        UnsafeArtifact: The network does not run without values.
    """
    many = 1 << 62
    unbounded = GraphLimits(max_nodes=many, max_values=many, max_run_s=many, max_operation_s=many, operations_per_s=1)
    counting = _Counting(graph, len(graph.inputs) + len(leaves), unbounded)
    bare = [torch.empty_like(leaf, device="meta") for leaf in leaves]
    batch = [torch.empty((ROWS, *spec.shape), dtype=getattr(torch, spec.dtype), device="meta") for spec in inputs]
    try:
        with torch.no_grad(), counting:
            Runner(graph, device="meta").run(batch, bare, observe=counting.observe)
    except BROKEN as error:
        why = str(error).partition("\n")[0] or type(error).__name__
        raise UnsafeArtifact(f"the graph does not run on {ROWS} samples: {why}") from error
    return counting.each()


def count_operations_and_peaks(
    graph: Graph, leaves: Sequence[torch.Tensor], cuts: Sequence[Cut], limits: GraphLimits
) -> tuple[dict[int, Operations], dict[int, int]]:
    """What ``count_operations`` and ``footprint.peaks`` find, in one run."""
    counting = _Counting(graph, len(graph.inputs) + len(leaves), limits)
    found = peaks(graph, leaves, cuts, counting, counting.observe)
    return {cut.number: counting.upto(cut) for cut in cuts}, found


class SeesOperators(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not annotate it
    """Sees what passes on its way to torch's kernels, without torch's compiler."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here: to tell torch's compiler to skip this class would import it, for a second."""
        return False


class _Counting(SeesOperators):  # type: ignore[no-untyped-call]  # torch does not annotate it
    """Counts what passes, where composed operators are taken apart already."""

    def __init__(self, graph: Graph, first: int, limits: GraphLimits) -> None:
        super().__init__()
        self._graph = graph
        self._first = first
        self._limits = limits
        self._speed = GemmPeak(cores=limits.cores, quick_dtypes=tuple(limits.quick_dtypes))
        self._now = 0
        self._values = 0
        self._after = [Operations(total=0, heaviest=0)]

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

    def each(self) -> tuple[int, ...]:
        """What was counted of each node."""
        totals = [done.total for done in self._after]
        return tuple(after - before for before, after in pairwise(totals))

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


def _operations(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], made: Any, speed: GemmPeak) -> int:
    """Multiplications and additions, and what moving the bytes that are read and written costs."""
    if func.is_view:
        return 0
    moved = tensors_in([*args, *kwargs.values(), made])
    moved_bytes = sum(tensor.numel() * max(_MIN_BYTES, tensor.itemsize) for tensor in moved)
    return kernel_operations(func, args, kwargs, made, speed) + _BYTE * moved_bytes


def timed_run(
    graph: Graph,
    leaves: Sequence[torch.Tensor],
    cuts: Sequence[Cut],
    inputs: Arrays,
    *,
    repeats: int,
    clock: Callable[[], float],
    between: Between | None = None,
) -> tuple[npt.NDArray[np.float64], tuple[npt.NDArray[np.generic], ...]]:
    """Seconds a sample from the network's input to each cut, and the features.

    A run is timed node by node; the sum up to a cut is within 10 % of a run of that part alone.

    Args:
        graph: the graph from the network's input to the frost line.
        leaves: the tensors.
        cuts: cut 1 and higher.
        inputs: the real samples, an array ``[n, ...]`` for each input of the network, or the one.
        repeats: the measured runs, after one to warm up. Where one will do and the first is long, that is it: to make
            kernels ready is a small part of it.
        clock: seconds of a monotonic clock.
        between: function called between operations, as for ``Runner.run``; its time is not measured.

    Returns:
        ``float64[repeats, len(cuts)]``, and of the last run an array ``[n, ...]`` for each tensor at the frost line.
    """
    device = _device_of(leaves)
    runner = Runner(graph, device=device)
    batch = input_tensors(inputs, device)
    row, made = _run(runner, batch, leaves, clock, between)
    rows = [row]
    if repeats > 1 or row[-1] <= LONG_RUN_S:
        rows = []
        for _ in range(repeats):
            row, made = _run(runner, batch, leaves, clock, between)
            rows.append(row)
    stops = [cut.after + 1 for cut in cuts]
    seconds = np.array([[row[stop] for stop in stops] for row in rows]) / len(batch[0])
    return seconds, tuple(map(_copied, made))


def cut_values(
    graph: Graph,
    leaves: Sequence[torch.Tensor],
    cuts: Sequence[Cut],
    inputs: Arrays,
    between: Between | None = None,
) -> dict[int, tuple[npt.NDArray[np.generic], ...]]:
    """What crosses each of some cuts for the same samples, from one run.

    Args:
        graph: the graph from the network's input to the frost line.
        leaves: the tensors.
        cuts: numbers of the cuts to measure, from 1.
        inputs: inputs of the network, as for ``timed_run``.
        between: function called between operations, as for ``Runner.run``.

    Returns:
        Arrays by the number of their cut: one C-contiguous array ``[n, ...]`` for each tensor that crosses. All are
        copies.
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
            found[cut.number] = tuple(_copied(tensor) for tensor in runner.crossing_values(cut, values))

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
) -> tuple[list[float], tuple[torch.Tensor, ...]]:
    """Seconds since the start, at the start and after each node, and what the run gave."""
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
        made = runner.run(batch, leaves, observe=observe, between=None if between is None else rest)
    return [0.0, *(mark - start for mark in marks)], made
