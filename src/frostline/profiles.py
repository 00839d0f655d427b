"""What each cut and each codec costs, as measured: seconds a sample and bytes of memory, JSON in and out."""

from dataclasses import asdict, dataclass
from typing import Any

from frostline.core import LOSSY
from frostline.core.declared import Amount, Count

__all__ = ("PRECISIONS", "CodecCost", "CutCost", "Profile", "Trial")

PRECISIONS = ("fp32", *LOSSY)
"""Of an engine's numbers, the finest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CutCost:
    """The cost of running the prefix from its input to one cut, and the memory of running what is left of it.

    Attributes:
        number: number of the cut (0 encoded, 1 the network's input).
        seconds: the seconds from the encoded sample to this cut, a sample; median over the measured batches.
        spread_s: interquartile range of the same.
        fixed_bytes: memory whatever the batch (weights in use).
        bytes_per_sample: memory for each sample of the device batch at the peak.
        remaining_fixed_bytes: bytes, whatever the batch, of running from this cut to the frost line.
        remaining_bytes_per_sample: bytes per sample of running from this cut to the frost line.
    """

    number: Count
    seconds: Amount
    spread_s: Amount
    fixed_bytes: Count
    bytes_per_sample: Count
    remaining_fixed_bytes: Count = 0
    remaining_bytes_per_sample: Count = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecCost:
    """The cost of one codec on the real activations at one cut.

    Attributes:
        cut: the number.
        codec: name of the codec.
        bytes_per_sample: payload on the wire, the mean.
        encode_s: seconds a sample at the side that sends; median over repeats.
        decode_s: seconds a sample at the side that receives; median over repeats.
        spread_s: interquartile range of both together.
        error: root-mean-square error relative to the activations' own root mean square, of the worst sample;
            0 where nothing is lost.
    """

    cut: Count
    codec: str
    bytes_per_sample: Amount
    encode_s: Amount
    decode_s: Amount
    spread_s: Amount = 0.0
    error: Amount = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One engine, tried on real samples up to one cut.

    Attributes:
        engine: the name.
        precision: precision of its numbers, one of ``PRECISIONS``.
        cut: number of the cut.
        seconds: a sample, from the network's input to the cut, at the best of the batches and threads that were
            tried; median over runs. 0 where it did not run.
        spread_s: interquartile range of the same.
        error: root-mean-square error of what crosses the cut against the reference, relative to the sample's own root
            mean square, of the worst sample; 0 for the reference itself, and where it did not run.
        rows: rows of a run at which it was fastest, a multiple of eight; fewer where it runs eight in parts, between
            which others go first.
        threads: the threads with which it was.
        weight_bytes: bytes that it keeps between runs.
        load_bytes: bytes that making it ready takes at its peak, what it keeps among them.
        fixed_bytes: bytes of a run at its peak, whatever the batch.
        bytes_per_sample: bytes of a run at its peak, for each sample.
        why_not: the reason why it is not used, in words; None for the one that is.
    """

    engine: str
    precision: str
    cut: Count
    seconds: Amount = 0.0
    spread_s: Amount = 0.0
    error: Amount = 0.0
    rows: Count = 0
    threads: Count = 0
    weight_bytes: Count = 0
    load_bytes: Count = 0
    fixed_bytes: Count = 0
    bytes_per_sample: Count = 0
    why_not: str | None = None

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision is one of {', '.join(PRECISIONS)}, not {self.precision!r}")

    @property
    def samples_per_s(self) -> float | None:
        """Samples a second; None where it did not run."""
        return 1 / self.seconds if self.seconds > 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One side's measurement of one prefix.

    Attributes:
        hardware: name of the processor or accelerator and its threads; equal names measure alike.
        host: digest that stands for the machine.
        cores: numbers of the processor cores that this side may use; sides of one host that have some in common
            share them.
        engine: engine that ran the prefix.
        device: ``cpu`` or ``cuda``: what ran it; decoding is the processor's in either case.
        device_batch: samples a run while measuring.
        read_s: the time to read one encoded sample from the store; 0 at a side that did not.
        cuts: cost at every cut, by number from 0.
        codecs: cost of the codecs that were measured; a pair of cut and codec that is not there was not measured.
        trials: trials of every engine that there is, up to the frost line, and of the one in use up to the cuts that a
            plan may want; none where only the reference was allowed.
    """

    hardware: str
    host: str
    engine: str
    device_batch: Count
    read_s: Amount
    cuts: tuple[CutCost, ...]
    cores: tuple[Count, ...] = ()
    device: str = "cpu"
    codecs: tuple[CodecCost, ...] = ()
    trials: tuple[Trial, ...] = ()

    @property
    def engine_error(self) -> float:
        """The largest error of the engine in use, over the cuts at which it was measured."""
        return max((trial.error for trial in self.trials if trial.engine == self.engine), default=0.0)

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
                "trials": tuple(Trial(**trial) for trial in value.get("trials", ())),
            }
        )
