"""What each cut costs, as measured: seconds a sample and bytes of memory, JSON in and out."""

from dataclasses import asdict, dataclass
from typing import Any

__all__ = ("CutCost", "Profile")


@dataclass(frozen=True, slots=True, kw_only=True)
class CutCost:
    """The cost of running the prefix from its input to one cut.

    Attributes:
        number: of the cut (0 encoded, 1 pixels).
        seconds: from the encoded sample to this cut, a sample; median over the measured batches.
        spread_s: interquartile range of the same.
        fixed_bytes: memory whatever the batch (weights in use).
        bytes_per_sample: memory for each sample of the device batch at the peak.
    """

    number: int
    seconds: float
    spread_s: float
    fixed_bytes: int
    bytes_per_sample: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One side's measurement of one prefix.

    Attributes:
        hardware: names the processor or accelerator and its threads; equal names measure alike.
        host: names the machine (a digest); sides on one host share its cores.
        engine: what ran the prefix.
        device_batch: samples a run while measuring.
        read_s: to read one encoded sample from the store; 0 at a side that did not.
        cuts: cost at every cut, by number from 0.
    """

    hardware: str
    host: str
    engine: str
    device_batch: int
    read_s: float
    cuts: tuple[CutCost, ...]

    def to_json(self) -> dict[str, Any]:
        """A dictionary of plain values."""
        return {**asdict(self), "cuts": [asdict(cut) for cut in self.cuts]}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Profile":
        """The inverse of ``to_json``; raises ``TypeError`` or ``KeyError`` on another shape."""
        return cls(**{**value, "cuts": tuple(CutCost(**cut) for cut in value["cuts"])})
