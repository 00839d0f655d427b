"""The way to a node over HTTP: blocking sockets in the caller's threads, bytes read straight into arrays.

What answers of every connected transport have alike: one reads, any thread may close, and a closed one ends.
"""

import hashlib
import json
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from queue import SimpleQueue
from types import MappingProxyType, TracebackType
from typing import Any, Protocol, Self, TypeVar

from frostline.core import FeatureBatch
from frostline.core.config import LoaderSettings
from frostline.core.errors import AnswerDamaged, FrostlineError, NodeUnreachable, Refused, Unavailable, UnknownPrefix
from frostline.core.system import crc32
from frostline.profiles import Profile
from frostline.transport import Cancellation, TransportStatistics
from frostline.wire import pieces
from frostline.wire.connection import Connections, Exchange, Message
from frostline.wire.framing import MEDIA_TYPE, decode
from frostline.wire.messages import (
    CHECKSUM_HEADER,
    PROTOCOL_HEADER,
    PROTOCOLS,
    FeatureRequest,
    Health,
    ProfileRequest,
    common_protocol,
    error_from_answer,
)
from frostline.wire.pieces import LENGTH_HEADER, pieces_of, without

__all__ = (
    "Counts",
    "HttpResponse",
    "HttpTraining",
    "HttpTransport",
    "ResponseStream",
)


class Counts(Protocol):
    """Counts what is asked."""

    def count_requests(self, *, requests: int = 0) -> AbstractContextManager[None]:
        """Count requests, and the failure where there is one, and the seconds until it has ended."""


class ResponseStream(ABC):
    """The batches of one answer; the request is sent when the first is asked for.

    ``close`` may be called from any thread and frees one that waits in ``next``.
    """

    def __init__(self, transport: Counts) -> None:
        self._counts = transport
        self._turn = threading.Lock()
        self._has_begun = False
        self._is_closed = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> FeatureBatch:
        try:
            with self._turn:
                return self._counted()
        finally:
            if self._is_closed:
                self._tidy()

    def close(self) -> None:
        """Abandon the rest."""
        self._is_closed = True
        self._break_off()
        self._tidy()

    @abstractmethod
    def _next(self, *, is_first: bool) -> FeatureBatch:
        """The next batch, for which the request is sent where it is the first; ``StopIteration`` after the last."""

    @abstractmethod
    def _break_off(self) -> None:
        """Free a thread that waits in ``_next``, from any thread."""

    @abstractmethod
    def _end(self) -> None:
        """Nothing more is read. Calling it again does nothing."""

    def _tidy(self) -> None:
        """Close the connection, unless another thread is still in ``next``: then that one does."""
        if self._turn.acquire(blocking=False):
            try:
                self._end()
            finally:
                self._turn.release()

    def _counted(self) -> FeatureBatch:
        if self._is_closed:
            raise StopIteration
        is_first, self._has_begun = not self._has_begun, True
        try:
            with self._counts.count_requests(requests=int(is_first)):
                return self._next(is_first=is_first)
        except Unavailable:
            if self._is_closed:  # it broke because it was closed
                raise StopIteration from None
            raise


_OK = 200
_BINARY = "application/octet-stream"


