"""The prefixes and engines that a node holds for all requests, and how their weights are received."""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from io import BytesIO
from typing import IO, TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from cachetools import LRUCache

from frostline.batching import ROWS, readable_bytes
from frostline.core import REFERENCE, Cut, Levels
from frostline.core.declared import PARSED_BYTES
from frostline.core.errors import BadRequest, EngineNotReady, OverBudget, Overloaded, UnknownPrefix, UnsafeArtifact
from frostline.core.nouns import Closing
from frostline.engines.protocols import Arrays, Between, Engine, Footprint, PipelinedEngine, RunningBatch
from frostline.node.memory import Cancelled, CancelScope, RequestMemory
from frostline.node.statistics import Counters
from frostline.node.tenants import Account, Admission
from frostline.node.torch_bridge import TorchBridge
from frostline.node.weights import WeightMemory, WeightReservation, prefix_key
from frostline.profiles import Trial
from frostline.wire.pieces import PREAMBLE_BYTES, Piece, list_bytes, pieces_from_json

if TYPE_CHECKING:
    from frostline.engines.torch import TorchEngine
    from frostline.models.artifact import Inspection, Prefix

__all__ = (
    "PieceUpload",
    "Prefixes",
    "Resident",
    "RowChecks",
    "TriedEngine",
    "Upload",
)


# Bytes that a prefix and its engine take per node of the graph: 2.7 kB (ViT-S/16) to 4.5 kB (EfficientNet-lite0).
_NODE_BYTES = 5000
# Memory for a file before its graph was read: the graph of ShuffleNet takes a quarter of its weights.
_EXPECTED, _EXPECTED_BYTES = 1.25, 1 << 18
# Maximum seconds that a request waits for the memory of an engine that has to be made.
_ENGINE_WITHIN_S = 8.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Resident:
    """A prefix with the engine that runs it.

    Attributes:
        prefix: prefix as it was uploaded.
        references: engine of each device that runs it up to every cut, as the user's own network does.
        engines: engine of each device for this request; up to the request's own cut if it is not the reference.
        rows: maximum rows of a run, at which the engine is fastest.
        served: function that is called with the device seconds of each use, divided by its tenant's weight.
        check_rows: function that refuses a cut at which the rows of a batch change each other; None where the trainer
            has looked, or the operations say that none do.
    """

    prefix: "Prefix"
    references: "tuple[TorchEngine, ...]"
    engines: tuple[Engine, ...]
    rows: int
    served: Callable[[float], None]
    check_rows: "Callable[[Cut, _Values], None] | None" = None

    @property
    def reference(self) -> "TorchEngine":
        """The reference of the first device."""
        return self.references[0]

    @property
    def engine(self) -> Engine:
        """The engine of the first device."""
        return self.engines[0]

    def cut(self, number: int) -> Cut:
        """The cut of that number.

        Raises:
            BadRequest: The prefix has no such cut.
        """
        cuts = self.prefix.cuts
        if not 1 <= number <= len(cuts):
            raise BadRequest(f"cut must be from 0 to {len(cuts)} for this prefix, not {number}")
        return cuts[number - 1]


# Cuts for which it is remembered whether rows mix.
_REMEMBERED = 4096

_Values = Callable[[Arrays], Sequence[npt.NDArray[np.generic]]]


@dataclass(slots=True, eq=False)
class _RowCheck:
    turn: threading.Lock = field(default_factory=threading.Lock)
    is_mixing: bool | None = None


