"""Makes the parts of a copy: what is whole is kept, what is missing is written, read back and recorded."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import pyarrow as pa

from frostline.core import Samples, Skipped
from frostline.core.declared import parse_json
from frostline.core.errors import DataError, TooManySkipped
from frostline.core.events import Observer, ProgressMade, SampleSkipped
from frostline.datasets.copy.layout import (
    CopySample,
    FolderNames,
    ImageAndMasks,
    OutputObject,
    Scaling,
    SourceFacts,
    carried_names,
    metadata_in,
    packer_named,
    splits_in_folders,
)
from frostline.datasets.dataset import Dataset
from frostline.datasets.formats.left_out import LeftOut, json_of
from frostline.datasets.formats.tables import json_values
from frostline.stores.protocols import ObjectStore

__all__ = (
    "CopiedObject",
    "CopiedPart",
    "CopyPart",
    "CopyPlan",
    "CopyResult",
    "PartCopier",
    "PartRunner",
    "PartTally",
    "RepackPlan",
    "finished_future",
    "make_in_process",
    "metadata_digest",
    "metadata_values",
    "whole_parts",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyResult:
    """The result of a copy.

    Attributes:
        url: address of the copy.
        samples: number of samples in the copy.
        nbytes: size of the copied data in bytes.
        made: number of objects, parts or rows that were written now; the others were there before.
        seconds: duration of this run.
        skipped: samples that could not be read; the copy does not have them.
        left_out: parts of the source that are no samples.
    """

    url: str
    samples: int
    nbytes: int
    made: int
    seconds: float
    skipped: tuple[Skipped, ...]
    left_out: tuple[LeftOut, ...]

    def to_json(self) -> dict[str, Any]:
        """A dictionary of plain values."""
        skipped = [asdict(skipped) for skipped in self.skipped]
        return {**asdict(self), "skipped": skipped, "left_out": json_of(self.left_out)}


class PartResult(Protocol):
    """What is known of a part that is whole."""

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        """Samples of it that could not be read."""


T = TypeVar("T", bound=PartResult)


class CopyPart(NamedTuple):
    """A part of a copy.

    Attributes:
        number: the place among the parts.
        rows: the rows of the source that are its samples.
    """

    number: int
    rows: range


class PartCopier(Protocol):
    """Writes the parts of one copy. A part that is made again is written to the same names, with the same bytes."""

    def look(self, part: CopyPart) -> Any:
        """What the destination holds of a part before it is written; a value that may travel to another process."""

    def make(self, part: CopyPart, before: Any) -> Future[Any]:
        """Write what is missing of a part; the result counts it against what was there before.

        Args:
            part: the part to write.
            before: answer of ``look`` for it. Where this is called again, because nobody heard how it ended, it is
                the same, so that the result is too.
        """


class CopyPlan(Protocol):
    """All that a process needs to write parts of one copy, as values that may travel there."""

    def open(self, stack: ExitStack) -> PartCopier:
        """Begin in this process; ``stack`` ends its threads."""


PartRunner = Callable[[CopyPlan, Iterable[CopyPart]], Iterator[tuple[CopyPart, Any]]]
"""Has parts made, and gives each with its result once, in any order."""


def make_in_process(plan: CopyPlan, parts: Iterable[CopyPart]) -> Iterator[tuple[CopyPart, Any]]:
    """Make parts one after another in this process; one may be written while the next one is read, and no third."""
    with ExitStack() as stack:
        copier = plan.open(stack)
        waiting: list[tuple[CopyPart, Future[Any]]] = []
        for part in parts:
            made = copier.make(part, copier.look(part))
            yield from _results(waiting)
            waiting = [(part, made)]
        yield from _results(waiting)


def _results(waiting: Iterable[tuple[CopyPart, Future[Any]]]) -> Iterator[tuple[CopyPart, Any]]:
    for part, made in waiting:
        yield part, made.result()


class PartTally:
    """Counts the samples of parts that are whole, and ends where too many of them could not be read.

    Args:
        samples: number of samples of all parts.
        max_skipped: maximum number of them that may be left out.
        on_event: function that is called with what was skipped now, and how far the copy is.
    """

    def __init__(self, samples: int, max_skipped: int, on_event: Observer) -> None:
        self._samples = samples
        self._max_skipped = max_skipped
        self._on_event = on_event
        self._done = self._skipped = 0

    def tell(self, skipped: Iterable[Skipped]) -> None:
        """Tell of samples that could not be read now."""
        for lost in skipped:
            self._on_event(SampleSkipped(id=lost.id, object=lost.object, reason=lost.reason, changed=lost.changed))

    def add(self, part: CopyPart, skipped: tuple[Skipped, ...]) -> None:
        """Count a part that is whole.

        Raises:
            TooManySkipped: More samples were left out than may be.
        """
        self._done += len(part.rows)
        self._skipped += len(skipped)
        if self._skipped > self._max_skipped:
            lost = skipped[-1]
            raise TooManySkipped(
                f"{self._skipped} of {self._samples} samples cannot be read, and at most {self._max_skipped} may be "
                f"left out: {lost.object} is the last ({lost.reason}); allow more with --max-skipped-fraction"
            )
        self._on_event(ProgressMade(done=self._done, total=self._samples))


def whole_parts(
    runner: PartRunner,
    plan: CopyPlan,
    parts: Iterable[CopyPart],
    tally: PartTally,
    *,
    found: Callable[[CopyPart], T | None] | None = None,
    keep: Callable[[T], T] | None = None,
) -> tuple[list[T], int]:
    """Every part in order, and how many of them were made now.

    Args:
        runner: runner that makes the missing parts.
        plan: the plan of the copy.
        parts: all of the copy.
        tally: tally that counts the parts.
        found: function that gives what is known of a part that is there from before; None where a part is not there, or
            not whole.
        keep: function that writes down what is known of a part that was made.
    """
    whole: dict[int, T] = {}
    made = 0

    def missing() -> Iterator[CopyPart]:
        for part in parts:
            there = None if found is None else found(part)
            if there is None:
                yield part
            else:
                whole[part.number] = there
                tally.add(part, there.skipped)

    for part, result in runner(plan, missing()):
        tally.tell(result.skipped)
        whole[part.number] = result if keep is None else keep(result)
        made += 1
        tally.add(part, result.skipped)
    return [whole[number] for number in sorted(whole)], made


def finished_future(result: Any) -> Future[Any]:
    """What ``PartCopier.make`` gives where nothing is under way any more."""
    future: Future[Any] = Future()
    future.set_result(result)
    return future


class CopiedObject(NamedTuple):
    """An object that was written and read back.

    Attributes:
        size: size of the object in bytes.
        sha256: SHA-256 of the object.
        etag: the version then; empty where the store tells none.
    """

    size: int
    sha256: str
    etag: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiedPart:
    """A part that was written completely.

    Attributes:
        number: index of the part.
        samples: number of samples in it.
        objects: the written objects, by name.
        skipped: samples that could not be read.
        about: digest of the metadata that went along; empty where none did.
    """

    number: int
    samples: int
    objects: dict[str, CopiedObject]
    skipped: tuple[Skipped, ...]
    about: str = ""

    def to_json(self) -> bytes:
        """The text of its record."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, data: bytes, number: int) -> "CopiedPart | None":
        """The part of that number; None where its record is damaged."""
        try:
            value = parse_json(data)
            objects = {
                name: CopiedObject(int(fields[0]), str(fields[1]), str(fields[2]))
                for name, fields in value["objects"].items()
            }
            skipped = tuple(Skipped(**fields) for fields in value["skipped"])
            part = cls(
                number=value["number"],
                samples=int(value["samples"]),
                objects=objects,
                skipped=skipped,
                about=str(value["about"]),
            )
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
            return None
        return part if part.number == number and value.keys() == asdict(part).keys() else None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RepackPlan:
    """How the parts of a copy are written.

    Attributes:
        source: samples to copy.
        store: the place where they go.
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
        self._splits = splits_in_folders(plan.source)
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
        kept = [(row, found) for row, found in enumerate(read) if isinstance(found, ImageAndMasks)]
        objects = [""] * len(rows) if self._names is None else self._names.objects(rows.start, rows.stop)
        splits = [""] * len(rows) if self._splits is None else self._splits.slice(rows.start, len(rows)).to_pylist()
        loose = [self._loose(samples, names, about, objects, row, pictures, splits[row]) for row, pictures in kept]
        facts = SourceFacts(
            classes=self._source.classes,
            kinds={name: column.type for name, column in self._about.items()},
            named=carried_names(self._source),
            is_turned=self._source.manifest.is_turned,
        )
        packed = packer_named(self._format).pack(part.number, loose, facts)
        written: list[Future[tuple[str, CopiedObject]]] = [self._writers.submit(self._write, obj) for obj in packed]
        copied = CopiedPart(
            number=part.number,
            samples=len(loose),
            objects=dict(future.result() for future in written),
            skipped=tuple(found for found in read if isinstance(found, Skipped)),
            about=metadata_digest(about),
        )
        return finished_future(copied)

    def _loose(
        self,
        samples: Samples,
        names: Sequence[str],
        about: dict[str, list[Any]],
        objects: Sequence[str],
        row: int,
        found: ImageAndMasks,
        split: str,
    ) -> CopySample:
        return CopySample(
            id=int(samples.ids[row]),
            name=names[row],
            label=int(samples.labels[row]),
            about={name: values[row] for name, values in about.items()},
            encoded=found.image,
            is_remade=self._source.manifest.applied is not None,
            object=objects[row],
            mask=None if samples.targets is None else found.mask or b"",
            split=split,
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
    """The values of some rows, by column, as ``tables.json_values`` gives them."""
    return {name: json_values(column.slice(rows.start, len(rows))) for name, column in about.items()}


def metadata_digest(about: Mapping[str, list[Any]]) -> str:
    """Stands for the metadata of some samples, by column, in the record of their part."""
    return hashlib.blake2b(repr(about).encode(), digest_size=16).hexdigest() if about else ""
