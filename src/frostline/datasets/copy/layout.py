"""Plans what objects hold some samples in another format: their names, their metadata, and images scaled on the way."""

import hashlib
import io
import json
import tarfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from frostline.core import Samples, Skipped, Targets
from frostline.core.errors import SampleError, SettingError
from frostline.core.events import ColumnsDropped, Observer, SetupWarning
from frostline.datasets.dataset import Dataset, reader_of
from frostline.datasets.formats.base import COLUMNS, TARGET_COLUMNS
from frostline.datasets.formats.folders import SAMPLE_SUFFIXES, are_masks, names_a_class, suffix_of
from frostline.datasets.formats.labels import CLASSES, SOURCE, SPLIT, are_numbers, class_table, is_split, split_of
from frostline.datasets.formats.left_out import is_hidden
from frostline.datasets.formats.tables import ORIENTATION, json_values, plain_column, read_back
from frostline.datasets.formats.webdataset import CLASS_MEMBER, TYPE_MEMBER
from frostline.datasets.reading import Workers, masks_of
from frostline.preprocess.apply import MAX_PIXELS, Applied, scaled_mask, unpack_record
from frostline.preprocess.images import decode_image, has_orientation, size_of
from frostline.preprocess.steps import Decode
from frostline.stores.protocols import Buffer

__all__ = (
    "PACKERS",
    "CopySample",
    "FolderNames",
    "ImageAndMasks",
    "Metadata",
    "OutputObject",
    "Packer",
    "Scaling",
    "SourceFacts",
    "carried_names",
    "check_side",
    "divide_samples",
    "metadata_in",
    "packer_named",
    "picture_of",
    "say_orientation",
    "say_what_is_left",
    "scale_image",
    "splits_in_folders",
    "suffix_by_content",
)


_IMAGE = pa.struct({"bytes": pa.binary(), "path": pa.string()})
# A row group is what one read of a cell decodes.
_GROUP_ROWS = 64
# What stands behind a length and ftyp.
_BRANDS = {b"avif": ".avif", b"avis": ".avif", b"heic": ".heic", b"heix": ".heic", b"mif1": ".heic"}
# What stands behind RIFF and a length.
_RIFFS = {b"WEBP": ".webp", b"WAVE": ".wav"}
# The first bytes of what ``preprocess`` reads.
_STARTS = (
    (b"\xff\xd8\xff", ".jpg"),
    (b"\x89PNG\r\n\x1a\n", ".png"),
    (b"BM", ".bmp"),
    (b"II*\0", ".tif"),
    (b"MM\0*", ".tif"),
    (b"GIF8", ".gif"),
    (b"\0\0\1\0", ".ico"),
    (b"\0\0\0\x0cjP  ", ".jp2"),
    (b"\xff\x4f\xff\x51", ".j2k"),
    (b"P4", ".pbm"),
    (b"P5", ".pgm"),
    (b"P6", ".ppm"),
    (b"\x93NUMPY", ".npy"),
    (b"fLaC", ".flac"),
    (b"OggS", ".ogg"),
)


class OutputObject(NamedTuple):
    """An object to write."""

    object: str
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CopySample:
    """A sample on its way from one format to another.

    Attributes:
        id: the id in the source, which names it in the destination where a name is needed.
        name: the name in the source.
        label: number of its class; -1 where it has none.
        about: the metadata columns, as JSON has them.
        encoded: the image.
        is_remade: the image was made of kept pixels, so that it may be of another kind than its name says.
        object: name of the image in class folders, without its suffix; empty where the id names it.
        mask: the encoded mask; empty where the sample has none, and None where no sample of the data set has a mask.
        split: the split that the data brings; empty where it brings none.
    """

    id: int
    name: str
    label: int
    about: Mapping[str, Any]
    encoded: bytes
    is_remade: bool = False
    object: str = ""
    mask: bytes | None = None
    split: str = ""

    @property
    def source(self) -> str:
        """The name that it had before it was first copied."""
        return str(self.about.get(SOURCE) or self.name)

    @property
    def suffix(self) -> str:
        """What kind of image or sound it is: as its name says, else as its first bytes do."""
        named = "" if self.is_remade else suffix_of(self.name)
        return named if named in SAMPLE_SUFFIXES else suffix_by_content(self.encoded)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SourceFacts:
    """What holds of all samples of a copy's source.

    Attributes:
        classes: names, by label.
        kinds: types of the metadata columns that go along.
        named: names that the numbers of these stand for, by the column.
        is_turned: images are turned as their EXIF data says.
    """

    classes: Sequence[str]
    kinds: Mapping[str, pa.DataType]
    named: Mapping[str, Sequence[str]]
    is_turned: bool


