"""A network's modules: found inside wrappers, put into other modes for a while, and recorded in a forward pass.

Finds the network inside wrappers that say how it runs, and its modules by their paths inside or outside of these.

Records a forward pass: which modules it runs, one in another and in order, and what each takes and gives.
"""

import operator
import random
import sys
import sysconfig
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import nn

from frostline.core import TensorSpec
from frostline.core.errors import ModelError
from frostline.engines.measure import version_of
from frostline.models.cuts import DTYPE_BYTES

__all__ = (
    "NOT_PLAIN",
    "AnyInputs",
    "FeaturesGuard",
    "Inputs",
    "ModuleCall",
    "all_in_eval",
    "has_same_parameters",
    "input_specs",
    "inverse_order",
    "is_guard",
    "is_same_plain",
    "is_split",
    "kept_buffers",
    "laid_out",
    "lone_parameters",
    "memory_order",
    "modes",
    "module_at",
    "not_averaged",
    "plain_copy",
    "random_batch",
    "record",
    "resolved_path",
    "unwrap",
    "watch_reads",
    "with_forwards",
    "with_modules",
    "with_parameters",
    "zeros",
)


_INNER = ("_orig_mod", "module")


def unwrap(model: nn.Module) -> nn.Module:
    """The network inside ``torch.compile``, ``DataParallel`` and ``DistributedDataParallel``, or the network itself.

    These say where and how a network runs, not what it computes: a job runs the frozen part by its own engines, and the
    trained part as a head of its own. Parameters are the same objects inside and outside. Wrappers that compute
    something themselves, as PEFT's do, are part of the network.

    Raises:
        ModelError: Its parameters are split over processes, so that nobody has the frozen part whole.
    """
    if is_split(model):
        raise ModelError(
            "fully_shard has split the network's parameters over processes, and frozen layers are needed whole: make "
            "the job of the network as it is without, and then call fully_shard(job.head); make the optimiser of "
            "job.head.parameters() behind that"
        )
    return list(_layers(model))[-1]


def is_split(model: nn.Module) -> bool:
    """Whether parameters of a network, or of a part of it, are split over processes by FSDP."""
    # As below: nothing is split where nobody has imported what splits.
    splits = sys.modules.get("torch.distributed.fsdp")
    kinds = () if splits is None else (splits.FSDPModule, splits.FullyShardedDataParallel)
    return any(isinstance(module, kinds) for module in model.modules())


def not_averaged(model: nn.Module) -> str | None:
    """Why gradients of the head are not averaged over the processes as the wrapped network's are; None where none is.

    Args:
        model: network as the user gave it.
    """
    data_parallel = [layer for layer in _layers(model) if isinstance(layer, nn.parallel.DistributedDataParallel)]
    if all(layer.process_group.size() == 1 for layer in data_parallel):
        return None
    return (
        "DistributedDataParallel averages the gradients of the network that it wraps when that runs, and a job runs "
        "its head alone: wrap job.head in DistributedDataParallel too, or the processes train apart"
    )


def resolved_path(model: nn.Module, path: str) -> str:
    """The path of a module in ``unwrapped(model)``, which may be said as the wrapper has it, or as the network inside.

    Args:
        model: the model, wrapped or not.
        path: the dotted path; one that names no module is given back without the names of wrappers.
    """
    *around, model = _layers(model)
    for _ in around:
        path = _without(path, _INNER)
    paths = dict(model.named_modules())
    tuned = getattr(model, "get_base_model", None)
    if path in paths or not callable(tuned):
        return path
    base = tuned()
    outer = next((name for name, module in paths.items() if module is base), "")
    return f"{outer}.{path}" if f"{outer}.{path}" in paths else path


def _layers(model: nn.Module) -> Iterator[nn.Module]:
    """The network and what it wraps, from the outside in."""
    layer: nn.Module | None = model
    while layer is not None:
        yield layer
        layer = _inner(layer)


def _inner(model: nn.Module) -> nn.Module | None:
    # Importing the compiler takes seconds, and nothing is compiled where nobody has imported it.
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    is_compiled = compiler is not None and issubclass(type(model), compiler.OptimizedModule)
    is_parallel = isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel)
    name = "_orig_mod" if is_compiled else "module" if is_parallel else None
    return None if name is None else model.get_submodule(name)


def _without(path: str, names: tuple[str, ...]) -> str:
    first, _, rest = path.partition(".")
    return rest if first in names else path


