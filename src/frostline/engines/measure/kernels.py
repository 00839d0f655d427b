"""How many operations a kernel costs, where it is slower than the formula for its operator counts.

The factors were measured against a core's 5e10 operations a second, on a processor without instructions for 16 bits.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from frostline.engines.measure.footprint import tensors_in

__all__ = ("Multiplying", "computed")

# No library multiplies these: torch's own loops do, on one core whatever there are. The first factor is for rows times
# columns that lie together, as layers have them; the second for all other products, and the third for convolutions.
_HALF = (8, 40, 24)
_LONG = (80, 80, 80)
_OTHER = (4, 4, 4)
_FACTORS = {torch.bfloat16: _HALF, torch.float16: _HALF, torch.float64: (0, 0, 4), torch.int64: _LONG}
# Convolutions are quick where many channels become many. Of fewer pairs than these, each costs more.
_MANY_PAIRS, _MAX_THIN = 1024, 32
# For each number of a window, or for each number that is made.
_POOL, _BICUBIC, _UPSAMPLE = 64, 1024, 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Multiplying:
    """What a device multiplies at its full speed.

    Attributes:
        cores: Cores that the operations of a second are of; 1 for an accelerator.
        quick_dtypes: Types of numbers, in torch's names.
    """

    cores: int = 1
    quick_dtypes: tuple[str, ...] = ("float32",)


def computed(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], made: Any, speed: Multiplying) -> int:
    """What a kernel computes, in additions and multiplications of 32-bit floats.

    Args:
        func: overload of the operator.
        args: its arguments by position.
        kwargs: its arguments by name.
        made: result of the call.
        speed: the kinds of numbers that the device multiplies quickly.
    """
    name, count = func.__name__, sum(tensor.numel() for tensor in tensors_in(made)[:1])
    if func.overloadpacket in flop_registry:
        flops = int(flop_registry[func.overloadpacket](*args, **kwargs, out_val=made))
        return flops * _factor(name, tensors_in(args), args, speed)
    if "pool" in name and len(args) > 1 and isinstance(args[1], list | tuple):
        return _POOL * count * _window(name, args[0].shape, args[1])
    if "upsample" in name:
        return count * (_BICUBIC if "bicubic" in name else _UPSAMPLE)
    return 0


def _factor(name: str, tensors: Sequence[torch.Tensor], args: Sequence[Any], speed: Multiplying) -> int:
    is_convolution = name.startswith("convolution")
    thin = _thinness(tensors[1], args) if is_convolution else 1
    dtype = tensors[0].dtype
    if str(dtype).removeprefix("torch.") in speed.quick_dtypes:
        return thin
    near, far, convolution = _FACTORS.get(dtype, _OTHER)
    if is_convolution:
        return max(thin, convolution * speed.cores)
    return max(1, (near if _lie_together(*tensors[-2:]) else far) * speed.cores)


def _thinness(weight: torch.Tensor, args: Sequence[Any]) -> int:
    outputs, inputs = weight.shape[:2]
    pairs = max(1, inputs * outputs // max(1, int(args[8])))
    return min(_MAX_THIN, max(1, _MANY_PAIRS // pairs))


def _lie_together(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether the rows of one and the columns of the other lie together."""
    return left.stride(-1) == 1 and right.stride(-2) == 1


def _window(name: str, shape: Sequence[int], sides: Sequence[Any]) -> int:
    """The numbers that each result of a pool is made of, about."""
    if "adaptive" in name:
        pairs = zip(shape[-len(sides) :], sides, strict=True)
        return math.prod(-(-int(before) // max(1, int(after))) + 2 for before, after in pairs)
    found = math.prod(int(side) for side in sides)
    return found if len(sides) > 1 else found**2