class Packer(Protocol):
    """Makes the objects of one part of a data set; the same part always gives the same bytes."""

    @property
    def keeps_metadata(self) -> bool:
        """Metadata columns go with the samples."""

    @property
    def keeps_schema(self) -> bool:
        """How columns are read goes with the samples: whether images are turned, and names that numbers stand for."""

    def class_tables(self, classes: Sequence[str], present: Sequence[str]) -> Iterable[OutputObject]:
        """The object beside the parts that has the table of classes, where they do not say it themselves.

        Args:
            classes: names, by label.
            present: classes that have samples in the copy.
        """

    def pack(self, part: int, samples: Sequence[CopySample], source: SourceFacts) -> Iterable[OutputObject]:
        """The objects of a part.

        Args:
            part: the number.
            samples: samples of the part, in the source's order.
            source: facts that hold of all samples.

        Raises:
            SettingError: the format cannot hold these samples.
        """


class ClassFolderLayout:
    """An object a sample, in the folder of its class. Metadata is left behind: there is no place for it.

    Where classes are numbered otherwise than in the order of their names, some have no samples, or are called as splits
    are, ``classes.json`` beside the folders says so.

    Names are those of the source, as ``datasets.copy.layout`` says. Where there are masks, images and masks lie
    side by side, and are called by their ids: ``images/cat/1a.jpg`` and ``masks/cat/1a.png``, those of a split
    ``images/train/cat/1a.jpg``.
    """

    keeps_metadata = keeps_schema = False

    def class_tables(self, classes: Sequence[str], present: Sequence[str]) -> Iterable[OutputObject]:
        """See ``Packer.class_tables``: folders alone are numbered in the order of their names."""
        is_clear = sorted(present) == list(classes) and all(split_of(name) is None for name in classes)
        return [] if is_clear else [OutputObject(CLASSES, class_table(classes))]

    def pack(
        self,
        part: int,  # noqa: ARG002
        samples: Sequence[CopySample],
        source: SourceFacts,
    ) -> Iterable[OutputObject]:
        """See ``Packer.pack``."""
        classes = source.classes
        for sample in samples:
            if sample.mask is not None:
                yield from self._pair(sample, sample.mask, classes[sample.label] if sample.label >= 0 else "")
                continue
            if are_masks(tuple(classes)):
                raise SettingError(
                    f"folders of the classes {', '.join(classes)[:200]} would be taken for images and their masks: use "
                    "another --format"
                )
            if sample.label < 0:
                raise SettingError(f"{sample.name} has no label, so that it belongs to no folder: use another --format")
            yield OutputObject(self._place(sample, classes[sample.label]), sample.encoded)

    def _pair(self, sample: CopySample, mask: bytes, folder: str) -> Iterable[OutputObject]:
        key = "/".join(filter(None, (sample.split, folder, f"{sample.id:016x}")))
        if not names_a_class(folder) or is_hidden(f"{folder}/"):
            raise SettingError(f"the class {folder!r} cannot be the name of a folder of images: use another --format")
        image, beside = f"images/{key}{sample.suffix}", f"masks/{key}{suffix_by_content(mask)}"
        yield OutputObject(image, sample.encoded)
        if mask:
            yield OutputObject(beside, mask)

    def _place(self, sample: CopySample, folder: str) -> str:
        if "/" in folder or is_hidden(f"{folder}/"):
            raise SettingError(f"the class {folder!r} cannot be the name of a folder: use another --format")
        if sample.split and is_split(folder):
            raise SettingError(f"the class {folder!r} would be taken for another split: use another --format")
        if not sample.object:
            return "/".join(filter(None, (sample.split, folder, f"{sample.id:016x}{sample.suffix}")))
        return sample.object if suffix_of(sample.object) == sample.suffix else sample.object + sample.suffix