_CONTAINERS = (dict, OrderedDict, list, set)


@contextmanager
def modes(model: nn.Module, training: Mapping[str, bool]) -> Iterator[None]:
    """Set the modules' modes, and put these, all other attributes and the values of buffers back.

    What the user's own code reaches beside them is put back too (see ``_Outside``).

    Flags are set one by one, whatever ``train()`` overrides may do beside. A forward pass may leave things in a module
    (a cache of what it worked out, a buffer that was replaced); where it was only a trace, they are not even real.

    Args:
        model: any network.
        training: the mode by module path: whether it is to be in train mode.
    """
    kept, outside = [(vars(module), _attributes(module)) for module in model.modules()], _Outside(model)
    with kept_buffers(model):
        try:
            for path, module in model.named_modules():
                module.training = training[path]
            yield
        finally:
            for attributes, before in kept:
                for name in attributes.keys() - {name for name, _, _ in before}:
                    del attributes[name]
                attributes.update((name, _restored(value, content)) for name, value, content in before)
            outside.restore()


@contextmanager
def kept_buffers(model: nn.Module) -> Iterator[None]:
    """Put the buffers and their values back at the end, whatever a run made of them."""
    kept = [
        (*path.rpartition("."), buffer, buffer.clone()) for path, buffer in model.named_buffers(remove_duplicate=False)
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for owner, _, name, buffer, before in kept:
                if not (buffer.is_meta or torch.equal(buffer, before)):
                    buffer.copy_(before)
                setattr(model.get_submodule(owner), name, buffer)


_PLAIN = (bool, int, float, str, type(None))
_OWN = frozenset(vars(nn.Module()))


@contextmanager
def watch_reads(model: nn.Module, tell: Callable[[nn.Module, str, Any], None]) -> Iterator[None]:
    """Have it told which plain attributes of the modules are read meanwhile; those of every module are left out.

    Plain are numbers, texts, and small lists, dicts, sets and tuples of them, of which copies are told.

    Args:
        model: any network.
        tell: function that is told the module, the name and the value.
    """
    changed = []
    try:
        for module in model.modules():
            kind = type(module)
            with suppress(TypeError):  # it has a layout of its own, as what is written in C
                module.__class__ = _telling(kind, tell)
                changed.append((module, kind))
        yield
    finally:
        for module, kind in changed:
            module.__class__ = kind


def _telling(kind: type[nn.Module], tell: Callable[[nn.Module, str, Any], None]) -> type[nn.Module]:
    def read(self: nn.Module, name: str) -> Any:
        value = kind.__getattribute__(self, name)
        if name not in _OWN and name in object.__getattribute__(self, "__dict__"):
            copied = plain_copy(value)
            if copied is not NOT_PLAIN:
                tell(self, name, copied)
        return value

    about = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__getattribute__": read}
    return type(kind.__name__, (kind,), about)


NOT_PLAIN = object()
"""Stands for the copy of what is not plain."""
_ITEMS = 64  # of a container, which is compared in each step


def plain_copy(value: Any) -> Any:
    """The value of a number or a text, and a copy of a small container of such; ``NOT_PLAIN`` for all else."""
    if isinstance(value, _PLAIN):
        return value
    kind = type(value)
    if kind not in (tuple, list, set, dict) or len(value) > _ITEMS:
        return NOT_PLAIN
    items = [plain_copy(item) for item in (value.items() if kind is dict else value)]
    if any(item is NOT_PLAIN for item in items):
        return NOT_PLAIN
    # One that nobody can change is its own copy, so that it is known by its place in memory.
    return value if kind is tuple and all(map(operator.is_, items, value)) else kind(items)


def is_same_plain(now: Any, value: Any) -> bool:
    """Whether a value is a plain one that was copied before, as far as is known without a copy of it."""
    if now is value:
        return True
    if type(now) is not type(value) or type(value) not in (*_PLAIN, list, set, dict):
        return False
    try:
        return bool(now == value)
    except (RuntimeError, ValueError):  # of tensors and arrays that stand there now
        return False


def module_at(root: nn.Module, path: str) -> nn.Module | None:
    """The module at a path; None where there is none."""
    with suppress(AttributeError):
        return root.get_submodule(path)
    return None


def has_same_parameters(module: nn.Module | None, other: nn.Module) -> bool:
    """Whether a module has another one's parameters and no others, as what ``torch.compile`` wraps around it."""
    return module is not None and [*map(id, module.parameters())] == [*map(id, other.parameters())]


def lone_parameters(head: nn.Module, model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Paths and parameters of a head whose owner in the network is another module, which holds other modules too."""
    for path, parameter in head.named_parameters(remove_duplicate=False):
        owner = path.rpartition(".")[0]
        if head.get_submodule(owner) is not model.get_submodule(owner):
            yield path, parameter


@contextmanager
def with_forwards(modules: Mapping[str, nn.Module], forward: Callable[..., Callable[..., Any]]) -> Iterator[None]:
    """Give modules other forwards for a while, made of their path and their own one; hooks and attributes stay."""
    with ExitStack() as stack:
        for path, module in modules.items():
            own = vars(module)
            if "forward" in own:
                stack.callback(own.__setitem__, "forward", own["forward"])
            else:
                stack.callback(own.pop, "forward", None)
            own["forward"] = forward(path, module.forward)
        yield


@contextmanager
def with_modules(model: nn.Module, others: Mapping[str, nn.Module]) -> Iterator[None]:
    """Let a network run other modules for a while, given by their paths."""
    kept = []
    for path, module in others.items():
        owner, _, name = path.rpartition(".")
        modules = model.get_submodule(owner)._modules  # noqa: SLF001
        kept.append((modules, name, modules[name]))
        modules[name] = module
    try:
        yield
    finally:
        for modules, name, kept_module in kept:
            modules[name] = kept_module


@contextmanager
def with_parameters(model: nn.Module, head: nn.Module) -> Iterator[None]:
    """Let a network read the parameters that somebody, such as FSDP, has put into its head in place of its own."""
    kept: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter | None]] = []
    for path, tensor in head.named_parameters():
        owner, _, name = path.rpartition(".")
        own = model.get_submodule(owner)._parameters  # noqa: SLF001
        if name in own and own[name] is not tensor:
            kept.append((own, name, own[name]))
            own[name] = tensor
    try:
        yield
    finally:
        for own, name, before in kept:
            own[name] = before


def all_in_eval(model: nn.Module) -> dict[str, bool]:
    """The modes of a network in eval mode."""
    return {path: False for path, _ in model.named_modules()}


def _attributes(module: nn.Module) -> list[tuple[str, Any, Any]]:
    """Name, value, and a shallow copy of the value where it is a plain container."""
    return [(name, value, value.copy() if type(value) in _CONTAINERS else None) for name, value in vars(module).items()]


class _Outside:
    """What the user's own code reaches and may change that is no module's: put back behind each trial of a network.

    Global variables and those of enclosing functions, containers, attributes of objects, and generators of random
    numbers, as far as functions of the modules name them. Code of installed packages is not followed.

    Args:
        model: any network.
    """

    def __init__(self, model: nn.Module) -> None:
        self._undo: list[Callable[[], object]] = []
        self._seen: set[int] = set()
        kinds = {base for module in model.modules() for base in type(module).__mro__ if _is_users(base)}
        todo = [function for kind in kinds for function in vars(kind).values()]
        for module in model.modules():
            todo += [value for name, value in vars(module).items() if name not in _OWN or "hooks" in name]
        while todo:
            value = todo.pop()
            if id(value) not in self._seen:
                self._seen.add(id(value))
                todo.extend(self._keep(value))

    def restore(self) -> None:
        """Put everything back."""
        for undo in self._undo:
            undo()

    def _keep(self, value: Any) -> list[Any]:
        """Remember a value as it is; what it leads to."""
        if isinstance(value, FunctionType):
            return self._keep_of_function(value) if _is_own_file(value.__code__.co_filename) else []
        if isinstance(value, MethodType):
            return [value.__func__, value.__self__]
        if isinstance(value, partial):
            return [value.func, *value.args, *value.keywords.values()]
        if (states := _GENERATORS.get(type(value))) is not None:
            self._undo.append(partial(states[1], value, states[0](value)))
        elif type(value) in _CONTAINERS and len(value) <= _ITEMS:
            self._undo.append(partial(_restored, value, value.copy()))
            return [*(value.values() if isinstance(value, dict) else value)]
        elif not isinstance(value, nn.Module) and _is_users(type(value)) and hasattr(value, "__dict__"):
            own = vars(value)
            self._undo.append(partial(_restored, own, own.copy()))
            return [*own.values(), *(item for item in vars(type(value)).values() if isinstance(item, FunctionType))]
        return []

    def _keep_of_function(self, function: FunctionType) -> list[Any]:
        own = function.__globals__
        named = {name: own[name] for name in _names_of(function.__code__) if name in own}
        plain = {name: value for name, value in named.items() if isinstance(value, _PLAIN)}
        self._undo.append(partial(own.update, plain))
        cells = [cell for cell in function.__closure__ or () if _is_filled(cell)]
        self._undo.extend(partial(setattr, cell, "cell_contents", cell.cell_contents) for cell in cells)
        return [*named.values(), *(cell.cell_contents for cell in cells)]


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
    return _is_own_file(getattr(sys.modules.get(kind.__module__), "__file__", None) or "")


@cache
def _is_own_file(path: str) -> bool:
    return bool(path) and not path.startswith(("<frozen", *_INSTALLED))


_INSTALLED = (str(Path(__file__).parents[1]), *map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")))
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
    if content is not None and not _holds(value, content):
        value.clear()
        (value.extend if isinstance(value, list) else value.update)(content)
    return value


def _holds(value: Any, content: Any) -> bool:
    """Whether a container holds the very same objects still."""
    ours, theirs = (
        [*mapping, *(mapping.values() if isinstance(mapping, dict) else ())] for mapping in (value, content)
    )
    return len(ours) == len(theirs) and all(our is other for our, other in zip(ours, theirs, strict=True))


@dataclass(slots=True, kw_only=True, eq=False)
class ModuleCall:
    """One run of a module.

    Attributes:
        path: path of the module.
        module: module that ran.
        taken: the one tensor that it took, None where it took anything else.
        taken_version: number of times that tensor had been written to by then.
        given: the one tensor that it gave, None where it gave anything else.
        given_version: number of times that tensor had been written to by then.
        inner: the runs of its own modules, in order.
    """

    path: str
    module: nn.Module
    taken: torch.Tensor | None = None
    taken_version: int = 0
    given: torch.Tensor | None = None
    given_version: int = 0
    inner: "list[ModuleCall]" = field(default_factory=list)

    def takes(self, given: torch.Tensor, version: int) -> bool:
        """Whether it took exactly that tensor, unchanged since."""
        return self.taken is given and self.taken_version == version


def record(model: nn.Module, inputs: Sequence[torch.Tensor]) -> ModuleCall:
    """Run the network once and tell what it ran; it is the caller who sets its modes.

    Raises:
        Exception: Whatever the network raises.
    """
    open_calls: list[ModuleCall] = []
    finished: list[ModuleCall] = []

    def begins(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            call = ModuleCall(path=path, module=module)
            if len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor):
                call.taken, call.taken_version = args[0], version_of(args[0])
            open_calls.append(call)

        return hook

    def ends(_: nn.Module, __: Any, output: Any) -> None:
        call = open_calls.pop()
        if isinstance(output, torch.Tensor):
            call.given, call.given_version = output, version_of(output)
        (open_calls[-1].inner if open_calls else finished).append(call)

    with _hooked(model, begins, ends), torch.no_grad():
        model(*inputs)
    return finished[-1]


@contextmanager
def _hooked(
    model: nn.Module, begins: Callable[[str], Callable[..., None]], ends: Callable[..., None]
) -> Iterator[None]:
    handles = []
    try:
        for path, module in model.named_modules():
            handles.append(module.register_forward_pre_hook(begins(path), with_kwargs=True))
            handles.append(module.register_forward_hook(ends))
        yield
    finally:
        for handle in handles:
            handle.remove()


Inputs = Sequence[int] | Sequence[TensorSpec]
"""The per-sample shape of one float32 input, such as (3, 224, 224), or one ``TensorSpec`` for each input."""

AnyInputs = Inputs | Mapping[str, TensorSpec]
"""The same, or a ``TensorSpec`` for each input that the network takes by name."""


def input_specs(inputs: AnyInputs) -> tuple[TensorSpec, ...]:
    """One spec for each input.

    Raises:
        ModelError: A dtype that cannot be carried, or no input at all.
    """
    given = tuple(inputs.values() if isinstance(inputs, Mapping) else inputs)
    specs = tuple(spec for spec in given if isinstance(spec, TensorSpec))
    if not specs and given:
        return (TensorSpec(tuple(size for size in given if isinstance(size, int))),)
    strange = [spec.dtype for spec in specs if spec.dtype not in DTYPE_BYTES]
    if strange or not specs or len(specs) != len(given):
        known = ", ".join(sorted(DTYPE_BYTES))
        raise ModelError(f"the network's inputs must be tensors of {known}, not {strange or list(given)}")
    return specs


def zeros(inputs: Sequence[TensorSpec], rows: int, device: torch.device | str = "cpu") -> list[torch.Tensor]:
    """A batch of zeros: a valid index, a valid mask and a valid image."""
    return [torch.zeros((rows, *spec.shape), dtype=getattr(torch, spec.dtype), device=device) for spec in inputs]


def random_batch(
    inputs: Sequence[TensorSpec], rows: int, generator: torch.Generator, device: torch.device | str = "cpu"
) -> list[torch.Tensor]:
    """A batch of normal numbers, and of zeros and ones where the dtype is no floating one."""
    made = []
    for spec in inputs:
        dtype = getattr(torch, spec.dtype)
        values = torch.randn((rows, *spec.shape), generator=generator)
        made.append((values if dtype.is_floating_point else values > 0).to(device=device, dtype=dtype))
    return made


class FeaturesGuard:
    """Refuses a whole network that is called with a job's features, which its first layer could not make sense of.

    A forward pre-hook of the network, for as long as the job lasts. Copies and files of the network have none of it.

    Args:
        features: shape of what crosses the frost line, without the batch.
    """

    def __init__(self, features: Sequence[int]) -> None:
        self._features = tuple(features)

    def __call__(self, _: nn.Module, inputs: tuple[Any, ...]) -> None:
        """See ``nn.Module.register_forward_pre_hook``.

        Raises:
            ModelError: The only input has the shape of a batch of features.
        """
        if len(inputs) == 1 and isinstance(inputs[0], torch.Tensor) and tuple(inputs[0].shape[1:]) == self._features:
            raise ModelError(
                f"the whole network was called with features {list(inputs[0].shape)}, of which its frozen layers are "
                "computed already: write job.head(batch.features) in the loop, in place of model(batch.features)"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        # In a file of the whole network something of Python's own that gives a hook's inputs back, so that it is loaded
        # where there is no Frostline.
        return partial, (dict.get, {})

    @classmethod
    def on(cls, model: nn.Module, features: Sequence[Sequence[int]], given: Sequence[int]) -> Callable[[], None]:
        """Guard a network; what is returned takes the guard away.

        Args:
            model: network of the user's.
            features: shapes of the tensors that cross the frost line.
            given: shape of a sample as the network takes it. Features of that shape cannot be told from samples.
        """
        if len(features) != 1 or (len(features[0]) == len(given) and features[0][:1] == tuple(given[:1])):
            return lambda: None
        return model.register_forward_pre_hook(cls(features[0])).remove


def is_guard(hook: object) -> bool:
    """Whether a hook is a ``FeaturesGuard``, which changes nothing that a network computes."""
    return isinstance(hook, FeaturesGuard)


def laid_out(feature: torch.Tensor, shape: Sequence[int], order: Sequence[int]) -> torch.Tensor | None:
    """A copy of an activation in the shape and memory order of the network's own tensor; None where it does not fit.

    What crosses is contiguous: it shows the network's tensor in the order of its memory, or in that of its dimensions.
    """
    across = [shape[dim] for dim in order]
    if tuple(order) != tuple(range(len(order))) and order[0] == 0 and list(feature.shape) == across:
        return feature.clone(memory_format=torch.contiguous_format).permute(inverse_order(order))
    if feature.numel() != torch.Size(shape).numel() or feature.shape[:1] != torch.Size(shape)[:1]:
        return None
    own = feature.reshape(tuple(shape))
    return own.permute(tuple(order)).clone(memory_format=torch.contiguous_format).permute(inverse_order(order))


def memory_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """Dimensions from the outermost in memory to the innermost."""
    strides = tensor.stride()
    if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, strides, strict=True)):
        return tuple(range(tensor.dim()))
    return tuple(sorted(range(tensor.dim()), key=lambda dim: -strides[dim]))


def inverse_order(order: Sequence[int]) -> tuple[int, ...]:
    """Where each dimension lies in such an order."""
    return tuple(sorted(range(len(order)), key=order.__getitem__))
