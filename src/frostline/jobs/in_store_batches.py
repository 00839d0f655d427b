"""The batches of an assignment, for a trainer beside the node: all frozen layers run there, and nothing is planned."""

from dataclasses import dataclass, replace

from frostline.cache import Scope
from frostline.core import EXACT, Route, Samples, read_as
from frostline.core.config import LoaderSettings
from frostline.core.events import Event, Observer
from frostline.jobs.in_store import Assignment
from frostline.jobs.loader_factory import CachePolicy, finite_check, keeps_all
from frostline.jobs.statistics import StatisticsCollector
from frostline.loaders.epoch_loader import ArrayLoader
from frostline.loaders.fetch import EngineChoice, Fetcher, NodeEngine, Shipment
from frostline.loaders.local_stage import LocalStage
from frostline.loaders.row_source import RowSource
from frostline.loaders.torch_loader import Loader
from frostline.ordering import Order
from frostline.prefetch import NextRequest
from frostline.preprocess import Preprocess
from frostline.transport import Transport

__all__ = ("InStoreLoaders",)


class InStoreLoaders:
    """Loaders over what crosses the frost line, made from an assignment instead of a network.

    Args:
        assignment: the samples and the head.
        transport: the transport to the node that holds the prefix.
        settings: the way to ask.
        on_event: function that is called with each event.
    """

    def __init__(
        self, assignment: Assignment, transport: Transport, settings: LoaderSettings, on_event: Observer
    ) -> None:
        self._assignment = assignment
        self._transport = transport
        self._settings = settings
        self._collector = StatisticsCollector(on_event, max_skipped=assignment.max_skipped)
        self._request_source = _Straight(
            route=Route(assignment.cut),
            rows=settings.samples_per_request,
            bytes_per_sample=assignment.bytes_per_sample,
        )
        scope = Scope(
            data=read_as(assignment.data, assignment.reading),
            prefix=assignment.prefix,
            cut=assignment.cut,
            preprocess="",
            engine=assignment.engine,
            shapes=tuple(spec.shape for spec in assignment.inputs),
            dtypes=tuple(spec.dtype for spec in assignment.inputs),
        )
        self._cache_policy = CachePolicy(scope, assignment.train, settings)

    @property
    def keeps_features(self) -> bool:
        """Whether all features stay in this process after their first epoch."""
        assignment = self._assignment
        nbytes = assignment.bytes_per_sample * (len(assignment.train) + len(assignment.held_out))
        return keeps_all(nbytes, assignment.preprocess, self._settings)

    def on_event(self, event: Event) -> None:
        """Count an event and pass it on.

        Raises:
            TooManySkipped: More samples are unreadable than allowed.
        """
        self._collector(event)

    def train(self, epoch: int) -> Loader:
        """The training batches of an epoch, in the seeded order."""
        return self._loader(self._assignment.train, self._assignment.preprocess, epoch, shuffle=True)

    def validation_batches(self, epoch: int) -> Loader:
        """The batches to score after an epoch."""
        return self._loader(self._assignment.held_out, self._assignment.plain_preprocess, epoch, shuffle=False)

    def _loader(self, samples: Samples, preprocess: Preprocess, epoch: int, *, shuffle: bool) -> Loader:
        recipe = self._assignment.recipe
        view = self._cache_policy.view(preprocess, recipe.seed, epoch)
        fetcher = self._fetcher(preprocess)
        source = RowSource(
            fetch=lambda some, route: fetcher.fetch(some, route, view),
            request_source=self._request_source,
            cache=self._cache_policy.cache(preprocess, view),
            unreadable=self._collector.unreadable_ids,
            settings=self._settings,
            on_event=self._collector,
        )
        arrays = ArrayLoader(
            lambda _: source,
            _Listed(samples),
            order=Order(size=len(samples), seed=recipe.seed, epoch=epoch, shuffle=shuffle),
            batch_size=recipe.batch_size,
        )
        return Loader(arrays)

    def _fetcher(self, preprocess: Preprocess) -> Fetcher:
        engine = NodeEngine(EXACT, EngineChoice(engine=self._assignment.engine))
        settings = replace(self._settings, allow_nonfinite=self._assignment.allow_nonfinite)
        return Fetcher(
            transport=self._transport,
            url=self._assignment.data,
            reading=self._assignment.reading,
            preprocess=preprocess,
            # The node keeps the prefix for as long as the training runs: it is never uploaded again.
            shipment=Shipment(digest=self._assignment.prefix, artifact=b""),
            local_stage=LocalStage(cuts=(), check=finite_check((), engine, self._collector, settings)),
            engine=engine,
            arrived=(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Straight:
    """A ``RequestSource`` with one way."""

    route: Route
    rows: int
    bytes_per_sample: int

    def next_request(self, left: int, _again: Route | None = None) -> NextRequest:
        return NextRequest(route=self.route, rows=min(self.rows, left), bytes_per_sample=self.bytes_per_sample)


@dataclass(frozen=True, slots=True)
class _Listed:
    samples: Samples
    digest: str = ""