class Shards:
    """A tar a part, as WebDataset has them: ``key.jpg``, ``key.mask.png``, ``key.cls`` and ``key.json``.

    ``.cls`` is the number of the class, as other readers of such shards expect; its name is in the JSON, with the
    metadata, and Frostline goes by that. All classes by their numbers are in ``__classes__``, and the types of columns
    that JSON has not, such as dates, in ``__types__``.
    """

    keeps_metadata, keeps_schema = True, False

    def class_tables(self, classes: Sequence[str], present: Sequence[str]) -> Iterable[OutputObject]:  # noqa: ARG002
        """See ``Packer.class_tables``: each shard has the table."""
        return ()

    def pack(self, part: int, samples: Sequence[CopySample], source: SourceFacts) -> Iterable[OutputObject]:
        """See ``Packer.pack``."""
        file, classes = io.BytesIO(), source.classes
        labels: Sequence[Any] = range(len(classes)) if are_numbers(classes) else classes
        with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
            if classes:
                _add(tar, CLASS_MEMBER, class_table(classes))
            if further := {name: kind for name, kind in source.kinds.items() if not _is_of_json(kind)}:
                _add(tar, TYPE_MEMBER, pa.schema(further).serialize().to_pybytes())
            for sample in samples:
                # A label that is null says that there is none, whatever other fields are called.
                about = {
                    **sample.about,
                    SOURCE: sample.source,
                    "label": labels[sample.label] if sample.label >= 0 else None,
                }
                _add(tar, f"{sample.id:016x}{sample.suffix}", sample.encoded)
                if sample.mask:
                    _add(tar, f"{sample.id:016x}.mask{suffix_by_content(sample.mask)}", sample.mask)
                if sample.label >= 0:
                    _add(tar, f"{sample.id:016x}.cls", str(sample.label).encode())
                _add(tar, f"{sample.id:016x}.json", json.dumps(about, sort_keys=True, default=str).encode())
        yield OutputObject(f"part-{part:06d}.tar", file.getvalue())


class Tables:
    """A Parquet file a part, with the columns that Hugging Face gives an image and its class, and metadata.

    Masks have a column of their own. A metadata column called ``image`` or ``mask`` gets ``meta_`` before its name.
    ``datasets`` turns images as their EXIF data says; where the source's are not turned, the schema's metadata says so.
    """

    keeps_metadata = keeps_schema = True

    def class_tables(self, classes: Sequence[str], present: Sequence[str]) -> Iterable[OutputObject]:  # noqa: ARG002
        """See ``Packer.class_tables``: each file has the table in its schema."""
        return ()

    def pack(self, part: int, samples: Sequence[CopySample], source: SourceFacts) -> Iterable[OutputObject]:
        """See ``Packer.pack``."""
        images = [{"bytes": sample.encoded, "path": f"{sample.id:016x}{sample.suffix}"} for sample in samples]
        masks = [_cell(sample) for sample in samples if sample.mask is not None]
        own = ("image", "mask") if masks else ("image",)
        names = sorted({name for sample in samples for name in sample.about} - {SOURCE})
        called = {name: _free(name, names, own) for name in names}
        table = pa.table(
            {
                "image": pa.array(images, _IMAGE),
                **({"mask": pa.array(masks, _IMAGE)} if masks else {}),
                "label": pa.array([sample.label if sample.label >= 0 else None for sample in samples], pa.int64()),
                SOURCE: pa.array([sample.source for sample in samples], pa.string()),
                **{
                    called[name]: read_back([sample.about.get(name) for sample in samples], source.kinds[name])
                    for name in names
                },
            }
        )
        features: dict[str, Any] = {name: {"_type": "Image"} for name in own}
        features |= {called[name]: _class_label(source.named[name]) for name in names if name in source.named}
        features["label"] = _class_label(source.classes)
        about = {b"huggingface": json.dumps({"info": {"features": features}}).encode()}
        about |= {} if source.is_turned else {ORIENTATION: b"stored"}
        file = io.BytesIO()
        # Images do not get smaller, and without a codec a cell is found by its place.
        pq.write_table(
            table.replace_schema_metadata(about),
            file,
            compression={name: "none" if _is_of(name, own) else "zstd" for name in _leaves(table.schema)},
            row_group_size=_GROUP_ROWS,
            use_dictionary=[name for name in _leaves(table.schema) if not _is_of(name, own)],
        )
        yield OutputObject(f"part-{part:06d}.parquet", file.getvalue())


