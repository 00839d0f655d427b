"""Reads and decodes single samples within the memory for decoding, from the store or from the node's own disk."""

import math
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from frostline.batching import readable_bytes
from frostline.core import UNPACKED, URLS, Samples, Skipped, View
from frostline.core.config import NodeSettings, cache_folder
from frostline.core.errors import FrostlineError, ObjectNotFound, SampleError, SettingError
from frostline.core.units import log_named
from frostline.node.memory import RequestMemory
from frostline.node.pipeline import Slab
from frostline.node.statistics import Counters
from frostline.preprocess import Preprocess
from frostline.preprocess.apply import MAX_PIXELS, decode_into, pixels_into, pixels_needed, scratch_bytes
from frostline.preprocess.decoders import takes_decoders
from frostline.stores.disk_tier import LocalTier, TierStatistics, tier_name
from frostline.stores.local import MmapFolder
from frostline.stores.protocols import Buffer, ByteRange, Versioned, is_other_version
from frostline.stores.readahead import ReadAhead

__all__ = (
    "LocalSamples",
    "NodeTier",
    "ReadWatch",
    "SampleReader",
    "SharedDecoder",
    "StoredSamples",
)


# Default size: a quarter of the free space and what is kept already, at most 50 GiB.
_SHARE_OF_DISK = 4
_MAX_BYTES = 50 << 30
# A smaller tier is not worth its disk.
_MIN_BYTES = 256 << 20
_HERE = ("file", "memory")


class LocalSamples:
    """The samples of one request that a tier holds. Safe for threads.

    Args:
        tier: local tier that keeps them.
        url: URL of the root of their data.
        samples: samples of the request; those without a version are not kept, since they could change unnoticed.
    """

    def __init__(self, tier: LocalTier, url: str, samples: Samples) -> None:
        self._tier = tier
        self._lengths = samples.lengths
        places = zip(samples.objects, samples.offsets.tolist(), samples.lengths.tolist(), strict=True)
        versions = samples.versions if len(samples.versions) else [""] * len(samples)
        self._versions = versions
        self._names = [
            tier_name(url, ByteRange(*place), version) if version else None
            for place, version in zip(places, versions, strict=True)
        ]

    def has(self, row: int) -> bool:
        """Whether a sample is kept."""
        name = self._names[row]
        return name is not None and self._tier.has(name)

    def get(self, row: int) -> Buffer | None:
        """The bytes of a sample in the version that the request names; None if it is not kept."""
        name = self._names[row]
        return None if name is None else self._tier.get(name, int(self._lengths[row]))

    def put(self, row: int, data: Buffer, version: str) -> None:
        """Keep a sample's bytes, if they have the version that the request names."""
        name = self._names[row]
        if name is not None and version and not is_other_version(self._versions[row], version):
            self._tier.put(name, data)


