"""Makes folders and files of caches that nobody but their user may read: they hold what the data held."""

import os
from io import BufferedWriter
from pathlib import Path
from typing import Literal

__all__ = ("make_private_file", "make_private_folder", "open_private")

_FILE = 0o600
_FOLDER = 0o700


def make_private_folder(path: Path) -> None:
    """Make a folder, and those above it, where they are missing. One that is there keeps its rights.

    Raises:
        OSError: The folder cannot be made.
    """
    missing = [path]
    while not missing[-1].parent.exists():
        missing.append(missing[-1].parent)
    for folder in reversed(missing):
        folder.mkdir(mode=_FOLDER, exist_ok=True)


def open_private(path: Path, mode: Literal["xb", "ab"]) -> BufferedWriter:
    """Open a file in bytes, as ``open`` does; where it is made, for its user alone.

    Args:
        path: Where it is.
        mode: ``xb`` for a new one, ``ab`` to write behind what it holds.

    Raises:
        OSError: The file cannot be opened.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (os.O_EXCL if mode == "xb" else os.O_APPEND)
    return os.fdopen(os.open(path, flags, _FILE), mode)


def make_private_file(path: Path) -> None:
    """Make an empty file for its user alone, where there is none.

    Raises:
        OSError: The file cannot be made.
    """
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _FILE))
