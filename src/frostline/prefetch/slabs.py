"""Memory for batches, which is used again once nobody refers to the batch that lay in it."""

import math
import weakref
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

__all__ = ("Memory", "Slabs")

# What is smaller comes from the C library without a page fault.
_LARGE = 64 << 10
# Where a cache line begins; frameworks whose kernels ask for that take an array's memory as it is.
_ALIGNED = 64
# A loop holds a batch while the next one is made; what comes back beyond that is given to the system.
_MAX_IDLE = 2

_Bytes = npt.NDArray[np.uint8]


class Memory(Protocol):
    """Where batches lie."""

    def empty(self, shape: Sequence[int], dtype: np.dtype[np.generic]) -> npt.NDArray[np.generic]:
        """An array of the caller's own, contiguous and not written yet."""


class Slabs:
    """Arrays for batches. Safe for several threads.

    Large memory that comes fresh from the system is faulted in page by page, which takes longer than to fill it.
    So an array's memory comes back when the last reference to the array is gone, and not before: views of it, and
    tensors that were made from it, count. Whoever could still write into it or read it could do so with any memory
    that was freed. What is not in use goes when the slabs themselves do.

    Args:
        max_idle: arrays of one size that are kept while nobody refers to them.
    """

    def __init__(self, max_idle: int = _MAX_IDLE) -> None:
        self._max_idle = max_idle
        self._idle: dict[int, list[_Bytes]] = {}

    def empty(self, shape: Sequence[int], dtype: np.dtype[np.generic]) -> npt.NDArray[np.generic]:
        """An array of the caller's own, not written yet."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < _LARGE or dtype.hasobject:
            return np.empty(shape, dtype)
        try:
            whole = self._idle[nbytes].pop()
        except LookupError:
            whole = _aligned(nbytes)
        return np.asarray(_Lent(whole, self)).view(dtype).reshape(shape)

    def take_back(self, whole: _Bytes) -> None:
        """Keep memory for the next array of that size."""
        idle = self._idle.setdefault(whole.nbytes, [])
        if len(idle) < self._max_idle:
            idle.append(whole)


def _aligned(nbytes: int) -> _Bytes:
    memory = np.empty(nbytes + _ALIGNED, np.uint8)
    start = -memory.ctypes.data % _ALIGNED
    return memory[start : start + nbytes]


class _Lent:
    """Stands under every array over some memory, so that it goes when the last of them does."""

    __slots__ = ("__array_interface__", "_slabs", "_whole")

    def __init__(self, whole: _Bytes, slabs: Slabs) -> None:
        self.__array_interface__ = whole.__array_interface__
        self._whole = whole
        self._slabs = weakref.ref(slabs)

    def __del__(self) -> None:
        slabs = self._slabs()
        if slabs is not None:
            slabs.take_back(self._whole)
