"""Makes an image of what a ready form keeps of one sample: without loss, so that it decodes to the same pixels."""

from io import BytesIO

import numpy as np
import numpy.typing as npt
from PIL import Image

from frostline.errors import SampleError
from frostline.preprocess.applied import Applied
from frostline.preprocess.records import unpacked

__all__ = ("picture_of",)


def picture_of(applied: Applied, record: bytes | memoryview) -> bytes:
    """A PNG with the pixels of a record, grey or of three colours.

    Of 16-bit floats, which are rounded, it has the pixels from which they were computed: half the distance of two
    levels of 8 bits is four times the rounding or more, where the mean is one of them, so that the nearest is right.

    Raises:
        SampleError: the record is damaged, or no pixels give such floats.
    """
    kept = unpacked(applied.stored, record)
    pixels = _levels_of(applied, kept) if kept.dtype == np.float16 else kept.astype(np.uint8, copy=False)
    file = BytesIO()
    Image.fromarray(pixels if pixels.shape[2] > 1 else pixels[:, :, 0]).save(file, "PNG")
    return file.getvalue()


def _levels_of(applied: Applied, kept: npt.NDArray[np.generic]) -> npt.NDArray[np.uint8]:
    levels = applied.whole.levels
    assert levels is not None, "the steps of a ready form begin with images"
    planes = kept.astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):  # what is no pixel is found below
        for plane, mean, std in zip(planes, levels.mean, levels.std, strict=True):
            np.rint(plane * np.float32(std) + np.float32(mean), out=plane)
        pixels = np.ascontiguousarray(np.nan_to_num(planes).clip(0, 255).astype(np.uint8).transpose(1, 2, 0))
    again = np.empty(kept.shape, np.float32)
    levels.into(pixels, again)
    if not np.array_equal(again.astype(np.float16), kept):
        raise SampleError("no pixels give these 16-bit floats: make the copy from the images")
    return pixels
