"""Answers one request for rows, from the row cache or from upstream, in shared memory lent to a session."""

import hashlib
import json
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from frostline.cache.keys import row_keys
from frostline.client.http import HttpTransport
from frostline.client.membership import PROBE_S, NodeWatch, ask_protocol, connect_balanced, watch_node
from frostline.core import EXACT, REFERENCE, FeatureBatch
from frostline.core.config import LoaderSettings, NodeSettings
from frostline.core.errors import EngineNotReady, FrostlineError, Overloaded, SettingError
from frostline.core.units import log_named
from frostline.io_service.rows import ByteLimiter, Row, RowCache, RowFetch
from frostline.transport import Transport
from frostline.wire.messages import FeatureRequest
from frostline.wire.node_lists import NodeList
from frostline.wire.shared_memory import BACK, CLOSED, RECORD, Block, RowBlock, is_alike, lay_out

__all__ = (
    "ClientDisconnected",
    "Delivered",
    "Records",
    "RequestHandler",
    "Session",
    "Upstream",
    "hang_up",
    "peer_of",
    "share_parts",
    "watched_process",
)


_LOG = log_named("frostline.io")


def _left_out(url: str, engine: str, why: EngineNotReady) -> None:
    _LOG.warning("%s is left out of what %s computes: %s", url, engine, why)


