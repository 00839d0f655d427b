"""What a trainer needs of a node: one protocol, spoken over HTTP and within the process, and how to cancel a call."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self, runtime_checkable

from frostline.core import FeatureBatch
from frostline.core.errors import Unavailable
from frostline.prefetch.owned_requests import RowOwners
from frostline.profiles import Profile
from frostline.stores.readahead import BlockReads
from frostline.wire.messages import FeatureRequest, Health, ProfileRequest

__all__ = (
    "NODE_COUNTS",
    "BesideTraining",
    "Cancellation",
    "CountsNodes",
    "ExpectsLayouts",
    "Layout",
    "NodeUse",
    "OwnsBlocks",
    "ReadsBlocks",
    "ReportsRequests",
    "TrainsBeside",
    "Transport",
    "TransportStatistics",
)


class Cancellation:
    """A call that may be given up. Safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_cancelled = False
        self._ends: list[Callable[[], None]] = []

    def cancel(self) -> None:
        """Nobody wants the result any more. Calling it again does nothing."""
        with self._lock:
            self._is_cancelled = True
            ends, self._ends = self._ends, []
            for end in ends:
                end()

    def check(self) -> None:
        """Go on only where somebody wants the result.

        Raises:
            Unavailable: The result is no longer wanted.
        """
        if self._is_cancelled:
            raise Unavailable("the request was given up")

    @contextmanager
    def ends(self, end: Callable[[], None]) -> Iterator[None]:
        """Work that ``end`` breaks off from any thread, soon and without waiting for it.

        Raises:
            Unavailable: The work was cancelled before it began.
        """
        with self._lock:
            self.check()
            self._ends.append(end)
        try:
            yield
        finally:
            with self._lock:
                if end in self._ends:
                    self._ends.remove(end)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportStatistics:
    """What crossed between the store side and the trainer so far.

    Attributes:
        bytes_received: store side to trainer, bodies and headers (at the embedded node: bytes read from the store).
        bytes_sent: trainer to store side, bodies and headers.
        requests: exchanges begun.
        failures: exchanges that broke or were refused.
        receive_s: seconds in which answers were being read, summed over connections.
        damaged: answers that did not come as they were sent, and were asked for again.
        transfer_bytes: bytes that came on all connections while at least one large body (64 KiB and more still to come)
            was under way; 0 within a process.
        transfer_s: seconds in which at least one was. ``transfer_bytes / transfer_s`` is what the link gives while
            it is in use, whoever else uses it.
        waiting: threads that wait for an answer now; 0 within a process.
    """

    bytes_received: int = 0
    bytes_sent: int = 0
    requests: int = 0
    failures: int = 0
    receive_s: float = 0.0
    damaged: int = 0
    transfer_bytes: int = 0
    transfer_s: float = 0.0
    waiting: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeUse:
    """What a job asked of one of its nodes so far.

    Attributes:
        url: the address.
        requests: requests that were sent to it.
        samples: samples that it answered.
        retries: requests of these that another node had failed.
        failures: requests that broke, or that it refused.
        unreadable: samples that it could not read, and another node could.
        damaged: answers that did not come as they were sent.
        trouble: the reason why it is asked nothing, or less, for now; empty where it is well.
    """

    url: str
    requests: int = 0
    samples: int = 0
    retries: int = 0
    failures: int = 0
    unreadable: int = 0
    damaged: int = 0
    trouble: str = ""


NODE_COUNTS = {
    "requests": "requests that were sent to one of several nodes",
    "samples": "samples that it answered",
    "retries": "requests of these that another node had failed",
    "failures": "requests that broke, or that it refused",
    "unreadable": "samples that it could not read, and another node could",
    "damaged": "answers of it that did not come as they were sent",
}
"""What the counts of a ``NodeUse`` mean, as the metrics of a job and of an I/O service say it."""