class RowChecks:
    """Refuses prefixes that mix the rows of a batch, which may be those of several tenants. Safe for threads.

    Args:
        bridge: bridge that runs the prefix on rows, together and apart.
    """

    def __init__(self, bridge: TorchBridge) -> None:
        self._bridge = bridge
        self._lock = threading.Lock()
        self._found: LRUCache[tuple[str, int], _RowCheck] = LRUCache(_REMEMBERED)

    def check(self, digest: str, prefix: "Prefix", cut: Cut, values: _Values) -> None:
        """Run a prefix up to a cut on made-up rows in different company, unless that is known already.

        Args:
            digest: digest of the prefix.
            prefix: prefix to be run.
            cut: cut of it.
            values: function that runs the prefix up to the cut, on up to eight rows.

        Raises:
            UnsafeArtifact: Rows change each other, or the prefix fails on all rows that are made up for it.
            Cancelled: ``values`` was cancelled.
        """
        with self._lock:
            found = self._found.setdefault((digest, cut.number), _RowCheck())
        if found.is_mixing is None:
            with found.turn:  # the other batches of a request wait for the first
                if found.is_mixing is None:
                    found.is_mixing = self._bridge.is_mixing(prefix, values)
        if found.is_mixing:
            raise UnsafeArtifact(
                f"the prefix mixes the samples of a batch before cut {cut.number} ({cut.name[:80]}), which may be "
                "those of several tenants: end the frozen part before the operation that does"
            )


