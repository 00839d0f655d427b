"""Decides what an engine is called: one that is calibrated has another name for each set of samples. Pure."""

import hashlib

import numpy as np
import numpy.typing as npt

__all__ = ("MARK", "calibrating", "calibration_of", "identity", "judging", "offer_name")

MARK = "@"
"""Between the name of an offer and what it was calibrated on."""

_Pixels = npt.NDArray[np.float32]


def calibrating(pixels: _Pixels) -> _Pixels:
    """Those of a trial's samples that engines are calibrated on: two of three; the others judge them."""
    return np.delete(pixels, np.s_[1::3], axis=0)


def judging(pixels: _Pixels) -> _Pixels:
    """Those of a trial's samples on which errors are measured, of engines that are calibrated too."""
    return pixels[1::3]


def identity(name: str, precision: str, pixels: _Pixels) -> str:
    """The name of an engine that is tried on these samples.

    Ranges of 8 bits are those of the samples, so that another calibration gives other features: its digest is part of
    the name, and thereby of requests, trials, converted files and of what names a feature in every cache.

    Args:
        name: of the offer.
        precision: of the offer.
        pixels: all samples of the trial, as they go into the network.
    """
    if precision != "int8":
        return name
    some = np.ascontiguousarray(calibrating(pixels))
    digest = hashlib.sha256(repr((some.shape, some.dtype.str)).encode() + some.tobytes()).hexdigest()
    return f"{name}{MARK}{digest[:16]}"


def offer_name(engine: str) -> str:
    """The name of an engine's offer."""
    return engine.partition(MARK)[0]


def calibration_of(engine: str) -> str:
    """What an engine's name says of its calibration; empty where it has none."""
    return engine.partition(MARK)[2]
