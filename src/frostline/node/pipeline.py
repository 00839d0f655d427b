"""The pipeline of one request: checked, its samples read and decoded while the batch before runs and is sent."""

import base64
import json
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Executor, Future, wait
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, Self, TypedDict

import numpy as np
import numpy.typing as npt
from cachetools import LRUCache

from frostline.batching import readable_bytes
from frostline.core import CELLS, OBJECTS, UNPACKED, URLS, FeatureBatch, Samples, Skipped
from frostline.core.declared import Count, Digest
from frostline.core.errors import BadRequest, OverBudget, Overloaded, SettingError
from frostline.core.nouns import widen_bfloat16
from frostline.datasets.formats.parquet import CELLS_BYTES, CellCache, CellDecoder
from frostline.datasets.formats.urls import UrlReader
from frostline.datasets.reading import check_object, open_samples
from frostline.engines.protocols import levels_of
from frostline.node.feature_cache import Found
from frostline.node.memory import Cancelled, CancelScope, RequestMemory, Reservation
from frostline.node.prefixes import Resident
from frostline.preprocess import Preprocess, Tokenize
from frostline.preprocess.apply import decode_into, pixels_needed, scratch_bytes
from frostline.preprocess.tokens import content_digest
from frostline.stores.cql.store import CqlStore
from frostline.stores.protocols import Buffer, ByteRange, LinkBounds, StoreLimits, Versioned
from frostline.stores.readahead import ReadAhead, ReadAheadQueue, SecondReads
from frostline.stores.reads import SharedReads
from frostline.stores.urls import is_within, normalise_url, parse_url
from frostline.wire.messages import EmbeddingRequest, FeatureRequest

__all__ = (
    "MAX_NUMBERS",
    "BatchStream",
    "EmbeddingInputs",
    "Embeddings",
    "Ending",
    "Made",
    "PendingBatch",
    "RequestOutput",
    "SentSamples",
    "Slab",
    "Stores",
    "answer_body",
    "batches",
    "checked_preprocess",
    "embedding_inputs",
    "gather_embeddings",
    "max_numbers",
    "read_ahead",
)


