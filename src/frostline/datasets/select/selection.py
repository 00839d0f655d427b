"""Some rows of a manifest, or all: their own table, how they are divided, and what they hold."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from frostline.datasets.formats.columns import ManifestColumns, PartOfSamples, SelectedRows, WholeSamples
from frostline.datasets.formats.labels import LABEL_FIELDS
from frostline.datasets.manifest.manifest import Manifest
from frostline.datasets.manifest.row_subset import JoinedRows, as_chosen, kept_of, numbered, within
from frostline.datasets.manifest.statistics import DatasetStatistics, formats_of, quantiles_of
from frostline.datasets.select.filter_parser import parse_expression
from frostline.errors import DataError, SettingError
from frostline.ordering import Chosen, Labels, RowIndices, count_labels, split_at_random, split_by_class, split_by_group

__all__ = ("Selection", "groups_of", "select_rows", "values_of")


def select_rows(
    columns: ManifestColumns, rows: SelectedRows | None, chosen: str | pc.Expression, classes: Sequence[str]
) -> SelectedRows:
    """The rows, of those given or of all, for which a selection holds; where it is unknown, it does not.

    Raises:
        SettingError: the selection makes no sense for these columns.
    """
    expression = parse_expression(chosen, columns.table.schema, classes) if isinstance(chosen, str) else chosen
    mask = np.empty(len(columns), np.bool_)
    done = 0
    for piece in columns.scan(columns.table.column_names):
        found = _evaluated(piece, expression)
        mask[done : done + len(found)] = found
        done += len(found)
    return kept_of(rows, mask)


def values_of(columns: ManifestColumns, rows: SelectedRows | None, name: str) -> pa.ChunkedArray:
    """A column's values at the given rows, or at all.

    Raises:
        SettingError: the data set has no column of that name.
    """
    known = columns.table.column_names
    if name not in known:
        raise SettingError(f"there is no column {name!r}, only {', '.join(known)}")
    column = columns.table.column(name)
    if rows is None:
        return column
    whole = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    return pa.chunked_array([whole.take(pa.array(some)) for some in rows.pieces()], column.type)


def groups_of(
    columns: ManifestColumns, rows: SelectedRows | None, name: str
) -> tuple[npt.NDArray[np.int64], list[object]]:
    """Numbers of the groups that equal values of a column make, in the order of the values; and the values.

    Raises:
        SettingError: the data set has no column of that name.
        DataError: a sample has no value there.
    """
    values = values_of(columns, rows, name)
    if values.null_count:
        raise DataError(
            f"{values.null_count} samples have no {name!r}: leave them out first, select('{name} is not None')"
        )
    encoded = values if pa.types.is_dictionary(values.type) else values.dictionary_encode()
    encoded = encoded.unify_dictionaries().combine_chunks()
    if isinstance(encoded, pa.ChunkedArray):  # of no chunks at all
        return np.zeros(0, np.int64), []
    order = pc.sort_indices(encoded.dictionary).to_numpy()
    number = np.empty(len(order), np.int64)
    number[order] = np.arange(len(order))
    return number[encoded.indices.to_numpy()], encoded.dictionary.take(pa.array(order)).to_pylist()


def _evaluated(piece: pa.Table, expression: pc.Expression) -> npt.NDArray[np.bool_]:
    from pyarrow import acero

    steps = [
        acero.Declaration("table_source", acero.TableSourceNodeOptions(piece)),
        acero.Declaration("project", acero.ProjectNodeOptions([expression], ["kept"])),
    ]
    try:
        # One thread: Arrow's pool would not survive a fork of the process, and rows keep their order.
        found = acero.Declaration.from_sequence(steps).to_table(use_threads=False).column("kept")
        if not pa.types.is_boolean(found.type):
            raise SettingError(f"a selection says of each sample whether it is wanted; this one gives {found.type}")
    except (pa.ArrowException, TypeError) as error:
        raise SettingError(f"the selection does not fit the columns: {str(error).splitlines()[0]}") from error
    return np.asarray(pc.fill_null(found, False).to_numpy(), np.bool_)


@dataclass(frozen=True, eq=False)
class Selection:
    """A manifest, and which of its rows are meant. Immutable, safe for threads.

    Attributes:
        whole: the manifest.
        rows: selected rows of the manifest; None selects all of them.
    """

    whole: Manifest
    rows: SelectedRows | None

    @cached_property
    def manifest(self) -> Manifest:
        """The manifest of these rows alone, with a digest of its own; its columns are still those of the whole."""
        if self.rows is None:
            return self.whole
        samples = PartOfSamples(self.whole_samples, self.rows)
        digest = hashlib.sha256(self.whole.digest.encode() + self.rows.fingerprint).hexdigest()
        names = samples.texts_of(self.whole.names)
        return replace(self.whole, samples=samples, names=names, etags=samples.versions, digest=digest)

    @property
    def whole_samples(self) -> WholeSamples:
        """All samples of the manifest."""
        assert isinstance(self.whole.samples, WholeSamples), "the manifest of all has all samples"
        return self.whole.samples

    @property
    def listing(self) -> str:
        """SHA-256 that names the listing that the manifest was made from."""
        return self.whole.digest

    @property
    def chosen(self) -> Chosen:
        """The rows in the manifest's order, a bit for each of its rows."""
        return as_chosen(self.rows, len(self.whole.samples))

    def take(self, rows: npt.NDArray[Any]) -> SelectedRows:
        """Those of the rows at some positions, or where a mask is true; see ``Dataset.take``."""
        if rows.dtype != np.bool_:
            rows = rows.astype(np.int64, copy=False)
            return RowIndices(rows if self.rows is None else self.rows.at(rows))
        if len(rows) != len(self.manifest.samples):
            count = len(self.manifest.samples)
            raise SettingError(f"a mask has one value for each of the {count} samples, not {len(rows)}")
        return self.numbered(rows.view(np.uint8), 1)

    def numbered(self, parts: npt.NDArray[np.uint8], number: int) -> SelectedRows:
        """Those of the rows whose part has that number, of a division that has a value for each of them."""
        return numbered(self.rows, parts, number)

    def within(self, chosen: Chosen) -> SelectedRows:
        """Those of the rows that a choice has too, in the order that they have here."""
        return within(self.rows, chosen)

    def where(self, chosen: str | pc.Expression) -> SelectedRows:
        """Those of the rows for which a condition holds; see ``Dataset.select``."""
        return select_rows(self.whole.columns, self.rows, chosen, self.whole.classes)

    def joined(self, others: Iterable["Selection"]) -> SelectedRows:
        """The rows, and after them those of other selections from the same manifest."""
        parts = (self, *others)
        return JoinedRows([part.chosen if part.rows is None else part.rows for part in parts])

    def count_shared(self, other: "Selection") -> int:
        """How many of these samples another selection of the same data has too, by their ids if it was listed anew."""
        if self.listing != other.listing:
            return len(np.intersect1d(self.manifest.samples.ids, other.manifest.samples.ids))
        return len(self.within(other.chosen))

    @property
    def labels(self) -> Labels:
        """The labels of these rows, counted."""
        known = self.whole.columns.labels if self.rows is None else None
        if known is not None:
            return known
        return count_labels(lambda: self.whole_samples.pieces("label", self.rows))

    @property
    def per_label(self) -> Mapping[int, int]:
        """How many of these rows have each label that lies between the least and the greatest."""
        labels = self.labels
        return dict(zip(range(labels.first, labels.first + len(labels.counts)), labels.counts.tolist(), strict=True))

    def column(self, name: str) -> pa.ChunkedArray:
        """See ``Dataset.column``."""
        return values_of(self.whole.columns, self.rows, name)

    def groups(self, column: str) -> tuple[npt.NDArray[np.int64], Sequence[Any]]:
        """Which of a column's values each row has, by its number; and the values."""
        return groups_of(self.whole.columns, self.rows, column)

    def divided(self, shares: Sequence[float], seed: int, *, by: str | None, balanced: bool) -> npt.NDArray[np.uint8]:
        """Which part each row belongs to; see ``Dataset.split``."""
        if by is not None:
            return split_by_group(self.groups(by)[0], shares, seed)
        if not balanced:
            return split_at_random(len(self.manifest.samples), shares, seed)
        return split_by_class(self.labels, shares, seed)

    def with_columns(self, columns: Mapping[str, Sequence[Any]]) -> Manifest:
        """The manifest with further columns; see ``Dataset.with_columns``."""
        if self.rows is not None:
            raise SettingError("columns are added to a whole data set: add them before select, split or take")
        table = self.whole.columns.table
        for name, values in columns.items():
            if len(values) != len(self.whole.samples) or name in table.column_names:
                raise SettingError(
                    f"column {name!r} has {len(values)} values for {len(self.whole.samples)} samples, or its name is "
                    "taken"
                )
            table = table.append_column(name, pa.array(values))
        return replace(self.whole, columns=self.whole.columns.of(table))

    def require_classes(self, at_least: int, url: str) -> None:
        """Make sure that the samples have at least so many classes.

        Args:
            at_least: number of classes that training needs.
            url: address of the data, for sentences.

        Raises:
            DataError: fewer classes have samples.
        """
        present = [self.whole.classes[label] for label, count in self.per_label.items() if count and label >= 0]
        if not present:
            raise DataError(
                f"not one of the {len(self.manifest.samples)} samples of {url} has a label: a list or table says them "
                f"in a column {' or '.join(LABEL_FIELDS)}, and there they are empty or missing"
            )
        if len(present) < at_least:
            names = ", ".join(repr(name) for name in present)
            raise DataError(f"{url} has {len(present)} class ({names}); training needs at least {at_least}")

    def statistics(self, splits: Mapping[str, int]) -> DatasetStatistics:
        """See ``Dataset.statistics``; ``splits`` are the samples in each that was saved, by its name."""
        manifest, lengths = self.manifest, self.manifest.samples.lengths
        counts = self.per_label
        return DatasetStatistics(
            samples=len(lengths),
            per_class=tuple((name, counts.get(label, 0)) for label, name in enumerate(manifest.classes)),
            without_label=counts.get(-1, 0),
            total_bytes=int(lengths.sum()),
            mean_bytes=float(lengths.mean()) if len(lengths) else 0.0,
            min_bytes=int(lengths.min()) if len(lengths) else 0,
            max_bytes=int(lengths.max(initial=0)),
            quantiles=quantiles_of(lengths),
            formats=formats_of(manifest),
            columns=tuple((field.name, str(field.type)) for field in manifest.columns.table.schema),
            splits=tuple(splits.items()),
            manifest=manifest.place,
            manifest_found=manifest.found,
        )
