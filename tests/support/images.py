"""Small folders of JPEGs in class folders, the same ones each time."""

from pathlib import Path

import numpy as np
from PIL import Image

from frostline.preprocess import CenterCrop, Decode, Normalize, Preprocess, RandomHorizontalFlip, Resize

CLASSES = ("circle", "noise", "stripe")


def image_folder(root: Path, *, per_class: int = 12, size: tuple[int, int] = (60, 48)) -> Path:
    """Three classes that a small network can tell apart."""
    random = np.random.default_rng(0)
    width, height = size
    rows, columns = np.mgrid[0:height, 0:width]
    for number in range(per_class):
        patterns = {
            "circle": (rows - height / 2) ** 2 + (columns - width / 2) ** 2 < (8 + number % 8) ** 2,
            "noise": random.random((height, width)) < 0.5,
            "stripe": (columns // (3 + number % 4)) % 2 == 0,
        }
        for name in CLASSES:
            pixels = patterns[name][..., None] * random.integers(120, 255, 3) + random.integers(
                0, 60, (height, width, 3)
            )
            (root / name).mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(root / name / f"{number:03}.jpg", quality=90)
    return root


def tiny_preprocess(*, flip: bool = False, side: int = 32) -> Preprocess:
    """To 3 x side x side, with a random flip if asked."""
    random = (RandomHorizontalFlip(0.5),) if flip else ()
    return Preprocess(
        steps=(Decode(), Resize(side + 4), CenterCrop(side), *random, Normalize(mean=(127.0,) * 3, std=(64.0,) * 3))
    )
