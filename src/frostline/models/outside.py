"""What a trial of a network may change beside its parameters, put back behind it; and what of it code reads.

A job runs the user's network a few times to find out what it does. That must leave nothing behind: attributes, global
variables and those of enclosing functions, containers, objects, arrays, generators of random numbers, the environment,
and whatever tensors are written, wherever they are kept.
"""

import copy
import itertools
import operator
import os
import random
import sys
import sysconfig
import weakref
import zlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from pathlib import Path
from types import CellType, CodeType, FunctionType, GeneratorType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from frostline.core.errors import ModelError
from frostline.engines.measure import version_of

__all__ = (
    "NOT_PLAIN",
    "OWN_NAMES",
    "PLAIN",
    "KeptState",
    "effects_of",
    "has_values",
    "is_other",
    "is_same_plain",
    "kept_buffers",
    "kept_tensors",
    "kept_weights",
    "memory_of",
    "outside_values",
    "plain_copy",
    "state_of",
)

PLAIN = (bool, int, float, str, type(None))
"""Types of values that nobody can change."""
OWN_NAMES = frozenset(vars(nn.Module()))
"""Names of the attributes that every module has."""

NOT_PLAIN = object()
"""Stands for the copy of what is not plain."""
_ITEMS = 4096  # of a container and those in it, which is compared in each step: some 20 microseconds


def plain_copy(value: Any) -> Any:
    """The value of a number or a text, and a copy of a container of not too many such; ``NOT_PLAIN`` for all else."""
    return _copied(value, itertools.count())


def _copied(value: Any, count: Iterator[int]) -> Any:
    if isinstance(value, PLAIN):
        return value if next(count) < _ITEMS else NOT_PLAIN
    kind = type(value)
    if kind not in _PLAIN_CONTAINERS or len(value) > _ITEMS:
        return NOT_PLAIN
    items = list[Any]()
    for item in value.items() if kind is dict else value:
        items.append(_copied(item, count))
        if items[-1] is NOT_PLAIN:
            return NOT_PLAIN
    # One that nobody can change is its own copy, so that it is known by its place in memory.
    return value if kind is tuple and all(map(operator.is_, items, value)) else kind(items)


_PLAIN_CONTAINERS = (tuple, list, set, dict)


def is_same_plain(now: Any, value: Any) -> bool:
    """Whether a value is a plain one that was copied before, as far as is known without a copy of it."""
    if now is value:
        return True
    if type(now) is not type(value) or type(value) not in (*PLAIN, list, set, dict):
        return False
    try:
        return bool(now == value)
    except (RuntimeError, ValueError):  # of tensors and arrays that stand there now
        return False


def is_other(now: Any, value: Any) -> bool:
    """Whether a value is none that was seen before, or equal to a plain one that was copied."""
    return now is not value and not is_same_plain(now, value) and (plain_copy(now) is NOT_PLAIN or now != value)


_KNOWN_CONTAINERS = (dict, OrderedDict, defaultdict, Counter, list, set, deque)
# These say by a copy where they are. Others, such as zip, move what they are made of.
_ITERATORS: tuple[type, ...] = (itertools.count, type(iter(range(0))), type(iter([])), type(iter(())))
_WRAPPERS = (MethodType, partial, staticmethod, classmethod, property, type(cache(abs)))
_WALKED = 1024  # items of a container that are looked into


