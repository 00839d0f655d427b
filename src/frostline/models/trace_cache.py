"""Keeps traces of networks as files that are data alone, under a name of everything that they depend on.

Keeps traces of networks as files that are data alone, so that the next job need not trace the same network.

Names a network by everything that its trace depends on: its code, its configuration and its tensors' shapes.
"""

import enum
import functools
import hashlib
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import astuple, replace
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils._pytree import treespec_dumps, treespec_loads

from frostline.core import Dim, Graph, GraphNode, TensorSpec
from frostline.core.config import cache_folder
from frostline.core.errors import NotTraceable, SettingError, UnsafeArtifact
from frostline.core.files import FileCache, with_schema, without_schema
from frostline.core.system import __version__, collector_rests
from frostline.models.artifact import BROKEN, flatten_tensors, graph_from_json, graph_to_json, metadata, restore_tensors
from frostline.models.modules import is_guard
from frostline.models.tracing import Trace, agrees, draws_elsewhere

__all__ = (
    "TraceCache",
    "fingerprint",
    "trace",
)


# Configurations of large libraries nest less deeply than this.
_MAX_DEPTH = 12
_PLAIN = (bool, int, str, type(None))
_NAMED = (torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format)
_OWN = frozenset(vars(nn.Module()))
"""Attributes that every module has; those that matter are looked at one by one."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks")


class _Unknown(Exception):
    """Something that cannot be named."""


def fingerprint(model: nn.Module, inputs: Sequence[TensorSpec], training: Mapping[str, bool]) -> str | None:
    """A digest that is equal only for networks whose traces are equal, as far as can be told without running them.

    It covers the code and the configuration of all modules, the shapes and types of their tensors but not the values,
    the modes, the inputs, and the releases of torch and Frostline. None where the network holds something that cannot
    be named, such as a hook.
    """
    if any(getattr(torch_module, name) for name in _GLOBAL_HOOKS):
        return None
    describer = _Describer({id(module): path for path, module in model.named_modules(remove_duplicate=False)})
    try:
        found = {
            "versions": [__version__, torch.__version__, sys.version],
            "inputs": [astuple(spec) for spec in inputs],
            "training": sorted(training.items()),
            "default": [str(torch.get_default_dtype()), torch.is_autocast_enabled("cpu")],
            "modules": [
                [path, describer.module(module)] for path, module in model.named_modules(remove_duplicate=False)
            ],
            "tensors": _tensors(model),
        }
    except _Unknown:
        return None
    return hashlib.sha256(json.dumps(found, sort_keys=True, default=str).encode()).hexdigest()


def _tensors(model: nn.Module) -> list[list[Any]]:
    """What a trace takes of parameters and buffers; those that several modules share are told by their place."""
    places: dict[int, int] = {}
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    if any(tensor.layout != torch.strided for _, tensor in named):  # of which not all have strides
        raise _Unknown
    return [
        [
            path,
            list(tensor.shape),
            list(tensor.stride()),
            str(tensor.dtype),
            tensor.device.type,
            tensor.requires_grad,
            places.setdefault(id(tensor), len(places)),
        ]
        for path, tensor in named
    ]


class _Describer:
    """Describes values as JSON, or raises ``_Unknown``.

    Args:
        modules: paths of the network's modules, by identity.
    """

    def __init__(self, modules: Mapping[int, str]) -> None:
        self._modules = modules
        self._classes: dict[type, tuple[str, ...]] = {}

    def module(self, module: nn.Module) -> Any:
        """One module without those inside it."""
        if any(not is_guard(hook) for name in _HOOKS for hook in getattr(module, name).values()):
            raise _Unknown
        own = {name: value for name, value in vars(module).items() if name not in _OWN}
        return [self._class(type(module)), {name: self._value(value, 0) for name, value in sorted(own.items())}]

    def _value(self, value: Any, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise _Unknown
        match value:
            case _ if isinstance(value, _PLAIN):
                return value if type(value) in _PLAIN else [_name(type(value)), str(value)]
            case float() | complex() | np.generic() | bytes():
                return repr(value)
            case enum.Enum():
                return [_name(type(value)), value.name]
            case _ if isinstance(value, _NAMED):
                return str(value)
            case list() | tuple() | dict() | set() | frozenset() | np.ndarray():
                return self._container(value, depth)
            case _:
                return self._code_or_object(value, depth)

    def _container(self, value: Any, depth: int) -> Any:
        match value:
            case list() | tuple():
                return [_name(type(value)), [self._value(item, depth + 1) for item in value]]
            case dict():
                pairs = [[self._value(key, depth + 1), self._value(item, depth + 1)] for key, item in value.items()]
                return [_name(type(value)), pairs]
            case np.ndarray():
                return [str(value.dtype), list(value.shape), hashlib.sha256(value.tobytes()).hexdigest()]
            case _:
                return sorted(json.dumps(self._value(item, depth + 1)) for item in value)

    def _code_or_object(self, value: Any, depth: int) -> Any:
        match value:
            case nn.Module():
                return self._known(value)
            case torch.Tensor():
                raise _Unknown  # its values may have been baked into the trace
            case type():
                return self._class(value)
            case BuiltinFunctionType():
                return [value.__module__, value.__qualname__]
            case FunctionType():
                closed = [self._value(cell.cell_contents, depth + 1) for cell in value.__closure__ or ()]
                return [_function(value), self._value(value.__defaults__, depth + 1), closed]
            case MethodType():
                return [self._value(part, depth + 1) for part in (value.__func__, value.__self__)]
            case functools.partial():
                return [self._value(part, depth + 1) for part in (value.func, value.args, value.keywords)]
            case logging.Logger():
                return value.name
            case _ if hasattr(value, "__dict__") and not hasattr(type(value), "__slots__"):
                return [self._class(type(value)), self._value(vars(value), depth + 1)]
            case _:
                raise _Unknown

    def _class(self, kind: type) -> tuple[str, ...]:
        """A class by its code and that of its bases; torch's own are known by its release."""
        if kind not in self._classes:
            own = [base for base in kind.__mro__ if base.__module__.partition(".")[0] not in ("torch", "builtins")]
            self._classes[kind] = _name(kind), *(_code_of(base) for base in own)
        return self._classes[kind]

    def _known(self, module: nn.Module) -> str:
        path = self._modules.get(id(module))
        if path is None:
            raise _Unknown  # it runs, and is none of the network's own
        return path


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _code_of(kind: type) -> str:
    """Of the methods themselves, which may have been replaced, and of the file in which they stand."""
    digest = hashlib.sha256(_file(kind.__module__))
    for name, value in sorted(vars(kind).items()):
        function = getattr(value, "__func__", getattr(value, "fget", value))
        if isinstance(function, FunctionType):
            digest.update(f"{name} {_function(function)}".encode())
    return digest.hexdigest()


