"""A dictionary that drops the entry unused for longest where it would hold too many."""

from collections import OrderedDict
from typing import TypeVar

__all__ = ("LruDict",)

K = TypeVar("K")
V = TypeVar("V")


class LruDict(OrderedDict[K, V]):
    """A dictionary of the entries used last. Its owner guards it where several threads use it.

    Args:
        max_entries: entries that it holds at most.
    """

    def __init__(self, max_entries: int) -> None:
        super().__init__()
        self._max_entries = max_entries

    def use(self, key: K) -> V | None:
        """The value of a key, which is the entry used last from now on; None if there is none."""
        if key not in self:
            return None
        self.move_to_end(key)
        return self[key]

    def keep(self, key: K, value: V) -> None:
        """Set the value of a key, and drop the entry unused for longest if there are too many."""
        self[key] = value
        self.move_to_end(key)
        if len(self) > self._max_entries:
            self.popitem(last=False)
