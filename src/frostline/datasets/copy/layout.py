"""Decides what objects hold some samples in another format: class folders, tar shards or Parquet files. Pure."""

import io
import json
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from frostline.datasets.formats.folders import SAMPLE_SUFFIXES, suffix_of
from frostline.datasets.formats.labels import SOURCE
from frostline.datasets.formats.masks import names_a_class
from frostline.errors import SettingError

__all__ = ("PACKERS", "Loose", "OutputObject", "Packer", "divided", "packer_named", "suffix_by_content")

_IMAGE = pa.struct({"bytes": pa.binary(), "path": pa.string()})
# A row group is what one read of a cell decodes.
_GROUP_ROWS = 64
# What stands behind RIFF and a length.
_RIFFS = {b"WEBP": ".webp", b"WAVE": ".wav"}
# The first bytes of what ``preprocess`` reads.
_STARTS = (
    (b"\xff\xd8\xff", ".jpg"),
    (b"\x89PNG\r\n\x1a\n", ".png"),
    (b"BM", ".bmp"),
    (b"II*\0", ".tif"),
    (b"MM\0*", ".tif"),
    (b"P5", ".pgm"),
    (b"P6", ".ppm"),
    (b"\x93NUMPY", ".npy"),
    (b"fLaC", ".flac"),
    (b"OggS", ".ogg"),
)


class OutputObject(NamedTuple):
    """An object to write.

    Attributes:
        object: its name.
        data: its bytes.
    """

    object: str
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Loose:
    """A sample on its way from one format to another.

    Attributes:
        id: in the source, which names it in the destination where a name is needed.
        name: in the source.
        label: number of its class; -1 where it has none.
        about: its metadata columns.
        encoded: its image.
        is_remade: the image was made of kept pixels, so that it may be of another kind than its name says.
        object: name of the image in class folders, without its suffix; empty where the id names it.
        mask: encoded mask; empty where the sample has none, and None where no sample of the data set has a mask.
    """

    id: int
    name: str
    label: int
    about: Mapping[str, Any]
    encoded: bytes
    is_remade: bool = False
    object: str = ""
    mask: bytes | None = None

    @property
    def source(self) -> str:
        """The name that it had before it was first copied."""
        return str(self.about.get(SOURCE) or self.name)

    @property
    def suffix(self) -> str:
        """What kind of image or sound it is: as its name says, else as its first bytes do."""
        named = "" if self.is_remade else suffix_of(self.name)
        return named if named in SAMPLE_SUFFIXES else suffix_by_content(self.encoded)


class Packer(Protocol):
    """Makes the objects of one part of a data set; the same part always gives the same bytes."""

    @property
    def keeps_metadata(self) -> bool:
        """Metadata columns go with the samples."""

    def pack(self, part: int, samples: Sequence[Loose], classes: Sequence[str]) -> Iterable[OutputObject]:
        """The objects of a part.

        Args:
            part: its number.
            samples: samples of the part, in the source's order.
            classes: names, by label.

        Raises:
            SettingError: the format cannot hold these samples.
        """


class ClassFolderLayout:
    """An object a sample, in the folder of its class. Metadata is left behind: there is no place for it.

    Names are those of the source, as ``datasets.copy.folder_names`` says. Where there are masks, images and masks lie
    side by side, and are called by their ids: ``images/cat/1a.jpg`` and ``masks/cat/1a.png``.
    """

    keeps_metadata = False

    def pack(self, part: int, samples: Sequence[Loose], classes: Sequence[str]) -> Iterable[OutputObject]:  # noqa: ARG002
        """See ``Packer.pack``."""
        for sample in samples:
            if sample.mask is not None:
                yield from self._pair(sample, sample.mask, classes[sample.label] if sample.label >= 0 else "")
                continue
            if sample.label < 0:
                raise SettingError(f"{sample.name} has no label, so that it belongs to no folder: use another --format")
            yield OutputObject(self._place(sample, classes[sample.label]), sample.encoded)

    def _pair(self, one: Loose, mask: bytes, folder: str) -> Iterable[OutputObject]:
        key = f"{folder}/{one.id:016x}" if folder else f"{one.id:016x}"
        if not names_a_class(folder) or folder.startswith("."):
            raise SettingError(f"the class {folder!r} cannot be the name of a folder of images: use another --format")
        image, beside = f"images/{key}{one.suffix}", f"masks/{key}{suffix_by_content(mask)}"
        yield OutputObject(image, one.encoded)
        if mask:
            yield OutputObject(beside, mask)

    def _place(self, one: Loose, folder: str) -> str:
        if "/" in folder or folder.startswith("."):
            raise SettingError(f"the class {folder!r} cannot be the name of a folder: use another --format")
        if not one.object:
            return f"{folder}/{one.id:016x}{one.suffix}"
        return one.object if suffix_of(one.object) == one.suffix else one.object + one.suffix


