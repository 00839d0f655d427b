"""Runs a graph node by node, by an allow-list of operators whose arguments are checked before any is called.

Torch takes an integer where a dtype belongs and reads the memory of its tables with it, so that names alone are no
protection: every argument must be of the type that the schema gives it, a constant must be one of those that networks
use, and a number must lie in a range.

Run a graph node by node: no code is generated, and each value is freed after its last use.
"""

import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt
import torch

from frostline.core import Cut, Graph, GraphNode, Ref, Token
from frostline.core.errors import UnsafeArtifact
from frostline.core.graph import Argument, Lengths, at_length, buckets, references, subgraph_for, weightless_values
from frostline.engines.machine import compute_slot, settle_kernels
from frostline.engines.protocols import Arrays, Between

__all__ = (
    "ALLOWED",
    "FACTORIES",
    "LOOKUPS",
    "MAX_REFERENCES",
    "PYTHON_OPERATORS",
    "TOKENS",
    "LengthRunner",
    "Runner",
    "as_array",
    "as_tensor",
    "check_call",
    "input_tensors",
    "is_known",
    "leaf_values",
    "refused_call",
    "resolve",
    "resolve_allowed",
    "resolve_symbolic",
    "token_value",
)


# Pure computation over the arguments: nothing here reads a file, runs code it is given, or keeps state.
# Collected from traces of AlexNet, ResNet, VGG, DenseNet, MobileNet, EfficientNet, ConvNeXt, ViT,
# DistilBERT and BERT, and of the networks in docs/networks.md. Random operators are left out, since a prefix must be a
# function of its input, and so are divisions of integers, which end the process where the divisor is bad. What takes
# indices checks them (see below).
_ATEN = """
__and__.Tensor _to_copy.default abs.default adaptive_avg_pool1d.default adaptive_avg_pool2d.default add.Scalar
add.Tensor add_.Tensor addcmul.default addmm.default alias.default arange.default arange.start arange.start_step
argmax.default avg_pool2d.default batch_norm.default bitwise_and.Tensor bitwise_not.default bmm.default bucketize.Tensor
cat.default chunk.default clamp.default clamp_min.default clone.default contiguous.default conv1d.default conv2d.default
conv2d.padding copy_.default cos.default cumsum.default detach.default detach_.default diff.default div.Tensor
div_.Tensor dropout.default dropout_.default einsum.default elu.default embedding.default eq.Scalar eq.Tensor
exp.default expand.default expand_as.default fill_.Scalar fill_.Tensor flatten.using_ints flip.default full.default
full_like.default gather.default ge.Scalar ge.Tensor gelu.default group_norm.default gt.Scalar gt.Tensor
hardsigmoid.default hardsigmoid_.default hardswish.default hardswish_.default hardtanh.default hardtanh_.default
index.Tensor instance_norm.default layer_norm.default le.Scalar le.Tensor leaky_relu.default leaky_relu_.default
lift_fresh_copy.default linalg_vector_norm.default linear.default log.default log_softmax.int logical_and.default
logical_not.default lt.Scalar lt.Tensor masked_fill.Scalar masked_fill.Tensor matmul.default max_pool2d.default
maximum.default mean.default mean.dim minimum.default mish.default mm.default movedim.int mul.Scalar mul.Tensor
mul_.Tensor narrow.default ne.Scalar ne.Tensor neg.default new_ones.default new_zeros.default ones.default
ones_like.default pad.default permute.default pixel_shuffle.default pow.Tensor_Scalar prelu.default reciprocal.default
relu.default relu6.default relu_.default repeat.default reshape.default reshape_as.default roll.default rsqrt.default
rsub.Scalar scalar_tensor.default scaled_dot_product_attention.default select.int sigmoid.default sigmoid_.default
silu.default silu_.default sin.default slice.Tensor softmax.int softplus.default split.Tensor split_with_sizes.default
sqrt.default squeeze.default squeeze.dim stack.default sub.Scalar sub.Tensor sub_.Tensor sum.default sum.dim_IntList
swapaxes.default sym_size.int t.default tanh.default to.device to.dtype to.dtype_layout transpose.int type_as.default
unbind.int unflatten.int unsqueeze.default upsample_bicubic2d.vec upsample_bilinear2d.vec upsample_nearest2d.vec
view.default view.dtype where.ScalarOther where.ScalarSelf where.self zero_.default zeros.default zeros_like.default
"""