Slab = npt.NDArray[np.float32] | npt.NDArray[np.uint8] | npt.NDArray[np.int64]
"""Samples as the device takes them: ``float32[n, C, H, W]``, or pixels ``uint8[n, H, W, C]``."""
Made = Skipped | Buffer | None
"""The result of reading one sample: it was skipped, it stays encoded, or None if it was decoded into the slab."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PendingBatch:
    """A batch that has begun.

    Attributes:
        rows: rows of the request; fewer than asked for if more cannot be processed at once.
        wanted: rows among them that must be read.
        slab: array for the decoded samples, one row each in that order; None if none are decoded.
        found: the cached rows of the batch; None if there is no cache.
    """

    rows: range
    wanted: Sequence[int]
    slab: Slab | None = None
    found: Found | None = None


class RequestOutput(Protocol):
    """How a request turns its samples into batches."""

    def stretches(self) -> Sequence[range]:
        """Divide the rows of the request into batches."""

    def nbytes(self, rows: range) -> int:
        """The memory of a batch, from its first read until it is sent."""

    def kept_bytes(self, rows: range, batch: FeatureBatch) -> int:
        """The part of that memory that is still used once the batch is made."""

    def begin(self, rows: range) -> PendingBatch:
        """Prepare a batch of all these rows, or of the first ones, and say which samples must be read."""

    @property
    def at_a_time(self) -> int:
        """Samples that one thread reads in turn: one if it waits for a store, so that others read meanwhile."""

    def samples(self, rows: Sequence[int], out: Slab | None) -> Sequence[Made]:
        """Read some samples in turn, each into its row of ``out``. Called from several threads."""

    def finish(self, work: PendingBatch, made: Sequence[Made]) -> FeatureBatch:
        """Make the batch; ``made`` holds the result of each wanted sample."""


def batches(
    output: RequestOutput, memory: RequestMemory, readers: Executor, scope: CancelScope
) -> Generator[FeatureBatch, None, None]:
    """Yield the batches of the answer. The memory of a batch stays reserved until the next one is asked for.

    The next batch is read ahead only if its memory is free at once. A request never waits for memory while it holds
    some, so that no two requests can wait for each other.

    Args:
        output: output that makes batches from samples.
        memory: access to the memory for batches.
        readers: executor whose threads read samples.
        scope: cancel scope of the request; cancelled too if the request fails or is closed early.
    """
    rest = deque(output.stretches())
    under_way: deque[_Loading] = deque()
    try:
        while rest or under_way:
            if not under_way:
                reservation = memory.reserve(output.nbytes(rest[0]), scope.is_cancelled)
                under_way.append(_Loading(rows=rest.popleft(), memory=reservation))
                rest.extendleft(under_way[0].start(output, readers, scope))
            ahead = memory.take(output.nbytes(rest[0])) if rest else None
            if ahead is not None:
                under_way.append(_Loading(rows=rest.popleft(), memory=ahead))
                rest.extendleft(under_way[-1].start(output, readers, scope))
            yield under_way[0].finish(output)
            under_way.popleft().memory.release()
    except BaseException:
        scope.cancel()
        raise
    finally:
        for loading in under_way:
            loading.abandon()


@dataclass(slots=True, eq=False)
class _Loading:
    """A batch whose samples are being read."""

    rows: range
    memory: Reservation
    work: PendingBatch | None = None
    samples: "Sequence[Future[Sequence[Made]]]" = ()

    def start(self, output: RequestOutput, readers: Executor, scope: CancelScope) -> Sequence[range]:
        """Begin to read it, and return the rows that are left for another batch."""
        work = self.work = output.begin(self.rows)
        left, self.rows = range(work.rows.stop, self.rows.stop), work.rows
        samples: list[Future[Sequence[Made]]] = []
        self.samples = samples
        for start in range(0, len(work.wanted), output.at_a_time):
            places = range(start, min(start + output.at_a_time, len(work.wanted)))
            samples.append(scope.submit(readers, _read, output, work, places))
        return [left] if left else []

    def finish(self, output: RequestOutput) -> FeatureBatch:
        made = [sample for some in self.samples for sample in some.result()]
        work, self.work, self.samples = self.work, None, ()
        assert work is not None
        batch = output.finish(work, made)
        del work
        self.memory.shrink(output.kept_bytes(self.rows, batch))
        return batch

    def abandon(self) -> None:
        """Wait until nothing writes into the slab any more, and release the memory."""
        wait(self.samples)
        self.work, self.samples = None, ()
        self.memory.release()


def _read(output: RequestOutput, work: PendingBatch, places: range) -> Sequence[Made]:
    some = slice(places.start, places.stop)
    return output.samples(work.wanted[some], None if work.slab is None else work.slab[some])


Ending = Literal["abandoned", "expired", "failed", "finished"]
_REVOKED = "the memory of the prefix is needed for others, who waited while this answer took long: ask for the rest"
_RETRY_AFTER_S = 1.0


class BatchStream:
    """The batches of one request, in its order. A batch's memory is released when the next batch is asked for.

    Args:
        batches: iterator that makes the batches.
        scope: cancel scope of the request, cancelled when the stream is closed before its end.
        on_end: function that is called once, with the stream and how it ended, when no work of it is left.
    """

    def __init__(
        self,
        batches: Iterator[FeatureBatch],
        scope: CancelScope,
        on_end: "Callable[[BatchStream, Ending], None]",
    ) -> None:
        self._batches = batches
        self._scope = scope
        self._on_end = on_end
        self._turn = threading.Lock()
        self._has_ended = False
        self._is_complete = False
        self._is_expired = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> FeatureBatch:
        with self._turn:
            if self._has_ended:
                raise StopIteration
            ending: Ending | None = "failed"
            try:
                batch = next(self._batches)
                ending = None
                return batch
            except StopIteration:
                ending = "finished"
                raise
            except (Cancelled, CancelledError):
                ending = self._given_up
                if self._scope.is_revoked():
                    raise Overloaded(_REVOKED, retry_after_s=_RETRY_AFTER_S) from None
                raise StopIteration from None
            finally:
                if ending is not None:
                    self._end(ending)

    @property
    def has_ended(self) -> bool:
        """Whether all its work has ended; closing it then does nothing."""
        return self._has_ended

    def on_revoke(self, end: Callable[[], object]) -> None:
        """Call ``end``, from any thread, when it is cancelled because others wait for what it holds."""

        def ends() -> None:
            if self._scope.is_revoked():
                end()

        self._scope.on_cancel(ends)

    @property
    def is_complete(self) -> bool:
        """Whether every sample of the request was answered."""
        return self._is_complete

    @property
    def is_expired(self) -> bool:
        """Whether it was cancelled at its deadline."""
        return self._is_expired

    def expire(self) -> None:
        """Cancel the rest as ``close`` does, because the deadline has passed. Do nothing if it has ended."""
        self._is_expired = not self._has_ended
        self.close()

    def close(self) -> None:
        """Cancel the rest, wake a thread that waits in ``next``, and return when all work has ended."""
        if not self._has_ended:
            self._scope.cancel()
        with self._turn:
            if not self._has_ended:
                close = getattr(self._batches, "close", None)
                if close is not None:
                    close()
                self._end(self._given_up)

    @property
    def _given_up(self) -> Ending:
        return "expired" if self._is_expired else "abandoned"

    def _end(self, ending: Ending) -> None:
        self._has_ended = True
        self._is_complete = ending == "finished"
        self._batches = iter(())
        self._on_end(self, ending)


# Stores stay open for later requests; each may hold connections.
_MAX_OPEN = 16


class Stores:
    """The stores under the node's roots. Safe for threads.

    Args:
        roots: URLs under which data is served.
        cells_bytes: memory for decoded Parquet columns.
        follows_links: True if symbolic links in folders may lead out of the roots.
        deadline_s: see ``StoreLimits``.
        tenants: function that returns the number of tenants that read.

    Raises:
        SettingError: A root is not a URL that Frostline reads.
    """

    def __init__(
        self,
        roots: tuple[str, ...],
        cells_bytes: int = CELLS_BYTES,
        *,
        follows_links: bool = True,
        deadline_s: float = math.inf,
        tenants: Callable[[], int] = lambda: 1,
    ) -> None:
        self._roots = tuple(normalise_url(root) for root in roots)
        self._lock = threading.Lock()
        self._cells = CellCache(cells_bytes, tenants)
        self._follows_links = follows_links
        self._deadline_s = deadline_s
        self._open: LRUCache[tuple[str, str, bool, tuple[str, ...], tuple[str, ...], str], Versioned] = LRUCache(
            _MAX_OPEN
        )

    @property
    def roots(self) -> tuple[str, ...]:
        """The canonical URLs of the roots."""
        return self._roots

    def allowed_roots(self, roots: tuple[str, ...] | None) -> tuple[str, ...]:
        """The canonical URLs of the roots that a tenant may read; None means all roots of the node."""
        return self._roots if roots is None else tuple(normalise_url(root) for root in roots)

    def unreadable_reason(self) -> str:
        """Why a folder that is served cannot be listed; empty where all can. It may wait for a disk that hangs."""
        for root in self._roots:
            if not root.startswith("file:"):
                continue
            path = Path(parse_url(root).path)
            try:
                if path.is_dir():
                    with os.scandir(path) as entries:  # a folder of a million names is not read for the first of them
                        next(entries, None)
                else:
                    path.stat()
            except OSError as error:
                return f"{root} cannot be listed: {error.strerror or error}"
        return ""

    def store(
        self,
        data: str,
        allowed: tuple[str, ...] | None = None,
        *,
        reading: str = OBJECTS,
        objects: Sequence[str] = (),
        mapped: bool = False,
        decoder: CellDecoder | None = None,
    ) -> Versioned:
        """Open the store of a data set's samples, or return it if it is open.

        Args:
            data: URL of its root.
            allowed: roots under which the tenant may read; None for all.
            reading: the way that the bytes at the samples' addresses are found.
            objects: objects to be read; if they are URLs, each must lie under an allowed root too.
            mapped: True to read read-only objects of a local folder from memory maps.
            decoder: decoder of cells for the tenant; None decodes them in this process, for all.

        Raises:
            BadRequest: The data or an object lies outside the node's roots that the tenant may read.
        """
        url, may_read = self._served(data, allowed)
        within = may_read if reading == URLS else ()
        folders = _folders(may_read)
        mapped = mapped and url.startswith("file:")
        decoder = decoder if reading == CELLS else None
        key = (url, reading, mapped, within, folders, "" if decoder is None else decoder.tenant)
        with self._lock:
            store = self._open.get(key)
            if store is None:
                links = None if self._follows_links else LinkBounds(folders)
                limits = StoreLimits(links=links, deadline_s=self._deadline_s)
                store = open_samples(
                    url, reading, mapped=mapped, cells=self._cells, roots=within, limits=limits, decoder=decoder
                )
                self._open[key] = store
        if isinstance(store, UrlReader):
            for name in objects:
                store.check(name)
        return store

    def resolve_data(self, data: str, allowed: tuple[str, ...] | None = None) -> tuple[str, tuple[str, ...] | None]:
        """The canonical URL of a data set's root, and the folders in which links may lead; None means anywhere.

        Args:
            data: URL of its root.
            allowed: roots under which the tenant may read; None for all.

        Raises:
            BadRequest: The data set lies outside the node's roots that the tenant may read.
        """
        url, may_read = self._served(data, allowed)
        return url, None if self._follows_links else _folders(may_read)

    def _served(self, data: str, allowed: tuple[str, ...] | None) -> tuple[str, tuple[str, ...]]:
        """The canonical URL of a data set's root, and all roots that the tenant may read."""
        try:
            url = normalise_url(data)
        except SettingError as error:
            raise BadRequest(f"data: {error}") from error
        roots = self.allowed_roots(allowed)
        if "://" not in data or not self._is_open(url, roots):
            served = ", ".join(roots) or "no roots that you may read"
            added = "serve --data-root" if allowed is None else "the tenant's roots"
            raise BadRequest(
                f"this node does not serve {data[:200]}; it serves {served}: name data below these, or have its "
                f"operator add more by {added}"
            )
        return url, tuple(dict.fromkeys(root for root in (*roots, *self._roots) if self._is_open(root, roots)))

    def _is_open(self, url: str, roots: tuple[str, ...]) -> bool:
        """Whether a URL lies both under a root of the node and under one that the tenant may read."""
        return any(is_within(url, root) for root in self._roots) and any(is_within(url, root) for root in roots)


