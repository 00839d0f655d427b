"""The public data set: labelled samples at a URL, listed when they are first needed."""

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from frostline.config import cache_folder
from frostline.core import SampleTable
from frostline.datasets.columns import PartOfSamples, Rows, WholeSamples
from frostline.datasets.forms.folders import suffix_of
from frostline.datasets.forms.known import form_named
from frostline.datasets.manifest import Manifest, load_manifest
from frostline.errors import DataError, SettingError
from frostline.ordering import Chosen, Labels, Places, count_labels, split_by_class
from frostline.preprocess import Applied, Preprocess
from frostline.stores.objects import normalise_url, open_store

__all__ = ("Dataset", "DatasetStatistics")


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetStatistics:
    """What a data set holds.

    Attributes:
        samples: how many.
        per_class: name and number of samples of each class, by label.
        total_bytes: encoded bytes of all samples.
        mean_bytes: of one sample.
        min_bytes: of the smallest.
        max_bytes: of the largest.
        formats: suffix and number of samples, the commonest first.
        manifest: URL of the table.
        manifest_found: it was there already; False where it was built now.
    """

    samples: int
    per_class: tuple[tuple[str, int], ...]
    total_bytes: int
    mean_bytes: float
    min_bytes: int
    max_bytes: int
    formats: tuple[tuple[str, int], ...]
    manifest: str
    manifest_found: bool