class Prefixes:
    """Prefixes by digest, and engines by digest, name and cut. Safe for threads."""

    def __init__(self, weights: WeightMemory[Resident], max_rows: int, bridge: TorchBridge, counters: Counters) -> None:
        self._weights = weights
        self._max_rows = max_rows
        self._bridge = bridge
        self._counters = counters
        self._making = threading.Lock()
        self._naming = threading.Lock()
        self._pieces: dict[str, Mapping[str, str]] = {}
        self._rows = RowChecks(bridge)

    def __len__(self) -> int:
        return len(self._weights)

    def __contains__(self, digest: str) -> bool:
        return prefix_key(digest) in self._weights

    def owned_bytes(self, owner: str) -> int:
        """The bytes of a tenant's uploaded prefixes and of the engines made for it."""
        return self._weights.owned_bytes(owner)

    def left_bytes(self, digest: str, asker: Account) -> float:
        """The bytes that a tenant's engines for a prefix may take; its own upload of the prefix counts against it."""
        return self._weights.left_bytes(prefix_key(digest), asker)

    def reserve(
        self, digest: str, length: int, asker: Account, longest_s: float, is_abandoned: Callable[[], bool]
    ) -> WeightReservation[Resident] | None:
        """Reserve memory for a prefix that is to be uploaded; None if it is held already.

        Args:
            digest: digest of the prefix.
            length: size of its file in bytes.
            asker: account of the tenant that uploads it.
            longest_s: maximum wait in seconds.
            is_abandoned: function that is called after every ``wake``; True cancels the wait.

        Raises:
            OverBudget: The weights can never fit.
            Overloaded: The weights do not fit beside those in use now.
            Cancelled: The wait was cancelled.
        """
        nbytes = max(length, min(int(_EXPECTED * length) + _EXPECTED_BYTES, self._weights.total_bytes))
        return self._weights.reserve(
            prefix_key(digest),
            nbytes,
            asker,
            counted_bytes=length,
            longest_s=longest_s,
            is_abandoned=is_abandoned,
        )

    def inspect_ahead(self, header: bytes, tenant: str) -> "Future[Inspection | None] | None":
        """See ``TorchBridge.inspect_ahead``."""
        return self._bridge.inspect_ahead(header, tenant)

    def put(
        self,
        digest: str,
        body: bytes,
        reservation: WeightReservation[Resident],
        tenant: str,
        inspected: "Future[Inspection | None] | None" = None,
    ) -> None:
        """Take an uploaded prefix.

        Args:
            digest: digest of the prefix.
            body: content of its file.
            reservation: memory reserved for it.
            tenant: name of the tenant that uploads it.
            inspected: result of an inspection that began when its header had come; None inspects it now.

        Raises:
            BadRequest: The body does not match the digest.
            UnsafeArtifact: The body is not a prefix, or names something that is not allowed.
            OverBudget: The prefix computes more than this node allows.
            Overloaded: Memory is too short, or the machine is too busy to check the prefix.
        """
        if self._bridge.digest_of(body) != digest:
            raise BadRequest("the prefix does not match its digest: it changed on the way")
        ahead = None if inspected is None else inspected.result()
        inspection = ahead or self._bridge.inspect(body, tenant)
        prefix = self._bridge.read(body)
        reservation.resize(len(body) + len(prefix.graph.nodes) * _NODE_BYTES)
        engines = self._bridge.references(prefix, inspection)
        reservation.keep(
            Resident(
                prefix=prefix,
                references=engines,
                engines=engines,
                rows=min(self._bridge.rows(inspection), self._max_rows),
                served=partial(self._weights.charge_prefix, digest),
                check_rows=None
                if inspection is None or inspection.keeps_rows_apart
                else partial(self._rows.check, digest, prefix),
            )
        )
        self._counters.add(uploads=1)

    def held_pieces(self, asker: Account) -> set[str]:
        """The pieces of prefixes that a tenant uploaded itself, and of what the node's owner gave; none of others'."""
        known = self._bridge.known
        held = {piece for _, pieces in self._pieces_of(asker) for piece in pieces}
        return held if known is None else held | known.digests

    def write_piece(self, digest: str, nbytes: int, asker: Account, file: IO[bytes]) -> bool:
        """Write a piece of a prefix that the tenant uploaded, or of a file that the node's owner gave.

        Args:
            digest: SHA-256 of the piece.
            nbytes: bytes of the place that it is for; one of another size is not written, since nothing is reserved
                for it.
            asker: account of the tenant.
            file: file that takes it.

        Returns:
            True if it was written; False where there is no such piece of that size any more.
        """
        known = self._bridge.known
        if known is not None and (content := known.get(digest)) is not None:
            return _write(content, nbytes, file)
        for prefix, pieces in self._pieces_of(asker):
            with suppress(UnknownPrefix, Overloaded):  # it was evicted meanwhile, or is being evicted
                if digest in pieces:
                    with self._using(prefix, asker.name) as used:
                        return _write(self._bridge.file_bytes(used.prefix, pieces[digest]), nbytes, file)
        return False

    def _pieces_of(self, asker: Account) -> list[tuple[str, Mapping[str, str]]]:
        """Names of the larger tensors of a tenant's prefixes by their SHA-256, worked out at the first need.

        That takes a second for each GB or two, in which nobody else waits.
        """
        found = []
        for digest in self._weights.prefixes_of(asker.name):
            with suppress(UnknownPrefix, Overloaded):
                if (named := self._pieces.get(digest)) is None:
                    with self._using(digest, asker.name) as used:
                        named = self._bridge.pieces_of(used.prefix)
                found.append((digest, named))
        with self._naming:
            known = {**self._pieces, **dict(found)}
            self._pieces = {digest: pieces for digest, pieces in known.items() if digest in self}
        return found

    def wake(self) -> None:
        """Make all threads that wait for memory check whether they are still wanted."""
        self._weights.wake()

    @contextmanager
    def pin(
        self,
        digest: str,
        engine: str = REFERENCE,
        cut: int = 0,
        asker: Account | None = None,
        levels: Levels | None = None,
        end: Callable[[], None] | None = None,
    ) -> Iterator[Resident]:
        """Keep a prefix resident while the context lasts, with the engine that runs it.

        Args:
            digest: digest of the prefix.
            engine: name of the engine.
            cut: number of the cut up to which the engine runs; ignored for the reference.
            asker: account whose quota counts an engine that has to be made. None for a long use, as by a training,
                which needs no engine.
            levels: meaning of pixels, if the engine's name says that it takes them.
            end: see ``WeightMemory.pin``.

        Raises:
            UnknownPrefix: The prefix is not held.
            EngineNotReady: The engine was not tried on the prefix up to that cut.
            Overloaded: The engine does not fit beside the weights in use, or the prefix is being evicted.
            OverBudget: The prefix takes more memory than the tenant may have here.
        """
        user = None if asker is None else asker.name
        with ExitStack() as stack:
            if engine == REFERENCE:
                yield stack.enter_context(self._using(digest, user, end))
                return
            assert asker is not None, "somebody asks for an engine"
            held = None
            while held is None:  # the engine may be evicted before it is used
                stack.close()
                number = self._make(digest, engine, cut, asker, levels)
                stack.enter_context(self._using(digest, user, end))
                held = stack.enter_context(self._weights.pin((digest, engine, number), user))
            yield held

    @contextmanager
    def _using(self, digest: str, user: str | None, end: Callable[[], None] | None = None) -> Iterator[Resident]:
        with self._weights.pin(prefix_key(digest), user, end) as held:
            if held is None:
                raise UnknownPrefix(f"this node does not hold the prefix {digest[:12]}: upload it and ask again")
            yield held

    def _make(self, digest: str, engine: str, cut: int, asker: Account, levels: Levels | None) -> int:
        """Make an engine if it is not held, and return the number of its cut.

        While it waits for memory, this request keeps nothing in use, so that no two requests wait for each other.
        """
        with self._using(digest, asker.name) as reference:
            number = reference.cut(cut).number
        key = (digest, engine, number)
        if key in self._weights:
            return number
        trial = self._bridge.trials.find_ready(digest, engine, number)
        if trial is None:
            raise EngineNotReady(
                f"{engine} is not ready for cut {number} of the prefix {digest[:12]}: request a profile that names "
                "both, and ask again"
            )
        reservation = self._weights.reserve(
            key, trial.load_bytes, asker, counted_bytes=trial.weight_bytes, longest_s=_ENGINE_WITHIN_S
        )
        if reservation is not None:
            with reservation, self._making, self._using(digest, asker.name) as reference:
                checked = reference.reference.footprint(number)
                make = partial(self._bridge.trials.make_engine, digest, reference.prefix, trial, levels, checked)
                made = tuple(TriedEngine(engine=engine, trial=trial) for engine in self._bridge.for_each_device(make))
                reservation.resize(trial.weight_bytes)
                rows = max(ROWS, min(trial.rows, self._max_rows))
                reservation.keep(replace(reference, engines=made, rows=rows))
        return number


