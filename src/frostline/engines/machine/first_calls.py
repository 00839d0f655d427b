"""Has MKL's vector functions called first by one thread: called first by several at once, they may be imprecise."""

import functools
import threading

__all__ = ("FUNCTIONS", "settle_kernels")

# What ATen hands to MKL's vector library (aten/src/ATen/cpu/vml.h of torch 2.13), by torch's names.
FUNCTIONS = (
    *("acos", "asin", "atan", "cos", "erf", "erfc", "erfinv", "exp"),
    *("log", "log10", "log2", "sin", "sqrt", "tan", "tanh", "trunc"),
)
_LOCK = threading.Lock()


def settle_kernels() -> None:
    """Have MKL choose its kernels now; the first call in a process does it, later ones return at once.

    MKL 2024.2, which torch is built with, chooses the kernel of a vector function at its first call. Where several
    threads of one operator make that call together, one of them may compute its share with a kernel of low precision:
    the first ``sqrt`` of an optimiser, and every loss behind it, then depend on how busy the machine was. See
    https://github.com/pytorch/pytorch/issues/188792. Call it before a process computes. Safe for threads.
    """
    with _LOCK:
        _call_each()


@functools.cache
def _call_each() -> None:
    import torch

    for dtype in (torch.float32, torch.float64):
        # Too few for torch to share them among threads, and on the CPU whatever the user's default device.
        some = torch.full((8,), 0.5, dtype=dtype, device="cpu")
        for name in FUNCTIONS:
            getattr(torch, name)(some)
