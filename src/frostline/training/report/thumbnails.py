"""Reads a few samples from their own store and makes small pictures of them that a page can hold."""

import base64
import io
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
from PIL import Image

from frostline.core.samples import taken
from frostline.datasets import Dataset
from frostline.datasets.access import roots_of
from frostline.datasets.open import open_samples
from frostline.errors import FrostlineError, SampleError
from frostline.preprocess.decoder import decoded

__all__ = ("names_of", "thumbnails")

_SIDE = 112
_MAX_PIXELS = 25_000_000
_MAX_ENCODED_BYTES = 16 << 20
_MAX_BYTES = 12_000
_MAX_S = 5.0


def names_of(data: Dataset, ids: Sequence[int]) -> Mapping[int, str]:
    """The names of some samples of a data set, by their ids."""
    rows = _rows_of(data, ids)
    return dict(zip(data.samples.ids_at(rows).tolist(), taken(data.names, rows), strict=True))


def thumbnails(
    data: Dataset, ids: Sequence[int], *, max_s: float = _MAX_S, clock: Callable[[], float] = time.monotonic
) -> Mapping[int, str]:
    """Small pictures of samples as ``data:`` URIs, by their ids, in the given order.

    A sample that is no image, cannot be read or is very large has none, and neither has any where a node listed the
    data. The first failure of the store ends it, and so does the time: a report is not worth a wait.

    Args:
        data: data set of the samples.
        ids: ids of the samples.
        max_s: maximum seconds after which no other sample is read.
        clock: tells the seconds.
    """
    if data.source.near:
        return {}
    rows, ends, found = _rows_of(data, ids), clock() + max_s, dict[int, str]()
    samples = data.samples.take(rows)
    try:
        store = open_samples(data.url, data.manifest.reading, roots=roots_of(data))
        for place in _in_order(samples.ids, ids):
            length = int(samples.lengths[place])
            if clock() >= ends:
                break
            if length <= _MAX_ENCODED_BYTES:
                encoded = store.read(samples.objects[place], int(samples.offsets[place]), length)
                picture = _picture(bytes(encoded))
                found |= {int(samples.ids[place]): picture} if picture else {}
    except FrostlineError:
        pass  # the store is gone, or gives nothing to this process: the page names the samples all the same
    return found


def _rows_of(data: Dataset, ids: Sequence[int]) -> npt.NDArray[np.int64]:
    return np.flatnonzero(np.isin(data.samples.ids, np.array(ids, np.int64)))


def _in_order(own: npt.NDArray[np.int64], ids: Sequence[int]) -> list[int]:
    places = {id: place for place, id in enumerate(own.tolist())}
    return [places[id] for id in ids if id in places]


def _picture(encoded: bytes) -> str | None:
    try:
        image = decoded(encoded, "RGB", max_pixels=_MAX_PIXELS, enough=_within)
    except SampleError:
        return None
    image.thumbnail((_SIDE, _SIDE), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=72)
    made = buffer.getvalue()
    return f"data:image/jpeg;base64,{base64.b64encode(made).decode()}" if len(made) <= _MAX_BYTES else None


def _within(size: tuple[int, int]) -> tuple[int, int]:
    """The least size that a JPEG may be decoded at."""
    scale = min(1.0, _SIDE / max(size))
    return max(1, round(size[0] * scale)), max(1, round(size[1] * scale))