class HttpTraining:
    """See ``BesideTraining``. The request is sent when the context is entered.

    A thread reads, so that Ctrl-C never falls into the middle of a line: the training can be asked to end, and what
    it says then is not lost.

    Args:
        connections: the connections to the node.
        url: URL of the node, for sentences.
        prefix: digest of the frozen part.
        assignment: the file of what is to be trained.
        headers: headers of every message: they say who asks.
    """

    def __init__(
        self, connections: Connections, url: str, prefix: str, assignment: bytes, headers: Mapping[str, str]
    ) -> None:
        self._connections = connections
        self._url = url
        self._headers = headers
        self._message = Message(
            method="POST",
            path=f"/v1/trainings?prefix={prefix}",
            body=assignment,
            media_type=_BINARY,
            headers=headers,
            may_repeat=False,
        )
        self._exchange = Exchange(connections, url)
        self._id = ""
        self._lines: SimpleQueue[dict[str, Any] | FrostlineError | None] = SimpleQueue()
        self._reader = threading.Thread(target=self._read, name="frostline-training", daemon=True)

    def __enter__(self) -> Self:
        try:
            self._begin()
        except BaseException:
            self._exchange.break_off()
            self._exchange.end()
            raise
        self._reader.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exchange.break_off()
        self._reader.join()
        self._exchange.end()
        if error is None:
            self.stop()  # which has the node forget what it kept

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while (line := self._lines.get()) is not None:
            if isinstance(line, FrostlineError):
                raise line
            yield line

    def stop(self) -> None:
        """See ``BesideTraining``."""
        exchange = Exchange(self._connections, self._url)
        status = exchange.send(self._about("DELETE"))
        body = exchange.read_all()
        if status not in (_OK, 202, 404):
            raise error_from_answer(status, body)

    def tensors(self, nbytes: int, digest: str) -> bytes:
        """See ``BesideTraining``."""
        exchange = Exchange(self._connections, self._url)
        status = exchange.send(self._about("GET"))
        if status != _OK:
            raise error_from_answer(status, exchange.read_all())
        body = bytes(exchange.read(nbytes))
        exchange.end()
        if hashlib.sha256(body).hexdigest() != digest:
            raise NodeUnreachable("the trained tensors changed or broke off on their way")
        return body

    def _about(self, method: str) -> Message:
        return Message(method=method, path=f"/v1/trainings/{self._id}", headers=self._headers)

    def _begin(self) -> None:
        status = self._exchange.send(self._message)
        if status != _OK:
            raise error_from_answer(status, self._exchange.read_all())
        self._id = str(_event_value(self._exchange.read_line()).get("id"))

    def _read(self) -> None:
        """In a thread: hand over line by line; the end is None."""
        try:
            while line := self._exchange.read_line():
                if line.strip():  # an empty one only says that the node is alive
                    self._lines.put(_event_value(line))
        except FrostlineError as error:
            self._lines.put(error)
        self._lines.put(None)


