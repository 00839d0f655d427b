"""A way that a sample may take from the store to the trainer, and the names of what changes nothing on it."""

from dataclasses import dataclass

__all__ = ("EXACT", "REFERENCE", "Route")

EXACT = "exact"
"""The codec that leaves activations as they are."""

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
