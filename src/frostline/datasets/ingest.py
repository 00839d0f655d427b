"""Makes a ready form of a data set: decodes each image once, object by object, so that it can be taken up again."""

import hashlib
import json
import math
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from frostline.core import Samples, Skipped
from frostline.datasets.changes import refusing
from frostline.datasets.dataset import Dataset
from frostline.datasets.in_order import InOrder, Workers
from frostline.datasets.metadata_left import Metadata, say_what_is_left
from frostline.datasets.ready import FOLDERS, LAYOUT, TABLE, Layout, Part, object_name, part_name, table_file
from frostline.errors import DataError, SampleError, SettingError, TooManySkipped
from frostline.events import Counted, Observer, PhaseStarted, SampleSkipped
from frostline.preprocess import Applied
from frostline.preprocess.apply import decode_applied
from frostline.preprocess.records import pack_into, record_bytes
from frostline.stores.faces import Buffer, ObjectStore
from frostline.stores.folder import FolderStore
from frostline.stores.objects import open_store

__all__ = ("OBJECT_BYTES", "Ingested", "ingest")

OBJECT_BYTES = 64 << 20
"""Large enough that a disk or a store reads it at its full speed, small enough that a kill costs seconds."""

_READ_BACK_BYTES = 8 << 20
# Images read and decoded at once: more than cores, so that a store some milliseconds away is hidden.
_THREADS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Ingested:
    """What making a ready form did.

    Attributes:
        url: where it is.
        digest: of the form.
        samples: in it.
        objects: that hold them.
        nbytes: of these objects.
        made: objects that were made now; the others were there from before.
        seconds: that it took now.
        skipped: samples that could not be read; they have no record.
    """

    url: str
    digest: str
    samples: int
    objects: int
    nbytes: int
    made: int
    seconds: float
    skipped: tuple[Skipped, ...]

    def to_json(self) -> dict[str, Any]:
        """A dictionary of plain values."""
        return {**asdict(self), "skipped": [asdict(one) for one in self.skipped]}


def ingest(
    source: Dataset,
    destination: str | Path,
    applied: Applied,
    *,
    object_bytes: int = OBJECT_BYTES,
    workers: int = _THREADS,
    skip_allowance: float = 0.01,
    verify: bool = False,
    observe: Observer,
) -> Ingested:
    """Keep the pixels of a data set's images, as far as they are the same in every epoch.

    Every object appears whole, is read back and compared by its SHA-256, and is never written twice; what was made
    before a run was broken off is taken up, and a form that is whole is left as it is. The data set can be used when
    the last file, its table, is there. Metadata columns go along, but for those of lists and the like, which are named
    before it begins; values that changed since an object was made are written to the tables alone. Memory is that of
    two objects, of the requests under way and of the images in work.

    Args:
        source: images.
        destination: URL or folder; empty, or with a part of the same form.
        applied: what to do to each image.
        object_bytes: of one object.
        workers: images read and decoded at once.
        skip_allowance: share of the images that may be unreadable.
        verify: read the objects that are there already, and make those again whose SHA-256 is another one.
        observe: told what happens.

    Raises:
        SettingError: the source has masks or is a ready form itself, or the destination holds something else.
        DataChanged: an image has changed since it was listed, and the source refuses that.
        TooManySkipped: more images were unreadable than allowed.
        DataError: none of them can be read, an object came back otherwise than it was written, or another process is
            making a form at the same place.
        OutOfSpace: the destination is full; run it again when there is room.
        StoreError: a store failed; run it again.
    """
    source = source.refreshed()
    source.require_no_targets()
    observe = refusing(source.changed, observe)
    if source.applied is not None:
        raise SettingError(f"{source.url} is a ready form already: make others from the images")
    metadata = Metadata(source)
    layout = Layout.of(source.digest, len(source), applied, object_bytes=object_bytes, columns=tuple(metadata.kinds))
    say_what_is_left(source, observe, metadata.nested)
    with ExitStack() as stack:
        store = _destination(destination, stack)
        maker = _Maker(source, metadata, store, layout, workers, stack, verify=verify)
        return _ingest(source, maker, store, layout, math.ceil(skip_allowance * len(source)), observe)


def _ingest(
    source: Dataset, maker: "_Maker", store: ObjectStore, layout: Layout, most_skipped: int, observe: Observer
) -> Ingested:
    started = time.perf_counter()
    there = {entry.object: entry.size for entry in store.list()}
    _claim(store, layout, there)
    observe(PhaseStarted(name="making the ready form"))
    parts, made = _parts(maker, there, most_skipped, observe)
    digest, table = table_file(layout, parts, source.classes)
    samples = sum(len(part.samples) for part in parts)
    if not samples:
        raise DataError(f"none of the {len(source)} samples of {source.url} can be read")
    if TABLE not in there or bytes(store.read(TABLE, 0, there[TABLE])) != table:
        store.write(TABLE, table)
    return Ingested(
        url=store.url,
        digest=digest,
        samples=samples,
        objects=layout.objects,
        nbytes=sum(map(layout.size, range(layout.objects))),
        made=made,
        seconds=time.perf_counter() - started,
        skipped=tuple(one for part in parts for one in part.skipped),
    )


def _destination(destination: str | Path, stack: ExitStack) -> ObjectStore:
    store = open_store(str(destination))
    if isinstance(store, FolderStore):
        store.create()
        stack.enter_context(store.alone(*FOLDERS))
    return store