class Transport(Protocol):
    """A way to a node. Safe for use by several threads at once.

    Every method raises ``Unavailable`` where asking again may help and ``Refused`` where it cannot.
    """

    def health(self) -> Health:
        """What the node says of itself."""

    def put_prefix(self, digest: str, artifact: bytes, before_upload: Callable[[], None] | None = None) -> None:
        """Upload a prefix unless the node holds it already.

        Args:
            digest: digest of the artifact.
            artifact: the prefix, as ``write_prefix`` makes it.
            before_upload: function that is called before many bytes are sent; not where the node has them.
        """

    def profile(self, wanted: ProfileRequest, cancellation: Cancellation | None = None) -> Profile:
        """Have the node measure reading, decoding and every cut of the prefix on the request's samples.

        Args:
            wanted: measurements that are wanted; trying engines may take minutes where this prefix was never tried on
                this hardware.
            cancellation: cancellation by which another thread gives it up: the node ends what it measures, and the call
                raises ``Unavailable``.
        """

    def features(self, request: FeatureRequest) -> Iterator[FeatureBatch]:
        """Yield the answer's batches as they arrive, in the order of the request, packed as it asks.

        Every sample comes exactly once, in a batch's ids or among its ``skipped``; a batch and its ``skipped``
        together are the next stretch of the request. The call returns at once; the exchange happens in ``next``.
        Closing the iterator abandons the rest of the answer. Its ``close`` may be called from another thread and
        should then free a thread that is blocked in ``next``; where it cannot, a read ends at ``deadline_s``.
        """

    def node_statistics(self) -> dict[str, Any]:
        """Where the node stands, all its jobs together: ``GET /v1/statistics`` as plain values."""

    def statistics(self) -> TransportStatistics:
        """What crossed so far."""

    def break_off(self) -> None:
        """End every call that is under way, from any thread: each raises ``Unavailable``. Later ones are made anew."""

    def close(self) -> None:
        """Close the connections. Calling it again does nothing."""


class BesideTraining(Protocol):
    """A training that runs on a node. A context manager: leaving it before its last event ends the training."""

    def __enter__(self) -> Self:
        """Follow it."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let go of it, and of what it left on the node."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """What it tells, as plain values, until it has ended. An interrupted iteration goes on where it was."""

    def stop(self) -> None:
        """Ask it to end after the step that it is in; its last events still come."""

    def tensors(self, nbytes: int, digest: str) -> bytes:
        """The trained tensors, a safetensors file of that length and SHA-256, once it has ended."""


@runtime_checkable
class TrainsBeside(Protocol):
    """A way to a node that trains heads beside it."""

    def train(self, prefix: str, assignment: bytes) -> BesideTraining:
        """Have a head trained; see ``jobs.in_store``.

        Args:
            prefix: digest of the frozen part, which the node holds.
            assignment: assignment of the training, as a file.

        Raises:
            Refused: The node does not take it.
            Unavailable: The node is busy with another training, or cannot be reached.
        """


@runtime_checkable
class ReportsRequests(Protocol):
    """A way on which somebody may report to a control plane what it asks for on a job's behalf."""

    def reports_requests(self) -> bool:
        """Whether it does so; then the job that asks reports none of it."""


@runtime_checkable
class CountsNodes(Protocol):
    """A way to several nodes that counts what it asks of each."""

    def uses(self) -> tuple[NodeUse, ...]:
        """What was asked of each node so far."""


Layout = tuple[tuple[tuple[int, ...], str], ...]
"""The shape of one sample and torch's name of the dtype of each tensor of an answer, masks left out."""


@runtime_checkable
class ExpectsLayouts(Protocol):
    """A way to several nodes that leaves out one whose features have another shape or type than they should.

    Attributes:
        layouts: the tensors that answers have, by the digest of the prefix and the number of the cut; what is missing
            is not checked.
    """

    layouts: dict[tuple[str, int], Layout]


@runtime_checkable
class OwnsBlocks(Protocol):
    """A way to several nodes, each of which keeps a part of the data."""

    @property
    def members(self) -> tuple[str, ...]:
        """Names of the nodes that are asked."""

    def owners(self, data: str, samples: int) -> RowOwners:
        """The owners of a data set's rows at present.

        Args:
            data: URL of its root.
            samples: number of rows of its whole manifest.
        """

    def at(self, nodes: tuple[str, ...]) -> Transport:
        """The same way, on which some nodes are asked before all others.

        Args:
            nodes: the names, the one to ask first in front; one that is gone is passed over.
        """


@runtime_checkable
class ReadsBlocks(Protocol):
    """A way to a node that can be told long before which samples will be asked for."""

    def blocks(self, data: str, reading: str, max_bytes: int) -> BlockReads | None:
        """What is told; None where neighbours are no faster together. See ``Node.blocks``."""