PACKERS: Mapping[str, Packer] = {"original": ClassFolderLayout(), "parquet": Tables(), "webdataset": Shards()}
"""By the name of the format."""


def packer_named(format: str) -> Packer:
    """The packer of a format.

    Raises:
        SettingError: no packer makes such a format.
    """
    if format not in PACKERS:
        raise SettingError(f"samples cannot be packed as {format!r}, only as {', '.join(PACKERS)}")
    return PACKERS[format]


def divide_samples(lengths: npt.NDArray[np.int64], *, max_bytes: int, max_rows: int) -> list[range]:
    """Cut samples into parts that follow from their lengths alone; one that is longer than a part stands alone.

    Args:
        lengths: ``int64[n]``, encoded bytes of each; less than 0 counts as nothing.
        max_bytes: maximum size of a part in bytes.
        max_rows: maximum number of rows of a part.
    """
    parts: list[range] = []
    start = 0
    while start < len(lengths):
        # From here alone: the column may lie in a file, and be larger than what memory is there.
        ends = np.cumsum(np.maximum(lengths[start : start + max_rows], 0))
        stop = start + max(1, int(np.searchsorted(ends, max_bytes, side="right")))
        parts.append(range(start, stop))
        start = stop
    return parts


def suffix_by_content(encoded: bytes) -> str:
    """The suffix that a sample's first bytes ask for; ``.jpg`` where they are of no known kind."""
    if encoded[:4] == b"RIFF" and encoded[8:12] in _RIFFS:
        return _RIFFS[encoded[8:12]]
    if encoded[4:8] == b"ftyp" and encoded[8:12] in _BRANDS:
        return _BRANDS[encoded[8:12]]
    return next((suffix for start, suffix in _STARTS if encoded.startswith(start)), ".jpg")


def _add(tar: tarfile.TarFile, name: str, contents: bytes) -> None:
    info = tarfile.TarInfo(name)  # with neither time nor owner, so that the same samples give the same bytes
    info.size = len(contents)
    tar.addfile(info, io.BytesIO(contents))


def _cell(sample: CopySample) -> dict[str, object] | None:
    return {"bytes": sample.mask, "path": f"{sample.id:016x}{suffix_by_content(sample.mask)}"} if sample.mask else None


def _is_of(leaf: str, columns: Sequence[str]) -> bool:
    return leaf.partition(".")[0] in columns


def _free(name: str, names: Sequence[str], own: Sequence[str]) -> str:
    """What a metadata column is called beside the columns of images and the other ones."""
    free = name
    while name in own and free in names:
        free = f"meta_{free}"
    return free


def _class_label(names: Sequence[str]) -> dict[str, Any]:
    """The feature of numbers that stand for names of classes, as ``datasets`` has it."""
    return {"_type": "ClassLabel", "names": list(names)}


def _leaves(schema: pa.Schema) -> list[str]:
    return [
        f"{field.name}.{inner.name}" if inner is not None else field.name
        for field in schema
        for inner in (list(field.type) if pa.types.is_struct(field.type) else [None])
    ]


_MAX_BYTES, _MAX_BYTES_A_PART = 1000, 200
_AT_ONCE = 1 << 16


