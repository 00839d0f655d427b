"""Decides whose features make room for others, and how much room rows take. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ("PAGE_BYTES", "ScopeUsage", "idle_shelves", "stored_bytes")

PAGE_BYTES = 16_384
"""Of the file: a row of a few kilobytes lies in one page, so that reading it is one call."""

# What a page, a row within it and its place in the index take beside the row's bytes, rounded up.
_PAGE_HEADER_BYTES = 40
_ROW_BYTES = 24
_INDEX_BYTES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ScopeUsage:
    """The features of one scope.

    Attributes:
        number: names the scope in the file.
        used_s: when somebody last asked for one of them or put one there.
        row_bytes: bytes of each.
    """

    number: int
    used_s: float
    row_bytes: int


def idle_shelves(scopes: Sequence[ScopeUsage], *, wanting: int, now_s: float, idle_s: float) -> list[ScopeUsage]:
    """Those that make room, longest unused first.

    What somebody used within ``idle_s`` stays, and new rows are turned away: an epoch reads every sample once in a
    new order, so with room for a share of a data set keeping what came first hits exactly that share, while dropping
    the oldest drops rows before they are wanted again (Mohan et al., "Analyzing and Mitigating Data Stalls in DNN
    Training", PVLDB 14(5), 2021). Nor can two jobs drive each other's features out for ever.

    Args:
        scopes: all of them.
        wanting: number of the scope for which room is wanted; it does not make room for itself.
        now_s: by the clock of ``used_s``.
        idle_s: without use for so long, nobody is taken to want them any more.
    """
    idle = [scope for scope in scopes if scope.number != wanting and now_s - scope.used_s >= idle_s]
    return sorted(idle, key=lambda scope: (scope.used_s, scope.number))


def stored_bytes(row_bytes: int) -> float:
    """What a row takes in the file, rounded up: rows share a page as far as they fit whole, or fill several."""
    room = PAGE_BYTES - _PAGE_HEADER_BYTES
    if row_bytes + _ROW_BYTES > room:
        return row_bytes + PAGE_BYTES + _INDEX_BYTES
    return PAGE_BYTES / (room // (row_bytes + _ROW_BYTES)) + _INDEX_BYTES
