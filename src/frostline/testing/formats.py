"""What every format of data must do, as test classes: a new format subclasses them, and inherits their tests.

Say which format it is and how to write a few samples in it, and the tests run over your format under pytest; give a
fixture ``store`` too, to run them over another store than memory:

    class TestMyFormat(FormatTests):
        format = MyFormat()

        def put(self, store, examples, part=0):
            store.write(f"part-{part}.mine", packed(examples))

A format that brings masks has ``MaskTests`` too, with ``put_masked`` in the place of ``put``.
"""

import random
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import pytest

from frostline.core.errors import EmptyDataset
from frostline.datasets.formats.base import COLUMNS, TARGET_COLUMNS, Format, ListedSamples
from frostline.datasets.reading import open_samples
from frostline.stores.open import open_store
from frostline.stores.protocols import Buffer, Entry, ObjectStore, Tabular

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ("EXAMPLES", "MASKED_EXAMPLES", "ODD_EXAMPLES", "Example", "FormatTests", "MaskTests", "MaskedExample")

_THREADS = 8


class Example(NamedTuple):
    """A sample that is to be written.

    Attributes:
        key: key that tells it from others: letters and slashes, no suffix.
        label: name of its class.
        data: the encoded image; any bytes.
    """

    key: str
    label: str
    data: bytes


EXAMPLES = tuple(
    Example(f"{label}-{number}", label, f"{label} {number} ".encode() * (10 + number))
    for number in range(4)
    for label in ("cat", "dog", "fish")
)
"""Twelve samples of three classes, of different sizes."""
ODD_EXAMPLES = tuple(
    Example(key, label, key.encode())
    for label in ("a b", "ü✓日本", "100%", "it's")
    for key in ("two words", "a%20b", "#1", "x?y=z&w", "plus+", "x*[1]", "日本")
)
"""Names and classes as they are in the wild."""


class MaskedExample(NamedTuple):
    """A sample with a mask that is to be written.

    Attributes:
        key: key that tells it from others.
        label: name of its class.
        data: the encoded image.
        mask: mask of the sample, encoded; empty where it has none.
        size: width and height of both.
    """

    key: str
    label: str
    data: bytes
    mask: bytes
    size: tuple[int, int]


def _grey(width: int, height: int, level: int) -> bytes:
    """An image of one level, as simple as there are."""
    return f"P5 {width} {height} 255\n".encode() + bytes([level]) * (width * height)


MASKED_EXAMPLES = tuple(
    MaskedExample(
        key, label, _grey(5 + row, 4, 10 * row), b"" if row == 3 else _grey(5 + row, 4, 1 + column), (5 + row, 4)
    )
    for column, label in enumerate(("cat", "a ü"))
    for row, key in enumerate(("one", "two words", "100%", "without", "a/b"))
)
"""Ten samples of two classes and several sizes, of which two have no mask."""


class _OverStore:
    """What the classes of this module share: a format, an empty store, and what the format makes of that."""

    format: Format
    """The format under test."""

    @pytest.fixture
    def store(self) -> ObjectStore:
        """An empty store that ``frostline.stores.open.open_store`` opens by its URL."""
        return open_store(f"memory://{uuid.uuid4()}/formats")

    def read(self, store: ObjectStore, before: ListedSamples | None = None) -> ListedSamples:
        """What the format makes of all that lies in a store."""
        return self.format.read(store, list(store.list()), before)