class NodeTier:
    """The local tier of a node. Safe for threads.

    If no setting asks for it, it is opened when samples of a remote store are first requested.

    Raises:
        SettingError: A setting asks for the tier, and its folder cannot be used.
    """

    def __init__(self, settings: NodeSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._is_open = False
        self._tier: LocalTier | None = None
        if self._is_asked:
            self._for(("",))

    def of(self, url: str, reading: str, samples: Samples) -> LocalSamples | None:
        """The kept samples of a request; None if its samples are not kept."""
        tier = self._for(samples.objects if reading == URLS else (url,))
        return None if tier is None or reading == UNPACKED else LocalSamples(tier, url, samples)

    def has(self, url: str, place: ByteRange, version: str) -> bool:
        """Whether a sample that is an object of its own is kept; ``url`` is the root of its data."""
        tier = self._for((url,))
        return tier is not None and bool(version) and tier.has(tier_name(url, place, version))

    def statistics(self) -> TierStatistics | None:
        """The statistics of the tier; None if nothing was kept so far."""
        return None if self._tier is None else self._tier.statistics()

    @property
    def _is_asked(self) -> bool:
        """Whether a setting names its folder or size."""
        return bool(self._settings.local_tier or self._settings.local_tier_bytes)

    def _for(self, urls: Iterable[str]) -> LocalTier | None:
        if self._settings.local_tier_bytes == 0 or all(url.partition("://")[0] in _HERE for url in urls):
            return None
        with self._lock:
            if not self._is_open:
                self._tier = self._opened()
                self._is_open = True
            return self._tier

    def _opened(self) -> LocalTier | None:
        named, nbytes = self._settings.local_tier, self._settings.local_tier_bytes
        folder = Path(named) if named else cache_folder() / "samples"
        try:
            tier = LocalTier(folder, budget_bytes=nbytes or _MAX_BYTES)
            if nbytes is not None:
                return tier
            there = tier.statistics().bytes
            share = min(_MAX_BYTES, (there + shutil.disk_usage(folder).free) // _SHARE_OF_DISK)
            return LocalTier(folder, budget_bytes=share) if share >= _MIN_BYTES else None
        except (SettingError, OSError):
            if self._is_asked:
                raise
            return None  # there is no place for it, and no setting asks for one


Row = npt.NDArray[np.float32] | npt.NDArray[np.uint8] | npt.NDArray[np.int64]
"""The row of a sample: ``float32[C, H, W]`` as the network takes it, ``uint8[H, W, C]`` for the pixels before that."""

# Copies of the encoded bytes: as read, Pillow's own, and the metadata that Pillow keeps.
_COPIES = 3
# Enough for most photographs of data sets; larger ones are read again with more memory.
_FIRST_GUESS = 1_000_000


_LOG = log_named("frostline.node")
# Reads of a store that end take less; where none of those under way has ended for so long, the store hangs.
_STUCK_S = 1.5
# A store whose reads take longer hangs after so many times what they usually take, each read a tenth of that mean.
_TIMES_USUAL = 3.0
_WEIGHT = 0.1
# Samples that could not be read one after the other, after which the store is suspected, and for how long.
_LOST_IN_A_ROW = 8
_SUSPECTED_S = 30.0
# Least seconds between two log lines about reads.
_SAID_EVERY_S = 10.0


class ReadWatch:
    """Sees whether the reads of a node's stores end, and end well, and logs those that fail. Safe for threads.

    Args:
        clock: seconds that only grow.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._pending: dict[object, float] = {}
        self._ended_at = self._failed_at = self._said_at = -math.inf
        self._usual_s: float | None = None
        self._lost_in_a_row = 0
        self._unsaid = 0
        self._reason = ""

    @contextmanager
    def watch_read(self, object: str) -> Iterator[None]:
        """Watch an object's read while the context lasts."""
        mark = [object]
        began = self._clock()
        with self._lock:
            self._pending[id(mark)] = began
        try:
            yield
        except FrostlineError as error:
            self.note_failure(object, error)
            raise
        else:
            self._lost_in_a_row = 0
        finally:
            with self._lock:
                del self._pending[id(mark)]
                self._ended_at = self._clock()
                took_s = self._ended_at - began
                usual_s = took_s if self._usual_s is None else self._usual_s
                self._usual_s = usual_s + _WEIGHT * (took_s - usual_s)

    def note_failure(self, object: str, error: FrostlineError) -> None:
        """A read failed; said in the log, with how many since the line before."""
        with self._lock:
            now = self._failed_at = self._clock()
            self._lost_in_a_row += 1
            self._reason = f"{object}: {error}"
            self._unsaid += 1
            if now - self._said_at < _SAID_EVERY_S:
                return
            self._said_at, count, self._unsaid = now, self._unsaid, 0
        _LOG.warning("cannot read %s (%d since the last such line)", self._reason, count)

    def trouble(self) -> str:
        """Why the store is suspected; empty where it is not."""
        with self._lock:
            now = self._clock()
            oldest = min(self._pending.values(), default=now)
            silent_s = now - max(oldest, self._ended_at)
            if silent_s > max(_STUCK_S, _TIMES_USUAL * (self._usual_s or 0.0)):
                return f"no read of its store has ended for {silent_s:.1f} s, with {len(self._pending)} under way"
            if self._lost_in_a_row >= _LOST_IN_A_ROW and now - self._failed_at < _SUSPECTED_S:
                return f"it could not read the last {self._lost_in_a_row} samples, such as {self._reason}"
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedDecoder:
    """The resources for decoding that all requests share.

    Attributes:
        memory: the tenant's access to the pool for encoded samples and the buffers of decoding.
        slots: one slot per image that may be decoded at once; more may be read at once, to hide the store's latency.
        counters: counters of the request.
        reads: watch that sees whether reads end.
        apart: function that decodes in processes of the tenant, where others ask; None decodes in this process.
    """

    memory: RequestMemory
    slots: threading.Semaphore
    counters: Counters
    reads: ReadWatch = field(default_factory=ReadWatch)
    apart: Callable[..., tuple[int, float]] | None = None


class StoredSamples:
    """The samples of one request as they are stored. Safe for threads.

    Args:
        store: store that holds their objects.
        samples: samples of the request.
        counters: counters of the request.
        here: samples on the node's own disk; None if none are kept.
        reads: watch that sees whether reads end; None where nobody asks whether they do.
    """

    def __init__(
        self,
        store: Versioned,
        samples: Samples,
        counters: Counters,
        here: LocalSamples | None = None,
        reads: ReadWatch | None = None,
    ) -> None:
        self._reads = reads
        self._store = store
        self._samples = samples
        self._counters = counters
        self._here = here
        self._unknown: set[int] = set()

    def expect(self, rows: Iterable[int]) -> None:
        """Start reading these rows ahead, if the store can."""
        if isinstance(self._store, ReadAhead):
            here = self._here
            self._store.expect([self._place(row) for row in rows if here is None or not here.has(row)])

    def read_encoded(self, row: int) -> Buffer | Skipped:
        """The sample as it is stored; the caller has reserved memory for its declared length."""
        try:
            return self._read(row)
        except (ObjectNotFound, SampleError) as error:
            return self._lost(row, error)

    def is_as_listed(self, row: int) -> bool:
        """Whether the object is known to have the version that the request names."""
        return bool(self._samples.versions) and row not in self._unknown

    def record_skip(self, row: int, reason: str) -> Skipped:
        """A record of a skipped sample, with the reason."""
        return Skipped(id=int(self._samples.ids[row]), object=self._samples.objects[row], reason=reason)

    def _lost(self, row: int, error: ObjectNotFound | SampleError) -> Skipped:
        # An object that was listed and is gone has changed too.
        return replace(self.record_skip(row, str(error)), changed=isinstance(error, ObjectNotFound))

    def _read(self, row: int) -> Buffer:
        started = time.perf_counter()
        kept = None if self._here is None else self._here.get(row)
        if kept is not None:
            self._counters.add(read_s=time.perf_counter() - started, tier_hits=1)
            return kept
        if self._reads is None:
            data, version = self._from_store(row)
        else:
            with self._reads.watch_read(self._samples.objects[row]):
                data, version = self._from_store(row)
        self._counters.add(read_s=time.perf_counter() - started, bytes_read=len(data))
        if self._here is not None:
            self._here.put(row, data, version)
        return data

    def _from_store(self, row: int) -> tuple[Buffer, str]:
        data, version = self._store.read_version(*self._place(row))
        self._check_version(row, version)
        return data, version

    def _check_version(self, row: int, version: str) -> None:
        samples = self._samples
        listed = samples.versions[row] if samples.versions else ""
        if version != listed and is_other_version(listed, version):
            raise ObjectNotFound(f"{samples.objects[row]} has changed since it was listed: build the manifest again")
        if not version:
            self._unknown.add(row)

    def _place(self, row: int) -> ByteRange:
        samples = self._samples
        return ByteRange(samples.objects[row], int(samples.offsets[row]), int(samples.lengths[row]))


class SampleReader(StoredSamples):
    """Reads and decodes the samples of one request. Safe for threads.

    Args:
        store: store that holds their objects.
        samples: samples of the request.
        preprocess: steps from encoded bytes to pixels.
        view: random view; None if the preprocessing is not random.
        decoding: resources shared with other requests.
        is_abandoned: True if the request was cancelled.
        here: samples on the node's own disk; None if none are kept.
    """

    def __init__(
        self,
        store: Versioned,
        samples: Samples,
        preprocess: Preprocess,
        view: View | None,
        decoding: SharedDecoder,
        is_abandoned: Callable[[], bool],
        here: LocalSamples | None = None,
    ) -> None:
        super().__init__(store, samples, decoding.counters, here, decoding.reads)
        self._preprocess = preprocess
        self._view = view
        self._decoding = decoding
        self._is_abandoned = is_abandoned
        self._apart = decoding.apart if decoding.apart is not None and takes_decoders(preprocess) else None
        # No more than the tenant's own part is enough for, so that it need not wait for what others hold.
        own_bytes = decoding.memory.batch_bytes
        encoded_bytes = min(_COPIES * int(samples.lengths.max(initial=0)), own_bytes // 2)
        within = max(1, _pixels_within(own_bytes - encoded_bytes))
        # The size of a ready format's images is known before anything is read.
        self._first_guess = pixels_needed(preprocess, b"") if preprocess.stored else min(_FIRST_GUESS, within)
        self._guess = self._first_guess

    def pixels_into(self, row: int, out: Row) -> Skipped | None:
        """Read and decode a sample into ``out``; fill ``out`` with zeros and return the reason if that fails.

        Raises:
            Cancelled: The request was cancelled.
            StoreError: The store failed, not only for this sample.
        """
        try:
            self._decode(row, out)
        except (ObjectNotFound, SampleError) as error:
            out.fill(0)
            return self._lost(row, error)
        return None

    def all_pixels_into(self, rows: Sequence[int], out: Slab) -> list[Skipped | None]:
        """Read and decode several samples in turn, each into its row of ``out``; see ``pixels_into``.

        A memory-mapped record takes hundredths of a millisecond, about as long as reserving its memory and counting
        it. If all of them fit at once, this is therefore done once for all.
        """
        nbytes = _COPIES * sum(self._samples.lengths[list(rows)].tolist()) + scratch_bytes(self._first_guess)
        if not self.is_mapped or self._apart is not None or nbytes > self._decoding.memory.total_bytes:
            return [self.pixels_into(*buffer) for buffer in zip(rows, out, strict=True)]
        with self._decoding.memory.reserve(nbytes, self._is_abandoned):
            found = self._read_all(rows)
            with self._decoding.slots:
                started = time.perf_counter()
                made = [self._made(*buffer) for buffer in zip(rows, found, out, strict=True)]
                self._decoding.counters.add(decode_s=time.perf_counter() - started)
        return made

    @property
    def is_mapped(self) -> bool:
        """Whether samples lie in memory-mapped local files, so that reading waits at most for a page."""
        return isinstance(self._store, MmapFolder)

    def _decode(self, row: int, out: Row) -> None:
        """Guess the image's size; if it is larger, read it again with enough memory.

        Reserving more while holding some could make two threads wait for each other.
        """
        pixels = self._guess
        while True:
            nbytes = _COPIES * int(self._samples.lengths[row]) + scratch_bytes(pixels)
            self._check(nbytes)
            with self._decoding.memory.reserve(nbytes, self._is_abandoned):
                encoded = self._read(row)
                needed = self._decode_within(row, encoded, out, pixels)
                if needed <= pixels or needed > MAX_PIXELS:
                    self._guess = max(self._first_guess, min(needed, pixels))  # the next image often has a similar size
                    return
            self._decoding.counters.add(decode_retries=1)
            pixels = needed

    def _check(self, nbytes: int) -> None:
        total = self._decoding.memory.total_bytes
        if nbytes > total:
            raise SampleError(
                f"too large for the node: decoding it takes {readable_bytes(nbytes)} and the node has "
                f"{readable_bytes(total)} for that; start it with more --memory"
            )

    def _read_all(self, rows: Sequence[int]) -> list[Buffer | Skipped]:
        started, found = time.perf_counter(), list[Buffer | Skipped]()
        reads = self._decoding.reads
        with reads.watch_read(self._samples.objects[rows[0]]):
            for row in rows:
                try:
                    found.append(self._from_store(row)[0])
                except (ObjectNotFound, SampleError) as error:
                    reads.note_failure(self._samples.objects[row], error)
                    found.append(self._lost(row, error))
        nbytes = sum(len(buffer) for buffer in found if not isinstance(buffer, Skipped))
        self._decoding.counters.add(read_s=time.perf_counter() - started, bytes_read=nbytes)
        return found

    def _decode_within(self, row: int, encoded: Buffer, out: Row, pixels: int) -> int:
        """Decode a sample if it needs no more pixels than that, or more than any may have; those that it needs."""
        if self._apart is not None:
            id = int(self._samples.ids[row])
            needed, took_s = self._apart(self._preprocess, encoded, out, id=id, view=self._view, max_pixels=pixels)
            self._decoding.counters.add(decode_s=took_s)
            return needed
        needed = pixels_needed(self._preprocess, encoded)
        if pixels < needed <= MAX_PIXELS:
            return needed
        with self._decoding.slots:
            started = time.perf_counter()
            self._write(row, encoded, out)
            self._decoding.counters.add(decode_s=time.perf_counter() - started)
        return needed

    def _made(self, row: int, found: Buffer | Skipped, out: Row) -> Skipped | None:
        """Decode a sample whose size is known."""
        if isinstance(found, Skipped):
            out.fill(0)
            return found
        try:
            self._write(row, found, out)
        except SampleError as error:
            out.fill(0)
            return self._lost(row, error)
        return None

    def _write(self, row: int, encoded: Buffer, out: Row) -> None:
        into: Callable[..., None] = pixels_into if out.dtype == np.uint8 else decode_into
        into(self._preprocess, encoded, out, id=int(self._samples.ids[row]), view=self._view)


def _pixels_within(nbytes: int) -> int:
    """The number of pixels that so much memory is enough to decode."""
    return (nbytes - scratch_bytes(0)) // (scratch_bytes(1) - scratch_bytes(0))
