"""Records what a network calls on two small batches, and reads a graph from what both have in common.

Nothing is compiled and no symbol is needed: what differs between two rows and three rows is a size that the batch
decides, and each such size is a line through these two. ``torch.export`` gives the same operators, and takes a second
to be imported before it begins.

Sees PyTorch's operators before they are taken apart, since autograd's part of the dispatcher is left out.

Of code that no graph can express it has what both batches have in common until then.
"""

import inspect
import operator
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_flatten
from torch.utils.weak import TensorWeakRef

from frostline.core import Dim, GraphNode, Ref, Token
from frostline.core.errors import NotTraceable
from frostline.core.graph import Argument, references
from frostline.engines.graph_runner import is_known
from frostline.engines.measure import SeesOperators, storage_key
from frostline.models.outside import effects_of

__all__ = ("BY_SIZE", "BY_VALUES", "DRAWS", "Recording", "record", "size_of")

BY_VALUES = "its code decides by the values of a tensor"
BY_SIZE = "its code decides by the size of the batch"
DRAWS = "it draws random numbers that are not torch's, counts its runs, or computes in threads of its own"
_DERIVES = "its code computes gradients itself"
_MADE = "its code makes layers as it runs"
_BEHIND = "its code has a weight or a value once more by another name, as `data` gives it"

_SIZED_BY_VALUES = ("aten.argwhere.default", "aten.where.default", "aten.nonzero_numpy.default")
"""Operators whose results have sizes that the values decide, though PyTorch marks only what they are composed of."""

_MARK = "_frostline_value"
_Args = tuple[Argument, ...]
_Named = tuple[tuple[str, Argument], ...]
_DETACH, _COPY = "aten.detach.default", "aten.copy_.default"

_READ_OUT = tuple(
    getattr(torch.Tensor, name)
    for name in ("numpy", "tolist", "__array__", "__dlpack__", "data_ptr", "untyped_storage", "storage")
)
_DERIVING = (torch.autograd.grad, torch.Tensor.backward)
_SHAPE, _SIZE, _LEN = torch.Tensor.shape.__get__, torch.Tensor.size, torch.Tensor.__len__  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A tensor that was seen, without its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    is_contiguous: bool
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """An operator that was called: as ``GraphNode`` says it, with the sizes of this batch."""

    name: str
    op: str
    args: _Args
    kwargs: _Named
    storage: str
    module: str
    is_pure: bool
    value: Value | None
    writes: tuple[str, ...] = ()


