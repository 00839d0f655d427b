"""A transport that follows a script: slow, broken, partial and refused answers, without a node or a clock."""

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from frostline.core import FeatureBatch, Samples, Skipped
from frostline.core.errors import BadRequest, NodeUnreachable, Refused, StoreError, Unavailable
from frostline.profiles import Profile
from frostline.transport import Cancellation, Transport, TransportStatistics
from frostline.wire.messages import FeatureRequest, Health, ProfileRequest
from frostline.wire.packing import pack

__all__ = ("Act", "ScriptedResponse", "ScriptedTransport", "numbers")

Activations = Callable[[npt.NDArray[np.int64]], tuple[npt.NDArray[np.generic], ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Act:
    """What happens to one request for features.

    Attributes:
        rows_per_batch: rows of each batch of the answer.
        gate: the answer waits until ``ScriptedTransport.open`` names this gate; empty waits for nothing.
        gate_after: rows answered before it waits.
        error: the error, raised by the answer; None answers whole.
        error_after: rows answered before it.
    """

    rows_per_batch: int = 16
    gate: str = ""
    gate_after: int = 0
    error: Refused | StoreError | Unavailable | None = None
    error_after: int = 0

    def stop(self, row: int, total: int) -> int:
        """Where a batch that starts at a row ends: full, or where something happens."""
        marks = [self.gate_after] if self.gate else []
        marks += [] if self.error is None else [self.error_after]
        return min([row + self.rows_per_batch, total, *(mark for mark in marks if mark > row)])


def numbers(ids: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.generic], ...]:
    """One tensor ``float32[n, 4]`` whose rows tell the ids they belong to."""
    return (ids[:, None].astype(np.float32) + np.arange(4, dtype=np.float32) / 8,)


class ScriptedTransport(Transport):
    """A ``Transport`` that answers by itself. Safe for several threads.

    At cut 0 the encoded sample is its id in eight bytes. Answers are packed as the request asks.

    Args:
        script: an act for each of the first requests, in the order in which they come.
        otherwise: the act for all later ones; answers whole by default.
        unreadable: ids that are skipped, with the reason.
        activations: function that computes the answer's tensors from the ids.
        health: health that the node reports.
        profile: profile that the node measures; None refuses to.

    Attributes:
        requests: every request for features so far.
        profiled: every request for a profile so far.
        prefixes: every prefix uploaded so far, by digest.
    """

    def __init__(
        self,
        script: Iterable[Act] = (),
        *,
        otherwise: Act | None = None,
        unreadable: Mapping[int, str] | None = None,
        activations: Activations = numbers,
        health: Health | None = None,
        profile: Profile | None = None,
    ) -> None:
        self.requests: list[FeatureRequest] = []
        self.profiled: list[ProfileRequest] = []
        self.prefixes: dict[str, bytes] = {}
        self._acts = iter(tuple(script))
        self._otherwise = otherwise or Act()
        self._health = health or Health(version="0", host="here", hardware="none", memory_bytes=0, roots=())
        self._profile = profile
        self._node = _Node(activations, dict(unreadable or {}))

    def open(self, gate: str) -> None:
        """Let the answers that wait at the gate go on, now and later."""
        with self._node.changed:
            self._node.open_gates.add(gate)
            self._node.changed.notify_all()

    def go_down(self) -> None:
        """Break every answer under way, and refuse connections until ``come_back``."""
        with self._node.changed:
            self._node.is_down = True
            self._node.changed.notify_all()

    def come_back(self) -> None:
        """Answer again."""
        with self._node.changed:
            self._node.is_down = False

    def wait_for_requests(self, count: int, *, timeout_s: float = 10.0) -> bool:
        """Wait until so many requests for features have come; False where they did not."""
        with self._node.changed:
            return self._node.changed.wait_for(lambda: len(self.requests) >= count, timeout_s)

    def health(self) -> Health:
        """What was given."""
        self._node.check_up()
        return self._health

    def put_prefix(self, digest: str, artifact: bytes, before_upload: Callable[[], None] | None = None) -> None:  # noqa: ARG002
        """Keep it in ``prefixes``."""
        self._node.check_up()
        self.prefixes.setdefault(digest, artifact)

    def profile(self, wanted: ProfileRequest, cancellation: Cancellation | None = None) -> Profile:  # noqa: ARG002
        """What was given, with those of its codecs that are asked for."""
        self._node.check_up()
        self.profiled.append(wanted)
        if self._profile is None:
            raise BadRequest(f"this transport was given no profile to answer for cut {wanted.features.cut}")
        return replace(
            self._profile, codecs=tuple(codec for codec in self._profile.codecs if codec.codec in wanted.codecs)
        )

    def features(self, request: FeatureRequest) -> "ScriptedResponse":
        """Answer by the script. Closing the answer, from any thread, frees one that waits at a gate."""
        with self._node.changed:
            self.requests.append(request)
            self._node.changed.notify_all()
            return ScriptedResponse(self._node, request, next(self._acts, self._otherwise))

    def node_statistics(self) -> dict[str, Any]:
        """Nothing was done."""
        self._node.check_up()
        return {}

    def statistics(self) -> TransportStatistics:
        """Payload bytes only: nothing crosses a wire."""
        with self._node.changed:
            return TransportStatistics(
                bytes_received=self._node.bytes_sent, requests=len(self.requests), failures=self._node.failures
            )

    def break_off(self) -> None:
        """Break every answer under way."""
        with self._node.changed:
            self._node.breaks += 1
            self._node.changed.notify_all()

    def close(self) -> None:
        """Break every answer under way, for good."""
        self.go_down()


class ScriptedResponse:
    """One answer: an iterator over its batches."""

    def __init__(self, node: "_Node", request: FeatureRequest, act: Act) -> None:
        self._node = node
        self._request = request
        self._act = act
        self._row = 0
        self._is_closed = False

    def __iter__(self) -> "ScriptedResponse":
        return self

    def __next__(self) -> FeatureBatch:
        act, samples = self._act, self._request.samples
        if act.gate and self._row >= act.gate_after:
            self._node.wait_at(act.gate, lambda: self._is_closed)
        if self._is_closed:
            raise StopIteration
        if act.error is not None and self._row >= act.error_after:
            self._is_closed = True
            raise self._node.failed(act.error)
        if self._row == len(samples):
            raise StopIteration
        rows = np.arange(self._row, act.stop(self._row, len(samples)))
        self._row += len(rows)
        return self._node.batch(samples.take(rows), self._request)

    def close(self) -> None:
        """Abandon the rest; a thread that waits in ``next`` is freed."""
        with self._node.changed:
            self._is_closed = True
            self._node.changed.notify_all()


class _Node:
    """What the transport and its answers share; ``changed`` guards it."""

    def __init__(self, activations: Activations, unreadable: dict[int, str]) -> None:
        self.changed = threading.Condition()
        self.open_gates: set[str] = set()
        self.is_down = False
        self.breaks = 0
        self.bytes_sent = 0
        self.failures = 0
        self._activations = activations
        self._unreadable = unreadable

    def check_up(self) -> None:
        with self.changed:
            if self.is_down:
                raise self.failed(NodeUnreachable("the scripted node is down"))

    def failed(self, error: Refused | StoreError | Unavailable) -> Refused | StoreError | Unavailable:
        with self.changed:
            self.failures += 1
        return error

    def wait_at(self, gate: str, is_closed: Callable[[], bool]) -> None:
        with self.changed:
            before = self.breaks
            self.changed.wait_for(
                lambda: gate in self.open_gates or self.is_down or is_closed() or self.breaks != before
            )
            if self.breaks != before:
                raise self.failed(NodeUnreachable("the answer was broken off"))

    def batch(self, samples: Samples, request: FeatureRequest) -> FeatureBatch:
        self.check_up()
        encoded = request.cut == 0
        lost = np.isin(samples.ids, np.array(list(self._unreadable), np.int64))
        ids = samples.ids[~lost]
        batch = FeatureBatch(
            ids=ids,
            tensors=() if encoded else self._activations(ids),
            encoded=[id.to_bytes(8, "little") for id in ids.tolist()] if encoded else (),
            skipped=tuple(self._skipped(samples, row) for row in np.flatnonzero(lost).tolist()),
        )
        batch = pack(batch, request.codec, request.tolerance)
        with self.changed:
            self.bytes_sent += batch.nbytes
        return batch

    def _skipped(self, samples: Samples, row: int) -> Skipped:
        id_ = int(samples.ids[row])
        return Skipped(id=id_, object=samples.objects[row], reason=self._unreadable[id_])
