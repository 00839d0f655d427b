"""Page-locked memory for batches, from which a GPU copies while the training loop goes on."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from frostline.errors import SettingError
from frostline.prefetch.assemble import Memory

if TYPE_CHECKING:
    import torch

__all__ = ("Pinned", "memory_for")


def memory_for(pin_memory: bool | None, device: "torch.device | str") -> Memory | None:
    """Where a job's batches lie; None for memory of this process.

    Args:
        pin_memory: as of ``LoaderSettings``.
        device: device of the model.

    Raises:
        SettingError: page-locked memory is asked for, and there is no GPU to copy from it.
    """
    if not (str(device).startswith("cuda") if pin_memory is None else pin_memory):
        return None
    import torch

    if not torch.cuda.is_available():
        raise SettingError("pin_memory=True is for GPUs that CUDA drives, and there is none here: leave it out")
    return Pinned()


class Pinned:
    """Memory from PyTorch's allocator of page-locked memory.

    The allocator knows which copies to a GPU are under way, and gives memory away again when they have ended: a batch
    may be dropped as soon as its copies were begun.
    """

    def empty(self, shape: Sequence[int], dtype: np.dtype[np.generic]) -> npt.NDArray[np.generic]:
        """See ``Memory``."""
        import torch

        nbytes = max(1, math.prod(shape) * dtype.itemsize)
        whole: npt.NDArray[np.uint8] = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()
        return whole[: math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)
