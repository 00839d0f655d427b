"""Hands a prefix to OpenVINO operator by operator, as it was traced once: it is not traced and decomposed again."""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from frostline.core import Ref, Token
from frostline.core.graph import Argument
from frostline.engines.backends.recipe import EngineRecipe
from frostline.engines.base.operators import ALLOWED, resolve, resolve_symbolic, token_value
from frostline.engines.machine.hardware import imported
from frostline.errors import UnsafeArtifact

__all__ = ("convert",)

_ATEN = torch.ops.aten
_UNBIND, _ITEM = "aten.unbind.int", "operator.getitem"


def convert(order: EngineRecipe) -> Any:
    """The prefix up to its cut as OpenVINO's model. EfficientNet-lite0 takes 0.3 s, and 6 s by way of ``torch.export``.

    Args:
        order: order to convert, whose graph was checked.

    Raises:
        UnsafeArtifact: The graph names what is not allowed.
        RuntimeError: OpenVINO has no rule for an operator; other errors of converters may be raised too.
    """
    ov = imported("openvino")
    decoder = imported("openvino.frontend.pytorch.fx_decoder").TorchFXPythonDecoder
    shapes, kinds = [[-1, *shape] for shape, _ in order.taken], [f"torch.{kind}" for _, kind in order.taken]
    model = ov.convert_model(decoder(_traced(order), input_shapes=shapes, input_types=kinds))
    model.reshape({place: ov.PartialShape(shape) for place, shape in enumerate(shapes)})
    return model


def _traced(order: EngineRecipe) -> fx.GraphModule:
    """The prefix as torch.fx has it, in operators that OpenVINO knows."""
    root, graph = torch.nn.Module(), fx.Graph()
    values: dict[str, Any] = {name: graph.placeholder(name) for name in order.graph.inputs}
    if order.levels is not None:
        (name,) = order.graph.inputs
        values[name] = _levels(order, root, graph, values[name])
    for place, ((name, _), leaf) in enumerate(zip(order.graph.leaves, order.leaves(), strict=True)):
        root.register_buffer(f"leaf_{place}", leaf.detach())
        values[name] = graph.get_attr(f"leaf_{place}")
    unbound: dict[str, tuple[Any, int]] = {}

    def built(argument: Argument) -> Any:
        if isinstance(argument, Ref):
            return values[argument.name]
        if isinstance(argument, tuple):
            return [built(item) for item in argument]
        return token_value(argument, torch.device("cpu")) if isinstance(argument, Token) else argument

    for node in order.graph.nodes[: order.last.after + 1]:
        if node.op not in ALLOWED:
            raise UnsafeArtifact(f"operator {node.op!r} is not allowed in a prefix")
        args, kwargs = [built(arg) for arg in node.args[:1]], {key: built(value) for key, value in node.kwargs}
        first = node.args[0] if node.args else None
        if node.op == _ITEM and isinstance(first, Ref) and first.name in unbound:
            source, dim = unbound[first.name]
            values[node.name] = graph.call_function(_ATEN.select.int, (source, dim, built(node.args[1])))
        elif node.op == _UNBIND:
            unbound[node.name] = (args[0], *[built(arg) for arg in node.args[1:]], 0)[:2]
            values[node.name] = None
        else:
            args += [built(arg) for arg in node.args[1:]]
            lower = _LOWERED.get(node.op)
            values[node.name] = (
                graph.call_function(resolve_symbolic(node.op), tuple(args), kwargs)
                if lower is None
                else lower(graph, *args, **kwargs)
            )
    graph.output(tuple(values[name] for name in order.last.tensors))
    return fx.GraphModule(root, graph).eval()


