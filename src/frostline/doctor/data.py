"""Looks at a data set: can it be listed, has it classes, and can a few of its samples be read and decoded."""

import time
from collections.abc import Iterator

import numpy as np

from frostline.core import Skipped
from frostline.core.units import in_bytes, in_seconds
from frostline.datasets import Dataset
from frostline.datasets.access import reader_of
from frostline.doctor.findings import FINE, PROBLEM, WARNING, Finding
from frostline.errors import SampleError
from frostline.jobs.loader_factory import mixed_splits
from frostline.preprocess.readable import check_readable
from frostline.stores.base.protocols import Buffer

__all__ = ("examine_data",)

_LOOKED_AT = 16
_AT_ONCE = 8


def examine_data(data: Dataset) -> Iterator[Finding]:
    """What a job finds in a data set.

    Args:
        data: data set, listed.
    """
    nbytes = int(data.samples.lengths.astype(np.int64).sum())
    yield Finding(
        part="data",
        level=FINE,
        says=f"{len(data)} samples of {len(data.classes)} classes, {in_bytes(nbytes)}, at {data.url}",
    )
    yield from _classes(data)
    if (why := mixed_splits(data)) is not None:
        yield Finding(part="data", level=WARNING, says=why)
    if data.manifest.applied is None and not data.source.near:
        yield from _some_read(data)


def _classes(data: Dataset) -> Iterator[Finding]:
    if len(data.classes) == 1:
        yield Finding(
            part="data",
            level=WARNING,
            says=f"all samples are of one class, {data.classes[0]!r}",
            mend="give the folder that has one folder a class, or name what is learned (--targets COLUMN)",
        )
        return
    counts = data.selection.per_label
    rare = [data.classes[label] for label, count in counts.items() if count == 1 and label >= 0]
    if rare:
        yield Finding(
            part="data",
            level=WARNING,
            says=f"{len(rare)} classes have one sample each, {rare[0]!r} among them: none is left to score",
            mend="add samples, or leave them out (--where)",
        )


def _some_read(data: Dataset) -> Iterator[Finding]:
    """Read a few samples, evenly from the whole set, and decode them."""
    rows = np.unique(np.linspace(0, len(data) - 1, _LOOKED_AT).astype(np.int64))
    part = data.take(rows)
    broken, nbytes, started = [], 0, time.perf_counter()
    reader = reader_of(part, maximum=_AT_ONCE)
    names = list(part.names)
    for row, found in reader.read(part.samples.take(np.arange(len(part))), names):
        if (why := _why_broken(found)) is not None:
            broken.append(f"{names[row]}: {why}")
        elif not isinstance(found, Skipped):
            nbytes += len(found)
    seconds = time.perf_counter() - started
    if broken:
        level = PROBLEM if len(broken) > len(part) // 4 else WARNING
        yield Finding(
            part="samples",
            level=level,
            says=f"{len(broken)} of {len(part)} samples cannot be read, such as {broken[0]}",
            mend="find all of them (frostline index --check), mend them, or raise --skip-allowance",
        )
    else:
        yield Finding(
            part="samples",
            level=FINE,
            says=f"{len(part)} of them, {in_bytes(nbytes)}, were read and decoded in {in_seconds(seconds)}",
        )


def _why_broken(found: Buffer | Skipped) -> str | None:
    if isinstance(found, Skipped):
        return found.reason
    try:
        check_readable(found)
    except SampleError as error:
        return str(error)
    return None
