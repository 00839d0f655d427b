"""The server beside the store: fetch, decode, batch, run, encode, stream."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from frostline.node.service import Node

__all__ = ("Node",)


def __getattr__(name: str) -> Any:
    # A process that tries an engine needs few modules of this package; importing the server costs it a second.
    if name != "Node":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from frostline.node.service import Node

    return Node
