"""The masks of a request's samples: fetched as they are stored, and taken here the way that their images went."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Self

import numpy as np
import numpy.typing as npt

from frostline.core import FeatureBatch, Route, Samples, Skipped, View
from frostline.datasets import Dataset
from frostline.datasets.select.target_columns import TargetColumns
from frostline.errors import SampleError, SettingError
from frostline.loaders.epoch.fetch import Fetcher, FetchRows
from frostline.prefetch import Deal, Dealer
from frostline.preprocess import Preprocess
from frostline.preprocess.masks import MASK_DTYPE, mask_into

__all__ = ("Masked", "MaskedDealer", "declared_targets", "fetch_of", "mask_bytes", "with_targets")


def with_targets(data: Dataset, declared: TargetColumns | None, targets: bool | None) -> bool:
    """Whether a loader gives masks: where it is asked to, or the data set has them.

    Args:
        data: data set.
        declared: declared targets that the loader gives.
        targets: see ``Job.loader``.

    Raises:
        SettingError: masks are asked for, and the data set has none.
    """
    if data.declares_targets:
        return declared is not None and declared.has_masks
    if targets and not data.has_targets:
        raise SettingError(
            f"{data.url} has no masks: targets need data that has some, such as images/1.jpg and masks/1.png, members "
            "1.jpg and 1.mask.png of a tar, or a column called mask; those of other kinds are declared, such as "
            "Dataset(url, targets='label')"
        )
    return data.has_targets if targets is None else targets


def declared_targets(data: Dataset, targets: bool | None) -> TargetColumns | None:
    """The declared targets that a loader gives: all, unless it is asked for none.

    Raises:
        DataError: a column's values cannot be targets, or samples have none where they must.
        SettingError: there is no such column; or targets are asked for, and it was declared that there are none.
    """
    found = None if targets is False else data.targets
    if targets and data.declares_targets and found is None:
        raise SettingError(f"{data.url} was declared to have no targets, targets=(): leave out targets=True")
    return found


def fetch_of(fetcher: Fetcher, view: View | None, *, has_targets: bool, decodes: bool = True) -> FetchRows:
    """What makes a loader's requests for one view; see ``Fetcher.fetch``."""
    make = partial(Masked, fetcher) if has_targets else fetcher.fetch
    return partial(make, view=view, decodes=decodes)


def mask_bytes(preprocess: Preprocess) -> int:
    """What a sample's mask takes beside its features."""
    _, height, width = preprocess.shape
    return height * width * np.dtype(MASK_DTYPE).itemsize


class MaskedDealer:
    """Another dealer's requests, with room for masks.

    Args:
        dealer: says which way the next samples take.
        nbytes: bytes of a mask.
    """

    def __init__(self, dealer: Dealer, nbytes: int) -> None:
        self._dealer = dealer
        self._nbytes = nbytes

    def deal(self, left: int) -> Deal:
        """See ``Dealer``."""
        deal = self._dealer.deal(left)
        return replace(deal, bytes_per_sample=deal.bytes_per_sample + self._nbytes) if deal.bytes_per_sample else deal


class Masked:
    """The rows of one request, each with its sample's mask as the last tensor: ``uint16[n, H, W]``.

    Masks come encoded, whatever way the images take: they are small, and classes must not be computed with. A sample
    whose mask is missing, or cannot be used, is skipped as one whose image cannot be read. ``close`` may be called
    from another thread, as that of ``Answer``.
    """

    def __init__(self, fetcher: Fetcher, samples: Samples, route: Route, view: View | None, *, decodes: bool) -> None:
        self._fetcher = fetcher
        self._samples = samples
        self._view = view
        self._masks = _Masks(samples)
        self._encoded: Iterator[FeatureBatch] = iter(())
        if len(self._masks.asked):
            request = fetcher.request(self._masks.asked, Route(0), view)
            self._encoded = fetcher.features(request)
        self._features = fetcher.fetch(samples, route, view, decodes=decodes)
        self._is_fetched = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> FeatureBatch:
        if not self._is_fetched:  # first, because a node that fails has then computed nothing in vain
            for batch in self._encoded:
                self._masks.take(batch, self._fetcher.preprocess, self._view)
            self._is_fetched = True
        return self._masks.joined(next(self._features), self._fetcher.preprocess)

    def close(self) -> None:
        """Abandon the rest of both answers."""
        close = getattr(self._encoded, "close", None)
        if close is not None:
            close()
        self._features.close()


class _Masks:
    """The masks of some samples, by id."""

    def __init__(self, samples: Samples) -> None:
        targets = samples.targets
        assert targets is not None, "masks are asked for where the data set has them"
        there, self.asked = samples.masks
        sizes = zip(targets.widths[there].tolist(), targets.heights[there].tolist(), strict=True)
        self._sizes = dict(zip(self.asked.ids.tolist(), sizes, strict=True))
        self._objects = dict(zip(self.asked.ids.tolist(), self.asked.objects, strict=True))
        self._images = dict(zip(samples.ids.tolist(), samples.objects, strict=True))
        self._masks: dict[int, npt.NDArray[np.uint16]] = {}
        self._lost: dict[int, Skipped] = {}

    def take(self, batch: FeatureBatch, preprocess: Preprocess, view: View | None) -> None:
        """Decode what arrived."""
        self._lost |= {skipped.id: skipped for skipped in batch.skipped}
        for id, encoded in zip(batch.ids.tolist(), batch.encoded, strict=True):
            mask = np.empty(preprocess.shape[1:], MASK_DTYPE)
            try:
                mask_into(preprocess, encoded, mask, id=id, view=view, size=self._sizes[id])
            except SampleError as error:
                self._lost[id] = Skipped(id=id, object=self._objects[id], reason=str(error))
            else:
                self._masks[id] = mask

    def joined(self, batch: FeatureBatch, preprocess: Preprocess) -> FeatureBatch:
        """The rows that have a mask, with it; the others are skipped."""
        ids = batch.ids.tolist()
        kept = [row for row, id in enumerate(ids) if id in self._masks]
        masks = np.empty((len(kept), *preprocess.shape[1:]), MASK_DTYPE)
        for place, row in enumerate(kept):
            masks[place] = self._masks[ids[row]]
        lost = tuple(self._why(id) for id in ids if id not in self._masks)
        tensors = batch.tensors if not lost else tuple(tensor[kept] for tensor in batch.tensors)
        encoded = batch.encoded if not lost or not batch.encoded else [batch.encoded[row] for row in kept]
        return replace(
            batch,
            ids=batch.ids if not lost else batch.ids[kept],
            tensors=(*tensors, masks),
            encoded=encoded,
            skipped=(*batch.skipped, *lost),
        )

    def _why(self, id: int) -> Skipped:
        return self._lost.get(id) or Skipped(id=id, object=self._images[id], reason="it has no mask")