class FolderNames:
    """Where each sample of a data set lies in class folders.

    It is called as in the source, or as it was before its first copy, and lies in the folder of its class, or of split
    and class where the data brings splits. What could meet another sample's name, and what is no name for a file, is
    called by the sample's id.
    """

    def __init__(self, source: Dataset) -> None:
        self._source = source
        self._root = f"{source.url}/"
        self._has_sources = SOURCE in source.columns and not source.column(SOURCE).null_count
        self._has_splits = splits_in_folders(source) is not None
        whole = np.zeros(len(source), np.int64)
        stems = np.zeros(len(source), np.int64)
        for start in range(0, len(source), _AT_ONCE):
            for row, place in enumerate(self._places(start, min(start + _AT_ONCE, len(source))), start):
                whole[row] = _number(place)
                # Another place that gets this suffix would be the same.
                stems[row] = _number(place[: -len(suffix)]) if (suffix := _suffix(place)) else -1
        values, counts = np.unique(whole, return_counts=True)
        self._unsure = np.union1d(values[counts > 1], np.intersect1d(values, stems))

    def objects(self, start: int, stop: int) -> Sequence[str]:
        """The places of some samples, their suffixes as they were; empty for those that are called by their ids."""
        places = list(self._places(start, stop))
        is_unsure = np.isin([_number(place) for place in places], self._unsure)
        return ["" if bad or not _is_name(place) else place for place, bad in zip(places, is_unsure, strict=True)]

    def _places(self, start: int, stop: int) -> Iterator[str]:
        rows = np.arange(start, stop, dtype=np.int64)
        part = self._source.take(rows)
        names = part.column(SOURCE).to_pylist() if self._has_sources else list(part.names)
        splits = part.column(SPLIT).to_pylist() if self._has_splits else [""] * len(rows)
        classes = self._source.classes
        for name, split, label in zip(names, splits, part.samples.labels.tolist(), strict=True):
            yield _place(name.removeprefix(self._root), split, classes[label] if label >= 0 else "")


def splits_in_folders(source: Dataset) -> pa.ChunkedArray | None:
    """The splits of samples that folders can say; None where a data set brings none, or one that they cannot.

    Folders of images and of masks say those alone that are called as splits are.
    """
    brought = source.splits_brought
    if not brought or (source.has_targets and not all(map(is_split, brought))):
        return None
    splits = source.column(SPLIT)
    return None if splits.null_count else splits.cast(pa.string())


def _place(name: str, split: str, folder: str) -> str:
    """A name within the folders of its split and its class, which it may have already."""
    first, _, rest = name.partition("/")
    if split and first.lower() == split.lower():
        return name if rest.startswith(f"{folder}/") else f"{split}/{folder}/{rest}"
    inner = name if name.startswith(f"{folder}/") else f"{folder}/{name}"
    return f"{split}/{inner}" if split else inner


def _suffix(place: str) -> str:
    suffix = suffix_of(place)
    return suffix if suffix in SAMPLE_SUFFIXES else ""


def _number(text: str) -> int:
    digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _is_name(place: str) -> bool:
    """Whether stores and systems of files take it, and listings show it."""
    return len(place.encode(errors="surrogatepass")) <= _MAX_BYTES and all(
        part.isprintable()
        and not part.startswith(".")
        and 0 < len(part.encode()) <= _MAX_BYTES_A_PART
        and not set(part) & set('\\:*?"<>|')
        for part in place.split("/")
    )


_TIME = pa.timestamp("ms")
_JSON = (pa.int64(), pa.float64(), pa.bool_(), pa.string(), pa.large_string())
_KINDS = {pa.int64(): "bigint", pa.float64(): "double", pa.bool_(): "boolean", pa.string(): "text", _TIME: "timestamp"}


def metadata_in(columns: Sequence[str]) -> tuple[str, ...]:
    """The columns of a data set that are not of its samples' own."""
    return tuple(name for name in columns if name not in COLUMNS.names and name not in TARGET_COLUMNS.names)


def carried_names(source: Dataset) -> Mapping[str, Sequence[str]]:
    """The names that numbers of metadata columns stand for, as far as a schema can say so: not those in lists."""
    kinds = source.manifest.columns.table.schema
    return {
        name: names
        for name, names in source.manifest.named.items()
        if names and name in kinds.names and pa.types.is_integer(kinds.field(name).type)
    }


def say_what_is_left(
    source: Dataset, on_event: Observer, left: Sequence[str] | None = None, carried: Collection[str] = ()
) -> None:
    """Tell which metadata columns of a data set, or names of their values, stay behind, before a copy is made of it.

    Args:
        source: data set that has the metadata.
        on_event: function that is called with an event about them, if there are any.
        left: the names; None for all that there are.
        carried: columns whose values' names go along.
    """
    columns = metadata_in(source.columns) if left is None else tuple(left)
    if columns:
        on_event(ColumnsDropped(url=source.url, columns=columns))
    behind = {*columns, *carried}
    if named := [name for name in source.manifest.named if name in source.columns and name not in behind]:
        reason = (
            f"of {', '.join(named)} a copy has the numbers, and not the names that they stand for: those of the label "
            "go along, which label= chooses"
        )
        on_event(SetupWarning(reason=reason))