class _Walk:
    """Visits what the user's own code reaches and may change that is no registered module's nor its attribute.

    Code of installed packages is not followed.
    """

    def __init__(self, model: nn.Module) -> None:
        self._seen = {id(module) for module in (*model.modules(), *_GLOBAL_GENERATORS)}
        self._named_of: dict[int, set[str]] = {}  # what was seen of modules of Python's
        self._classes: set[type] = set()
        kinds = {base for module in model.modules() for base in type(module).__mro__ if _is_users(base)}
        todo: list[Any] = []
        for module in model.modules():
            todo += self._of_module(module)
        for kind in kinds:
            todo += self._of_class(kind)
        while todo:
            value = todo.pop()
            if id(value) not in self._seen:
                self._seen.add(id(value))
                todo += self._visit(value)

    def _visit(self, value: Any) -> Sequence[Any]:
        """See a value as it is; what it leads to."""
        if type(value) in _KNOWN_CONTAINERS:  # first, since most are: each module has some dicts of hooks
            return self._of_container(value)
        if isinstance(value, PLAIN):
            return ()
        if isinstance(value, torch.Tensor):
            self._tensor(value)
            return ()
        if isinstance(value, FunctionType):
            return self._of_function(value) if _is_own_file(value.__code__.co_filename) else _read_by(value)
        if isinstance(value, _WRAPPERS):
            return _inside(value)
        if isinstance(value, tuple | frozenset):
            return list(value)[:_WALKED]
        if isinstance(value, _KNOWN_CONTAINERS) and _is_users(type(value)):
            return self._of_container(value)
        if isinstance(value, nn.Module):  # one that is hidden in a list, so that its parameters are not the network's
            return self._of_module(value)
        return self._of_another(value)

    def _of_module(self, module: nn.Module) -> list[Any]:
        own = vars(module)
        self._attributes(own)
        return [value for value in own.values() if type(value) not in PLAIN]

    def _of_container(self, value: Any) -> Sequence[Any]:
        self._container(value)
        if not 0 < len(value) <= _WALKED:
            return ()
        return [*(value.values() if isinstance(value, dict) else value)]

    def _of_function(self, function: FunctionType) -> list[Any]:
        own, names = function.__globals__, dict.fromkeys(_names_of(function.__code__))
        named = {name: own[name] for name in names if name in own}
        self._variables(own, named)
        cells = [cell for cell in function.__closure__ or () if _is_filled(cell)]
        for cell in cells:
            self._cell(cell)
        found = [*named.values(), *(cell.cell_contents for cell in cells), *(function.__defaults__ or ())]
        return [*found, *(item for value in found for item in self._of_python_module(value, names))]

    def _of_python_module(self, value: Any, names: Collection[str]) -> Iterator[Any]:
        """What a function may read of a module of Python's, such as ``settings.scale``, by the names that it has."""
        if not isinstance(value, ModuleType):
            return
        own, known = vars(value), self._named_of.setdefault(id(value), set())
        named = {name: own[name] for name in names if name in own and name not in known}
        known.update(named)
        self._variables(own, named)
        for item in named.values():
            yield item
            yield from self._of_python_module(item, names)

    def _of_class(self, kind: type) -> Sequence[Any]:
        if kind in self._classes:
            return ()
        self._classes.add(kind)
        own = {name: value for name, value in vars(kind).items() if name[:2] != "__" or isinstance(value, FunctionType)}
        self._members(kind, {name: value for name, value in own.items() if isinstance(value, PLAIN)})
        return list(own.values())

    def _of_another(self, value: Any) -> Sequence[Any]:
        self._special(value)
        if isinstance(value, type):
            return self._of_class(value) if _is_users(value) else ()
        if not _is_users(type(value)):
            return ()
        found = [item for base in type(value).__mro__ if _is_users(base) for item in self._of_class(base)]
        if hasattr(value, "__dict__"):
            self._attributes(vars(value))
            found += vars(value).values()
        slots = {name: getattr(value, name) for name in _slots(type(value)) if hasattr(value, name)}
        if slots:
            self._members(value, slots)
        return [*found, *slots.values()]

    def _attributes(self, own: MutableMapping[str, Any]) -> None:
        """Attributes of a module or of an object of the user's."""

    def _container(self, value: Any) -> None:
        """A dict, list, set or deque."""

    def _variables(self, own: MutableMapping[str, Any], named: Mapping[str, Any]) -> None:
        """Global variables that a function names."""

    def _cell(self, cell: CellType) -> None:
        """A variable of an enclosing function."""

    def _members(self, owner: Any, named: Mapping[str, Any]) -> None:
        """Plain values of a class, or the slots of an object."""

    def _tensor(self, value: torch.Tensor) -> None:
        """A tensor, also of a module's own."""

    def _special(self, value: Any) -> None:
        """Anything else."""


