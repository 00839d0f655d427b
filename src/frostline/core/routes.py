"""A way that a sample may take from the store to the trainer."""

from dataclasses import dataclass

__all__ = ("EXACT", "Route")

EXACT = "exact"
"""The codec that leaves activations as they are."""


@dataclass(frozen=True, slots=True, order=True)
class Route:
    """Where the store side stops, and how what crosses is encoded on the wire.

    Attributes:
        cut: number of the cut (``Cut.number``).
        codec: name of the codec (``wire.codecs``); cut 0 always has ``exact``.
    """

    cut: int
    codec: str = EXACT
