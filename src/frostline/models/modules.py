"""A network's modules: found inside wrappers, put into other modes for a while, and recorded in a forward pass."""

import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten

from frostline.core import TensorSpec
from frostline.core.errors import ModelError
from frostline.engines.measure import version_of
from frostline.models.cuts import DTYPE_BYTES
from frostline.models.outside import NOT_PLAIN, OWN_NAMES, KeptState, kept_buffers, kept_tensors, plain_copy

__all__ = (
    "NOT_EXPORTED",
    "AnyInputs",
    "CallRecorder",
    "CountedCall",
    "FeaturesGuard",
    "Inputs",
    "ModuleCall",
    "StandIn",
    "all_in_eval",
    "graft",
    "has_same_parameters",
    "input_specs",
    "inverse_order",
    "is_guard",
    "is_in_place",
    "is_split",
    "laid_out",
    "memory_order",
    "modes",
    "module_at",
    "name_of_function",
    "not_averaged",
    "record",
    "resolved_path",
    "run_lock",
    "tensor_paths",
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
        ModelError: The network's parameters are sharded over processes, so that no process has the whole frozen part;
            or torch.jit has compiled a part of it, which can be neither followed nor hooked.
    """
    if is_split(model):
        raise ModelError(
            "fully_shard has split the network's parameters over processes, and frozen layers are needed whole: make "
            "the job of the network as it is without, and then call fully_shard(job.head); make the optimiser of "
            "job.head.parameters() behind that"
        )
    inner = list(_layers(model))[-1]
    for path, module in inner.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            whose = f"module {path!r} of the network" if path else "the network"
            raise ModelError(
                f"{whose} is what torch.jit made of one, whose code can be neither followed nor skipped: make the job "
                "of the network as it was before that, and script it when it is trained"
            )
    return inner


def is_split(model: nn.Module) -> bool:
    """Whether parameters of a network, or of a part of it, are split over processes by FSDP."""
    # As below: nothing is split where nobody has imported what splits.
    splits = sys.modules.get("torch.distributed.fsdp")
    kinds = () if splits is None else (splits.FSDPModule, splits.FullyShardedDataParallel)
    return any(isinstance(module, kinds) for module in model.modules())


def not_averaged(model: nn.Module) -> str | None:
    """Why gradients of the head are not averaged over processes as the wrapped network's are; None where none is."""
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


@contextmanager
def modes(model: nn.Module, training: Mapping[str, bool]) -> Iterator[None]:
    """Set the modules' modes, and put these, all other attributes and the values of tensors back.

    What the user's own code reaches beside them is put back too (see ``models.outside``).

    Flags are set one by one, whatever ``train()`` overrides may do beside. A forward pass may leave things in a module
    (a cache of what it worked out, a buffer that was replaced).

    Args:
        model: network.
        training: the mode by module path: whether it is to be in train mode.

    Raises:
        ModelError: State that a run has advanced, such as a generator's, cannot be restored.
    """
    kept = KeptState(model)
    with kept_buffers(model):
        try:
            with kept_tensors():
                for path, module in model.named_modules():
                    module.training = training[path]
                yield
        finally:
            kept.restore()


def name_of_function(func: Callable[..., Any]) -> str:
    """The name of a function or method, or of the attribute that is read."""
    name = getattr(func, "__name__", str(func))
    return getattr(func.__self__, "__name__", name) if name == "__get__" else name  # type: ignore[attr-defined]


def is_in_place(name: str) -> bool:
    """Whether an operation of this name writes into the tensor that it is called on."""
    return (name.endswith("_") and not name.endswith("__")) or (name.startswith("__i") and name[3:4] not in "n")


@contextmanager
def watch_reads(
    model: nn.Module, tell: Callable[[nn.Module, str, Any], None], tell_mode: Callable[[nn.Module], None]
) -> Iterator[None]:
    """Have it told which plain attributes of the modules are read meanwhile; those of every module are left out.

    Plain are numbers, texts, and small lists, dicts, sets and tuples of them, of which copies are told.

    Args:
        model: network.
        tell: function that is told the module, the name and the value when it is read for the first time.
        tell_mode: function that is told each module that is asked for its mode, or may be unseen.
    """
    changed, told = [], set[tuple[int, str]]()
    try:
        for module in model.modules():
            kind = type(module)
            try:
                module.__class__ = _telling(kind, tell, tell_mode, told)
                changed.append((module, kind))
            except TypeError:  # it has a layout of its own, as what is written in C
                tell_mode(module)
        yield
    finally:
        for module, kind in changed:
            module.__class__ = kind


def _telling(
    kind: type[nn.Module],
    tell: Callable[[nn.Module, str, Any], None],
    tell_mode: Callable[[nn.Module], None],
    told: set[tuple[int, str]],
) -> type[nn.Module]:
    def read(self: nn.Module, name: str) -> Any:
        value = kind.__getattribute__(self, name)
        if name == "training":
            tell_mode(self)
        is_told = name in OWN_NAMES or (id(self), name) in told
        if not is_told and name in object.__getattribute__(self, "__dict__"):
            told.add((id(self), name))
            copied = plain_copy(value)
            if copied is not NOT_PLAIN:
                tell(self, name, copied)
        return value

    about = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__getattribute__": read}
    return type(kind.__name__, (kind,), about)


def module_at(root: nn.Module, path: str) -> nn.Module | None:
    """The module at a path; None where there is none."""
    with suppress(AttributeError):
        return root.get_submodule(path)
    return None


def has_same_parameters(module: nn.Module | None, other: nn.Module) -> bool:
    """Whether a module has another one's parameters and no others, as what ``torch.compile`` wraps around it."""
    return module is not None and [*map(id, module.parameters())] == [*map(id, other.parameters())]


_NO_METHODS = (
    "{name!r} is a method of the network, and a job's head has its settings and modules alone: what is computed from "
    "the features is job.head(batch.features), and what needs no frozen layer can be asked of the network itself"
)
_TABLES = ("_parameters", "_buffers", "_modules")
_NONE = object()


NOT_EXPORTED = (
    "a job's head runs your network's own Python code around layers that are not there, which torch.jit, torch.export, "
    "torch.fx and ONNX cannot write down: train job.head, and export the network itself"
)
"""What is said to who would have a head written down as a graph."""


class StandIn(nn.Module):
    """Stands for a module of the user's network, and holds what the head has of it, under the same names.

    Settings and modules that the head does not have are read and set where the network has them. Names of its own end
    in an underscore, so that they are none of a network's.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model_ = (model,)  # in a tuple, so that the frozen layers do not become the head's

    def finish_making_(self) -> None:
        """Look at the network, from now on, for names that are not there."""
        self._is_made_ = True

    def __prepare_scriptable__(self) -> NoReturn:
        """torch.jit asks for what is to be scripted."""
        raise ModelError(NOT_EXPORTED)

    def __getattr__(self, name: str) -> Any:
        """Settings and modules of the network that are not the head's own, which a loop may read and change."""
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            if name.startswith("_") or "_is_made_" not in vars(self) or not hasattr(self._model_[0], name):
                raise
            found = getattr(self._model_[0], name)
            if getattr(found, "__self__", None) is self._model_[0]:
                raise AttributeError(_NO_METHODS.format(name=name)) from error
            return found

    def __setattr__(self, name: str, value: Any) -> None:
        own = vars(self)
        is_own = name in own or hasattr(type(self), name) or any(name in own.get(key, ()) for key in _TABLES)
        is_here = is_own or "_is_made_" not in own or (self._is_new_(name) and name.startswith("_"))  # a library's mark
        if is_here or (self._is_new_(name) and isinstance(value, nn.Module | nn.Parameter)):
            super().__setattr__(name, value)
        if not is_here and getattr(own["_model_"][0], name, _NONE) is not value:
            setattr(own["_model_"][0], name, value)

    # What is new here the network's own code may look for.
    def register_buffer(self, name: str, tensor: torch.Tensor | None, persistent: bool = True) -> None:
        """Add a buffer, to the network too where that has none of the name."""
        super().register_buffer(name, tensor, persistent)
        if self._is_new_(name):
            self._model_[0].register_buffer(name, tensor, persistent)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Add a parameter, to the network too where that has none of the name."""
        super().register_parameter(name, param)
        if self._is_new_(name):
            self._model_[0].register_parameter(name, param)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Add a module, to the network too where that has none of the name."""
        super().add_module(name, module)
        if self._is_new_(name):
            self._model_[0].add_module(name, module)

    def __getitem__(self, key: Any) -> Any:
        """A layer by its number or name in a container of PyTorch's, as the head has it; several by a slice."""
        inner: Any = self._model_[0]
        layers = [getattr(self, name) for name in self._layer_names_(key)]
        if not layers or not isinstance(key, slice):
            return layers[0] if layers else inner[key]
        return nn.Sequential(*layers) if isinstance(inner, nn.Sequential) else nn.ModuleList(layers)

    def __setitem__(self, key: Any, module: nn.Module) -> None:
        for name in self._layer_names_(key):
            setattr(self, name, module)
            return
        inner: Any = self._model_[0]
        inner[key] = module

    def _layer_names_(self, key: Any) -> list[str]:
        names = [*vars(self._model_[0])["_modules"]]
        if isinstance(self._model_[0], nn.Sequential | nn.ModuleList):
            return names[key] if isinstance(key, slice) else [names[key]]
        return [key] if isinstance(self._model_[0], nn.ModuleDict) else []

    def __delattr__(self, name: str) -> None:
        try:
            super().__delattr__(name)
        except AttributeError:
            if name not in vars(self._model_[0]):
                raise
            delattr(self._model_[0], name)

    def _is_new_(self, name: str) -> bool:
        return "_is_made_" in vars(self) and not hasattr(self._model_[0], name)


def _of_the_network(name: str) -> Any:
    """An attribute that is the network's own wherever it is set."""

    def give(self: StandIn) -> Any:
        return getattr(self._model_[0], name)

    def take(self: StandIn, value: Any) -> None:
        if "_model_" in vars(self):  # which is made last
            setattr(self._model_[0], name, value)

    return property(give, take)


_HOOKS = (
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_backward_pre_hooks", "_backward_hooks"),
)


class _Part(StandIn):
    """What a head has of a module a part of which is frozen; its hooks, mode and items are those of the module."""

    training = _of_the_network("training")
    _is_full_backward_hook = _of_the_network("_is_full_backward_hook")

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        vars(self).update((name, vars(module)[name]) for name in _HOOKS)

    def forward(self, *_: Any, **__: Any) -> NoReturn:
        """Say that a part of a module does not run.

        Raises:
            ModelError: The module was called.
        """
        raise ModelError(
            f"a part of this {type(self._model_[0]).__name__} is frozen, and a job's head has the rest, which does not "
            "run alone: call job.head(batch.features), or the network's own module on what that takes"
        )

    def __iter__(self) -> Iterator[Any]:
        return iter(self._model_[0])  # type: ignore[call-overload,no-any-return]

    def __len__(self) -> int:
        return len(self._model_[0])  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        return True


def graft(head: StandIn, tensors: Collection[str], run: Collection[str]) -> None:
    """Hang a network's modules into its head: those that are the head's as they are, and stand-ins for the others.

    Args:
        head: head, or stand-in for a part of the network.
        tensors: paths in the network of the tensors that are the head's.
        run: paths of the modules that it may run.
    """
    model = head._model_[0]
    paths = (*tensor_paths(model), *(path for path, _ in model.named_modules(remove_duplicate=False)))
    others = set(paths) - {*tensors, *run}
    partial = {path[:end] for path in others for end, sign in enumerate(f"{path}.") if sign == "."}
    _graft(head, model, set(tensors), partial, "")


def _graft(place: StandIn, module: nn.Module, tensors: Collection[str], partial: Collection[str], prefix: str) -> bool:
    """Whether anything of the module is the head's; ``partial`` are the paths of modules that are not so whole."""
    for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
        if f"{prefix}{name}" in tensors:
            place.register_parameter(name, parameter)
    for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
        if f"{prefix}{name}" in tensors:
            place.register_buffer(name, buffer, persistent=name not in module._non_persistent_buffers_set)  # noqa: SLF001
    for name, child in vars(module)["_modules"].items():
        path = f"{prefix}{name}"
        if child is not None and path not in partial:
            place.add_module(name, child)
        elif child is not None and _graft(part := _Part(child), child, tensors, partial, f"{path}."):
            part.finish_making_()
            place.add_module(name, part)
    return any(vars(place)[table] for table in _TABLES)


def tensor_paths(model: nn.Module) -> list[str]:
    """Paths of all parameters and buffers, also of those that several modules share."""
    parameters = (path for path, _ in model.named_parameters(remove_duplicate=False))
    return [*parameters, *(path for path, _ in model.named_buffers(remove_duplicate=False))]


_LOCKS: "weakref.WeakKeyDictionary[nn.Module, threading.RLock]" = weakref.WeakKeyDictionary()


def run_lock(model: nn.Module) -> AbstractContextManager[Any]:
    """Held by the thread in which heads of a network run, since they change its modules' forwards for that while."""
    return _LOCKS.setdefault(model, threading.RLock())


@contextmanager
def with_forwards(modules: Mapping[str, nn.Module], forward: Callable[..., Callable[..., Any]]) -> Iterator[None]:
    """Give modules other forwards for a while, made of their path and their own one; hooks and attributes stay.

    Other threads, which may run the whole network meanwhile, have its own ones.
    """
    thread = threading.get_ident()
    with ExitStack() as stack:
        for path, module in modules.items():
            own = vars(module)
            if "forward" in own:
                stack.callback(own.__setitem__, "forward", own["forward"])
            else:
                stack.callback(own.pop, "forward", None)
            own["forward"] = _in_thread(thread, forward(path, module.forward), module.forward)
        yield


def _in_thread(thread: int, forward: Callable[..., Any], own: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return (forward if threading.get_ident() == thread else own)(*args, **kwargs)

    return run


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


@dataclass(slots=True, kw_only=True, eq=False)
class ModuleCall:
    """One run of a module.

    Attributes:
        path: path of the module.
        module: module that ran.
        taken: tensor that it took; None if it took anything but one tensor.
        taken_version: number of times that tensor had been written to by then.
        given: tensor that it returned; None if it returned anything but one tensor.
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
        Exception: Any error of the network.
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

    with _hooked(model, begins, ends), torch.enable_grad():  # as in training, where code may compute gradients
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


@dataclass(slots=True, kw_only=True)
class CountedCall:
    """A call of a module, with a count that goes on meanwhile.

    Attributes:
        path: path of the module.
        call: number of its calls before this one.
        starts: the count when it began.
        parent: the call within which it ran.
        ends: the count when it ended; -1 where it did not.
        leaves: leaves of the result.
        structure: structure of the result; None where the call did not end.
    """

    path: str
    call: int
    starts: int
    parent: "CountedCall | None"
    ends: int = -1
    leaves: list[Any] = field(default_factory=list)
    structure: TreeSpec | None = None


class CallRecorder:
    """Notes the calls of modules, in order.

    Args:
        count: function that gives the count.
    """

    def __init__(self, count: Callable[[], int]) -> None:
        self.calls: list[CountedCall] = []
        self._count = count
        self._open: list[CountedCall] = []
        self._counts: dict[str, int] = {}

    def forward(self, path: str, own: Callable[..., Any]) -> Callable[..., Any]:
        """A forward of a module that notes its calls; see ``with_forwards``."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            parent = self._open[-1] if self._open else None
            number = self._counts.get(path, 0)
            self._counts[path] = number + 1
            call = CountedCall(path=path, call=number, starts=self._count(), parent=parent)
            self.calls.append(call)
            self._open.append(call)
            output = own(*args, **kwargs)
            self._open.pop()
            call.ends = self._count()
            call.leaves, call.structure = tree_flatten(output)
            return output

        return forward


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
            ModelError: The only input is a batch, or has the shape of a batch of features.
        """
        if len(inputs) == 1 and isinstance(getattr(inputs[0], "features", None), torch.Tensor):
            raise ModelError(
                "the whole network was called with a batch, of which its frozen layers are computed already: write "
                "job.head(batch.features) in the loop, in place of model(batch)"
            )
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