def _function(function: FunctionType) -> str:
    digest = hashlib.sha256(_file(function.__module__))
    _add_code(digest, function.__code__)
    return f"{function.__module__}.{function.__qualname__} {digest.hexdigest()}"


def _add_code(digest: "hashlib._Hash", code: CodeType) -> None:
    digest.update(code.co_code)
    digest.update(repr((code.co_names, code.co_varnames)).encode())
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            _add_code(digest, constant)
        else:  # the order of a set is another one in each process
            digest.update(repr(sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant).encode())


@functools.cache
def _file(module: str) -> bytes:
    """The digest of a module's source; nothing for one that has none, such as a notebook."""
    path = getattr(sys.modules.get(module), "__file__", None)
    if module.partition(".")[0] == "torch" or path is None:
        return b""
    try:
        return hashlib.sha256(Path(path).read_bytes()).digest()
    except OSError:
        return b""


_KEY = "frostline.trace"
_FORMAT = 1


class TraceCache:
    """Traces as files in a folder. Whatever cannot be read or written there is traced again.

    Args:
        folder: the folder, made when something is kept.
    """

    def __init__(self, folder: Path) -> None:
        self._files = FileCache(folder, ".safetensors")

    def get(self, key: str) -> Trace | None:
        """The trace that was kept under this key."""
        body = self._files.get(key)
        if body is None:
            return None
        try:
            about = without_schema(json.loads(metadata(body)[_KEY]), _FORMAT, "a kept trace")
            return _from_json(about, load_tensors(body))
        except (*BROKEN, NotImplementedError, SettingError, UnsafeArtifact):
            return None

    def put(self, key: str, trace: Trace) -> None:
        """Keep it. A trace that cannot be said as data is not kept."""
        try:
            tensors, orders = flatten_tensors(trace.constants)
            about = json.dumps(with_schema({"orders": orders, **_to_json(trace)}, _FORMAT), allow_nan=False)
            body = save_tensors(tensors, metadata={_KEY: about})
        except (*BROKEN, NotImplementedError):
            return
        self._files.put(key, body)


