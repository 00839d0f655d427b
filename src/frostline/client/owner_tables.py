"""Keeps the owners of each data set's blocks, and makes them anew where nodes came, went or turned out faster."""

import threading
from collections.abc import Mapping

from frostline.client.owners import BlockOwners, Blocks

__all__ = ("OwnerTables",)


class OwnerTables:
    """The owners of blocks by data set. Safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tables: dict[Blocks, BlockOwners] = {}

    def at(self, blocks: Blocks, speeds: Mapping[str, float]) -> BlockOwners:
        """The owners of a data set's blocks.

        Args:
            blocks: blocks of the data set.
            speeds: speed of each node by its name.
        """
        with self._lock:
            found = self._tables.get(blocks)
            if found is None:
                found = BlockOwners.of(blocks, speeds)
            elif dict(zip(found.nodes, found.weights, strict=True)) != speeds:
                found = found.changed(speeds)
            self._tables[blocks] = found
            return found
