"""Finds out by running it whether a frozen part gives each sample the same whatever samples are beside it.

Few rows are run in one company, in another one at the same places, and among more at other places. The first two runs
must agree to the last bits, since kernels do the same steps on the same places; the third within what sums in another
order differ by. No run can show what a network does on every sample: what decides by rare values is not found.

Where every operation is one that gives each sample its own rows whatever their values are, nothing is run: that is
read from the operations and the dimensions that the batch lies along.
"""

import hashlib
import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from frostline.core import Cut, Dim, Graph, GraphNode, TensorSpec
from frostline.core.config import cache_folder
from frostline.core.errors import ModelError
from frostline.core.files import FileCache
from frostline.core.graph import Argument, references
from frostline.engines.graph_runner import Runner, as_array, as_tensor, leaf_values
from frostline.engines.protocols import Arrays
from frostline.models.artifact import Prefix, file_bytes, graph_to_json
from frostline.models.graph import packet_of, reads

__all__ = ("MixedRows", "differs", "is_mixing", "keeps_rows_apart", "make_rows", "mixed_rows")

_FORMAT = 3
_MADE = 10
# Rows of each run, by their numbers: rows 1 and 3 are looked at, since one alone may be the least of all, which it is
# in any company. In the second run all others are other ones, and in the third they stand elsewhere, among more.
_RUNS = ((0, 1, 2, 3), (4, 1, 5, 3), (7, 3, 0, 8, 1, 9))
_LOOKED_AT, _IN_PLACE, _ELSEWHERE = (1, 3), 1, 2
# Relative errors in 32 bits and in 16, of sums in another order, and of the same steps on the same places. These agree
# to the bit on a CPU; an accelerator may add in the order in which its cores end.
_ERRORS, _ERRORS_IN_PLACE = (1e-4, 5e-2), (1e-5, 1e-3)
# How rows are made up, until the network gives finite numbers: of numbers that are no floats, bits, ones or zeros.
_ATTEMPTS = (("bits", 1.0), ("ones", 1.0), ("zeros", 1.0), ("bits", 0.05))
_SEED = 0
_BATCH = Dim(0, 1)
_HALVES = 2  # ids and mask of a text

_FAILING = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedRows:
    """Where a frozen part mixes the samples of a batch.

    Attributes:
        node: name of the first operation that gives a sample something else in other company.
        why: the layer and the operation, in words.
    """

    node: str
    why: str


def _batch(rows: Sequence[torch.Tensor], number: int) -> list[torch.Tensor]:
    """The rows of one of the runs."""
    return [some[list(_RUNS[number])].contiguous() for some in rows]


def _looked_at(number: int) -> list[int]:
    """Where the rows that are looked at stand in one of the runs."""
    return [_RUNS[number].index(row) for row in _LOOKED_AT]


def make_rows(
    graph: Graph, inputs: Sequence[TensorSpec], *, numbers: str = "bits", scale: float = 1.0
) -> list[torch.Tensor]:
    """Ten rows for each input: normal numbers, and small ones where the type is no floating one.

    Args:
        graph: graph that takes them; it says which whole numbers are read as floats.
        inputs: specifications of its inputs.
        numbers: kind of whole numbers: ``bits``, ``ones`` or ``zeros``.
        scale: standard deviation of floats.
    """
    generator = torch.Generator().manual_seed(_SEED)
    return [
        _made(spec, _float_spans(graph, name), generator, numbers, scale)
        for name, spec in zip(graph.inputs, inputs, strict=True)
    ]


