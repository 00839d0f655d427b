"""OpenVINO on the CPU: a prefix handed over operator by operator, run in fp32, 16-bit floats or 8 bits."""

import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import fx

from frostline.core import Ref, Token
from frostline.core.errors import EngineUnsupported, UnsafeArtifact
from frostline.core.graph import Argument
from frostline.engines.graph_runner import ALLOWED, resolve, resolve_symbolic, token_value
from frostline.engines.machine import import_now, trace_slot, versions
from frostline.engines.protocols import Arrays
from frostline.engines.recipe import Converted, EngineRecipe, converted_files
from frostline.engines.torch import UNCONVERTED, conversion, export_prefix, refuse_lookups

__all__ = (
    "OpenVinoEngine",
    "convert",
    "warm",
)


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
    ov = import_now("openvino")
    decoder = import_now("openvino.frontend.pytorch.fx_decoder").TorchFXPythonDecoder
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
    """See ``engines.torch.LevelsModule``."""
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


_FILE = "prefix.xml"
# Rows that one stream runs at a time. Where the streams' threads share their cores with those that read and send, a
# stream that was held up leaves more of the pieces to the others, and nobody waits for the slowest at every layer.
_PIECE_ROWS = 8
# What OpenVINO may compute in where a layer is not of 8 bits.
_HINTS = {"f32": "f32", "bf16": "bf16", "int8": "f32"}


