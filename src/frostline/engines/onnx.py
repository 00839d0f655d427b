"""ONNX Runtime: a prefix as ONNX, on the CPU in fp32 or 8 bits, or on an accelerator with CUDA or TensorRT."""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from frostline.core.errors import EngineUnsupported
from frostline.engines.machine import import_now, trace_slot, versions
from frostline.engines.protocols import Arrays
from frostline.engines.recipe import Converted, EngineRecipe, converted_files
from frostline.engines.torch import UNCONVERTED, conversion, export_prefix

__all__ = ("OnnxEngine", "providers")

_FILE = "prefix.onnx"
_PROVIDERS = {
    "f32": "CPUExecutionProvider",
    "int8": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
}


def providers() -> tuple[str, ...]:
    """What the installed ONNX Runtime was built to run on."""
    return tuple(import_now("onnxruntime").get_available_providers())


class OnnxEngine(Converted):
    """A prefix in ONNX Runtime; see ``Converted``.

    Args:
        variant: ``f32`` or ``int8`` on the CPU, narrowed on the order's pixels; ``cuda``; or ``tensorrt``, in 16 bits.

    Raises:
        EngineUnsupported: ONNX or ONNX Runtime cannot take the network.
    """

    def __init__(self, name: str, order: EngineRecipe, variant: str) -> None:
        super().__init__(name, order)
        with _narrowed(order) if variant == "int8" else _converted(order) as place:
            self._session = _session(order, place, variant)

    def run(self, inputs: Arrays, cut: int) -> tuple[npt.NDArray[np.generic], ...]:
        """As ``engines.protocols.Engine`` says.

        Raises:
            BadRequest: The inputs are not of the shapes and dtypes that the engine takes.
            EngineUnsupported: ONNX Runtime fails on them.
        """
        batch = self._order.batch(inputs, cut)
        try:
            outputs = self._session.run(None, {_input(place): array for place, array in enumerate(batch)})
        except UNCONVERTED as error:
            raise EngineUnsupported(f"ONNX Runtime failed on these samples: {str(error)[:300]}") from error
        return tuple(np.ascontiguousarray(output) for output in outputs)


def _converted(order: EngineRecipe) -> AbstractContextManager[Path]:
    name = order.file_name(versions("onnx", "onnxscript", "torch"))
    return converted_files(order.folder, name, lambda place: _convert(order, place))


def _narrowed(order: EngineRecipe) -> AbstractContextManager[Path]:
    name = order.narrowed_name(versions("onnx", "onnxruntime", "onnxscript", "torch"))
    return converted_files(order.folder, name, lambda place: _narrow(order, place))


def _input(place: int) -> str:
    """What the file calls the network's inputs, whatever the graph does."""
    return f"input_{place}"


def _convert(order: EngineRecipe, place: Path) -> None:
    with trace_slot(), conversion("ONNX"):
        import torch.onnx

        names = [_input(place) for place in range(len(order.graph.inputs))]
        program = torch.onnx.export(export_prefix(order), dynamo=True, input_names=names, verbose=False)
        assert program is not None
        program.save(place / _FILE)


def _narrow(order: EngineRecipe, place: Path) -> None:
    """Weights and activations of 8 bits, after training, by their ranges on real pixels."""
    quantization = import_now("onnxruntime.quantization")
    shapes = import_now("onnxruntime.quantization.shape_inference")
    reader = _reader(quantization.CalibrationDataReader, order)
    with _converted(order) as whole, conversion("ONNX Runtime's quantization"):
        # Folds BatchNorm into convolutions, which are narrowed as one.
        shapes.quant_pre_process(whole / _FILE, place / _FILE, skip_symbolic_shape=True)
        quantization.quantize_static(
            place / _FILE,
            place / _FILE,
            reader,
            per_channel=True,
            activation_type=quantization.QuantType.QUInt8,
            weight_type=quantization.QuantType.QInt8,
        )


def _reader(base: type, order: EngineRecipe) -> Any:
    """The pixels one by one, in the layout that ONNX Runtime takes them."""
    pixels, name = order.pixels(), _input(0)

    class Reader(base):  # type: ignore[misc]
        def __init__(self) -> None:
            self._rows = iter(range(len(pixels)))

        def get_next(self) -> dict[str, Any] | None:
            return next(({name: pixels[row : row + 1]} for row in self._rows), None)

    return Reader()


def _session(order: EngineRecipe, place: Path, variant: str) -> Any:
    runtime = import_now("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = order.threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 4
    # Threads that wait for work in a loop would take the cores from those that decode.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    chosen = [(_PROVIDERS[variant], _settings(order, variant))]
    # Whatever an accelerator has no kernel for runs on the CPU.
    beside = [] if variant in ("f32", "int8") else ["CPUExecutionProvider"]
    try:
        session = runtime.InferenceSession(place / _FILE, options, providers=[*chosen, *beside])
    except UNCONVERTED as error:
        raise EngineUnsupported(f"ONNX Runtime cannot run this network: {str(error)[:300]}") from error
    if _PROVIDERS[variant] not in session.get_providers():
        raise EngineUnsupported(f"ONNX Runtime has {_PROVIDERS[variant]} and cannot start it: are its libraries there?")
    return session


def _settings(order: EngineRecipe, variant: str) -> dict[str, str]:
    if variant != "tensorrt":
        return {}
    shapes = {
        f"trt_profile_{which}_shapes": f"{_input(0)}:{'x'.join(map(str, (rows, *order.taken[0][0])))}"
        for which, rows in (("min", 1), ("opt", order.max_rows), ("max", order.max_rows))
    }
    kept_in = {} if order.folder is None else {"trt_engine_cache_path": str(order.folder / "tensorrt")}
    return {**shapes, **kept_in, "trt_engine_cache_enable": str(int(bool(kept_in))), "trt_fp16_enable": "1"}
