"""Makes a ready format of a data set: decodes each image once, object by object, so that it can be taken up again."""

import hashlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa

from frostline.core import Samples, Skipped
from frostline.core.errors import DataError, SampleError, SettingError
from frostline.core.events import Observer, PhaseStarted
from frostline.datasets.copy.layout import Metadata, say_what_is_left
from frostline.datasets.copy.parts import CopyPart, CopyResult, PartRunner, PartTally, make_in_process, whole_parts
from frostline.datasets.dataset import Dataset, reader_of, refresh_locally, require_one_part
from frostline.datasets.formats.ready import (
    FOLDERS,
    LAYOUT,
    TABLE,
    Layout,
    ReadyPart,
    masks_beside,
    object_name,
    part_name,
    table_file,
)
from frostline.datasets.manifest import refusing_observer
from frostline.datasets.reading import Workers, masks_of
from frostline.preprocess import Applied, Preprocess
from frostline.preprocess.apply import decode_applied, kept_mask, pack_into, record_bytes, steps_left
from frostline.stores.local import FolderStore
from frostline.stores.open import open_store
from frostline.stores.protocols import Buffer, ObjectStore

__all__ = (
    "OBJECT_BYTES",
    "Ingested",
    "ReadyPlan",
    "ingest",
)


_READ_BACK_BYTES = 8 << 20


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReadyPlan:
    """How the objects of a ready format are made.

    Attributes:
        source: images, or a ready format.
        rest: steps that are left to do of an image of the source.
        store: the place where the objects go.
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


def _sha256_in(store: ObjectStore, name: str, nbytes: int) -> str:
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
        outcomes = self._workers.map(source, names, partial(self._record, source, names, rows, contents, found))
        masks = [outcome for outcome in outcomes if not isinstance(outcome, Skipped)]
        part = ReadyPart.from_samples(
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
        if _sha256_in(self._store, name, len(contents)) != sha256:
            raise DataError(f"{name} came back from {self._store.url} otherwise than it was written: run it again")
        if isinstance(self._store, FolderStore):
            self._store.make_read_only(name)

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


OBJECT_BYTES = 64 << 20
"""Large enough that a disk or a store reads it at its full speed, small enough that a kill costs seconds."""

# Images read and decoded at once: more than cores, so that a store some milliseconds away is hidden.
_THREADS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Ingested(CopyResult):
    """The result of making a ready format; ``made`` counts objects.

    Attributes:
        digest: digest of the ready format.
        objects: number of objects that hold the samples.
    """

    digest: str
    objects: int


def ingest(
    source: Dataset,
    destination: str | Path,
    applied: Applied,
    *,
    object_bytes: int = OBJECT_BYTES,
    workers: int = _THREADS,
    max_skipped_fraction: float = 0.01,
    verify: bool = False,
    on_event: Observer,
    runner: PartRunner = make_in_process,
) -> Ingested:
    """Keep the pixels of a data set's images, as far as they are the same in every epoch.

    Every object appears whole, is read back and compared by its SHA-256, and is never written twice; what was made
    before a run was broken off is taken up, and a format that is whole is left as it is. The data set can be used when
    the last file, its table, is there. Metadata columns go along, but for those of lists and the like, which are named
    before it begins; values that changed since an object was made are written to the tables alone. Masks go the way of
    their images, of the pixels the nearest. Memory is that of two objects, of the requests under way and of the images
    in work.

    Args:
        source: images; or a ready format, of which the same is kept, or what its pixels give, as it would be of
            the images.
        destination: URL or folder; empty, or with a part of the same format.
        applied: preprocessing to apply to each image.
        object_bytes: size of one object in bytes.
        workers: images read and decoded at once.
        max_skipped_fraction: share of the images that may be unreadable.
        verify: read the objects that are there already, and make those again whose SHA-256 is another one.
        on_event: function that is called with each event.
        runner: runner that makes the missing objects.

    Raises:
        SettingError: the source is a ready format that was made with other steps, or something else lies at the
            destination.
        DataChanged: an image has changed since it was listed, and the source refuses that.
        TooManySkipped: more images were unreadable than allowed.
        DataError: No sample can be read, an object's bytes differ from those that were written, or another process is
            making a format at the same place.
        OutOfSpace: the destination is full; run it again when there is space.
        StoreError: a store failed; run it again.
    """
    require_one_part(source)
    source = refresh_locally(source)
    on_event = refusing_observer(source.source.on_change, on_event)
    if (kept := source.manifest.applied) is not None:  # its pixels were decoded then
        applied = replace(applied, decoder=kept.decoder)
    applied = applied.orient(is_turned=source.manifest.is_turned if kept is None else kept.whole.is_turned)
    metadata = Metadata(source)
    layout = Layout.of(
        source.digest,
        len(source),
        applied,
        object_bytes=object_bytes,
        columns=tuple(metadata.kinds),
        has_masks=source.has_targets,
    )
    rest = steps_left(applied.whole, source.manifest.applied, is_turned=source.manifest.is_turned)
    say_what_is_left(source, on_event, metadata.nested)
    with ExitStack() as stack:
        store = _destination(destination, stack)
        plan = ReadyPlan(source=source, rest=rest, store=store, layout=layout, workers=workers)
        return _ingest(plan, metadata, runner, math.ceil(max_skipped_fraction * len(source)), on_event, verify=verify)


def _ingest(
    plan: ReadyPlan, metadata: Metadata, runner: PartRunner, max_skipped: int, on_event: Observer, *, verify: bool
) -> Ingested:
    started = time.perf_counter()
    source, store, layout = plan.source, plan.store, plan.layout
    there = {entry.object: entry.size for entry in store.list()}
    _claim(store, layout, there)
    on_event(PhaseStarted(name="making the ready format"))
    parts, made = whole_parts(
        runner,
        plan,
        (CopyPart(number, layout.rows(number)) for number in range(layout.objects)),
        PartTally(layout.samples, max_skipped, on_event),
        found=_Before(plan, metadata, there, verify=verify).found,
    )
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
        skipped=tuple(skipped for part in parts for skipped in part.skipped),
        left_out=source.manifest.left_out,
    )


def _destination(destination: str | Path, stack: ExitStack) -> ObjectStore:
    store = open_store(str(destination))
    if isinstance(store, FolderStore):
        store.create()
        stack.enter_context(store.lock_for_writing(*FOLDERS))
    return store


def _claim(store: ObjectStore, layout: Layout, there: dict[str, int]) -> None:
    """Write down what is being made, or make sure that it is what was written down."""
    if LAYOUT not in there:
        other = next((name for name in there if not name.startswith(".")), None)
        if other is not None:
            raise SettingError(
                f"{store.url} is not empty, it holds {other}: choose another destination for the ready format"
            )
        store.write(LAYOUT, json.dumps(layout.to_json(), indent=1).encode())
        return
    if Layout.from_json(store.read(LAYOUT, 0, there[LAYOUT])) != layout:
        raise SettingError(
            f"{store.url} holds a ready format of other data, or one made otherwise: choose another destination"
        )


class _Before:
    """What is there of a ready format from before; ``there`` has the sizes of all objects."""

    def __init__(self, plan: ReadyPlan, metadata: Metadata, there: Mapping[str, int], *, verify: bool) -> None:
        self._layout = plan.layout
        self._samples = plan.source.samples
        self._store = plan.store
        self._metadata = metadata
        self._there = there
        self._verify = verify

    def found(self, asked: CopyPart) -> ReadyPart | None:
        """The part of an object that is there already."""
        number, there = asked.number, self._there
        name = part_name(number)
        if name not in there or there.get(object_name(number)) != self._layout.size(number):
            return None
        part = ReadyPart.from_file(self._store.read(name, 0, there[name]), self._layout, number)
        if part is None or not self._has_masks(part):
            return None
        if self._verify and _sha256_in(self._store, object_name(number), self._layout.size(number)) != part.sha256:
            return None
        return self._renewed(part) if self._layout.columns else part

    def _has_masks(self, part: ReadyPart) -> bool:
        """Whether the object with the masks of a part is there, if one belongs to it."""
        if not part.masks_sha256:
            return True
        assert part.masks is not None
        name, nbytes = masks_beside(object_name(part.number)), part.masks.nbytes
        return self._there.get(name) == nbytes and not (
            self._verify and _sha256_in(self._store, name, nbytes) != part.masks_sha256
        )

    def _renewed(self, part: ReadyPart) -> ReadyPart:
        """The part with the metadata that the source has now: pixels stay, and only its table is written again."""
        rows = self._layout.rows(part.number)
        ids = self._samples.take(np.arange(rows.start, rows.stop, dtype=np.int64)).ids
        kept = pa.array(np.flatnonzero(np.isin(ids, part.samples.ids)))
        columns = self._metadata.table(rows.start, rows.stop)
        renewed = replace(part, about={name: column.take(kept) for name, column in columns.items()})
        if renewed.to_file() != part.to_file():
            self._store.write(part_name(part.number), renewed.to_file())
        return renewed
