"""Listings by a node: what is asked for, and the lines of JSON that come before a manifest's bytes."""

import re
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from frostline.core.config import CHANGED
from frostline.core.declared import Digest, Matching, OneOf, Sized, read_declared
from frostline.core.errors import (
    BadRequest,
    DataChanged,
    DataError,
    DataNotFound,
    EmptyDataset,
    FrostlineError,
    OutOfSpace,
    Refused,
    Unavailable,
    UserError,
)
from frostline.core.events import Event, PhaseStarted, ProgressMade
from frostline.wire.messages import error_from_json, error_to_json

__all__ = (
    "MAX_KNOWN",
    "MAX_SPLITS",
    "ListingRequest",
    "ManifestHead",
    "event_from_line",
    "failure_from_json",
    "failure_to_json",
    "line_of_event",
)

MAX_KNOWN = 8
"""Files that a client may say it has."""

MAX_SPLITS = 1000
"""Saved splits that come with a manifest."""

_DIGEST = re.compile(r"[0-9a-f]{64}")
# With the name of a column behind the colon.
_FORMAT = Matching(r"[a-z0-9-]{1,40}(:[^\x00-\x1f]{1,200})?", "null or the name of a format")
_LIMIT = 1 << 63
_MAX_URL = 4096
_MAX_TEXT = 200
# What is wrong with the data itself is the same sentence to whoever lists it here or there.
_OF_DATA = {kind.__name__: kind for kind in (DataChanged, DataError, DataNotFound, EmptyDataset)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ListingRequest:
    """Have a node list a data set.

    Attributes:
        data: URL of its root, which the node must serve.
        format: name of its format; None takes what the listing looks like.
        relist: False takes the manifest that was built last, without listing the data.
        on_change: policy for objects that changed (``config.CHANGED``).
        known: SHA-256 of manifest files that the client has and need not get again.
    """

    data: Annotated[str, Sized(1, _MAX_URL)]
    format: Annotated[str, _FORMAT] | None = None
    relist: bool = True
    on_change: Annotated[str, OneOf(CHANGED)] = CHANGED[0]
    known: Annotated[tuple[Digest, ...], Sized(0, MAX_KNOWN)] = ()

    def to_json(self) -> dict[str, Any]:
        """A dictionary of plain values, as the body of ``POST /v1/listings``."""
        return {**asdict(self), "known": list(self.known)}

    @classmethod
    def from_json(cls, value: object) -> "ListingRequest":
        """The inverse of ``to_json``; raises ``BadRequest`` naming the field that is wrong."""
        return read_declared(cls, value, "a listing")


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestHead:
    """What a node says of a manifest before its bytes come: those of the Parquet file, then those of the splits.

    Attributes:
        digest: SHA-256 of the listing; the name of the manifest.
        samples: rows of its table.
        nbytes: bytes of the Parquet file.
        sha256: SHA-256 of that file.
        is_known: the client has that file: its bytes do not come.
        splits: names of the splits that were saved of this listing; each comes as a bitmap of the rows.
        splits_sha256: SHA-256 of the bitmaps, one behind the other.
        applied: steps applied to the images, where the data is a ready format (``preprocess.Applied``).
        found: the manifest was there already.
    """

    digest: str
    samples: int
    nbytes: int
    sha256: str
    is_known: bool
    splits: tuple[str, ...]
    splits_sha256: str
    applied: dict[str, Any] | None
    found: bool

    @property
    def bitmap_bytes(self) -> int:
        """Bytes of each split's bitmap."""
        return -(-self.samples // 8)

    def to_json(self) -> dict[str, Any]:
        """A dictionary of plain values, with its event."""
        return {"event": "listed", **asdict(self), "splits": list(self.splits)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "ManifestHead":
        """The inverse of ``to_json``.

        Raises:
            Refused: an untrusted client wrote it, and it makes no sense.
        """
        splits: Any = value.get("splits")
        are_right = (
            _is_digest(value.get("digest"))
            and _is_digest(value.get("sha256"))
            and _is_digest(value.get("splits_sha256"))
            and all(_is_count(value.get(name)) for name in ("samples", "nbytes"))
            and all(isinstance(value.get(name), bool) for name in ("is_known", "found"))
            and isinstance(value.get("applied"), dict | None)
            and isinstance(splits, list)
            and len(splits) <= MAX_SPLITS
            and all(isinstance(name, str) and len(name) <= _MAX_TEXT for name in splits)
            and len(set(splits)) == len(splits)
        )
        if not are_right:
            raise Refused("the node says of a manifest what makes no sense")
        return cls(**{name: value[name] for name in cls.__slots__ if name != "splits"}, splits=tuple(splits))


def line_of_event(event: Event) -> dict[str, Any] | None:
    """What a client is told of a listing that goes on; None for an event that does not travel."""
    match event:
        case PhaseStarted():
            return {"event": "phase", "name": event.name}
        case ProgressMade():
            return {"event": "counted", "done": event.done, "total": event.total}
        case _:
            return None


def event_from_line(value: dict[str, Any]) -> Event | None:
    """The inverse of ``line_of_event``; None for what makes no sense, which an untrusted client wrote."""
    match value:
        case {"event": "phase", "name": str(name)} if name.isprintable():
            return PhaseStarted(name=name[:_MAX_TEXT])
        case {"event": "counted", "done": int(done), "total": int(total)} if _is_count(done) and _is_count(total):
            return ProgressMade(done=done, total=total)
        case _:
            return None


def failure_to_json(error: FrostlineError) -> dict[str, Any]:
    """The line that ends a listing which went wrong."""
    match error:
        case DataError():
            kind = next(kind.__name__ for kind in type(error).__mro__ if kind in _OF_DATA.values())
            return {"event": "failed", "error": kind, "message": str(error)}
        case OutOfSpace():
            told: FrostlineError = Unavailable(f"the node has no space on its disk for the manifest: {error}")
        case UserError():  # what its own user could put right is a request to a node that makes no sense
            told = BadRequest(str(error))
        case _:
            told = error
    return {"event": "failed", **error_to_json(told)}


def failure_from_json(value: dict[str, Any]) -> FrostlineError:
    """The inverse of ``failure_to_json``."""
    kind, message = _OF_DATA.get(str(value.get("error"))), value.get("message")
    if kind is not None and isinstance(message, str):
        return kind(message)
    return error_from_json(value) or Refused("the node could not list the data, and does not say why")


def _is_digest(value: object) -> bool:
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _LIMIT
