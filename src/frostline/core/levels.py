"""What the levels of 8-bit pixels mean to a network: one subtraction and one division for each channel."""

import hashlib
import json
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ("Levels",)


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
        content = json.dumps([[float(np.float32(one)) for one in some] for some in (self.mean, self.std)])
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
