"""What a node answers: activations at a cut, or encoded samples, with the ids they belong to."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = (
    "EXACT",
    "FLOAT32",
    "REFERENCE",
    "FeatureBatch",
    "Levels",
    "PackedTensor",
    "Route",
    "Skipped",
    "array_dtype",
    "widened",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """A sample that could not be read or decoded, and why; ``changed`` says that it was another when it was listed."""

    id: int
    object: str
    reason: str
    changed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedTensor:
    """One tensor of a batch as it crosses the wire; ``wire.codecs`` makes these and reads them.

    Attributes:
        codec: its name; a lossless one where the batch's codec does not fit this tensor, such as a mask.
        shape: shape of one sample, unpacked.
        dtype: dtype of the tensor, unpacked.
        body: ``[n, *shape]`` in fewer bits; or, where ``bounds`` is given, the packed rows one after another as
            ``uint8[m]``.
        bounds: ``int64[n + 1]``, where each row of ``body`` starts and the last one ends; None where rows are plain.
        scale: ``float32[n, channels]``, which int8 values are multiplied by; else None.
    """

    codec: str
    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]
    body: npt.NDArray[np.generic]
    bounds: npt.NDArray[np.int64] | None = None
    scale: npt.NDArray[np.float32] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the payload."""
        return self.body.nbytes + (0 if self.scale is None else self.scale.nbytes)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FeatureBatch:
    """Some rows of an answer, in the order of the request, without the samples that were skipped.

    Attributes:
        ids: ``int64[n]``.
        tensors: one array ``[n, ...]`` for each tensor that crosses the cut; empty at cut 0, and while packed. Where
            encoded samples are handed out as rows, they are an array of ``bytes``.
        encoded: the encoded samples at cut 0 (buffers, not copied); empty at every other cut.
        skipped: the samples of this stretch of the request that could not be read.
        packed: the same tensors as they cross the wire, where a codec packed them; empty once they are unpacked.
        error: error of packing, as the sender measured it: root-mean-square error relative to the sample's own root
            mean square, of the worst sample and tensor; 0 where nothing is lost.
    """

    ids: npt.NDArray[np.int64]
    tensors: tuple[npt.NDArray[np.generic], ...] = ()
    encoded: Sequence[bytes | memoryview] = ()
    skipped: tuple[Skipped, ...] = ()
    packed: tuple[PackedTensor, ...] = ()
    error: float = 0.0

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def nbytes(self) -> int:
        """Bytes of the payload: activations, packed or not, and encoded samples; not ids."""
        tensors = sum(map(_nbytes, self.tensors)) + sum(tensor.nbytes for tensor in self.packed)
        return tensors + sum(map(len, self.encoded))


def _nbytes(tensor: npt.NDArray[np.generic]) -> int:
    """Of rows that are encoded samples, what these have: the array itself holds no more than pointers to them."""
    return sum(map(len, tensor.tolist())) if tensor.dtype == object else tensor.nbytes


EXACT = "exact"
"""The codec that leaves activations as they are, and the accuracy of the user's own network, bit for bit."""

FLOAT32 = "float32"
"""The accuracy of 32-bit floats: codecs lose nothing, and engines sum the same numbers in another order at most."""

LOSSY = ("fp16", "bf16", "int8")
"""Accuracies that allow fewer bits than those of 32-bit floats, and the codecs' and engines' precisions; finest first.
"""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Levels:
    """``(level - mean) / std`` in float32, by channels: the last step of a preprocessing, as whoever runs it sees it.

    Attributes:
        mean: a number for each channel.
        std: a number for each channel, above 0.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        assert len(self.mean) == len(self.std), "they were checked as a step"

    @property
    def digest(self) -> str:
        """16 hexadecimal digits of the SHA-256: levels that mean the same have the same."""
        content = json.dumps([[float(np.float32(value)) for value in some] for some in (self.mean, self.std)])
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def into(self, pixels: npt.NDArray[np.uint8], out: npt.NDArray[np.float32]) -> None:
        """Write what a network takes of one sample.

        Args:
            pixels: ``uint8[H, W, C]``.
            out: ``float32[C, H, W]``.
        """
        for channel, (mean, std) in enumerate(zip(self.mean, self.std, strict=True)):
            plane = out[channel]
            np.subtract(pixels[:, :, channel], np.float32(mean), out=plane, dtype=np.float32)
            np.divide(plane, np.float32(std), out=plane)

    def applied(self, pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        """What a network takes of some samples, ``float32[n, C, H, W]`` of ``uint8[n, H, W, C]``."""
        rows, height, width, channels = pixels.shape
        out = np.empty((rows, channels, height, width), np.float32)
        for row in range(rows):
            self.into(pixels[row], out[row])
        return out


_BFLOAT16 = "bfloat16"
_CARRIER = np.dtype(np.uint16)
"""Nothing else crosses a cut as ``uint16``, so that who meets it in an answer knows what it means."""


def array_dtype(name: str) -> np.dtype[Any]:
    """The dtype of the arrays that hold tensors of that dtype; the bits of ``bfloat16`` lie in ``uint16``.

    Args:
        name: torch's name of the tensor's dtype, such as ``float32``.
    """
    return _CARRIER if name == _BFLOAT16 else np.dtype(name)


def widened(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The same values for who has no bfloat16: as ``float32`` where the array holds its bits, else the array itself."""
    if array.dtype != _CARRIER:
        return array
    bits = array.astype(np.uint32)
    np.left_shift(bits, 16, out=bits)
    return bits.view(np.float32)
