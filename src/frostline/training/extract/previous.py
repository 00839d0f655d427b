"""Finds what the last extraction into a file made, so that only samples that came or changed are computed."""

import bisect
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from frostline.core import Samples
from frostline.training.files import atomic_file

__all__ = ("Previous", "keep_state", "keys_of")

FeaturesOf = Callable[[npt.NDArray[np.int64]], npt.NDArray[Any]]

_ABOUT = b"frostline.extraction"
_UNKNOWN = np.uint64(0)


class Previous:
    """The result of an earlier extraction, as far as it is whole and of the same network.

    Args:
        ids: ``int64[n]``, ids of its samples in the file's order.
        keys: ``uint64[n]``, see ``keys_of``.
        features_of: gives the features of rows of the file.
    """

    def __init__(self, ids: npt.NDArray[np.int64], keys: npt.NDArray[np.uint64], features_of: FeaturesOf) -> None:
        self._order = np.argsort(ids, kind="stable")
        self._ids = ids[self._order]
        self._keys = keys[self._order]
        self.features_of = features_of

    @classmethod
    def found(cls, out: Path, identity: Mapping[str, Any]) -> "Previous":
        """What lies at ``out``; with no rows where it is missing, damaged, or of another network or engine.

        Args:
            out: file of an extraction.
            identity: dependencies of the features, beside the samples.
        """
        try:
            state = pq.ParquetFile(_place(out), page_checksum_verification=True).read(use_threads=False)
            about = json.loads(state.schema.metadata[_ABOUT])
            if about["identity"] == _plain(identity) and about["sha256"] == _sha256(out):
                return cls(state["id"].to_numpy(), state["key"].to_numpy(), _reader(out))
        except (pa.ArrowException, OSError, KeyError, TypeError, ValueError):
            pass  # all is computed, and both are written anew
        return cls(np.zeros(0, np.int64), np.zeros(0, np.uint64), lambda _: np.zeros(0))

    def rows_of(self, ids: npt.NDArray[np.int64], keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        """The row of the file that has each sample as it is now; -1 where it is new or has changed."""
        rows = np.full(len(ids), -1, np.int64)
        if not len(self._ids):
            return rows
        places = np.minimum(np.searchsorted(self._ids, ids), len(self._ids) - 1)
        is_same = (self._ids[places] == ids) & (self._keys[places] == keys) & (keys != _UNKNOWN)
        rows[is_same] = self._order[places[is_same]]
        return rows


def keys_of(samples: Samples) -> npt.NDArray[np.uint64]:
    """A number for the place and the version of each sample, ``uint64[n]``; 0 where its store tells no version."""
    columns = (samples.objects, samples.offsets.tolist(), samples.lengths.tolist(), samples.versions)
    keys = np.zeros(len(samples), np.uint64)
    for row, (object, offset, length, version) in enumerate(zip(*columns, strict=True)):
        if version:
            text = f"{object}\0{offset}\0{length}\0{version}".encode(errors="surrogateescape")
            keys[row] = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
    return keys


def keep_state(out: Path, identity: Mapping[str, Any], ids: Iterable[npt.NDArray[np.int64]], keys: Any) -> None:
    """Keep beside a finished file which samples it has, and in which versions.

    Args:
        out: the file.
        identity: dependencies of the features, beside the samples.
        ids: ids of its samples, in order, some at a time.
        keys: their keys, likewise.

    Raises:
        OutOfSpace: the disk is full.
        SettingError: the folder cannot be written.
    """
    columns = {"id": np.concatenate([*ids]), "key": np.concatenate([*keys])}
    about = json.dumps({"identity": _plain(identity), "sha256": _sha256(out)})
    with atomic_file(_place(out)) as file:
        pq.write_table(pa.table(columns, metadata={_ABOUT: about}), file, write_page_checksum=True)


def _place(out: Path) -> Path:
    return out.with_name(f".{out.name}.state")


def _plain(identity: Mapping[str, Any]) -> Any:
    return json.loads(json.dumps(identity))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _reader(out: Path) -> FeaturesOf:
    return _safetensors_reader(out) if out.suffix == ".safetensors" else _ParquetReader(out).at


def _safetensors_reader(out: Path) -> FeaturesOf:
    from safetensors import safe_open

    def at(rows: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        with safe_open(out, "numpy") as file:
            features = file.get_slice("features")
            return np.concatenate([features[row : row + 1] for row in rows.tolist()])

    return at


class _ParquetReader:
    """Reads features of single rows, a row group at a time, of which the last is held."""

    def __init__(self, out: Path) -> None:
        self._file = pq.ParquetFile(out)
        groups = range(self._file.metadata.num_row_groups)
        self._ends = [*accumulate(self._file.metadata.row_group(group).num_rows for group in groups)]
        self._held: tuple[int, npt.NDArray[Any]] = (-1, np.zeros(0))

    def at(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        return np.stack([self._row(row) for row in rows.tolist()])

    def _row(self, row: int) -> npt.NDArray[Any]:
        group = bisect.bisect_right(self._ends, row)
        if self._held[0] != group:
            column = self._file.read_row_group(group, columns=["features"], use_threads=False)["features"]
            self._held = (group, column.combine_chunks().to_numpy_ndarray())
        features: npt.NDArray[Any] = self._held[1][row - (self._ends[group - 1] if group else 0)]
        return features
