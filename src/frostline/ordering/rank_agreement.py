"""Decides whether ranks may train together: each says in a few bytes what it is about to read, and all must agree."""

import hashlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from frostline.errors import OrderMismatch, SettingError
from frostline.ordering.permutation import check_number
from frostline.ordering.state import OrderState

__all__ = ("RECORD_BYTES", "Gather", "ReadingPlan", "check_agreement")

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
    """What a rank is about to read.

    Attributes:
        state: where it begins.
        rank: rank that wrote the record.
        world_size: how many ranks it believes there are.
        ahead: names what the state has ahead, where only that name is known; None where the state has it.
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
            record: from the rank.
            at: its number, for the sentence.

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
    """Make sure that ranks are about to read parts of the same epoch; each comes to the same answer.

    Args:
        records: records of all ranks, by rank.

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
