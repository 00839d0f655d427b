"""Listings as columns: the same entries, order, digest and choices as lists of them give."""

import hashlib
import re

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from frostline.core.errors import EmptyDataset
from frostline.datasets.formats.folders import ClassFolderFormat, is_image
from frostline.stores import protocols as module
from frostline.stores.open import open_store
from frostline.stores.protocols import Entries, Entry, Names

pytestmark = pytest.mark.promise("complete")

parts = st.one_of(
    st.sampled_from(
        ["a", "B", "ü✓", ".x", "a.jpg", "b.JPEG", ".png", "x.tar", "a.b.TIF", "jpg", "no\nline.webp", "日.npy"]
    ),
    st.text(st.characters(exclude_characters="\0/", exclude_categories=("Cs",)), min_size=1, max_size=6),
)
names = st.lists(parts, min_size=1, max_size=3).map("/".join)
listings = st.lists(
    st.builds(Entry, names, st.integers(-1, 1 << 40), st.text("0123456789abcdef", max_size=4)),
    max_size=30,
    unique_by=lambda build: build.object,
)


@pytest.fixture(autouse=True, scope="module", params=[1, 7])
def _in_small_pieces(request):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_AT_ONCE", request.param)
        patch.setattr(module, "_SORTED_ROWS", request.param)
        patch.setattr(module, "_STRETCHES", request.param - 1)
        yield


@given(listings)
def test_columns_are_the_same_sequence(listing):
    entries = Entries.of(iter(listing))
    assert list(entries) == listing
    assert len(entries) == len(listing)
    assert [entries[row] for row in range(-len(listing), len(listing))] == listing + listing
    assert list(entries[1:-1]) == listing[1:-1]
    assert list(entries[::-2]) == listing[::-2]
    assert Entries.of(entries) is entries
    names = Names(entries.table["object"])
    assert (names, list(names), len(names)) == ([item.object for item in listing],) * 2 + (len(listing),)


@given(st.lists(listings, max_size=3))
def test_joins_arrays_in_the_order_of_their_names(several):
    together = [Entry(f"{number}{item.object}", *item[1:]) for number, some in enumerate(several) for item in some]
    gathered = [Entries.of(some) for some in (together[::2], together[1::2])]
    entries = Entries.concatenate(gathered)
    assert list(entries) == sorted(together) == list(Entries.of(together).in_order())
    assert (entries.is_in_order, gathered) == (True, [])


@given(listings)
def test_the_digest_is_that_of_the_entries_in_order_each_ended_by_nuls(listing):
    said = "rule\0" + "".join(f"{item.object}\0{item.size}\0{item.etag}\0" for item in sorted(listing))
    assert Entries.of(listing).digest("rule") == hashlib.sha256(said.encode()).hexdigest()


@given(listings, st.sampled_from(["a", "ü", ".", "a/"]))
def test_names_are_found(listing, start):
    entries = Entries.of(listing)
    assert [item for item in listing if entries.has(item.object)] == listing
    assert not entries.has("nowhere\0")
    assert list(entries.filter_prefix(start)) == [item for item in listing if item.object.startswith(start)]
    assert list(entries.filter_pattern("(?i)JPE?G")) == [
        item for item in listing if re.search("(?i)JPE?G", item.object)
    ]


@given(listings)
def test_class_folders_of_columns_are_those_of_single_names(listing):
    wanted = sorted(item for item in listing if "/" in item.object and is_image(item.object))
    format, store = ClassFolderFormat(), open_store("memory://entries")
    assert format.claims(Entries.of(listing)) == bool(wanted)
    flat = sorted(item for item in listing if "/" not in item.object and is_image(item.object))
    if not wanted and not flat:
        with pytest.raises(EmptyDataset):
            format.read(store, listing)
        return
    listed = format.read(store, Entries.of(listing))
    if not wanted:  # images in no folder are samples without classes
        assert (listed.classes, listed.table["name"].to_pylist()) == ((), [item.object for item in flat])
        return
    folders = [item.object.partition("/")[0] for item in wanted]
    assert listed.classes == tuple(sorted(set(folders)))
    assert [listed.classes[label] for label in listed.table["label"].to_pylist()] == folders
    for column, place in (("object", 0), ("name", 0), ("length", 1), ("etag", 2)):
        assert listed.table[column].to_pylist() == [item[place] for item in wanted]


def test_texts_of_more_than_two_gigabytes_are_put_in_order_too(monkeypatch):
    monkeypatch.setattr(module, "_SORTED_BYTES", 10)
    entries = Entries.of([Entry("b", 1, "x"), Entry("a", 2, "y")]).in_order()
    assert list(entries) == [Entry("a", 2, "y"), Entry("b", 1, "x")]
    assert entries.table.schema.types == [pa.string(), pa.int64(), pa.string()]


def test_an_index_outside_is_refused():
    with pytest.raises(IndexError, match="2 entries"):
        Entries.of([Entry("b", 1, "x"), Entry("a", 2, "y")])[2]