class Shards:
    """A tar a part, as WebDataset has them: ``key.jpg``, ``key.mask.png``, ``key.cls`` and ``key.json``.

    ``.cls`` is the number of the class, as other readers of such shards expect; its name is in the JSON, with the
    metadata, and Frostline goes by that.
    """

    keeps_metadata = True

    def pack(self, part: int, samples: Sequence[Loose], classes: Sequence[str]) -> Iterable[OutputObject]:
        """See ``Packer.pack``."""
        file = io.BytesIO()
        with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for sample in samples:
                # A label that is null says that there is none, whatever other fields are called.
                about = {
                    **sample.about,
                    SOURCE: sample.source,
                    "label": classes[sample.label] if sample.label >= 0 else None,
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
    """

    keeps_metadata = True

    def pack(self, part: int, samples: Sequence[Loose], classes: Sequence[str]) -> Iterable[OutputObject]:
        """See ``Packer.pack``."""
        images = [{"bytes": sample.encoded, "path": f"{sample.id:016x}{sample.suffix}"} for sample in samples]
        masks = [_cell(sample) for sample in samples if sample.mask is not None]
        own = ("image", "mask") if masks else ("image",)
        names = sorted({name for sample in samples for name in sample.about} - {SOURCE})
        table = pa.table(
            {
                "image": pa.array(images, _IMAGE),
                **({"mask": pa.array(masks, _IMAGE)} if masks else {}),
                "label": pa.array([sample.label if sample.label >= 0 else None for sample in samples], pa.int64()),
                SOURCE: pa.array([sample.source for sample in samples], pa.string()),
                **{_free(name, names, own): pa.array([sample.about.get(name) for sample in samples]) for name in names},
            }
        )
        features: dict[str, Any] = {name: {"_type": "Image"} for name in own}
        features["label"] = {"_type": "ClassLabel", "names": list(classes)}
        said = json.dumps({"info": {"features": features}})
        file = io.BytesIO()
        # Images do not get smaller, and without a codec a cell is found by its place.
        pq.write_table(
            table.replace_schema_metadata({"huggingface": said}),
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


def divided(lengths: npt.NDArray[np.int64], *, max_bytes: int, max_rows: int) -> list[range]:
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
    return next((suffix for start, suffix in _STARTS if encoded.startswith(start)), ".jpg")


def _add(tar: tarfile.TarFile, name: str, contents: bytes) -> None:
    info = tarfile.TarInfo(name)  # with neither time nor owner, so that the same samples give the same bytes
    info.size = len(contents)
    tar.addfile(info, io.BytesIO(contents))


def _cell(one: Loose) -> dict[str, object] | None:
    return {"bytes": one.mask, "path": f"{one.id:016x}{suffix_by_content(one.mask)}"} if one.mask else None


def _is_of(leaf: str, columns: Sequence[str]) -> bool:
    return leaf.partition(".")[0] in columns


def _free(name: str, names: Sequence[str], own: Sequence[str]) -> str:
    """What a metadata column is called beside the columns of images and the other ones."""
    free = name
    while name in own and free in names:
        free = f"meta_{free}"
    return free


def _leaves(schema: pa.Schema) -> list[str]:
    return [
        f"{field.name}.{inner.name}" if inner is not None else field.name
        for field in schema
        for inner in (list(field.type) if pa.types.is_struct(field.type) else [None])
    ]