def _watch(lost: str) -> NodeWatch:
    """Logs who comes and goes: a service has no observer. ``lost`` says what becomes of one that is silent."""
    return NodeWatch(
        joined=lambda url: _LOG.info("%s takes part", url),
        left=lambda url, why: _LOG.info("%s takes part no more: %s", url, why),
        refused=lambda url, why: _LOG.warning("%s is left out: %s", url, why),
        lost=lambda url, why: _LOG.warning("%s is %s: %s", url, lost, why),
        back=lambda url: _LOG.warning("%s answers again", url),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Upstream:
    """What is asked.

    Attributes:
        near: URLs of nodes that serve the same data, or of lists of them; none to read the stores here.
        roots: URLs under which data is read here.
        node: settings of the node that does so.
    """

    near: tuple[str, ...] = ()
    roots: tuple[str, ...] = ()
    node: NodeSettings = field(default_factory=NodeSettings)

    def __post_init__(self) -> None:
        if bool(self.near) == bool(self.roots):
            raise SettingError(
                "an I/O service asks nodes (--near) or reads data itself (--data-root): give one of them"
            )

    @contextmanager
    def connect(self) -> Iterator[Transport]:
        """The way there, closed at the end.

        Raises:
            SettingError: An address or a root makes no sense.
            Refused: No node speaks a protocol of this version.
        """
        if not self.near:
            yield from self._here()
            return
        probing = LoaderSettings(deadline_s=PROBE_S)
        if len(self.near) > 1 or NodeList.is_one(self.near[0]):
            several = connect_balanced(
                self.near,
                make=HttpTransport,
                probe=partial(HttpTransport, settings=probing),
                left_out=_left_out,
                watch=_watch("asked nothing for now"),
            )
            with several as transport:
                yield transport
            return
        [node] = self.near
        ask_protocol(node, HttpTransport(node, probing))
        probe, watch = partial(HttpTransport, settings=probing), _watch("waited for")
        with (
            closing(HttpTransport(node)) as alone,
            watch_node(node, alone, probe=probe, watch=watch, patience_s=LoaderSettings().deadline_s),
        ):
            yield alone

    def _here(self) -> Iterator[Transport]:
        # These import torch, which a service before a node has no need of.
        from frostline.node import Node
        from frostline.node.in_process import LocalTransport

        # A service reads for the jobs of one user.
        with Node(replace(self.node, follow_links=True), self.roots) as node:
            yield LocalTransport(node)


_MAX_PARTS = 512  # of one call; Linux takes 1,024


def share_parts(parts: Sequence[memoryview]) -> int:
    """A descriptor of memory that holds these parts one after the other and never changes; the caller closes it.

    Raises:
        Overloaded: The system gives none.
    """
    try:
        return _written(parts)
    except OSError as error:
        raise Overloaded(f"the I/O service gets no shared memory: {error.strerror}", retry_after_s=1.0) from error


def _written(parts: Sequence[memoryview]) -> int:
    # It is written by calls and never mapped here: filling a mapping takes a page fault for each page.
    descriptor = os.memfd_create("frostline", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        left = list(parts)
        while left:
            left = _without(left, os.writev(descriptor, left[:_MAX_PARTS]))
        _seal(descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _seal(descriptor: int) -> None:
    """Have the memory stay as it is: whoever gets the descriptor can rely on that."""
    import fcntl  # which Windows lacks: a job without an I/O service needs none

    seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)


def _without(parts: Sequence[memoryview], nbytes: int) -> list[memoryview]:
    """What is left of parts after so many bytes."""
    for place, part in enumerate(parts):
        if nbytes < part.nbytes:
            return [part[nbytes:], *parts[place + 1 :]]
        nbytes -= part.nbytes
    return []


_CREDENTIALS = struct.Struct("3i")
_PEER_PIDFD = 77  # SO_PEERPIDFD, from Linux 6.5 on; this Python has no name for it
_MAX_RECORDS = 4096


class ClientDisconnected(Exception):
    """Whoever asked is not there any more."""


class Session:
    """A process that asks. Safe for threads.

    Args:
        name: name that it gave itself.
        job: job that it belongs to; several processes may.
        pid: id of the process, as the system says; 0 where it cannot.
        give_back: function that is told of each number of bytes that it has done with.
    """

    def __init__(self, name: str, job: str, pid: int, give_back: Callable[[int], None]) -> None:
        self.name = name
        self.job = job
        self.pid = pid
        self._give_back = give_back
        self._lock = threading.Lock()
        self._lent: dict[tuple[int, int], int] = {}
        self._open: dict[socket.socket, Callable[[], None]] = {}
        self._has_ended = False

    def add_connection(self, sock: socket.socket, abandon: Callable[[], None]) -> None:
        """A connection of it works; ``abandon`` ends that.

        Raises:
            Gone: The session has ended.
        """
        with self._lock:
            if self._has_ended:
                raise ClientDisconnected
            self._open[sock] = abandon

    def drop_connection(self, sock: socket.socket) -> None:
        """The connection is idle again, or gone."""
        with self._lock:
            self._open.pop(sock, None)

    def lend(self, answer: int, block: int, nbytes: int) -> None:
        """Note that the session is about to get a block.

        Raises:
            Gone: The session has ended.
        """
        with self._lock:
            if self._has_ended:
                raise ClientDisconnected
            self._lent[answer, block] = nbytes

    def back(self, answer: int, block: int) -> None:
        """Note that the session has done with a block, or did not get it; one that it was not lent does not count."""
        with self._lock:
            nbytes = self._lent.pop((answer, block), 0)
        if nbytes:
            self._give_back(nbytes)

    def take_message(self, record: bytes) -> None:
        """Take what a session says: that it has done with a block, or closed an answer of which it got so many."""
        answer, kind, number = RECORD.unpack(record)
        if kind == BACK:
            self.back(answer, number)
        elif kind == CLOSED:
            with self._lock:
                unseen = [block for lent, block in self._lent if lent == answer and block >= number]
            for block in unseen:
                self.back(answer, block)

    def end(self) -> None:
        """The process is gone: all that it was lent comes back, and all that it had under way ends."""
        with self._lock:
            self._has_ended = True
            nbytes, self._lent = sum(self._lent.values()), {}
            under_way = list(self._open.items())
        if nbytes:
            self._give_back(nbytes)
        for number, abandon in under_way:
            hang_up(number)
            abandon()


class Records:
    """What a session says while it runs, as it comes. For the watching thread."""

    def __init__(self, sock: socket.socket, session: Session, ended: Callable[[], None]) -> None:
        self._socket = sock
        self._session = session
        self._ended = ended
        self._left = b""

    def read(self) -> None:
        """Read what there is."""
        try:
            came = self._socket.recv(RECORD.size * _MAX_RECORDS)
        except BlockingIOError:
            return
        except OSError:
            came = b""
        if not came:
            self._ended()
            return
        data = self._left + came
        whole = len(data) - len(data) % RECORD.size
        self._left = data[whole:]
        for start in range(0, whole, RECORD.size):
            self._session.take_message(data[start : start + RECORD.size])


def hang_up(sock: socket.socket) -> None:
    """Free whoever waits on a socket; it is closed by its own thread."""
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:  # it is closed, or the peer is gone
        return


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """Process id and user id of whoever is at the other end; the first is 0 where it cannot be seen from here."""
    found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(found)
    return pid, user


def watched_process(sock: socket.socket, pid: int) -> int | None:
    """A descriptor that is readable once the process at the other end has ended; None where the system has none.

    A socket alone does not tell: where the process forked, its children hold the socket too.
    """
    try:
        return struct.unpack("i", sock.getsockopt(socket.SOL_SOCKET, _PEER_PIDFD, 4))[0]  # type: ignore[no-any-return]
    except OSError:
        try:
            return os.pidfd_open(pid) if pid else None
        except OSError:
            return None


# Part of every name: raise it whenever the same inputs would give other bytes.
_RULE = "frostline rows 1"


def _scope_of(request: FeatureRequest) -> bytes:
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


def _request_keys(request: FeatureRequest, scope: bytes) -> list[bytes | None]:
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
        block: the block as they lie in shared memory; its buffers stay as they are.
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
        upstream: the upstream to the node.
        row_cache: row cache of all jobs.
        in_flight: bytes under way.
        deliver: function that lends and sends rows; raises ``ClientDisconnected`` where nobody takes them.
    """

    request: FeatureRequest
    job: str
    upstream: Transport
    row_cache: RowCache
    in_flight: ByteLimiter
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
            FrostlineError: The node answered with this error what the request had to fetch.
        """
        scope = _scope_of(self.request)
        keys = _request_keys(self.request, scope)
        self._rows = [None] * len(keys)
        with self.in_flight.reserve(self.job, self.request, scope, self._is_gone.is_set) as ticket:
            self._check_gone()
            self._ticket = ticket
            while self._cursor < len(keys):
                self._round(keys, scope)

    def abandon(self) -> None:
        """Nobody wants the answer: end what it fetches, unless others wait for that."""
        self._is_gone.set()
        self.in_flight.wake()
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
                self.row_cache.take_rows(flight, [(keys[place], row) for place, row in rows], batch.nbytes)
                self.in_flight.learn(scope, batch)
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
