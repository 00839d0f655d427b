"""Encoded samples as they lie in the store, for a framework that decodes them itself."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Self

import numpy as np

from frostline.core import FeatureBatch, Route, Samples, TensorSpec
from frostline.errors import SettingError
from frostline.loaders.epoch.fetch import Fetcher, FetchRows
from frostline.prefetch import Deal, Dealer

__all__ = ("ENCODED", "EncodedDealer", "EncodedRowStream", "fetch_encoded", "refuse_encoded")

ENCODED = TensorSpec((), "object")
"""A row of encoded samples, ``bytes``."""


def refuse_encoded(fetcher: Fetcher, *, targets: bool | None) -> None:
    """Refuse to give encoded samples where a job has none, or something is asked for that only pixels have.

    Raises:
        SettingError: the job has a model or a ready format, or targets are asked for.
    """
    if fetcher.shipment is not None:
        raise SettingError("encoded samples are for a job without a model: this one gives features of its network")
    if fetcher.preprocess.stored is not None:
        raise SettingError(
            "this data set is a ready format, which keeps pixels: take encoded samples from the one it was made of"
        )
    if targets:
        raise SettingError("targets are classes of decoded pixels: ask for them, or for encoded samples")


def fetch_encoded(fetcher: Fetcher) -> FetchRows:
    """What makes requests for samples as they lie in the store."""
    return lambda samples, route: EncodedRowStream(fetcher, samples, route)


class EncodedDealer:
    """Another dealer's requests, for encoded samples.

    Args:
        dealer: says how many are asked for together.
    """

    def __init__(self, dealer: Dealer) -> None:
        self._dealer = dealer

    def deal(self, left: int) -> Deal:
        """See ``Dealer``."""
        return replace(self._dealer.deal(left), route=Route(0), bytes_per_sample=0)


class EncodedRowStream:
    """The rows of one request. ``close`` may be called from another thread, as that of ``Answer``.

    Args:
        fetcher: fetcher of the job.
        samples: to ask for.
        route: route of cut 0.
    """

    def __init__(self, fetcher: Fetcher, samples: Samples, route: Route) -> None:
        self._arrived = fetcher.arrived
        self._route = route
        self._batches: Iterator[FeatureBatch] = fetcher.features(fetcher.request(samples, route, None))

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> FeatureBatch:
        batch = next(self._batches)
        for count in self._arrived:
            count(self._route, batch)
        rows = np.empty(len(batch), object)
        for place, encoded in enumerate(batch.encoded):
            rows[place] = bytes(encoded)  # a view would keep the whole answer in memory
        return FeatureBatch(ids=batch.ids, tensors=(rows,), skipped=batch.skipped)

    def close(self) -> None:
        """Abandon the rest of the answer."""
        close = getattr(self._batches, "close", None)
        if close is not None:
            close()
