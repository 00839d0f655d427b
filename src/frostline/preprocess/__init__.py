"""Preprocessing declared as data, with the same numbers on every side."""

from frostline.preprocess.applied import Applied
from frostline.preprocess.spec import Preprocess
from frostline.preprocess.steps import (
    CenterCrop,
    ColorJitter,
    Decode,
    Normalize,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
    Squeeze,
    Step,
    Stored,
)

__all__ = (
    "Applied",
    "CenterCrop",
    "ColorJitter",
    "Decode",
    "Normalize",
    "Preprocess",
    "RandomHorizontalFlip",
    "RandomResizedCrop",
    "Resize",
    "Squeeze",
    "Step",
    "Stored",
    "efficientnet_lite",
    "imagenet",
)

_IMAGENET_MEAN = (0.485, 0.456, 0.406)
_IMAGENET_STD = (0.229, 0.224, 0.225)


def imagenet(size: int, augment: bool = False) -> Preprocess:
    """What networks trained on ImageNet expect, as torchvision does it.

    Args:
        size: side of the network's input; the shorter side is scaled to 8/7 of it (256 for 224).
        augment: a random part and a random flip in place of the middle, another one each epoch.
    """
    return Preprocess(steps=(Decode(), *_geometry(size, augment), _scaled(_IMAGENET_MEAN, _IMAGENET_STD)))


def efficientnet_lite(size: int) -> Preprocess:
    """What EfficientNet-lite expects: bicubic, the middle 7/8, pixels as ``(x - 127) / 128``."""
    normalise = Normalize(mean=(127.0,) * 3, std=(128.0,) * 3)
    return Preprocess(steps=(Decode(), Resize(size * 8 // 7, "bicubic"), CenterCrop(size), normalise))


def _geometry(size: int, augment: bool) -> tuple[Step, ...]:
    if augment:
        return RandomResizedCrop(size), RandomHorizontalFlip(0.5)
    return Resize(size * 8 // 7), CenterCrop(size)


def _scaled(mean: tuple[float, ...], std: tuple[float, ...]) -> Normalize:
    return Normalize(mean=tuple(255 * value for value in mean), std=tuple(255 * value for value in std))