def _write(content: memoryview, nbytes: int, file: IO[bytes]) -> bool:
    """Write what has so many bytes, and return whether it has."""
    return content.nbytes == nbytes and file.write(content) == nbytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class TriedEngine:
    """An engine as its trial found it: with the memory that was measured, and in parts that end in time.

    Attributes:
        engine: engine that runs.
        trial: trial in which it was measured.
    """

    engine: Engine
    trial: Trial

    @property
    def name(self) -> str:
        """See ``Engine``."""
        return self.engine.name

    @property
    def weight_bytes(self) -> int:
        """See ``Engine``."""
        return self.trial.weight_bytes

    def footprint(self, cut: int) -> Footprint:
        """See ``Engine``."""
        assert cut == self.trial.cut, "an engine is made for one cut"
        return Footprint(fixed_bytes=self.trial.fixed_bytes, bytes_per_sample=self.trial.bytes_per_sample)

    def run(self, inputs: Arrays, cut: int) -> tuple[npt.NDArray[np.generic], ...]:
        """See ``Engine``."""
        return self.engine.run(inputs, cut)

    def run_divided(self, inputs: Arrays, cut: int, between: Between) -> tuple[npt.NDArray[np.generic], ...]:
        """As ``PreemptibleEngine`` says, between the parts of ``TrialPolicy.limit_rows``."""
        rows, arrays = self.trial.rows, [inputs] if isinstance(inputs, np.ndarray) else inputs
        if rows >= ROWS:
            return self.engine.run(inputs, cut)
        parts = []
        for start in range(0, len(arrays[0]), rows):
            parts.append(self.engine.run([array[start : start + rows] for array in arrays], cut))
            between()
        return tuple(np.concatenate(columns) for columns in zip(*parts, strict=True))

    def begin(self, inputs: Arrays, cut: int) -> RunningBatch | None:
        """See ``PipelinedEngine``; parts are no pipeline."""
        if self.trial.rows < ROWS or not isinstance(self.engine, PipelinedEngine):
            return None
        return self.engine.begin(inputs, cut)


# A growing buffer may be an eighth larger than its content.
_GROWN = 9 / 8
_MAX_PARSED = 64 << 20
# Memory for a graph of two hundred kilobytes, reserved before it is seen, or half of a tenant's own part; one that has
# more takes the rest then.
_USUAL_PARSED = 10 << 20
_LENGTH = 8
# Maximum seconds of each wait for memory. It is given out fairly, so an upload that never waited would get none on a
# busy node. A client that asks before it sends waits for twenty seconds.
_TURN_S = 8.0
_RETRY_AFTER_S = 1.0
# Weights that take a network longer than their graph takes to be inspected.
_MANY_BYTES = 4 << 20