@dataclass(kw_only=True)
class Recording:
    """What a network did with one batch.

    Attributes:
        inputs: names of the values that came in.
        leaves: the path of each parameter, buffer or constant by its name in the graph.
        constants: the tensors behind paths that begin with ``constant:``.
        calls: the operators, in order.
        values: shape, strides and dtype of each tensor by its name.
        outputs: tensors and numbers that the network returned.
        structure: the way that these form what ``forward`` returns; None where the recording ends before that.
        alive: names of the tensors that the code had in hand there.
    """

    inputs: tuple[str, ...]
    leaves: dict[str, str] = field(default_factory=dict)
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    values: dict[str, Value] = field(default_factory=dict)
    outputs: tuple[Argument, ...] = ()
    structure: TreeSpec | None = None
    alive: frozenset[str] = frozenset()

    def nodes(self, other: "Recording") -> tuple[tuple[GraphNode, ...], tuple[Argument, ...]]:
        """The graph's nodes and outputs, from this recording and one of another batch.

        Raises:
            NotTraceable: The two are not the same but for sizes.
        """
        few, more = ([(call.name, call.op) for call in each.calls] for each in (self, other))
        if few != more or self.leaves != other.leaves or self.structure != other.structure:
            raise NotTraceable(BY_SIZE)
        if any(not _is_equal(tensor, other.constants[path]) for path, tensor in self.constants.items()):
            raise NotTraceable(DRAWS)
        sizes, nodes = _Sizes(self.inputs[0]), list[GraphNode]()
        for own, others in zip(self.calls, other.calls, strict=True):
            args = cast(_Args, sizes.both(own.args, others.args))
            kwargs = cast(_Named, sizes.both(own.kwargs, others.kwargs))
            nodes.append(_node(own, others, args, kwargs))
        outputs = tuple(sizes.both(*pair) for pair in zip(self.outputs, other.outputs, strict=True))
        return (*sizes.made, *nodes), outputs

    def common_start(
        self, other: "Recording"
    ) -> tuple[tuple[GraphNode, ...], tuple[Argument, ...], tuple[Argument, ...]]:
        """The nodes up to where this recording and one of another batch part, what is needed there, and what is alive.

        Needed is what one of them reads later, and what nobody has read when a recording ended: of what was read
        before nobody knows. Alive is that too, with all that the code had in hand.
        """
        sizes, nodes = _Sizes(self.inputs[0]), list[GraphNode]()
        others = {name for name, path in self.leaves.items() if not self._has_alike(other, name, path)}
        for own, theirs in zip(self.calls, other.calls, strict=False):
            read = {*references(own.args), *references(own.kwargs)}
            if (own.name, own.op) != (theirs.name, theirs.op) or not (others.isdisjoint(read) and is_known(own.op)):
                break
            try:
                args = cast(_Args, sizes.both(own.args, theirs.args))
                nodes.append(_node(own, theirs, args, cast(_Named, sizes.both(own.kwargs, theirs.kwargs))))
            except NotTraceable:
                break
        later = {*references(self.outputs), *references(other.outputs)}
        for call in (*self.calls[len(nodes) :], *other.calls[len(nodes) :]):
            later.update(references(call.args), references(call.kwargs))
        read = {name for node in nodes for name in (*references(node.args), *references(node.kwargs))}
        alive = self.alive & other.alive
        needed, in_hand = (
            tuple(Ref(node.name) for node in nodes if node.name in wanted)
            for wanted in (later | (alive - read), later | alive)
        )
        return (*sizes.made, *nodes), needed, in_hand

    def _has_alike(self, other: "Recording", name: str, path: str) -> bool:
        if other.leaves.get(name) != path:
            return False
        return path not in self.constants or _is_equal(self.constants[path], other.constants[path])


def record(
    model: nn.Module, batch: Sequence[torch.Tensor], earlier: Recording | None = None, *, may_end_early: bool = False
) -> Recording:
    """Run ``model`` once and say what it called.

    Args:
        model: the user's network, in the modes that it is to be recorded in. What its code leaves behind stays.
        batch: inputs of the network.
        earlier: recording of a smaller batch, by which sizes are told from numbers.
        may_end_early: give what was recorded until the network does something that no graph can express.

    Raises:
        NotTraceable: The network does that, and the recording may not end early.
    """
    recorder = _Recorder(model, batch, earlier)
    with torch.enable_grad():
        below_autograd = torch._C._AutoDispatchBelowAutograd()  # noqa: SLF001 (no public name does this)
        try:
            with _as_exported(), _followed(recorder), _Watch(recorder), below_autograd, recorder:
                returned = model(*batch)
        except NotTraceable:
            if not may_end_early:
                raise
            return recorder.ended_early()  # while the frames are there that hold the tensors
        return recorder.ended(returned, keeps_all=may_end_early)


@contextmanager
def _as_exported() -> Iterator[None]:
    """Networks of libraries ask whether they are exported, and leave out then what looks at values."""
    with _replaced(torch.compiler, _is_compiling_flag=True, _is_exporting_flag=True):
        yield


