"""What a data set holds, as values: counts, sizes and formats, from its manifest alone."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from frostline.core.samples import Texts
from frostline.datasets.manifest.manifest import Manifest

__all__ = ("DatasetStatistics", "SizeQuantiles", "formats_of", "quantiles_of")

_AT_ONCE = 1 << 18
_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
# The suffix of a name, as formats take it: what follows the last dot of its last part, which does not begin with it.
_SUFFIX = r"[^/](?P<suffix>\.[^./]*)$"


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeQuantiles:
    """Encoded bytes below which so many hundredths of the samples lie: half of them below ``p50``."""

    p5: int
    p25: int
    p50: int
    p75: int
    p95: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetStatistics:
    """What a data set holds.

    Attributes:
        samples: how many.
        per_class: name and number of samples of each class, by label.
        without_label: samples that have none.
        total_bytes: encoded bytes of all samples.
        mean_bytes: mean size of a sample.
        min_bytes: size of the smallest sample.
        max_bytes: size of the largest sample.
        quantiles: quantiles of the samples' sizes.
        formats: suffix and number of samples, the commonest first.
        columns: name and type of each column of the manifest.
        splits: name and number of samples of each split that was saved.
        manifest: URL of the table.
        manifest_found: it was there already; False where it was built now.
    """

    samples: int
    per_class: tuple[tuple[str, int], ...]
    without_label: int
    total_bytes: int
    mean_bytes: float
    min_bytes: int
    max_bytes: int
    quantiles: SizeQuantiles
    formats: tuple[tuple[str, int], ...]
    columns: tuple[tuple[str, str], ...]
    splits: tuple[tuple[str, int], ...]
    manifest: str
    manifest_found: bool


def quantiles_of(lengths: npt.NDArray[np.int64]) -> SizeQuantiles:
    """Return the quantiles of sizes; zeros where there are none."""
    found = np.quantile(lengths, _QUANTILES, method="nearest") if len(lengths) else np.zeros(len(_QUANTILES))
    p5, p25, p50, p75, p95 = (int(quantile) for quantile in found)
    return SizeQuantiles(p5=p5, p25=p25, p50=p50, p75=p75, p95=p95)


def formats_of(manifest: Manifest) -> tuple[tuple[str, int], ...]:
    """Suffixes of the samples' names and how many have each, the commonest first."""
    counts: dict[str, int] = {}
    for names in _pieces(manifest.names):
        found = pc.extract_regex(names, _SUFFIX)
        suffixes = pc.utf8_lower(pc.fill_null(pc.struct_field(found, "suffix"), ""))
        for count in pc.value_counts(suffixes).to_pylist():
            counts[count["values"]] = counts.get(count["values"], 0) + count["counts"]
    return tuple(sorted(counts.items(), key=lambda count: (-count[1], count[0])))


def _pieces(names: Sequence[str]) -> Iterator[pa.Array]:
    for start in range(0, len(names), _AT_ONCE):
        some = np.arange(start, min(start + _AT_ONCE, len(names)), dtype=np.int64)
        yield pa.array(names.take(some) if isinstance(names, Texts) else names[start : start + _AT_ONCE], pa.string())
