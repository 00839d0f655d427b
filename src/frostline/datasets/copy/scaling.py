"""Scales images and masks on their way into a copy."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from io import BytesIO
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image

from frostline.core import Samples, Skipped, Targets
from frostline.datasets.access import reader_of
from frostline.datasets.dataset import Dataset
from frostline.datasets.sequential import Workers, masks_of
from frostline.errors import SampleError, SettingError
from frostline.preprocess.applied import Applied
from frostline.preprocess.apply import MAX_PIXELS
from frostline.preprocess.decoder import decoded, size_of
from frostline.preprocess.masks import scaled_mask
from frostline.preprocess.records import unpacked
from frostline.stores.base.protocols import Buffer

__all__ = ("Pictures", "Scaling", "check_side", "picture_of", "scaled")


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
    assert levels is not None, "the steps of a ready format begin with images"
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


# At 95 of 100 what the codec loses is below what scaling changes.
_QUALITY = 95


def scaled(encoded: bytes | memoryview, shorter_side: int) -> bytes:
    """Scale an image so that its shorter side has at most so many pixels.

    One that is small enough keeps its bytes. Others become JPEG where they were JPEG, and PNG elsewhere, in the
    orientation in which they are stored; scaling is bicubic with antialiasing, as in ``preprocess.Resize``.

    Raises:
        SampleError: the image is broken, too large or of a kind that is not read.
    """
    width, height = size_of(encoded)
    if 0 < min(width, height) <= shorter_side:
        return bytes(encoded)
    image = decoded(encoded, "RGB", max_pixels=MAX_PIXELS)
    share = shorter_side / min(image.size)
    size = (round(image.width * share), round(image.height * share))
    file = BytesIO()
    kind = "JPEG" if bytes(encoded[:2]) == b"\xff\xd8" else "PNG"
    image.resize(size, Image.Resampling.BICUBIC).save(file, kind, quality=_QUALITY)
    return file.getvalue()


def check_side(side: int | None) -> None:
    """Check that images can be scaled to a shorter side of this many pixels.

    Raises:
        SettingError: images cannot be scaled to that side.
    """
    if side is not None and side < 1:
        raise SettingError(f"--resize must be at least 1, not {side}")


class Pictures(NamedTuple):
    """What was read of a sample.

    Attributes:
        image: encoded.
        mask: encoded; None where the sample has none.
    """

    image: bytes
    mask: bytes | None


class Scaling:
    """Reads what a copy is made of.

    Of a ready format, the pixels become images without loss.

    Args:
        source: samples.
        side: pixels of the shorter side to which images and masks are scaled down; None leaves their bytes as they are.
        workers: samples read, and scaled, at once.
        stack: ends the threads.

    Raises:
        SettingError: the side makes no sense.
    """

    def __init__(self, source: Dataset, side: int | None, workers: int, stack: ExitStack) -> None:
        check_side(side)
        self.side = side
        self._applied = source.manifest.applied
        self._reader = reader_of(source, maximum=workers)
        self._workers: Workers[Pictures | Skipped] = Workers(self._reader, workers, stack)

    def read(self, samples: Samples, names: Sequence[str]) -> list[Pictures | Skipped]:
        """All of these samples, in their order; of those that cannot be used, or whose masks cannot, why.

        Args:
            samples: some megabytes of them.
            names: by which they are called where they are left out.
        """
        masks = masks_of(samples, self._reader)
        return self._workers.each(samples, names, partial(self._pictures, samples, names, masks))

    def _pictures(
        self,
        samples: Samples,
        names: Sequence[str],
        masks: Mapping[int, Buffer | Skipped],
        row: int,
        data: Buffer | Skipped,
    ) -> Pictures | Skipped:
        mask = masks.get(row)
        if isinstance(data, Skipped):
            return data
        if isinstance(mask, Skipped):
            return mask
        try:
            # Copied, for a view would keep all alive that was read with it.
            image = bytes(data) if self._applied is None else picture_of(self._applied, data)
            image = image if self.side is None else scaled(image, self.side)
            return Pictures(image, None if mask is None else self._mask(samples.targets, row, mask))
        except SampleError as error:
            return Skipped(id=int(samples.ids[row]), object=names[row], reason=str(error))

    def _mask(self, targets: Targets | None, row: int, data: Buffer) -> bytes:
        if self.side is None or targets is None:
            return bytes(data)
        return scaled_mask(data, self.side, size=(int(targets.widths[row]), int(targets.heights[row])))
