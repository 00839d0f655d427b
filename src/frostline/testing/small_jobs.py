"""Jobs for the tests of adapters: small images in a folder, a node in the process, and what must come of them."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from frostline.core.config import LoaderSettings, NodeSettings
from frostline.datasets import Dataset
from frostline.jobs import Job, offload
from frostline.loaders import Mixture, Ranks
from frostline.loaders.row_source import Arrays
from frostline.ordering import BlockShuffle, Order
from frostline.preprocess import imagenet

__all__ = (
    "BATCH",
    "SAMPLES",
    "STEPS",
    "TARGETS",
    "flatten_ids",
    "ids_of",
    "job_of",
    "names",
    "options_of",
    "reference",
    "small_job",
    "split",
    "targets_job",
)

SAMPLES, BATCH = 23, 4
"""Of the jobs under test: the last batch has fewer rows than the others."""
STEPS = -(-SAMPLES // BATCH)
"""Batches of an epoch."""
_PIXELS = 16
TARGETS: dict[str, list[Any]] = {
    "score": [row / 4 for row in range(SAMPLES)],
    "vector": [[row, -row] for row in range(SAMPLES)],
    "boxes": [[[row, number] for number in range(row % 3)] for row in range(SAMPLES)],
}
"""Declared targets of each sample: a number, a vector, and lists of any length."""


def small_job(folder: Path, *, unreadable: int = 0, max_reorder: int | None = 0) -> Job:
    """A job without a model over ``SAMPLES`` small images of two classes.

    Args:
        folder: folder that is filled.
        unreadable: number of them that are no images.
        max_reorder: places that a sample may come early; None for any number.
    """
    draw = np.random.default_rng(0)
    for number in range(SAMPLES):
        path = folder / ("odd" if number % 2 else "even") / f"{number:02}.jpg"
        path.parent.mkdir(exist_ok=True, parents=True)
        if number < unreadable:
            path.write_bytes(b"no image")
        else:
            Image.fromarray(draw.integers(0, 255, (_PIXELS, _PIXELS, 3), np.uint8)).save(path)
    return job_of(folder, max_reorder)


def job_of(folder: Path, max_reorder: int | None = 0) -> Job:
    """A job without a model over a folder of images, with a node in this process."""
    return offload(
        None,
        Dataset(folder),
        preprocess=imagenet(_PIXELS),
        settings=LoaderSettings(samples_per_request=3, requests_in_flight=2, cache_bytes=0, max_reorder=max_reorder),
        node=NodeSettings(memory_bytes=1 << 28, device_batch=8),
    )


def targets_job(folder: Path) -> Job:
    """The same with declared targets, whose values are those of ``TARGETS`` by the samples' rows."""
    small_job(folder).close()
    data = Dataset(folder, targets=[*TARGETS]).with_columns(TARGETS)
    return offload(None, data, preprocess=imagenet(_PIXELS), settings=LoaderSettings(cache_bytes=0, max_reorder=0))


def reference(job: Job, *, seed: int = 0, epoch: int = 0) -> list[list[int]]:
    """The ids of each batch of a shuffled epoch, as the order alone says."""
    order = Order(size=SAMPLES, seed=seed, epoch=epoch).indices(0, SAMPLES)
    ids = job.data.samples.ids[order].tolist()
    return split(ids, BATCH)


def split(ids: list[int], batch_size: int) -> list[list[int]]:
    """Ids in batches."""
    return [ids[start : start + batch_size] for start in range(0, len(ids), batch_size)]


def options_of(job: Job, order: str) -> dict[str, Any]:
    """What a loader with such an order is asked for."""
    if order == "in blocks":
        return {"shuffle": BlockShuffle(samples=3, mixed=4), "seed": 2, "epoch": 1}
    if order == "drawn by weights":
        return {"weights": {"odd": 3, "even": 1}, "num_samples": 10, "seed": 2}
    if order == "a mixture":
        return {"data": Mixture(parts=job.data.split(0.5), ratios=(2, 1)), "shuffle": True}
    if order == "a padded share of ranks":
        return {"shuffle": True, "last": "pad", "ranks": Ranks(rank=1, world_size=3)}
    happened = job.arrays(BATCH, shuffle=True, epoch=2, record=True)
    list(happened)
    return {"shuffle": True, "epoch": 2, "replay": happened.recorded_order()}


def ids_of(batches: Iterable[Arrays]) -> list[list[int]]:
    """The ids of each batch."""
    return [batch.ids.tolist() for batch in batches]


def names(job: Job, ids: list[int]) -> list[str]:
    """The objects of these ids."""
    samples = job.data.samples
    return [samples.objects[int(row)] for row in np.flatnonzero(np.isin(samples.ids, ids))]


def flatten_ids(batches: list[list[int]]) -> list[int]:
    """The ids of all batches, one after the other."""
    return [id_ for batch in batches for id_ in batch]