def _event_value(line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise Refused("the node sent a line that is no event of the training")
    return value


_CREATED = 201
# Trying engines takes up to ten minutes where the prefix is new to the node's hardware, after others' trials.
_TRIALS_S = 1800.0
# The node's part of the longest silence, so that its own sentence comes before the connection counts as broken.
_ANSWER_WITHIN = 0.95

# What the node has of a prefix is asked for where this much could be saved, which a round trip is worth; and again
# where it was evicted before the rest came. Then the prefix is sent whole.
_MIN_SHARED_BYTES = 1 << 20
_PIECE_ROUNDS = 2

_NONE: Mapping[str, str] = MappingProxyType({})

T = TypeVar("T")


class HttpTransport:
    """A ``Transport`` to a node at an address. Nothing is connected before the first call; a fork may use it too.

    Args:
        url: address, such as ``http://store-1:7070`` or ``https://store-1:7070``.
        settings: settings of the job's loader.

    Raises:
        SettingError: The address is none.
    """

    def __init__(self, url: str, settings: LoaderSettings | None = None) -> None:
        settings = settings or LoaderSettings()
        self._url = url.rstrip("/")
        self._connections = Connections(
            url,
            deadline_s=settings.deadline_s,
            max_idle=settings.last_requests + 1,
            tls=settings.tls,
        )
        self._identity = {} if settings.token is None else {"Authorization": f"Bearer {settings.token}"}
        self._protocol = PROTOCOLS[1]
        self._deadline = {"Frostline-Deadline": f"{_ANSWER_WITHIN * settings.deadline_s:.6g}"}
        self._lock = threading.Lock()
        self._requests = self._waiting = 0
        self._failures = self._damaged = 0
        self._receive_s = 0.0

    @property
    def url(self) -> str:
        """The address of the node."""
        return self._url

    def health(self) -> Health:
        """See ``Transport``."""
        found = _value(Health.from_json, self._exchange_json(self._message("GET", "/v1/health")), self._url)
        self._protocol = common_protocol(found.protocol) or PROTOCOLS[1]
        return found

    def put_prefix(self, digest: str, artifact: bytes, before_upload: Callable[[], None] | None = None) -> None:
        """See ``Transport``."""
        path = f"/v1/prefixes/{digest}"
        if self._exchange(self._message("HEAD", path), accepted=(_OK, 404))[0] == _OK:
            return
        if not self._put_rest(path, artifact, before_upload):
            self._upload(path, artifact, before_upload, media_type=_BINARY)

    def _upload(self, path: str, body: bytes, before_upload: Callable[[], None] | None, **said: Any) -> None:
        if before_upload is not None and len(body) >= _MIN_SHARED_BYTES:
            before_upload()
        self._exchange(self._message("PUT", path, body=body, **said))

    def _put_rest(self, path: str, artifact: bytes, before_upload: Callable[[], None] | None) -> bool:
        """Send a prefix without the pieces that the node has; False where that saves little, or they go meanwhile."""
        shared = pieces_of(artifact)
        if sum(piece.stop - piece.start for piece in shared) < _MIN_SHARED_BYTES:
            return False
        names, headers = json.dumps([piece.digest for piece in shared]).encode(), {LENGTH_HEADER: str(len(artifact))}
        for _ in range(_PIECE_ROUNDS):
            known = _value(_held, self._exchange_json(self._message("POST", "/v1/pieces", body=names)), self._url)
            held = [piece for piece in shared if piece.digest in known]
            if not held:
                return False
            rest = without(artifact, held)
            with suppress(UnknownPrefix):
                self._upload(path, rest, before_upload, media_type=pieces.MEDIA_TYPE, headers=headers)
                return True
        return False

    def profile(self, wanted: ProfileRequest, cancellation: Cancellation | None = None) -> Profile:
        """See ``Transport``."""
        message = self._message("POST", "/v1/profiles", body=_json(wanted), silence_s=_TRIALS_S)
        return _value(Profile.from_json, self._exchange_json(message, cancellation), self._url)

    def features(self, request: FeatureRequest) -> "HttpResponse":
        """See ``Transport``."""
        message = self._message("POST", "/v1/features", body=_json(request), headers=self._deadline)
        return HttpResponse(Exchange(self._connections, self._url), message, self)

    def train(self, prefix: str, assignment: bytes) -> HttpTraining:
        """See ``TrainsBeside``."""
        return HttpTraining(self._connections, self._url, prefix, assignment, self._asked_by)

    def node_statistics(self) -> dict[str, Any]:
        """See ``Transport``."""
        return _value(dict, self._exchange_json(self._message("GET", "/v1/statistics")), self._url)

    def statistics(self) -> TransportStatistics:
        """See ``Transport``."""
        received, sent = self._connections.meter.read()
        transfer_bytes, transfer_s = self._connections.transfers.read()
        with self._lock:
            return TransportStatistics(
                bytes_received=received,
                bytes_sent=sent,
                requests=self._requests,
                failures=self._failures,
                receive_s=self._receive_s,
                damaged=self._damaged,
                transfer_bytes=transfer_bytes,
                transfer_s=transfer_s,
                waiting=self._waiting,
            )

    def break_off(self) -> None:
        """See ``Transport``."""
        self._connections.break_off()

    def close(self) -> None:
        """Close the idle connections, and those under way when they come back."""
        self._connections.drop_idle(for_good=True)

    @contextmanager
    def count_requests(self, *, requests: int = 0) -> Iterator[None]:
        """Count requests, and the failure where there is one, and the seconds until it has ended."""
        started = time.perf_counter()
        failures = damaged = 0
        with self._lock:
            self._waiting += 1
        try:
            yield
        except FrostlineError as error:
            failures, damaged = 1, int(isinstance(error, AnswerDamaged))
            raise
        finally:
            with self._lock:
                self._waiting -= 1
                self._requests += requests
                self._failures += failures
                self._damaged += damaged
                self._receive_s += time.perf_counter() - started

    @property
    def _asked_by(self) -> dict[str, str]:
        """Headers that say who asks, and in which protocol."""
        return {PROTOCOL_HEADER: str(self._protocol), **self._identity}

    def _message(self, method: str, path: str, *, headers: Mapping[str, str] = _NONE, **said: Any) -> Message:
        """What is sent, with who asks."""
        body = said.get("body")
        summed = {} if body is None else {CHECKSUM_HEADER: f"{crc32(body):08x}"}
        return Message(method=method, path=path, headers={**self._asked_by, **summed, **headers}, **said)

    def _exchange(
        self,
        message: Message,
        accepted: tuple[int, ...] = (_OK, _CREATED),
        cancellation: Cancellation | None = None,
    ) -> tuple[int, bytes]:
        exchange, cancellation = Exchange(self._connections, self._url), cancellation or Cancellation()
        with self.count_requests(requests=1), cancellation.ends(exchange.break_off):
            status = exchange.send(message)
            body = exchange.read_all()
            if status not in accepted:
                raise error_from_answer(status, body)
            return status, body

    def _exchange_json(self, message: Message, cancellation: Cancellation | None = None) -> Any:
        _, body = self._exchange(message, cancellation=cancellation)
        try:
            return json.loads(body)
        except ValueError as error:
            raise FrostlineError(f"what answers at {self._url} is no node: its answer is no JSON") from error


class HttpResponse(ResponseStream):
    """The batches of one answer; see ``ResponseStream``."""

    def __init__(self, exchange: Exchange, message: Message, transport: HttpTransport) -> None:
        super().__init__(transport)
        self._transport = transport
        self._exchange = exchange
        self._message = message
        self._batches: Iterator[FeatureBatch] = iter(())

    def _break_off(self) -> None:
        self._exchange.break_off()

    def _end(self) -> None:
        self._exchange.end()

    def _next(self, *, is_first: bool) -> FeatureBatch:
        if is_first:
            status = self._exchange.send(self._message)
            if status != _OK:
                raise self._said(self._refusal(status))
            self._exchange.require(MEDIA_TYPE)
            self._batches = decode(self._exchange)
        try:
            return next(self._batches)
        except StopIteration:
            self._exchange.end()
            raise
        except FrostlineError as error:
            self._exchange.break_off()
            self._exchange.end()
            if isinstance(error, AnswerDamaged):
                error = AnswerDamaged(f"what came from {self._transport.url} is damaged: {error}")
            raise self._said(error) from None

    def _refusal(self, status: int) -> FrostlineError:
        if self._exchange.is_of(MEDIA_TYPE):  # a refusal is JSON: these are features under a status that was flipped
            self._exchange.break_off()
            self._exchange.end()
            return AnswerDamaged(f"what came from {self._transport.url} is damaged: features of status {status}")
        return error_from_answer(status, self._exchange.read_all())

    def _said(self, error: FrostlineError) -> FrostlineError:
        """The error with the name of the node that told it."""
        if self._transport.url not in str(error):
            error.args = (f"{error} (said by {self._transport.url})",)
        return error


def _held(value: dict[str, Any]) -> set[str]:
    return {str(name) for name in value["held"]}


def _json(request: FeatureRequest | ProfileRequest) -> bytes:
    return json.dumps(request.to_json(), separators=(",", ":")).encode()


def _value(from_json: Callable[[dict[str, Any]], T], value: Any, url: str) -> T:
    try:
        return from_json(value)
    except (KeyError, TypeError, ValueError) as error:
        raise FrostlineError(f"what answers at {url} is no node of this version: {type(error).__name__}") from error
