"""The public data set: labelled samples at a URL, listed when they are first needed."""

import hashlib
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from frostline.config import cache_folder
from frostline.core import Samples
from frostline.datasets.forms.folders import suffix_of
from frostline.datasets.forms.known import form_named
from frostline.datasets.manifest import Manifest, load_manifest
from frostline.errors import DataError
from frostline.ordering import split_by_class
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

    Raises:
        SettingError: the URL is none that Frostline reads, or there is no such form.

    The properties that list the data raise ``DataNotFound``, ``EmptyDataset``, ``AccessDenied``, ``OutOfSpace``
    or ``StoreUnavailable``.
    """

    def __init__(self, url: str | Path, *, cache: Path | None = None, form: str | None = None) -> None:
        self._url = normalise_url(str(url))
        self._form = None if form is None else form_named(form).name
        self._cache = cache
        self._loaded: Manifest | None = None
        self._listing: str | None = None

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
        if self._loaded is None:
            self._loaded = load_manifest(open_store(self._url), cache=self._cache or cache_folder(), form=self._form)
        return self._loaded

    @property
    def samples(self) -> Samples:
        """The samples as columns, ordered by name."""
        return self.manifest.samples

    @property
    def names(self) -> tuple[str, ...]:
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
        return self._listing or self.digest

    def take(self, rows: npt.NDArray[np.int64]) -> "Dataset":
        """The samples at the given rows, in the given order, as a data set of its own."""
        whole = self.manifest
        rows = np.asarray(rows, np.int64)
        digest = hashlib.sha256(whole.digest.encode() + rows.astype("<i8").tobytes()).hexdigest()
        etags = tuple(whole.etags[row] for row in rows.tolist())
        names = tuple(whole.names[row] for row in rows.tolist())
        part = Dataset(self._url, cache=self._cache, form=self._form)
        part._listing = self.listing
        part._loaded = replace(whole, samples=whole.samples.take(rows), names=names, etags=etags, digest=digest)
        return part

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
        train, held_out = split_by_class(self.samples.labels, share, seed)
        return self.take(train), self.take(held_out)

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
        counts = np.bincount(samples.labels, minlength=len(self.classes)).tolist()
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