class Upload(Closing):
    """One upload of a prefix. A context manager, which releases everything.

    Args:
        prefixes: registry that takes the prefix.
        digest: digest of the prefix.
        memory: access to memory for the bytes while they are read, and for the graph while it is parsed.
        length: the announced size of the file in bytes.
        admission: admission of the request, which ends with the upload.
    """

    def __init__(
        self, prefixes: Prefixes, digest: str, memory: RequestMemory, length: int, admission: Admission
    ) -> None:
        self._account = admission.account
        self._prefixes = prefixes
        self._digest = digest
        self._memory = memory
        self._length = length
        self._buffer = BytesIO()
        self._scope = CancelScope((prefixes, memory))
        self._reservation: WeightReservation[Resident] | None = None
        self._held = ExitStack()
        self._held.enter_context(admission)
        self._parsing = min(memory.total_bytes // 4, _MAX_PARSED)
        self._usual_parsed = min(self._parsing, _USUAL_PARSED, memory.batch_bytes // 2)
        self._header_bytes = self._seen_bytes = 0
        self._header = b""
        self._inspected: Future[Inspection | None] | None = None

    def begin(self, longest_s: float = _TURN_S) -> None:
        """Wait for memory for its weights, and then for reading it, for at most ``longest_s`` seconds each.

        If another request has brought the prefix meanwhile, later calls of ``write`` are ignored.

        Raises:
            OverBudget: The prefix is too large for this node or for its tenant.
            Overloaded: The memory is in use.
        """
        nbytes = int(self._length * _GROWN) + self._usual_parsed
        # It is held before a byte has come: whatever one announces leaves the others their part.
        maximum = self._account.max_work_bytes(self._memory.total_bytes)
        if nbytes > maximum:
            raise OverBudget(
                f"reading this prefix takes {readable_bytes(nbytes)}, and tenant {self._account.name} may hold "
                f"{readable_bytes(maximum)} here: raise its work_bytes, or start the node with more --memory"
            )
        try:
            self._reservation = self._prefixes.reserve(
                self._digest, self._length, self._account, longest_s, self._scope.is_cancelled
            )
            if self._reservation is None:
                return
            self._held.enter_context(self._reservation)
            self._held.enter_context(self._memory.reserve(nbytes, self._scope.is_cancelled, longest_s))
        except Cancelled as error:
            why = "the node has no memory for the prefix beside the work under way: ask again later"
            raise Overloaded(why, retry_after_s=_RETRY_AFTER_S) from error

    def write(self, chunk: bytes) -> None:
        """Take the next piece.

        Raises:
            BadRequest: The body is longer than announced.
            OverBudget: The prefix has a graph that is too large for this node.
            Overloaded: The node has no memory for the graph now.
        """
        if self._reservation is None:
            return
        if self._buffer.tell() + len(chunk) > self._length:
            raise BadRequest(f"the prefix has more than the {self._length} bytes that were announced")
        self._buffer.write(chunk)
        if self._buffer.tell() - len(chunk) < _LENGTH <= self._buffer.tell():
            self._header_bytes = int.from_bytes(self._buffer.getbuffer()[:_LENGTH], "little")
            self._check_graph(self._header_bytes)
        self._look_ahead()

    def finish(self) -> None:
        """Register the prefix; see ``Prefixes.put`` for further errors.

        Raises:
            BadRequest: The body is shorter than announced, or does not match the digest.
        """
        if self._reservation is None:
            return
        if self._buffer.tell() != self._length:
            raise BadRequest(f"the prefix ended after {self._buffer.tell()} of {self._length} bytes")
        body, tenant = self._buffer.getvalue(), self._account.name
        is_inspected = body[_LENGTH : _LENGTH + self._header_bytes] == self._header
        inspected = self._inspected if is_inspected else None
        self._prefixes.put(self._digest, body, self._reservation, tenant, inspected)

    def close(self) -> None:
        """Release everything; a thread that waits in ``begin`` returns."""
        self._scope.cancel()
        self._buffer = BytesIO()
        self._held.close()

    def _look_ahead(self) -> None:
        """Have the graph inspected while the weights come. What is wrong with it is said once they have.

        A client that is refused while it sends sees its connection end, and would send them all again.
        """
        ends, before = _LENGTH + self._header_bytes, self._seen_bytes
        self._seen_bytes = self._buffer.tell()
        if before < ends <= self._seen_bytes <= self._length - _MANY_BYTES:
            self._header = bytes(self._buffer.getbuffer()[_LENGTH:ends])
            self._inspected = self._prefixes.inspect_ahead(self._header, self._account.name)

    def _check_graph(self, nbytes: int) -> None:
        if nbytes <= self._length and nbytes * PARSED_BYTES > self._parsing:
            raise OverBudget(
                f"the prefix's graph has {readable_bytes(nbytes)} and this node reads up to "
                f"{readable_bytes(self._parsing // PARSED_BYTES)}: start it with more --memory"
            )
        more_bytes = min(nbytes * PARSED_BYTES, self._parsing) - self._usual_parsed
        if more_bytes > 0:
            memory = self._memory.take(more_bytes)
            if memory is None:
                raise Overloaded(
                    "the node has no memory for the prefix's graph beside the work under way: ask again later",
                    retry_after_s=_RETRY_AFTER_S,
                )
            self._held.enter_context(memory)


class PieceUpload(Upload):
    """One upload of a prefix without some pieces, which are taken from prefixes that the same tenant uploaded.

    The digest of the whole file is checked as for any upload, so that nobody gets what they could not have sent.
    """

    def __init__(
        self, prefixes: Prefixes, digest: str, memory: RequestMemory, length: int, admission: Admission
    ) -> None:
        super().__init__(prefixes, digest, memory, length, admission)
        self._preamble = bytearray()
        self._pieces: tuple[Piece, ...] | None = None
        self._gaps: deque[tuple[int, int]] = deque()

    def write(self, chunk: bytes) -> None:
        """See ``Upload.write``.

        Raises:
            BadRequest: The list of pieces is not valid, or more comes than lies between them.
        """
        if self._reservation is None:
            return
        rest = chunk if self._pieces is not None else self._listed(chunk)
        while rest:
            if not self._gaps:
                raise BadRequest("the prefix has more than lies between its pieces")
            start, stop = self._gaps.popleft()
            some, rest = rest[: stop - start], rest[stop - start :]
            self._buffer.seek(start)
            super().write(some)
            if start + len(some) < stop:
                self._gaps.appendleft((start + len(some), stop))

    def finish(self) -> None:
        """See ``Upload.finish``.

        Raises:
            UnknownPrefix: The node does not hold a piece any more.
        """
        if self._reservation is None:
            return
        if self._pieces is None or self._gaps:
            raise BadRequest("the prefix ended before what lies between its pieces")
        for piece in self._pieces:
            self._buffer.seek(piece.start)
            if not self._prefixes.write_piece(piece.digest, piece.stop - piece.start, self._account, self._buffer):
                raise UnknownPrefix(
                    f"this node does not hold the piece {piece.digest[:12]}, or not any more: ask which pieces it "
                    "holds, and send the others"
                )
        self._buffer.seek(self._length)
        super().finish()

    def _listed(self, chunk: bytes) -> bytes:
        """Read the list; what follows it in the chunk."""
        self._preamble += chunk
        if len(self._preamble) < PREAMBLE_BYTES:
            return b""
        stop = PREAMBLE_BYTES + list_bytes(self._preamble[:PREAMBLE_BYTES])
        if len(self._preamble) < stop:
            return b""
        self._pieces = pieces_from_json(self._preamble[PREAMBLE_BYTES:stop], self._length)
        edges = [0, *(edge for piece in self._pieces for edge in (piece.start, piece.stop)), self._length]
        pairs = zip(edges[::2], edges[1::2], strict=True)
        self._gaps = deque((start, stop) for start, stop in pairs if start < stop)
        rest = bytes(self._preamble[stop:])
        self._preamble.clear()
        return rest
