"""A job: one network's frozen part on a node, its head here, and loaders over the features between them."""

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from frostline.cache import FeatureCache
from frostline.config import LoaderSettings
from frostline.core import Cut, Skipped, View
from frostline.datasets import Dataset
from frostline.errors import SettingError, TooManySkipped
from frostline.events import BatchTaken, EpochFinished, Event, Observer, RequestRetried, SampleSkipped
from frostline.loaders.fetch import Fetcher
from frostline.loaders.loader import Loader, Source
from frostline.models import Head
from frostline.planning import Plan, explain
from frostline.preprocess import Preprocess

__all__ = ("Job", "JobStatistics")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatistics:
    """What a job did so far.

    Attributes:
        wire_bytes: store side to trainer, bodies and headers, measuring included.
        requests: exchanges with the node.
        retries: requests made again.
        samples: handed to the training loop.
        from_cache: of these, without crossing the network.
        stall_s: seconds in which the loop waited for a batch.
        loading_s: seconds of all passes over loaders, training included.
        skipped: samples that could not be read.
    """

    wire_bytes: int
    requests: int
    retries: int
    samples: int
    from_cache: int
    stall_s: float
    loading_s: float
    skipped: tuple[Skipped, ...]


class Job:
    """Features for a training loop; made by ``offload``. Use it as a context manager, or call ``close``.

    Attributes:
        head: the trainable rest of the network, on the user's own parameters.
        plan: which cut is used and what the others would cost; None for a plain loader.
        frost_line: where the head takes over; the pixels where there is no model.
        where: pairs of a part of the work and where it runs.
    """

    def __init__(
        self,
        *,
        data: Dataset,
        fetcher: Fetcher,
        frost_line: Cut,
        head: Head | None,
        plan: Plan | None,
        settings: LoaderSettings,
        observe: Observer,
        where: Sequence[tuple[str, str]],
        close: Callable[[], None],
    ) -> None:
        self._data = data
        self._fetcher = fetcher
        self.frost_line = frost_line
        self._head = head
        self.plan = plan
        self._settings = settings
        self._ledger = _Ledger(observe, most_skipped=math.ceil(settings.skip_allowance * len(data)))
        self.where = tuple(where)
        self._close = close
        self._caches: dict[str, FeatureCache] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def head(self) -> Head:
        """The trainable rest of the network.

        Raises:
            SettingError: The job has no model; its batches are the preprocessed pixels.
        """
        if self._head is None:
            raise SettingError("this job has no head: offload was called without a model")
        return self._head

    def loader(
        self,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        epoch: int = 0,
        data: Dataset | None = None,
        preprocess: Preprocess | None = None,
        drop_last: bool = False,
    ) -> Loader:
        """The batches of one epoch.

        Args:
            batch_size: rows of every batch but perhaps the last.
            shuffle: draw the order from the seed; else it is the manifest's.
            seed: of the order and of random preprocessing.
            epoch: each epoch has its own order.
            data: a part of the job's data set, such as one side of ``Dataset.split``; all of it by default.
            preprocess: another one than the job's that gives the same shape, such as one without random steps for
                the held-out samples.
            drop_last: leave out a last batch with fewer rows.

        Raises:
            SettingError: a figure that makes no sense, or data from another place than the job's.
        """
        data = self._data if data is None else data
        if (data.url, data.listing) != (self._data.url, self._data.listing):
            raise SettingError(
                f"this job reads {self._data.url} as it was listed when the job was made, not {data.url} as it is "
                "listed now; make another job for other data"
            )
        fetcher = self._fetcher if preprocess is None else replace(self._fetcher, preprocess=preprocess)
        view = View(seed=seed, epoch=epoch) if fetcher.preprocess.is_random else None
        source = Source(
            fetch=lambda samples: fetcher.fetch(samples, view),
            window_bytes_per_sample=max(fetcher.cut.bytes_per_sample, self.frost_line.bytes_per_sample),
            cache=self._cache(fetcher.preprocess),
            unreadable=self._ledger.unreadable,
            settings=self._settings,
            observe=self._ledger,
        )
        return Loader(source, data, batch_size=batch_size, shuffle=shuffle, seed=seed, epoch=epoch, drop_last=drop_last)

    def explain(self) -> "Explanation":
        """What ran where and why, predicted and measured; ``print`` it."""
        return Explanation(plan=self.plan, statistics=self.statistics(), where=self.where)

    def statistics(self) -> JobStatistics:
        """What the job did so far."""
        wire = self._fetcher.transport.statistics()
        return replace(self._ledger.statistics(), wire_bytes=wire.bytes_received, requests=wire.requests)

    def stages(self) -> dict[str, float]:
        """Seconds by stage so far, summed over threads; stages overlap, and a node's are those of all its jobs.

        Raises:
            Unavailable: The node does not answer.
        """
        done = self._fetcher.transport.node_statistics().get("totals", {})
        decode_s, compute_s = self._fetcher.trainer_side.seconds
        return {
            "store: read": done.get("read_s", 0.0),
            "store: decode": done.get("decode_s", 0.0),
            "store: frozen layers": done.get("compute_s", 0.0),
            "trainer: decode": decode_s,
            "trainer: frozen layers": compute_s,
        }

    def close(self) -> None:
        """Close the connections, and the embedded node where there is one. Calling it again does nothing."""
        self._close()

    def _cache(self, preprocess: Preprocess) -> FeatureCache | None:
        """Features are the same in every epoch unless the preprocessing is random."""
        if preprocess.is_random or self._settings.cache_bytes == 0:
            return None
        if preprocess.digest not in self._caches:
            shipment = self._fetcher.shipment
            digest = "" if shipment is None else shipment.digest
            scope = (digest, self.frost_line.number, preprocess.digest, ",".join(self.frost_line.dtypes))
            # What the caches may take together stays within the setting.
            left = self._settings.cache_bytes - sum(one.statistics().bytes for one in self._caches.values())
            self._caches[preprocess.digest] = FeatureCache(scope, max(0, left))
        return self._caches[preprocess.digest]


