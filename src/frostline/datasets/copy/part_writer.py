"""Writes the parts of a copy in another format: samples are read, packed, written and read back."""

import hashlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from frostline.core import Samples, Skipped
from frostline.datasets.copy.checkpoint import CopiedObject, CopiedPart
from frostline.datasets.copy.folder_names import FolderNames
from frostline.datasets.copy.layout import Loose, OutputObject, packer_named
from frostline.datasets.copy.metadata import metadata_in
from frostline.datasets.copy.parts import CopyPart, finished
from frostline.datasets.copy.scaling import Pictures, Scaling
from frostline.datasets.dataset import Dataset
from frostline.errors import DataError
from frostline.stores.base.protocols import ObjectStore

__all__ = ("RepackPlan", "metadata_digest", "metadata_values")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RepackPlan:
    """How the parts of a copy are written.

    Attributes:
        source: samples to copy.
        store: where they go.
        format: one of ``layout.PACKERS``.
        side: pixels of the shorter side to which images are scaled down; None leaves their bytes as they are.
        workers: samples read, and objects written, at once.
        names: names of the objects in class folders; None where the samples' ids name them.
    """

    source: Dataset
    store: ObjectStore
    format: str
    side: int | None
    workers: int
    names: FolderNames | None

    def open(self, stack: ExitStack) -> "_PartWriter":
        """See ``parts.CopyPlan.open``."""
        return _PartWriter(self, stack)

    def about(self) -> Mapping[str, pa.ChunkedArray]:
        """The columns of metadata for which the format has a place."""
        keeps = packer_named(self.format).keeps_metadata
        return {name: self.source.column(name) for name in (metadata_in(self.source.columns) if keeps else ())}


class _PartWriter:
    """Writes parts; ``stack`` ends its threads."""

    def __init__(self, plan: RepackPlan, stack: ExitStack) -> None:
        self._source = plan.source
        self._store = plan.store
        self._format = plan.format
        self._names = plan.names
        self._about = plan.about()
        self._scaling = Scaling(plan.source, plan.side, plan.workers, stack)
        self._writers = ThreadPoolExecutor(plan.workers, "frostline-write")
        stack.callback(self._writers.shutdown, cancel_futures=True)

    def look(self, part: CopyPart) -> None:
        """A part that comes here is not there, or not whole: all of it is written."""

    def make(self, part: CopyPart, before: None) -> Future[CopiedPart]:  # noqa: ARG002
        rows, about = part.rows, metadata_values(self._about, part.rows)
        samples = self._source.samples.take(np.arange(rows.start, rows.stop, dtype=np.int64))
        names = self._source.names[rows.start : rows.stop]
        read = self._scaling.read(samples, names)
        kept = [(row, found) for row, found in enumerate(read) if isinstance(found, Pictures)]
        objects = [""] * len(rows) if self._names is None else self._names.objects(rows.start, rows.stop)
        loose = [self._loose(samples, names, about, objects, row, pictures) for row, pictures in kept]
        packed = packer_named(self._format).pack(part.number, loose, self._source.classes)
        written: list[Future[tuple[str, CopiedObject]]] = [self._writers.submit(self._write, obj) for obj in packed]
        copied = CopiedPart(
            number=part.number,
            samples=len(loose),
            objects=dict(future.result() for future in written),
            skipped=tuple(found for found in read if isinstance(found, Skipped)),
            about=metadata_digest(about),
        )
        return finished(copied)

    def _loose(
        self,
        samples: Samples,
        names: Sequence[str],
        about: dict[str, list[Any]],
        objects: Sequence[str],
        row: int,
        found: Pictures,
    ) -> Loose:
        return Loose(
            id=int(samples.ids[row]),
            name=names[row],
            label=int(samples.labels[row]),
            about={name: values[row] for name, values in about.items()},
            encoded=found.image,
            is_remade=self._source.manifest.applied is not None,
            object=objects[row],
            mask=None if samples.targets is None else found.mask or b"",
        )

    def _write(self, packed: OutputObject) -> tuple[str, CopiedObject]:
        """Write an object and read it back."""
        name, data = packed
        sha256 = hashlib.sha256(data).hexdigest()
        self._store.write(name, data)
        found, version = self._store.read_version(name, 0, len(data))
        if hashlib.sha256(found).hexdigest() != sha256:
            raise DataError(f"{name} came back from {self._store.url} otherwise than it was written: run it again")
        return name, CopiedObject(len(data), sha256, version)


def metadata_values(about: Mapping[str, pa.ChunkedArray], rows: range) -> dict[str, list[Any]]:
    """The values of some rows, by column."""
    return {name: column.slice(rows.start, len(rows)).to_pylist() for name, column in about.items()}


def metadata_digest(about: Mapping[str, list[Any]]) -> str:
    """Stands for the metadata of some samples, by column, in the record of their part."""
    return hashlib.blake2b(repr(about).encode(), digest_size=16).hexdigest() if about else ""