def _levels(order: EngineRecipe, root: torch.nn.Module, graph: fx.Graph, pixels: fx.Node) -> fx.Node:
    """See ``engines.backends.module.LevelsModule``."""
    assert order.levels is not None
    ((height, width, channels), _), *_ = order.taken
    mean, std = (torch.tensor(values, dtype=torch.float64) for values in (order.levels.mean, order.levels.std))
    root.register_buffer("scale", (1 / std).to(torch.float32).repeat(width))
    root.register_buffer("offset", (-mean / std).to(torch.float32).repeat(width))
    lines = graph.call_function(_ATEN.view.default, (pixels, [-1, height, width * channels]))
    lines = graph.call_function(resolve("aten._to_copy.default"), (lines,), {"dtype": torch.float32})
    lines = graph.call_function(_ATEN.mul.Tensor, (lines, graph.get_attr("scale")))
    lines = graph.call_function(_ATEN.add.Tensor, (lines, graph.get_attr("offset")))
    made = graph.call_function(_ATEN.view.default, (lines, [-1, height, width, channels]))
    return graph.call_function(_ATEN.permute.default, (made, [0, 3, 1, 2]))


def _pair(value: int | Sequence[int]) -> list[int]:
    if isinstance(value, int):
        return [value, value]
    return list(value) * (2 if len(value) == 1 else 1)


def _convolution(
    graph: fx.Graph,
    source: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> fx.Node:
    if isinstance(padding, str):
        raise NotImplementedError("a padding that depends on the size")
    sizes = _pair(stride), _pair(padding), _pair(dilation)
    return graph.call_function(_ATEN.convolution.default, (source, weight, bias, *sizes, False, [0, 0], groups))


def _batch_norm(
    graph: fx.Graph, source: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, *rest: Any
) -> fx.Node:
    if training:
        raise ValueError("a frozen network has no statistics of its own batch")
    momentum, eps, _ = rest
    norm = resolve("aten._native_batch_norm_legit_no_training.default")
    made = graph.call_function(norm, (source, weight, bias, mean, var, momentum, eps))
    return graph.call_function(operator.getitem, (made, 0))


def _layer_norm(
    graph: fx.Graph, source: Any, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, _: bool = True
) -> fx.Node:
    made = graph.call_function(_ATEN.native_layer_norm.default, (source, shape, weight, bias, eps))
    return graph.call_function(operator.getitem, (made, 0))


def _max_pool(graph: fx.Graph, *args: Any) -> fx.Node:
    made = graph.call_function(_ATEN.max_pool2d_with_indices.default, args)
    return graph.call_function(operator.getitem, (made, 0))


def _mean_pool(graph: fx.Graph, source: Any, size: Any) -> fx.Node:
    if _pair(size) == [1, 1]:
        return graph.call_function(_ATEN.mean.dim, (source, [-2, -1], True))
    return graph.call_function(resolve("aten._adaptive_avg_pool2d.default"), (source, _pair(size)))


def _pad(graph: fx.Graph, source: Any, sides: Any, mode: str = "constant", value: float | None = None) -> fx.Node:
    if mode != "constant":
        raise ValueError(f"padding of mode {mode}")
    return graph.call_function(_ATEN.constant_pad_nd.default, (source, sides, value or 0.0))


def _flatten(graph: fx.Graph, source: Any, start: int = 0, end: int = -1) -> fx.Node:
    if start < 0 or end != -1:
        raise ValueError("dimensions in the middle")
    before = [graph.call_function(_ATEN.sym_size.int, (source, dim)) for dim in range(start)]
    return graph.call_function(_ATEN.view.default, (source, [*before, -1]))


def _reshape(graph: fx.Graph, source: Any, shape: Any) -> fx.Node:
    return graph.call_function(_ATEN.view.default, (source, shape))


def _same(_: fx.Graph, source: fx.Node, *__: Any, **___: Any) -> fx.Node:
    return source


_LOWERED: dict[str, Callable[..., fx.Node]] = {
    "aten.adaptive_avg_pool2d.default": _mean_pool,
    "aten.batch_norm.default": _batch_norm,
    "aten.contiguous.default": _same,
    "aten.conv2d.default": _convolution,
    "aten.dropout.default": _same,  # in eval mode, or the network would have been refused
    "aten.flatten.using_ints": _flatten,
    "aten.layer_norm.default": _layer_norm,
    "aten.max_pool2d.default": _max_pool,
    "aten.pad.default": _pad,
    "aten.reshape.default": _reshape,
}
