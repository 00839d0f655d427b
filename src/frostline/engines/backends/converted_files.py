"""Keeps converted networks in a folder, whole or not at all."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from frostline.engines.backends.recipe import EngineRecipe
from frostline.engines.base.protocols import Footprint
from frostline.file_cache import try_lock
from frostline.private import make_private_folder

__all__ = ("Converted", "clear_unfinished", "kept")

_NEW = ".new-"


@contextmanager
def kept(folder: Path | None, name: str, make: Callable[[Path], None]) -> Iterator[Path]:
    """A folder of converted files: that of the last time, or a new one that ``make`` fills.

    Args:
        folder: folder of one prefix and cut; made if it is missing. None keeps nothing beyond the context.
        name: name of the files, with the versions of the libraries that made them.
        make: writes into the empty folder that it is given.
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
        OSError: Another one holds it, or it is not there.
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
        for path in new.rglob("*"):  # libraries write them for everybody
            path.chmod(0o700 if path.is_dir() else 0o600)
        new.rename(place)
    except OSError:
        if not place.is_dir():  # else somebody was faster
            raise
    finally:
        shutil.rmtree(new, ignore_errors=True)


class Converted:
    """The part of an engine that is the same whatever it was converted to.

    Args:
        name: as in ``engines.backends.catalog.OFFERS``.
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
