"""Decides which shared objects make room for others. Pure."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from frostline.cache.shared.object_layout import MARK, PackedObject

__all__ = ("Aged", "surplus")

# Less would have to be made room for again with the very next objects.
_ROOM_PART = 16
_OURS = re.compile(r"([0-9a-f]{64})/.+", re.DOTALL)


class Aged(Protocol):
    """An object of a listing that tells its age; see ``stores.base.protocols.Dated``."""

    @property
    def object(self) -> str:
        """Its name, relative to the root."""

    @property
    def size(self) -> int:
        """In bytes."""

    @property
    def modified_s(self) -> float:
        """When it was written, in seconds."""


T = TypeVar("T", bound=Aged)


@dataclass(slots=True)
class _Folder(Generic[T]):
    """The objects of one scope.

    Attributes:
        used_s: when somebody last used one of its rows, or wrote some.
        packed_objects: objects with bundles of rows.
        rest: objects left by a process that was killed while writing.
        mark: objects that say when it was used.
    """

    used_s: float = 0.0
    packed_objects: list[T] = field(default_factory=list)
    rest: list[T] = field(default_factory=list)
    mark: list[T] = field(default_factory=list)


def surplus(listing: Sequence[T], *, budget_bytes: int, wanted_bytes: int, now_s: float, idle_s: float) -> list[T]:
    """What is to be removed, in this order, so that so many more bytes fit; nothing where they do, or never can.

    What somebody used within ``idle_s`` stays, and new rows are turned away, as ``room.idle_shelves`` has it and for
    its reasons. Of the others those go first whose scope was unused longest, and of a scope those that were written
    first. What does not lie in a scope's folder is left alone, but counts.

    Args:
        listing: listing of all that lies under the root.
        budget_bytes: most that may lie there.
        wanted_bytes: bytes that are to be written.
        now_s: by the clock of the listing.
        idle_s: without use for so long, nobody is taken to want rows any more.
    """
    missing = sum(entry.size for entry in listing) + wanted_bytes - budget_bytes
    if missing <= 0 or wanted_bytes > budget_bytes:
        return []
    freed, removed = 0, []
    for folder in _in_turn(_folders(listing), now_s - idle_s):
        if freed >= max(missing, budget_bytes // _ROOM_PART):
            break
        removed.append(folder)
        freed += folder.size
    return removed if freed >= missing else []


def _folders(listing: Sequence[T]) -> dict[str, _Folder[T]]:
    folders: dict[str, _Folder[T]] = {}
    for entry in sorted(listing, key=lambda item: (item.modified_s, item.object)):
        found = _OURS.fullmatch(entry.object)
        if found is None:
            continue
        folder = folders.setdefault(found[1], _Folder())
        if PackedObject.named(entry.object, entry.size) is not None:
            folder.packed_objects.append(entry)
        elif entry.object == f"{found[1]}/{MARK}":
            folder.mark.append(entry)
        else:
            folder.rest.append(entry)
            continue  # nobody uses it
        folder.used_s = entry.modified_s
    return folders


def _in_turn(folders: dict[str, _Folder[T]], before_s: float) -> list[T]:
    """What may go, what is missed least first."""
    rest = [entry for folder in folders.values() for entry in folder.rest if entry.modified_s <= before_s]
    idle = sorted((folder.used_s, name, folder) for name, folder in folders.items() if folder.used_s <= before_s)
    return [*rest, *(entry for _, _, folder in idle for entry in (*folder.packed_objects, *folder.mark))]
