"""Small prefixes and pixels to run them on."""

import numpy as np
import torch

from frostline.core import Levels
from frostline.models import cut_network
from support.networks import Small

SHAPE = (3, 32, 32)


def small_prefix(*, seed=0):
    """The whole of ``Small``, frozen."""
    torch.manual_seed(seed)
    return cut_network(Small().eval().requires_grad_(False), SHAPE).prefix


def pixels(rows, *, seed=0):
    return np.random.default_rng(seed).standard_normal((rows, *SHAPE), np.float32)


LEVELS = Levels(mean=(123.675, 116.28, 103.53), std=(58.395, 57.12, 57.375))
"""ImageNet's."""


def kept_pixels(rows, *, seed=0):
    """As they are kept: every level is among them."""
    channels, height, width = SHAPE
    return np.random.default_rng(seed).integers(0, 256, (rows, height, width, channels), np.uint8)


def relative_error(values, reference):
    """Relative RMS of the worst sample."""
    gone = (values - reference).reshape(len(values), -1)
    return float(np.sqrt((gone**2).sum(1) / (reference.reshape(len(values), -1) ** 2).sum(1)).max())
