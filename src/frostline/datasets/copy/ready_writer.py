"""Writes the objects of a ready format: images are read and decoded, and their records are written and read back."""

import hashlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import numpy as np

from frostline.core import Samples, Skipped
from frostline.datasets.access import reader_of
from frostline.datasets.copy.metadata import Metadata
from frostline.datasets.copy.parts import CopyPart
from frostline.datasets.dataset import Dataset
from frostline.datasets.ready.layout import Layout, ReadyPart, masks_beside, object_name, part_name
from frostline.datasets.sequential import Workers, masks_of
from frostline.errors import DataError, SampleError
from frostline.preprocess import Preprocess
from frostline.preprocess.apply import decode_applied
from frostline.preprocess.masks import kept_mask
from frostline.preprocess.records import pack_into, record_bytes
from frostline.stores.base.protocols import Buffer, ObjectStore
from frostline.stores.objects.local import FolderStore

__all__ = ("ReadyPlan", "sha256_in")

_READ_BACK_BYTES = 8 << 20


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReadyPlan:
    """How the objects of a ready format are made.

    Attributes:
        source: images, or a ready format.
        rest: steps that are left to do of an image of the source.
        store: where the objects go.
        layout: places of the records.
        workers: images read and decoded at once.
    """

    source: Dataset
    rest: Preprocess
    store: ObjectStore
    layout: Layout
    workers: int

    def open(self, stack: ExitStack) -> "_ReadyWriter":
        """See ``parts.CopyPlan.open``."""
        return _ReadyWriter(self, stack)


def sha256_in(store: ObjectStore, name: str, nbytes: int) -> str:
    """The SHA-256 of an object as its store returns it."""
    digest = hashlib.sha256()
    for offset in range(0, nbytes, _READ_BACK_BYTES):
        digest.update(store.read(name, offset, min(_READ_BACK_BYTES, nbytes - offset)))
    return digest.hexdigest()


class _ReadyWriter:
    """Makes the objects of one ready format; ``stack`` ends its threads."""

    def __init__(self, plan: ReadyPlan, stack: ExitStack) -> None:
        self._layout = plan.layout
        self._rest = plan.rest
        self._metadata = Metadata(plan.source)
        self._samples = plan.source.samples
        self._names = plan.source.names
        self._store = plan.store
        self._writer = ThreadPoolExecutor(1, "frostline-write")
        stack.callback(self._writer.shutdown)
        self._reader = reader_of(plan.source, maximum=plan.workers)
        self._workers: Workers[Skipped | bytes] = Workers(self._reader, plan.workers, stack)

    def look(self, part: CopyPart) -> None:
        """A part that comes here is not there, or not whole: all of it is written."""

    def make(self, part: CopyPart, before: None) -> Future[ReadyPart]:  # noqa: ARG002
        """One object is written while the next one is made."""
        return self._writer.submit(self._written, *self._made(part.number))

    def _made(self, number: int) -> tuple[ReadyPart, memoryview, bytes]:
        """A part, its object and that of its masks, not yet written."""
        contents = memoryview(bytearray(self._layout.size(number)))
        rows = self._layout.rows(number)
        source = self._samples.take(np.arange(rows.start, rows.stop, dtype=np.int64))
        names = self._names[rows.start : rows.stop]
        found = masks_of(source, self._reader)
        outcomes = self._workers.each(source, names, partial(self._record, source, names, rows, contents, found))
        masks = [outcome for outcome in outcomes if not isinstance(outcome, Skipped)]
        part = ReadyPart.made(
            self._layout,
            number,
            sha256=hashlib.sha256(contents).hexdigest(),
            source=source,
            names=names,
            skipped=tuple(outcome for outcome in outcomes if isinstance(outcome, Skipped)),
            about=self._metadata.table(rows.start, rows.stop),
            masks=masks if self._layout.has_masks else None,
        )
        return part, contents, b"".join(masks)

    def _written(self, part: ReadyPart, contents: Buffer, masks: bytes) -> ReadyPart:
        """Put a part's objects in their places, and then the part: where that is, they are whole."""
        name = object_name(part.number)
        self._write(name, contents, part.sha256)
        if masks:
            self._write(masks_beside(name), masks, part.masks_sha256)
        self._store.write(part_name(part.number), part.to_file())
        return part

    def _write(self, name: str, contents: Buffer, sha256: str) -> None:
        self._store.write(name, contents)
        if sha256_in(self._store, name, len(contents)) != sha256:
            raise DataError(f"{name} came back from {self._store.url} otherwise than it was written: run it again")
        if isinstance(self._store, FolderStore):
            self._store.seal(name)

    def _record(
        self,
        samples: Samples,
        names: Sequence[str],
        rows: range,
        contents: memoryview,
        masks: Mapping[int, Buffer | Skipped],
        place: int,
        encoded: Buffer | Skipped,
    ) -> Skipped | bytes:
        """Write a sample's record into its place; its mask, empty where it has none, or why there is neither."""
        mask = masks.get(place, b"")
        if isinstance(encoded, Skipped):
            return encoded
        if isinstance(mask, Skipped):
            return mask
        offset = self._layout.offset(rows[place])
        record = contents[offset : offset + record_bytes(self._layout.applied.stored)]
        try:
            kept = self._mask(samples, place, mask)
            pack_into(record, decode_applied(self._layout.applied, encoded, rest=self._rest))
        except SampleError as error:
            return Skipped(id=int(samples.ids[place]), object=names[place], reason=str(error))
        return kept

    def _mask(self, samples: Samples, place: int, encoded: Buffer) -> bytes:
        if samples.targets is None or not len(encoded):
            return b""
        size = (int(samples.targets.widths[place]), int(samples.targets.heights[place]))
        return kept_mask(self._rest, encoded, size=size)
