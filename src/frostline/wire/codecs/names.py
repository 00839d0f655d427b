"""Names of codecs and what they mean, and which of them a cut may use."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from frostline.core import EXACT, FLOAT32, LOSSY
from frostline.core.features import array_dtype
from frostline.errors import SettingError, nearest
from frostline.wire.codecs.precision import body_dtype

__all__ = ("CODECS", "Codec", "offered", "offered_precisions")

# The finest first.
_PRECISIONS = (EXACT, *LOSSY)
# What a named accuracy allows at most.
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
            SettingError: There is none; the message has the nearest ones.
        """
        try:
            return _BY_NAME[name]
        except KeyError:
            raise SettingError(f"there is no codec {name[:50]!r}{nearest(name[:50], CODECS)}") from None

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


def offered(accuracy: str | float, *, is_relu: bool, dtypes: Sequence[str]) -> tuple[str, ...]:
    """The codecs that a cut may use and that may be worth it there.

    Those that never are have been left out by measurement (EfficientNet-lite0 with ImageNet weights, photographs):
    zeros are only many enough behind a ReLU, where packing without them also compresses better and faster than
    compression alone; LZ4 finds nothing in dense values of 16 or 8 bits (1.00 of their size).

    Args:
        accuracy: a name (``offered_precisions``), or the largest relative error allowed (``relative_error``), which is
            judged by measurement.
        is_relu: the one tensor that crosses comes from a ReLU.
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
    named = ", ".join(_COARSEST)
    raise SettingError(f"accuracy is one of {named}, or a relative error such as 0.001, not {accuracy!r}")


def _is_tolerance(accuracy: str | float) -> bool:
    return isinstance(accuracy, int | float) and not isinstance(accuracy, bool) and 0 <= accuracy < math.inf
