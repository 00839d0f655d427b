"""Keeps traces of networks as files that are data alone, so that the next job need not trace the same network."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import nn
from torch.utils._pytree import treespec_dumps, treespec_loads

from frostline.config import cache_folder
from frostline.core import Dim, Graph, GraphNode, TensorSpec
from frostline.errors import UnsafeArtifact
from frostline.file_cache import FileCache
from frostline.models.files.graph_file import BROKEN, flattened, graph_from_json, graph_to_json, metadata, restored
from frostline.models.tracing.comparison import agrees
from frostline.models.tracing.export import Trace
from frostline.models.tracing.fingerprint import fingerprint
from frostline.processors import collector_rests

__all__ = ("TraceCache", "trace")

_KEY = "frostline.trace"


class TraceCache:
    """Traces as files in a folder. Whatever cannot be read or written there is traced again.

    Args:
        folder: made when something is kept.
    """

    def __init__(self, folder: Path) -> None:
        self._files = FileCache(folder, ".safetensors")

    def get(self, key: str) -> Trace | None:
        """The trace that was kept under this key."""
        body = self._files.get(key)
        if body is None:
            return None
        try:
            return _from_json(json.loads(metadata(body)[_KEY]), load_tensors(body))
        except (*BROKEN, NotImplementedError, UnsafeArtifact):
            return None

    def put(self, key: str, trace: Trace) -> None:
        """Keep it. A trace that cannot be said as data is not kept."""
        try:
            tensors, orders = flattened(trace.constants)
            about = json.dumps({"orders": orders, **_to_json(trace)}, allow_nan=False)
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
        constants=restored(tensors, value["orders"]),
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
        training: for each module path whether it is in train mode while traced.

    Raises:
        NotTraceable: torch.export does not follow it, or it holds what a graph cannot say.
    """
    kept, key = TraceCache(cache_folder() / "traces"), fingerprint(model, inputs, training)
    found = None if key is None else kept.get(key)
    if found is not None and agrees(model, found, inputs):
        return found
    with collector_rests():
        # Imports torch.export with all of torch._dynamo, which takes longer than to trace a small network.
        from frostline.models.tracing.export import export

        made = export(model, inputs, training=training)
    if key is not None:
        kept.put(key, made)
    return made