class FormatTests(_OverStore):
    """For every ``Format``."""

    odd: Sequence[Example] = ODD_EXAMPLES
    """What is found as it is; leave out what the format itself cannot name."""
    reads_again: bool = False
    """It reads a little of objects that did not change too: the end of a file that says what is in it, or a list."""
    beside: Sequence[str] = ("notes.txt", ".hidden/notes.txt", ".frostline/manifests/0.parquet", "deep/.cache/x.tar")
    """Names of objects that belong to no sample; none where the store takes samples alone, as a table does."""

    def put(self, store: ObjectStore, examples: Sequence[Example], part: int = 0) -> None:
        """Write samples in this format, in one step.

        Args:
            store: the store to write to.
            examples: examples to write; their order is free.
            part: samples of another number go beside those that are there.

        Raises:
            NotImplementedError: a subclass did not say.
        """
        raise NotImplementedError("say how samples are written in this format")

    def test_it_claims_its_own_and_not_an_empty_place(self, store: ObjectStore) -> None:
        assert not self.format.claims([])
        assert not self.format.claims([Entry("notes.txt", 5, "e"), Entry(".frostline/x", 5, "e")])
        self.put(store, EXAMPLES)
        assert self.format.claims(list(store.list()))

    def test_every_sample_is_found_once_with_its_bytes_and_its_class(self, store: ObjectStore) -> None:
        self.put(store, EXAMPLES)
        assert _found(store, self.read(store)) == _wanted(EXAMPLES)

    def test_odd_names_and_classes_are_found_as_they_are(self, store: ObjectStore) -> None:
        self.put(store, self.odd)
        assert _found(store, self.read(store)) == _wanted(self.odd)

    def test_the_columns_have_their_types_and_no_holes(self, store: ObjectStore) -> None:
        self.put(store, EXAMPLES)
        table = self.read(store).table
        for field in COLUMNS:
            assert table.schema.field(field.name).type == field.type
            assert table[field.name].null_count == 0

    def test_ids_are_unique_and_stay_when_samples_come_beside(self, store: ObjectStore) -> None:
        self.put(store, EXAMPLES)
        before = self.read(store).table
        self.put(store, self.odd, part=1)
        after = self.read(store).table
        ids, kept = after["id"].to_pylist(), set(zip(after["name"].to_pylist(), after["id"].to_pylist(), strict=True))
        assert len(set(ids)) == len(ids) == len(EXAMPLES) + len(self.odd)
        assert min(ids) >= 0
        assert set(zip(before["name"].to_pylist(), before["id"].to_pylist(), strict=True)) <= kept

    def test_the_digest_is_that_of_the_listing_in_any_order(self, store: ObjectStore) -> None:
        self.put(store, EXAMPLES)
        entries = list(store.list())
        listed = self.format.read(store, entries)
        shuffled = random.Random(0).sample(entries, len(entries))  # noqa: S311 (an order, no secret)
        assert listed.digest == self.format.digest(entries) == self.format.digest(shuffled)
        assert self.format.read(store, shuffled).table.equals(listed.table)

    def test_what_belongs_to_no_sample_is_passed_over(self, store: ObjectStore) -> None:
        self.put(store, EXAMPLES)
        digest = self.read(store).digest
        for name in self.beside:
            store.write(name, b"not a sample")
        again = self.read(store)
        assert again.digest == digest
        assert _found(store, again) == _wanted(EXAMPLES)

    def test_samples_that_change_change_the_digest(self, store: ObjectStore) -> None:
        self.put(store, EXAMPLES)
        before = self.read(store).digest
        self.put(store, [example._replace(data=example.data[::-1] + b"!") for example in EXAMPLES])
        assert self.read(store).digest != before

    def test_objects_that_did_not_change_are_not_read_again(self, store: ObjectStore) -> None:
        self.put(store, EXAMPLES)
        before = self.read(store)
        counting = _CountingTable(store) if isinstance(store, Tabular) else _Counting(store)
        assert self.format.read(counting, list(store.list()), before).table.equals(before.table)
        # Where a format has a table of its own, that is all that may be read.
        assert self.reads_again or counting.objects_read <= {before.kept_at}
        self.put(store, self.odd, part=1)
        both = self.read(store, before)
        assert both.table.equals(self.read(store).table)
        assert _found(store, both) == _wanted([*EXAMPLES, *self.odd])

    def test_reading_leaves_the_store_as_it_was(self, store: ObjectStore) -> None:
        self.put(store, EXAMPLES)
        before = sorted(store.list())
        self.read(store)
        assert sorted(store.list()) == before

    def test_a_place_without_samples_gets_a_sentence(self, store: ObjectStore) -> None:
        for name in self.beside[:1]:
            store.write(name, b"nothing")
        with pytest.raises(EmptyDataset) as caught:
            self.read(store)
        assert store.url in str(caught.value)
        assert "\n" not in str(caught.value)

    def test_threads_get_their_own_samples(self, store: ObjectStore) -> None:
        self.put(store, EXAMPLES)
        listed = self.read(store)
        with ThreadPoolExecutor(_THREADS) as threads:
            found = list(threads.map(lambda _: _found(store, listed), range(_THREADS)))
        assert found == [_wanted(EXAMPLES)] * _THREADS


