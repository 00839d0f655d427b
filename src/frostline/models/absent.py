"""Tensors of which only the shape is there, and one run of a network's own forward with such in it.

Operations on them give others like them. Where a plan says so, an activation takes the place of what one would give.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from frostline.core.errors import ModelError
from frostline.models.modules import is_in_place, name_of_function

__all__ = ("INPUTS", "MADE_LIKE", "Absent", "NoValues", "Run", "Unsteady", "find_absent", "no_values_for")


class NoValues(ModelError):
    """The network asks for something of a tensor that is not there."""


class Unsteady(Exception):
    """The frozen part does something else in each run, by what its code keeps in Python."""


class Absent(torch.Tensor):
    """A tensor of which only the shape is there; while a plan is made, it has values that the network may not see."""

    known: torch.Tensor
    run: "Run"
    # By this class code of others, such as transformers' masks, knows a tensor whose values it must not ask for.
    __class__ = property(lambda _: FakeTensor)

    @staticmethod
    def __new__(cls: type["Absent"], inner: torch.Tensor, run: "Run") -> "Absent":
        """A tensor like ``inner``, whose operations ``run`` sees."""
        made: Absent = torch.Tensor._make_wrapper_subclass(  # noqa: SLF001
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=run.device
        )
        made.known, made.run = inner, run
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return find_absent(args, kwargs)[0].run.operate(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # What torch.vmap makes of an operation; while trials watch writes, it comes by the other way.
        return find_absent(args, kwargs)[0].run.operate(func, args, kwargs or {})


def no_values_for(name: str) -> str:
    """Say that an operation, by this name, wants values that are not there."""
    return (
        f"the network asks for values ({name}) that were skipped: they are not delivered, unless its forward uses or "
        "returns them when the job is made"
    )


_HIDDEN = (
    "its frozen layers require gradients, and code that turns them off hides to where these flow, as checkpoints of "
    "activations with use_reentrant=True do"
)


def find_absent(*values: Any) -> "list[Absent]":
    """The absent tensors among values, and in lists and dictionaries of them."""
    found: list[Absent] = []
    _each(values, found.append)
    return found


def _each(value: Any, tell: Callable[["Absent"], None]) -> None:
    if isinstance(value, Absent):
        tell(value)
    elif isinstance(value, list | tuple):
        for item in value:
            _each(item, tell)
    elif isinstance(value, dict):
        for item in value.values():
            _each(item, tell)


def _replaced(value: Any, other: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return other(value)
    if type(value) in (list, tuple):
        return type(value)(_replaced(item, other) for item in value)
    if type(value) is dict:
        return {name: _replaced(item, other) for name, item in value.items()}
    return value


_ABOUT = frozenset(
    (
        *("shape", "size", "dim", "ndim", "dim_order", "dtype", "layout", "numel", "nelement", "stride", "itemsize"),
        *("is_contiguous", "is_floating_point", "is_complex", "is_signed", "requires_grad", "element_size", "nbytes"),
        *("is_sparse", "is_quantized", "is_mkldnn", "is_nested", "is_inference", "is_leaf", "grad_fn", "grad"),
        *("_version", "storage_offset", "names", "has_names", "__len__", "__hash__", "__repr__", "__format__"),
    )
)
"""What may be asked of a tensor that is not there, by the names of functions, methods and attributes."""
_WHERE = frozenset(("device", "is_cuda", "is_cpu", "is_meta", "is_mps", "is_xpu", "get_device", "type"))
"""What may be asked of the device that it would be on."""
MADE_LIKE = frozenset(
    (
        *("zeros_like", "ones_like", "full_like", "empty_like"),
        *("new_zeros", "new_ones", "new_full", "new_empty", "new_tensor"),
    )
)
"""What makes a tensor of the same kind, whose values are its own."""
_WRITING = frozenset({"__setitem__", "copy_", "set_", "__iadd__", "__isub__", "__imul__", "__itruediv__"})


class Run:
    """One pass of the network's own forward, with absent tensors in it.

    Args:
        device: the place where the tensors would be.
        rows: size of the batch.
        is_real: True if absent tensors have values, as while a plan is made.
        placed: function that gives the tensor that takes a result's place, where one does.
        last: number of operations behind which nothing is absent; None where that is not known yet.
        learns: gradients are on, so that it is seen which values require them.
    """

    def __init__(
        self,
        device: torch.device,
        rows: int,
        placed: Callable[[int, int, str, torch.Tensor], torch.Tensor | None],
        *,
        is_real: bool = False,
        last: int | None = None,
        learns: bool = False,
    ) -> None:
        self.device = device
        self.rows = rows
        self.count = 0
        self._is_real = is_real
        self._placed = placed
        self._last = last
        self._learns = learns
        self._has_given = self._is_within = False
        self.entries: list[int] = []  # numbers of the calls that counted as an operation

    def take(self, place: int, inner: torch.Tensor) -> torch.Tensor:
        """An input of the network."""
        return self._made(place - INPUTS, 0, "input", inner)

    def hide(self, inner: torch.Tensor) -> torch.Tensor:
        """A tensor of which the shape is known, or the values that nobody may see."""
        return Absent(inner, self)

    def call(self, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a module of the frozen part gives: behind an activation it counts as one operation on absent tensors."""
        if not self._has_given or self._is_within or find_absent(args, kwargs):
            return own(*args, **kwargs)
        self._is_within = True
        try:
            leaves, structure = tree_flatten(own(*args, **kwargs))
        finally:
            self._is_within = False
        place, self.count = self.count, self.count + 1
        self.entries.append(place)
        return tree_unflatten(
            [self._wrapped(place, number, "call", leaf, {}) for number, leaf in enumerate(leaves)], structure
        )

    def operate(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What an operation of which some tensors are absent gives."""
        name = name_of_function(func).partition(".")[0]  # without the overload that a dispatched one has
        if name in _ABOUT:
            return func(*_replaced(args, bare), **kwargs)
        if name in _WHERE:
            return func(*_replaced(args, self._there), **kwargs)
        if self._last is not None and self.count > self._last:
            raise NoValues(no_values_for(name))
        place, self.count = self.count, self.count + 1
        if name in MADE_LIKE:
            return func(*_replaced(args, self._there_shaped), **_replaced(kwargs, self._there_shaped))
        output = self._computed(func, name, args, kwargs)
        taken = find_absent(args, kwargs)
        owners = {id(absent.known): absent for absent in taken}
        leaves, structure = tree_flatten(output)
        if not any(isinstance(leaf, torch.Tensor) for leaf in leaves) and output is not None:
            raise NoValues(no_values_for(name))
        wrapped = [self._wrapped(place, number, name, leaf, owners) for number, leaf in enumerate(leaves)]
        return tree_unflatten(wrapped, structure)

    def _computed(self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = kwargs.get("out")
        target = args[0] if out is None and args else out
        if (name in _WRITING or out is not None or is_in_place(name)) and not isinstance(target, Absent):
            raise NoValues(f"the network writes values ({name}) that were skipped into a tensor of its own")
        if (
            self._learns
            and not torch.is_grad_enabled()
            and any(a.known.requires_grad for a in find_absent(args, kwargs))
        ):
            raise Unsteady(_HIDDEN)
        if self._is_real:
            return func(*_replaced(args, bare), **_replaced(kwargs, bare))
        if name in ("to", "cuda", "cpu"):
            args, kwargs = _staying(name, args, kwargs)
        try:
            return func(*_replaced(args, _shape_of), **_replaced(kwargs, _shape_of))
        except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
            raise NoValues(f"{no_values_for(name)} ({str(error).partition(chr(10))[0]})") from error

    def _wrapped(self, place: int, number: int, name: str, leaf: Any, owners: Mapping[int, Absent]) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        placed = self._placed(place, number, name, leaf)
        if placed is not None:
            self._has_given = True
            return placed
        return owners[id(leaf)] if id(leaf) in owners else self.hide(leaf)

    def _made(self, place: int, number: int, name: str, inner: torch.Tensor) -> torch.Tensor:
        return self._wrapped(place, number, name, inner, {})  # type: ignore[no-any-return]

    def _there(self, tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, Absent):
            return tensor
        return torch.empty((0,), dtype=tensor.known.dtype, device=self.device)

    def _there_shaped(self, tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, Absent):
            return tensor
        return torch.empty((), dtype=tensor.known.dtype, device=self.device).expand(tensor.known.shape)


INPUTS = 1 << 20  # inputs are told from operations by numbers below zero


def bare(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.known if isinstance(tensor, Absent) else tensor


def _shape_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.known if isinstance(tensor, Absent) else torch.empty_like(tensor, device="meta")


def _staying(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of ``Tensor.to`` and its like without a device: what is absent moves nowhere."""
    kept = [arg for arg in args[1:] if (name == "to" and not isinstance(arg, str | torch.device | int)) or arg is True]
    kwargs = {key: value for key, value in kwargs.items() if key != "device"} if name == "to" else {}
    return (args[0], *(kept or ([] if kwargs else [args[0].known.dtype]))), kwargs
