"""What a network takes: one image, or several tensors of any dtype; and batches of that kind to run it on."""

from collections.abc import Sequence

import torch

from frostline.core import TensorSpec
from frostline.errors import ModelError
from frostline.models.graph.frontiers import DTYPE_BYTES

__all__ = ("Inputs", "input_specs", "random", "zeros")

Inputs = Sequence[int] | Sequence[TensorSpec]
"""The per-sample shape of one float32 input, such as (3, 224, 224), or one ``TensorSpec`` for each input."""


def input_specs(inputs: Inputs) -> tuple[TensorSpec, ...]:
    """One spec for each input.

    Raises:
        ModelError: A dtype that cannot be carried, or no input at all.
    """
    given = tuple(inputs)
    specs = tuple(one for one in given if isinstance(one, TensorSpec))
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
