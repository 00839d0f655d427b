"""The server beside the store: fetch, decode, batch, run, encode, stream."""

from frostline.node.service import Node

__all__ = ("Node",)
