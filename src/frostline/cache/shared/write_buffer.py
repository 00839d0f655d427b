"""Gathers rows until there are enough for one shared object, or they waited long enough. Pure."""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice

from frostline.cache.shared.object_layout import Row

__all__ = ("Outbox",)


class Outbox:
    """Rows that wait to be written. Not safe for threads.

    Args:
        max_bytes: of all that wait; what comes beyond is not taken.
        bundle_bytes: so many make an object.
        linger_s: rows wait no longer than this for others.
    """

    def __init__(self, *, max_bytes: int, bundle_bytes: int, linger_s: float) -> None:
        self._max_bytes = max_bytes
        self._bundle_bytes = bundle_bytes
        self._linger_s = linger_s
        self._waiting: OrderedDict[bytes, _Pile] = OrderedDict()  # the one that has waited longest first
        self._bytes = 0

    def __len__(self) -> int:
        return sum(len(pile.rows) for pile in self._waiting.values())

    def add(self, scope: bytes, rows: Sequence[Row], now_s: float) -> int:
        """Take rows, none of which waits twice, and say how many found no room."""
        for count, (key, value) in enumerate(rows):
            if self._bytes + len(value) > self._max_bytes:
                return len(rows) - count
            pile = self._waiting.setdefault(scope, _Pile(since_s=now_s))
            if key in pile.rows:
                continue
            pile.rows[key] = value
            pile.nbytes += len(value)
            self._bytes += len(value)
        return 0

    def take(self, now_s: float, *, all: bool = False) -> tuple[bytes, list[Row]] | None:
        """The rows of one object, if there are enough of a scope or they waited long enough, or in any case."""
        for scope, pile in self._waiting.items():
            if all or pile.nbytes >= self._bundle_bytes or now_s >= pile.since_s + self._linger_s:
                return scope, self._taken(scope, pile, now_s)
        return None

    def due_in_s(self, now_s: float) -> float | None:
        """After how long rows will have waited long enough; None where none wait."""
        first = next(iter(self._waiting.values()), None)
        return None if first is None else max(0.0, first.since_s + self._linger_s - now_s)

    def _taken(self, scope: bytes, pile: "_Pile", now_s: float) -> list[Row]:
        each = max(1, pile.nbytes // max(1, len(pile.rows)))
        keys = list(islice(pile.rows, max(1, self._bundle_bytes // each)))
        rows = [(key, pile.rows.pop(key)) for key in keys]
        nbytes = sum(len(value) for _, value in rows)
        pile.nbytes -= nbytes
        self._bytes -= nbytes
        del self._waiting[scope]
        if pile.rows:
            pile.since_s = now_s
            self._waiting[scope] = pile
        return rows


class _Pile:
    """The rows of one scope, and since when the first of them waits."""

    def __init__(self, since_s: float) -> None:
        self.rows: dict[bytes, bytes] = {}
        self.nbytes = 0
        self.since_s = since_s
