"""Takes a mask the way that its image goes: the same sizes, crops and draws, and of the pixels the nearest."""

from collections.abc import Callable
from io import BytesIO

import numpy as np
import numpy.typing as npt
from PIL import Image

from frostline.core import View
from frostline.errors import SampleError
from frostline.preprocess.apply import MAX_PIXELS, Box, draws, middle, random_box, scaled_size
from frostline.preprocess.decoder import JITTER_DRAWS, check_size, decoded_classes
from frostline.preprocess.spec import Preprocess
from frostline.preprocess.steps import (
    CenterCrop,
    ColorJitter,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
    Squeeze,
    Step,
)

__all__ = ("IGNORED", "MASK_DTYPE", "kept_mask", "mask_into", "open_mask", "scaled_mask")

IGNORED = 255
"""What stands where a crop reaches beyond the mask: the number that losses are told to ignore."""

MASK_DTYPE = "uint16"
"""The dtype in which masks are carried and kept; it holds the classes of 8-bit and 16-bit masks."""

_MAX_OF_A_BYTE = (1 << 8) - 1
_MAX_CLASS = (1 << 16) - 1
_NEAREST = Image.Resampling.NEAREST


def mask_into(
    preprocess: Preprocess,
    encoded: bytes | memoryview,
    out: npt.NDArray[np.uint16],
    *,
    id: int,
    view: View | None,
    size: tuple[int, int] = (0, 0),
    max_pixels: int = MAX_PIXELS,
) -> None:
    """Decode one mask and write the classes that belong to the network's input into ``out``.

    Args:
        preprocess: preprocessing of the image, from ``Decode`` on.
        encoded: the mask as stored; read, not kept.
        out: ``uint16[H, W]``, height and width of ``preprocess.shape``; undefined after a ``SampleError``.
        id: id of the sample; with the view it seeds the random steps, as it does for the image.
        view: which random view; None where no step is random.
        size: width and height of the image; zeros where nobody knows them.
        max_pixels: see ``apply.decode_into``.

    Raises:
        SampleError: the mask is broken, of a kind that is not read or of another size than its image.
        BadRequest: a step is random and there is no view.
    """
    draw = draws(preprocess, id, view)
    mask = open_mask(encoded, size=size, max_pixels=max_pixels)
    for step in preprocess.steps[1:-1]:
        mask = _applied(step, mask, draw, max_pixels)
    np.copyto(out, np.asarray(mask), casting="unsafe")  # all of it fits: see _as_image


def open_mask(
    encoded: bytes | memoryview, *, size: tuple[int, int] = (0, 0), max_pixels: int = MAX_PIXELS
) -> Image.Image:
    """A mask whose pixels are classes; see ``mask_into``.

    Raises:
        SampleError: the mask is broken, of a kind that is not read or of another size than its image.
    """
    mask = _as_image(decoded_classes(encoded, max_pixels=max_pixels))
    if 0 not in size and mask.size != size:
        raise SampleError(
            f"the mask has {mask.width} x {mask.height} pixels and its image {size[0]} x {size[1]}: make them the same"
        )
    return mask


def scaled_mask(encoded: bytes | memoryview, shorter_side: int, *, size: tuple[int, int] = (0, 0)) -> bytes:
    """A mask as large as ``preprocess.scaled.scaled`` makes its image, of the pixels the nearest.

    One that is small enough keeps its bytes. Others become grey PNGs of 8 or 16 bits.

    Raises:
        SampleError: see ``open_mask``.
    """
    mask = open_mask(encoded, size=size)
    if min(mask.size) <= shorter_side:
        return bytes(encoded)
    share = shorter_side / min(mask.size)
    return _png(np.asarray(mask.resize((round(mask.width * share), round(mask.height * share)), _NEAREST)))


def kept_mask(preprocess: Preprocess, encoded: bytes | memoryview, *, size: tuple[int, int] = (0, 0)) -> bytes:
    """A mask as a ready format keeps it beside its image: as large as the pixels, a grey PNG of 8 or 16 bits.

    Args:
        preprocess: preprocessing of the image before it is kept, none of it random.
        encoded: the mask as stored.
        size: see ``mask_into``.

    Raises:
        SampleError: see ``open_mask``.
    """
    classes = np.empty(preprocess.shape[1:], MASK_DTYPE)
    mask_into(preprocess, encoded, classes, id=0, view=None, size=size)
    return _png(classes if classes.max() > _MAX_OF_A_BYTE else classes.astype(np.uint8))


def _png(classes: npt.NDArray[np.generic]) -> bytes:
    file = BytesIO()
    Image.fromarray(classes.astype(np.uint8 if classes.dtype == np.uint8 else np.uint16)).save(file, "PNG")
    return file.getvalue()


def _as_image(classes: npt.NDArray[np.integer | np.bool_]) -> Image.Image:
    """The classes in what Pillow scales: 8 bits where they do, else 32."""
    if classes.dtype.itemsize == 1 and classes.dtype.kind != "i":
        return Image.fromarray(classes.astype(np.uint8))
    minimum, maximum = int(classes.min()), int(classes.max())
    if minimum < 0 or maximum > _MAX_CLASS:
        raise SampleError(
            f"{minimum if minimum < 0 else maximum} is no class: those of masks go from 0 to {_MAX_CLASS}"
        )
    return Image.fromarray(classes.astype(np.int32))


def _applied(step: Step, mask: Image.Image, draw: Callable[[], float], max_pixels: int) -> Image.Image:
    match step:
        case Resize():
            width, height = scaled_size(step, mask.size)
            check_size((max(width, 1), max(height, mask.height)), max_pixels, "scaled it has")
            return mask.resize((width, height), _NEAREST)
        case Squeeze():
            check_size((step.size, max(step.size, mask.height)), max_pixels, "scaled it has")
            return mask.resize((step.size, step.size), _NEAREST)
        case CenterCrop():
            return _cropped(mask, middle(mask.size, step.size))
        case RandomResizedCrop():
            return mask.crop(random_box(step, mask.size, draw)).resize((step.size, step.size), _NEAREST)
        case RandomHorizontalFlip():
            return mask.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if draw() < step.p else mask
        case ColorJitter():
            for _ in range(JITTER_DRAWS):  # steps behind it draw what they draw for the image
                draw()
            return mask
        case _:
            raise AssertionError(f"{step} stands between Decode and Normalize")


def _cropped(mask: Image.Image, box: Box) -> Image.Image:
    left, top, right, bottom = box
    ground = Image.new(mask.mode, (right - left, bottom - top), IGNORED)
    ground.paste(mask, (-left, -top))
    return ground
