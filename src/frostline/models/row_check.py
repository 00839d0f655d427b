"""Finds out by running it whether a frozen part gives each sample the same whatever samples are beside it.

Few rows are run in one company, in another one at the same places, and among more at other places. The first two runs
must agree to the last bits, since kernels do the same steps on the same places; the third within what sums in another
order differ by. No run can show what a network does on every sample: what decides by rare values is not found.

Where operations say so themselves (see ``models.rows_apart``), nothing is run.
"""

import hashlib
import json
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
from frostline.engines.graph_runner import Runner, as_array, as_tensor, leaf_values
from frostline.engines.protocols import Arrays
from frostline.models.artifact import Prefix, file_bytes, graph_to_json
from frostline.models.graph import packet_of, reads
from frostline.models.rows_apart import keeps_rows_apart

__all__ = ("MixedRows", "differs", "is_mixing", "make_rows", "mixed_rows")

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
