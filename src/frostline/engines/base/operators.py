"""Which operators a graph may name, and what each name means in torch."""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from frostline.core import Token
from frostline.errors import UnsafeArtifact

__all__ = (
    "ALLOWED",
    "FACTORIES",
    "LOOKUPS",
    "MAX_OUTPUTS",
    "MAX_SIZE",
    "PYTHON_OPERATORS",
    "TOKENS",
    "resolve",
    "resolve_allowed",
    "resolve_symbolic",
    "token_value",
)

# Pure computation over the arguments: nothing here reads a file, runs code it is given, or keeps state.
# Collected from torch.export traces of AlexNet, ResNet, VGG, DenseNet, MobileNet, EfficientNet, ConvNeXt, ViT,
# DistilBERT and BERT, and of the networks in docs/networks.md. Random operators are left out, since a prefix must be a
# function of its input, and so are divisions of integers, which end the process where the divisor is bad. What takes
# indices checks them (see below).
_ATEN = """
__and__.Tensor _to_copy.default abs.default adaptive_avg_pool1d.default adaptive_avg_pool2d.default add.Scalar
add.Tensor add_.Tensor addcmul.default addmm.default alias.default arange.default arange.start arange.start_step
argmax.default avg_pool2d.default batch_norm.default bitwise_and.Tensor bitwise_not.default bmm.default
bucketize.Tensor cat.default chunk.default clamp.default clamp_min.default clone.default contiguous.default
conv1d.default conv2d.default conv2d.padding copy_.default cos.default cumsum.default detach.default detach_.default
div.Tensor div_.Tensor dropout.default dropout_.default einsum.default elu.default embedding.default eq.Scalar
eq.Tensor exp.default expand.default expand_as.default fill_.Scalar fill_.Tensor flatten.using_ints flip.default
full.default full_like.default gather.default ge.Scalar ge.Tensor gelu.default group_norm.default gt.Scalar gt.Tensor
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

MAX_SIZE = 1 << 48
"""The largest size, place or count that a graph may name."""

MAX_OUTPUTS = 1024
"""The most tensors that one operation may give, such as the parts of a split."""


def _on_sizes(call: Callable[[int, int], int]) -> Callable[[Any, Any], int]:
    """Arithmetic on sizes, and on nothing else: Python's operators also repeat texts and grow numbers without end."""

    def bounded(left: Any, right: Any) -> int:
        if not (isinstance(left, int) and isinstance(right, int) and max(abs(left), abs(right)) < MAX_SIZE):
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


def _check_outputs(count: int) -> None:
    # A view takes a kilobyte, whatever it shows: all elements of one large tensor end the process.
    if count > MAX_OUTPUTS:
        raise ValueError(f"an operation gives at most {MAX_OUTPUTS} tensors, not {count}")


_DIVIDING: dict[str, Callable[..., Any]] = {
    "aten.chunk.default": _chunk,
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
    own = _PYTHON.get(name) or _CHECKED.get(name) or _DIVIDING.get(name)
    return _of_torch(name) if own is None else own


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
    if name in _DIVIDING:
        return _of_torch(name)
    return getattr(operator, name.partition(".")[2]) if name in _PYTHON else call


def token_value(token: Token, device: torch.device) -> Any:
    """What a constant means to torch; a device always means the one the graph runs on.

    Raises:
        UnsafeArtifact: An unknown kind or value.
    """
    if token.kind == "device":
        return device
    if token.value not in TOKENS.get(token.kind, ()):
        raise UnsafeArtifact(f"{token.kind} {token.value!r} is not allowed in a prefix")
    return getattr(torch, token.value)