class _Ledger:
    """Reads the events of a job's loaders, keeps count, and passes them on. Safe for several threads."""

    def __init__(self, observe: Observer, *, most_skipped: int) -> None:
        self._observe = observe
        self._most_skipped = most_skipped
        self._lock = threading.Lock()
        self._skipped: dict[int, Skipped] = {}
        self._retries = 0
        self._samples = 0
        self._from_cache = 0
        self._stall_s = 0.0
        self._loading_s = 0.0

    def __call__(self, event: Event) -> None:
        """Raises ``TooManySkipped`` when more samples are unreadable than allowed."""
        with self._lock:
            self._count(event)
            too_many = len(self._skipped) > self._most_skipped
        self._observe(event)
        if too_many and isinstance(event, SampleSkipped):
            raise TooManySkipped(
                f"{len(self._skipped)} samples are unreadable and the job allows {self._most_skipped}; the last is "
                f"{event.object} ({event.reason}); mend the data or raise skip_allowance"
            )

    def unreadable(self) -> npt.NDArray[np.int64]:
        with self._lock:
            return np.fromiter(self._skipped, np.int64, len(self._skipped))

    def statistics(self) -> JobStatistics:
        with self._lock:
            return JobStatistics(
                wire_bytes=0,
                requests=0,
                retries=self._retries,
                samples=self._samples,
                from_cache=self._from_cache,
                stall_s=self._stall_s,
                loading_s=self._loading_s,
                skipped=tuple(self._skipped.values()),
            )

    def _count(self, event: Event) -> None:
        match event:
            case SampleSkipped():
                self._skipped[event.id] = Skipped(id=event.id, object=event.object, reason=event.reason)
            case RequestRetried():
                self._retries += 1
            case BatchTaken():
                self._samples += event.samples
                self._from_cache += event.from_cache
                self._stall_s += event.stall_s
            case EpochFinished():
                self._loading_s += event.seconds
            case _:
                pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What ran where and why; its text is for people, ``to_json`` for programs."""

    plan: Plan | None
    statistics: JobStatistics
    where: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        lines = [explain(self.plan)] if self.plan is not None else ["no model: encoded samples, decoded here"]
        lines += [f"{part}: {where}" for part, where in self.where]
        lines.append(self._measured())
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """A dictionary of plain values."""
        return {
            "plan": None if self.plan is None else self.plan.to_json(),
            "where": dict(self.where),
            "measured": {
                "samples": self.statistics.samples,
                "from_cache": self.statistics.from_cache,
                "wire_bytes": self.statistics.wire_bytes,
                "loading_s": self.statistics.loading_s,
                "stall_s": self.statistics.stall_s,
            },
        }

    def _measured(self) -> str:
        done = self.statistics
        if not done.samples or not done.loading_s:
            return "measured: nothing yet"
        return (
            f"measured: {done.samples} samples, {done.from_cache} of them from the cache, "
            f"{done.samples / done.loading_s:.0f} samples/s, waiting {done.stall_s / done.loading_s:.0%} of the time, "
            f"{done.wire_bytes / 1e6:.2f} MB received"
        )
