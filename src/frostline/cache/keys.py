"""Decides what names a feature: a digest of everything that its numbers depend on. Pure."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from frostline.core import Samples, Targets, View

__all__ = ("Scope", "row_keys")

# Part of every digest: raise it whenever the same inputs would give other numbers.
_RULE = "frostline features 1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """What features depend on beside the sample. Features of another scope are other numbers.

    Attributes:
        data: canonical URL of the data set's root: what one may not read has another name.
        prefix: digest of the prefix; empty where there is none.
        cut: its number.
        preprocess: digest of the preprocessing, which includes the decoder's version.
        engine: engine that computes them, with its version and hardware, which decide their last bits.
        batch_rows: rows of each of its runs, which decide them too; 0 where nothing runs.
        shapes: shapes of the tensors that cross the cut, of one sample.
        dtypes: dtypes of the same tensors.
        view: which random view; None where no step is random.
    """

    data: str
    prefix: str
    cut: int
    preprocess: str
    engine: str
    batch_rows: int = 0
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    view: View | None = None

    @property
    def digest(self) -> bytes:
        """32 bytes."""
        values = {**asdict(self), "rule": _RULE}
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).digest()


def row_keys(samples: Samples) -> list[bytes | None]:
    """16 bytes for each sample, from its id, its place and the version of its object.

    Random steps are seeded by the id, so it belongs to the name. A sample whose object's version nobody knows has no
    name: its features could be those of other bytes. Where it has a mask, which is kept with its features, place and
    version of the mask belong to the name too.
    """
    if not len(samples.versions):
        return [None] * len(samples)
    ids, offsets, lengths = (column.tolist() for column in (samples.ids, samples.offsets, samples.lengths))
    places = zip(ids, samples.objects, offsets, lengths, samples.versions, strict=True)
    if samples.targets is None:
        return [_row_key(place) if place[-1] else None for place in places]
    masks = _masks(samples.targets)
    return [
        _row_key(place + mask) if place[-1] and (mask[-1] or not mask[0]) else None
        for place, mask in zip(places, masks, strict=True)
    ]


def _masks(targets: Targets) -> Iterable[tuple[object, ...]]:
    return zip(targets.objects, targets.offsets.tolist(), targets.lengths.tolist(), targets.versions, strict=True)


def _row_key(place: Sequence[object]) -> bytes:
    # Neither a name nor a version holds a NUL, so that the parts cannot run into each other.
    return hashlib.blake2b("\0".join(map(str, place)).encode(), digest_size=16).digest()
