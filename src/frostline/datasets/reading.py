"""Opens and reads the samples of a data set from where their addresses lead, several at once."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from itertools import islice
from typing import Generic, TypeVar

from frostline.core import CELLS, OBJECTS, UNPACKED, URLS, Samples, Skipped
from frostline.core.errors import BadRequest, ObjectNotFound, SampleError, StoreError
from frostline.core.system import in_background
from frostline.datasets.formats.parquet import Cell, CellCache, CellDecoder, CellReader
from frostline.datasets.formats.urls import UrlReader
from frostline.datasets.formats.webdataset import CompressedTar, tar_reader
from frostline.stores.cql.store import CqlStore
from frostline.stores.local import FolderStore, MmapFolder
from frostline.stores.open import open_store
from frostline.stores.protocols import NO_LIMITS, Batched, Buffer, ByteRange, StoreLimits, Versioned, is_other_version
from frostline.stores.reads import BatchedReads
from frostline.stores.urls import check_name

__all__ = (
    "SequentialReader",
    "Workers",
    "check_object",
    "masks_of",
    "open_samples",
)


def open_samples(
    url: str,
    reading: str = OBJECTS,
    *,
    mapped: bool = False,
    cells: CellCache | None = None,
    roots: tuple[str, ...] | None = None,
    limits: StoreLimits = NO_LIMITS,
    decoder: CellDecoder | None = None,
) -> Versioned:
    """What gives the bytes at the addresses of a data set's samples.

    Args:
        url: address of the data set's root.
        reading: the way that the bytes are found: one of ``core.READINGS``.
        mapped: True to read from memory maps, where that is a local folder and the objects are read-only.
        roots: the canonical URLs of places in which objects that are URLs may lie; by default that of the data alone.
        cells: the place where decoded columns are kept, if cells are read; by default a cache of its own.
        limits: limits on the stores that may be read.
        decoder: decoder of columns, if cells are read; by default this process.

    Raises:
        BadRequest: the reading is unknown.
        SettingError: the URL is none that Frostline reads.
    """
    store = open_store(url, limits)
    match reading:
        case _ if reading == OBJECTS:
            return MmapFolder(store) if mapped and isinstance(store, FolderStore) else store
        case _ if reading == CELLS:
            return CellReader(store, cells or CellCache(), store.url, decoder)
        case _ if reading == URLS:
            return UrlReader((store.url,) if roots is None else roots, limits)
        case _ if reading == UNPACKED:
            return tar_reader(store)
        case _:
            raise BadRequest(f"reading: there is no {reading[:50]!r}")


def check_object(object: str, reading: str) -> None:
    """Do nothing if the name of a sample's object makes sense in a reading, and stays within the data.

    Raises:
        BadRequest: the name makes no sense, or leads out of the data.
    """
    if reading != URLS:  # of those the reader knows what they may be
        check_name(_file_of(object, reading))


def _file_of(object: str, reading: str) -> str:
    if reading == UNPACKED:
        return CompressedTar.parse(object).file
    return Cell.parse(object).file if reading == CELLS else object


T = TypeVar("T")
_Found = tuple[Buffer, str] | StoreError | SampleError


class SequentialReader:
    """Reads the bytes of samples that are wanted one after another.

    Memory is that of the requests under way: each of some megabytes, or of one sample where it is larger.

    Args:
        url: address of the data set's root.
        reading: the way that its samples are read; see ``open_samples``.
        maximum: requests under way at once.
        roots: places in which objects that are URLs may lie; by default that of the data alone.
    """

    def __init__(self, url: str, reading: str, *, maximum: int, roots: tuple[str, ...] | None = None) -> None:
        self._store = open_samples(url, reading, roots=roots)
        self._maximum = maximum
        self._batched: Batched | None = None
        if isinstance(self._store, CqlStore):
            self._batched = self._store
        elif reading == OBJECTS:
            self._batched = BatchedReads(self._store)

    def read(self, samples: Samples, names: Sequence[str]) -> Iterator[tuple[int, Buffer | Skipped]]:
        """The bytes of each sample, as they come; of one that cannot be used, why.

        Args:
            samples: the samples in their data set's order.
            names: names of the samples, with which those that are left out are reported.

        Returns:
            Pairs of a row of ``samples`` and its bytes, each row once, in any order.

        Raises:
            StoreError: the store failed, and not for one sample alone.
        """
        places = [
            ByteRange(object, offset, length)
            for object, offset, length in zip(
                samples.objects, samples.offsets.tolist(), samples.lengths.tolist(), strict=True
            )
        ]
        found = self._each(places) if self._batched is None else self._batched.read_many(places, maximum=self._maximum)
        for row, result in found:
            yield row, _usable(result, samples, names, row)

    def _each(self, places: Sequence[ByteRange]) -> Iterator[tuple[int, _Found]]:
        rest = iter(range(len(places)))
        with ThreadPoolExecutor(self._maximum, "frostline-read", in_background) as threads:
            under_way: set[Future[tuple[int, _Found]]] = set()
            while True:
                under_way |= {
                    threads.submit(_one, self._store, row, places[row])
                    for row in islice(rest, self._maximum - len(under_way))
                }
                if not under_way:
                    return
                done, under_way = wait(under_way, return_when=FIRST_COMPLETED)
                for future in done:
                    yield future.result()


def masks_of(samples: Samples, reader: SequentialReader) -> dict[int, Buffer | Skipped]:
    """The masks of some samples, all at once, by their rows; of those that cannot be used, why."""
    rows, masks = samples.masks
    return {int(rows[place]): mask for place, mask in reader.read(masks, masks.objects)} if len(rows) else {}


class Workers(Generic[T]):
    """Threads that do something with what was read, a few samples behind the reading.

    Args:
        reader: reader of the samples.
        threads: the number of threads.
        stack: stack that ends the threads when it is closed.
    """

    def __init__(self, reader: SequentialReader, threads: int, stack: ExitStack) -> None:
        self._reader = reader
        self._maximum = 2 * threads
        self._threads = ThreadPoolExecutor(threads, "frostline-work")
        stack.callback(self._threads.shutdown, cancel_futures=True)

    def map(self, samples: Samples, names: Sequence[str], work: Callable[[int, Buffer | Skipped], T]) -> list[T]:
        """What ``work`` makes of each sample, in their order.

        Args:
            samples: the samples to read; see ``SequentialReader.read``.
            names: names of the samples.
            work: function of a row and its bytes, or of why there are none; called from several threads.
        """
        made: list[Future[T]] = [Future()] * len(samples)
        under_way: set[Future[T]] = set()
        for row, data in self._reader.read(samples, names):
            if len(under_way) >= self._maximum:
                _, under_way = wait(under_way, return_when=FIRST_COMPLETED)
            made[row] = self._threads.submit(work, row, data)
            under_way.add(made[row])
        return [future.result() for future in made]


def _one(store: Versioned, row: int, place: ByteRange) -> tuple[int, _Found]:
    try:
        return row, store.read_version(*place)
    except (ObjectNotFound, SampleError) as error:
        return row, error


def _usable(found: _Found, samples: Samples, names: Sequence[str], row: int) -> Buffer | Skipped:
    listed = samples.versions[row] if samples.versions else ""
    if not isinstance(found, tuple):
        reason = str(found)
    elif is_other_version(listed, found[1]):
        reason = f"{samples.objects[row]} has changed since it was listed"
    else:
        return found[0]
    # What was listed and is not there any more has changed too.
    changed = not isinstance(found, SampleError)
    return Skipped(id=int(samples.ids[row]), object=names[row], reason=reason, changed=changed)
