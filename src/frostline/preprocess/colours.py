"""Changes an image's colours at random, with Pillow and by torchvision's rule: the same pixels for the same draws."""

from collections.abc import Callable

from PIL import Image, ImageEnhance

from frostline.preprocess.steps import ColorJitter

__all__ = ("JITTER_DRAWS", "jittered")

JITTER_DRAWS = 7
"""Numbers that every change of colours draws, whatever its amounts are."""

_ENHANCERS = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)
_HUE = 3


def jittered(step: ColorJitter, image: Image.Image, draw: Callable[[], float]) -> Image.Image:
    """The image in other colours.

    Seven numbers are drawn whatever the amounts are, so that an amount of 0 changes no other draw: three for the
    order, then brightness, contrast, saturation and hue.

    Args:
        step: the amounts.
        image: image of mode RGB or L; it is left as it is.
        draw: gives the next number from 0 to below 1.
    """
    order = _drawn_order(draw)
    factors = [_factor(amount, draw()) for amount in (step.brightness, step.contrast, step.saturation)]
    turn = (2 * draw() - 1) * step.hue
    amounts = (step.brightness, step.contrast, step.saturation, step.hue)
    for change in order:
        if amounts[change] == 0:
            continue
        image = _turned(image, turn) if change == _HUE else _ENHANCERS[change](image).enhance(factors[change])
    return image


def _drawn_order(draw: Callable[[], float]) -> list[int]:
    # Fisher and Yates: every order of the four changes is as likely as any other.
    order = [0, 1, 2, _HUE]
    for last in (3, 2, 1):
        drawn = int(draw() * (last + 1))
        order[last], order[drawn] = order[drawn], order[last]
    return order


def _factor(amount: float, drawn: float) -> float:
    least, most = max(0.0, 1 - amount), 1 + amount
    return least + (most - least) * drawn


def _turned(image: Image.Image, turn: float) -> Image.Image:
    if image.mode == "L":
        return image
    hue, saturation, value = image.convert("HSV").split()
    steps = int(turn * 255)  # towards 0, as torchvision does
    hue = hue.point([(level + steps) % 256 for level in range(256)])
    return Image.merge("HSV", (hue, saturation, value)).convert(image.mode)