def say_orientation(source: Dataset, side: int | None, on_event: Observer) -> None:
    """Tell that a copy of encoded images is read otherwise than its source, before it is made; if it is.

    Args:
        source: data set whose own reader may turn images as their EXIF data says.
        side: side to which images are scaled, which turns them; None leaves their bytes as they are.
        on_event: function that is called with each event.
    """
    if source.manifest.is_turned and side is None:
        reason = (
            f"{source.url} is read as Hugging Face's datasets does it, which turns images as their EXIF data says; the "
            "copy keeps their bytes and is read without that: declare Decode(orientation='exif') for the same pixels"
        )
        on_event(SetupWarning(reason=reason))


class Metadata:
    """The metadata columns of a data set that hold one plain value a sample; tables of CQL have five types of them.

    Attributes:
        nested: names of the columns that are left out because their values are lists or the like.
    """

    def __init__(self, source: Dataset) -> None:
        names = metadata_in(source.columns)
        columns = {name: source.column(name) for name in names}
        self.nested = tuple(name for name in names if pa.types.is_nested(columns[name].type))
        self._columns = {name: plain_column(columns[name]) for name in names if name not in self.nested}

    @property
    def kinds(self) -> Mapping[str, str]:
        """Type of each column, in the words of CQL, by its name."""
        return {name: _KINDS[_in_cql(column).type] for name, column in self._columns.items()}

    def without(self, names: Sequence[str]) -> "Metadata":
        """The metadata without some columns."""
        rest = object.__new__(Metadata)
        rest.nested = self.nested
        rest._columns = {name: column for name, column in self._columns.items() if name not in names}
        return rest

    def rows(self, start: int, stop: int) -> list[tuple[Any, ...]]:
        """The values of some samples as a table of CQL has them, each in the order of the columns."""
        values = [_in_cql(column).slice(start, stop - start).to_pylist() for column in self._columns.values()]
        return list(zip(*values, strict=True)) if values else [()] * (stop - start)

    def table(self, start: int, stop: int) -> Mapping[str, pa.ChunkedArray]:
        """The columns of some samples, by name."""
        return {name: column.slice(start, stop - start) for name, column in self._columns.items()}


def _is_of_json(kind: pa.DataType) -> bool:
    """Whether JSON tells values of a type from those of others, or there are none."""
    return pa.types.is_dictionary(kind) or pa.types.is_nested(kind) or pa.types.is_null(kind) or kind in _JSON


def _in_cql(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """A column in one of the five types; texts stand for what the others cannot hold whole."""
    if pa.types.is_timestamp(column.type):
        with suppress(pa.ArrowInvalid):  # finer than what a table has
            return column.cast(pa.timestamp("ms", column.type.tz)).cast(_TIME)
    if column.type in _KINDS:
        return column
    return pa.chunked_array([[None if value is None else str(value) for value in json_values(column)]], pa.string())


def picture_of(applied: Applied, record: bytes | memoryview) -> bytes:
    """A PNG with the pixels of a record, grey or of three colours.

    Of 16-bit floats, which are rounded, it has the pixels from which they were computed: half the distance of two
    levels of 8 bits is four times the rounding or more, where the mean is one of them, so that the nearest is right.

    Raises:
        SampleError: the record is damaged, or no pixels give such floats.
    """
    kept = unpack_record(applied.stored, record)
    pixels = _levels_of(applied, kept) if kept.dtype == np.float16 else kept.astype(np.uint8, copy=False)
    file = BytesIO()
    Image.fromarray(pixels if pixels.shape[2] > 1 else pixels[:, :, 0]).save(file, "PNG")
    return file.getvalue()


def _levels_of(applied: Applied, kept: npt.NDArray[np.generic]) -> npt.NDArray[np.uint8]:
    levels = applied.whole.levels
    assert levels is not None, "the steps of a ready format begin with images"
    planes = kept.astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):  # what is no pixel is found below
        for plane, mean, std in zip(planes, levels.mean, levels.std, strict=True):
            np.rint(plane * np.float32(std) + np.float32(mean), out=plane)
        pixels = np.ascontiguousarray(np.nan_to_num(planes).clip(0, 255).astype(np.uint8).transpose(1, 2, 0))
    again = np.empty(kept.shape, np.float32)
    levels.into(pixels, again)
    if not np.array_equal(again.astype(np.float16), kept):
        raise SampleError("no pixels give these 16-bit floats: make the copy from the images")
    return pixels


