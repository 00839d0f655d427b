"""Packs the tensors of a batch with a codec, and unpacks them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from frostline.core import EXACT, FeatureBatch, PackedTensor
from frostline.errors import FrostlineError
from frostline.wire.codecs.names import Codec
from frostline.wire.codecs.precision import body_dtype, narrow, scale_count, widen
from frostline.wire.codecs.rows import TensorRows, max_row_bytes, pack_rows, unpack_rows

__all__ = ("PackingMemory", "narrowed_dtype", "pack", "packing_memory", "scales", "unpack")

Array = npt.NDArray[Any]

# What is made of a block of values and of one row while they are packed.
_SCRATCH_BYTES = 2 << 20
_SCRATCH_ROWS = 5


def pack(batch: FeatureBatch, codec: str, tolerance: float | None = None) -> FeatureBatch:
    """Pack a batch for the wire.

    Where a lossy codec cannot hold the batch (a value is not finite or too large, or the error is above the
    tolerance), the lossless codec of the same steps takes its place; what the batch holds says which it was.

    Args:
        batch: with its tensors; encoded samples are left as they are.
        codec: its name.
        tolerance: the largest relative error allowed; None takes any.

    Returns:
        The batch with ``packed`` and ``error``; the same batch where there is nothing to pack.

    Raises:
        SettingError: No codec has that name.
    """
    wanted = Codec.parse(codec)
    own = [wanted.of(tensor.dtype) for tensor in batch.tensors]
    if all(codec.name == EXACT for codec in own):
        return batch
    found = _all_packed(batch.tensors, own, tolerance)
    if found is None:
        return pack(batch, wanted.lossless.name)
    packed = tuple(tensor for tensor, _ in found)
    return FeatureBatch(ids=batch.ids, skipped=batch.skipped, packed=packed, error=max(error for _, error in found))


def unpack(batch: FeatureBatch) -> FeatureBatch:
    """The batch with its tensors; ``error`` stays. One that is not packed is given back as it is.

    The arrays are new ones, but for tensors that no codec changed: those view what was received.

    Raises:
        FrostlineError: What was sent is not what it says.
    """
    if not batch.packed:
        return batch
    try:
        tensors = tuple(_unpacked(tensor) for tensor in batch.packed)
    except (pa.ArrowException, OSError, ValueError) as error:
        why = str(error).partition("\n")[0][:200]
        raise FrostlineError(f"the node's answer holds features that cannot be unpacked: {why}") from error
    return FeatureBatch(ids=batch.ids, tensors=tensors, skipped=batch.skipped, error=batch.error)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingMemory:
    """The most memory that packing takes beside the tensors: ``fixed_bytes + rows * bytes_per_sample``.

    What is packed takes no more than ``rows * bytes_per_sample`` in the end.
    """

    fixed_bytes: int = 0
    bytes_per_sample: int = 0


def packing_memory(shapes: Sequence[tuple[int, ...]], dtypes: Sequence[np.dtype[Any]], codec: str) -> PackingMemory:
    """What packing a batch may take, whatever its values are.

    Args:
        shapes: shapes of one sample, for each tensor.
        dtypes: dtypes of each tensor.
        codec: its name.

    Raises:
        SettingError: No codec has that name.
    """
    wanted = Codec.parse(codec)
    if wanted.name == EXACT:
        return PackingMemory()
    tensors = list(zip(shapes, dtypes, strict=True))
    largest = max((math.prod(shape) * dtype.itemsize for shape, dtype in tensors), default=0)
    return PackingMemory(
        fixed_bytes=_SCRATCH_BYTES + _SCRATCH_ROWS * largest,
        bytes_per_sample=sum(_max_bytes(shape, dtype, wanted) for shape, dtype in tensors),
    )


def narrowed_dtype(codec: Codec, dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Of the values that a tensor of that dtype has once they are narrowed; bfloat16 is kept in uint16."""
    return dtype if codec.is_lossless else body_dtype(codec.precision)


def scales(shape: tuple[int, ...], codec: Codec) -> int:
    """Scales that a sample of that shape has beside its values; 0 where the codec has none."""
    return scale_count(shape) if codec.precision == "int8" else 0


def _max_bytes(shape: tuple[int, ...], dtype: np.dtype[Any], codec: Codec) -> int:
    """Of one tensor, a sample: by the lossless codec that may take its place, or narrowed and then by row."""
    lossless = max_row_bytes(shape, dtype, codec) if codec.by_row else 0
    own = codec.of(dtype)
    if own.is_lossless:
        return lossless
    narrowed, beside = narrowed_dtype(own, dtype), scales(shape, own)
    plain = max_row_bytes(shape, narrowed, Codec(), scales=beside)
    return max(lossless, plain + (max_row_bytes(shape, narrowed, own, scales=beside) if own.by_row else 0))


def _all_packed(
    tensors: Sequence[Array], codecs: Sequence[Codec], tolerance: float | None
) -> list[tuple[PackedTensor, float]] | None:
    """Every tensor and what it lost; None where one cannot be held, or loses too much."""
    made = []
    for tensor, codec in zip(tensors, codecs, strict=True):
        found = _packed(tensor, codec)
        if found is None or (tolerance is not None and found[1] > tolerance):
            return None
        made.append(found)
    return made


def _packed(tensor: Array, codec: Codec) -> tuple[PackedTensor, float] | None:
    """One tensor and what it lost; None where the codec cannot hold it."""
    rows, error = TensorRows(values=tensor), 0.0
    if not codec.is_lossless:
        narrowed = narrow(tensor, codec.precision)
        if narrowed is None:
            return None
        rows, error = TensorRows(values=narrowed.body, scale=narrowed.scale), narrowed.error
    plain = PackedTensor(
        codec=codec.name, shape=tensor.shape[1:], dtype=tensor.dtype, body=rows.values, scale=rows.scale
    )
    if not codec.by_row:
        return plain, error
    body, bounds = pack_rows(rows, codec)
    return replace(plain, body=body, bounds=bounds, scale=None), error


def _unpacked(packed: PackedTensor) -> Array:
    codec = Codec.parse(packed.codec)
    rows = TensorRows(values=packed.body, scale=packed.scale)
    if packed.bounds is not None:
        rows = unpack_rows(
            packed.body.view(np.uint8),
            packed.bounds,
            codec,
            shape=packed.shape,
            dtype=narrowed_dtype(codec, packed.dtype),
            scales=scales(packed.shape, codec),
        )
    if codec.is_lossless:
        return rows.values
    return widen(rows.values, codec.precision, dtype=packed.dtype, scale=rows.scale)
