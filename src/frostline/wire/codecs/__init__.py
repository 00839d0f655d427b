"""Codecs: how activations are packed for the wire and unpacked, and what that loses."""

from frostline.wire.codecs.names import CODECS, Codec, offered
from frostline.wire.codecs.pack import PackingMemory, pack, packing_memory, unpack
from frostline.wire.codecs.precision import relative_error

__all__ = ("CODECS", "Codec", "PackingMemory", "offered", "pack", "packing_memory", "relative_error", "unpack")
