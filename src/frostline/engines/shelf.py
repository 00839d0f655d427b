"""Keeps converted networks in a folder, whole or not at all."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ("kept",)


@contextmanager
def kept(folder: Path | None, name: str, make: Callable[[Path], None]) -> Iterator[Path]:
    """A folder of converted files: that of the last time, or a new one that ``make`` fills.

    Args:
        folder: of one prefix and cut; made if it is missing. None keeps nothing beyond the context.
        name: what the files are, with the versions of what made them.
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


def _fill(place: Path, make: Callable[[Path], None]) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    new = Path(tempfile.mkdtemp(prefix=".new-", dir=place.parent))
    try:
        make(new)
        new.rename(place)
    except OSError:
        if not place.is_dir():  # else somebody was faster
            raise
    finally:
        shutil.rmtree(new, ignore_errors=True)