class MaskTests(_OverStore):
    """For every ``Format`` whose samples may have masks."""

    needs_masks: bool = False
    """Where none of them is there, it is another format's data."""

    def put_masked(self, store: ObjectStore, examples: Sequence[MaskedExample]) -> None:
        """Write samples and their masks in this format, in one step, in the place of those of the same keys.

        Raises:
            NotImplementedError: a subclass did not say.
        """
        raise NotImplementedError("say how samples with masks are written in this format")

    def size_of(self, example: MaskedExample) -> tuple[int, int]:
        """Width and height of an image in the table; a format that keeps all of them alike has its own."""
        return example.size

    def test_every_sample_is_found_once_with_its_mask(self, store: ObjectStore) -> None:
        self.put_masked(store, MASKED_EXAMPLES)
        assert self.format.claims(list(store.list()))
        assert _found_masks(store, self.read(store)) == sorted(
            (example.data, example.mask) for example in MASKED_EXAMPLES
        )

    def test_the_columns_of_masks_have_their_types_and_no_holes(self, store: ObjectStore) -> None:
        self.put_masked(store, MASKED_EXAMPLES)
        table = self.read(store).table
        for field in TARGET_COLUMNS:
            assert table.schema.field(field.name).type == field.type
            assert table[field.name].null_count == 0

    def test_the_size_of_every_image_with_a_mask_is_known(self, store: ObjectStore) -> None:
        self.put_masked(store, MASKED_EXAMPLES)
        rows = self.read(store).table.to_pylist()
        sizes = [(row["target_width"], row["target_height"]) for row in rows if row["target_length"]]
        assert sorted(sizes) == sorted(self.size_of(example) for example in MASKED_EXAMPLES if example.mask)

    def test_a_mask_that_changes_comes_or_goes_is_noticed_and_leaves_the_ids_alone(self, store: ObjectStore) -> None:
        self.put_masked(store, MASKED_EXAMPLES)
        before = self.read(store)
        for number, mask in ((0, MASKED_EXAMPLES[0].mask[:-1] + b"\7"), (3, MASKED_EXAMPLES[3].data), (1, b"")):
            changed = [*MASKED_EXAMPLES]
            changed[number] = changed[number]._replace(mask=mask)
            self.put_masked(store, changed)
            after = self.read(store, before)
            assert after.digest != before.digest
            assert after.table.equals(self.read(store).table)
            assert _found_masks(store, after) == sorted((example.data, example.mask) for example in changed)
            assert set(after.table["id"].to_pylist()) == set(before.table["id"].to_pylist())

    def test_data_without_masks_has_no_columns_of_them(self, store: ObjectStore) -> None:
        self.put_masked(store, [example._replace(mask=b"") for example in MASKED_EXAMPLES])
        assert self.format.claims(list(store.list())) == (not self.needs_masks)
        if not self.needs_masks:
            assert not set(TARGET_COLUMNS.names) & set(self.read(store).table.schema.names)


class _Counting:
    """A store that remembers which objects were read."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self.objects_read: set[str] = set()

    @property
    def url(self) -> str:
        return self._store.url

    def read(self, object: str, offset: int, length: int) -> Buffer:
        return self.read_version(object, offset, length)[0]

    def read_version(self, object: str, offset: int, length: int) -> tuple[Buffer, str]:
        self.objects_read.add(object)
        return self._store.read_version(object, offset, length)

    def list(self) -> Iterator[Entry]:
        return self._store.list()

    def write(self, object: str, data: Buffer) -> None:
        self._store.write(object, data)


class _CountingTable(_Counting):
    """The same of a table."""

    def __init__(self, store: Tabular) -> None:
        super().__init__(store)  # type: ignore[arg-type]  # a table that is a store too
        self._table = store

    @property
    def label_column(self) -> str:
        return self._table.label_column

    @property
    def name_column(self) -> str:
        return self._table.name_column

    def rows(self) -> "pa.Table":
        return self._table.rows()

    def contents(self, objects: Sequence[str]) -> Iterator[tuple[int, Buffer | None]]:
        self.objects_read.update(objects)
        return self._table.contents(objects)


def _found(store: ObjectStore, listed: ListedSamples) -> list[tuple[str, bytes]]:
    samples, found = open_samples(store.url, listed.reading), []
    for row in listed.table.to_pylist():
        data, version = samples.read_version(row["object"], row["offset"], row["length"])
        assert version == row["etag"]
        assert len(data) == row["length"]
        found.append((listed.classes[row["label"]], bytes(data)))
    return sorted(found)


def _found_masks(store: ObjectStore, listed: ListedSamples) -> list[tuple[bytes, bytes]]:
    samples, found = open_samples(store.url, listed.reading), []
    for row in listed.table.to_pylist():
        data, mask = samples.read(row["object"], row["offset"], row["length"]), b""
        assert bool(row["target_object"]) == bool(row["target_length"])
        if row["target_length"]:
            place = (row["target_object"], row["target_offset"], row["target_length"])
            view, version = samples.read_version(*place)
            assert version == row["target_etag"]
            mask = bytes(view)
        found.append((bytes(data), mask))
    return sorted(found)


def _wanted(examples: Sequence[Example]) -> list[tuple[str, bytes]]:
    return sorted((example.label, example.data) for example in examples)