# At 95 of 100 what the codec loses is below what scaling changes.
_QUALITY = 95


def scale_image(encoded: bytes | memoryview, shorter_side: int, *, is_turned: bool = False) -> bytes:
    """Scale an image so that its shorter side has at most so many pixels.

    One that is small enough, and not to be turned, keeps its bytes. Others become JPEG where they were JPEG, and PNG
    elsewhere, in the orientation in which they are stored, or with ``is_turned`` in that which their EXIF data says;
    scaling is bicubic with antialiasing, as in ``preprocess.Resize``.

    Raises:
        SampleError: the image is broken, too large or of a kind that is not read.
    """
    width, height = size_of(encoded)
    is_small = 0 < min(width, height) <= shorter_side
    if is_small and not (is_turned and has_orientation(encoded)):
        return bytes(encoded)
    image = decode_image(encoded, Decode(orientation="exif" if is_turned else "stored"), max_pixels=MAX_PIXELS)
    share = 1 if is_small else shorter_side / min(image.size)
    size = (round(image.width * share), round(image.height * share))
    file = BytesIO()
    kind = "JPEG" if bytes(encoded[:2]) == b"\xff\xd8" else "PNG"
    image.resize(size, Image.Resampling.BICUBIC).save(file, kind, quality=_QUALITY)
    return file.getvalue()


def check_side(side: int | None) -> None:
    """Check that images can be scaled to a shorter side of this many pixels.

    Raises:
        SettingError: images cannot be scaled to that side.
    """
    if side is not None and side < 1:
        raise SettingError(f"--resize must be at least 1, not {side}")


class ImageAndMasks(NamedTuple):
    """What was read of a sample.

    Attributes:
        image: the image, encoded.
        mask: the mask, encoded; None where the sample has none.
    """

    image: bytes
    mask: bytes | None


class Scaling:
    """Reads what a copy is made of.

    Of a ready format, the pixels become images without loss.

    Args:
        source: samples.
        side: pixels of the shorter side to which images and masks are scaled down; None leaves their bytes as they are.
        workers: samples read, and scaled, at once.
        stack: stack that ends the threads when it is closed.

    Raises:
        SettingError: the side makes no sense.
    """

    def __init__(self, source: Dataset, side: int | None, workers: int, stack: ExitStack) -> None:
        check_side(side)
        self.side = side
        self._applied = source.manifest.applied
        self._is_turned = source.manifest.is_turned
        self._reader = reader_of(source, maximum=workers)
        self._workers: Workers[ImageAndMasks | Skipped] = Workers(self._reader, workers, stack)

    def read(self, samples: Samples, names: Sequence[str]) -> list[ImageAndMasks | Skipped]:
        """All of these samples, in their order; of those that cannot be used, or whose masks cannot, why.

        Args:
            samples: samples to write, some megabytes of them.
            names: the names by which they are called where they are left out.
        """
        masks = masks_of(samples, self._reader)
        return self._workers.map(samples, names, partial(self._pictures, samples, names, masks))

    def _pictures(
        self,
        samples: Samples,
        names: Sequence[str],
        masks: Mapping[int, Buffer | Skipped],
        row: int,
        data: Buffer | Skipped,
    ) -> ImageAndMasks | Skipped:
        mask = masks.get(row)
        if isinstance(data, Skipped):
            return data
        if isinstance(mask, Skipped):
            return mask
        try:
            # Copied, for a view would keep all alive that was read with it.
            image = bytes(data) if self._applied is None else picture_of(self._applied, data)
            image = image if self.side is None else scale_image(image, self.side, is_turned=self._is_turned)
            return ImageAndMasks(image, None if mask is None else self._mask(samples.targets, row, mask))
        except SampleError as error:
            return Skipped(id=int(samples.ids[row]), object=names[row], reason=str(error))

    def _mask(self, targets: Targets | None, row: int, data: Buffer) -> bytes:
        if self.side is None or targets is None:
            return bytes(data)
        size = int(targets.widths[row]), int(targets.heights[row])
        return scaled_mask(data, self.side, size=size, is_turned=self._is_turned)
