"""Copies a data set into another format or store, part by part, so that it can be taken up again after a kill."""

import hashlib
import itertools
import json
import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from frostline.core.config import cache_folder
from frostline.core.declared import parse_json
from frostline.core.errors import ObjectNotFound, SettingError
from frostline.core.events import Observer, PhaseStarted
from frostline.core.files import with_schema, without_schema
from frostline.datasets.copy.layout import (
    FolderNames,
    carried_names,
    check_side,
    divide_samples,
    metadata_in,
    packer_named,
    say_orientation,
    say_what_is_left,
)
from frostline.datasets.copy.parts import (
    CopiedObject,
    CopiedPart,
    CopyPart,
    CopyResult,
    PartRunner,
    PartTally,
    RepackPlan,
    make_in_process,
    metadata_digest,
    metadata_values,
    whole_parts,
)
from frostline.datasets.dataset import Dataset, refresh_locally, require_one_part
from frostline.datasets.formats.labels import SPLIT
from frostline.datasets.manifest import refusing_observer, rows_of_ids
from frostline.stores.local import FolderStore, is_partial
from frostline.stores.open import open_store
from frostline.stores.protocols import Entry, ObjectStore, is_other_version

__all__ = ("PART_BYTES", "Repacked", "repack")

PART_BYTES = 64 << 20
"""Large enough that a disk or a store reads it at its full speed, small enough that a kill costs seconds."""

_MAX_ROWS = 10_000
_FOLDERS = "original"
_FOLDER = ".frostline/ingest"
_CLAIM = f"{_FOLDER}/what.json"
_FORMAT = 4
_CLAIM_BYTES, _PART_RECORD_BYTES = 1 << 16, 1 << 26


@dataclass(frozen=True, slots=True, kw_only=True)
class Repacked(CopyResult):
    """The result of a copy that keeps the encoded images; ``made`` counts parts.

    Attributes:
        format: format of the copy.
        objects: number of objects that hold the samples.
        parts: number of parts of the copy.
    """

    format: str
    objects: int
    parts: int


def repack(
    source: Dataset,
    destination: str | Path,
    format: str,
    *,
    shorter_side: int | None = None,
    part_bytes: int = PART_BYTES,
    workers: int = 16,
    max_skipped_fraction: float = 0.01,
    verify: bool = False,
    on_event: Observer,
    runner: PartRunner = make_in_process,
) -> Repacked:
    """Copy a data set's samples into another format, in the same store or in another.

    Every object appears whole, is read back and compared by its SHA-256. What is there from a run that was broken off
    is taken up, and a copy that is whole is left as it is: names follow from the source's names and ids, so no sample
    comes twice. An object whose size or version is another than what was written is read, and its part is made again
    where its bytes are others, as is one whose samples have other metadata now. Memory is that of two parts, and of the
    requests under way.

    Args:
        source: samples; of a ready format, the pixels become PNGs, which decode to them.
        destination: URL or folder; empty, or with a part of the same copy.
        format: one of ``packing.PACKERS``.
        shorter_side: pixels to which images and masks are scaled down and encoded again; None leaves their bytes as
            they are.
        part_bytes: bytes of encoded images in a part, which is one tar or one Parquet file.
        workers: samples read, and objects written, at once.
        max_skipped_fraction: share of the samples that may be unreadable.
        verify: read all objects that are there already, also those whose versions say that nobody touched them.
        on_event: function that is called with each event; before it begins, which metadata columns the format has no
            place for. Of class folders the names keep the split.
        runner: runner that makes the missing parts.

    Raises:
        SettingError: the format cannot hold the source, something else lies at the destination, or the record of what
            is copied there is damaged.
        DataChanged: an image has changed since it was listed, and the source refuses that.
        TooManySkipped: more samples were unreadable than allowed.
        DataError: an object came back otherwise than it was written, or another process writes to the same place.
        OutOfSpace: the destination is full; run it again when there is space.
        StoreError: a store failed; run it again.
    """
    require_one_part(source)
    source = refresh_locally(source)
    on_event = refusing_observer(source.source.on_change, on_event)
    if part_bytes < 1 or workers < 1:
        raise SettingError("a part has at least a byte, and there is at least one worker")
    check_side(shorter_side)
    in_names = {SPLIT} if source.splits_brought else set()
    behind = [name for name in metadata_in(source.columns) if name not in in_names]
    packer = packer_named(format)
    carried = carried_names(source) if packer.keeps_schema else ()
    say_what_is_left(source, on_event, () if packer.keeps_metadata else behind, carried)
    if not packer.keeps_schema:
        say_orientation(source, shorter_side, on_event)
    claim = {"source": source.digest, "format": format, "side": shorter_side, "part_bytes": part_bytes}
    with ExitStack() as stack:
        store = open_store(str(destination))
        records = store
        if isinstance(store, FolderStore):
            store.create()
            records = _records_of(store, format)
            stack.enter_context(records.lock_for_writing())
        # Pairs of images and masks are told by their names, which are not the source's.
        has_names = format == _FOLDERS and not source.has_targets
        plan = RepackPlan(
            source=source,
            store=store,
            format=format,
            side=shorter_side,
            workers=workers,
            names=FolderNames(source) if has_names else None,
        )
        copy = _Copy(plan, records, stack, verify=verify)
        return copy.run(runner, claim, part_bytes, math.ceil(max_skipped_fraction * len(source)), on_event)


