"""The public data set: labelled samples at a URL, listed when they are first needed."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from frostline.core import SampleTable
from frostline.core.config import CHANGED, cache_folder
from frostline.core.errors import DataError, SettingError, nearest
from frostline.core.events import Observer
from frostline.core.nouns import ShownInNotebooks
from frostline.datasets.formats.base import SelectedRows
from frostline.datasets.formats.known import format_with
from frostline.datasets.formats.labels import SPLIT
from frostline.datasets.formats.left_out import log_left_out, said_of_left_out
from frostline.datasets.manifest import DatasetStatistics, Manifest, rows_of_ids
from frostline.datasets.manifest_store import NamedSplits
from frostline.datasets.selection import Selection, labelled_by
from frostline.datasets.source import ManifestSource, canonical_url
from frostline.datasets.targets import MultiLabel, TargetColumns, check_classes, checked_targets, specs_of
from frostline.ordering import Chosen

__all__ = ("Dataset", "DatasetStatistics")

_MAX_PARTS = 255
_SHOWN_CLASSES = 20


class Dataset(ShownInNotebooks):
    """Labelled samples that stay where they are, in whatever format: see ``datasets.formats``.

    Nothing is read until a property needs it; the first one that does lists the data and finds or builds
    its manifest. The value does not change after that: make another one to see new data.

    Args:
        url: ``s3://bucket/prefix``, ``file:///folder``, a plain path, ``cql://user@host/keyspace/table``,
            ``memory://name``, or ``hf:OWNER/DATASET``: the Parquet files of a data set of the Hugging Face hub.
        cache: folder for manifests and splits that do not lie beside the data; the user's cache folder by default.
        beside: keep them beside the data, in ``.frostline``, in a local folder too, for everybody who reads it.
        format: name of the format that the data has, where more than one lies there; by default what it looks like.
        column: column of Parquet files with the samples: texts or encoded images; or columns by the inputs that they
            make, ``{"pixel_values": "image", "input_ids": "caption"}``. It becomes a part of the format's name.
        label: column whose values are the labels: names, or whole numbers from 0; by default one that is called as
            labels are, such as ``label`` or ``class``, or what the format itself says.
        relist: False takes the manifest that was built last, without listing the data: at once, also where there are a
            hundred million objects. What changed since is noticed when it is read.
        changed: policy for objects that have changed since they were listed; their samples are never
            used. ``skip`` leaves them out, names and counts them. ``rebuild`` lists the data again when a job begins,
            so that its first epoch has it as it is then; what changes after that is left out. ``refuse`` takes the data
            only as the manifest that was built last has it, and ends a job at the first sample that has changed.
        targets: column whose values a loader gives as ``batch.targets``, of whole numbers, floats, texts, lists of
            these or lists of lists of numbers, or a ``MultiLabel``; ``mask`` stands for the samples' masks. Several
            come as a dict by name, and ``()`` gives none. By default they are the samples' masks, where the data has
            some, and labels are classes.
        near: address of a node beside the data, or of several: the first that serves it lists it, so that nobody here
            needs credentials for the store. A job on these samples runs near the same nodes unless it is given others.
        token: secret with which to ask that node; ``FROSTLINE_TOKEN`` by default. Never shown or logged.
        observe: told how far the listing is, and what it leaves out; by default that is logged as a warning of
            ``frostline``.

    Attributes:
        source: how and by whom the data is listed, for other parts of Frostline.

    Raises:
        SettingError: the URL is none that Frostline reads, or there is no such format, or no such choice or address.
        DataNotFound: the hub's data is neither in its cache nor to be fetched.

    The properties that list the data raise ``DataChanged`` where that is refused, ``DataNotFound``, ``EmptyDataset``,
    ``AccessDenied``, ``OutOfSpace`` or ``StoreUnavailable``; with ``near`` also ``Refused`` or ``NodeUnreachable``.
    """

    def __init__(
        self,
        url: str | Path,
        *,
        cache: Path | None = None,
        beside: bool = False,
        format: str | None = None,
        column: str | Mapping[str, str] | None = None,
        label: str | None = None,
        relist: bool = True,
        changed: str = CHANGED[0],
        targets: str | MultiLabel | Sequence[str | MultiLabel] | None = None,
        near: str | Sequence[str] | None = None,
        token: str | None = None,
        observe: Observer = log_left_out,
    ) -> None:
        if changed not in CHANGED:
            raise SettingError(f"changed is one of {', '.join(CHANGED)}, not {changed!r}{nearest(changed, CHANGED)}")
        self._url = canonical_url(str(url), near)
        format = format_with(format, column)
        self._asked: dict[str, Any] = {
            "cache": cache,
            "beside": beside,
            "format": format,
            "relist": relist,
            "changed": changed,
            "near": ManifestSource.nodes(near),
            "token": token,
        }
        self.source = ManifestSource(url=self._url, **{**self._asked, "cache": cache or cache_folder()})
        self._asked |= {"targets": targets, "label": label}
        self._label = label
        self._declared, self._is_single = checked_targets(targets)
        self._observe = observe
        self._selected: Selection | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Who is told of a listing stays in this process.
        return {**self.__dict__, "_observe": log_left_out}

    # One that looks like a sequence would be taken for one that can be iterated.
    __iter__ = None

    def __len__(self) -> int:
        return len(self.samples)

    def __repr__(self) -> str:
        return f"Dataset({self._url!r})"

    def _rows(self) -> Iterator[tuple[str, str]]:
        if self._selected is None:
            yield "samples", "not listed yet"
            return
        yield "samples", f"{len(self):,}"
        if self.classes:
            yield f"{len(self.classes):,} classes", ", ".join(self.classes[:_SHOWN_CLASSES])

    @property
    def url(self) -> str:
        """The canonical URL of the root."""
        return self._url

    @property
    def selection(self) -> Selection:
        """The whole manifest and which of its rows these samples are: what the rest of Frostline works with."""
        if self._selected is None:
            whole = self.source.manifest(self._observe)
            left = said_of_left_out(self._url, whole.left_out)
            if left is not None:
                self._observe(left)
            if self._label is not None:
                whole = labelled_by(whole, self._label, self._url)
            if not self.declares_targets and self._label is None:
                check_classes(whole.columns.table, self._url)
            self._selected = Selection(whole, None)
        return self._selected

    @property
    def manifest(self) -> Manifest:
        """The table of the samples, and whether it was found or built."""
        return self.selection.manifest

    @property
    def samples(self) -> SampleTable:
        """The samples as columns, in the order in which the format lists them."""
        return self.manifest.samples

    @property
    def names(self) -> Sequence[str]:
        """Name of each sample's image; where the data is a ready format, of the one that it was made from."""
        return self.manifest.names

    @property
    def has_targets(self) -> bool:
        """Samples have masks: what a job's loader gives as ``batch.targets``."""
        return self.selection.whole_samples.has_targets

    @property
    def declares_targets(self) -> bool:
        """Targets were declared by their columns, or that there are none: masks are no targets then."""
        return self._declared is not None

    @property
    def targets(self) -> TargetColumns | None:
        """The declared targets of these samples; None where no column was declared.

        Raises:
            SettingError: there is no such column.
            DataError: a column's values cannot be targets, or samples have none where they must.
        """
        if not self._declared:
            return None
        columns = self.selection.whole.columns
        specs = specs_of(self._declared, columns.table, self._url)
        return TargetColumns(columns, self.selection.rows, specs, is_single=self._is_single)

    @property
    def whole(self) -> "Dataset":
        """The data set that this one is a part of."""
        return self._with(None)

    def refreshed(self) -> "Dataset":
        """These samples as they are listed now, where ``changed="rebuild"`` wants that; else this data set itself.

        A part keeps its samples: those that are gone leave it, and what is new is in none.
        """
        if self.source.changed != "rebuild" or (self._selected is None and self.source.relist):
            return self
        now = Dataset(self._url, **{**self._asked, "relist": True}, observe=self._observe)
        if self._selected is None or self._selected.rows is None:
            return now
        return now.take(rows_of_ids(now.samples.ids, self.samples.ids))

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, by label; a part of a data set keeps them all."""
        return self.manifest.classes

    @property
    def digest(self) -> str:
        """SHA-256 that names exactly these samples: of the listing, or of the part taken of it."""
        return self.manifest.digest

    def take(self, rows: npt.NDArray[np.int64] | npt.NDArray[np.bool_]) -> "Dataset":
        """Some of the samples, as a data set of its own.

        Args:
            rows: rows to take, in the order that they are given in; or a mask with a value for each sample, which
                keeps the samples' order, and of which a bit a sample is held.

        Raises:
            SettingError: a mask has another length.
        """
        return self._with(self.selection.take(np.asarray(rows)))

    def joined(self, *others: "Dataset") -> "Dataset":
        """These samples, and after them those of other parts of the same data; one that is in several comes as often.

        Raises:
            SettingError: a part belongs to other data.
        """
        if not all(self._is_listed_like(other) for other in others):
            raise SettingError(f"only parts of {self.url} as it is listed now can be joined with it")
        return self._with(self.selection.joined(other.selection for other in others))

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns that every sample has, metadata among them."""
        return tuple(self.selection.whole.columns.table.column_names)

    def column(self, name: str) -> pa.ChunkedArray:
        """A column's values, one a sample, in the samples' order.

        Raises:
            SettingError: the data set has no column of that name.
        """
        return self.selection.column(name)

    def with_columns(self, columns: Mapping[str, Sequence[Any]]) -> "Dataset":
        """The same samples with further columns, such as whose they are, to select and to split by. They are not kept.

        Args:
            columns: values by name, one for each sample in the samples' order.

        Raises:
            SettingError: a column has another length or a name that is taken, or this is a part of a data set.
        """
        same = Dataset(self._url, **self._asked)
        same._selected = Selection(self.selection.with_columns(columns), None)
        return same

    def select(self, chosen: str | pc.Expression) -> "Dataset":
        """The samples for which a selection holds, in the samples' order.

        Args:
            chosen: text such as ``"label == 'glass' and width >= 200"`` (see ``datasets.selection``), or an
                expression of Arrow, in which labels are numbers: ``pyarrow.compute.field("width") >= 200``.

        Raises:
            SettingError: it cannot be read, or does not fit the columns.
        """
        return self._with(self.selection.where(chosen))

    @overload
    def split(
        self, shares: float, seed: int = 0, *, by: str | None = None, balanced: bool = True
    ) -> "tuple[Dataset, Dataset]": ...

    @overload
    def split(
        self, shares: Mapping[str, float], seed: int = 0, *, by: str | None = None, balanced: bool = True
    ) -> "dict[str, Dataset]": ...

    def split(
        self, shares: float | Mapping[str, float], seed: int = 0, *, by: str | None = None, balanced: bool = True
    ) -> "tuple[Dataset, Dataset] | dict[str, Dataset]":
        """Divide the samples by a seeded draw: every sample is in one part, and the parts keep the samples' order.

        Args:
            shares: the share to hold out, from 0 to below 1; or a share for each part by its name, which sum to 1,
                such as ``{"train": 0.8, "val": 0.1, "test": 0.1}``.
            seed: seed of the draw; the same seed gives the same parts.
            by: a column, such as ``"patient"``: samples with the same value there stay together. A part is then off
                its share by up to the samples of one value.
            balanced: divide each class by the shares; False divides the samples whatever their class.

        Returns:
            The part to train on and the part held out, or the parts by their names.

        Raises:
            SettingError: the shares or the seed make no sense, or there is no such column.
            DataError: a sample has no value in that column, or a part would be empty.
        """
        if isinstance(shares, Mapping):
            parts = self.selection.divided(list(shares.values()), seed, by=by, balanced=balanced)
            found = {name: self._part_number(parts, number) for number, name in enumerate(shares)}
            empty = [name for name, part in found.items() if not len(part) and shares[name]]
            if empty and len(self):
                raise DataError(f"the part {empty[0]!r} would be empty: give it a larger share, or split fewer ways")
            return found
        if not 0 <= shares < 1:
            raise SettingError(f"the share to hold out lies from 0 to below 1, not {shares}")
        parts = self.selection.divided([1 - shares, shares], seed, by=by, balanced=balanced)
        return self._part_number(parts, 0), self._part_number(parts, 1)

    def split_by(self, column: str) -> "dict[str, Dataset]":
        """One part for each value of a column, by the value as text, such as the folds or splits that the data brings.

        Raises:
            SettingError: there is no such column, or it has more than 255 values.
            DataError: a sample has no value there.
        """
        numbers, values = self.selection.groups(column)
        if len(values) > _MAX_PARTS:
            raise SettingError(f"column {column!r} has {len(values)} values, and a split up to {_MAX_PARTS} parts")
        parts = numbers.astype(np.uint8)
        return {str(value): self._part_number(parts, number) for number, value in enumerate(values)}

    def save_splits(self, splits: "Mapping[str, Dataset]") -> str:
        """Keep parts of this data set by name beside its manifest, in place of any of the same name; say where.

        They are ``data["train"]`` from then on, also on the command line, for as long as the listing is the same: for
        everyone where they lie beside the data, else for this user. Which samples a part has is kept, not their order.

        Raises:
            SettingError: a part is one of other data.
            OutOfSpace: the disk is full.
        """
        other = [name for name, part in splits.items() if not self._is_listed_like(part)]
        if other:
            raise SettingError(f"the part {other[0]!r} is one of other data than {self._url} as it is listed now")
        return self._named.save({name: part.selection.chosen for name, part in splits.items()})

    @property
    def splits(self) -> tuple[str, ...]:
        """The names of the splits that the data brings, and of those that were saved."""
        return tuple(dict.fromkeys((*self.splits_brought, *self._named.load())))

    @property
    def splits_brought(self) -> tuple[str, ...]:
        """The names of the splits that the data says in its column ``split``, or by names of folders and files."""
        return self.selection.whole.splits

    def __getitem__(self, name: str) -> "Dataset":
        """The samples of a split; of a part of the data set, those that are in it too. One that was saved goes first.

        Raises:
            SettingError: there is no split of that name.
        """
        return self._split(name, self._named.load())

    def statistics(self) -> DatasetStatistics:
        """Counts, sizes, formats, columns and splits of the samples, from the manifest alone."""
        saved = self._named.load()
        names = dict.fromkeys((*self.splits_brought, *saved))
        return self.selection.statistics({name: len(self._split(name, saved)) for name in names})

    def _with(self, rows: SelectedRows | None) -> "Dataset":
        part = Dataset(self._url, **self._asked)
        part._selected = Selection(self.selection.whole, rows)
        return part

    def _is_listed_like(self, other: "Dataset") -> bool:
        return (self.url, self.selection.listing) == (other.url, other.selection.listing)

    def _part_number(self, parts: npt.NDArray[np.uint8], number: int) -> "Dataset":
        """The samples of one part of a division of this data set."""
        return self._with(self.selection.numbered(parts, number))

    @property
    def _named(self) -> NamedSplits:
        return self.source.named(self.selection.whole)

    def _split(self, name: str, saved: Mapping[str, Chosen]) -> "Dataset":
        if name in saved:
            return self._with(self.selection.within(saved[name]))
        if name in self.splits_brought:
            return self.select(pc.field(SPLIT) == name)
        names = (*self.splits_brought, *saved)
        known = f"only {', '.join(names)}" if names else "and none at all: save_splits and index --split make them"
        raise SettingError(f"{self._url} as it is listed now has no split {name!r}, {known}")
