"""What an engine is to be made from, as a value, and the folder that keeps converted networks whole or not at all."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from frostline.core import Cut, Graph, Levels
from frostline.core.errors import BadRequest, EngineUnsupported
from frostline.core.files import make_private, make_private_folder, try_lock
from frostline.engines.graph_runner import leaf_values
from frostline.engines.measure import dry_run
from frostline.engines.protocols import Arrays, Footprint, Pixels

__all__ = (
    "Converted",
    "EngineRecipe",
    "clear_unfinished",
    "converted_files",
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EngineRecipe:
    """What an engine is to be made from.

    Attributes:
        graph: the frozen part, from the network's input to the frost line.
        cuts: every place where a run may stop, in order, cut 1 (the input) first.
        tensors: weights by the names in ``graph.leaves``.
        cut: number of the one cut that the engine stops at.
        device: the device in torch's words.
        max_rows: the largest batch that will be run.
        threads: number of threads that the engine is to run on, where it takes them
            (``engines.catalog.Offer``).
        levels: meaning of the pixels, if the engine takes them as they are kept, ``uint8[n, H, W, C]``; None if it
            takes what the network takes.
        calibration: the real samples as the engine takes them, for engines that narrow to 8 bits.
        calibrated_on: name of these pixels, also where they are not given because converted files are there.
        folder: the place where converted files are kept; None keeps none.
        checked: the reference engine's memory up to the cut, from whoever has run the graph on shapes before; None has
            that done here, which takes a new process a second and a half.
    """

    graph: Graph
    cuts: Sequence[Cut]
    tensors: Mapping[str, torch.Tensor]
    cut: int
    device: str
    max_rows: int
    threads: int
    levels: Levels | None
    calibration: Pixels | None
    calibrated_on: str
    folder: Path | None
    checked: Footprint | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.cut <= len(self.cuts):
            raise BadRequest(f"cut must be from 1 to {len(self.cuts)} for this prefix, not {self.cut}")
        if self.max_rows < 1 or self.threads < 1:
            raise BadRequest("an engine needs memory for one row and one thread at least")
        if self.levels is not None and not self._is_of_images:
            raise EngineUnsupported("the network takes no images of as many channels as its preprocessing gives")

    @property
    def last(self) -> Cut:
        """The cut that the engine stops at."""
        return self.cuts[self.cut - 1]

    @property
    def taken(self) -> list[tuple[tuple[int, ...], str]]:
        """Shape and dtype of a row of each input that the engine takes."""
        if self.levels is None:
            return list(zip(self.cuts[0].shapes, self.cuts[0].dtypes, strict=True))
        ((channels, height, width),) = self.cuts[0].shapes
        return [((height, width, channels), "uint8")]

    def leaves(self) -> list[torch.Tensor]:
        """The graph's tensors, in the order of ``graph.leaves``."""
        return leaf_values(self.graph, self.tensors)

    def footprint(self) -> Footprint:
        """The reference engine's memory up to the cut, which refuses graphs that are not what they declare."""
        if self.checked is not None:
            return self.checked
        ends = {cut.number: cut for cut in (self.cuts[0], self.last)}
        return dry_run(self.graph, self.leaves(), list(ends.values()), max_rows=self.max_rows)[self.cut].to_here

    @property
    def weight_bytes(self) -> int:
        """Bytes of the graph's tensors as they came."""
        return sum({leaf.data_ptr(): leaf.nbytes for leaf in self.leaves()}.values())

    @property
    def is_transformer(self) -> bool:
        """Whether there is attention up to the cut, which wants other ways of narrowing than convolutions."""
        return any("attention" in node.op or ".softmax" in node.op for node in self.graph.nodes[: self.last.after + 1])

    def pixels(self) -> Pixels:
        """What to calibrate on.

        Raises:
            EngineUnsupported: No samples are there to calibrate on, or the network takes something else.
        """
        if self.calibration is None or len(self.calibration) == 0:
            raise EngineUnsupported("8 bits need real samples to be calibrated on, and there are none")
        if self.taken != [(self.calibration.shape[1:], str(self.calibration.dtype))]:
            raise EngineUnsupported("8 bits are calibrated on images, and this network takes something else")
        return self.calibration

    def file_name(self, versions: str) -> str:
        """What a folder of converted files is called."""
        return "-".join(filter(None, ("" if self.levels is None else self.levels.digest, versions)))

    def narrowed_name(self, versions: str) -> str:
        """What a folder of files of 8 bits is called."""
        return self.file_name("-".join(filter(None, ("int8", self.calibrated_on, versions))))

    def batch(self, inputs: Arrays, cut: int) -> list[npt.NDArray[np.generic]]:
        """What was given to ``Engine.run`` as arrays, checked.

        Raises:
            BadRequest: The inputs are not of the shapes and dtypes that the engine takes, or it is another cut.
        """
        if cut != self.cut:
            raise BadRequest(f"this engine was made for cut {self.cut} and cannot stop at cut {cut}")
        arrays = [inputs] if isinstance(inputs, np.ndarray) else list(inputs)
        given = [(array.shape[1:], str(array.dtype)) for array in arrays]
        if given != self.taken or len({len(array) for array in arrays}) != 1:
            raise BadRequest(f"the prefix takes inputs {self.taken} of one batch, not {given}")
        return arrays

    @property
    def _is_of_images(self) -> bool:
        assert self.levels is not None
        shapes, dtypes = self.cuts[0].shapes, self.cuts[0].dtypes
        return list(dtypes) == ["float32"] and len(shapes[0]) == 3 and shapes[0][0] == len(self.levels.mean)


