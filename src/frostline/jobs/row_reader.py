"""Reads rows of a job's data in processes elsewhere, as the job itself would: values that travel, opened there once."""

import threading
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from frostline.core import Route, Skipped
from frostline.jobs.loader_factory import LoaderFactory
from frostline.jobs.worker_setup import WorkerSetup
from frostline.loaders.epoch.numpy_batch import Arrays, widened_batch
from frostline.loaders.epoch.ranks import ALONE

__all__ = ("RowReader", "RowsDone")


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsDone:
    """What reading some rows took.

    Attributes:
        skipped: samples that could not be read; no batch has them.
        wire_bytes: bytes that came from the nodes meanwhile.
        codec_error: the largest relative error that a codec has made so far.
    """

    skipped: tuple[Skipped, ...]
    wire_bytes: int
    codec_error: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowReader:
    """Reads parts of a job's data, in the order of their rows, wherever it is taken.

    Connections and caches of a process stay open between parts, until another reader is used there.

    Attributes:
        worker_setup: setup of the job in a process.
        shares: shares of the samples, by way, when the reader was made.
        batch_size: rows of a batch.
        key: tells readers apart.
    """

    worker_setup: WorkerSetup
    shares: Mapping[Route, float]
    batch_size: int
    key: str = field(default_factory=lambda: uuid.uuid4().hex)

    def batches(self, rows: npt.NDArray[np.int64], *, targets: bool | None = None) -> Iterator[Arrays]:
        """The batches of some rows of the job's data; bits of bfloat16 come as ``float32``.

        Args:
            rows: rows of the data, in the order that they are wanted in.
            targets: as of ``Job.loader``.
        """
        factory = _OPENED.factory(self)
        data = factory.data.take(rows)
        for batch in factory.arrays(self.batch_size, data=data, ranks=ALONE, targets=targets):
            yield widened_batch(batch)

    def done(self, rows: npt.NDArray[np.int64], wire_bytes: int) -> RowsDone:
        """What reading some rows took, in the process that read them.

        Args:
            rows: those rows.
            wire_bytes: bytes that had come before, as ``received_bytes`` says.
        """
        factory = _OPENED.factory(self)
        statistics = factory.collector.statistics()
        ids = set(factory.data.samples.ids_at(rows).tolist())
        return RowsDone(
            skipped=tuple(sample for sample in statistics.skipped if sample.id in ids),
            wire_bytes=self.received_bytes() - wire_bytes,
            codec_error=statistics.codec_error,
        )

    def received_bytes(self) -> int:
        """Bytes that have come from the nodes to this process so far."""
        return _OPENED.factory(self).fetcher.transport.statistics().bytes_received


class _Opened:
    """The reader that is open in this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._key = ""
        self._factory: Any = None

    def factory(self, reader: RowReader) -> LoaderFactory:
        with self._lock:
            if self._key != reader.key:
                # Logs of what is skipped do not reach other machines; each part says what it skipped.
                setup = replace(reader.worker_setup, skipped=None)
                self._key, self._factory = reader.key, setup.open(reader.shares, 1)
            factory: LoaderFactory = self._factory
            return factory


_OPENED = _Opened()
