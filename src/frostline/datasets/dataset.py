"""The public data set: labelled samples at a URL, listed when they are first needed."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, SupportsIndex, TypeAlias, cast, overload

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from frostline.core import URLS, Samples, SampleTable, Skipped
from frostline.core.config import CHANGED, MANIFEST_LOCATIONS, cache_folder, check_type, describe_value
from frostline.core.errors import DataError, SampleError, SettingError
from frostline.core.events import Observer
from frostline.core.hints import Hinting, HintingType, add_hints, data_hint, suggest_names
from frostline.core.nouns import ShownInNotebooks, take_texts
from frostline.core.units import warn_caller
from frostline.datasets.formats.base import SelectedRows
from frostline.datasets.formats.known import check_inputs, format_with, part_names
from frostline.datasets.formats.labels import SPLIT
from frostline.datasets.formats.left_out import describe_left_out, log_losses
from frostline.datasets.formats.urls import places_in
from frostline.datasets.manifest import DatasetStatistics, Manifest, rows_of_ids
from frostline.datasets.manifest_store import NamedSplits
from frostline.datasets.reading import SequentialReader, masks_of
from frostline.datasets.selection import Selection, few_of_a_class, relabel
from frostline.datasets.source import ManifestSource, canonical_url, listing_nodes
from frostline.datasets.targets import (
    KnownNames,
    LabelledSample,
    MultiLabel,
    TargetColumns,
    TargetValues,
    check_classes,
    checked_targets,
    specs_of,
)
from frostline.ordering import Chosen
from frostline.preprocess import Preprocess, imagenet, preset_of
from frostline.preprocess.apply import MASK_DTYPE, MAX_PIXELS, decode_into, mask_into, open_mask, steps_left
from frostline.preprocess.images import decode_image as decoded_image
from frostline.preprocess.steps import Decode
from frostline.preprocess.transforms import Transform, as_function, declare
from frostline.stores.open import survives_fork
from frostline.stores.protocols import Buffer

__all__ = (
    "Dataset",
    "DatasetLike",
    "DatasetStatistics",
    "dataset_from",
    "reader_of",
    "refresh_locally",
    "require_one_part",
    "roots_of",
    "split_in_two",
    "steps_left_of",
)

_MAX_PARTS = 255
_SHOWN_CLASSES = 20
_READ_TOGETHER = 32
_SIDE = 224


class Dataset(KnownNames, Hinting, ShownInNotebooks, metaclass=HintingType):
    """A data set that is read where it is stored, in the format that it has: see ``datasets.formats``.

    Nothing is read when it is made. The first property that needs the samples lists the data and finds or builds the
    manifest. The list of samples does not change after that: make another ``Dataset`` to see new data.

    Args:
        url: ``s3://bucket/prefix``, ``file:///folder``, a plain path, ``cql://user@host/keyspace/table``,
            ``memory://name``, or ``hf:OWNER/DATASET``: the Parquet files of a data set of the Hugging Face hub.
        cache: folder for manifests and splits that are not kept beside the data. Default: the user's cache folder.
        manifest_location: "auto" keeps manifests and splits beside the data in an object store, and those of a local
            folder in ``cache``; "data" keeps these in the folder's own subfolder ``.frostline``, for all its readers.
        format: name of the data's format, if files of several formats are there. Default: recognised by the names of
            the files.
        column: column of Parquet files that holds the samples (texts, lists of numbers, encoded images or sounds); or a
            column for each input of the network, ``{"pixel_values": "image", "input_ids": "caption"}``.
        file_column: column of lists (CSV, TSV, JSON lines, Parquet) that says which file each sample is: a path, URL or
            id, also without suffix. Default: the one that is called so, or that has names of files.
        label: column whose values are the labels: class names, or whole numbers from 0. Default: the label of the
            format, or the column named ``label``, ``cls`` or ``class``.
        relist: False reuses the last manifest without listing the data, which takes no time for any number of objects.
            Objects that have changed since are noticed when they are read.
        on_change: policy for objects that have changed since they were listed; their samples are never used. ``skip``
            leaves them out, names and counts them. ``rebuild`` also lists the data again when a job begins. ``refuse``
            raises an error if the listing differs from the last manifest, and ends a job at the first changed sample.
        targets: column whose values become ``batch.targets`` (whole numbers, floats, texts, lists of these, or lists of
            lists of numbers), or a ``MultiLabel``; ``"mask"`` means the samples' masks. For a sequence of these,
            ``batch.targets`` is a dict by name; ``()`` gives no targets. Default: the masks, if the data has any.
        transform: preprocessing of ``data[0]``, and of jobs and loaders that are given none: a transform of torchvision
            or timm, an image processor of transformers, a function that takes a Pillow image, or steps of
            ``frostline.preprocess``. Default: ImageNet's at 224 pixels.
        near: URL of a node, or several, of which the first that serves the data lists it, so that this machine needs no
            credentials for the store. Jobs on these samples use the same nodes unless they are given others.
        token: secret that identifies this user to that node. Default: ``FROSTLINE_TOKEN``. Never shown or logged.
        on_event: function that is called with events about the listing: its progress, files that are left out, and
            nodes that are lost. Default: both are logged as warnings of the logger ``frostline``.

    Attributes:
        source: internal object that lists the data and keeps its manifest.

    Raises:
        SettingError: Frostline cannot read such a URL, or an argument has a value that does not exist.
        DataNotFound: data of the Hugging Face hub is not in its cache and cannot be downloaded.

    The property that lists the data may raise ``DataNotFound``, ``EmptyDataset``, ``AccessDenied``, ``OutOfSpace``,
    ``StoreUnavailable`` or, with ``on_change="refuse"``, ``DataChanged``; with ``near`` also ``Refused`` or
    ``NodeUnreachable``.
    """

    @add_hints
    def __init__(
        self,
        url: str | Path,
        *,
        cache: Path | str | None = None,
        manifest_location: str = MANIFEST_LOCATIONS[0],
        format: str | None = None,
        column: str | Mapping[str, str] | None = None,
        file_column: str | None = None,
        label: str | None = None,
        relist: bool = True,
        on_change: str = CHANGED[0],
        targets: str | MultiLabel | Sequence[str | MultiLabel] | None = None,
        transform: Transform | None = None,
        near: str | Sequence[str] | None = None,
        token: str | None = None,
        on_event: Observer = log_losses,
    ) -> None:
        for name, value, known in (
            ("on_change", on_change, CHANGED),
            ("manifest_location", manifest_location, MANIFEST_LOCATIONS),
        ):
            if value not in known:
                raise SettingError(f"{name} is one of {', '.join(known)}, not {value!r}{suggest_names(value, known)}")
        if not isinstance(url, str | Path):
            raise SettingError(f"url takes a path or a URL, not {describe_value(url)}{data_hint(url)}")
        self._url = canonical_url(str(url), near)
        format = format_with(format, column, file_column)
        self._asked: dict[str, Any] = {
            "cache": cache,
            "manifest_location": manifest_location,
            "format": format,
            "relist": relist,
            "on_change": on_change,
            "near": ManifestSource.nodes(near),
            "token": token,
        }
        self.source = ManifestSource(
            url=self._url, **{**self._asked, "cache": cache_folder() if cache is None else Path(cache)}
        )
        self._asked |= {"targets": targets, "label": label}
        self.transform = transform
        self._reader: SequentialReader | None = None
        self._process = os.getpid()
        self._label = label
        self._declared, self._is_single = checked_targets(targets)
        self._on_event = on_event
        self._selected: Selection | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Who is told of a listing stays in this process, and so do connections.
        return {**self.__dict__, "_on_event": log_losses, "_reader": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _process=os.getpid())

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
    def transform(self) -> Transform | None:
        """The preprocessing as given. Setting another one affects ``data[0]``, and jobs and loaders made after that."""
        return self._transform

    @transform.setter
    def transform(self, transform: Transform | None) -> None:
        if transform is not None:
            declare(transform)  # refuses what takes no image
        self._transform = self._asked["transform"] = transform

    @property
    def selection(self) -> Selection:
        """The whole manifest and the rows of it that are in this data set, for other parts of Frostline."""
        if self._selected is None:
            whole = self.source.manifest(self._on_event)
            if self._label is not None or self._declared:  # of labels that are said twice, these count
                whole = replace(whole, left_out=tuple(left for left in whole.left_out if not left.is_label))
            left = describe_left_out(self._url, whole.left_out)
            if left is not None:
                self._on_event(left)
            if self._label is not None:
                whole = relabel(whole, self._label, self._url)
            if not self.declares_targets and self._label is None:
                check_classes(whole.columns.table, self._url)
            self._selected = Selection(whole, None)
        return self._selected

    @property
    def manifest(self) -> Manifest:
        """The manifest of these samples: their table, and how it was made."""
        return self.selection.manifest

    @property
    def samples(self) -> SampleTable:
        """The samples as columns, in the order in which the format lists them."""
        return self.manifest.samples

    @property
    def names(self) -> Sequence[str]:
        """Name of each sample's object; in a ready format, of the object that it was made from."""
        return self.manifest.names

    @property
    def has_targets(self) -> bool:
        """True if the samples have masks, which a loader gives as ``batch.targets``."""
        return self.selection.whole_samples.has_targets

    @property
    def declares_targets(self) -> bool:
        """True if the argument ``targets`` was given; masks are then targets only if it names them."""
        return self._declared is not None

    @property
    def target_columns(self) -> TargetColumns | None:
        """The declared targets of these samples; None where no column was declared.

        Raises:
            SettingError: there is no such column.
            DataError: a column's values cannot be targets, or samples have none where they must.
        """
        if not self._declared:
            return None
        whole = self.selection.whole
        columns = whole.columns
        specs = specs_of(self._declared, columns.table, self._url, whole.named)
        return TargetColumns(columns, self.selection.rows, specs, is_single=self._is_single)

    @property
    def whole(self) -> "Dataset":
        """The data set that this one is a part of."""
        return self._with(None)

    def refresh(self) -> "Dataset":
        """These samples as listed now, with ``on_change="rebuild"``; otherwise this data set unchanged.

        A subset keeps its samples, without those that have been removed; new samples are in no subset.
        """
        if self.source.on_change != "rebuild" or (self._selected is None and self.source.relist):
            return self
        now = Dataset(self._url, **{**self._asked, "relist": True}, on_event=self._on_event)
        if self._selected is None or self._selected.rows is None:
            return now
        return now.take(rows_of_ids(now.samples.ids, self.samples.ids))

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, indexed by label. A subset has all classes of the whole data set."""
        return self.manifest.classes

    @property
    def digest(self) -> str:
        """SHA-256 that identifies exactly these samples."""
        return self.manifest.digest

    def take(self, rows: int | Sequence[int] | npt.NDArray[np.int64] | npt.NDArray[np.bool_]) -> "Dataset":
        """Some of the samples, as a data set of its own.

        Args:
            rows: number of samples to take from the beginning; or rows to take, in this order, negative ones counted
                from the end; or a boolean mask with a value for each sample.

        Raises:
            IndexError: there is no such row.
            SettingError: a mask has another length, or these are neither rows nor a mask.
        """
        if isinstance(rows, int | np.integer):
            return self[: max(0, int(rows))]
        found = np.asarray(rows)
        if not found.size and found.ndim == 1:
            found = found.astype(np.int64)
        if found.ndim != 1 or found.dtype.kind not in "iub":
            write = ": write data.select(\"label == 'cat'\")" if found.dtype == np.object_ else ""
            raise SettingError(f"rows are whole numbers, or a mask of truth values, not {type(rows).__name__}{write}")
        if found.dtype != np.bool_ and found.size:
            first, last = int(found.min()), int(found.max())
            self._row(last)
            if self._row(first) != first:
                found = np.where(found < 0, found + len(self), found)
        return self._with(self.selection.take(found))

    def with_transform(self, transform: Transform | None) -> "Dataset":
        """The same samples with another preprocessing, as the argument ``transform`` of this class.

        Raises:
            SettingError: The transform takes no image.
        """
        same = self._with(self.selection.rows)
        same.transform = transform
        return same

    def concatenate(self, *others: "Dataset") -> "Dataset":
        """These samples, then those of other subsets of the same data; a sample in several comes several times.

        Raises:
            SettingError: a subset belongs to another data set, or to another listing of it.
        """
        for other in cast(tuple[object, ...], others):
            if not isinstance(other, Dataset):
                raise SettingError(
                    f"data sets are joined with data sets, not {type(other).__name__}: write Dataset(...)"
                )
        if not all(self._is_listed_like(other) for other in others):
            raise SettingError(f"only parts of {self.url} as it is listed now can be joined with it")
        return self._with(self.selection.concatenate(other.selection for other in others))

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns that every sample has, metadata among them."""
        return tuple(self.selection.whole.columns.table.column_names)

    def with_columns(self, columns: Mapping[str, Sequence[Any]]) -> "Dataset":
        """The same samples with further columns, such as patient numbers, for ``select`` and ``split``.

        The columns are not saved.

        Args:
            columns: values by name, one for each sample in the samples' order.

        Raises:
            SettingError: a column has another length or a name that is taken, or this is a part of a data set.
        """
        same = Dataset(self._url, **self._asked)
        same._selected = Selection(self.selection.with_columns(columns), None)
        return same

    def select(self, chosen: str | pc.Expression | Sequence[int] | npt.NDArray[np.int64]) -> "Dataset":
        """The samples for which an expression is true, in their order; or the samples at the given rows, as ``take``.

        Args:
            chosen: text such as ``"label == 'glass' and width >= 200"`` (see ``datasets.selection``), or an
                expression of Arrow, in which labels are numbers: ``pyarrow.compute.field("width") >= 200``; or rows,
                such as ``range(10)``.

        Raises:
            IndexError: there is no such row.
            SettingError: The expression cannot be parsed, or does not fit the columns.
        """
        if isinstance(chosen, str | pc.Expression):
            return self._with(self.selection.where(chosen))
        return self.take(chosen)

    @overload
    def split(
        self, shares: float, seed: int = 0, *, by: str | None = None, balanced: bool = True
    ) -> "tuple[Dataset, Dataset]": ...

    @overload
    def split(
        self, shares: Mapping[str, float], seed: int = 0, *, by: str | None = None, balanced: bool = True
    ) -> "dict[str, Dataset]": ...

    @add_hints
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
            The part to train on and the part held out, or the parts by their names. Python warns where classes are too
            small to be divided by the share to hold out.

        Raises:
            SettingError: the shares or the seed make no sense, or there is no such column.
            DataError: a sample has no value in that column, or a part would be empty.
        """
        check_type("seed", seed, int)
        if isinstance(shares, Mapping):
            parts = self.selection.divide(list(shares.values()), seed, by=by, balanced=balanced)
            found = {name: self._part_number(parts, number) for number, name in enumerate(shares)}
            empty = [name for name, part in found.items() if not len(part) and shares[name]]
            if empty and len(self):
                raise DataError(f"the part {empty[0]!r} would be empty: give it a larger share, or split fewer ways")
            return found
        if isinstance(shares, Sequence) or not 0 <= shares < 1:
            raise SettingError(
                f"shares is the share to hold out, from 0 to below 1, not {shares}: write data.split(0.2), or "
                'data.split({"train": 0.8, "test": 0.2})'
            )
        train, held_out = self._split_in_two(shares, seed, by=by, balanced=balanced)
        counts = self.selection.per_label if by is None and balanced and self.target_columns is None else {}
        if why := few_of_a_class(counts, shares, len(held_out) / max(1, len(self))):
            warn_caller(why)
        return train, held_out

    def _split_in_two(
        self, share: float, seed: int = 0, *, by: str | None = None, balanced: bool = True
    ) -> "tuple[Dataset, Dataset]":
        """See ``split``, by a share to hold out; nothing warns of small classes."""
        parts = self.selection.divide([1 - share, share], seed, by=by, balanced=balanced)
        return self._part_number(parts, 0), self._part_number(parts, 1)

    def split_by(self, column: str) -> "dict[str, Dataset]":
        """One subset for each value of a column, such as folds, in a dict by the value as text.

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
        """Save subsets of this data set by name, beside its manifest; return the place.

        They are ``data["train"]`` from then on, and ``--split train`` on the command line, as long as the data does not
        change: for everyone if manifests are kept beside the data, else for this user. The order of the samples is not
        saved.

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
        """The names of the splits that the data defines, and of those that were saved."""
        return tuple(dict.fromkeys((*self.splits_brought, *self._named.load())))

    @property
    def splits_brought(self) -> tuple[str, ...]:
        """The names of the splits that the data defines by a column ``split`` or by names of folders and files."""
        return self.selection.whole.splits

    @overload
    def __getitem__(self, name: str | slice | list[int]) -> "Dataset": ...

    @overload
    def __getitem__(self, name: SupportsIndex) -> tuple[Any, Any]: ...

    def __getitem__(self, name: str | slice | list[int] | SupportsIndex) -> "Dataset | tuple[Any, Any]":
        """A split by its name, a subset by a slice or rows, or one sample by its row.

        A split of a subset has the samples that are in both; a saved split takes precedence over one that the data
        defines. A sample is a pair ``(x, target)``, as in torchvision. ``x`` is a NumPy array ``float32[C, H, W]`` if
        ``transform`` consists of steps, else the result of its function. ``target`` is the declared target, else the
        mask, else the number of the class, -1 if there is none. The sample is read and decoded by this call, which
        suits a look at the data and PyTorch's ``DataLoader``; ``frostline.loader`` reads ahead.

        Raises:
            IndexError: there is no sample at that place.
            SettingError: there is no split of that name, a node listed the data and none of it can be read from here,
                or steps are random.
            SampleError: the sample cannot be read or decoded.
        """
        if isinstance(name, str):
            return self._split(name, self._named.load())
        if isinstance(name, slice):
            return self.take(np.arange(*name.indices(len(self)), dtype=np.int64))
        rows: Any = name  # also a tensor of torch, which data sets need not know
        if isinstance(name, list) or (hasattr(rows, "ndim") and rows.ndim):
            return self.take(rows)
        return self.__getitems__([name])[0]

    def __getitems__(self, places: Sequence[SupportsIndex]) -> list[tuple[Any, Any]]:
        """Several samples by their places, as ``DataLoader`` asks for those of a batch: they are read at once."""
        rows = np.array([self._row(place) for place in places], np.int64)
        samples, names = self.samples.take(rows), list(take_texts(self.names, rows))
        reader = self._reader_here()
        declared = self.target_columns
        has_masks = self.has_targets if not self.declares_targets else declared is not None and declared.has_masks
        prepared = _Prepared(self._transform, self)
        found, masks = dict(reader.read(samples, names)), masks_of(samples, reader) if has_masks else {}
        pixels = [prepared.pixels(found[row], names[row], int(id)) for row, id in enumerate(samples.ids)]
        decoded = [prepared.mask(masks.get(row), samples, row) for row in range(len(rows))] if has_masks else None
        targets = samples.labels.tolist() if decoded is None else decoded
        if declared is not None:
            targets = _one_by_one(declared.at(rows, decoded))
        return [LabelledSample(pair) for pair in zip(pixels, targets, strict=True)]

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        """The samples one after another, as ``__getitem__`` gives them."""
        for start in range(0, len(self), _READ_TOGETHER):
            yield from self.__getitems__(range(start, min(len(self), start + _READ_TOGETHER)))

    def _row(self, place: SupportsIndex) -> int:
        if not hasattr(place, "__index__"):
            takes = "a data set is indexed by a number, a slice, a list of numbers or the name of a split"
            raise TypeError(f"{takes}, not {describe_value(place)}")
        row = place.__index__()
        if not -len(self) <= row < len(self):
            raise IndexError(f"index {row} is out of range: {self._url} has {len(self)} samples")
        return row % len(self)

    def _reader_here(self) -> SequentialReader:
        """What reads samples in this process, which may have been forked from another one."""
        is_forked = self._process != os.getpid()
        if self._reader is None or is_forked:
            if is_forked and not survives_fork(self._url):
                raise SettingError(
                    f"this process was forked from one that reads {self._url}, whose connections it lacks: write "
                    "DataLoader(data, multiprocessing_context='spawn'), or frostline.loader(data, batch_size=32), "
                    "which reads ahead without processes"
                )
            self._reader, self._process = reader_of(self, maximum=_READ_TOGETHER), os.getpid()
        return self._reader

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
        return self._with(self.selection.select_part(parts, number))

    @property
    def _named(self) -> NamedSplits:
        return self.source.named_splits(self.selection.whole)

    def _split(self, name: str, saved: Mapping[str, Chosen]) -> "Dataset":
        if name in saved:
            return self._with(self.selection.within(saved[name]))
        if name in self.splits_brought:
            return self.select(pc.field(SPLIT) == name)
        names = (*self.splits_brought, *saved)
        if name in self.columns:
            raise SettingError(f"{name!r} is no split but a column: write data.column({name!r})")
        if name in ("image", "images", "img", "pixel_values"):
            raise SettingError(f"{name!r} is no split: write image, label = data[0], or loader(data, batch_size=32)")
        if name in self.classes:
            raise SettingError(f'{name!r} is no split but a class: write data.select("label == {name!r}")')
        made = "and no other: frostline index --split train=0.8,val=0.2 makes them, as Dataset.save_splits does"
        known = f"only {', '.join(names)}" if names else made
        raise SettingError(f"{self._url} as it is listed now has no split {name!r}, {known}")


class _Prepared:
    """Prepares samples of a data set that are asked for by their places."""

    def __init__(self, transform: Transform | None, data: Dataset) -> None:
        self._steps: Preprocess | None = None
        if transform is None or isinstance(transform, Preprocess):
            self._steps = steps_left_of(transform or imagenet(_SIDE), data)
            if self._steps.is_random:
                raise SettingError(
                    "random steps are drawn by the seed and the epoch of a loader: write frostline.loader(data, "
                    "batch_size=32, shuffle=True, epoch=0)"
                )
        else:
            require_one_part(data)
            if data.manifest.applied is not None:
                raise SettingError(
                    f"{data.url} is a ready format, which holds prepared pixels: take steps of frostline.preprocess "
                    "as its transform"
                )
            self._function = as_function(transform)
            self._is_turned = data.manifest.is_turned

    def pixels(self, encoded: Buffer | Skipped, name: str, id: int) -> Any:
        if isinstance(encoded, Skipped):
            raise SampleError(f"{name}: {encoded.reason}")
        try:
            if self._steps is None:
                step = Decode(orientation="exif" if self._is_turned else "stored")
                return self._function(decoded_image(encoded, step, max_pixels=MAX_PIXELS))
            out = np.empty(self._steps.shape, self._steps.dtype)
            decode_into(self._steps, encoded, out, id=id, view=None)
        except SampleError as error:
            raise SampleError(f"{name}: {error}") from error
        return out

    def mask(self, encoded: Buffer | Skipped | None, samples: Samples, row: int) -> npt.NDArray[np.int64]:
        targets = samples.targets
        assert targets is not None, "masks are asked for where the data set has them"
        name = samples.objects[row]
        if encoded is None or isinstance(encoded, Skipped):
            raise SampleError(f"{name}: {'it has no mask' if encoded is None else encoded.reason}")
        size = (int(targets.widths[row]), int(targets.heights[row]))
        if self._steps is None:
            return np.asarray(open_mask(encoded, size=size, is_turned=self._is_turned)).astype(np.int64)
        out = np.empty(self._steps.shape[1:], MASK_DTYPE)
        mask_into(self._steps, encoded, out, id=int(samples.ids[row]), view=None, size=size)
        return out.astype(np.int64)


def _one_by_one(found: TargetValues) -> list[Any]:
    """The targets of some samples, one a sample."""
    if isinstance(found, dict):
        return [dict(zip(found, values, strict=True)) for values in zip(*found.values(), strict=True)]
    return list(found)


class _Subset(Protocol):
    """``torch.utils.data.Subset``."""

    dataset: Any
    indices: Any


class _Joined(Protocol):
    """``torch.utils.data.ConcatDataset``."""

    datasets: Any


DatasetLike: TypeAlias = Dataset | str | Path | _Subset | _Joined
"""What stands for a data set: itself, a path or URL, or parts of one as PyTorch divides and joins it."""


def dataset_from(data: DatasetLike, near: str | Sequence[str] | None = None, token: str | None = None) -> Dataset:
    """The data set that a caller means: itself, what lies at a path, or parts of one as PyTorch divides and joins it.

    Args:
        data: data set, path or URL, ``torch.utils.data.Subset`` of a data set, as ``random_split`` makes them, or
            ``ConcatDataset`` of parts of one data set.
        near: addresses of nodes, which list what lies at a path or URL.
        token: secret that identifies this user to them.

    Raises:
        SettingError: The argument is no data set, path or part of one, or its joined parts are of different data.
    """
    if isinstance(data, str | Path):
        nodes = () if near is None else listing_nodes([near] if isinstance(near, str) else near, str(data))
        return Dataset(data, near=nodes or None, token=token)
    kind = type(data)
    if kind.__module__ == "torch.utils.data.dataset":  # by name, since data sets need no torch
        if kind.__name__ == "Subset":
            part = cast(_Subset, data)
            return dataset_from(part.dataset).take(part.indices)
        if kind.__name__ == "ConcatDataset":
            first, *others = map(dataset_from, cast(_Joined, data).datasets)
            return first.concatenate(*others)
    if not isinstance(data, Dataset):
        raise SettingError(f"data takes a Dataset, a path or a URL, not {describe_value(data)}{data_hint(data)}")
    return data


def split_in_two(data: Dataset, share: float, seed: int) -> tuple[Dataset, Dataset]:
    """See ``Dataset.split``, by a share to hold out; nothing warns of small classes."""
    return data._split_in_two(share, seed)  # noqa: SLF001 (of this module)


def roots_of(data: Dataset) -> tuple[str, ...]:
    """What a node must serve for a data set: its URL, and if its samples are URLs, the places in which they lie.

    Raises:
        SettingError: a node listed the data, and none of it can be read from here.
    """
    data.source.require_store()
    if data.manifest.reading != URLS:
        return (data.url,)
    return tuple(dict.fromkeys((data.url, *places_in(data.manifest.columns))))


def refresh_locally(data: Dataset) -> Dataset:
    """The data set as ``Dataset.refresh`` gives it, for a copy that reads the samples from their own store.

    Raises:
        SettingError: a node listed the data, and none of it can be read from here.
    """
    data.source.require_store()
    return data.refresh()


def reader_of(data: Dataset, *, maximum: int) -> SequentialReader:
    """A reader of a data set's samples in this process.

    Args:
        data: data set to read.
        maximum: requests under way at once.

    Raises:
        SettingError: a node listed the data, and none of it can be read from here.
    """
    return SequentialReader(data.url, data.manifest.reading, maximum=maximum, roots=roots_of(data))


def steps_left_of(preprocess: Preprocess, data: Dataset) -> Preprocess:
    """What is left to do of a preprocessing on a data set's samples: all of it, but where they are a ready format.

    Raises:
        SettingError: the ready format was made with other steps, or the parts of samples are called otherwise.
    """
    check_inputs(data.source.format, preprocess)
    try:
        return steps_left(preprocess, data.manifest.applied, is_turned=data.manifest.is_turned)
    except SettingError as error:
        preset = preset_of(preprocess)
        if preset is None:
            raise
        raise SettingError(f"{error}: frostline ingest SRC DEST --preprocess {preset}") from error


def require_one_part(data: Dataset) -> None:
    """Make sure that each sample is one part, as it has to be to be copied or checked.

    Raises:
        SettingError: samples have several parts.
    """
    if part_names(data.source.format):
        raise SettingError(
            f"samples of {data.url} have several parts, and only those of one are copied or checked: name one column, "
            "as in column='image'"
        )