def _claim(store: ObjectStore, layout: Layout, there: dict[str, int]) -> None:
    """Write down what is being made, or make sure that it is what was written down."""
    if LAYOUT not in there:
        other = next((name for name in there if not name.startswith(".")), None)
        if other is not None:
            raise SettingError(f"{store.url} is not empty, it holds {other}: choose another place for the ready form")
        store.write(LAYOUT, json.dumps(layout.to_json(), indent=1).encode())
        return
    if Layout.from_json(store.read(LAYOUT, 0, there[LAYOUT])) != layout:
        raise SettingError(
            f"{store.url} holds a ready form of other data, or one made otherwise: choose another place for this one"
        )


def _parts(maker: "_Maker", there: dict[str, int], most_skipped: int, observe: Observer) -> tuple[list[Part], int]:
    """Every part in order, and how many of them were made now."""
    parts: list[Part] = []
    written: list[Future[None]] = []
    made = skipped = 0
    for number in range(maker.layout.objects):
        part = maker.found(number, there)
        if part is None:
            part, contents = maker.made(number)
            made += 1
            for one in part.skipped:
                observe(SampleSkipped(id=one.id, object=one.object, reason=one.reason, changed=one.changed))
            # One object is written while the next one is made, and no third one takes memory.
            while written:
                written.pop().result()
            written.append(maker.write(part, contents))
        parts.append(part)
        skipped += len(part.skipped)
        if skipped > most_skipped:
            raise TooManySkipped(
                f"{skipped} of {maker.layout.samples} samples cannot be read, and at most {most_skipped} may be left "
                "out: see which, or allow more with --skip-allowance"
            )
        observe(Counted(done=maker.layout.rows(number).stop, total=maker.layout.samples))
    for one_written in written:
        one_written.result()
    return parts, made


class _Maker:
    """Makes the objects of one ready form; ``stack`` ends its threads."""

    def __init__(
        self,
        source: Dataset,
        metadata: Metadata,
        store: ObjectStore,
        layout: Layout,
        workers: int,
        stack: ExitStack,
        *,
        verify: bool,
    ) -> None:
        self.layout = layout
        self._verify = verify
        self._metadata = metadata
        self._samples = source.samples
        self._names = source.names
        self._store = store
        self._writer = ThreadPoolExecutor(1, "frostline-write")
        stack.callback(self._writer.shutdown)
        reader = InOrder(source.url, source.reading, most=workers, roots=source.roots)
        self._workers: Workers[Skipped | None] = Workers(reader, workers, stack)

    def found(self, number: int, there: dict[str, int]) -> Part | None:
        """The part of an object that is there already."""
        name = part_name(number)
        if name not in there or there.get(object_name(number)) != self.layout.size(number):
            return None
        part = Part.from_file(self._store.read(name, 0, there[name]), self.layout, number)
        if part is None:
            return None
        if self._verify and self._sha256(object_name(number), self.layout.size(number)) != part.sha256:
            return None
        return self._renewed(part) if self.layout.columns else part

    def _renewed(self, part: Part) -> Part:
        """The part with the metadata that the source has now: pixels stay, and only its table is written again."""
        rows = self.layout.rows(part.number)
        ids = self._samples.take(np.arange(rows.start, rows.stop, dtype=np.int64)).ids
        kept = pa.array(np.flatnonzero(np.isin(ids, part.samples.ids)))
        columns = self._metadata.table(rows.start, rows.stop)
        renewed = replace(part, about={name: column.take(kept) for name, column in columns.items()})
        if renewed.to_file() != part.to_file():
            self._store.write(part_name(part.number), renewed.to_file())
        return renewed

    def made(self, number: int) -> tuple[Part, memoryview]:
        """An object and its part, not yet written."""
        contents = memoryview(bytearray(self.layout.size(number)))
        rows = self.layout.rows(number)
        source = self._samples.take(np.arange(rows.start, rows.stop, dtype=np.int64))
        names = self._names[rows.start : rows.stop]
        outcomes = self._workers.each(source, names, partial(self._record, source, names, rows, contents))
        part = Part.made(
            self.layout,
            number,
            sha256=hashlib.sha256(contents).hexdigest(),
            source=source,
            names=names,
            skipped=tuple(one for one in outcomes if one is not None),
            about=self._metadata.table(rows.start, rows.stop),
        )
        return part, contents

    def write(self, part: Part, contents: memoryview) -> Future[None]:
        """Put an object in its place, and then its part: where that is, the object is whole."""
        return self._writer.submit(self._written, part, contents)

    def _written(self, part: Part, contents: memoryview) -> None:
        name = object_name(part.number)
        self._store.write(name, contents)
        if self._sha256(name, len(contents)) != part.sha256:
            raise DataError(f"{name} came back from {self._store.url} otherwise than it was written: run it again")
        if isinstance(self._store, FolderStore):
            self._store.seal(name)
        self._store.write(part_name(part.number), part.to_file())

    def _sha256(self, name: str, nbytes: int) -> str:
        """Of an object as it is in its store."""
        digest = hashlib.sha256()
        for offset in range(0, nbytes, _READ_BACK_BYTES):
            digest.update(self._store.read(name, offset, min(_READ_BACK_BYTES, nbytes - offset)))
        return digest.hexdigest()

    def _record(
        self,
        samples: Samples,
        names: Sequence[str],
        rows: range,
        contents: memoryview,
        place: int,
        encoded: Buffer | Skipped,
    ) -> Skipped | None:
        if isinstance(encoded, Skipped):
            return encoded
        offset = self.layout.offset(rows[place])
        record = contents[offset : offset + record_bytes(self.layout.applied.stored)]
        try:
            pack_into(record, decode_applied(self.layout.applied, encoded))
        except SampleError as error:
            return Skipped(id=int(samples.ids[place]), object=names[place], reason=str(error))
        return None