def _folders(roots: Sequence[str]) -> tuple[str, ...]:
    return tuple(url.path for url in map(parse_url, roots) if url.scheme == "file")


def checked_preprocess(request: FeatureRequest) -> Preprocess:
    """Check a request's samples and return its preprocessing.

    Raises:
        BadRequest: The samples are not valid; the message names the field.
    """
    request.check()
    _check_samples(request.samples, request.reading)
    preprocess = Preprocess.from_json(request.preprocess)
    if request.cut > 0 and preprocess.is_random and request.view is None:
        raise BadRequest("view: random preprocessing needs one, with seed and epoch")
    if request.cut > 1 and request.prefix is None:
        raise BadRequest(f"prefix: cut {request.cut} lies inside a network; name its prefix")
    if request.cut > 1:
        _check_levels(request.engine, preprocess)
    return preprocess


def read_ahead(
    store: Versioned,
    request: FeatureRequest,
    places: Sequence[ByteRange],
    reserve: Callable[[int], Reservation | None],
    queue: ReadAheadQueue,
    second: SecondReads | None,
    scope: CancelScope,
    held: ExitStack,
) -> Versioned:
    """The store, or a wrapper of it that reads samples of the request before they are asked for.

    Samples that are neighbours in an object are read by one request to the store.

    Args:
        store: store that holds the samples.
        request: request for the samples.
        places: places of the samples.
        reserve: function that sets memory aside for samples that were read with a neighbour and are not asked for yet;
            None where there is none now.
        queue: queue of the other reads.
        second: the way that slow reads are repeated; None if they are not.
        scope: cancel scope of the request, which also wakes threads that wait for a read.
        held: the stack, closed when the request ends.
    """
    # Parquet cells are read by whole row groups, and unpacked tars lie on this machine.
    if request.reading in (CELLS, UNPACKED):
        return store
    # Single objects and rows of a table have no neighbours.
    if request.reading == OBJECTS and not isinstance(store, CqlStore):
        together = SharedReads(store, places, reserve)
        held.callback(together.close)
        if together.joins:
            return together
    one_by_one = ReadAhead(store, queue, second)
    held.callback(one_by_one.close)
    scope.on_cancel(one_by_one.close)
    return one_by_one