_MAX_SIZE = 1 << 48
"""The largest size, place or count that a graph may name."""

_MAX_OUTPUTS = 1024
"""The most tensors that one operation may give, such as the parts of a split."""


def _on_sizes(call: Callable[[int, int], int]) -> Callable[[Any, Any], int]:
    """Arithmetic on sizes, and on nothing else: Python's operators also repeat texts and grow numbers without end."""

    def bounded(left: Any, right: Any) -> int:
        if not (isinstance(left, int) and isinstance(right, int) and max(abs(left), abs(right)) < _MAX_SIZE):
            raise TypeError("Python's operators are for sizes here")
        return call(left, right)

    return bounded


def _item(values: Sequence[Any], place: int) -> Any:
    """One of the results of an operator that has several."""
    if not isinstance(values, list | tuple) or not isinstance(place, int):
        raise TypeError("operator.getitem takes a list and a place in it")
    return values[place]


def _embedding(weight: torch.Tensor, indices: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    _check_range(indices, 0, weight.shape[0])
    return torch.ops.aten.embedding.default(weight, indices, *args, **kwargs)


def _gather(source: torch.Tensor, dim: int, index: torch.Tensor, **kwargs: Any) -> Any:
    _check_range(index, 0, source.shape[dim] if source.dim() else 1)
    return torch.ops.aten.gather.default(source, dim, index, **kwargs)


def _index(source: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> Any:
    for index, size in zip(indices, source.shape, strict=False):
        if index is not None:
            _check_range(index, -size, size)
    return torch.ops.aten.index.Tensor(source, indices)


def _check_range(index: torch.Tensor, low: int, high: int) -> None:
    # On the CPU the operators look themselves; elsewhere a bad index is the end of the process.
    if index.device.type not in ("cpu", "meta") and not bool(((index >= low) & (index < high)).all()):
        raise IndexError("an index is out of range")


def _unbind(source: torch.Tensor, dim: int = 0) -> Any:
    _check_outputs(source.shape[dim])
    return torch.ops.aten.unbind.int(source, dim)


def _split(source: torch.Tensor, split_size: int, dim: int = 0) -> Any:
    _check_outputs(-(-source.shape[dim] // split_size) if split_size > 0 else 1)
    return torch.ops.aten.split.Tensor(source, split_size, dim)


def _chunk(source: torch.Tensor, chunks: int, dim: int = 0) -> Any:
    _check_outputs(min(chunks, source.shape[dim]))
    return torch.ops.aten.chunk.default(source, chunks, dim)


def _split_with_sizes(source: torch.Tensor, split_sizes: Sequence[int], dim: int = 0) -> Any:
    _check_outputs(len(split_sizes))
    return torch.ops.aten.split_with_sizes.default(source, split_sizes, dim)


def _diff(source: torch.Tensor, order: int = 1, *args: Any, **kwargs: Any) -> Any:
    if order != 1:  # one run of the operator for each, without end
        raise ValueError(f"differences are of order 1 here, not {order}")
    return torch.ops.aten.diff.default(source, order, *args, **kwargs)


def _check_outputs(count: int) -> None:
    # A view takes a kilobyte, whatever it shows: all elements of one large tensor end the process.
    if count > _MAX_OUTPUTS:
        raise ValueError(f"an operation gives at most {_MAX_OUTPUTS} tensors, not {count}")


_BOUNDED: dict[str, Callable[..., Any]] = {
    "aten.chunk.default": _chunk,
    "aten.diff.default": _diff,
    "aten.split.Tensor": _split,
    "aten.split_with_sizes.default": _split_with_sizes,
    "aten.unbind.int": _unbind,
}

_CHECKED: dict[str, Callable[..., Any]] = {
    "aten.embedding.default": _embedding,
    "aten.gather.default": _gather,
    "aten.index.Tensor": _index,
}

LOOKUPS: frozenset[str] = frozenset(_CHECKED)
"""Operators that read where another tensor says; what an engine does with a bad place is its own affair."""

_PYTHON: dict[str, Callable[..., Any]] = {
    "operator.add": _on_sizes(operator.add),
    "operator.floordiv": _on_sizes(operator.floordiv),
    "operator.getitem": _item,
    "operator.mul": _on_sizes(operator.mul),
    "operator.sub": _on_sizes(operator.sub),
}

PYTHON_OPERATORS: frozenset[str] = frozenset(_PYTHON)
"""Operators of Python: arithmetic on sizes, and places in lists."""

FACTORIES: frozenset[str] = frozenset(
    {"aten.arange.default", "aten.arange.start", "aten.arange.start_step", "aten.full.default", "aten.ones.default"}
    | {"aten.scalar_tensor.default", "aten.zeros.default"}
)
"""Operators that make a tensor from nothing: they need to be told where."""

ALLOWED: frozenset[str] = frozenset({f"aten.{name}" for name in _ATEN.split()} | set(_PYTHON))
"""Operators that an uploaded prefix may name."""

TOKENS: dict[str, frozenset[str]] = {
    "dtype": frozenset({"bool", "bfloat16", "float16", "float32", "float64", "int32", "int64", "uint8"}),
    "layout": frozenset({"strided"}),
    "memory_format": frozenset({"channels_last", "contiguous_format", "preserve_format"}),
}
"""Constants that a graph may name, by their kind."""


def resolve(name: str) -> Callable[..., Any]:
    """The callable of any traced operator, for graphs of this process's own making.

    Raises:
        UnsafeArtifact: The name means nothing to this version of torch.
    """
    own = _PYTHON.get(name) or _CHECKED.get(name) or _BOUNDED.get(name)
    return _of_torch(name) if own is None else own


def is_known(name: str) -> bool:
    """Whether ``resolve`` knows an operator."""
    try:
        resolve(name)
    except UnsafeArtifact:
        return False
    return True


def _of_torch(name: str) -> Callable[..., Any]:
    namespace, _, rest = name.partition(".")
    packet, _, overload = rest.rpartition(".")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), packet), overload)  # type: ignore[no-any-return]
    except AttributeError:
        raise UnsafeArtifact(f"this version of torch ({torch.__version__}) has no operator {name}") from None


def resolve_allowed(name: str) -> Callable[..., Any]:
    """The callable of an operator on the allow-list.

    Raises:
        UnsafeArtifact: The operator is not on the list.
    """
    if name not in ALLOWED:
        raise UnsafeArtifact(f"operator {name!r} is not allowed in a prefix")
    return resolve(name)


def resolve_symbolic(name: str) -> Callable[..., Any]:
    """The callable of an operator on the allow-list, for a trace in which the batch is a symbol and no number.

    Raises:
        UnsafeArtifact: The operator is not on the list.
    """
    call = resolve_allowed(name)
    # The bounds on sizes are those of numbers; a dry run has had the numbers.
    if name in _BOUNDED:
        return _of_torch(name)
    return getattr(operator, name.partition(".")[2]) if name in _PYTHON else call


def token_value(token: Token, device: torch.device, *, is_own: bool = False) -> Any:
    """What a constant means to torch; a device always means the one the graph runs on.

    Args:
        token: the constant.
        device: the device that the graph runs on.
        is_own: True if this process traced the graph, which may then name any constant of torch.

    Raises:
        UnsafeArtifact: An unknown kind or value.
    """
    if token.kind == "device":
        return device
    if not is_own and token.value not in TOKENS.get(token.kind, ()):
        raise UnsafeArtifact(f"{token.kind} {token.value!r} is not allowed in a prefix")
    return getattr(torch, token.value)


MAX_REFERENCES = 1024
"""The most values that one operation reads, and the longest list among its arguments: DenseNet joins 64."""

# What a slice that goes to the end has for its end (``sys.maxsize``).
_TO_THE_END = (1 << 63) - 1
# Any bits are a float; of other types, such as bool, some are values that kernels do not expect.
_BITS = Token("dtype", "float32")
_TEXTS: dict[tuple[str, str], frozenset[str]] = {
    ("aten.conv2d.padding", "padding"): frozenset({"same", "valid"}),
    ("aten.gelu.default", "approximate"): frozenset({"none", "tanh"}),
    ("aten.pad.default", "mode"): frozenset({"circular", "constant", "reflect", "replicate"}),
}
# Below one, kernels divide by these.
_POSITIVE = frozenset(
    {"chunks", "dilation", "divisor_override", "groups", "kernel_size", "num_groups", "step", "stride"}
    | {"upscale_factor"}
)
_DIMENSIONS = frozenset(
    {"axis0", "axis1", "destination", "dim", "dim0", "dim1", "dims", "end_dim", "source", "start_dim"}
)
_MAX_DIMENSIONS = 64
_EQUATION = re.compile(r"[A-Za-z.,> -]{1,200}")
_KINDS = {"ScalarType": "dtype", "Layout": "layout", "MemoryFormat": "memory_format", "Device": "device"}


def refused_call(node: GraphNode) -> str:
    """What of an operation nodes do not run, in words; empty where they run it."""
    if node.op not in ALLOWED:
        return node.op
    try:
        check_call(node)
    except UnsafeArtifact as error:
        return f"{node.op} (it {str(error).removeprefix(f'{node.op} ')})"
    return ""


def check_call(node: GraphNode) -> None:
    """Do nothing if an operation's arguments are what its operator takes.

    Args:
        node: the operation; its operator is on the allow-list.

    Raises:
        UnsafeArtifact: One argument is not, is missing, or the operator has none of that name.
    """
    if len(references((node.args, tuple(value for _, value in node.kwargs)))) > MAX_REFERENCES:
        raise UnsafeArtifact(f"{node.op} reads more than {MAX_REFERENCES} values")
    if node.op in PYTHON_OPERATORS:
        _check_python(node)
        return
    parameters = _parameters(node.op)
    positional = [parameter for parameter in parameters if not parameter.is_keyword]
    if len(node.args) > len(positional):
        raise UnsafeArtifact(f"{node.op} takes {len(positional)} arguments, not {len(node.args)}")
    given = {parameter.name: value for parameter, value in zip(positional, node.args, strict=False)}
    known = {parameter.name for parameter in parameters}
    for name, value in node.kwargs:
        if name in given or name not in known:
            raise UnsafeArtifact(f"{node.op} has no argument {name[:40]!r} left to be given")
        given[name] = value
    for parameter in parameters:
        if parameter.name in given:
            _check_argument(node.op, parameter, given[parameter.name])
        elif parameter.is_required:
            raise UnsafeArtifact(f"{node.op} needs the argument {parameter.name!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parameter:
    """One argument of an operator.

    Attributes:
        name: The name of the argument.
        kind: The type in the words of the schema, such as ``Optional[ScalarType]``.
        length: The length of a list that may be given as one number; 0 where it may not.
        is_first: True if it is the operator's first argument.
        is_keyword: True if it is given by its name alone.
        is_required: True if it has no default.
    """

    name: str
    kind: str
    length: int
    is_first: bool
    is_keyword: bool
    is_required: bool


@cache
def _parameters(op: str) -> tuple[_Parameter, ...]:
    schema = _schema(op)
    return tuple(
        _Parameter(
            name=argument.name,
            # ``type`` says int where an enumeration is meant; ``real_type`` says which.
            kind=str(argument.real_type),
            length=argument.N or 0,
            is_first=place == 0,
            is_keyword=argument.kwarg_only,
            is_required=not argument.has_default_value(),
        )
        for place, argument in enumerate(schema.arguments)
    )


def _schema(op: str) -> Any:
    resolve_allowed(op)
    _, packet, overload = op.split(".")
    return getattr(getattr(torch.ops.aten, packet), overload)._schema  # noqa: SLF001 (torch has no public word for it)


def _check_argument(op: str, parameter: _Parameter, value: Argument) -> None:
    if parameter.kind == "str":
        is_fit = isinstance(value, str) and _is_text(op, parameter.name, value)
    elif parameter.name == "pin_memory":
        is_fit = value is None or value is False
    elif parameter.length and not isinstance(value, tuple | None):
        is_fit = _fits("int", value)
    elif parameter.kind == "Tensor" and not parameter.is_first:
        # A number stands for a tensor in ``x + 1``.
        is_fit = _fits("Tensor", value) or _fits("number", value)
    elif (op, parameter.name) == ("aten.view.dtype", "dtype"):
        is_fit = value == _BITS
    elif op == "aten.slice.Tensor" and value == _TO_THE_END:
        is_fit = parameter.name in ("start", "end")
    else:
        is_fit = _fits(parameter.kind, value)
    if not is_fit:
        meant = f"{_BITS.value} alone" if op == "aten.view.dtype" else _said(parameter.kind)
        raise UnsafeArtifact(f"{op} takes {meant} for {parameter.name!r}, not {_shown(value)}")
    for number in value if isinstance(value, tuple) else (value,):
        if _is_integer(number) and not _is_in_range(parameter.name, number):
            raise UnsafeArtifact(f"{op} takes no {number} for {parameter.name!r}")


def _is_in_range(name: str, number: int) -> bool:
    if name in _POSITIVE:
        return number >= 1
    return name not in _DIMENSIONS or abs(number) <= _MAX_DIMENSIONS


def _fits(kind: str, value: Argument) -> bool:
    """Whether a value is of a type, in the words of the schema."""
    if kind.startswith("Optional["):
        return value is None or _fits(kind[len("Optional[") : -1], value)
    if kind.startswith("List["):
        inner = kind[len("List[") : -1]
        return isinstance(value, tuple) and len(value) <= MAX_REFERENCES and all(_fits(inner, item) for item in value)
    if kind in _KINDS:
        return _is_token(_KINDS[kind], value)
    match kind:
        case "Tensor":
            return isinstance(value, Ref)
        case "bool":
            return isinstance(value, bool)
        case "int":
            return isinstance(value, Ref) or (_is_integer(value) and abs(value) <= _MAX_SIZE)
        case "float":
            return isinstance(value, Ref | float) or _is_number(value)
        case "number":
            return isinstance(value, Ref | float | bool) or _is_number(value)
        case _:
            return False


def _is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return _is_integer(value) and -_TO_THE_END <= value <= _TO_THE_END


def _is_token(kind: str, value: Argument) -> bool:
    if not isinstance(value, Token) or value.kind != kind:
        return False
    return kind == "device" or value.value in TOKENS[kind]


def _is_text(op: str, name: str, value: str) -> bool:
    if (op, name) == ("aten.einsum.default", "equation"):
        return _EQUATION.fullmatch(value) is not None
    return value in _TEXTS.get((op, name), ())


def _check_python(node: GraphNode) -> None:
    """Arithmetic on sizes, and places in lists."""
    left, right = (*node.args, None, None)[:2]
    is_item = node.op == "operator.getitem"
    is_fit = isinstance(left, Ref) and _is_integer(right) if is_item else _fits("int", left) and _fits("int", right)
    if len(node.args) != 2 or node.kwargs or not is_fit:
        raise UnsafeArtifact(f"{node.op} takes {'a list and a place in it' if is_item else 'two sizes'}")


def _said(kind: str) -> str:
    """A type for a sentence."""
    plain = kind.replace("Optional[", "").replace("]", "").replace("List[", "a list of ")
    dtypes = f"one of {', '.join(sorted(TOKENS['dtype']))}"
    named = {"ScalarType": dtypes, "Layout": "a layout", "MemoryFormat": "a memory format", "Device": "a device"}
    return named.get(plain, plain if plain.startswith("a ") else f"a {plain}")


def _shown(value: Argument) -> str:
    match value:
        case Ref():
            return f"the value {value.name[:40]!r}"
        case Token():
            return f"{value.kind} {value.value[:40]!r}"
        case tuple():
            return "this list" if value else "an empty list"
        case _:
            return repr(value)[:40]


_Build = Callable[[list[Any]], Any]
_Observe = Callable[[int, Sequence[Any]], None]


class Runner:
    """A graph made ready to run, as a whole or up to a cut. Immutable, so that threads may share it.

    Args:
        graph: graph to run.
        cuts: the place where a run may stop; what crosses one is kept until it is passed.
        device: device that its device tokens mean.
        resolve_op: operator name to callable; the default takes every traced operator.

    Attributes:
        last_uses: the places, for each node, of the values that nothing reads after it, nor crosses a cut behind
            it; they are freed then.

    Raises:
        UnsafeArtifact: An operator, constant or name that is unknown.
    """

    def __init__(
        self,
        graph: Graph,
        *,
        cuts: Sequence[Cut] = (),
        device: torch.device | str = "cpu",
        resolve_op: Callable[[str], Callable[..., Any]] = resolve,
    ) -> None:
        settle_kernels()
        self._device = torch.device(device)
        self._is_own = resolve_op is resolve
        names = [*graph.inputs, *(name for name, _ in graph.leaves), *(node.name for node in graph.nodes)]
        self._slots = {name: slot for slot, name in enumerate(names)}
        if len(self._slots) != len(names):
            raise UnsafeArtifact("two values of the graph have the same name")
        self._inputs = len(graph.inputs)
        self._first = self._inputs + len(graph.leaves)
        self._steps = [self._step(node, resolve_op) for node in graph.nodes]
        self._outputs = [self._build(output, len(names)) for output in graph.outputs]
        self.crossing = {cut.number: self._crossing_slots(cut) for cut in cuts}
        self.last_uses = self._frees(graph, cuts)

    def run(
        self,
        inputs: Sequence[Any],
        leaves: Sequence[Any],
        *,
        upto: Cut | None = None,
        observe: _Observe | None = None,
        between: Between | None = None,
    ) -> tuple[Any, ...]:
        """Run the nodes and return the outputs, in the graph's order, or what crosses a cut.

        Args:
            inputs: values for ``graph.inputs``.
            leaves: values for ``graph.leaves``, in their order.
            upto: one of the cuts, to stop there; None runs all nodes.
            observe: function that is called after each node, before anything is freed, with the node's index and all
                values (None where one is not there yet or already freed); for profiles and footprints.
            between: function that is called behind each node, when what is not needed any more is freed. It may run
                another network, within ``apart.resting``; what it raises ends this run.
        """
        values: list[Any] = [*inputs, *leaves, *([None] * len(self._steps))]
        assert len(values) == len(self._slots), "a graph needs all its inputs and leaves"
        with compute_slot():
            self._run(values, len(self._steps) if upto is None else upto.after + 1, observe, between)
        return tuple(build(values) for build in self._outputs) if upto is None else self.crossing_values(upto, values)

    def run_traced(self, inputs: Sequence[Any], leaves: Sequence[Any], *, upto: Cut) -> tuple[Any, ...]:
        """As ``run``, for who traces it and so has the process alone already (see ``engines.machine``)."""
        values: list[Any] = [*inputs, *leaves, *([None] * len(self._steps))]
        self._run(values, upto.after + 1, None)
        return self.crossing_values(upto, values)

    def crossing_values(self, cut: Cut, values: Sequence[Any]) -> tuple[Any, ...]:
        """What crosses one of the cuts, out of the values of a run that stands there (see ``observe``)."""
        return tuple(values[slot] for slot in self.crossing[cut.number])

    def _run(self, values: list[Any], steps: int, observe: _Observe | None, between: Between | None = None) -> None:
        for index, (call, build_args, build_kwargs) in enumerate(self._steps[:steps]):
            arguments = {name: build(values) for name, build in build_kwargs}
            values[self._first + index] = call(*[build(values) for build in build_args], **arguments)
            if observe is not None:
                observe(index, values)
            for slot in self.last_uses[index]:
                values[slot] = None
            if between is not None:
                between()

    def _step(
        self, node: GraphNode, resolve_op: Callable[[str], Callable[..., Any]]
    ) -> tuple[Callable[..., Any], list[_Build], list[tuple[str, _Build]]]:
        here = self._slots[node.name]
        args = [self._build(argument, here) for argument in node.args]
        kwargs = [(name, self._build(value, here)) for name, value in self._placed(node)]
        return resolve_op(node.op), args, kwargs

    def _placed(self, node: GraphNode) -> list[tuple[str, Argument]]:
        """The keyword arguments, with every tensor made where the graph runs, also in a dry run."""
        named = dict(node.kwargs)
        if not isinstance(named.get("device"), Token | None):
            raise UnsafeArtifact(f"{node.op} names a device, and a graph runs where it is put")
        if node.op in FACTORIES or named.get("device") is not None:
            named["device"] = Token("device", "")
        return sorted(named.items())

    def _build(self, argument: Argument, here: int) -> _Build:
        """A function from the values so far to this argument."""
        if isinstance(argument, Ref):
            slot = self._slots.get(argument.name, here)
            if slot >= here:
                raise UnsafeArtifact(f"value {argument.name!r} is used before it is made")
            return lambda values: values[slot]
        if isinstance(argument, tuple):
            parts = [self._build(item, here) for item in argument]
            return lambda values: [part(values) for part in parts]
        constant: Any = argument
        if isinstance(argument, Token):
            constant = token_value(argument, self._device, is_own=self._is_own)
        return lambda _: constant

    def _crossing_slots(self, cut: Cut) -> list[int]:
        if not -1 <= cut.after < len(self._steps):
            raise UnsafeArtifact(f"cut {cut.number} stands where the graph does not reach")
        here = self._first + cut.after + 1
        slots = [self._slots.get(name, here) for name in cut.tensors]
        if any(slot >= here or self._inputs <= slot < self._first for slot in slots):
            raise UnsafeArtifact(f"cut {cut.number} declares a tensor that the graph has not made there")
        return slots

    def _frees(self, graph: Graph, cuts: Sequence[Cut]) -> list[list[int]]:
        """For each node, the slots that nothing needs after it; leaves stay."""
        frees: list[list[int]] = [[] for _ in graph.nodes]
        # What crosses a cut counts as read by the node behind it.
        read = [{self._slots[name] for name in references((node.args, node.kwargs))} for node in graph.nodes]
        read.append({self._slots[name] for output in graph.outputs for name in references(output)})
        for cut in cuts:
            read[cut.after + 1].update(self.crossing[cut.number])
        seen = read.pop()
        for index in range(len(graph.nodes) - 1, -1, -1):
            for slot in {*read[index], self._first + index} - seen:
                if not self._inputs <= slot < self._first:
                    frees[index].append(slot)
            seen |= read[index]
        return frees


def leaf_values(graph: Graph, tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """The tensors of a graph's leaves, in their order.

    Raises:
        UnsafeArtifact: A leaf has no tensor.
    """
    missing = [tensor for _, tensor in graph.leaves if tensor not in tensors]
    if missing:
        raise UnsafeArtifact(f"the graph's tensor {missing[0]!r} is missing")
    return [tensors[tensor] for _, tensor in graph.leaves]


def input_tensors(inputs: Arrays, device: torch.device) -> list[torch.Tensor]:
    """The arrays as tensors where they are needed; on the CPU they share their memory."""
    arrays = [inputs] if isinstance(inputs, np.ndarray) else inputs
    return [as_tensor(array).to(device) for array in arrays]


def as_array(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """A tensor as an array, in the same memory where it lies in the CPU's; ``bfloat16`` lies in ``uint16``."""
    kept = tensor.detach().cpu()
    found: npt.NDArray[Any] = (kept.view(torch.uint16) if kept.dtype == torch.bfloat16 else kept).numpy()
    return found


def as_tensor(array: npt.NDArray[Any]) -> torch.Tensor:
    """An array as the tensor that it holds, in the same memory."""
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if array.dtype == np.uint16 else tensor


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
        lengths: the way that the graph becomes one for fewer tokens.
        device: device on which the leaves are.
        resolve_op: see ``Runner``.

    Attributes:
        light: names of the values that no weight enters.
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
        self.light = weightless_values(
            graph, (name for (name, _), leaf in named if leaf.is_floating_point() and leaf.numel() > 1)
        )
        self._buckets = buckets(lengths.max_length)
        self._runners: dict[int, tuple[Runner, Sequence[Cut]]] = {}

    def takes(self, cut: int) -> bool:
        """Whether a run up to a cut is any shorter: nothing may cross that has the tokens in two dimensions.

        Such are scores of attention, in which a zero is no padding.
        """
        crossing = zip(self._cuts[cut - 1].tensors, self._lengths.shapes[cut - 1], strict=True)
        heavy = [grows for name, grows in crossing if name not in self.light]
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
        light = [name for name in stop.tensors if name in self.light]
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
        part = Runner(subgraph_for(self._graph, names), device=self._device, resolve_op=self._resolve)
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
