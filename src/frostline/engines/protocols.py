"""What runs a prefix: one protocol for every engine, two for what only some of them can, and how they are called."""

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from frostline.core import Levels

__all__ = (
    "MARK",
    "Arrays",
    "Between",
    "Engine",
    "Footprint",
    "PipelinedEngine",
    "Pixels",
    "PreemptibleEngine",
    "RunningBatch",
    "calibration_of",
    "calibration_pixels",
    "evaluation_name",
    "evaluation_pixels",
    "identity",
    "levels_of",
    "offer_name",
)


Arrays = npt.NDArray[np.generic] | Sequence[npt.NDArray[np.generic]]
"""What comes in: one array for each input, or the one array of a network with one input."""

Between = Callable[[], None]
"""What is called between two operations of a run; it may end the run by raising something."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Memory of one run at its peak: ``fixed_bytes + batch * bytes_per_sample``, weights not counted."""

    fixed_bytes: int
    bytes_per_sample: int

    def at(self, batch: int) -> int:
        """Bytes for one batch of this many samples."""
        return self.fixed_bytes + batch * self.bytes_per_sample


class Engine(Protocol):
    """A prefix ready to run. Threads may share it; it need not run on more than one at a time."""

    @property
    def name(self) -> str:
        """The engine's name, one of ``engines.catalog.OFFERS``."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights that it holds, at most."""

    def footprint(self, cut: int) -> Footprint:
        """Memory of one run up to this cut, weights not counted."""

    def run(self, inputs: Arrays, cut: int) -> tuple[npt.NDArray[np.generic], ...]:
        """Compute what crosses a cut, with the shapes and dtypes that the cut declares.

        Args:
            inputs: an array ``[n, ...]`` for each input of the network, as cut 1 declares them, or the one; or where
                the engine's name says what they mean (``engines.protocols``), pixels ``uint8[n, H, W, C]``. Not
                changed.
            cut: number of a cut that the engine was made for.

        Returns:
            One C-contiguous array ``[n, ...]`` for each tensor that crosses.
        """


class RunningBatch(Protocol):
    """A run that was begun. ``outputs`` is to be called; until it has ended, the inputs must not change."""

    def drain(self) -> None:
        """Wait until its last pieces run, of which some will end before the others. What failed, ``outputs`` raises."""

    def outputs(self) -> tuple[npt.NDArray[np.generic], ...]:
        """Wait for what ``Engine.run`` returns, or raise what it raises."""


@runtime_checkable
class PipelinedEngine(Protocol):
    """An engine to which a batch may be given while it runs another: its threads go from one to the other."""

    def begin(self, inputs: Arrays, cut: int) -> RunningBatch | None:
        """Begin what ``Engine.run`` does, with the same arguments; None where it takes one batch at a time."""


@runtime_checkable
class PreemptibleEngine(Protocol):
    """An engine whose runs can be interrupted between two operations."""

    def run_divided(self, inputs: Arrays, cut: int, between: Between) -> tuple[npt.NDArray[np.generic], ...]:
        """What ``Engine.run`` does with the same arguments, and raises; ``between`` is called behind each operation."""


MARK = "@"
"""Before what an engine was calibrated on."""
_LEVELS_MARK = "+"
"""Before what stands in front of the network in an engine that takes pixels as they are kept."""

Pixels = npt.NDArray[np.float32] | npt.NDArray[np.uint8]
"""What goes into an engine: ``float32[n, C, H, W]`` as the network takes it, or pixels ``uint8[n, H, W, C]``."""

_PARTS = re.compile(rf"([^{_LEVELS_MARK}{MARK}]*)(?:\{_LEVELS_MARK}([^{MARK}]*))?(?:{MARK}(.*))?")


def calibration_pixels(pixels: Pixels) -> Pixels:
    """The samples of a trial that engines are calibrated on: two of three; the others judge them."""
    return np.delete(pixels, np.s_[1::3], axis=0)


def evaluation_pixels(pixels: Pixels) -> Pixels:
    """The samples of a trial on which errors are measured, of engines that are calibrated too."""
    return pixels[1::3]


def evaluation_inputs(pixels: Pixels, levels: Levels | None) -> npt.NDArray[np.float32]:
    """The samples of ``evaluation_pixels`` as the network takes them; ``levels`` says what kept pixels mean."""
    samples = evaluation_pixels(pixels)
    if levels is not None:
        samples = levels.apply(samples.astype(np.uint8, copy=False))
    return samples.astype(np.float32, copy=False)


def evaluation_name(pixels: Pixels, levels: Levels | None = None) -> str:
    """Names the samples on which errors are measured: an error says little of other samples.

    Args:
        pixels: all samples of the trial.
        levels: meaning of pixels that are as they are kept; None where they are as the network takes them.
    """
    return _digest(evaluation_pixels(pixels), levels)


def identity(
    name: str, precision: str, pixels: Pixels, levels: Levels | None = None, *, takes_pixels: bool = True
) -> str:
    """The name of an engine that is tried on these samples.

    Whatever decides its bits beside the network is part of the name, and thereby of requests, trials, converted files
    and of what names a feature in every cache: what its pixels mean, where it takes them as they are kept, and for 8
    bits, whose ranges are those of the samples, what it was calibrated on.

    Args:
        name: name of the offer.
        precision: precision of the offer.
        pixels: all samples of the trial.
        levels: meaning of pixels that are as they are kept; None where they are as the network takes them.
        takes_pixels: True if the engine takes them as they are kept, where they are so.
    """
    front = "" if levels is None or not takes_pixels else f"{_LEVELS_MARK}{levels.digest}"
    if precision != "int8":
        return name + front
    return f"{name}{front}{MARK}{_digest(calibration_pixels(pixels), levels)}"


def offer_name(engine: str) -> str:
    """The name of an engine's offer."""
    return _parts(engine)[0]


def levels_of(engine: str) -> str:
    """What an engine's name says of the pixels that it takes; empty where it takes what the network takes."""
    return _parts(engine)[1]


def calibration_of(engine: str) -> str:
    """What an engine's name says of its calibration; empty where it has none."""
    return _parts(engine)[2]


def _digest(pixels: Pixels, levels: Levels | None) -> str:
    some = np.ascontiguousarray(pixels)
    kind = repr((some.shape, some.dtype.str, "" if levels is None else levels.digest))
    return hashlib.sha256(kind.encode() + some.tobytes()).hexdigest()[:16]


def _parts(engine: str) -> Sequence[str]:
    found = _PARTS.fullmatch(engine)
    assert found is not None, "every text has a first part"
    return found.groups(default="")
