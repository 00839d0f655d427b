"""Answers one request for rows: from the row cache, from reads under way, and from the node for the rest, in order."""

import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from frostline.cache.keys import row_keys
from frostline.core import EXACT, REFERENCE, FeatureBatch
from frostline.errors import FrostlineError
from frostline.io_service.byte_limiter import ByteLimiter
from frostline.io_service.row_cache import Row, RowCache, RowFetch
from frostline.io_service.sessions import ClientDisconnected
from frostline.transport.protocol import Transport
from frostline.wire.blocks import Block, RowBlock, is_alike, lay_out
from frostline.wire.messages import FeatureRequest

__all__ = ("Delivered", "RequestHandler", "request_keys", "scope_of")

# Part of every name: raise it whenever the same inputs would give other bytes.
_RULE = "frostline rows 1"


def scope_of(request: FeatureRequest) -> bytes:
    """What rows of a request depend on beside their samples, as 16 bytes.

    An encoded sample depends on where it is alone, so that jobs that decode it in different ways share it.
    """
    values = {
        "rule": _RULE,
        "data": request.data,
        "reading": request.reading,
        "cut": request.cut,
        **(_computed(request) if request.cut else {}),
    }
    return hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=16).digest()


def request_keys(request: FeatureRequest, scope: bytes) -> list[bytes | None]:
    """A name for each sample's row; None where nobody knows its object's version: it could be another one by now."""
    return [None if key is None else scope + key for key in row_keys(request.samples)]


def _computed(request: FeatureRequest) -> dict[str, object]:
    view = request.view
    return {
        "prefix": request.prefix,
        "preprocess": request.preprocess,
        # Whether it will be wanted again changes no pixel.
        "view": None if view is None else [view.seed, view.epoch],
        "codec": request.codec,
        "tolerance": None if request.codec == EXACT else request.tolerance,
        "engine": request.engine if request.cut > 1 else REFERENCE,
    }


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Delivered:
    """Rows that are ready to be sent.

    Attributes:
        block: as they lie in shared memory; its buffers stay as they are.
        ticket: ticket of ``ByteLimiter``, under which they are lent.
        read_bytes: bytes of these that were read for this request.
    """

    block: Block
    ticket: int
    read_bytes: int


