"""Compiled torch: kernels that inductor writes for one prefix, with BatchNorm folded into convolutions."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from frostline.engines.backends.converted import Converted
from frostline.engines.backends.converted_files import kept
from frostline.engines.backends.module import UNCONVERTED, converting, exported
from frostline.engines.backends.recipe import EngineRecipe
from frostline.engines.base.identity import offer_name
from frostline.engines.base.protocols import Arrays
from frostline.engines.base.runner import input_tensors
from frostline.engines.machine.isolation import tracing
from frostline.engines.machine.vendors import versions
from frostline.errors import EngineUnfit

__all__ = ("COMPILER", "TorchCompiled", "has_compiler")

_FILE = "prefix.pt2"
COMPILER = "g++"
"""What inductor calls to compile its kernels."""


def has_compiler() -> bool:
    """Whether there is a compiler of C++."""
    return shutil.which(COMPILER) is not None


class TorchCompiled(Converted):
    """A prefix compiled ahead of its runs by inductor.

    The file that it keeps is native code, made here: a folder of them must be writable by nobody else.

    Args:
        name: as in ``engines.backends.catalog.OFFERS``.
        order: what to make it from.
        dtype: to compute in, where the operators allow it; None is fp32.

    Raises:
        EngineUnfit: Inductor cannot take the network.
        UnsafeArtifact: The graph names what is not allowed, or does not give what its cuts declare.
    """

    def __init__(self, name: str, order: EngineRecipe, dtype: torch.dtype | None = None) -> None:
        super().__init__(name, order)
        self._device = torch.device(order.device)
        made_by = f"{order.threads}-threads-{versions('torch')}"
        files = f"{offer_name(name)}-{order.file_name(made_by)}"
        with kept(order.folder, files, lambda place: _compile(order, dtype, place)) as place:
            self._call = _loaded(place)

    def run(self, inputs: Arrays, cut: int) -> tuple[npt.NDArray[np.generic], ...]:
        """As ``engines.base.protocols.Engine`` says.

        Raises:
            BadRequest: The inputs are not of the shapes and dtypes that the engine takes.
            EngineUnfit: The compiled prefix fails on them.
        """
        batch = input_tensors(self._order.batch(inputs, cut), self._device)
        try:
            with torch.inference_mode():
                tensors = self._call(*batch)
        except UNCONVERTED as error:
            raise EngineUnfit(f"the compiled network failed on these samples: {str(error)[:300]}") from error
        declared = zip(tensors, self._order.last.dtypes, strict=True)
        return tuple(one.to(getattr(torch, kind)).contiguous().cpu().numpy() for one, kind in declared)


def _compile(order: EngineRecipe, dtype: torch.dtype | None, place: Path) -> None:
    from torch._inductor import aoti_compile_and_package

    settings: dict[str, Any] = {
        "freezing": True,
        "max_autotune": torch.device(order.device).type == "cuda",
        "cpp.threads": order.threads,  # which stands in the kernels
    }
    with tracing(), converting("torch's compiler"), torch.no_grad():
        program = exported(order, dtype=dtype)
        aoti_compile_and_package(program, package_path=str(place / _FILE), inductor_configs=settings)


def _loaded(place: Path) -> Any:
    from torch._inductor import aoti_load_package

    with converting("torch's compiler"):
        return aoti_load_package(str(place / _FILE))
