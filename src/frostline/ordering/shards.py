"""Decides which positions of an epoch each rank and worker takes, and whether ranks may train together."""

import hashlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from frostline.core.errors import OrderMismatch, SettingError
from frostline.ordering.orders import EpochOrder, check_inside, check_number
from frostline.ordering.state import OrderState

__all__ = ("EVEN", "LAST", "RECORD_BYTES", "Gather", "Progress", "ReadingPlan", "Resumed", "Shard", "check_agreement")


LAST = ("keep", "drop", "pad", "uneven")
"""What becomes of the samples that do not fill a whole step of all ranks; see ``Shard.last``."""

EVEN = ("drop", "pad")
"""With these all ranks have as many rows in a step: where one cannot read some, others of its batch come again."""

_MAX = 1 << 62
_Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """The part of an epoch that one worker of one rank takes.

    A step takes the next ``batch_size * world_size`` positions, dealt to the ranks one by one. So how far all ranks
    are is one number, the position (``after``), and whoever goes on from there, in whatever number, takes exactly the
    rest. Where the product is the same, so are the samples of each step. Workers of a rank take its steps in turn.

    Attributes:
        size: positions in the epoch.
        batch_size: rows that a rank takes in a step.
        start: position at which the epoch goes on; 0 is its beginning.
        rank: rank of this process.
        world_size: number of ranks.
        last: treatment of the samples left for the last step, fewer than a whole step. Every rank takes as many
            steps as the others, but with ``uneven``.

            - ``keep``: each sample comes exactly once. What is left is dealt; where it is less than a row for each
              rank, the step before gives some of its own.
            - ``drop``: it is left out of this epoch.
            - ``pad``: dealt, and filled up with samples from the epoch's beginning until each rank has as many rows,
              as PyTorch's ``DistributedSampler`` does. ``repeats`` counts them.
            - ``uneven``: dealt, and a rank that gets nothing takes a step less: for loops that allow for it, such as
              those in PyTorch's ``Join``.
        worker: index of the worker in this rank.
        workers: number of workers of the rank.

    Raises:
        SettingError: a figure that makes no sense; or ``keep``, where not every rank can have a row in every step.
    """

    size: int
    batch_size: int
    start: int = 0
    rank: int = 0
    world_size: int = 1
    last: str = "keep"
    worker: int = 0
    workers: int = 1

    def __post_init__(self) -> None:
        check_number("size", self.size, _MAX)
        check_number("start", self.start, self.size)
        for name in ("batch_size", "world_size", "workers"):
            if getattr(self, name) < 1:
                raise SettingError(f"{name} must be at least 1, not {getattr(self, name)}")
        check_number("rank", self.rank, self.world_size - 1)
        check_number("worker", self.worker, self.workers - 1)
        if self.last not in LAST:
            raise SettingError(f"last must be one of {', '.join(LAST)}, not {self.last!r}")
        if self._is_short and (self.batch_size == 1 or self._whole_steps == 0):
            raise SettingError(
                f"{self._over} samples are left for the last step of {self.world_size} ranks, so that not every rank "
                "would have one: choose last='pad', 'drop' or 'uneven'"
            )

    def __len__(self) -> int:
        """Rows that the worker takes."""
        return self._plain * self.batch_size + len(self._tail())

    @property
    def is_shared(self) -> bool:
        """Others take steps or rows of the epoch too, so that every batch is its step's, whatever can be read."""
        return self.world_size > 1 or self.workers > 1

    @property
    def steps(self) -> int:
        """Steps that the rank takes."""
        if self.last == "drop":
            return self._whole_steps
        return self._whole_steps + (self._over > (self.rank if self.last == "uneven" else 0))

    def after(self, steps: int) -> int:
        """How far the epoch is when all ranks took so many steps: the position from which another shard goes on.

        After the last one this is the end of the epoch, also where samples were left out.
        """
        return self.size if steps >= self.steps else self._edge(steps)

    def step_of(self, number: int) -> int:
        """The rank's step that is this worker's ``number``-th, from 0."""
        return self.worker + self.workers * number

    def rows_in(self, step: int) -> int:
        """How many rows the rank takes in one of its steps."""
        width = self._edge(step + 1) - self._edge(step)
        if self.last == "pad":
            return -(-width // self.world_size)
        return max(0, -((self.rank - width) // self.world_size))

    def row_of(self, number: int) -> int:
        """The worker's row with which its ``number``-th step begins."""
        plain = min(number, self._plain)
        return plain * self.batch_size + sum(self.rows_in(self.step_of(batch)) for batch in range(plain, number))

    def positions(self, start: int, stop: int) -> _Rows:
        """Positions of the epoch, for the worker's own rows from ``start`` up to, not including, ``stop``.

        Returns:
            ``int64[stop - start]``; ascending, but for repeats. Memory grows with the answer alone.

        Raises:
            IndexError: the worker does not take so many rows.
        """
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"rows {start} to {stop} do not lie within 0 to {len(self)}")
        plain = self._plain * self.batch_size
        rows = np.arange(start, max(start, min(stop, plain)), dtype=np.int64)
        steps = self.worker + self.workers * (rows // self.batch_size)
        found = self.start + steps * self._at_once + self.rank + self.world_size * (rows % self.batch_size)
        return np.concatenate([found, self._tail()[max(0, start - plain) : max(0, stop - plain)]])

    @property
    def _at_once(self) -> int:
        return self.batch_size * self.world_size

    @property
    def _whole_steps(self) -> int:
        return (self.size - self.start) // self._at_once

    @property
    def _over(self) -> int:
        return (self.size - self.start) % self._at_once

    @property
    def _is_short(self) -> bool:
        """The last step is kept, and has less than a row for each rank unless the step before gives some."""
        return self.last == "keep" and 0 < self._over < self.world_size

    @property
    def _plain(self) -> int:
        """The worker's steps that have all rows; what comes after them are two steps of the rank at most."""
        return self._turns(max(0, min(self.steps, self._whole_steps) - self._is_short))

    def _edge(self, step: int) -> int:
        """The position at which a step begins, the same at every rank."""
        if self._is_short and step == self._whole_steps:
            return self.size - self.world_size
        return min(self.start + step * self._at_once, self.size)

    def _turns(self, steps: int) -> int:
        """How many of the rank's first steps are the worker's."""
        return max(0, -((self.worker - steps) // self.workers))

    def _tail(self) -> _Rows:
        """The positions of the worker's steps after the plain ones."""
        numbers = range(self._plain, self._turns(self.steps))
        found = [self._in_step(self.step_of(number)) for number in numbers]
        return np.concatenate([np.zeros(0, np.int64), *found])

    def _in_step(self, step: int) -> _Rows:
        rows = np.arange(self.rows_in(step), dtype=np.int64)
        return (self._edge(step) + self.rank + self.world_size * rows) % self.size


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Resumed:
    """An ``EpochOrder`` that begins after the samples that a state says were handed out.

    So how far a loader is in it is one number again, from which shards of any ranks go on.

    Attributes:
        order: the order in which the state's positions are positions.
        state: the place where it goes on.
    """

    order: EpochOrder
    state: OrderState

    def __len__(self) -> int:
        return len(self.order)

    @property
    def name(self) -> str:
        """See ``EpochOrder.name``."""
        return self.order.name

    @property
    def seed(self) -> int:
        """See ``EpochOrder.seed``."""
        return self.order.seed

    @property
    def epoch(self) -> int:
        """See ``EpochOrder.epoch``."""
        return self.order.epoch

    @property
    def start(self) -> int:
        """The number of positions that were handed out."""
        return self.state.position + len(self.state.ahead)

    def at(self, positions: _Rows) -> _Rows:
        """See ``EpochOrder.at``."""
        check_inside(positions, len(self))
        return self.order.at(self.original_positions(positions))

    def original_positions(self, positions: _Rows) -> _Rows:
        """``int64[n]``: where in ``order`` stands what stands here at each position, up to the length itself."""
        ahead = np.array(self.state.ahead, np.int64)
        found = positions.astype(np.int64)
        is_ahead = (positions >= self.state.position) & (positions < self.start)
        found[is_ahead] = ahead[positions[is_ahead] - self.state.position]
        rest = positions >= self.start
        # Before the k-th one ahead stand so many that were missing: what follows them has moved by k places.
        missing_before = ahead - self.state.position - np.arange(len(ahead))
        moved = positions[rest] - self.start
        found[rest] = self.state.position + moved + np.searchsorted(missing_before, moved, side="right")
        return found

    def in_epoch(self, epoch: int) -> Self:
        """The same in another epoch, at its beginning."""
        if epoch == self.epoch:
            return self
        state = replace(self.state, epoch=epoch, position=0, ahead=())
        return replace(self, order=self.order.in_epoch(epoch), state=state)


class Progress:
    """The samples of an epoch that were handed out: all below a position, and some beyond it.

    Args:
        position: all below it was handed out or cannot be read.
        ahead: positions beyond it, ascending.
    """

    def __init__(self, position: int = 0, ahead: tuple[int, ...] = ()) -> None:
        self.position = position
        self._ahead = np.array(ahead, np.int64)

    @property
    def ahead(self) -> tuple[int, ...]:
        """Positions beyond ``position`` that were handed out, ascending."""
        return tuple(self._ahead.tolist())

    def give(self, positions: _Rows, missing: int) -> None:
        """Samples were handed out.

        Args:
            positions: the positions of those rows.
            missing: every position below this one was handed out, cannot be read, or is among ``positions``.
        """
        given = np.union1d(self._ahead, positions)
        position = max(self.position, missing)
        given = given[given >= position]
        run = int(np.argmin(np.append(given == position + np.arange(len(given)), False)))
        self.position = position + run
        self._ahead = given[run:]


RECORD_BYTES = 256
"""Size of every rank's record, the same in every version, so that different versions can still report the mismatch."""

Gather = Callable[[bytes], Sequence[bytes]]
"""Gives this rank's record to all others and returns everybody's, by rank; waits until all have come."""

_SCHEMA = 2
_MAGIC = b"frostord"
_LAYOUT = struct.Struct("<8sIII5q8s64s64s16s")
_NUMBERS = ("seed", "epoch", "position", "samples", "batch_size")
_MAX_NAMED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingPlan:
    """The samples that a rank is about to read.

    Attributes:
        state: the place where it begins.
        rank: rank that wrote the record.
        world_size: number of ranks that it believes in.
        ahead: name of what the state has ahead, where only that name is known; None where the state has it.
    """

    state: OrderState
    rank: int
    world_size: int
    ahead: bytes | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        check_number("world_size", self.world_size, (1 << 32) - 1)
        check_number("rank", self.rank, self.world_size - 1)

    def to_bytes(self) -> bytes:
        """``RECORD_BYTES`` bytes: numbers and texts as they are, since a digest could not tell what differs."""
        state = self.state
        numbers = (getattr(state, name) for name in _NUMBERS)
        texts = (text.encode() for text in (state.last, state.manifest, state.order))
        record = _LAYOUT.pack(_MAGIC, _SCHEMA, self.rank, self.world_size, *numbers, *texts, self.ahead_name)
        return record.ljust(RECORD_BYTES, b"\0")

    @property
    def ahead_name(self) -> bytes:
        """16 bytes that name the positions which were handed out ahead of others."""
        if self.ahead is not None:
            return self.ahead
        return hashlib.sha256(struct.pack(f"<{len(self.state.ahead)}q", *self.state.ahead)).digest()[:16]

    @classmethod
    def from_bytes(cls, record: bytes, *, at: int) -> "ReadingPlan":
        """Read what ``to_bytes`` wrote.

        Args:
            record: record from the rank.
            at: the number, for the sentence.

        Raises:
            OrderMismatch: the bytes are no record, or a record of another version.
        """
        if len(record) != RECORD_BYTES or not record.startswith(_MAGIC):
            raise OrderMismatch(f"rank {at} answered with something else than what it is about to read")
        _, schema, rank, world_size, *numbers, last, manifest, order, ahead = _LAYOUT.unpack_from(record)
        if schema != _SCHEMA:
            raise OrderMismatch(
                f"rank {at} runs another version of Frostline (schema {schema}, and {_SCHEMA} here): install the same "
                "version everywhere"
            )
        texts = {"manifest": _text(manifest), "order": _text(order), "last": _text(last)}
        named: dict[str, Any] = dict(zip(_NUMBERS, numbers, strict=True)) | texts
        try:
            return cls(state=OrderState(**named), rank=rank, world_size=world_size, ahead=ahead)
        except SettingError as error:
            raise OrderMismatch(f"rank {at} answered with something that makes no sense: {error}") from error


def check_agreement(records: Sequence[bytes]) -> None:
    """Make sure that all ranks are about to read parts of the same epoch; each rank reaches the same verdict.

    Raises:
        OrderMismatch: the ranks differ; the message says in what, and at which ranks.
    """
    found = [ReadingPlan.from_bytes(record, at=rank) for rank, record in enumerate(records)]
    for place, terms in enumerate(found):
        if terms.rank != place or terms.world_size != len(found):
            raise OrderMismatch(
                f"process {place} of {len(found)} takes itself for rank {terms.rank} of {terms.world_size}: each "
                "needs a rank of its own, and the same world_size"
            )
    for name in ("manifest", "order", "seed", "epoch", "samples", "position", "batch_size", "last"):
        _same(name, [getattr(terms.state, name) for terms in found])
    _same("ahead", [terms.ahead_name.hex() for terms in found])


def _same(name: str, values: Sequence[object]) -> None:
    others = [rank for rank, value in enumerate(values) if value != values[0]]
    if not others:
        return
    named = ", ".join(f"rank {rank} has {_short(values[rank])}" for rank in others[:_MAX_NAMED])
    more = f", and {len(others) - _MAX_NAMED} more differ" if len(others) > _MAX_NAMED else ""
    raise OrderMismatch(
        f"the ranks would not read the same epoch, {_WORDS[name]} differs: rank 0 has {_short(values[0])}, "
        f"{named}{more}"
    )


_WORDS = {
    "manifest": "the manifest of the samples",
    "order": "the kind of order (shuffle, weights, mixture)",
    "seed": "the seed",
    "epoch": "the epoch",
    "samples": "the number of samples",
    "position": "the position to go on from",
    "ahead": "what was handed out ahead of others (by name)",
    "batch_size": "the batch size of all ranks together",
    "last": "what becomes of the last batch",
}


def _short(value: object) -> str:
    return value[:24] if isinstance(value, str) else str(value)


def _text(field: bytes) -> str:
    return field.rstrip(b"\0").decode("ascii", errors="replace")