def _check_levels(engine: str, preprocess: Preprocess) -> None:
    named, levels = levels_of(engine), preprocess.levels
    if named and (levels is None or levels.digest != named):
        raise BadRequest(f"engine: {engine} expects pixels with other mean and std than those of preprocess")


def _check_samples(samples: Samples, reading: str) -> None:
    if len(np.unique(samples.ids)) != len(samples):
        raise BadRequest("samples.ids: an id occurs twice")
    for name in samples.objects:
        check_object(name, reading)


MAX_NUMBERS = 1 << 18
"""Maximum count of numbers in an answer, of nodes with enough memory."""

_MEMORY_PER_NUMBER = 2048


def max_numbers(memory_bytes: int) -> int:
    """Maximum count of numbers in an answer of a node with that much memory.

    A number takes 25 bytes while it is written as JSON, fewer than what a request reserves for a byte of its body.
    """
    return min(MAX_NUMBERS, memory_bytes // _MEMORY_PER_NUMBER)


class SentSamples:
    """The inputs of a request as a ``Versioned`` store, whose objects are called by their numbers."""

    def __init__(self, inputs: Sequence[bytes]) -> None:
        self._inputs = inputs

    def read(self, object: str, offset: int, length: int) -> Buffer:
        """See ``Readable.read``."""
        return self._inputs[int(object)][offset : offset + length]

    def read_version(self, object: str, offset: int, length: int) -> tuple[Buffer, str]:
        """See ``Versioned.read_version``; there is no version."""
        return self.read(object, offset, length), ""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EmbeddingInputs:
    """The inputs of a request, as the node computes them.

    Attributes:
        request: request for their features at the frost line.
        sent: store that holds them.
        tokens: number of tokens of all texts; 0 for images.
    """

    request: FeatureRequest
    sent: SentSamples
    tokens: int


def embedding_inputs(
    wanted: EmbeddingRequest,
    resident: Resident,
    maximum: int,
    memory: RequestMemory,
    is_abandoned: Callable[[], bool],
    apart: Callable[..., object] | None = None,
) -> EmbeddingInputs:
    """The features that a request for embeddings is answered by.

    Args:
        wanted: request.
        resident: network that it names.
        maximum: maximum count of numbers in the answer.
        memory: the tenant's access to the memory for decoding, in which texts are tokenized.
        is_abandoned: True if the request was cancelled.
        apart: function that tokenizes in processes of the tenant; None does it in this process.

    Raises:
        BadRequest: the inputs are not of the network's kind, or it gives several tensors.
        OverBudget: the answer would have more numbers, or a text takes more memory than there is.
    """
    prefix = resident.prefix
    line = prefix.cuts[-1]
    if len(line.shapes) != 1:
        raise BadRequest(
            "model: several tensors cross the frost line of this network, and an embedding is one: freeze it up to a "
            "layer that gives one"
        )
    count = len(wanted.input) * math.prod(line.shapes[0])
    if count > maximum:
        raise OverBudget(
            f"the answer would have {count} numbers, and this node gives up to {maximum}: send fewer inputs, or start "
            "it with more --memory"
        )
    preprocess = _preprocess(wanted, resident)
    encoded = wanted.images() if preprocess.tokens is None else wanted.texts()
    samples = Samples(
        ids=np.arange(len(encoded)),
        objects=[str(number) for number in range(len(encoded))],
        offsets=np.zeros(len(encoded), np.int64),
        lengths=np.array([len(data) for data in encoded], np.int64),
        labels=np.full(len(encoded), -1, np.int64),
    )
    return EmbeddingInputs(
        request=FeatureRequest(
            data="", samples=samples, prefix=wanted.model, cut=line.number, preprocess=preprocess.to_json()
        ),
        sent=SentSamples(encoded),
        tokens=0
        if preprocess.tokens is None
        else _tokens(preprocess.with_tokenizer(prefix.tokenizer), encoded, memory, is_abandoned, apart),
    )


def _preprocess(wanted: EmbeddingRequest, resident: Resident) -> Preprocess:
    prefix = resident.prefix
    if prefix.tokenizer:
        if wanted.preprocess is not None:
            raise BadRequest("preprocess: texts are tokenized as the network says; leave it out")
        return Preprocess(steps=(Tokenize(content_digest(prefix.tokenizer), prefix.input_shape[-1]),))
    if wanted.preprocess is None:
        raise BadRequest("preprocess: say how this network's images are prepared, as for /v1/features")
    preprocess = Preprocess.from_json(wanted.preprocess)
    if preprocess.tokens is not None:
        raise BadRequest("preprocess: this network came without a tokenizer, and takes no texts")
    if preprocess.stored is not None or preprocess.is_random:
        raise BadRequest("preprocess: images that are sent are decoded, without random steps")
    return preprocess


def _tokens(
    preprocess: Preprocess,
    texts: Sequence[bytes],
    memory: RequestMemory,
    is_abandoned: Callable[[], bool],
    apart: Callable[..., object] | None,
) -> int:
    """Tokens of all texts, without those of padding."""
    row = np.zeros(preprocess.shape, np.int64)
    count = 0
    for number, text in enumerate(texts):
        pixels = pixels_needed(preprocess, text)
        nbytes = scratch_bytes(pixels)
        if nbytes > memory.total_bytes:
            raise OverBudget(f"input[{number}]: its {len(text)} bytes may take {readable_bytes(nbytes)} as tokens")
        with memory.reserve(nbytes, is_abandoned):
            (apart or decode_into)(preprocess, text, row, id=number, view=None, max_pixels=pixels)
        count += int(row[1].sum())
    return count


def gather_embeddings(batches: Iterable[FeatureBatch]) -> npt.NDArray[np.float32]:
    """The embeddings ``float32[n, numbers]`` of an answer, in the order of the inputs.

    Raises:
        BadRequest: an input could not be read, or its embedding has numbers that are not finite.
    """
    rows = []
    for batch in batches:
        for skipped in batch.skipped:
            raise BadRequest(f"input[{skipped.id}]: {skipped.reason}")
        rows.append(np.array(widen_bfloat16(batch.tensors[0]), np.float32).reshape(len(batch), -1))
    found = np.concatenate(rows)
    if not np.isfinite(found).all():
        row = int(np.flatnonzero(~np.isfinite(found).all(axis=1))[0])
        raise BadRequest(f"input[{row}]: the network gives numbers that are not finite")
    return found


class Embedding(TypedDict):
    """The embedding of one input.

    Attributes:
        object: the word "embedding".
        index: number of the input, counted from 0.
        embedding: numbers, or the base64 of little-endian float32.
    """

    object: Literal["embedding"]
    index: Count
    embedding: list[float] | str


class Embeddings(TypedDict):
    """The embeddings of some inputs.

    Attributes:
        object: the word "list".
        data: the embeddings in the order of the inputs.
        model: digest of the prefix.
        usage: numbers of tokens, ``prompt_tokens`` and ``total_tokens``.
    """

    object: Literal["list"]
    data: list[Embedding]
    model: Digest
    usage: dict[str, Count]


def answer_body(wanted: EmbeddingRequest, found: npt.NDArray[np.float32], tokens: int) -> bytes:
    """The answer to a request for embeddings as JSON, written a row at a time, since lists of floats are large."""
    rows = b",".join(
        b'{"object":"embedding","index":%d,"embedding":%s}' % (number, _written(row, wanted.encoding_format))
        for number, row in enumerate(found)
    )
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    rest = json.dumps({"model": wanted.model, "usage": usage}, separators=(",", ":")).encode()
    return b'{"object":"list","data":[' + rows + b"]," + rest[1:]


def _written(row: npt.NDArray[np.float32], encoding: str) -> bytes:
    if encoding == "base64":
        return b'"' + base64.b64encode(row.astype("<f4").tobytes()) + b'"'
    return json.dumps(row.tolist(), separators=(",", ":")).encode()
