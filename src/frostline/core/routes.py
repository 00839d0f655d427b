"""A way that a sample may take from the store to the trainer, and names of what changes (next to) nothing on it."""

from dataclasses import dataclass

__all__ = ("EXACT", "FLOAT32", "REFERENCE", "Route")

EXACT = "exact"
"""The codec that leaves activations as they are, and the accuracy of the user's own network, bit for bit."""

FLOAT32 = "float32"
"""The accuracy of 32-bit floats: codecs lose nothing, and engines sum the same numbers in another order at most."""

REFERENCE = "torch-eager"
"""The engine whose features are the user's own network's, bit for bit; every other one is measured against it."""


@dataclass(frozen=True, slots=True, order=True)
class Route:
    """Where the store side stops, and how what crosses is encoded on the wire.

    Attributes:
        cut: number of the cut (``Cut.number``).
        codec: name of the codec (``wire.codecs``); cut 0 always has ``exact``.
    """

    cut: int
    codec: str = EXACT
