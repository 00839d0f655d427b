"""The door to all that a node needs of torch, opened when the first network comes: reading and decoding need none."""

import threading
from typing import TYPE_CHECKING

from frostline.config import NodeSettings
from frostline.node.terms import Room

if TYPE_CHECKING:
    from frostline.engines.torch_eager import TorchEngine
    from frostline.models.artifact import Prefix
    from frostline.node.trials import Trials

__all__ = ("TorchDoor",)


class TorchDoor:
    """Reads prefixes, makes their reference, and knows the trials of other engines. Safe for threads.

    Args:
        settings: of the node.
        room: that engines must fit.
    """

    def __init__(self, settings: NodeSettings, room: Room) -> None:
        self._settings = settings
        self._room = room
        self._lock = threading.Lock()
        self._trials: Trials | None = None
        self._is_closed = False

    @property
    def trials(self) -> "Trials":
        """What is known of engines on this hardware."""
        from frostline.node.trials import trials_of

        with self._lock:
            if self._trials is None:
                self._trials = trials_of(self._settings, self._room)
                if self._is_closed:
                    self._trials.close()
            return self._trials

    def digest_of(self, body: bytes) -> str:
        """See ``models.artifact``."""
        from frostline.models.artifact import digest_of

        return digest_of(body)

    def read(self, body: bytes) -> "Prefix":
        """See ``models.artifact.read_prefix``."""
        from frostline.models.artifact import read_prefix

        return read_prefix(body)

    def reference(self, prefix: "Prefix") -> "TorchEngine":
        """The engine that runs a prefix as the user's own network does; see ``TorchEngine`` for what may be raised."""
        from frostline.engines.torch_eager import TorchEngine

        device, most_rows = self._settings.device, self._settings.device_batch
        return TorchEngine(prefix.graph, prefix.cuts, prefix.tensors, device=device, most_rows=most_rows)

    def wake(self) -> None:
        """See ``Trials.wake``."""
        with self._lock:
            trials = self._trials
        if trials is not None:
            trials.wake()

    def close(self) -> None:
        """End what is being tried, and try no other."""
        with self._lock:
            self._is_closed = True
            trials = self._trials
        if trials is not None:
            trials.close()