_OPTIMISERS = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)


class KeptState(_Walk):
    """The state of Python that a trial of a network may change, as it is now.

    Raises:
        ModelError: A generator was advanced whose state ``restore`` cannot set.
    """

    def __init__(self, model: nn.Module) -> None:
        self._undo: list[Callable[[], object]] = [partial(_set_environment, dict(os.environ))]
        self._empty: list[Any] = []  # as nearly all dicts of modules are
        super().__init__(model)

    def restore(self) -> None:
        """Put everything back."""
        for undo in self._undo:
            undo()
        for value in self._empty:
            if value:
                value.clear()

    def _attributes(self, own: MutableMapping[str, Any]) -> None:
        self._undo.append(partial(_restore_attributes, own, {name: _kept(value) for name, value in own.items()}))

    def _container(self, value: Any) -> None:
        if not value:
            self._empty.append(value)
            return
        content = value.copy()
        if isinstance(value, dict):
            content.update((key, _kept(item)) for key, item in content.items() if isinstance(item, _ITERATORS))
        elif isinstance(value, list | deque):
            content = [_kept(item) for item in content]
        self._undo.append(partial(_restored, value, content))

    def _variables(self, own: MutableMapping[str, Any], named: Mapping[str, Any]) -> None:
        kept = {name: _kept(value) for name, value in named.items() if isinstance(value, (*PLAIN, *_ITERATORS))}
        self._undo.append(partial(own.update, kept))

    def _cell(self, cell: CellType) -> None:
        self._undo.append(partial(setattr, cell, "cell_contents", _kept(cell.cell_contents)))

    def _members(self, owner: Any, named: Mapping[str, Any]) -> None:
        self._undo.append(partial(_restore_members, owner, {name: _kept(value) for name, value in named.items()}))

    def _tensor(self, value: torch.Tensor) -> None:
        with torch._C.DisableTorchFunction():  # noqa: SLF001 (nobody who watches what code reads shall see this)
            if has_values(value):
                self._undo.append(partial(_restore_data, value, value.data))
            if value.is_leaf and value.requires_grad:
                self._undo.append(partial(_restore_grad, value, value.grad))

    def _of_another(self, value: Any) -> Sequence[Any]:
        if isinstance(value, _OPTIMISERS):  # by which layers learn within a network's own forward
            self._attributes(vars(value))
            return [*vars(value).values()]
        return super()._of_another(value)

    def _special(self, value: Any) -> None:
        if (states := _GENERATORS.get(type(value))) is not None:
            self._undo.append(partial(states[1], value, states[0](value)))
        elif isinstance(value, GeneratorType):
            self._undo.append(partial(_require_same, value, _place_of(value)))
        elif isinstance(value, ContextVar):
            self._undo.append(partial(_set_context, value, value.get(NOT_PLAIN)))
        elif isinstance(value, np.ndarray) and value.flags.writeable and not value.dtype.hasobject:
            self._undo.append(partial(_restore_array, value, value.copy()))


def outside_values(model: nn.Module) -> list[tuple[str, Callable[[], Any], Any]]:
    """What the user's code reaches, but for plain attributes of modules: name, what reads it, and it as it is now.

    Of what is plain a copy; of tensors and arrays that are no parameters or buffers by what it is seen that they were
    written to; of all else but containers, such as functions, the object itself.
    """
    return _Values(model).found


