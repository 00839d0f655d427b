"""Decides which places of objects are read together, in the order in which they will be asked for."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from frostline.stores.base.protocols import Place
from frostline.stores.reads.coalesce import Range, plan_ranges

__all__ = ("Neighbours", "neighbours")


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbours:
    """Places of an object that one request reads.

    Attributes:
        object: its name.
        whole: what is read.
        places: that lie in it, each once; there may be but one.
    """

    object: str
    whole: Range
    places: tuple[Place, ...]


def neighbours(places: Sequence[Place], *, max_gap_bytes: int, max_bytes: int) -> list[Neighbours]:
    """Join places that are near each other; see ``ranges.plan_ranges``.

    Args:
        places: as they will be asked for; those of no bytes are left out.
        max_gap_bytes: read in vain rather than make another request.
        max_bytes: of one request, unless a place is larger by itself.

    Returns:
        What is read, in the order in which the first place of each stands.
    """
    asked: defaultdict[str, dict[Range, int]] = defaultdict(dict)
    for row, place in enumerate(places):
        if place.length:
            asked[place.object].setdefault(Range(place.offset, place.length), row)
    found: list[tuple[int, Neighbours]] = []
    for object, rows in asked.items():
        plan = plan_ranges(list(rows), max_gap_bytes=max_gap_bytes, max_bytes=max_bytes)
        of: list[list[Range]] = [[] for _ in plan.reads]
        for one, piece in zip(rows, plan.pieces, strict=True):
            of[piece.read].append(one)
        for whole, some in zip(plan.reads, of, strict=True):
            together = Neighbours(object=object, whole=whole, places=tuple(Place(object, *one) for one in some))
            found.append((min(rows[one] for one in some), together))
    return [one for _, one in sorted(found, key=lambda one: one[0])]