def _to_json(trace: Trace) -> dict[str, Any]:
    return {
        **graph_to_json(trace.graph),
        "results": [_result_to_json(node) for node in trace.graph.nodes],
        "structure": treespec_dumps(trace.structure),
        "training": dict(trace.training),
    }


def _from_json(value: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> Trace:
    graph = graph_from_json(value)
    results = zip(graph.nodes, value["results"], strict=True)
    nodes = tuple(_with_result(node, result) for node, result in results)
    return Trace(
        graph=Graph(inputs=graph.inputs, leaves=graph.leaves, nodes=nodes, outputs=graph.outputs),
        constants=restore_tensors(tensors, value["orders"]),
        structure=treespec_loads(value["structure"]),
        training=value["training"],
    )


def _result_to_json(node: GraphNode) -> list[Any]:
    """What the graph's own JSON leaves out, because a node of Frostline finds it by a dry run."""
    shape = None if node.shape is None else [astuple(dim) for dim in node.shape]
    size = None if node.size is None else astuple(node.size)
    return [shape, node.order, node.dtype, node.storage, size, node.module]


def _with_result(node: GraphNode, result: list[Any]) -> GraphNode:
    shape, order, dtype, storage, size, module = result
    return replace(
        node,
        shape=None if shape is None else tuple(Dim(*dim) for dim in shape),
        order=None if order is None else tuple(order),
        dtype=dtype,
        storage=storage,
        size=None if size is None else Dim(*size),
        module=module,
    )


def trace(model: nn.Module, inputs: Sequence[TensorSpec], *, training: Mapping[str, bool]) -> Trace:
    """Trace ``model``, the batch size left open.

    To import torch.export and to trace with it takes seconds. So traces are kept in the user's cache folder, by a
    fingerprint of the network's code and configuration. A kept trace is used only where it still gives what the
    network gives on a random batch, to the bit.

    Args:
        model: the user's network; left as it was found.
        inputs: specifications of the inputs of ``forward``, in order.
        training: the mode by module path: whether it is in train mode while traced.

    Raises:
        NotTraceable: torch.export does not follow it, it holds what a graph cannot say, or its code draws random
            numbers that a trace does not see.
    """
    kept, key = TraceCache(cache_folder() / "traces"), fingerprint(model, inputs, training)
    found = None if key is None else kept.get(key)
    if found is not None and agrees(model, found, inputs):
        return found
    with collector_rests():
        # Imports torch.export with all of torch._dynamo, which takes longer than to trace a small network.
        from frostline.models.tracing import export

        made = export(model, inputs, training=training)
    if not agrees(model, made, inputs) and draws_elsewhere(model, inputs, training):
        raise NotTraceable(f"{type(model).__name__} draws random numbers that are not torch's")
    if key is not None:
        kept.put(key, made)
    return made
