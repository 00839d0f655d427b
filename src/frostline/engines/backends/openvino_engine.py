"""OpenVINO on the CPU: a prefix converted once and run in fp32, with 16-bit floats, or narrowed to 8 bits."""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from frostline.engines.backends.converted_files import Converted, kept
from frostline.engines.backends.module import UNCONVERTED, converting, exported, refuse_lookups
from frostline.engines.backends.openvino_graph import convert
from frostline.engines.backends.recipe import EngineRecipe
from frostline.engines.base.protocols import Arrays
from frostline.engines.machine.hardware import imported, versions
from frostline.engines.machine.isolation import tracing
from frostline.errors import EngineUnsupported

__all__ = ("OpenVinoEngine", "warm")

_FILE = "prefix.xml"
# Rows that one stream runs at a time. Where the streams' threads share their cores with those that read and send, a
# stream that was held up leaves more of the pieces to the others, and nobody waits for the slowest at every layer.
_PIECE_ROWS = 8
# What OpenVINO may compute in where a layer is not of 8 bits.
_HINTS = {"f32": "f32", "bf16": "bf16", "int8": "f32"}


class OpenVinoEngine(Converted):
    """A prefix in OpenVINO.

    Args:
        name: as in ``engines.backends.catalog.OFFERS``.
        order: order to make it from.
        variant: ``f32``; ``bf16``, the same file computed in 16 bits; or ``int8``, narrowed on the order's pixels.

    Raises:
        EngineUnsupported: OpenVINO cannot take the network.
        UnsafeArtifact: The graph names what is not allowed, or does not give what its cuts declare.
    """

    def __init__(self, name: str, order: EngineRecipe, variant: str) -> None:
        super().__init__(name, order)
        self._streams = max(1, min(order.threads, order.max_rows // _PIECE_ROWS))
        with _narrowed(order) if variant == "int8" else _converted(order) as place:
            self._requests = _Requests(_compiled(order, place, _HINTS[variant], self._streams))

    def run(self, inputs: Arrays, cut: int) -> tuple[npt.NDArray[np.generic], ...]:
        """As ``engines.base.protocols.Engine`` says.

        Raises:
            BadRequest: The inputs are not of the shapes and dtypes that the engine takes.
            EngineUnsupported: OpenVINO fails on them.
        """
        return self.begin(inputs, cut).outputs()

    def begin(self, inputs: Arrays, cut: int) -> "_Pieces":
        """As ``engines.base.protocols.Queueing`` says: the streams take pieces in the order in which they were begun.

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
        """See ``engines.base.protocols.RunningBatch``."""
        self._wait(max(0, self._begun - self._streams))

    def outputs(self) -> tuple[npt.NDArray[np.generic], ...]:
        """See ``engines.base.protocols.RunningBatch``."""
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
    return kept(order.folder, name, lambda place: _convert(order, place))


def _narrowed(order: EngineRecipe) -> AbstractContextManager[Path]:
    name = order.narrowed_name(versions("openvino", "nncf", "torch"))
    return kept(order.folder, name, lambda place: _narrow(order, place))


def _convert(order: EngineRecipe, place: Path) -> None:
    ov = imported("openvino")
    refuse_lookups(order)
    try:
        with _converting():
            model = convert(order)
    except EngineUnsupported:  # it has no rule for an operator as it is: then in more and smaller ones
        with tracing(), _converting():
            model = ov.convert_model(exported(order))
            shapes = [ov.PartialShape([-1, *shape]) for shape, _ in order.taken]
            model.reshape(dict(enumerate(shapes)))
    with _converting():
        ov.save_model(model, place / _FILE, compress_to_fp16=False)


@contextmanager
def _converting() -> Iterator[None]:
    """As ``converting``, with the exceptions of OpenVINO's own."""
    frontend = imported("openvino.frontend")
    own = ("GeneralFailure", "InitializationFailure", "NotImplementedFailure", "OpConversionFailure")
    failures = tuple(getattr(frontend, name) for name in (*own, "OpValidationFailure"))
    try:
        with converting("OpenVINO"):
            yield
    except failures as error:
        raise EngineUnsupported(f"OpenVINO cannot take this network: {str(error).strip()[-300:]}") from error


def _narrow(order: EngineRecipe, place: Path) -> None:
    """Weights and activations of 8 bits, after training, by their ranges on real pixels."""
    core, ov, nncf = _core(), imported("openvino"), imported("nncf")
    ranges = imported("nncf.quantization.range_estimator")
    pixels = order.pixels()
    with _converted(order) as whole, converting("NNCF"):
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
    core = imported("openvino").Core()
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
