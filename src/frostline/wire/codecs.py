"""Codecs: their names, which of them a cut may use, and floats narrowed to 16 or 8 bits and widened again."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from frostline.core import EXACT, FLOAT32, LOSSY
from frostline.core.errors import SettingError
from frostline.core.hints import suggest_names
from frostline.core.nouns import array_dtype

__all__ = (
    "CODECS",
    "Codec",
    "Narrow",
    "body_dtype",
    "narrow",
    "offered_codecs",
    "offered_precisions",
    "relative_error",
    "scale_count",
    "widen",
)


Array = npt.NDArray[Any]
Scale = npt.NDArray[np.float32]

# Values worked on at once: they and what is made of them stay in the processor's second cache (2 MB here). With
# 2,048 at once the calls take as long as the work: 5.2 ns a value instead of 1.6 from float32 to float16.
_BLOCK = 1 << 16
_LEVELS = 127
_MIN_SCALE = np.float32(2.0**-126)
# From here on a value rounds to infinity: halfway from the largest of the format to the next power of two.
_HALF_LIMIT = np.float32(65520)
_BFLOAT_LIMIT = np.uint32(0x7F7F8000).view(np.float32)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Narrow:
    """Values in fewer bits.

    Attributes:
        body: ``[n, ...]`` as float16, bfloat16 (in uint16) or int8.
        scale: ``float32[n, channels]`` of int8 values; else None.
        error: the error as ``relative_error``, of the worst sample.
    """

    body: Array
    scale: Scale | None
    error: float


def narrow(values: Array, precision: str) -> Narrow | None:
    """Round values to a precision, and measure what that loses.

    ``fp16`` and ``bf16`` round to nearest, ties to even: a value is off by at most 2^-11 (2^-8) of itself, and below
    the format's normal range, from 2^-14 (2^-126) down, by at most 2^-25 (2^-134).

    ``int8`` is symmetric: the largest magnitude of a channel becomes 127, so that no value is off by more than half
    a step, 1/254 of that magnitude, and the rounding of float32 (2^-22 of the magnitude; where a channel has nothing
    above 2^-119, at most 2^-127). A channel is axis 0 of ``[C, H, W]`` and the last axis of ``[T, D]``; a sample
    ``[D]``, or one with a single value a channel, has one scale.

    Speed on one core of a Xeon with AVX-512 (family 6, model 167), best of 15 runs over 2 M values, ns a value from
    float32 to float16: this 1.6 on any values; NumPy's ``astype`` 1.8 on dense values, 5.5 behind a ReLU, and 60 on
    values below float16's normal range; pyarrow's ``cast`` 1.3, 6.0 and 1.7. It has no branches.

    Args:
        values: ``[n, ...]``; float64 is rounded to float32 first.
        precision: ``fp16``, ``bf16`` or ``int8``.

    Returns:
        None where a value is not finite or too large for the precision.
    """
    with np.errstate(all="ignore"):
        return _narrow(values, precision) if _holds(values, precision) else None


def widen(
    body: Array,
    precision: str,
    *,
    dtype: np.dtype[np.generic],
    scale: Scale | None = None,
) -> Array:
    """The values that ``narrow`` rounded to.

    On the processor named there float16 takes 1.2 ns a value by table, whatever the values; NumPy's ``astype`` takes
    0.9 on dense ones, 4.2 behind a ReLU and 10 below the normal range.

    Args:
        body: body of ``Narrow``.
        precision: the precision as it was narrowed.
        dtype: dtype of the values.
        scale: scale of ``Narrow``.
    """
    values = np.empty(body.shape, np.float32)
    with np.errstate(all="ignore"):
        for rows in _chunks(body):
            _STEPS[precision].widen(body[rows], values[rows], None if scale is None else scale[rows])
        return values.astype(dtype, copy=False)


def body_dtype(precision: str) -> np.dtype[Any]:
    """The dtype of the body of ``Narrow``; bfloat16 is kept in uint16."""
    return np.dtype(_STEPS[precision].dtype)


def scale_count(shape: tuple[int, ...]) -> int:
    """How many int8 scales a sample of that shape has."""
    channels, others, _ = _channels(shape)
    return channels if others > 1 else 1


def relative_error(values: Array, others: Array) -> float:
    """Root-mean-square error relative to the sample's own root mean square, of the worst sample.

    Args:
        values: ``[n, ...]``, as they were.
        others: ``[n, ...]``, as they became.

    Returns:
        0 where they are equal; infinite where a sample of zeros became something else, or a value is not finite.
    """
    kind = np.result_type(values, others, np.float32)
    flat = len(values), math.prod(values.shape[1:])
    ours, theirs = values.reshape(flat), others.reshape(flat)
    lost, power = np.zeros(len(ours)), np.zeros(len(ours))
    with np.errstate(all="ignore"):
        for place in _places(ours.shape):
            mine = ours[place].astype(kind, copy=False)
            lost[place[0]] += _squares(mine - theirs[place])
            power[place[0]] += _squares(mine)
        # Where squares leave the range of float32 there is a second look, in a scale of the sample's own.
        is_plain = (power > 1e-20) & (power < 1e30) & (lost < 1e30)
        worst = float(np.sqrt(lost[is_plain] / power[is_plain]).max(initial=0.0))
        return max([worst, *(_scaled_error(ours[row], theirs[row]) for row in np.flatnonzero(~is_plain).tolist())])


def _narrow(values: Array, precision: str) -> Narrow | None:
    steps = _STEPS[precision]
    body = np.empty(values.shape, steps.dtype)
    scale = np.empty((len(values), scale_count(values.shape[1:])), np.float32) if precision == "int8" else None
    error = 0.0
    for rows in _chunks(values):
        floats = np.ascontiguousarray(values[rows], np.float32)
        some = None if scale is None else scale[rows]
        steps.narrow(floats, body[rows], some)
        back = np.empty(floats.shape, np.float32)
        steps.widen(body[rows], back, some)
        error = max(error, relative_error(values[rows], back))
    return Narrow(body=body, scale=scale, error=error) if math.isfinite(error) else None


def _squares(rows: Array) -> npt.NDArray[np.float64]:
    sums: npt.NDArray[np.float64] = np.einsum("ij,ij->i", rows, rows)
    return sums


def _places(shape: tuple[int, ...]) -> Iterator[tuple[slice, slice]]:
    """Blocks of a table: some rows, or a part of one."""
    step = max(1, _BLOCK // max(1, shape[1]))
    for row in range(0, shape[0], step):
        for column in range(0, shape[1], _BLOCK):
            yield slice(row, row + step), slice(column, column + _BLOCK)


def _scaled_error(ours: Array, theirs: Array) -> float:
    top = float(np.abs(np.stack([ours, theirs])).max(initial=0.0))  # NaN where there is one
    if not math.isfinite(top):
        return math.inf
    if top == 0:
        return 0.0
    mine, its = ours / np.float64(top), theirs / np.float64(top)
    lost, power = float(np.square(mine - its).sum()), float(np.square(mine).sum())
    return math.sqrt(lost / power) if power else math.inf


def _holds(values: Array, precision: str) -> bool:
    """Every value has a place in the format; NaN has none."""
    limit = _STEPS[precision].limit
    return bool(-limit < values.min(initial=0.0) and values.max(initial=0.0) < limit)


def _chunks(values: Array) -> Iterator[slice]:
    """Whole samples, together about a block."""
    step = max(1, _BLOCK // max(1, math.prod(values.shape[1:])))
    for start in range(0, len(values), step):
        yield slice(start, start + step)


def _blocks(*arrays: Array) -> Iterator[list[Array]]:
    """Blocks of the same values of several contiguous arrays."""
    flat = [array.reshape(-1) for array in arrays]
    for start in range(0, flat[0].size, _BLOCK):
        yield [array[start : start + _BLOCK] for array in flat]


def _to_half(floats: Array, out: Array, _: object) -> None:
    """Round to float16 with the float32 adder.

    A power of two that is 13 bits up from a value's own pushes the 13 bits that float16 lacks out of the sum, which
    rounds to nearest even as every sum does; what is left above that power are the bits of float16. Below float16's
    normal range, from exponent -14 down, the power is that of -14. (Idea: M. Dukhan, FP16, ``fp16.h``.)
    """
    for values, halves in _blocks(floats, out.view(np.uint16)):
        bits = values.view(np.uint32)
        exponents = np.bitwise_and(bits, np.uint32(0x7F800000))
        np.maximum(exponents, np.uint32((127 - 14) << 23), out=exponents)
        powers = exponents + np.uint32(13 << 23)
        sums = np.abs(values)
        np.add(sums, powers.view(np.float32), out=sums)
        found = sums.view(np.uint32)
        np.subtract(found, powers, out=found)
        np.right_shift(exponents, 13, out=exponents)
        np.add(found, exponents, out=found)
        np.subtract(found, np.uint32((127 - 14) << 10), out=found)
        np.right_shift(bits, 31, out=powers)
        np.left_shift(powers, 15, out=powers)
        np.bitwise_or(found, powers, out=found)
        np.copyto(halves, found, casting="unsafe")


_HALVES = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)


def _from_half(body: Array, out: Array, _: object) -> None:
    for halves, values in _blocks(body.view(np.uint16), out):
        np.take(_HALVES, halves, out=values, mode="clip")


def _to_bfloat(floats: Array, out: Array, _: object) -> None:
    """The upper half of float32, rounded to nearest even: a carry runs into the exponent as it should."""
    for values, words in _blocks(floats, out):
        bits = values.view(np.uint32)
        carries = np.right_shift(bits, 16)
        np.bitwise_and(carries, np.uint32(1), out=carries)
        np.add(carries, np.uint32(0x7FFF), out=carries)
        np.add(carries, bits, out=carries)
        np.right_shift(carries, 16, out=carries)
        np.copyto(words, carries, casting="unsafe")


def _from_bfloat(body: Array, out: Array, _: object) -> None:
    for words, values in _blocks(body, out):
        bits = values.view(np.uint32)
        np.copyto(bits, words)
        np.left_shift(bits, 16, out=bits)


def _to_levels(floats: Array, out: Array, scale: Scale | None) -> None:
    assert scale is not None
    values, axis = _by_channel(floats)
    tops = np.maximum(values.max(axis, initial=0.0), -values.min(axis, initial=0.0))
    np.maximum(tops / np.float32(_LEVELS), _MIN_SCALE, out=scale)
    levels = values * np.expand_dims(1 / scale, axis)
    np.rint(levels, out=levels)
    np.copyto(out.reshape(values.shape), levels, casting="unsafe")


def _from_levels(body: Array, out: Array, scale: Scale | None) -> None:
    assert scale is not None
    levels, axis = _by_channel(body)
    np.multiply(levels, np.expand_dims(scale, axis), out=out.reshape(levels.shape))


def _by_channel(values: Array) -> tuple[Array, int]:
    """Values as ``[n, a, b]``, and the axis along which they share a scale."""
    channels, others, is_last = _channels(values.shape[1:])
    if others <= 1:
        return values.reshape(len(values), 1, channels * others), 2
    if is_last:
        return values.reshape(len(values), others, channels), 1
    return values.reshape(len(values), channels, others), 2


def _channels(shape: tuple[int, ...]) -> tuple[int, int, bool]:
    """Channels of a sample, values in each, and whether channels are the last axis."""
    if len(shape) < 2:
        return 1, math.prod(shape), False
    if len(shape) == 2:
        return shape[1], shape[0], True
    return shape[0], math.prod(shape[1:]), False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Steps:
    """A precision.

    Attributes:
        dtype: dtype of its bodies.
        limit: magnitude from which on it holds no value.
        narrow: function that writes floats to a body, and their scales where it has some.
        widen: the inverse.
    """

    dtype: type[np.generic]
    limit: np.float32
    narrow: Callable[[Array, Array, Scale | None], None]
    widen: Callable[[Array, Array, Scale | None], None]


_STEPS = {
    "fp16": _Steps(dtype=np.float16, limit=_HALF_LIMIT, narrow=_to_half, widen=_from_half),
    "bf16": _Steps(dtype=np.uint16, limit=_BFLOAT_LIMIT, narrow=_to_bfloat, widen=_from_bfloat),
    "int8": _Steps(dtype=np.int8, limit=_BFLOAT_LIMIT, narrow=_to_levels, widen=_from_levels),
}


# The finest first.
_PRECISIONS = (EXACT, *LOSSY)
# What a named accuracy allows at most.
_MEANT = {
    **dict.fromkeys(("fp32", "float", "single"), FLOAT32),
    **dict.fromkeys(("float16", "half"), "fp16"),
    "bfloat16": "bf16",
    **dict.fromkeys(("8bit", "qint8", "uint8"), "int8"),
    **dict.fromkeys(("lossless", "none"), EXACT),
}  # names that other libraries have
_COARSEST = {EXACT: EXACT, FLOAT32: EXACT, **{name: name for name in LOSSY}}
_COMPRESSIONS = ("", "lz4", "zstd")


@dataclass(frozen=True, slots=True, kw_only=True)
class Codec:
    """How activations are packed: first narrowed, then without zeros, then compressed.

    Attributes:
        precision: ``exact`` leaves values as they are; ``fp16``, ``bf16`` and ``int8`` narrow floats.
        sparse: values whose bits are not all zero, and a bitmap that tells where they are.
        compression: compression of each row: ``lz4``, ``zstd`` or nothing.
    """

    precision: str = EXACT
    sparse: bool = False
    compression: str = ""

    @classmethod
    def parse(cls, name: str) -> "Codec":
        """The codec of that name.

        Raises:
            SettingError: No codec has that name; the message has the nearest ones.
        """
        try:
            return _BY_NAME[name]
        except KeyError:
            raise SettingError(f"there is no codec {name[:50]!r}{suggest_names(name[:50], CODECS)}") from None

    @property
    def name(self) -> str:
        """``precision[+sparse][+compression]``; ``exact`` is only written where it stands alone."""
        steps = [self.precision, "sparse" if self.sparse else "", self.compression]
        return "+".join(step for step in steps if step and step != EXACT) or EXACT

    @property
    def is_lossless(self) -> bool:
        """Unpacking gives the same bits."""
        return self.precision == EXACT

    @property
    def by_row(self) -> bool:
        """Each row is packed by itself, to a length of its own."""
        return self.sparse or bool(self.compression)

    @property
    def lossless(self) -> "Codec":
        """The codec that takes its place where values cannot be narrowed."""
        return replace(self, precision=EXACT)

    def of(self, dtype: np.dtype[np.generic]) -> "Codec":
        """What it does to a tensor: only floats that become shorter are narrowed."""
        return self if _narrows(self.precision, dtype) else self.lossless


def _narrows(precision: str, dtype: np.dtype[np.generic]) -> bool:
    return precision == EXACT or (dtype.kind == "f" and dtype.itemsize > body_dtype(precision).itemsize)


_BY_NAME = {
    codec.name: codec
    for codec in (
        Codec(precision=precision, sparse=sparse, compression=compression)
        for precision in _PRECISIONS
        for sparse in (False, True)
        for compression in _COMPRESSIONS
    )
}

CODECS: tuple[str, ...] = tuple(_BY_NAME)
"""Every codec by its name, ``exact`` first."""


def offered_codecs(accuracy: str | float, *, is_relu: bool, dtypes: Sequence[str]) -> tuple[str, ...]:
    """The codecs that a cut may use and that may be worth it there.

    Those that never are have been left out by measurement (EfficientNet-lite0 with ImageNet weights, photographs):
    zeros are only many enough behind a ReLU, where packing without them also compresses better and faster than
    compression alone; LZ4 finds nothing in dense values of 16 or 8 bits (1.00 of their size).

    Args:
        accuracy: a name (``offered_precisions``), or the largest relative error allowed (``relative_error``), which is
            judged by measurement.
        is_relu: True if the only tensor that crosses comes from a ReLU.
        dtypes: dtypes of the tensors that cross.

    Raises:
        SettingError: The accuracy makes no sense.
    """
    kinds = [array_dtype(dtype) for dtype in dtypes]
    names = []
    for precision in offered_precisions(accuracy):
        if any(_narrows(precision, kind) for kind in kinds):
            names += [codec.name for codec in _sensible(precision, is_relu=is_relu)]
    return tuple(names)


def _sensible(precision: str, *, is_relu: bool) -> list[Codec]:
    if is_relu:
        packed = [Codec(precision=precision, sparse=True, compression=name) for name in _COMPRESSIONS]
    else:
        useful = ("lz4", "zstd") if precision == EXACT else ("zstd",)
        packed = [Codec(precision=precision, compression=name) for name in useful]
    return [Codec(precision=precision), *packed]


def offered_precisions(accuracy: str | float) -> tuple[str, ...]:
    """The precisions that an accuracy allows; a tolerance allows all, and is held by measurement.

    Raises:
        SettingError: The accuracy makes no sense.
    """
    if isinstance(accuracy, str) and accuracy in _COARSEST:
        return _PRECISIONS[: _PRECISIONS.index(_COARSEST[accuracy]) + 1]
    if _is_tolerance(accuracy):
        return _PRECISIONS
    named, meant = ", ".join(_COARSEST), _MEANT.get(str(accuracy).removeprefix("torch."))
    hint = "" if meant is None else f": write accuracy={meant!r}"
    raise SettingError(f"accuracy is one of {named}, or a relative error such as 0.001, not {accuracy!r}{hint}")


def _is_tolerance(accuracy: str | float) -> bool:
    return isinstance(accuracy, int | float) and not isinstance(accuracy, bool) and 0 <= accuracy < math.inf
