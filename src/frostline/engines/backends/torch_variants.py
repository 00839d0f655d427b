"""Eager torch in other layouts and precisions than the reference, and compiled by TorchInductor."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from frostline.core.graph import references
from frostline.engines.backends.converted_files import Converted, kept
from frostline.engines.backends.module import UNCONVERTED, converting, exported
from frostline.engines.backends.recipe import EngineRecipe
from frostline.engines.base.identity import offer_name
from frostline.engines.base.operators import resolve_allowed
from frostline.engines.base.protocols import Arrays
from frostline.engines.base.runner import Runner, as_array, input_tensors
from frostline.engines.machine.hardware import versions
from frostline.engines.machine.isolation import tracing
from frostline.errors import EngineUnsupported

__all__ = ("COMPILER", "TorchCompiled", "TorchVariant", "has_compiler")

# What torch's automatic casting computes in few bits, and so casts its weights for: they are cast once instead.
_NARROW = frozenset(
    {"aten.bmm.default", "aten.conv1d.default", "aten.conv2d.default", "aten.conv2d.padding", "aten.linear.default"}
    | {"aten.matmul.default", "aten.mm.default"}
)


class TorchVariant(Converted):
    """A prefix in eager torch, channels-last, in fp32 or in 16 bits where the operators allow it.

    Args:
        name: as in ``engines.backends.catalog.OFFERS``.
        order: order to make it from.
        dtype: to compute in; None is fp32.

    Raises:
        UnsafeArtifact: The graph names what is not allowed, or does not give what its cuts declare.
    """

    def __init__(self, name: str, order: EngineRecipe, dtype: torch.dtype | None = None) -> None:
        super().__init__(name, order)
        self._dtype = dtype
        self._device = torch.device(order.device)
        self._levels = _tiled(order, self._device)
        self._runner = Runner(order.graph, cuts=[order.last], device=self._device, resolve_op=_resolve)
        narrow = _only_narrow(order) if dtype is not None else frozenset()
        self._leaves = [
            _channels_last(leaf.detach().to(self._device, dtype if name in narrow else leaf.dtype))
            for (name, _), leaf in zip(order.graph.leaves, order.leaves(), strict=True)
        ]

    @property
    def weight_bytes(self) -> int:
        """Bytes of the resident weights."""
        return sum({leaf.data_ptr(): leaf.nbytes for leaf in self._leaves}.values())

    def run(self, inputs: Arrays, cut: int) -> tuple[npt.NDArray[np.generic], ...]:
        """As ``engines.base.protocols.Engine`` says.

        Raises:
            BadRequest: The inputs are not of the shapes and dtypes that the engine takes.
            EngineUnsupported: The prefix does not run in this variant.
        """
        given = input_tensors(self._order.batch(inputs, cut), self._device)
        casting = torch.autocast(self._device.type, dtype=self._dtype, enabled=self._dtype is not None)
        try:
            with torch.inference_mode(), casting, _on_threads(self._order.threads):
                batch = [
                    _channels_last(array if self._levels is None else _applied(self._levels, array)) for array in given
                ]
                tensors = self._runner.run(batch, self._leaves, upto=self._order.last)
                declared = zip(tensors, self._order.last.dtypes, strict=True)
                return tuple(as_array(tensor.to(getattr(torch, kind)).contiguous()) for tensor, kind in declared)
        except (LookupError, RuntimeError, TypeError, ValueError) as error:
            why = str(error).partition("\n")[0]
            raise EngineUnsupported(f"{self.name} cannot run this network: {why}") from error


@contextmanager
def _on_threads(threads: int) -> Iterator[None]:
    """Have torch compute on so many threads for this one.

    It keeps the number for each thread, and one for threads that compute for the first time, which may meanwhile
    begin with this one.
    """
    before = torch.get_num_threads()
    if before == threads:
        yield
        return
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _resolve(name: str) -> Callable[..., Any]:
    # A view of what another layout spread over the memory is not to be had; a copy has the same values.
    return resolve_allowed("aten.reshape.default" if name == "aten.view.default" else name)


def _only_narrow(order: EngineRecipe) -> frozenset[str]:
    """Names of the leaves that nothing reads but what computes in few bits."""
    leaves = {name for name, _ in order.graph.leaves}
    narrow: set[str] = set()
    other: set[str] = set()
    for node in order.graph.nodes[: order.last.after + 1]:
        (narrow if node.op in _NARROW else other).update(references((node.args, node.kwargs)))
    return frozenset((narrow - other) & leaves)


def _tiled(order: EngineRecipe, device: torch.device) -> tuple[torch.Tensor, torch.Tensor] | None:
    """What to take from a line of pixels, and what to divide it by; None where the engine takes no pixels.

    Over lines of pixels torch computes 10 times faster than over three channels, 0.02 ms a sample of 224 x 224.
    """
    if order.levels is None:
        return None
    _, width, channels = order.taken[0][0]
    assert channels == len(order.levels.mean)
    mean, std = (
        torch.tensor(values, dtype=torch.float32, device=device) for values in (order.levels.mean, order.levels.std)
    )
    return mean.repeat(width), std.repeat(width)


def _applied(levels: tuple[torch.Tensor, torch.Tensor], pixels: torch.Tensor) -> torch.Tensor:
    """``float32[n, C, H, W]``, channels last, of ``uint8[n, H, W, C]``."""
    mean, std = levels
    made = pixels.flatten(2).to(torch.float32).sub_(mean).div_(std)
    return made.view(pixels.shape).permute(0, 3, 1, 2)


def _channels_last(tensor: torch.Tensor) -> torch.Tensor:
    is_image = tensor.dim() == 4 and tensor.is_floating_point()
    return tensor.contiguous(memory_format=torch.channels_last) if is_image else tensor


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
        order: order to make it from.
        dtype: to compute in, where the operators allow it; None is fp32.

    Raises:
        EngineUnsupported: Inductor cannot take the network.
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
            EngineUnsupported: The compiled prefix fails on them.
        """
        batch = input_tensors(self._order.batch(inputs, cut), self._device)
        try:
            with torch.inference_mode():
                tensors = self._call(*batch)
        except UNCONVERTED as error:
            raise EngineUnsupported(f"the compiled network failed on these samples: {str(error)[:300]}") from error
        declared = zip(tensors, self._order.last.dtypes, strict=True)
        return tuple(as_array(tensor.to(getattr(torch, kind)).contiguous()) for tensor, kind in declared)


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
