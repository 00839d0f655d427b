"""A transport to a node in the same process."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from functools import partial
from typing import Any, Self

from frostline.core import FeatureBatch
from frostline.core.errors import FrostlineError, Unavailable
from frostline.node import Node
from frostline.node.memory import Cancelled
from frostline.node.pipeline import BatchStream
from frostline.node.service import FolderStream
from frostline.preprocess import Preprocess
from frostline.profiles import Profile
from frostline.stores.readahead import BlockReads
from frostline.transport import Cancellation, TransportStatistics
from frostline.wire.messages import FeatureRequest, Health, ProfileRequest

__all__ = ("LocalResponse", "LocalTransport")


class LocalTransport:
    """A ``Transport`` to a node in this process, which the caller closes.

    ``bytes_received`` counts the bytes that the node read from the store, since only those cross a network here.

    Args:
        node: node that answers the requests.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._direct = node.direct_reads()
        self._latest: tuple[dict[str, Any], Preprocess] | None = None
        self._lock = threading.Lock()
        self._requests = 0
        self._failures = 0
        self._receive_s = 0.0

    def health(self) -> Health:
        """See ``Transport``."""
        self.count(requests=1)
        return self._node.health()

    def put_prefix(self, digest: str, artifact: bytes, before_upload: Callable[[], None] | None = None) -> None:  # noqa: ARG002
        """See ``Transport``."""
        with self._exchange():
            self._node.put_prefix(digest, artifact)

    def profile(self, wanted: ProfileRequest, cancellation: Cancellation | None = None) -> Profile:
        """See ``Transport``."""
        scope, cancellation = self._node.cancel_scope(), cancellation or Cancellation()
        with self._exchange(), cancellation.ends(scope.cancel):
            try:
                return self._node.profile(wanted, scope=scope)
            except (Cancelled, CancelledError) as error:
                raise Unavailable("the profile was cancelled, or the node is stopping") from error

    def features(self, request: FeatureRequest) -> "LocalResponse":
        """See ``Transport``."""
        self.count(requests=1)
        if request.cut == 0:
            return LocalResponse(partial(self._direct.answer, request), self)
        # A job's requests nearly all have the same one.
        if self._latest is None or self._latest[0] != request.preprocess:
            self._latest = request.preprocess, Preprocess.from_json(request.preprocess)
        return LocalResponse(partial(self._node.features, request, preprocess=self._latest[1]), self)

    def blocks(self, data: str, reading: str, max_bytes: int) -> BlockReads | None:
        """See ``ReadsBlocks``."""
        return self._node.blocks(data, reading, max_bytes)

    def node_statistics(self) -> dict[str, Any]:
        """See ``Transport``."""
        self.count(requests=1)
        return self._node.statistics().to_json()

    def statistics(self) -> TransportStatistics:
        """See ``Transport``."""
        read = self._node.statistics().totals.bytes_read
        with self._lock:
            return TransportStatistics(
                bytes_received=read, requests=self._requests, failures=self._failures, receive_s=self._receive_s
            )

    def break_off(self) -> None:
        """See ``Transport``; reads alone, since nothing of this process falls silent."""
        self._direct.close()

    def close(self) -> None:
        """Cancel the reads that are under way; the caller closes the node."""
        self._direct.close()

    @contextmanager
    def _exchange(self) -> Iterator[None]:
        self.count(requests=1)
        try:
            yield
        except FrostlineError:
            self.count(failures=1)
            raise

    def count(self, *, requests: int = 0, failures: int = 0, receive_s: float = 0.0) -> None:
        """Add to the statistics."""
        with self._lock:
            self._requests += requests
            self._failures += failures
            self._receive_s += receive_s


class LocalResponse:
    """The batches of one answer. ``close`` may be called from any thread; it wakes a thread that waits in ``next``."""

    def __init__(self, begin: Callable[[], BatchStream | FolderStream], transport: LocalTransport) -> None:
        self._begin = begin
        self._transport = transport
        self._lock = threading.Lock()
        self._answer: BatchStream | FolderStream | None = None
        self._is_closed = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> FeatureBatch:
        started = time.perf_counter()
        try:
            return next(self._opened())
        except FrostlineError:
            self._transport.count(failures=1)
            raise
        finally:
            self._transport.count(receive_s=time.perf_counter() - started)

    def close(self) -> None:
        """Cancel the rest of the answer."""
        with self._lock:
            self._is_closed = True
            answer = self._answer
        if answer is not None:
            answer.close()

    def _opened(self) -> BatchStream | FolderStream:
        with self._lock:
            if self._is_closed:
                raise StopIteration
            if self._answer is None:
                self._answer = self._begin()
            return self._answer
