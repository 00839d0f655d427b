"""Makes the demo's set of images: seeded views of the photographs that scikit-image and scikit-learn ship.

The task is to tell of which photograph a view is, and held-out views show parts of it that no learned view shows: a
quarter of each photograph is held out whole. So nothing that was learned by heart is scored.
"""

import json
import math
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from PIL import Image

from frostline.core.declared import parse_json
from frostline.core.errors import OutOfSpace, SettingError
from frostline.core.files import is_full

__all__ = ("PER_CLASS", "Photographs", "make")

PER_CLASS = 80

_WIDTH, _HEIGHT, _QUALITY = 512, 384, 95
_FORMAT = 3
_MARK = ".frostline/photographs.json"  # where no listing looks for samples
_AT_ONCE = 64
_QUARTERS = 4
_TRAIN, _HELD_OUT = "train", "val"

# One class a photograph. All of them lie inside the wheels: nothing is fetched.
_SOURCES = {
    "astronaut": ("skimage", "data/astronaut.png"),
    "brick": ("skimage", "data/brick.png"),
    "camera": ("skimage", "data/camera.png"),
    "cat": ("skimage", "data/chelsea.png"),
    "coffee": ("skimage", "data/coffee.png"),
    "coins": ("skimage", "data/coins.png"),
    "eye": ("skimage", "data/retina.jpg"),
    "flower": ("sklearn", "datasets/images/flower.jpg"),
    "galaxies": ("skimage", "data/hubble_deep_field.jpg"),
    "grass": ("skimage", "data/grass.png"),
    "gravel": ("skimage", "data/gravel.png"),
    "moon": ("skimage", "data/moon.png"),
    "motorcycle": ("skimage", "data/motorcycle_left.png"),
    "rocket": ("skimage", "data/rocket.jpg"),
    "temple": ("sklearn", "datasets/images/china.jpg"),
    "tissue": ("skimage", "data/ihc.png"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Photographs:
    """The demo's set.

    Attributes:
        directory: the directory with the folders ``train`` and ``val``, and one folder a class in each.
        classes: names of the folders.
        images: the number of images.
        total_bytes: bytes of all images.
        made: True if they were made now; False where a finished set was found.
    """

    directory: Path
    classes: tuple[str, ...]
    images: int
    total_bytes: int
    made: bool

    @property
    def mean_bytes(self) -> float:
        """Bytes of one image."""
        return self.total_bytes / self.images


def make(
    directory: Path,
    *,
    per_class: int = PER_CLASS,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Photographs:
    """Make the set, or find it where it was made before with the same arguments.

    Each image is a view of one photograph: a part of one quarter of it, scaled and rotated a little, as a JPEG of
    512 x 384 at quality 95. Every fourth view, in ``val``, is one of a quarter that no view in ``train`` shows. The set
    is made in a folder beside the directory and moved into place when it is whole, so an interrupted run leaves nothing
    half-made.

    Args:
        directory: the directory to make, its parents too; an empty one may stand there.
        per_class: images of each of the sixteen classes, at least four.
        seed: seed of the views.
        progress: function that is called with the images made and the images in all, from this thread.

    Raises:
        SettingError: the directory holds something else, or scikit-image or scikit-learn is not installed.
        OutOfSpace: the disk is full.
    """
    if per_class < _QUARTERS:
        raise SettingError(f"per_class must be at least {_QUARTERS}, not {per_class}")
    asked = {"per_class": per_class, "seed": seed, "classes": sorted(_SOURCES), "schema": _FORMAT}
    if directory.exists() and any(directory.iterdir()):
        return _existing(directory, asked)
    sources = {name: _source(*where) for name, where in _SOURCES.items()}
    with _in_place_when_whole(directory) as unfinished:
        total_bytes = _fill(unfinished, sources, per_class, seed, progress)
        (unfinished / _MARK).parent.mkdir()
        (unfinished / _MARK).write_text(json.dumps({**asked, "total_bytes": total_bytes}), encoding="utf-8")
    return _photographs(directory, per_class, total_bytes, made=True)


def _existing(directory: Path, asked: dict[str, object]) -> Photographs:
    mark = directory / _MARK
    try:
        known = parse_json(mark.read_bytes()) if mark.is_file() else {}
    except (OSError, ValueError, RecursionError):
        known = None
    total_bytes = known.pop("total_bytes", None) if isinstance(known, dict) else None
    if known != asked or not isinstance(total_bytes, int):
        raise SettingError(f"{directory} holds something else than this set: remove it or name another directory")
    return _photographs(directory, known["per_class"], total_bytes, made=False)


def _photographs(directory: Path, per_class: int, total_bytes: int, *, made: bool) -> Photographs:
    classes = tuple(sorted(_SOURCES))
    images = per_class * len(classes)
    return Photographs(directory=directory, classes=classes, images=images, total_bytes=total_bytes, made=made)


def _source(package: str, name: str) -> Path:
    # Found without importing the package, which takes seconds.
    spec = find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / name
        if path.is_file():
            return path
    raise SettingError(f"the photograph {name} of {package} is not there: install frostline[demo]")


@contextmanager
def _in_place_when_whole(directory: Path) -> Iterator[Path]:
    unfinished = directory.with_name(f".{directory.name}-{secrets.token_hex(4)}.partial")
    try:
        unfinished.mkdir(parents=True)
        yield unfinished
        unfinished.rename(directory)
    except OSError as error:
        if is_full(error):
            raise OutOfSpace(f"the disk is full: {directory} was not made") from error
        raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _fill(
    folder: Path,
    sources: dict[str, Path],
    per_class: int,
    seed: int,
    progress: Callable[[int, int], None] | None,
) -> int:
    total, done, total_bytes = per_class * len(sources), 0, 0
    # Pillow works without the interpreter's lock, so threads keep all cores busy.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for number, name in enumerate(sorted(sources)):
            for split in (_TRAIN, _HELD_OUT):
                (folder / split / name).mkdir(parents=True)
            save = partial(_save, _quarters(_opened(sources[name]), number), folder, name, (seed, number))
            for start in range(0, per_class, _AT_ONCE):
                views = range(start, min(start + _AT_ONCE, per_class))
                total_bytes += sum(pool.map(save, views))
                done += len(views)
                if progress is not None:
                    progress(done, total)
    return total_bytes


def _opened(source: Path) -> Image.Image:
    with Image.open(source) as opened:
        return opened.convert("RGB")


def _quarters(photograph: Image.Image, number: int) -> list[Image.Image]:
    """The four quarters of a photograph, the one that is held out first; which one that is goes by the number."""
    x, y = photograph.width // 2, photograph.height // 2
    boxes = [(0, 0, x, y), (x, 0, 2 * x, y), (0, y, x, 2 * y), (x, y, 2 * x, 2 * y)]
    return [photograph.crop(boxes[(number + place) % _QUARTERS]) for place in range(_QUARTERS)]


def _save(quarters: list[Image.Image], folder: Path, name: str, key: tuple[int, int], view: int) -> int:
    quarter = view % _QUARTERS
    path = folder / (_TRAIN if quarter else _HELD_OUT) / name / f"{name}-{view:04}.jpg"
    _view(quarters[quarter], np.random.default_rng((*key, view))).save(path, "JPEG", quality=_QUALITY)
    return path.stat().st_size


def _view(photograph: Image.Image, random: np.random.Generator) -> Image.Image:
    angle = math.radians(random.uniform(-10, 10))
    cos, sin = math.cos(angle), math.sin(angle)
    # The upright box around the rotated view, in pixels of the view.
    box = (_WIDTH * cos + _HEIGHT * abs(sin), _WIDTH * abs(sin) + _HEIGHT * cos)
    widest = min(photograph.width / box[0], photograph.height / box[1])
    scale = widest * random.uniform(0.12, 0.25)
    x, y = (
        random.uniform(half, side - half)
        for side, half in zip(photograph.size, (scale * box[0] / 2, scale * box[1] / 2), strict=True)
    )
    a, b, d, e = scale * cos, -scale * sin, scale * sin, scale * cos
    corner = (x - (a * _WIDTH + b * _HEIGHT) / 2, y - (d * _WIDTH + e * _HEIGHT) / 2)
    # A view shows some fifty pixels of the photograph a side. To rotate it at twice as many and to enlarge that takes a
    # third of the time of rotating at full size, for which the demo would have its user wait.
    width, height = (max(1, min(side, round(2 * scale * side))) for side in (_WIDTH, _HEIGHT))
    x, y = _WIDTH / width, _HEIGHT / height
    matrix = (a * x, b * y, corner[0], d * x, e * y, corner[1])
    rotated = photograph.transform((width, height), Image.Transform.AFFINE, matrix, Image.Resampling.BICUBIC)
    return rotated.resize((_WIDTH, _HEIGHT), Image.Resampling.BICUBIC)