@dataclass(slots=True, kw_only=True, eq=False)
class RequestHandler:
    """One request on its way. ``deliver`` is called from one thread; ``abandon`` from any.

    Attributes:
        request: request of the client.
        job: job that sent it.
        upstream: to the node.
        row_cache: row cache of all jobs.
        room: bytes under way.
        deliver: lends and sends rows; raises ``ClientDisconnected`` where nobody takes them.
    """

    request: FeatureRequest
    job: str
    upstream: Transport
    row_cache: RowCache
    room: ByteLimiter
    deliver: Callable[[Delivered], None]
    _is_gone: threading.Event = field(default_factory=threading.Event)
    _flight: RowFetch | None = None
    _rows: list[Row | None] = field(default_factory=list)
    _own: set[int] = field(default_factory=set)
    _cursor: int = 0
    _ticket: int = 0

    def run(self) -> None:
        """Answer it whole.

        Raises:
            Gone: The client has closed the request.
            FrostlineError: What the node answered to what this request had to fetch.
        """
        scope = scope_of(self.request)
        keys = request_keys(self.request, scope)
        self._rows = [None] * len(keys)
        with self.room.taken(self.job, self.request, scope, self._is_gone.is_set) as ticket:
            self._check_gone()
            self._ticket = ticket
            while self._cursor < len(keys):
                self._round(keys, scope)

    def abandon(self) -> None:
        """Nobody wants the answer: end what it fetches, unless others wait for that."""
        self._is_gone.set()
        self.room.wake()
        self.row_cache.wake()
        flight = self._flight
        if flight is not None and not self.row_cache.orphan(flight):
            flight.close()

    def _round(self, keys: Sequence[bytes | None], scope: bytes) -> None:
        """Fetch what nobody else does, then wait for what others fetch; what they did not bring is left over."""
        lacking = [place for place in range(self._cursor, len(keys)) if self._rows[place] is None]
        fetching = _Fetching()
        flight = self._flight = RowFetch(fetching.close)
        claims = list(zip(lacking, self.row_cache.claim([keys[place] for place in lacking], flight), strict=True))
        others = {claim for _, claim in claims if isinstance(claim, RowFetch)}
        try:
            for place, claim in claims:
                if isinstance(claim, Row):
                    self._rows[place] = claim
            own = [place for place, claim in claims if claim is None]
            try:
                self._fetch(own, keys, scope, flight, fetching)
            finally:
                self.row_cache.end(flight, [keys[place] for place in own])
            self._hand_out()
            for place, claim in claims:
                if isinstance(claim, RowFetch):
                    self._rows[place] = self.row_cache.wait(claim, keys[place] or b"", self._is_gone.is_set)
                    self._hand_out()
        finally:
            self.row_cache.leave(others)

    def _fetch(
        self,
        own: Sequence[int],
        keys: Sequence[bytes | None],
        scope: bytes,
        flight: RowFetch,
        fetching: "_Fetching",
    ) -> None:
        """Have the node send these rows, and hand out what can be while they come."""
        if not own:
            return
        request = self.request
        if len(own) < len(keys):
            request = replace(request, samples=request.samples.take(np.array(own, np.int64)))
        places = dict(zip(request.samples.ids.tolist(), own, strict=True))
        self._own.update(own)
        try:
            for batch in fetching.begin(self.upstream.features(request)):
                rows = list(_rows_of(batch, places))
                self.row_cache.arrived(flight, [(keys[place], row) for place, row in rows], batch.nbytes)
                self.room.learn(scope, batch)
                for place, row in rows:
                    self._rows[place] = row
                self._go_on(flight)
        finally:
            fetching.close()
        if any(self._rows[place] is None for place in own):
            self._check_gone()
            raise FrostlineError("the node's answer lacks samples that it was asked for")

    def _go_on(self, flight: RowFetch) -> None:
        """Hand out what came; where nobody takes it any more, go on only for others."""
        try:
            self._hand_out()
        except ClientDisconnected:
            self._is_gone.set()
            if not self.row_cache.orphan(flight):
                raise

    def _hand_out(self) -> None:
        """Send all rows that are there, up to the first that is not."""
        self._check_gone()
        while self._cursor < len(self._rows) and (ready := self._run()):
            self._cursor += len(ready)
            self._send(ready)

    def _run(self) -> list[Row]:
        """Rows that are there and alike, from the next one on."""
        found: list[Row] = []
        for row in self._rows[self._cursor :]:
            if row is None or (found and not is_alike(row.batch, found[0].batch)):
                break
            found.append(row)
        return found

    def _send(self, rows: Sequence[Row]) -> None:
        places = range(self._cursor - len(rows), self._cursor)
        skipped = [row.skipped for row in rows if row.skipped is not None]
        block = lay_out(list(_pieces(rows)), skipped)
        read = sum(_nbytes(row) for place, row in zip(places, rows, strict=True) if place in self._own)
        for place in places:
            self._rows[place] = _HANDED_OUT
        self.deliver(Delivered(block=block, ticket=self._ticket, read_bytes=round(read)))

    def _check_gone(self) -> None:
        if self._is_gone.is_set():
            raise ClientDisconnected


class _Fetching:
    """An answer of the node that any thread may end, also before it has begun."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_closed = False
        self._answer: Iterator[FeatureBatch] | None = None

    def begin(self, answer: Iterator[FeatureBatch]) -> Iterator[FeatureBatch]:
        with self._lock:
            self._answer = answer
            is_closed = self._is_closed
        if is_closed:
            _close(answer)
            return iter(())
        return answer

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            answer = self._answer
        if answer is not None:
            _close(answer)


# Stands where a row was, so that it does not stay in memory for the rest of its answer.
_HANDED_OUT = Row(batch=FeatureBatch(ids=np.zeros(0, np.int64)), place=0)


def _close(answer: Iterator[FeatureBatch]) -> None:
    close = getattr(answer, "close", None)
    if close is not None:
        close()


def _rows_of(batch: FeatureBatch, places: dict[int, int]) -> Iterator[tuple[int, Row]]:
    """The rows of a batch, with their places in the request; what was not asked for is no row."""
    for row, id in enumerate(batch.ids.tolist()):
        if id not in places:
            raise FrostlineError("the node answered a sample that it was not asked for")
        yield places[id], Row(batch=batch, place=row)
    for sample in batch.skipped:
        if sample.id in places:
            yield places[sample.id], Row(batch=batch, place=0, skipped=sample)


def _pieces(rows: Sequence[Row]) -> Iterator[RowBlock]:
    """Neighbours of one batch, read together."""
    start = 0
    for place in range(1, len(rows) + 1):
        if place < len(rows) and _follows(rows[place - 1], rows[place]):
            continue
        first, last = rows[start], rows[place - 1]
        yield RowBlock(batch=first.batch, start=first.place, stop=first.place if first.skipped else last.place + 1)
        start = place


def _follows(row: Row, following: Row) -> bool:
    if row.skipped or following.skipped:
        return False
    return row.batch is following.batch and following.place == row.place + 1


def _nbytes(row: Row) -> float:
    if row.skipped is not None:
        return 0
    encoded = row.batch.encoded
    return len(encoded[row.place]) if encoded else row.batch.nbytes / max(1, len(row.batch))
