"""Decides which part of an image a preprocessing takes, and how large it becomes: from sizes and seeded draws alone."""

import math
from collections.abc import Callable

import numpy as np

from frostline.core import View
from frostline.errors import BadRequest
from frostline.preprocess.spec import Preprocess
from frostline.preprocess.steps import RandomResizedCrop, Resize

__all__ = ("Box", "draws", "middle", "no_draw", "random_box", "scaled_size")

Box = tuple[int, int, int, int]
"""Left, top, right and bottom in pixels; a part of it may lie beside the image."""


def scaled_size(step: Resize, size: tuple[int, int]) -> tuple[int, int]:
    """Width and height that an image of that width and height is scaled to."""
    width, height = size
    # torchvision cuts the longer side to a whole number; it does not round it.
    longer = int(step.shorter * max(width, height) / min(width, height))
    return (step.shorter, longer) if width <= height else (longer, step.shorter)


def middle(size: tuple[int, int], side: int) -> Box:
    """The middle square of an image."""
    left, top = (_offset(length, side) for length in size)
    return left, top, left + side, top + side


def random_box(step: RandomResizedCrop, size: tuple[int, int], draw: Callable[[], float]) -> Box:
    """A random part of an image, by torchvision's rule."""
    width, height = size
    for _ in range(10):
        area = width * height * (step.min_area + (step.max_area - step.min_area) * draw())
        least, most = math.log(step.min_ratio), math.log(step.max_ratio)
        ratio = math.exp(least + (most - least) * draw())
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            top, left = int(draw() * (height - h + 1)), int(draw() * (width - w + 1))
            return left, top, left + w, top + h
    return _widest_box(step, width, height)


def draws(preprocess: Preprocess, id: int, view: View | None) -> Callable[[], float]:
    """What gives a sample's next number from 0 to below 1, each time it is called.

    Raises:
        BadRequest: a step is random and there is no view.
    """
    if view is None:
        if preprocess.is_random:
            raise BadRequest("random preprocessing needs a view: seed and epoch")
        return no_draw
    # Philox is a counter turned into bits, the same on every machine and in every version of NumPy; the sample's
    # id stands in the counter's high word, so that the draws of two samples never overlap.
    bits = np.random.Philox(
        key=np.array([view.seed, view.epoch], np.uint64), counter=np.array([0, 0, 0, id], np.uint64)
    )
    return lambda: (int(bits.random_raw()) >> 11) * 2.0**-53


def no_draw() -> float:
    """Stands for the draws of a preprocessing that has none."""
    raise AssertionError("a preprocessing without random steps draws nothing")


def _offset(length: int, side: int) -> int:
    # torchvision rounds half to even where it cuts, and pads the shorter half first where the image is smaller.
    return round((length - side) / 2) if length >= side else -((side - length) // 2)


def _widest_box(step: RandomResizedCrop, width: int, height: int) -> Box:
    # No draw fitted: the middle of the image, as wide or high as the ratios allow.
    w, h = width, height
    if width / height < step.min_ratio:
        h = max(1, round(width / step.min_ratio))
    elif width / height > step.max_ratio:
        w = max(1, round(height * step.max_ratio))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h
