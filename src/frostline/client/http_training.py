"""A training on a node over HTTP: one long answer, whose lines a thread of its own reads."""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self

from frostline.errors import FrostlineError, NodeUnreachable, Refused
from frostline.wire.http.exchange import Exchange, Message
from frostline.wire.http.pool import Connections
from frostline.wire.refusals import error_from_answer

__all__ = ("HttpTraining",)

_OK = 200
_BINARY = "application/octet-stream"


class HttpTraining:
    """See ``BesideTraining``. The request is sent when the context is entered.

    A thread reads, so that Ctrl-C never falls into the middle of a line: the training can be asked to end, and what
    it says then is not lost.

    Args:
        connections: to the node.
        url: of the node, for sentences.
        prefix: digest of the frozen part.
        assignment: the file of what is to be trained.
        headers: of every message: they say who asks.
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
        self._id = str(_value(self._exchange.read_line()).get("id"))

    def _read(self) -> None:
        """In a thread: hand over line by line; the end is None."""
        try:
            while line := self._exchange.read_line():
                if line.strip():  # an empty one only says that the node is alive
                    self._lines.put(_value(line))
        except FrostlineError as error:
            self._lines.put(error)
        self._lines.put(None)


def _value(line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise Refused("the node tells something that is no event")
    return value