@contextmanager
def _replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Give something other attributes for a while."""
    before = {name: getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


@contextmanager
def _followed(recorder: "_Recorder") -> Iterator[None]:
    """Have the recorder know whose forward runs, with the hooks of that module."""
    paths = {module: path for path, module in recorder.model.named_modules()}
    thread, call = threading.get_ident(), nn.Module.__call__

    def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread or module not in paths:
            return call(module, *args, **kwargs)
        recorder.modules.append(paths[module])
        try:
            return call(module, *args, **kwargs)
        finally:
            recorder.modules.pop()

    with _replaced(nn.Module, __call__=called):
        yield


class _Recorder(SeesOperators):  # type: ignore[no-untyped-call]  # torch does not annotate it
    """Writes down each operator on its way to its kernel.

    Args:
        model: network that will run.
        batch: inputs of the network.
        earlier: recording of a smaller batch.
    """

    def __init__(self, model: nn.Module, batch: Sequence[torch.Tensor], earlier: Recording | None) -> None:
        super().__init__()
        self.model, self.modules, self.is_at_work = model, [""], False
        self._earlier = earlier
        self._found = Recording(inputs=_input_names(model, len(batch)))
        self._counts: dict[str, int] = {}
        self._owners: dict[Any, str] = {}  # the value that first had a memory, whose key stays valid when it is freed
        self._roots: dict[str, str] = {}
        self._fixed, self._off, self._detached = set[str](), set[str](), dict[str, str]()
        named = (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
        self._own = {id(tensor): path for tensors in named for path, tensor in tensors}
        self._buffers = list(model.named_buffers())
        self._kept = [*model.parameters(), *model.buffers()]  # so that no other tensor has their place in memory
        self._weights = {storage_key(tensor) for tensor in self._kept if tensor.layout == torch.strided}
        self._known: dict[int, str] = {}
        self._seen = list[TensorWeakRef]()
        for name, tensor in zip(self._found.inputs, batch, strict=True):
            self._counts[name] = 1
            self._see(tensor, name)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.is_at_work = True
        try:
            given = tuple(self._argument(value) for value in args)
            named = tuple((name, self._argument(value)) for name, value in sorted((kwargs or {}).items()))
            made = func(*args, **(kwargs or {}))
            self._call(func, given, named, made)
            return made
        except NotTraceable:
            self.note_alive()
            raise
        finally:
            self.is_at_work = False

    def depends(self, value: Any) -> bool:
        """Whether a tensor's values are other ones for other rows, weights or random numbers."""
        if not isinstance(value, torch.Tensor):
            return False
        name = self._found_name(value)
        return id(value) in self._own if name is None else name not in self._fixed

    def sizes(self, value: Any) -> "list[int] | None":
        """The shape of a tensor, in which those that the batch decides know it; None where none is known."""
        if self._earlier is None or not isinstance(value, torch.Tensor):
            return None
        earlier = self._earlier.values.get(self._found_name(value) or "")
        if earlier is None or len(earlier.shape) != value.dim():
            return None
        pairs = zip(earlier.shape, value.shape, strict=True)
        return [more if few == more else _BatchSize((few, more)) for few, more in pairs]

    def ended(self, returned: Any, *, keeps_all: bool) -> Recording:
        """The recording, once the network has returned this; without calls of which nothing is read, or with all."""
        self._copy_replaced_buffers()
        leaves, structure = tree_flatten(returned)
        self._found.outputs = tuple(self._argument(leaf) for leaf in leaves)
        self._found.structure = structure
        if not keeps_all:
            self._found.calls = _needed(self._found.calls, self._found.outputs)
        return self._found

    def ended_early(self) -> Recording:
        """The recording, before the network returns anything."""
        if not self._found.alive:
            self.note_alive()
        return self._found

    def note_alive(self) -> None:
        """Note the tensors that the network's code has in hand, of which no frame has some any more once it is left."""
        tensors = (tensor for place in self._seen if (tensor := place()) is not None)
        self._found.alive = frozenset(map(self._name, tensors))  # as each is called by now

    def _copy_replaced_buffers(self) -> None:
        """What the network put in the place of a buffer is that buffer's next value."""
        for path, buffer in self._buffers:
            owner, _, name = path.rpartition(".")
            now = getattr(self.model.get_submodule(owner), name)
            if now is not buffer and isinstance(now, torch.Tensor):
                args, made = (Ref(self._name(buffer)), Ref(self._name(now))), self._unique("copy_")
                self._roots[made] = args[0].name
                self._write(made, _COPY, args, is_pure=False)

    def _call(self, func: Any, args: _Args, kwargs: _Named, made: Any) -> None:
        is_mutable = func._schema.is_mutable  # noqa: SLF001 (no public name tells it)
        is_seeded = torch.Tag.nondeterministic_seeded in func.tags
        reads = [*references(args), *references(kwargs)]
        is_fixed = not is_seeded and self._fixed.issuperset(reads)
        parts = [part for part in (made if isinstance(made, list | tuple) else [made]) if part is not None]
        is_a_number = not all(isinstance(part, torch.Tensor) for part in parts)
        if not is_fixed and (is_a_number or _sized_by_values(func, args, self._found.values)):
            raise NotTraceable(BY_VALUES)
        if is_a_number:
            return  # the same one for all rows
        if is_mutable and not torch.is_grad_enabled() and not self._off.issuperset(reads[:1]):
            raise NotTraceable("the network writes to a tensor where it turns gradients off")
        self._refuse_sparse(parts)
        op = str(func).replace("aten.lift_fresh.", "aten.lift_fresh_copy.")
        name = self._unique(op.split(".")[1])
        if is_fixed:
            self._fixed.add(name)
        if op.startswith("aten.lift_fresh_copy."):
            # The recording only has the constant itself; a run copies it.
            self._owners.update((storage_key(part), name) for part in parts)
        owners = [self._owners.setdefault(storage_key(part), name) for part in parts]
        self._roots[name] = next((owner for owner in owners if owner != name), name)
        writes = _written(func, args, kwargs) if is_mutable else ()
        if is_mutable and not is_fixed:
            written = {self._roots[name], *(self._roots[read] for read in (*reads[:1], *writes))}
            self._fixed = {fixed for fixed in self._fixed if self._roots[fixed] not in written}
        if isinstance(made, torch.Tensor):
            self._see(made, name)
        self._write(name, op, args, kwargs, is_pure=not (is_seeded or is_mutable), writes=writes)
        if isinstance(made, list | tuple):
            for place, part in enumerate(made):
                self._part(name, place, part)

    def _part(self, whole: str, place: int, part: Any) -> None:
        if part is None:
            return
        name = self._unique("getitem")
        if whole in self._fixed:
            self._fixed.add(name)
        self._see(part, name)
        self._write(name, "operator.getitem", (Ref(whole), place))

    def _write(
        self,
        name: str,
        op: str,
        args: _Args,
        kwargs: _Named = (),
        *,
        is_pure: bool = True,
        writes: tuple[str, ...] = (),
    ) -> None:
        root = self._roots[name]
        call = Call(
            name=name,
            op=op,
            args=args,
            kwargs=kwargs,
            storage=root if root != name else "",
            module=self.modules[-1],
            is_pure=is_pure,
            value=self._found.values.get(name),
            writes=writes,
        )
        self._found.calls.append(call)

    def _see(self, tensor: torch.Tensor, name: str) -> None:
        """Call a tensor so from now on."""
        self._refuse_sparse([tensor])
        self._found.values[name] = _value(tensor)
        self._seen.append(TensorWeakRef(tensor))
        if id(tensor) in self._own or id(tensor) in self._known:
            self._known[id(tensor)] = name
        else:
            setattr(tensor, _MARK, (self, name))
        if not torch.is_grad_enabled():
            self._off.add(name)
        self._roots[name] = self._owners.setdefault(storage_key(tensor), name)

    def _refuse_sparse(self, tensors: Sequence[torch.Tensor | None]) -> None:
        if any(tensor is not None and tensor.layout != torch.strided for tensor in tensors):
            raise NotTraceable(f"the network computes with sparse tensors in {self.modules[-1] or 'its own forward'}")

    def _name(self, tensor: torch.Tensor) -> str:
        """The value that a tensor is."""
        return self._found_name(tensor) or self._leaf(tensor)

    def _found_name(self, tensor: torch.Tensor) -> str | None:
        recorder, name = getattr(tensor, _MARK, (None, ""))
        return str(name) if recorder is self else self._known.get(id(tensor))

    def _leaf(self, tensor: torch.Tensor) -> str:
        """A parameter or buffer that is read for the first time, or a tensor that no operator has given."""
        path = self._own.get(id(tensor))
        if path is None and tensor.layout == torch.strided and storage_key(tensor) in {*self._owners, *self._weights}:
            is_new = isinstance(tensor, nn.Parameter) and storage_key(tensor) not in self._weights
            raise NotTraceable(_MADE if is_new else _BEHIND)
        prefix, path = ("p", path) if path is not None else ("c", self._constant(tensor))
        name = self._unique(f"{prefix}_{path.removeprefix('constant:').replace('.', '_')}")
        self._found.leaves[name] = path
        self._known[id(tensor)] = name
        self._kept.append(tensor)
        self._see(tensor, name)
        self._off.discard(name)
        if prefix == "c":
            self._fixed.add(name)
        return name

    def _constant(self, tensor: torch.Tensor) -> str:
        modules = self.model.named_modules()
        places = ((f"{path}.{key}", value) for path, module in modules for key, value in vars(module).items())
        found = (place.lstrip(".") for place, value in places if value is tensor)
        path = f"constant:{next(found, f'lifted_{len(self._found.constants)}')}"
        # Of its own: what is changed of the network's afterwards has to be noticed.
        self._found.constants[path] = tensor.detach().clone()
        return path

    def _unique(self, name: str) -> str:
        count = self._counts[name] = self._counts.get(name, 0) + 1
        return name if count == 1 else self._unique(f"{name}_{count - 1}")

    def _argument(self, value: Any) -> Argument:
        match value:
            case torch.Tensor():
                return Ref(self._without_gradients(self._name(value)))
            case list() | tuple():
                return tuple(self._argument(item) for item in value)
            case _:
                return _constant(value)

    def _without_gradients(self, name: str) -> str:
        """What was made where gradients were off has none where they are on again."""
        if name not in self._off or not torch.is_grad_enabled():
            return name
        if name not in self._detached:
            made = self._detached[name] = self._unique("detach")
            self._found.values[made], self._roots[made] = self._found.values[name], self._roots[name]
            self._write(made, _DETACH, (Ref(name),))
            self._fixed.update({made} if name in self._fixed else ())
        return self._detached[name]


