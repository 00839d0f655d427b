"""OpenVINO on the CPU: a prefix converted once, compiled for one size of batch, in fp32 or with 16-bit floats."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from frostline.engines.footprint import Footprint
from frostline.engines.module import UNCONVERTED, converting, exported
from frostline.engines.orders import Order
from frostline.engines.runner import Arrays
from frostline.engines.shelf import kept
from frostline.engines.vendors import openvino, versions
from frostline.errors import EngineUnfit

__all__ = ("OpenVinoEngine",)

_FILE = "prefix.xml"


class OpenVinoEngine:
    """A prefix in OpenVINO.

    Args:
        name: as in ``engines.catalog.OFFERS``.
        order: what to make it from.
        precision: that OpenVINO may compute in: ``f32`` or ``bf16``.

    Raises:
        EngineUnfit: OpenVINO cannot take the network.
        UnsafeArtifact: The graph names what is not allowed, or does not give what its cuts declare.
    """

    def __init__(self, name: str, order: Order, precision: str) -> None:
        self.name = name
        self._order = order
        self._footprint = order.footprint()
        self._lock = threading.Lock()
        with kept(order.folder, versions("openvino", "torch"), lambda place: _convert(order, place)) as place:
            self._request = _compiled(order, place, precision).create_infer_request()

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights in fp32; those in fewer bits take less."""
        return sum({leaf.data_ptr(): leaf.nbytes for leaf in self._order.leaves()}.values())

    def footprint(self, cut: int) -> Footprint:
        """The reference engine's: OpenVINO plans its memory anew, and how much it takes can only be measured."""
        assert cut == self._order.cut
        return self._footprint

    def run(self, inputs: Arrays, cut: int) -> tuple[npt.NDArray[np.generic], ...]:
        """As ``engines.faces.Engine`` says.

        Raises:
            BadRequest: The inputs are not of the shapes and dtypes that cut 1 declares.
            EngineUnfit: OpenVINO fails on them.
        """
        batch = [np.ascontiguousarray(one) for one in self._order.batch(inputs, cut)]
        try:
            with self._lock:
                outputs = self._request.infer(batch, share_inputs=True)
        except RuntimeError as error:
            raise EngineUnfit(f"OpenVINO failed on these samples: {str(error)[:300]}") from error
        return tuple(outputs[place] for place in range(len(self._order.last.tensors)))


def _convert(order: Order, place: Path) -> None:
    ov = openvino()
    with converting("OpenVINO"):
        model = ov.convert_model(exported(order))
        shapes = [ov.PartialShape([-1, *shape]) for shape in order.cuts[0].shapes]
        model.reshape(dict(enumerate(shapes)))
        ov.save_model(model, place / _FILE, compress_to_fp16=False)


def _compiled(order: Order, place: Path, precision: str) -> Any:
    settings = {
        "ENABLE_CPU_PINNING": False,  # the threads of decoding run on the same cores
        "INFERENCE_NUM_THREADS": order.threads,
        "INFERENCE_PRECISION_HINT": precision,
        "NUM_STREAMS": 1,
    }
    core = openvino().Core()
    try:
        return core.compile_model(core.read_model(place / _FILE), "CPU", settings)
    except UNCONVERTED as error:
        raise EngineUnfit(f"OpenVINO cannot run this network: {str(error)[:300]}") from error
