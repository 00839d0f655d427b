"""Records a forward pass: which modules it runs, one in another and in order, and what each takes and gives."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from frostline.core import TensorSpec
from frostline.engines.measure.footprint import version_of
from frostline.errors import ModelError
from frostline.models.graph.frontiers import DTYPE_BYTES

__all__ = ("AnyInputs", "Inputs", "ModuleCall", "input_specs", "random", "record", "zeros")


@dataclass(slots=True, kw_only=True, eq=False)
class ModuleCall:
    """One run of a module.

    Attributes:
        path: path of the module.
        module: module that ran.
        taken: the one tensor that it took, None where it took anything else.
        taken_version: how often that tensor had been written to by then.
        given: the one tensor that it gave, None where it gave anything else.
        given_version: how often that tensor had been written to by then.
        inner: the runs of its own modules, in order.
    """

    path: str
    module: nn.Module
    taken: torch.Tensor | None = None
    taken_version: int = 0
    given: torch.Tensor | None = None
    given_version: int = 0
    inner: "list[ModuleCall]" = field(default_factory=list)

    def takes(self, given: torch.Tensor, version: int) -> bool:
        """Whether it took exactly that tensor, unchanged since."""
        return self.taken is given and self.taken_version == version


def record(model: nn.Module, inputs: Sequence[torch.Tensor]) -> ModuleCall:
    """Run the network once and tell what it ran; it is the caller who sets its modes.

    Raises:
        Exception: Whatever the network raises.
    """
    open_calls: list[ModuleCall] = []
    finished: list[ModuleCall] = []

    def begins(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            call = ModuleCall(path=path, module=module)
            if len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor):
                call.taken, call.taken_version = args[0], version_of(args[0])
            open_calls.append(call)

        return hook

    def ends(_: nn.Module, __: Any, output: Any) -> None:
        call = open_calls.pop()
        if isinstance(output, torch.Tensor):
            call.given, call.given_version = output, version_of(output)
        (open_calls[-1].inner if open_calls else finished).append(call)

    with _hooked(model, begins, ends), torch.no_grad():
        model(*inputs)
    return finished[-1]


@contextmanager
def _hooked(
    model: nn.Module, begins: Callable[[str], Callable[..., None]], ends: Callable[..., None]
) -> Iterator[None]:
    handles = []
    try:
        for path, module in model.named_modules():
            handles.append(module.register_forward_pre_hook(begins(path), with_kwargs=True))
            handles.append(module.register_forward_hook(ends))
        yield
    finally:
        for handle in handles:
            handle.remove()


Inputs = Sequence[int] | Sequence[TensorSpec]
"""The per-sample shape of one float32 input, such as (3, 224, 224), or one ``TensorSpec`` for each input."""

AnyInputs = Inputs | Mapping[str, TensorSpec]
"""The same, or a ``TensorSpec`` for each input that the network takes by name."""


def input_specs(inputs: AnyInputs) -> tuple[TensorSpec, ...]:
    """One spec for each input.

    Raises:
        ModelError: A dtype that cannot be carried, or no input at all.
    """
    given = tuple(inputs.values() if isinstance(inputs, Mapping) else inputs)
    specs = tuple(spec for spec in given if isinstance(spec, TensorSpec))
    if not specs and given:
        return (TensorSpec(tuple(size for size in given if isinstance(size, int))),)
    strange = [spec.dtype for spec in specs if spec.dtype not in DTYPE_BYTES]
    if strange or not specs or len(specs) != len(given):
        known = ", ".join(sorted(DTYPE_BYTES))
        raise ModelError(f"the network's inputs must be tensors of {known}, not {strange or list(given)}")
    return specs


def zeros(inputs: Sequence[TensorSpec], rows: int, device: torch.device | str = "cpu") -> list[torch.Tensor]:
    """A batch of zeros: a valid index, a valid mask and a valid image."""
    return [torch.zeros((rows, *spec.shape), dtype=getattr(torch, spec.dtype), device=device) for spec in inputs]


def random(
    inputs: Sequence[TensorSpec], rows: int, generator: torch.Generator, device: torch.device | str = "cpu"
) -> list[torch.Tensor]:
    """A batch of normal numbers, and of zeros and ones where the dtype is no floating one."""
    made = []
    for spec in inputs:
        dtype = getattr(torch, spec.dtype)
        values = torch.randn((rows, *spec.shape), generator=generator)
        made.append((values if dtype.is_floating_point else values > 0).to(device=device, dtype=dtype))
    return made