class OpenVinoEngine(Converted):
    """A prefix in OpenVINO; see ``Converted``.

    Args:
        variant: ``f32``; ``bf16``, the same file computed in 16 bits; or ``int8``, narrowed on the order's pixels.

    Raises:
        EngineUnsupported: OpenVINO cannot take the network.
    """

    def __init__(self, name: str, order: EngineRecipe, variant: str) -> None:
        super().__init__(name, order)
        self._streams = max(1, min(order.threads, order.max_rows // _PIECE_ROWS))
        with _narrowed(order) if variant == "int8" else _converted(order) as place:
            self._requests = _Requests(_compiled(order, place, _HINTS[variant], self._streams))

    def run(self, inputs: Arrays, cut: int) -> tuple[npt.NDArray[np.generic], ...]:
        """As ``engines.protocols.Engine`` says.

        Raises:
            BadRequest: The inputs are not of the shapes and dtypes that the engine takes.
            EngineUnsupported: OpenVINO fails on them.
        """
        return self.begin(inputs, cut).outputs()

    def begin(self, inputs: Arrays, cut: int) -> "_Pieces":
        """As ``engines.protocols.PipelinedEngine`` says: the streams take pieces in the order in which they were begun.

        Raises:
            BadRequest: The inputs are not of the shapes and dtypes that the engine takes.
        """
        batch = [np.ascontiguousarray(array) for array in self._order.batch(inputs, cut)]
        rows = _piece_rows(len(batch[0]), self._streams)
        return _Pieces(self._requests, batch, rows, self._streams, len(self._order.last.tensors))


class _Requests:
    """Requests for inference: lent for the pieces of a batch, and made when there are first so many at once."""

    def __init__(self, compiled: Any) -> None:
        self._compiled = compiled
        self._lock = threading.Lock()
        self._idle: list[Any] = []

    def lend(self, count: int) -> list[Any]:
        with self._lock:
            new = [self._compiled.create_infer_request() for _ in range(count - len(self._idle))]
            lent, self._idle = self._idle[:count] + new, self._idle[count:]
        return lent

    def give_back(self, requests: list[Any]) -> None:
        """Their outputs are OpenVINO's own, and those of other samples from now on."""
        with self._lock:
            self._idle += requests


class _Pieces:
    """A batch that was begun in pieces, each of up to so many rows."""

    def __init__(
        self, pool: _Requests, batch: list[npt.NDArray[np.generic]], rows: int, streams: int, tensors: int
    ) -> None:
        starts = range(0, len(batch[0]), rows)
        self._pool = pool
        self._batch = batch  # which the pieces read
        self._streams = streams
        self._tensors = tensors
        self._requests = pool.lend(len(starts))
        self._begun = 0
        self._failure: RuntimeError | None = None
        try:
            for request, start in zip(self._requests, starts, strict=True):
                request.start_async([array[start : start + rows] for array in batch], share_inputs=True)
                self._begun += 1
        except RuntimeError as error:
            self._failure = error

    def drain(self) -> None:
        """See ``engines.protocols.RunningBatch``."""
        self._wait(max(0, self._begun - self._streams))

    def outputs(self) -> tuple[npt.NDArray[np.generic], ...]:
        """See ``engines.protocols.RunningBatch``."""
        self._wait(self._begun)  # for all that began, also where one failed: they read the batch
        try:
            if self._failure is not None:
                raise EngineUnsupported(
                    f"OpenVINO failed on these samples: {str(self._failure)[:300]}"
                ) from self._failure
            tensors = range(self._tensors)
            columns = [[request.get_output_tensor(place).data for request in self._requests] for place in tensors]
            return tuple(np.concatenate(column) for column in columns)
        finally:
            self._pool.give_back(self._requests)

    def _wait(self, count: int) -> None:
        for request in self._requests[:count]:
            try:
                request.wait()
            except RuntimeError as error:
                self._failure = error


def warm() -> None:
    """Load OpenVINO with its plugin for the CPU, which takes half a second."""
    _core()


def _converted(order: EngineRecipe) -> AbstractContextManager[Path]:
    name = order.file_name(versions("openvino", "torch"))
    return converted_files(order.folder, name, lambda place: _convert(order, place))


def _narrowed(order: EngineRecipe) -> AbstractContextManager[Path]:
    name = order.narrowed_name(versions("openvino", "nncf", "torch"))
    return converted_files(order.folder, name, lambda place: _narrow(order, place))


def _convert(order: EngineRecipe, place: Path) -> None:
    ov = import_now("openvino")
    refuse_lookups(order)
    try:
        with _converting():
            model = convert(order)
    except EngineUnsupported:  # it has no rule for an operator as it is: then in more and smaller ones
        with trace_slot(), _converting():
            model = ov.convert_model(export_prefix(order))
            shapes = [ov.PartialShape([-1, *shape]) for shape, _ in order.taken]
            model.reshape(dict(enumerate(shapes)))
    with _converting():
        ov.save_model(model, place / _FILE, compress_to_fp16=False)


@contextmanager
def _converting() -> Iterator[None]:
    """As ``conversion``, with the exceptions of OpenVINO's own."""
    frontend = import_now("openvino.frontend")
    own = ("GeneralFailure", "InitializationFailure", "NotImplementedFailure", "OpConversionFailure")
    failures = tuple(getattr(frontend, name) for name in (*own, "OpValidationFailure"))
    try:
        with conversion("OpenVINO"):
            yield
    except failures as error:
        raise EngineUnsupported(f"OpenVINO cannot take this network: {str(error).strip()[-300:]}") from error


def _narrow(order: EngineRecipe, place: Path) -> None:
    """Weights and activations of 8 bits, after training, by their ranges on real pixels."""
    core, ov, nncf = _core(), import_now("openvino"), import_now("nncf")
    ranges = import_now("nncf.quantization.range_estimator")
    pixels = order.pixels()
    with _converted(order) as whole, conversion("NNCF"):
        narrow = nncf.quantize(
            core.read_model(whole / _FILE),
            nncf.Dataset([pixels[row : row + 1] for row in range(len(pixels))]),
            subset_size=len(pixels),
            target_device=nncf.TargetDevice.CPU,
            model_type=nncf.ModelType.TRANSFORMER if order.is_transformer else None,
            # NNCF would take the mean of the samples' ranges, and clip those who stand out: the error of the worst
            # sample counts here, and that of ResNet-18 falls from 16 % to 6 %.
            advanced_parameters=nncf.AdvancedQuantizationParameters(
                activations_range_estimator_params=ranges.RangeEstimatorParametersSet.MINMAX
            ),
        )
        ov.save_model(narrow, place / _FILE, compress_to_fp16=False)


@cache
def _core() -> Any:
    """One for the process, for good, with its CPU plugin.

    Each plugin gives the thread that loads it another stack for signals and, when it goes, puts the one before back,
    which may be gone by then where several come and go: the next signal would end the process.
    """
    core = import_now("openvino").Core()
    core.get_property("CPU", "FULL_DEVICE_NAME")
    return core


def _piece_rows(rows: int, streams: int) -> int:
    """Rows of a piece: at most ``_PIECE_ROWS``, and as many pieces for each stream."""
    rounds = max(1, -(-rows // (_PIECE_ROWS * streams)))
    return max(1, -(-rows // (rounds * streams)))


def _compiled(order: EngineRecipe, place: Path, precision: str, streams: int) -> Any:
    settings = {
        "ENABLE_CPU_PINNING": False,  # the threads of decoding run on the same cores
        "INFERENCE_NUM_THREADS": order.threads,
        "INFERENCE_PRECISION_HINT": precision,
        "NUM_STREAMS": streams,
    }
    core = _core()
    try:
        return core.compile_model(core.read_model(place / _FILE), "CPU", settings)
    except UNCONVERTED as error:
        raise EngineUnsupported(f"OpenVINO cannot run this network: {str(error)[:300]}") from error
