"""Decides which samples are asked for together: stretches of one epoch's order, and their values on the way."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from frostline.core import FeatureBatch, Samples

__all__ = ("Ask", "Delivery", "Stretch", "stretches")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stretch:
    """Samples to ask for in one request.

    Attributes:
        positions: ``int64[n]``, places in the epoch, ascending; a gap is a sample that needs no asking.
        samples: the samples at those places.
        expected_bytes: payload that the answer should have. The window's bound is as good as this figure.
    """

    positions: npt.NDArray[np.int64]
    samples: Samples
    expected_bytes: int

    def __post_init__(self) -> None:
        if len(self.positions) == 0 or len(self.positions) != len(self.samples):
            raise ValueError(f"a stretch has {len(self.positions)} positions for {len(self.samples)} samples")

    def __len__(self) -> int:
        return len(self.positions)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ask:
    """One request to make now.

    Attributes:
        number: names this attempt; an answer to an older attempt is not taken.
        attempt: 1, or more after failures.
        samples: what to ask for, in order; the stretch without what arrived in earlier attempts.
    """

    number: int
    attempt: int
    samples: Samples


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Delivery:
    """Rows handed out, next in order.

    Attributes:
        positions: ``int64[len(batch)]``, places in the epoch of the batch's rows, ascending.
        stop: every asked-for sample at a place below this has now been handed out or skipped.
        batch: the rows, and the samples skipped among them.
    """

    positions: npt.NDArray[np.int64]
    stop: int
    batch: FeatureBatch


def stretches(
    table: Samples,
    rows: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int64],
    *,
    samples_per_request: int,
    bytes_per_sample: int,
) -> Iterator[Stretch]:
    """Divide what an epoch must ask for into requests. Lazy: a stretch is made when the window has room for it.

    Args:
        table: the data set.
        rows: ``int64[n]``, row of the table at each place of the epoch.
        positions: ``int64[m]``, the places to ask for, ascending; leave out what the cache holds.
        samples_per_request: most samples in one.
        bytes_per_sample: payload of one sample; 0 where the encoded sample itself travels.
    """
    for start in range(0, len(positions), samples_per_request):
        chosen = positions[start : start + samples_per_request]
        samples = table.take(rows[chosen])
        expected = bytes_per_sample * len(samples) if bytes_per_sample else samples.encoded_bytes
        yield Stretch(positions=chosen, samples=samples, expected_bytes=expected)