class Dataset:
    """Labelled samples that stay where they are, in whatever form: images in class folders, or their ready form.

    Nothing is read until a property needs it; the first one that does lists the data and finds or builds
    its manifest. The value does not change after that: make another one to see new data.

    Args:
        url: ``s3://bucket/prefix``, ``file:///folder``, a plain path, or ``memory://name``.
        cache: folder for the manifests of stores that take no writes; the user's cache folder by default.
        form: name of the form that the data has, where more than one lies there; by default what it looks like.
        relist: False takes the manifest that was built last, without listing the data: at once, also where there are a
            hundred million objects. What changed since is noticed when it is read.

    Raises:
        SettingError: the URL is none that Frostline reads, or there is no such form.

    The properties that list the data raise ``DataNotFound``, ``EmptyDataset``, ``AccessDenied``, ``OutOfSpace``
    or ``StoreUnavailable``.
    """

    def __init__(
        self, url: str | Path, *, cache: Path | None = None, form: str | None = None, relist: bool = True
    ) -> None:
        self._url = normalise_url(str(url))
        self._form = None if form is None else form_named(form).name
        self._cache = cache
        self._relist = relist
        self._whole: Manifest | None = None
        self._rows: Rows | None = None
        self._part: Manifest | None = None

    def __len__(self) -> int:
        return len(self.samples)

    def __repr__(self) -> str:
        return f"Dataset({self._url!r})"

    @property
    def url(self) -> str:
        """The canonical URL of the root."""
        return self._url

    @property
    def manifest(self) -> Manifest:
        """The table of the samples, and whether it was found or built."""
        whole = self._manifest_of_all
        if self._rows is None:
            return whole
        if self._part is None:
            self._part = _part_of(whole, self._rows)
        return self._part

    @property
    def samples(self) -> SampleTable:
        """The samples as columns, ordered by name."""
        return self.manifest.samples

    @property
    def names(self) -> Sequence[str]:
        """Name of each sample's image; where the data is a ready form, of the one that it was made from."""
        return self.manifest.names

    @property
    def applied(self) -> Applied | None:
        """What was done to the images before they were kept, where the data is a ready form; else None."""
        return self.manifest.applied

    @property
    def reading(self) -> str:
        """How the bytes at the samples' addresses are found: one of ``core.READINGS``."""
        return self.manifest.reading

    def rest_of(self, preprocess: Preprocess) -> Preprocess:
        """What is left to do of a preprocessing: all of it, but where the data is a ready form.

        Raises:
            SettingError: the ready form was made with other steps.
        """
        return preprocess if self.applied is None else self.applied.rest(preprocess)

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, by label; a part of a data set keeps them all."""
        return self.manifest.classes

    @property
    def digest(self) -> str:
        """SHA-256 that names exactly these samples: of the listing, or of the part taken of it."""
        return self.manifest.digest

    @property
    def listing(self) -> str:
        """SHA-256 that names the listing that this data set, or the whole that it is a part of, was made from."""
        return self._manifest_of_all.digest

    def take(self, rows: npt.NDArray[np.int64]) -> "Dataset":
        """The samples at the given rows, in the given order, as a data set of its own."""
        rows = np.asarray(rows, np.int64)
        return self._with(Places(rows if self._rows is None else self._rows.at(rows)))

    def split(self, share: float, seed: int) -> "tuple[Dataset, Dataset]":
        """Hold out a share of every class.

        Args:
            share: of each class to hold out, from 0 to below 1.
            seed: of the draw; the same one holds out the same samples.

        Returns:
            The part to train on and the part held out; together every sample once.

        Raises:
            SettingError: the share or the seed makes no sense.
        """
        if not 0 <= share < 1:
            raise SettingError(f"the share to hold out lies from 0 to below 1, not {share}")
        parts = split_by_class(self._labels(), (1 - share, share), seed)
        return self._part_number(parts, 0), self._part_number(parts, 1)

    def require_classes(self, at_least: int = 2) -> None:
        """Make sure that there is something to tell apart.

        Raises:
            DataError: fewer classes have samples.
        """
        present = [name for name, count in self.statistics().per_class if count]
        if len(present) < at_least:
            names = ", ".join(repr(name) for name in present)
            raise DataError(f"{self._url} has {len(present)} class ({names}); training needs at least {at_least}")

    def statistics(self) -> DatasetStatistics:
        """Counts, sizes and formats of the samples."""
        samples = self.samples
        counts = self._class_counts()
        sizes = samples.lengths if len(samples) else np.zeros(1, np.int64)
        formats = Counter(suffix_of(name) for name in samples.objects)
        return DatasetStatistics(
            samples=len(samples),
            per_class=tuple(zip(self.classes, counts, strict=True)),
            total_bytes=samples.encoded_bytes,
            mean_bytes=float(sizes.mean()),
            min_bytes=int(sizes.min()),
            max_bytes=int(sizes.max()),
            formats=tuple(formats.most_common()),
            manifest=self.manifest.place,
            manifest_found=self.manifest.found,
        )

    @property
    def _manifest_of_all(self) -> Manifest:
        if self._whole is None:
            cache = self._cache or cache_folder()
            self._whole = load_manifest(open_store(self._url), cache=cache, form=self._form, relist=self._relist)
        return self._whole

    def _with(self, rows: Rows) -> "Dataset":
        part = Dataset(self._url, cache=self._cache, form=self._form, relist=self._relist)
        part._whole, part._rows = self._manifest_of_all, rows
        return part

    def _part_number(self, parts: npt.NDArray[np.uint8], number: int) -> "Dataset":
        """The samples of one part of a division of this data set."""
        chosen = Chosen.equal(parts, number)
        if self._rows is None:
            return self._with(chosen)
        rows = self._rows
        if isinstance(rows, Chosen):
            return self._with(Chosen.of((rows.at(some) for some in chosen.pieces()), rows.size))
        return self._with(Places(rows.at(np.flatnonzero(parts == number))))

    def _labels(self) -> Labels:
        return count_labels(self._label_pieces)

    def _label_pieces(self) -> Iterator[npt.NDArray[np.int64]]:
        return _samples_of(self._manifest_of_all).pieces("label", self._rows)

    def _class_counts(self) -> list[int]:
        labels = self._labels()
        place = np.arange(len(self.classes)) - labels.first
        inside = (place >= 0) & (place < len(labels.counts))
        return [int(labels.counts[one]) if there else 0 for one, there in zip(place, inside, strict=True)]


def _part_of(whole: Manifest, rows: Rows) -> Manifest:
    samples = PartOfSamples(_samples_of(whole), rows)
    digest = hashlib.sha256(whole.digest.encode() + rows.fingerprint).hexdigest()
    names = samples.texts_of(whole.names)
    return replace(whole, samples=samples, names=names, etags=samples.versions, digest=digest)


def _samples_of(whole: Manifest) -> WholeSamples:
    assert isinstance(whole.samples, WholeSamples), "the manifest of all has all samples"
    return whole.samples