class _Watch(TorchFunctionMode):
    """Sees what the dispatcher hears nothing of: values that are read out, and sizes that are asked for."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if self._recorder.is_at_work:
            return func(*args, **(kwargs or {}))
        if func in _READ_OUT and self._recorder.depends(args[0]):
            self._recorder.note_alive()
            raise NotTraceable(BY_VALUES)
        if func in _DERIVING:
            return self._derived(func, args, kwargs or {})
        made = func(*args, **(kwargs or {}))
        if func not in (_SHAPE, _SIZE, _LEN) or (sizes := self._recorder.sizes(args[0])) is None:
            return made
        if func is _LEN:
            return sizes[0]
        place = args[1] if len(args) > 1 else (kwargs or {}).get("dim")
        return torch.Size(sizes) if place is None else sizes[place]

    def _derived(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What a call gives that computes gradients; those of torch.func, which keep to themselves, are followed."""
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            self._recorder.note_alive()
            raise NotTraceable(_DERIVES) from error


class _BatchSize(int):
    """A size that the batch decides: what is computed from it is known for both batches."""

    pair: tuple[int, int]

    def __new__(cls, pair: tuple[int, int]) -> "_BatchSize":
        made = super().__new__(cls, pair[1])
        made.pair = pair
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return int, (int(self),)

    __hash__ = int.__hash__


