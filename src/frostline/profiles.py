"""What each cut and each codec costs, as measured: seconds a sample and bytes of memory, JSON in and out."""

from dataclasses import asdict, dataclass
from typing import Any

__all__ = ("CodecCost", "CutCost", "Profile")


@dataclass(frozen=True, slots=True, kw_only=True)
class CutCost:
    """The cost of running the prefix from its input to one cut, and the memory of running what is left of it.

    Attributes:
        number: of the cut (0 encoded, 1 the network's input).
        seconds: from the encoded sample to this cut, a sample; median over the measured batches.
        spread_s: interquartile range of the same.
        fixed_bytes: memory whatever the batch (weights in use).
        bytes_per_sample: memory for each sample of the device batch at the peak.
        rest_fixed_bytes: as ``fixed_bytes``, of running from this cut to the frost line.
        rest_bytes_per_sample: as ``bytes_per_sample``, of running from this cut to the frost line.
    """

    number: int
    seconds: float
    spread_s: float
    fixed_bytes: int
    bytes_per_sample: int
    rest_fixed_bytes: int = 0
    rest_bytes_per_sample: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecCost:
    """The cost of one codec on the real activations at one cut.

    Attributes:
        cut: its number.
        codec: name of the codec.
        bytes_per_sample: payload on the wire, the mean.
        encode_s: seconds a sample at the side that sends; median over repeats.
        decode_s: seconds a sample at the side that receives; median over repeats.
        spread_s: interquartile range of both together.
        error: root-mean-square error relative to the activations' own root mean square, of the worst sample;
            0 where nothing is lost.
    """

    cut: int
    codec: str
    bytes_per_sample: float
    encode_s: float
    decode_s: float
    spread_s: float = 0.0
    error: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One side's measurement of one prefix.

    Attributes:
        hardware: names the processor or accelerator and its threads; equal names measure alike.
        host: names the machine (a digest).
        cores: numbers of the processor cores that this side may use; sides of one host that have some in common
            share them.
        engine: what ran the prefix.
        device: ``cpu`` or ``cuda``: what ran it; decoding is the processor's in either case.
        device_batch: samples a run while measuring.
        read_s: to read one encoded sample from the store; 0 at a side that did not.
        cuts: cost at every cut, by number from 0.
        codecs: cost of the codecs that were measured; a pair of cut and codec that is not there was not measured.
    """

    hardware: str
    host: str
    engine: str
    device_batch: int
    read_s: float
    cuts: tuple[CutCost, ...]
    cores: tuple[int, ...] = ()
    device: str = "cpu"
    codecs: tuple[CodecCost, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """A dictionary of plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Profile":
        """The inverse of ``to_json``; raises ``TypeError`` or ``KeyError`` on another shape."""
        return cls(
            **{
                **value,
                "cores": tuple(int(core) for core in value["cores"]),
                "cuts": tuple(CutCost(**cut) for cut in value["cuts"]),
                "codecs": tuple(CodecCost(**codec) for codec in value["codecs"]),
            }
        )
