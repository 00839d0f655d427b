"""Turns tensors into arrays and back, in the same memory where they lie in the CPU's; bfloat16 lies in ``uint16``."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

__all__ = ("as_array", "as_tensor")


def as_array(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """A tensor as an array (``core.features``)."""
    kept = tensor.detach().cpu()
    found: npt.NDArray[Any] = (kept.view(torch.uint16) if kept.dtype == torch.bfloat16 else kept).numpy()
    return found


def as_tensor(array: npt.NDArray[Any]) -> torch.Tensor:
    """An array as the tensor that it holds, in CPU memory."""
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if array.dtype == np.uint16 else tensor