ROWS = (2, 3)
"""Rows of the two batches. One row would be told from several; two lines meet in what one more row makes of a size."""


def _on_both(call: Callable[[Any, Any], int], *, reflected: bool = False) -> Callable[[int, Any], Any]:
    def computed(self: int, other: Any) -> Any:
        if not isinstance(other, int):
            return NotImplemented
        left, right = (_pair(other), _pair(self)) if reflected else (_pair(self), _pair(other))
        if call in (operator.floordiv, operator.mod) and any(part % right[0] for part in _line(left)):
            raise NotTraceable(BY_SIZE)
        few, more = (call(own, others) for own, others in zip(left, right, strict=True))
        return few if few == more else _BatchSize((few, more))

    return computed


def _compared(call: Callable[[int, int], bool]) -> Callable[[int, Any], Any]:
    """A comparison that comes out the same whatever the number of rows, or none at all."""

    def compared(self: int, other: Any) -> Any:
        if not isinstance(other, int):
            return NotImplemented
        (few, more), (others_few, others_more) = _pair(self), _pair(other)
        ahead, slope = few - others_few, (more - others_more) - (few - others_few)
        crosses = slope != 0 and ahead * slope <= 0
        if crosses and (call not in (operator.eq, operator.ne) or ahead % slope == 0):
            raise NotTraceable(BY_SIZE)
        return call(ahead, 0)

    return compared