class _Values(_Walk):
    def __init__(self, model: nn.Module) -> None:
        self.found: list[tuple[str, Callable[[], Any], Any]] = []
        self._compared: set[int] = set()  # containers that are
        self._own = {id(vars(module)) for module in model.modules()}
        self._registered = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        super().__init__(model)

    def _add(self, name: str, get: Callable[[], Any], value: Any) -> None:
        if isinstance(value, _WRITTEN):
            self.found.append((name, partial(_identity, get), id(value)))
        elif (copied := plain_copy(value)) is not NOT_PLAIN:
            self.found.append((name, get, copied))
            self._compared.update(map(id, _containers(value)))
        elif not isinstance(value, (*_KNOWN_CONTAINERS, *_ITERATORS)):  # which may hold much, and are changed in place
            self.found.append((name, get, value))

    def _attributes(self, own: MutableMapping[str, Any]) -> None:
        if id(own) not in self._own:
            self._named(own, own)

    def _container(self, value: Any) -> None:
        if type(value) in _PLAIN_CONTAINERS and id(value) not in self._compared:
            self._add(f"in a {type(value).__name__}", partial(_itself, value), value)

    def _variables(self, own: MutableMapping[str, Any], named: Mapping[str, Any]) -> None:
        self._named(own, {name: value for name, value in named.items() if name[:2] != "__"})

    def _named(self, own: MutableMapping[str, Any], named: Mapping[str, Any]) -> None:
        for name, value in named.items():
            if name not in OWN_NAMES:
                self._add(name, partial(own.get, name), value)

    def _cell(self, cell: CellType) -> None:
        self._add("of an enclosing function", partial(getattr, cell, "cell_contents", None), cell.cell_contents)

    def _members(self, owner: Any, named: Mapping[str, Any]) -> None:
        for name, value in named.items():
            self._add(name, partial(getattr, owner, name, None), value)

    def _tensor(self, value: torch.Tensor) -> None:
        if id(value) not in self._registered:
            self._written("of a tensor", value)

    def _special(self, value: Any) -> None:
        if isinstance(value, ContextVar):
            self._add(value.name, partial(value.get, None), value.get(None))
        elif isinstance(value, np.ndarray):
            self._written("of an array", value)
        elif value is os.environ:
            self.found.append(("os.environ", _environment, _environment()))

    def _written(self, name: str, value: Any) -> None:
        get = partial(_state_at, weakref.ref(value))
        self.found.append((name, get, get()))

    def _of_module(self, module: nn.Module) -> list[Any]:
        own = vars(module)
        for name, value in own.items():  # of which it is known otherwise what is read
            if name in OWN_NAMES or plain_copy(value) is not NOT_PLAIN:
                self._compared.update(map(id, _containers(value)))
        if _is_users(type(module)):
            self._named(own, {name: item for name, item in own.items() if plain_copy(item) is NOT_PLAIN})
            self._of_its_class(module)
        return super()._of_module(module)

    def _of_class(self, kind: type) -> Sequence[Any]:
        found = super()._of_class(kind)
        for name, value in vars(kind).items() if found else ():
            if isinstance(value, FunctionType):
                self._add(name, partial(getattr, kind, name, None), value)
        return found

    def _of_another(self, value: Any) -> Sequence[Any]:
        found, own = super()._of_another(value), getattr(value, "__dict__", {})
        if _is_users(type(value)):
            self._of_its_class(value)
        elif not isinstance(value, type | ModuleType) and len(own) <= _WALKED:  # such as a configuration of a library
            self._attributes(own)
        return found

    def _of_its_class(self, value: Any) -> None:
        """What a class has, and an object of it may come to have by itself."""
        own, kinds = getattr(value, "__dict__", {}), [kind for kind in type(value).__mro__ if _is_users(kind)]
        named = {name: item for kind in reversed(kinds) for name, item in vars(kind).items() if isinstance(item, PLAIN)}
        self._members(value, {name: item for name, item in named.items() if name[:2] != "__" and name not in own})


_WRITTEN = (torch.Tensor, np.ndarray)


def _identity(get: Callable[[], Any]) -> int:
    return id(get())


def _itself(value: Any) -> Any:
    return value


def _containers(value: Any) -> Iterator[Any]:
    """A plain container and those in it."""
    if type(value) in _PLAIN_CONTAINERS:
        yield value
        for item in value.values() if isinstance(value, dict) else value:
            yield from _containers(item)


