"""Receives a prefix, whole or without the pieces that the node has, within memory that was reserved first."""

from collections import deque
from contextlib import ExitStack
from io import BytesIO
from types import TracebackType
from typing import Self

from frostline.batching import readable_bytes
from frostline.errors import BadRequest, OverBudget, Overloaded, UnknownPrefix
from frostline.node.scheduling.admission import Admission
from frostline.node.scheduling.cancel_scope import CancelScope
from frostline.node.scheduling.memory_pool import Cancelled, Lane
from frostline.node.weights.prefix_registry import Prefixes, Resident
from frostline.node.weights.weight_memory import WeightReservation
from frostline.wire.pieces import PREAMBLE_BYTES, Piece, list_bytes, pieces_from_json

__all__ = ("PieceUpload", "Upload")

# A growing buffer may be an eighth larger than its content.
_GROWN = 9 / 8
# Bytes of Python objects per byte of the graph's JSON.
_PARSED = 30
_MAX_PARSED = 64 << 20
_LENGTH = 8
# Maximum seconds of each wait for memory. It is given out fairly, so an upload that never waited would get none on a
# busy node. A client that asks before it sends waits for twenty seconds.
_TURN_S = 8.0
_RETRY_AFTER_S = 1.0


class Upload:
    """One upload of a prefix. A context manager, which releases everything.

    Args:
        prefixes: registry that takes the prefix.
        digest: digest of the prefix.
        memory: access to memory for the bytes while they are read, and for the graph while it is parsed.
        length: announced size of the file in bytes.
        admission: admission of the request, which ends with the upload.
    """

    def __init__(self, prefixes: Prefixes, digest: str, memory: Lane, length: int, admission: Admission) -> None:
        self._account = admission.account
        self._prefixes = prefixes
        self._digest = digest
        self._memory = memory
        self._length = length
        self._buffer = BytesIO()
        self._scope = CancelScope((prefixes, memory))
        self._room: WeightReservation[Resident] | None = None
        self._held = ExitStack()
        self._held.enter_context(admission)
        # The graph's JSON takes up to a few hundred kilobytes.
        self._parsing = min(memory.total_bytes // 4, _MAX_PARSED)

    def begin(self, longest_s: float = _TURN_S) -> None:
        """Wait for memory for its weights, and then for reading it, for at most ``longest_s`` seconds each.

        If another request has brought the prefix meanwhile, later calls of ``write`` are ignored.

        Raises:
            OverBudget: if it is too large for this node or for its tenant.
            Overloaded: if the memory is in use.
        """
        try:
            self._room = self._prefixes.room(
                self._digest, self._length, self._account, longest_s, self._scope.is_cancelled
            )
            if self._room is None:
                return
            self._held.enter_context(self._room)
            nbytes = int(self._length * _GROWN) + self._parsing
            self._held.enter_context(self._memory.reserve(nbytes, self._scope.is_cancelled, longest_s))
        except Cancelled as error:
            why = "the node has no memory for the prefix beside the work under way: ask again later"
            raise Overloaded(why, retry_after_s=_RETRY_AFTER_S) from error

    def write(self, chunk: bytes) -> None:
        """Take the next piece.

        Raises:
            BadRequest: if there is more than announced.
            OverBudget: if its graph is too large for this node.
        """
        if self._room is None:
            return
        if self._buffer.tell() + len(chunk) > self._length:
            raise BadRequest(f"the prefix has more than the {self._length} bytes that were announced")
        self._buffer.write(chunk)
        if self._buffer.tell() - len(chunk) < _LENGTH <= self._buffer.tell():
            self._check_graph(int.from_bytes(self._buffer.getbuffer()[:_LENGTH], "little"))

    def finish(self) -> None:
        """Register the prefix; see ``Prefixes.put`` for further errors.

        Raises:
            BadRequest: if it is shorter than announced, or does not match the digest.
        """
        if self._room is None:
            return
        if self._buffer.tell() != self._length:
            raise BadRequest(f"the prefix ended after {self._buffer.tell()} of {self._length} bytes")
        self._prefixes.put(self._digest, self._buffer.getvalue(), self._room, self._account.name)

    def close(self) -> None:
        """Release everything; a thread that waits in ``begin`` returns."""
        self._scope.cancel()
        self._buffer = BytesIO()
        self._held.close()

    def _check_graph(self, nbytes: int) -> None:
        if nbytes <= self._length and nbytes * _PARSED > self._parsing:
            raise OverBudget(
                f"the prefix's graph has {readable_bytes(nbytes)} and this node reads up to "
                f"{readable_bytes(self._parsing // _PARSED)}: start it with more --memory"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class PieceUpload(Upload):
    """One upload of a prefix without some pieces, which are taken from prefixes that the same tenant uploaded.

    The digest of the whole file is checked as for any upload, so that nobody gets what they could not have sent.
    """

    def __init__(self, prefixes: Prefixes, digest: str, memory: Lane, length: int, admission: Admission) -> None:
        super().__init__(prefixes, digest, memory, length, admission)
        self._preamble = bytearray()
        self._pieces: tuple[Piece, ...] | None = None
        self._gaps: deque[tuple[int, int]] = deque()

    def write(self, chunk: bytes) -> None:
        """See ``Upload.write``.

        Raises:
            BadRequest: if the list of pieces is none, or there is more than what lies between them.
        """
        if self._room is None:
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
            UnknownPrefix: if a piece is held no more.
        """
        if self._room is None:
            return
        if self._pieces is None or self._gaps:
            raise BadRequest("the prefix ended before what lies between its pieces")
        for piece in self._pieces:
            self._buffer.seek(piece.start)
            if self._prefixes.write_piece(piece.digest, self._account, self._buffer) != piece.stop - piece.start:
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
