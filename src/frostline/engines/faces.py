"""What runs a prefix: one protocol for every engine."""

from typing import Protocol

import numpy as np
import numpy.typing as npt

from frostline.engines.footprint import Footprint
from frostline.engines.runner import Arrays

__all__ = ("Engine",)


class Engine(Protocol):
    """A prefix ready to run. Threads may share it; it need not run on more than one at a time."""

    @property
    def name(self) -> str:
        """As in ``engines.catalog.OFFERS``."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights that it holds, at most."""

    def footprint(self, cut: int) -> Footprint:
        """Memory of one run up to this cut, weights not counted."""

    def run(self, inputs: Arrays, cut: int) -> tuple[npt.NDArray[np.generic], ...]:
        """Compute what crosses a cut, with the shapes and dtypes that the cut declares.

        Args:
            inputs: an array ``[n, ...]`` for each input of the network, as cut 1 declares them, or the one; or where
                the engine's name says what they mean (``engines.identity``), pixels ``uint8[n, H, W, C]``. Not
                changed.
            cut: one that the engine was made for.

        Returns:
            One C-contiguous array ``[n, ...]`` for each tensor that crosses.
        """
