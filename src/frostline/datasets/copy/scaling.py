"""Reads samples with their masks for copies, scaled down where that is wanted: several at once, in their order."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

from frostline.core import Samples, Skipped, Targets
from frostline.datasets.dataset import Dataset
from frostline.datasets.sequential import InOrder, Workers, masks_of
from frostline.errors import SampleError, SettingError
from frostline.preprocess.masks import scaled_mask
from frostline.preprocess.pictures import picture_of
from frostline.preprocess.scaled import scaled
from frostline.stores.base.protocols import Buffer

__all__ = ("Pictures", "Scaling", "check_side")


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
        self._applied = source.applied
        self._reader = InOrder(source.url, source.reading, most=workers, roots=source.roots)
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
