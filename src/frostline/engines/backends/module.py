"""A prefix up to one cut as a module of torch and as an exported program, from which other engines are made."""

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any

import torch
from torch.export import Dim, ExportedProgram

from frostline.core import Levels
from frostline.engines.backends.recipe import EngineRecipe
from frostline.engines.base.operators import LOOKUPS, resolve_symbolic
from frostline.engines.base.runner import Runner
from frostline.errors import EngineUnsupported

__all__ = ("UNCONVERTED", "LevelsModule", "PrefixModule", "converting", "exported", "refuse_lookups")

UNCONVERTED = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What converters raise at a network that they cannot take."""

# Any batch does, since its size is traced as a symbol; two or more keeps torch from fixing it as one.
_EXAMPLE_ROWS = 8


class PrefixModule(torch.nn.Module):
    """A prefix up to one cut. Its weights are buffers: nothing in it is trained.

    Args:
        order: order to make it from.
        dtype: to compute in, where the operators allow it (torch's automatic casting); None leaves all as it is.
    """

    def __init__(self, order: EngineRecipe, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self._cut = order.last
        self._device = torch.device(order.device)
        self._dtype = dtype
        self._runner = Runner(order.graph, cuts=[order.last], device=self._device, resolve_op=resolve_symbolic)
        self._names = [f"leaf_{place}" for place in range(len(order.graph.leaves))]
        for name, leaf in zip(self._names, order.leaves(), strict=True):
            self.register_buffer(name, leaf.detach().to(self._device))
        self._front = (
            None if order.levels is None else LevelsModule(order.levels, order.taken[0][0][1]).to(self._device)
        )

    def forward(self, *inputs: torch.Tensor) -> tuple[Any, ...]:
        """What crosses the cut; for tracing only (see ``Runner.run_traced``)."""
        leaves = [getattr(self, name) for name in self._names]
        if self._front is not None:
            inputs = (self._front(*inputs),)
        with torch.autocast(self._device.type, dtype=self._dtype, enabled=self._dtype is not None):
            return self._runner.run_traced(inputs, leaves, upto=self._cut)


class LevelsModule(torch.nn.Module):
    """What a network takes, of pixels as they are kept: ``float32[n, C, H, W]`` of ``uint8[n, H, W, C]``.

    One multiplication and one addition over lines of pixels, which vectors have no trouble with; with three numbers for
    three channels that lie side by side OpenVINO takes 0.4 ms longer for an image of 224 x 224. It rounds otherwise
    than a difference that is divided, by 1e-7 or so.

    Args:
        levels: meaning of the pixels.
        width: width of a line.
    """

    scale: torch.Tensor
    offset: torch.Tensor

    def __init__(self, levels: Levels, width: int) -> None:
        super().__init__()
        mean, std = (torch.tensor(values, dtype=torch.float64) for values in (levels.mean, levels.std))
        self.register_buffer("scale", (1 / std).to(torch.float32).repeat(width))
        self.register_buffer("offset", (-mean / std).to(torch.float32).repeat(width))

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """The numbers that ``core.Levels`` gives, but for rounding."""
        lines = pixels.flatten(2).to(torch.float32) * self.scale + self.offset
        return lines.view(pixels.shape).permute(0, 3, 1, 2)


def exported(order: EngineRecipe, *, dtype: torch.dtype | None = None) -> ExportedProgram:
    """The prefix up to its cut as torch.export gives it, for any batch.

    Call it only within ``engines.machine.isolation.tracing``.

    Args:
        order: order to export, after its footprint was taken, which is how a graph is checked.
        dtype: as for ``PrefixModule``.

    Raises:
        EngineUnsupported: It reads where its values say, which other engines do not check.
    """
    refuse_lookups(order)
    example = [
        torch.zeros((_EXAMPLE_ROWS, *shape), dtype=getattr(torch, kind), device=order.device)
        for shape, kind in order.taken
    ]
    batch = tuple({0: Dim("batch")} for _ in example)
    module = PrefixModule(order, dtype).eval()
    with torch.no_grad():
        return torch.export.export(module, tuple(example), strict=False, dynamic_shapes=(batch,))


def refuse_lookups(order: EngineRecipe) -> None:
    """Do nothing if other engines may run the prefix.

    Raises:
        EngineUnsupported: It reads where its values say, which other engines do not check.
    """
    found = {node.op for node in order.graph.nodes[: order.last.after + 1]} & LOOKUPS
    if found:
        raise EngineUnsupported(f"the network uses {min(found)}, which is left to engines that check its indices")


@contextmanager
def converting(engine: str) -> Iterator[None]:
    """Convert a network for an engine: what it warns of, logs and prints is left out, and what it raises translated.

    Args:
        engine: its title, for the error.

    Raises:
        EngineUnsupported: The converter cannot take the network.
    """
    try:
        with _quiet():
            yield
    except UNCONVERTED as error:
        why = str(error).strip().partition("\n")[0] or type(error).__name__
        raise EngineUnsupported(f"{engine} cannot take this network: {why[:300]}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep to themselves what converters warn of, log and print: where one fails, the error says what matters."""
    before = logging.root.manager.disable
    nowhere = io.StringIO()
    with warnings.catch_warnings(), redirect_stdout(nowhere), redirect_stderr(nowhere):
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(before)
