"""Chooses the order of a job's samples: listed, shuffled, drawn by weights, or parts of the data by turns."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from frostline.datasets import Dataset
from frostline.errors import OrderMismatch, SettingError
from frostline.ordering import (
    BlockOrder,
    BlockShuffle,
    EpochOrder,
    MixtureOrder,
    Order,
    RecordedOrder,
    Replay,
    Weighted,
    Weights,
    weights_by_class,
)

__all__ = ("GivenWeights", "Mixture", "order_of", "replayed")

GivenWeights = Mapping[str, float] | Sequence[float] | npt.NDArray[np.floating]
"""By the names of classes, or one for each sample."""


def order_of(
    data: Dataset,
    blend: "Mixture | None" = None,
    *,
    shuffle: bool | BlockShuffle,
    seed: int,
    epoch: int,
    weights: GivenWeights | None = None,
    num_samples: int | None = None,
) -> EpochOrder:
    """The order of one epoch; see ``Job.loader``.

    Args:
        data: the samples; those of all parts where they are blended.
        blend: mixture of the parts; None where they are not mixed.
        shuffle: draw the order from the seed, in blocks where those are given.
        seed: seed of the order.
        epoch: its number.
        weights: draw by these instead.
        num_samples: how many.

    Raises:
        SettingError: the figures make no sense, or do not go together.
    """
    if weights is None and num_samples is not None:
        raise SettingError("num_samples is how many samples are drawn by weights: give weights too")
    if isinstance(shuffle, BlockShuffle) and (blend is not None or weights is not None):
        raise SettingError(
            "BlockShuffle takes neighbours of one data set, each of which comes once: take shuffle=True for a mixture, "
            "and neither for weights"
        )
    if weights is not None and shuffle:
        raise SettingError("weights draw an order of their own, by the seed: leave out shuffle, or give no weights")
    if blend is not None:
        if weights is not None:
            raise SettingError("a blend has ratios: draw by weights from one data set, or blend parts of it")
        return blend.order(shuffle=bool(shuffle), seed=seed, epoch=epoch)
    if isinstance(shuffle, BlockShuffle):
        return BlockOrder(size=len(data), seed=seed, epoch=epoch, blocks=shuffle)
    if weights is None:
        return Order(size=len(data), seed=seed, epoch=epoch, shuffle=shuffle)
    size = len(data) if num_samples is None else num_samples
    return Weighted(weights=_weights(data, weights), size=size, seed=seed, epoch=epoch)


def replayed(data: Dataset, order: EpochOrder, recorded: RecordedOrder) -> Replay:
    """What happened, once more.

    Raises:
        OrderMismatch: it was recorded of other samples, or in another order.
    """
    if recorded.state.manifest != data.digest:
        raise OrderMismatch(f"this order was recorded of other samples than these of {data.url}")
    return Replay(recorded=recorded, order=order)


def _weights(data: Dataset, given: GivenWeights) -> Weights:
    if isinstance(given, Mapping):
        unknown = sorted(set(given) - set(data.classes))
        if unknown:
            raise SettingError(f"there is no class {unknown[0]!r}: the data has {', '.join(data.classes)}")
        labels = {data.classes.index(name): weight for name, weight in given.items()}
        return Weights(weights_by_class(data.samples.labels, labels))
    if len(given) != len(data):
        raise SettingError(f"{len(given)} weights were given for {len(data)} samples")
    return Weights(given)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Mixture:
    """Parts of one data set that take turns by ratio; see ``ordering.MixtureOrder``.

    Attributes:
        parts: parts of the job's data set, such as selections of it; a sample may be in several.
        ratios: how often each one's turn comes, beside the others.
        ends: an epoch ends when the ``first`` part would have to begin again, or when ``all`` have been seen whole,
            the smaller ones several times; or after so many samples.

    Raises:
        SettingError: a figure that makes no sense, or a part without samples.
    """

    parts: Sequence[Dataset]
    ratios: Sequence[float]
    ends: str | int = "first"

    def __post_init__(self) -> None:
        if not self.parts:
            raise SettingError("a blend has at least one part")
        self.order(shuffle=False, seed=0, epoch=0)  # refuses what makes no sense

    def joined(self) -> Dataset:
        """The samples of all parts, one after the other.

        Raises:
            SettingError: the parts belong to several data sets.
        """
        return self.parts[0].joined(*self.parts[1:])

    def order(self, *, shuffle: bool, seed: int, epoch: int) -> MixtureOrder:
        """In which these samples come."""
        sizes = [len(part) for part in self.parts]
        return MixtureOrder.of(sizes, self.ratios, seed=seed, epoch=epoch, ends=self.ends, shuffle=shuffle)