_NEW = ".new-"


@contextmanager
def converted_files(folder: Path | None, name: str, make: Callable[[Path], None]) -> Iterator[Path]:
    """A folder of converted files: that of the last time, or a new one that ``make`` fills.

    Args:
        folder: folder of one prefix and cut; made if it is missing. None keeps nothing beyond the context.
        name: name of the files, with the versions of the libraries that made them.
        make: function that writes into the empty folder that it is given.
    """
    if folder is None:
        with tempfile.TemporaryDirectory() as alone:
            make(Path(alone))
            yield Path(alone)
        return
    place = folder / name
    if not place.is_dir():
        _fill(place, make)
    yield place


def clear_unfinished(folder: Path) -> None:
    """Remove what conversions left in a folder that were killed; what is being converted stays."""
    for new in folder.glob(f"{_NEW}*"):
        with suppress(OSError), _claimed(new):  # it is being filled, or somebody else clears it
            shutil.rmtree(new)


@contextmanager
def _claimed(folder: Path) -> Iterator[None]:
    """Hold a folder for this process, however it ends.

    Raises:
        OSError: Another process holds the folder, or the folder is missing.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        if not try_lock(handle):
            raise BlockingIOError
        yield
    finally:
        os.close(handle)


def _fill(place: Path, make: Callable[[Path], None]) -> None:
    make_private_folder(place.parent)
    new = Path(tempfile.mkdtemp(prefix=_NEW, dir=place.parent))
    try:
        with _claimed(new):
            make(new)
        make_private(new)  # libraries write for everybody
        new.rename(place)
    except OSError:
        if not place.is_dir():  # else somebody was faster
            raise
    finally:
        shutil.rmtree(new, ignore_errors=True)


class Converted:
    """The part of an engine that is the same whatever it was converted to.

    Args:
        name: name of the engine, as in ``engines.catalog.OFFERS``.
        order: order that the files were made from.

    Raises:
        UnsafeArtifact: The graph names what is not allowed, or does not give what its cuts declare.
    """

    def __init__(self, name: str, order: EngineRecipe) -> None:
        self.name = name
        self._order = order
        self._footprint = order.footprint()

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights in fp32; those in fewer bits take less."""
        return self._order.weight_bytes

    def footprint(self, cut: int) -> Footprint:
        """The reference engine's: what others take can only be measured, and fused kernels and 16 bits take less."""
        assert cut == self._order.cut
        return self._footprint