def _pair(value: int) -> tuple[int, int]:
    return value.pair if isinstance(value, _BatchSize) else (value, value)


def _line(pair: tuple[int, int]) -> tuple[int, int]:
    """What each row adds to a size, and what it is without rows."""
    per_sample = (pair[1] - pair[0]) // (ROWS[1] - ROWS[0])
    return per_sample, pair[0] - per_sample * ROWS[0]


for _name in ("add", "sub", "mul", "floordiv", "mod"):
    setattr(_BatchSize, f"__{_name}__", _on_both(getattr(operator, _name)))
    setattr(_BatchSize, f"__r{_name}__", _on_both(getattr(operator, _name), reflected=True))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(_BatchSize, f"__{_name}__", _compared(getattr(operator, _name)))


class _Sizes:
    """Where two recordings differ in sizes alone, what computes these from the number of rows.

    Args:
        source: value whose first dimension is the number of rows.

    Attributes:
        made: the nodes that compute sizes, which need the source alone and so stand before all others.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        self._names: dict[Dim, str] = {}
        self.made: list[GraphNode] = []

    def both(self, few: Argument, more: Argument) -> Argument:
        """The argument of both recordings.

        Raises:
            NotTraceable: The two recordings differ in more than a size.
        """
        match few, more:
            case tuple(), tuple() if len(few) == len(more):
                return tuple(self.both(*pair) for pair in zip(few, more, strict=True))
            case int(), int() if few != more and not isinstance(few, bool):
                return Ref(self._name(size_of(few, more)))
            case float(), float() if repr(few) != repr(more):
                raise NotTraceable(DRAWS)
            case _ if type(few) is type(more) and repr(few) == repr(more):
                return few
        raise NotTraceable(BY_SIZE)

    def _name(self, dim: Dim) -> str:
        if dim not in self._names:
            if dim == Dim(0, 1):
                made = GraphNode(name="size", op="aten.sym_size.int", args=(Ref(self._source), 0), size=dim)
            elif dim.fixed:
                rest = Ref(self._name(Dim(0, dim.per_sample)))
                made = self._arithmetic("operator.add", rest, dim.fixed, dim)
            else:
                made = self._arithmetic("operator.mul", Ref(self._name(Dim(0, 1))), dim.per_sample, dim)
            self._names[dim] = made.name
            self.made.append(made)
        return self._names[dim]

    def _arithmetic(self, op: str, left: Ref, right: int, dim: Dim) -> GraphNode:
        return GraphNode(name=f"size_{len(self._names)}", op=op, args=(left, right), size=dim)


def size_of(few: int, more: int) -> Dim:
    """The size that is so large for either batch."""
    per_sample, fixed = _line((few, more))
    return Dim(fixed, per_sample)


def _node(few: Call, more: Call, args: _Args, kwargs: _Named) -> GraphNode:
    """An operation, as the calls of both recordings say it."""
    shape = order = None
    if few.value is not None and more.value is not None:
        if len(few.value.shape) != len(more.value.shape) or few.value.dtype != more.value.dtype:
            raise NotTraceable(BY_SIZE)
        shape = tuple(size_of(*pair) for pair in zip(few.value.shape, more.value.shape, strict=True))
        order = _order(more.value)
    return GraphNode(
        name=few.name,
        op=few.op,
        args=args,
        kwargs=kwargs,
        shape=shape,
        order=order,
        dtype="" if few.value is None else few.value.dtype,
        storage=few.storage if few.storage == more.storage else "",
        module=few.module,
        writes=few.writes,
    )


def _order(value: Value) -> tuple[int, ...] | None:
    dims = range(len(value.shape))
    if value.is_contiguous:
        return tuple(dims)
    if any(stride == 0 and size != 1 for size, stride in zip(value.shape, value.stride, strict=True)):
        return None
    return tuple(sorted(dims, key=lambda dim: -value.stride[dim]))


def _input_names(model: nn.Module, count: int) -> tuple[str, ...]:
    """The names that ``forward`` has for its first parameters; what ``*args`` takes is counted."""
    names = list[str]()
    for parameter in inspect.signature(model.forward).parameters.values():
        if parameter.kind == inspect.Parameter.VAR_POSITIONAL:
            names += [f"{parameter.name}_{place}" for place in range(count - len(names))]
        names.append(parameter.name)
    return tuple(names[:count])


def _value(tensor: torch.Tensor) -> Value:
    return Value(
        shape=tuple(tensor.shape),
        stride=tensor.stride(),
        offset=int(tensor.storage_offset()),
        is_contiguous=tensor.is_contiguous(),
        dtype=str(tensor.dtype).removeprefix("torch."),
    )


def _written(func: Any, args: _Args, kwargs: _Named) -> tuple[str, ...]:
    """The values that an operator changes; ``detach_`` changes none, whatever its schema says."""
    places, named = () if func is torch.ops.aten.detach_.default else effects_of(func)[0], dict(kwargs)
    return tuple(references(tuple(args[place] if place < len(args) else named.get(name) for place, name in places)))


def _sized_by_values(func: Any, args: Argument, values: Mapping[str, Value]) -> bool:
    """Whether an operator's result has a size that the values decide, as what a mask of its selects."""
    if func is torch.ops.aten.index.Tensor:  # it is said of all indices, and true of masks
        return any(values[name].dtype in ("bool", "uint8") for name in references(args)[1:])
    return torch.Tag.dynamic_output_shape in func.tags or str(func) in _SIZED_BY_VALUES


def _needed(calls: Sequence[Call], outputs: Argument) -> list[Call]:
    """The calls that something is read of, or that do more than give something."""
    needed, kept = set(references(outputs)), []
    for call in reversed(calls):
        if call.name in needed or not call.is_pure:
            needed.update(references(call.args), references(call.kwargs))
            kept.append(call)
    return kept[::-1]


def _is_equal(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return tensor.shape == other.shape and tensor.dtype == other.dtype and torch.equal(tensor, other)


def _constant(value: Any) -> Argument:
    match value:
        case None | bool() | int() | float() | str():
            return value
        case torch.dtype() | torch.layout() | torch.memory_format():
            return Token(type(value).__name__, str(value).removeprefix("torch."))
        case torch.device():
            return Token("device", "")
        case _:
            raise NotTraceable(f"the network passes a {type(value).__name__}, which Frostline cannot carry")