def _made(
    spec: TensorSpec, floats: Sequence[tuple[int, int]], generator: torch.Generator, numbers: str, scale: float
) -> torch.Tensor:
    dtype = getattr(torch, spec.dtype)
    values = torch.randn((_MADE, *spec.shape), generator=generator) * scale
    if dtype.is_floating_point:
        return values.to(dtype)
    fixed = {"ones": torch.ones_like, "zeros": torch.zeros_like}.get(numbers)
    rows = (values > 0 if fixed is None else fixed(values)).to(dtype)
    if fixed is None and len(spec.shape) == _HALVES and spec.shape[0] == _HALVES and spec.dtype == "int64":
        # Ids and mask of texts of several lengths, as they are padded: masked places in between mean nothing.
        lengths = torch.randint(max(1, spec.shape[1] // 4), spec.shape[1] + 1, (_MADE, 1), generator=generator)
        rows[:, 1] = torch.arange(spec.shape[1]) < lengths
    for start, end in floats:
        some = torch.randn((_MADE, 2 * (end - start)), generator=generator) * scale
        rows[:, start:end] = some.view(torch.int64)
    return rows


def _float_spans(graph: Graph, name: str) -> list[tuple[int, int]]:
    """The columns of an input ``int64[n, columns]`` that are read as floats."""
    spans: dict[str, tuple[int, int]] = {name: (0, 0)}
    found = []
    for node in graph.nodes:
        first = next(iter(reads(node)), "")
        if first not in spans:
            continue
        if node.op == "aten.view.dtype":
            found.append(spans[first])
        elif packet_of(node) == "slice":
            spans[node.name] = _columns(node) or spans[first]
        elif packet_of(node) in ("alias", "clone", "contiguous", "detach", "lift_fresh_copy"):
            spans[node.name] = spans[first]
    return [(start, end) for start, end in found if end > start]


def _columns(node: GraphNode) -> tuple[int, int] | None:
    """From where and up to where a slice takes columns; None of another one."""
    match node.args:
        case (_, 1, int(start), int(end), *_):
            return start, end
        case _:
            return None


def differs(value: torch.Tensor, meant: torch.Tensor, *, in_place: bool) -> bool:
    """Whether the values of samples are other ones in other company.

    Args:
        value: values of the samples.
        meant: values in the first run.
        in_place: the samples stood at the same places of as large a batch.
    """
    if value.shape != meant.shape:
        return True
    if torch.equal(value, meant):
        return False
    if not meant.is_floating_point():
        return True
    is_short = meant.element_size() < torch.finfo(torch.float32).bits // 8
    error = (_ERRORS_IN_PLACE if in_place else _ERRORS)[is_short]
    if is_short:
        value, meant = value.float(), meant.float()
    off_by, all_of_it = (torch.linalg.vector_norm(some, dtype=torch.float64) for some in (value - meant, meant))
    if off_by.isfinite() and all_of_it.isfinite():  # so is every number; what is below takes five times as long
        return bool(off_by > error * all_of_it)
    value, meant = value.double(), meant.double()
    finite = value.isfinite() & meant.isfinite()
    if in_place and not torch.equal(value[~finite].nan_to_num(), meant[~finite].nan_to_num()):
        return True
    off, size = (value - meant)[finite], meant[finite]
    return bool(off.numel()) and bool(off.square().sum().sqrt() > error * size.square().sum().sqrt())


Rows = Sequence[torch.Tensor]


def _first_run(
    graph: Graph,
    inputs: Sequence[TensorSpec],
    run: Callable[[Rows, int], Mapping[Any, torch.Tensor]],
    keys: Collection[Any] | None = None,
) -> tuple[Rows, Mapping[Any, torch.Tensor]]:
    """Rows for which a first run gives finite numbers of these keys (None for all), if there are such, and its values.

    Raises:
        ModelError: The function fails on all rows that are tried.
    """
    why, found = "", None
    for numbers, scale in _ATTEMPTS:
        rows = make_rows(graph, inputs, numbers=numbers, scale=scale)
        try:
            found = rows, run(rows, 0)
        except _FAILING as error:
            why = str(error).partition("\n")[0] or type(error).__name__
            continue
        if all(bool(value.isfinite().all()) for key, value in found[1].items() if keys is None or key in keys):
            return found
    if found is None:
        raise ModelError(f"the frozen part does not run on rows that are made up to check it: {why}")
    return found


def _differing(
    rows: Rows,
    meant: Mapping[Any, torch.Tensor],
    run: Callable[[Rows, int], Mapping[Any, torch.Tensor]],
    numbers: Sequence[int] = range(1, len(_RUNS)),
) -> Iterator[Any]:
    """The keys of what the other runs give otherwise; of one that fails, since it needs a batch of some sizes, all."""
    for number in numbers:
        try:
            values = run(rows, number)
        except _FAILING:
            yield from meant
            continue
        in_place = len(_RUNS[number]) == len(_RUNS[0])
        yield from (key for key in meant if key not in values or differs(values[key], meant[key], in_place=in_place))


def is_mixing(prefix: Prefix, run: Callable[[Arrays], Sequence[npt.NDArray[np.generic]]]) -> bool:
    """Whether what a run gives of a row depends on the rows beside it.

    Args:
        prefix: the frozen part that is run.
        run: function that gives arrays ``[n, ...]`` of a batch of up to eight rows, an array for each input.

    Raises:
        ModelError: The function fails on all rows that can be made up for it.
    """

    def of_one(rows: Rows, number: int) -> Mapping[int, torch.Tensor]:
        given = run([as_array(some) for some in _batch(rows, number)])
        return {output: as_tensor(array)[_looked_at(number)] for output, array in enumerate(given)}

    rows, meant = _first_run(prefix.graph, prefix.inputs, of_one)
    return next(_differing(rows, meant, of_one), None) is not None


def mixed_rows(prefix: Prefix, device: torch.device) -> MixedRows | None:
    """Where a frozen part mixes the samples of a batch; None where each comes out the same in any company.

    It is run where its operations do not say so. What was found then is kept in the user's cache folder by everything
    that the frozen part is made of.

    Args:
        prefix: the frozen part, whose operations have the shapes of their trace, which was made here.
        device: the place where it is run.

    Raises:
        ModelError: The frozen part fails on all rows that can be made up for it.
    """
    if keeps_rows_apart(prefix.graph, prefix.inputs, prefix.tensors):
        return None
    kept, key = FileCache(cache_folder() / "rows", ".txt"), _key(prefix, device)
    known = kept.get(key)
    names = {"", *(node.name for node in prefix.graph.nodes)}
    name = None if known is None else known.decode(errors="replace")
    if name not in names:
        # What has a number for each pair of rows, such as which is greater, may be the same by chance in what is run.
        pairs = (node.name for node in prefix.graph.nodes if _is_of_pairs(node))
        name = next(pairs, None) or _Check(prefix, device).first_mixed()
        kept.put(key, name.encode())
    return _described(prefix.graph, name) if name else None


def _key(prefix: Prefix, device: torch.device) -> str:
    about = [_FORMAT, torch.__version__, device.type, graph_to_json(prefix.graph), [cut.after for cut in prefix.cuts]]
    inputs = [[list(spec.shape), spec.dtype] for spec in prefix.inputs]
    digest = hashlib.sha256(json.dumps([about, inputs], sort_keys=True).encode())
    for name in sorted(prefix.tensors):
        digest.update(file_bytes(prefix, name))
    return digest.hexdigest()


def _described(graph: Graph, name: str) -> MixedRows:
    """The operation in words; one that makes a value of the whole batch, such as a mean, before one that uses it."""
    nodes = {node.name: node for node in graph.nodes}
    of_all = [nodes[read] for read in reads(nodes[name]) if read in nodes and _is_of_the_whole_batch(nodes[read])]
    node = of_all[-1] if of_all else nodes[name]
    where = f"{packet_of(node)} in {node.module.partition('@')[0]!r}" if node.module else packet_of(node)
    why = f"{where} mixes the samples of a batch, so that a sample's features would depend on those beside it"
    return MixedRows(node=name, why=why)


def _is_of_the_whole_batch(node: GraphNode) -> bool:
    return _is_one_for_all(node) and packet_of(node) in _REDUCING


def _is_one_for_all(node: GraphNode) -> bool:
    return node.shape is not None and not any(dim.per_sample for dim in node.shape)


def _is_of_pairs(node: GraphNode) -> bool:
    return node.shape is not None and sum(bool(dim.per_sample) for dim in node.shape) > 1


_REDUCING = frozenset({"amax", "amin", "max", "mean", "median", "min", "mm", "std", "sum", "var", "linalg_vector_norm"})


_Place = tuple[int, int]


class _Check:
    """Runs a frozen part on made-up rows.

    Args:
        prefix: the frozen part.
        device: the place where it is run.
    """

    def __init__(self, prefix: Prefix, device: torch.device) -> None:
        self._graph, self._cuts, self._device = prefix.graph, prefix.cuts, device
        self._leaves = [leaf.to(device) for leaf in leaf_values(prefix.graph, prefix.tensors)]
        self._runner = Runner(prefix.graph, cuts=prefix.cuts, device=device)
        self._specs = prefix.inputs
        names = [*self._graph.inputs, *(name for name, _ in self._graph.leaves)]
        self._first = len(names)
        self._slots = {name: slot for slot, name in enumerate([*names, *(node.name for node in self._graph.nodes)])}

    def first_mixed(self) -> str:
        """The name of the first operation that mixes rows; empty where no cut has anything of other rows."""
        nodes, at_cuts = self._graph.nodes, _places(self._cuts, self._slots)
        own = {place: self._first + place for place in range(len(nodes))}
        everywhere = partial(self._run, {place: {slot, *at_cuts.get(place, ())} for place, slot in own.items()})
        keys = {(place, slot) for place, slots in at_cuts.items() for slot in slots}
        rows, meant = _first_run(self._graph, self._specs, everywhere, keys)
        # What mixes rows may be let through for some values alone, which none of these has. At the same places it gives
        # other bits for them all the same.
        differing = {*_differing(rows, meant, everywhere, [_IN_PLACE])}
        of_cuts = {key: meant[key] for key in keys & meant.keys()}
        elsewhere = partial(self._run, at_cuts)
        if keys & differing or next(_differing(rows, of_cuts, elsewhere, [_ELSEWHERE]), None) is not None:
            differing.update(_differing(rows, meant, everywhere, [_ELSEWHERE]))
            differing = {(place, slot) for place, slot in differing if _is_a_batch(nodes[place])}
        places = [place for place, slot in differing if slot == own[place]]
        return nodes[min(places)].name if places else ""

    def _run(self, watched: Mapping[int, Collection[int]], rows: Rows, number: int) -> dict[_Place, torch.Tensor]:
        """The values of the rows that are looked at, at the watched places of a run."""
        batch, places = _batch(rows, number), _looked_at(number)
        found: dict[_Place, torch.Tensor] = {}

        def observe(index: int, values: Sequence[object]) -> None:
            for slot in watched.get(index, ()):
                value, node = values[slot], self._graph.nodes[index]
                if not isinstance(value, torch.Tensor):
                    continue
                if (_is_a_batch(node) or slot != self._first + index) and value.dim() and len(value) == len(batch[0]):
                    found[index, slot] = value[places]
                elif _is_one_for_all(node) and value.is_floating_point():
                    found[index, slot] = value.clone()

        with torch.inference_mode():
            self._runner.run([some.to(self._device) for some in batch], self._leaves, observe=observe)
        return found


def _places(cuts: Sequence[Cut], slots: Mapping[str, int]) -> dict[int, list[int]]:
    return {cut.after: [slots[name] for name in cut.tensors] for cut in cuts if cut.after >= 0}


def _is_a_batch(node: GraphNode) -> bool:
    if not node.shape or node.size is not None:
        return False
    return node.shape[0] == _BATCH and not any(dim.per_sample for dim in node.shape[1:])


_ONE_BY_ONE = """
abs add alias bitwise_and bitwise_not clamp clamp_min clone contiguous cos detach div elu eq exp full_like ge gelu
gt hardsigmoid hardswish hardtanh le leaky_relu lift_fresh_copy log logical_and logical_not lt masked_fill maximum
minimum mish mul ne neg ones_like pow reciprocal relu relu6 rsqrt rsub sigmoid silu sin softplus sqrt sub tanh to
to_copy type_as where zeros_like
"""
"""Operators that compute each number from those at its place, broadcast."""
_OF_IMAGES = {
    **dict.fromkeys(("conv1d", "adaptive_avg_pool1d"), 3),
    **dict.fromkeys(("conv2d", "adaptive_avg_pool2d", "avg_pool2d", "max_pool2d"), 4),
    **dict.fromkeys(("upsample_bicubic2d", "upsample_bilinear2d", "upsample_nearest2d", "pixel_shuffle"), 4),
}
"""Operators that compute each sample of a batch apart, by the dimensions of what they take with the batch first."""
_ALONG = {
    **dict.fromkeys(("cumsum", "log_softmax", "mean", "narrow", "select", "slice", "softmax", "sum"), 1),
    **dict.fromkeys(("chunk", "flip", "split", "split_with_sizes", "squeeze", "unbind"), 1),
    "roll": 2,
}
"""Operators that mix numbers along dimensions alone, by the place of these among their arguments."""
_SECOND = {"chunk": 2, "split": 2, "split_with_sizes": 2}  # of these it is elsewhere, and the first one by default
_PARTING = frozenset({"chunk", "split", "split_with_sizes", "unbind"})


def keeps_rows_apart(graph: Graph, inputs: Sequence[TensorSpec], tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether the operations of a graph are all known to give each sample the same in any company.

    False says nothing but that one of them is not.

    Args:
        graph: graph whose operations have the shapes of their trace: those must not come from untrusted clients.
        inputs: specifications of its inputs.
        tensors: weights by the names in ``graph.leaves``.
    """
    known = _RowsApart()
    for name, spec in zip(graph.inputs, inputs, strict=True):
        known.add(name, (_BATCH, *map(Dim, spec.shape)))
    for name, path in graph.leaves:
        known.add(name, tuple(map(Dim, tensors[path].shape)))
    return all(map(known.follows, graph.nodes))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """A value of which each sample has its own piece of one dimension, or that is the same whatever the samples are.

    Attributes:
        sizes: sizes of the dimensions; of the one along which the samples lie, that of one sample.
        axis: the dimension along which the samples lie; None where the value is the same for all samples.
    """

    sizes: tuple[int, ...]
    axis: int | None

    @property
    def from_the_end(self) -> int:
        """The dimension along which the samples lie, counted from behind; 0 where there is none."""
        return 0 if self.axis is None else self.axis - len(self.sizes)

    @property
    def piece(self) -> tuple[int, int]:
        """The dimension counted from behind, and what a sample has of it."""
        return self.from_the_end, 1 if self.axis is None else self.sizes[self.axis]

    def dims(self, given: Argument, more: int = 0) -> set[int]:
        """Dimensions as they are given to an operator, counted from the front; none where they are not numbers."""
        found = given if isinstance(given, tuple) else (given,)
        count = len(self.sizes) + more
        return {dim % count for dim in found if isinstance(dim, int)} if count else set()


class _RowsApart:
    """Follows through a graph along which dimension of each value the samples lie."""

    def __init__(self) -> None:
        self._known: dict[str, _Rows] = {}
        self._lists: set[str] = set()
        self._sizes: set[str] = set()

    def add(self, name: str, shape: Sequence[Dim] | None) -> bool:
        """Know a value by its shape; False where the samples do not lie along one dimension alone."""
        found = None if shape is None else _lying(shape)
        if found is not None:
            self._known[name] = found
        return found is not None

    def follows(self, node: GraphNode) -> bool:
        """Whether each sample's piece of the result depends on its own pieces alone."""
        if node.size is not None:
            self._sizes.add(node.name)
            return True
        read = reads(node)
        if packet_of(node) == "getitem":
            return self._lists.issuperset(read) and self.add(node.name, node.shape)
        is_for_all = all(name in self._known and self._known[name].axis is None for name in read)
        if node.shape is None:  # several values: their dimensions come with each
            self._lists.add(node.name)
            return is_for_all or (packet_of(node) in _PARTING and _is_along_others(node, self._taken(node), None))
        made = _lying(node.shape)
        if made is None or (is_for_all and made.axis is not None):
            return False
        self._known[node.name] = made
        return is_for_all or self._is_apart(node, made)

    def _is_apart(self, node: GraphNode, made: _Rows) -> bool:
        rule = _RULES.get(packet_of(node))
        has_sizes = not self._sizes.isdisjoint(reads(node)) and packet_of(node) not in _SIZED
        if rule is None or made.axis is None or has_sizes or references(tuple(value for _, value in node.kwargs)):
            return False
        taken = self._taken(node)
        return bool(taken) and rule(node, taken, made)

    def _taken(self, node: GraphNode) -> list[_Rows]:
        return [self._known[name] for name in references(node.args) if name not in self._sizes]


def _lying(shape: Sequence[Dim]) -> _Rows | None:
    axes = [place for place, dim in enumerate(shape) if dim.per_sample]
    if len(axes) > 1 or any(shape[axis].fixed for axis in axes):
        return None
    sizes = tuple(dim.per_sample or dim.fixed for dim in shape)
    return _Rows(sizes=sizes, axis=axes[0] if axes else None)


def _argument(node: GraphNode, place: int, name: str, default: Argument = None) -> Argument:
    return node.args[place] if len(node.args) > place else dict(node.kwargs).get(name, default)


def _is_one_by_one(_: GraphNode, taken: Sequence[_Rows], made: _Rows) -> bool:
    return all(each.axis is None or each.piece == made.piece for each in taken)


def _is_of_images(node: GraphNode, taken: Sequence[_Rows], made: _Rows) -> bool:
    """The batch comes first, and weights are the same for all."""
    source, *weights = taken
    dims = _OF_IMAGES.get(packet_of(node), len(source.sizes))
    return (
        len(source.sizes) == dims
        and (source.axis, made.axis) == (0, 0)
        and source.sizes[0] == made.sizes[0]
        and all(weight.axis is None for weight in weights)
    )


def _is_normalised_alone(node: GraphNode, taken: Sequence[_Rows], made: _Rows) -> bool:
    places = {"batch_norm": (5, "training"), "instance_norm": (5, "use_input_stats"), "dropout": (2, "train")}
    place, name = places[packet_of(node)]
    if packet_of(node) == "dropout":
        return _argument(node, place, name) is False and _is_one_by_one(node, taken, made)
    return _argument(node, place, name) is False and _is_of_images(node, taken, made)


def _is_along_others(node: GraphNode, taken: Sequence[_Rows], made: _Rows | None) -> bool:
    """What is mixed lies along other dimensions than the samples; ``made`` is None where parts of it are given."""
    source, packet = taken[0], packet_of(node)
    if source.axis is None or len(taken) > 1:
        return False
    default = 0 if packet in _PARTING else None
    place, name = _SECOND.get(packet, _ALONG[packet]), "dims" if packet in ("flip", "roll") else "dim"
    dims = source.dims(_argument(node, place, name, default))
    if not dims or source.axis in dims:
        return False
    if made is None:
        return True
    gone = len(source.sizes) - len(made.sizes)
    axis = source.axis - (sum(dim < source.axis for dim in dims) if gone else 0)
    return gone in (0, len(dims)) and made.axis == axis and made.sizes[axis] == source.sizes[source.axis]


def _is_joined(node: GraphNode, taken: Sequence[_Rows], made: _Rows) -> bool:
    """Tensors one behind the other, or a dimension more, along others than the samples."""
    more = packet_of(node) in ("stack", "unsqueeze")
    dims = taken[0].dims(_argument(node, 1, "dim", 0), int(more))
    first = taken[0]
    if first.axis is None or any((each.axis, len(each.sizes)) != (first.axis, len(first.sizes)) for each in taken):
        return False
    axis = first.axis + (int(min(dims) <= first.axis) if more else 0)
    pieces = {each.sizes[first.axis] for each in taken}
    return bool(dims) and (more or axis not in dims) and made.axis == axis and pieces == {made.sizes[axis]}


def _is_read_anew(_: GraphNode, taken: Sequence[_Rows], made: _Rows) -> bool:
    """The same numbers in their order, with as many before the samples' dimension."""
    [source] = taken
    if source.axis is None or made.axis is None:
        return False
    before = math.prod(source.sizes[: source.axis]) == math.prod(made.sizes[: made.axis])
    return before and math.prod(source.sizes) == math.prod(made.sizes)


def _is_turned(node: GraphNode, taken: Sequence[_Rows], made: _Rows) -> bool:
    [source] = taken
    order = [*range(len(source.sizes))]
    match packet_of(node), node.args:
        case "permute", (_, tuple(dims)) if all(isinstance(dim, int) for dim in dims):
            order = [dim % len(order) for dim in dims if isinstance(dim, int)]
        case (("transpose" | "swapaxes"), (_, int(one), int(other))):
            order[one], order[other] = order[other], order[one]
        case "t", (_,):
            order.reverse()
        case _:
            return False
    sizes = tuple(source.sizes[dim] for dim in order)
    return made.axis is not None and order[made.axis] == source.axis and sizes == made.sizes


def _is_repeated(node: GraphNode, taken: Sequence[_Rows], made: _Rows) -> bool:
    """What is the same for all is given to each; what is each one's own stays where it is."""
    source = taken[0]
    return source.axis is None or (packet_of(node) != "repeat" and source.piece == made.piece)


def _is_multiplied(node: GraphNode, taken: Sequence[_Rows], made: _Rows) -> bool:
    """Matrices of each sample with others of its own, or with some that are the same for all."""
    packet, (first, *others) = packet_of(node), taken
    if packet in ("linear", "mm"):
        is_last = first.axis is None or first.from_the_end == -1
        return not is_last and first.piece == made.piece and all(each.axis is None for each in others)
    if packet == "scaled_dot_product_attention" and _argument(node, 4, "dropout_p", 0.0) != 0.0:
        return False
    rows_of_one = packet == "matmul" and first.from_the_end == -2 and others[0].axis is None
    is_of_each = all(each.axis is None or each.from_the_end <= -3 for each in taken)
    has_matrices = all(len(each.sizes) > 1 for each in taken)
    return has_matrices and (is_of_each or rows_of_one) and _is_one_by_one(node, taken, made)


def _is_of_the_last(node: GraphNode, taken: Sequence[_Rows], made: _Rows) -> bool:
    """Only the last dimensions are worked on, which are not the samples'."""
    (source, *weights), given = taken, node.args[1]
    length = len(given) // (2 if "pad" in packet_of(node) else 1) if isinstance(given, tuple) else len(source.sizes)
    is_before = source.axis is not None and source.axis < len(source.sizes) - length
    return is_before and source.piece == made.piece and all(weight.axis is None for weight in weights)


def _is_looked_up(_: GraphNode, taken: Sequence[_Rows], made: _Rows) -> bool:
    table, places = taken
    return table.axis is None and places.axis == made.axis and places.sizes == made.sizes[:-1]


_Rule = Callable[[GraphNode, Sequence[_Rows], _Rows], bool]
_RULES: Mapping[str, _Rule] = {
    **dict.fromkeys(_ONE_BY_ONE.split(), _is_one_by_one),
    **dict.fromkeys((*_OF_IMAGES, "group_norm"), _is_of_images),
    **dict.fromkeys(("batch_norm", "dropout", "instance_norm"), _is_normalised_alone),
    **dict.fromkeys(_ALONG, _is_along_others),
    **dict.fromkeys(("cat", "stack", "unsqueeze"), _is_joined),
    **dict.fromkeys(("flatten", "reshape", "unflatten", "view"), _is_read_anew),
    **dict.fromkeys(("permute", "swapaxes", "t", "transpose"), _is_turned),
    **dict.fromkeys(("expand", "repeat"), _is_repeated),
    **dict.fromkeys(("bmm", "linear", "matmul", "mm", "scaled_dot_product_attention"), _is_multiplied),
    **dict.fromkeys(("layer_norm", "pad"), _is_of_the_last),
    "embedding": _is_looked_up,
}
_SIZED = frozenset({"expand", "flatten", "repeat", "reshape", "unflatten", "view"})
