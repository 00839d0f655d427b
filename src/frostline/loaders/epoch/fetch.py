"""One request after another: ask the node for rows on their way and finish them here to the frost line."""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np

from frostline.core import REFERENCE, FeatureBatch, Route, Samples, View
from frostline.errors import EngineNotReady, Overloaded, SettingError, UnknownPrefix
from frostline.loaders.epoch.local_stage import TrainerSide
from frostline.loaders.epoch.node_engine import NodeEngine
from frostline.preprocess import Preprocess
from frostline.transport.protocol import Transport
from frostline.wire.codecs import unpack
from frostline.wire.messages import FeatureRequest, ProfileRequest

__all__ = ("FetchRows", "Fetcher", "Shipment", "joined")

FetchRows = Callable[[Samples, Route], Iterator[FeatureBatch]]
"""Makes one request for samples on a way, no one twice, and yields their rows at the frost line."""

# Samples on which an engine is tried that the node has not ready.
_TRIED = 96
# After which a node that dropped a prefix as soon as it had it is asked again.
_AGAIN_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shipment:
    """A prefix as it travels.

    Attributes:
        digest: its name.
        artifact: its file, to upload again where a node was restarted.
        refused: why the node has no room for it, so that it runs at the trainer alone; None where the node took it.
    """

    digest: str
    artifact: bytes
    refused: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fetcher:
    """Makes a job's requests. Safe for several threads.

    Attributes:
        transport: to the node.
        url: of the data set's root.
        reading: how the bytes at its samples' addresses are found.
        preprocess: declared once for both sides.
        shipment: the prefix; None where there is no model.
        trainer_side: computes the rest of the frozen part.
        engine: that runs the prefix at the node, and may be another one in the next request.
        arrived: told of every batch that arrived: its way, and the batch as it came.
        tried: asks for what engines are tried on; None for a request's own samples, which calibrate them otherwise.
        unfit: numbers of the cuts at which the engine cannot be used, which has been tried up to the plan's own.
        closed: set when the job is, for this and all that were made of it: nobody answers any more.
    """

    transport: Transport
    url: str
    reading: str
    preprocess: Preprocess
    shipment: Shipment | None
    trainer_side: TrainerSide
    engine: NodeEngine
    arrived: Callable[[Route, FeatureBatch], None]
    tried: FeatureRequest | None = None
    unfit: set[int] = field(default_factory=set)
    closed: threading.Event = field(default_factory=threading.Event)

    def fetch(self, samples: Samples, route: Route, view: View | None, *, decodes: bool = True) -> "RowStream":
        """Rows of these samples at the frost line, as they arrive; encoded ones stay so where it does not decode."""
        return RowStream(self, samples, route, view, decodes=decodes)

    def request(self, samples: Samples, route: Route, view: View | None) -> FeatureRequest:
        """The message that asks for them.

        Raises:
            SettingError: the job is closed.
        """
        if self.closed.is_set():
            raise SettingError("this job is closed: take its batches before that, or make another one")
        return FeatureRequest(
            data=self.url,
            reading=self.reading,
            samples=samples,
            prefix=self.shipment.digest if self.shipment is not None and route.cut > 1 else None,
            cut=route.cut,
            preprocess=self.preprocess.to_json(),
            view=view,
            codec=route.codec,
            tolerance=self.engine.tolerance,
            engine=self.engine.name if route.cut > 1 and route.cut not in self.unfit else REFERENCE,
        )

    def prepare(self, request: FeatureRequest) -> bool:
        """Have the node make the engine ready that a request names; ``Transport.profile`` says what may be raised.

        Returns:
            Whether it is; where it cannot be used at this cut, the reference can, from now on.
        """
        few = request.samples.take(np.arange(min(_TRIED, len(request.samples))))
        tried = self.tried or replace(request, samples=few)
        features = replace(tried, engine=request.engine, cut=request.cut)
        try:
            self.transport.profile(ProfileRequest(features=features, accuracy=self.engine.accuracy))
        except EngineNotReady:
            self.unfit.add(request.cut)
            return False
        return True


class RowStream:
    """The rows of one request. ``close`` may be called from another thread and ends a read that is under way."""

    def __init__(self, fetcher: Fetcher, samples: Samples, route: Route, view: View | None, *, decodes: bool) -> None:
        self._fetcher = fetcher
        self._samples = samples
        self._route = route
        self._view = view
        self._request = fetcher.request(samples, route, view)
        self._batches: Iterator[FeatureBatch] = fetcher.transport.features(self._request)
        self._begun = False
        self._stays_encoded = route.cut == 0 and not decodes

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> FeatureBatch:
        if self._stays_encoded:
            batch = self._next()
            # A view would keep the whole answer in memory for as long as one sample waits.
            return replace(batch, encoded=[bytes(one) for one in batch.encoded])
        side = self._fetcher.trainer_side
        parts = [self._next()]
        wanted = side.wants(self._route.cut)
        while sum(map(len, parts)) < wanted:
            try:
                parts.append(self._next())
            except StopIteration:
                break
        batch = parts[0] if len(parts) == 1 else joined(parts)
        return side.finish(batch, self._route.cut, self._samples, self._fetcher.preprocess, self._view)

    def close(self) -> None:
        """Abandon the rest of the answer."""
        close = getattr(self._batches, "close", None)
        if close is not None:
            close()

    def _next(self) -> FeatureBatch:
        """The next rows as they come, unpacked."""
        try:
            batch = next(self._batches)
        except UnknownPrefix:
            batch = self._uploaded()
        except EngineNotReady:
            batch = self._prepared()
        self._begun = True
        self._fetcher.arrived(self._route, batch)
        return unpack(batch)

    def _uploaded(self) -> FeatureBatch:
        """The node lost the prefix, as after a restart: upload it and ask once more."""
        shipment = self._fetcher.shipment
        if shipment is None or self._begun:
            raise UnknownPrefix("the node asks for a prefix that this job does not have")
        self._begun = True
        self._fetcher.transport.put_prefix(shipment.digest, shipment.artifact)
        self._batches = self._fetcher.transport.features(self._request)
        try:
            return next(self._batches)
        except EngineNotReady:
            return self._prepared()
        except UnknownPrefix as error:  # others had its place before this request came
            raise Overloaded("the node has no room for the prefix for long", retry_after_s=_AGAIN_S) from error

    def _prepared(self) -> FeatureBatch:
        """The node has not made the engine ready, as for a cut that no plan wanted before: have it do so, ask again."""
        if not self._fetcher.prepare(self._request):
            self._request = replace(self._request, engine=REFERENCE)
        self._batches = self._fetcher.transport.features(self._request)
        return next(self._batches)


def joined(parts: Sequence[FeatureBatch]) -> FeatureBatch:
    """Batches of one answer as one."""
    tensors = zip(*(part.tensors for part in parts), strict=True)
    return FeatureBatch(
        ids=np.concatenate([part.ids for part in parts]),
        tensors=tuple(np.concatenate(column) for column in tensors),
        encoded=[one for part in parts for one in part.encoded],
        skipped=tuple(one for part in parts for one in part.skipped),
    )