def _environment() -> int:
    return hash(frozenset(os.environ._data.items()))  # type: ignore[attr-defined]  # noqa: SLF001 (as it is stored)


def _read_by(function: Any) -> Sequence[Any]:
    """What a function of an installed package reads that a user may change."""
    return (os.environ,) if function is os.getenv else ()


def _state_at(place: Callable[[], Any]) -> int:
    """By what it is seen that a tensor or an array was written to: small ones by their values."""
    value = place()
    if isinstance(value, torch.Tensor):
        is_small = has_values(value) and value.device.type == "cpu" and value.nbytes <= _SMALL_BYTES
        if not is_small or value.is_quantized or value.layout != torch.strided:
            return version_of(value)
        value = memory_of(value)
    return zlib.crc32(value.tobytes()) if isinstance(value, np.ndarray) and value.nbytes <= _SMALL_BYTES else 0


_SMALL_BYTES = 512


def memory_of(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """The bytes of a dense tensor's values in the order of its dimensions, of whatever dtype."""
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous().cpu().reshape(-1)
    # Tensor.numpy would take the user's tensor its freedom to be resized.
    return np.from_dlpack(dense.view(torch.uint8)).view(np.uint8)


_SPOTS = 4093  # a prime number, so that no shape hides a part of a tensor


def state_of(tensor: torch.Tensor) -> tuple[int, bytes]:
    """What shows that a tensor was written to: the count of that, and values of it where they are at hand.

    Nobody counts writes through ``.data`` or NumPy, so that some evenly spaced values of a tensor on a CPU are read.
    """
    is_traced = torch._C._are_functorch_transforms_active()  # noqa: SLF001 (within torch.func nothing has values)
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or is_traced:
        return version_of(tensor), b""
    spots = tensor.detach().view(-1)[:: tensor.numel() // _SPOTS + 1].contiguous()
    return version_of(tensor), memory_of(spots).tobytes()


def _inside(value: Any) -> Sequence[Any]:
    """What a wrapper of functions is made of."""
    if isinstance(value, MethodType):
        return value.__func__, value.__self__
    if isinstance(value, partial):
        return value.func, *value.args, *value.keywords.values()
    if isinstance(value, property):
        return value.fget, value.fset
    return [getattr(value, "__wrapped__", None)]


def _slots(kind: type) -> Iterator[str]:
    for base in kind.__mro__:
        names = vars(base).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if isinstance(getattr(kind, name, None), MemberDescriptorType):  # and no property that stands before it
                yield name


def _kept(value: Any) -> Any:
    """The value itself, or a copy of an iterator, which is another one when it was asked for an item."""
    return copy.copy(value) if isinstance(value, _ITERATORS) else value


def _restore_attributes(own: MutableMapping[str, Any], kept: Mapping[str, Any]) -> None:
    for name in own.keys() - kept.keys():
        del own[name]
    own.update(kept)


def _restore_members(owner: Any, kept: Mapping[str, Any]) -> None:
    for name, value in kept.items():
        if getattr(owner, name, NOT_PLAIN) is not value:
            setattr(owner, name, value)


def _restore_data(tensor: torch.Tensor, kept: torch.Tensor) -> None:
    """Have a tensor lie where it lay, also where code has given it other ``data``, as averages of weights are kept."""
    with torch._C.DisableTorchFunction():  # noqa: SLF001 (as above)
        if (tensor.data_ptr(), tensor.shape, tensor.dtype) != (kept.data_ptr(), kept.shape, kept.dtype):
            tensor.data = kept


def _restore_grad(tensor: torch.Tensor, kept: torch.Tensor | None) -> None:
    if tensor.grad is not kept:
        tensor.grad = kept


def _restore_array(array: Any, kept: Any) -> None:
    if array.tobytes() != kept.tobytes():
        array[...] = kept


def _set_environment(kept: Mapping[str, str]) -> None:
    if os.environ != kept:
        os.environ.clear()
        os.environ.update(kept)


def _set_context(variable: ContextVar[Any], value: Any) -> None:
    if value is not NOT_PLAIN and variable.get() is not value:
        variable.set(value)


def _place_of(generator: Any) -> Any:
    frame = generator.gi_frame
    return frame and (frame.f_lasti, {name: id(value) for name, value in frame.f_locals.items()})


def _require_same(generator: Any, place: Any) -> None:
    if _place_of(generator) != place:
        raise ModelError(
            f"the network's code takes values of the generator {generator.__name__!r}, which a trial has moved on and "
            "nobody can put back: make the network again, and let its code count by an attribute in its place"
        )


def _names_of(code: CodeType) -> Iterator[str]:
    """Names that a function reads and writes, those of functions in it too."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names_of(inner)


def _is_filled(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _is_users(kind: type) -> bool:
    """Whether a class is the user's own, and not one of an installed package."""
    module = sys.modules.get(kind.__module__)
    file = getattr(module, "__file__", None)
    return kind.__module__ == "__main__" if file is None else _is_own_file(file)  # a notebook has no file


@cache
def _is_own_file(path: str) -> bool:
    return bool(path) and not path.startswith(("<frozen", *_INSTALLED)) and _PACKAGES.isdisjoint(Path(path).parts)


# Packages lie in one folder of the environment, and in others of the user's and the system's, which it may see too.
_PACKAGES = frozenset({"dist-packages", "site-packages"})
_INSTALLED = (str(Path(__file__).parents[1]), *map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")))
# Of which it is to be seen that they are drawn from: they move on from trial to trial, and are put back at the end.
_GLOBAL_GENERATORS: Sequence[Any] = [
    draw.__self__  # type: ignore[union-attr]
    for draw in (random.uniform, np.random.rand)
]
_GENERATORS: Mapping[type, tuple[Callable[[Any], Any], Callable[[Any, Any], object]]] = {
    torch.Generator: (torch.Generator.get_state, torch.Generator.set_state),
    random.Random: (random.Random.getstate, random.Random.setstate),
    np.random.RandomState: (np.random.RandomState.get_state, np.random.RandomState.set_state),
    np.random.Generator: (
        lambda generator: generator.bit_generator.state,
        lambda generator, state: setattr(generator.bit_generator, "state", state),
    ),
}


def _restored(value: Any, content: Any) -> Any:
    """The same object with its content of before."""
    if not _holds(value, content):
        value.clear()
        (value.extend if isinstance(value, list | deque) else value.update)(content)
    return value


def _holds(value: Any, content: Any) -> bool:
    """Whether a container holds the very same objects still."""
    ours, theirs = (
        [*mapping, *(mapping.values() if isinstance(mapping, dict) else ())] for mapping in (value, content)
    )
    return len(ours) == len(theirs) and all(our is other for our, other in zip(ours, theirs, strict=True))


@contextmanager
def kept_buffers(model: nn.Module) -> Iterator[None]:
    """Put the buffers and their values back at the end, whatever a run made of them."""
    kept = [
        (*path.rpartition("."), buffer, buffer.clone(), version_of(buffer))
        for path, buffer in model.named_buffers(remove_duplicate=False)
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for owner, _, name, buffer, before, version in kept:
                if not (buffer.is_meta or _is_as_before(buffer, before, version)):
                    if buffer.shape != before.shape:  # as observers do on their first batch
                        buffer.resize_(before.shape)
                    buffer.copy_(before)
                setattr(model.get_submodule(owner), name, buffer)


def _is_as_before(buffer: torch.Tensor, before: torch.Tensor, version: int) -> bool:
    """Whether a buffer has its values of before; torch compares those that are not dense by no operation."""
    return torch.equal(buffer, before) if buffer.layout == torch.strided else version_of(buffer) == version


@contextmanager
def kept_tensors() -> Iterator[None]:
    """Put the values of all tensors back into which something is written meanwhile, whoever keeps them.

    What an operation writes into it says itself. A tensor is copied before it is written for the first time; those that
    are made meanwhile are left out. Writes that bypass PyTorch, as by NumPy, are not seen.
    """
    mode = _Writes()
    try:
        with mode:
            yield
    finally:
        mode.restore()


@contextmanager
def kept_weights(model: nn.Module) -> Iterator[None]:
    """Put the values of trained parameters back at the end, also where code writes into them by NumPy or DLPack.

    No operation says that it does, so that they are compared with copies, of which there are as many as of gradients.
    """
    kept = [(weight, weight.detach().clone()) for weight in model.parameters() if _is_trained(weight)]
    try:
        yield
    finally:
        for weight, before in kept:
            if not torch.equal(weight.detach(), before):
                weight.data.copy_(before)


class _Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made: dict[int, StorageWeakRef] = {}  # whose addresses nothing else can have while these are held
        self._kept: dict[int, tuple[Any, Any, torch.Tensor, torch.Size]] = {}
        # Kept by hand: PyTorch's compiler, which looks in here, warns of functools.cache.
        self._effects: dict[Any, tuple[Sequence[tuple[int, str]], bool]] = {}

    def restore(self) -> None:
        for storage, kept, tensor, shape in self._kept.values():
            if tensor.shape != shape:
                with torch.no_grad():
                    tensor.resize_(shape)
                storage.resize_(kept.nbytes())
            if storage.nbytes() == kept.nbytes():
                storage.copy_(kept)

    def _dispatched(self, func: Any, _: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func not in self._effects:
            self._effects[func] = effects_of(func)
        written, is_fresh = self._effects[func]
        for tensor in _written(written, args, kwargs):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._made:  # noqa: SLF001 (its address, by which torch knows storages too)
                kept = storage.clone()  # type: ignore[no-untyped-call]
                self._kept.setdefault(storage._cdata, (storage, kept, tensor, tensor.shape))  # noqa: SLF001
        output = func(*args, **kwargs)
        if is_fresh:
            taken = {*map(_storage_of, args)}
            made = output if isinstance(output, tuple | list) else (output,)
            new = (value.untyped_storage() for value in made if _storage_of(value) not in {0, *taken})
            for storage in new:
                held = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                self._made[storage._cdata] = held  # noqa: SLF001
        return output


# Set here, since PyTorch would wrap that of the class in what imports its compiler, which takes seconds.
_Writes.__torch_dispatch__ = _Writes._dispatched  # type: ignore[method-assign,assignment]  # noqa: SLF001


def effects_of(func: Any) -> tuple[Sequence[tuple[int, str]], bool]:
    """Places and names of the arguments into which an operation writes, and whether all that it returns is new."""
    schema = func._schema  # noqa: SLF001 (as torch's own modes do)
    written = [
        (place, argument.name)
        for place, argument in enumerate(schema.arguments if schema.is_mutable else ())
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    if not schema.is_mutable and "batch_norm" in schema.name and "backward" not in schema.name:
        written = [(3, "running_mean"), (4, "running_var")]  # which it does not say
    return written, not any(returned.alias_info for returned in schema.returns)


def _written(places: Sequence[tuple[int, str]], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors with values at these places."""
    found: list[Any] = []
    for place, name in places:
        value = args[place] if place < len(args) else kwargs.get(name)
        found.extend(value if isinstance(value, tuple | list) else [value])
    return [value for value in found if has_values(value)]


_WITH_VALUES = (torch.Tensor, nn.Parameter, nn.Buffer)


def has_values(value: Any) -> bool:
    """Whether it is a tensor of PyTorch's own kinds, whose numbers lie in memory by its strides."""
    return type(value) in _WITH_VALUES and value.layout == torch.strided and not (value.is_meta or value.is_quantized)


def _is_trained(weight: nn.Parameter) -> bool:
    return weight.requires_grad and has_values(weight)


def _storage_of(value: Any) -> int:
    return value.untyped_storage()._cdata if has_values(value) else 0  # noqa: SLF001
