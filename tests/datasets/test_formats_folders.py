"""Which objects of a listing are labelled images."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frostline.core.errors import EmptyDataset
from frostline.datasets.formats.folders import ClassFolderFormat, suffix_of
from frostline.stores.protocols import Entry

FORMAT = ClassFolderFormat()


class Nothing:
    """A store that is not to be asked for anything."""

    url = "memory://nothing"


def listed(entries):
    return FORMAT.read(Nothing(), entries)


def listing_of(*names):
    return listed([Entry(name, 10 + len(name), "etag") for name in names])


def column(listing, name):
    return listing.table[name].to_pylist()


def test_the_first_folder_is_the_class_and_deeper_ones_belong_to_it():
    listing = listing_of("dog/b.jpg", "cat/kittens/a.png", "cat/z.JPEG", "dog/old/x/y.webp")
    assert listing.classes == ("cat", "dog")
    assert column(listing, "object") == ["cat/kittens/a.png", "cat/z.JPEG", "dog/b.jpg", "dog/old/x/y.webp"]
    assert column(listing, "name") == column(listing, "object")
    assert column(listing, "label") == [0, 0, 1, 1]
    assert column(listing, "length") == [10 + len(name) for name in column(listing, "object")]


@pytest.mark.parametrize(
    "name",
    ["cat/notes.txt", "cat/.hidden.jpg", ".trash/a.jpg", "cat/.cache/a.jpg", "cat/jpg", "cat/.jpg", "cat/a.jpg.part"],
)
def test_skips_hidden_names_and_files_that_are_no_images(name):
    listing = listing_of("cat/a.jpg", name)
    assert column(listing, "object") == ["cat/a.jpg"]
    assert listing.digest == listing_of("cat/a.jpg").digest


def test_archives_are_named_with_what_to_do_about_them():
    entries = [Entry("shards/train-0.tar.xz", 1, ""), Entry("readme.txt", 1, "")]
    with pytest.raises(EmptyDataset, match=r"shards/train-0\.tar\.xz is compressed as a whole"):
        listed(entries)


def test_images_in_no_folder_count_where_there_are_no_others():
    listing = listing_of("a.jpg", "b.jpg", "cat/c.jpg")
    assert column(listing, "object") == ["cat/c.jpg"]
    listing = listing_of("b.jpg", "a.jpg", "cat/notes.txt", ".hidden.jpg")
    assert column(listing, "object") == ["a.jpg", "b.jpg"]
    assert column(listing, "label") == [-1, -1]
    assert listing.classes == ()
    assert not FORMAT.claims([Entry("a.jpg", 1, "")]), "lists beside them may say more"


names = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0/."), min_size=1)
entries = st.builds(lambda folder, base, size, etag: Entry(f"{folder}/{base}.jpg", size, etag), names, names,
                    st.integers(0, 1 << 40), names)  # fmt: skip


@given(st.lists(entries, min_size=1, unique_by=lambda entry: entry.object), st.randoms())
def test_digest_and_table_do_not_depend_on_the_order_of_the_listing(entries, source: random.Random):
    shuffled = source.sample(entries, len(entries))
    assert FORMAT.digest(shuffled) == FORMAT.digest(entries)
    assert listed(shuffled).digest == FORMAT.digest(entries)
    assert listed(shuffled).table.equals(listed(entries).table)


@given(st.lists(entries, min_size=1, unique_by=lambda entry: entry.object), st.data())
def test_any_change_of_a_name_size_or_etag_changes_the_digest(entries, data):
    row = data.draw(st.integers(0, len(entries) - 1))
    before = entries[row]
    after = data.draw(
        st.sampled_from(
            [
                before._replace(size=before.size + 1),
                before._replace(etag=before.etag + "x"),
                before._replace(object="x" + before.object),
            ]
        )
    )
    changed = [*entries[:row], after, *entries[row + 1 :]]
    assert FORMAT.digest(changed) != FORMAT.digest(entries)


@pytest.mark.parametrize(("name", "suffix"), [("a/b.JPG", ".jpg"), ("a.b/c", ""), ("a/.jpg", ""), ("x.tar.gz", ".gz")])
def test_a_suffix_is_that_of_the_last_part_in_lower_case(name, suffix):
    assert suffix_of(name) == suffix