def _records_of(store: FolderStore, format: str) -> FolderStore:
    """Where it is written down what is copied to a folder: there, but of class folders, where it would be a class."""
    if format != _FOLDERS:
        return store
    name = hashlib.sha256(store.url.encode(errors="surrogateescape")).hexdigest()[:40]
    records = FolderStore(str(cache_folder() / "copies" / name), is_private=True)
    records.create()
    return records


class _Copy:
    """One copy: what is written down about it, and which of its parts are whole. ``stack`` ends its threads."""

    def __init__(self, plan: RepackPlan, records: ObjectStore, stack: ExitStack, *, verify: bool) -> None:
        self._plan = plan
        self._source = plan.source
        self._store = plan.store
        self._records = records
        self._verify = verify
        self._about = plan.about()
        self._readers = ThreadPoolExecutor(plan.workers, "frostline-verify")
        stack.callback(self._readers.shutdown, cancel_futures=True)

    def run(
        self, runner: PartRunner, claim: dict[str, Any], part_bytes: int, max_skipped: int, on_event: Observer
    ) -> Repacked:
        started = time.perf_counter()
        there = self._listed()
        self._claim(claim, there)
        self._sweep(there)
        on_event(PhaseStarted(name=f"copying to {self._plan.format}"))
        ranges = divide_samples(self._lengths(), max_bytes=part_bytes, max_rows=_MAX_ROWS)
        parts, made = whole_parts(
            runner,
            self._plan,
            itertools.starmap(CopyPart, enumerate(ranges)),
            PartTally(len(self._source), max_skipped, on_event),
            found=partial(self._found, there),
            keep=self._kept,
        )
        for packed in packer_named(self._plan.format).class_tables(self._source.classes, self._present(parts)):
            self._store.write(*packed)
        if runner is not make_in_process:  # tasks that were killed may have left something
            self._sweep(self._listed())
        return Repacked(
            url=self._store.url,
            format=self._plan.format,
            samples=sum(part.samples for part in parts),
            objects=sum(len(part.objects) for part in parts),
            nbytes=sum(written.size for part in parts for written in part.objects.values()),
            made=made,
            parts=len(parts),
            seconds=time.perf_counter() - started,
            skipped=tuple(skipped for part in parts for skipped in part.skipped),
            left_out=self._source.manifest.left_out,
        )

    def _present(self, parts: Iterable[CopiedPart]) -> list[str]:
        """The classes that have samples in the copy."""
        counts = Counter(self._source.selection.per_label)
        lost = np.array([skipped.id for part in parts for skipped in part.skipped], np.int64)
        rows = rows_of_ids(self._source.samples.ids, lost) if len(lost) else lost
        counts.subtract(self._source.samples.labels_at(rows).tolist())
        return [self._source.classes[label] for label, count in counts.items() if count and label >= 0]

    def _listed(self) -> dict[str, Entry]:
        there = {entry.object: entry for entry in self._store.list()}
        if self._records is not self._store:
            there |= {entry.object: entry for entry in self._records.list()}
        return there

    def _lengths(self) -> npt.NDArray[np.int64]:
        """Bytes of each sample, its mask too."""
        lengths = self._source.samples.lengths
        if not self._source.has_targets:
            return lengths
        return lengths + np.asarray(self._source.column("target_length").to_numpy(), np.int64)

    def _claim(self, claim: dict[str, Any], there: Mapping[str, Entry]) -> None:
        """Write down what is being made, or make sure that it is what was written down."""
        url = self._store.url
        other = next((name for name in there if not name.startswith(".")), None)
        # Where class folders were removed, what was written down elsewhere about them says nothing any more.
        is_over = other is None and self._records is not self._store
        if _CLAIM not in there or is_over:
            if other is not None:
                raise SettingError(f"{url} is not empty, it holds {other}: choose another destination for the copy")
            self._records.write(_CLAIM, json.dumps(with_schema(claim, _FORMAT), indent=1).encode())
        elif self._claimed(there[_CLAIM], claim) != claim:
            raise SettingError(f"{url} holds a copy of other data, or one made otherwise: choose another destination")

    def _claimed(self, entry: Entry, known: Iterable[str]) -> Any:
        try:
            value = parse_json(bytes(self._records.read(_CLAIM, 0, min(entry.size, _CLAIM_BYTES))))
        except (RecursionError, ValueError) as error:
            raise SettingError(
                f"{_CLAIM} at {self._records.url} is damaged, and says what is copied to {self._store.url} ({error}): "
                "remove all that lies there, or choose another destination"
            ) from error
        return without_schema(value, _FORMAT, f"{_CLAIM} at {self._records.url}", known)

    def _sweep(self, there: Iterable[str]) -> None:
        """Remove what a run that was killed had begun to write, in every folder that a copy writes to."""
        if isinstance(self._store, FolderStore):
            # In the other folders that begin with a dot, somebody may be writing a manifest.
            mine = (name for name in there if not name.startswith(".frostline/") or name.startswith(f"{_FOLDER}/"))
            for name in filter(is_partial, mine):
                self._store.remove(name)
                if isinstance(self._records, FolderStore):
                    self._records.remove(name)

    def _found(self, there: Mapping[str, Entry], part: CopyPart) -> CopiedPart | None:
        """A part that is there already, whole, and whose samples have the metadata of now."""
        copied = self._whole(there, part.number)
        has_values = copied is not None and copied.about == metadata_digest(metadata_values(self._about, part.rows))
        return copied if has_values else None

    def _whole(self, there: Mapping[str, Entry], number: int) -> CopiedPart | None:
        name = _record(number)
        if name not in there or there[name].size >= _PART_RECORD_BYTES:
            return None
        part = CopiedPart.from_json(bytes(self._records.read(name, 0, there[name].size)), number)
        if part is None or any(
            name not in there or there[name].size != written.size for name, written in part.objects.items()
        ):
            return None
        unsure = {
            name: written
            for name, written in part.objects.items()
            if self._verify or is_other_version(there[name].etag, written.etag)
        }
        if not unsure:
            return part
        versions = dict(zip(unsure, self._readers.map(self._version_of, unsure.items()), strict=True))
        if None in versions.values():
            return None
        objects = {
            name: written._replace(etag=versions.get(name) or written.etag) for name, written in part.objects.items()
        }
        return part if objects == part.objects else self._kept(replace(part, objects=objects))

    def _version_of(self, written: tuple[str, CopiedObject]) -> str | None:
        """The version of an object that has the bytes that were written; None where it has others."""
        name, about = written
        try:
            data, version = self._store.read_version(name, 0, about.size)
        except ObjectNotFound:
            return None
        return version if hashlib.sha256(data).hexdigest() == about.sha256 else None

    def _kept(self, part: CopiedPart) -> CopiedPart:
        """A part with its record in its place: from then on it is whole."""
        self._records.write(_record(part.number), part.to_json())
        return part


def _record(number: int) -> str:
    return f"{_FOLDER}/part-{number:06d}.json"
