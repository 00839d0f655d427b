"""One request after another: ask the node for rows at the planned cut and finish them here to the frost line."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from frostline.client.transport import Transport
from frostline.core import Cut, FeatureBatch, Samples, View
from frostline.errors import UnknownPrefix
from frostline.loaders.trainer_side import TrainerSide
from frostline.preprocess import Preprocess
from frostline.wire.messages import FeatureRequest

__all__ = ("Fetcher", "Shipment")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shipment:
    """A prefix as it travels: its digest, and its file, to upload again where a node was restarted."""

    digest: str
    artifact: bytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fetcher:
    """Makes a job's requests. Safe for several threads.

    Attributes:
        transport: to the node.
        url: of the data set's root.
        preprocess: declared once for both sides.
        cut: where the store side stops.
        shipment: the prefix; None where there is no model.
        trainer_side: computes the rest of the frozen part.
    """

    transport: Transport
    url: str
    preprocess: Preprocess
    cut: Cut
    shipment: Shipment | None
    trainer_side: TrainerSide

    def fetch(self, samples: Samples, view: View | None) -> "Answer":
        """Rows of these samples at the frost line, as they arrive."""
        return Answer(self, samples, view)

    def request(self, samples: Samples, view: View | None) -> FeatureRequest:
        """The message that asks for them."""
        return FeatureRequest(
            data=self.url,
            samples=samples,
            prefix=self.shipment.digest if self.shipment is not None and self.cut.number > 1 else None,
            cut=self.cut.number,
            preprocess=self.preprocess.to_json(),
            view=view,
        )


class Answer:
    """The rows of one request. ``close`` may be called from another thread and ends a read that is under way."""

    def __init__(self, fetcher: Fetcher, samples: Samples, view: View | None) -> None:
        self._fetcher = fetcher
        self._samples = samples
        self._view = view
        self._request = fetcher.request(samples, view)
        self._batches: Iterator[FeatureBatch] = fetcher.transport.features(self._request)
        self._begun = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> FeatureBatch:
        try:
            batch = next(self._batches)
        except UnknownPrefix:
            batch = self._again()
        self._begun = True
        return self._fetcher.trainer_side.finish(batch, self._samples, self._fetcher.preprocess, self._view)

    def close(self) -> None:
        """Abandon the rest of the answer."""
        close = getattr(self._batches, "close", None)
        if close is not None:
            close()

    def _again(self) -> FeatureBatch:
        """The node lost the prefix, as after a restart: upload it and ask once more."""
        shipment = self._fetcher.shipment
        if shipment is None or self._begun:
            raise UnknownPrefix("the node asks for a prefix that this job does not have")
        self._begun = True
        self._fetcher.transport.put_prefix(shipment.digest, shipment.artifact)
        self._batches = self._fetcher.transport.features(self._request)
        return next(self._batches)
