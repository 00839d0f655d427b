"""Which objects of a listing are labelled images."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frostline.datasets.folders import list_images, suffix_of
from frostline.stores.objects import Entry


def listing_of(*names):
    return list_images(Entry(name, 10 + len(name), "etag") for name in names)


def test_the_first_folder_is_the_class_and_deeper_ones_belong_to_it():
    listing = listing_of("dog/b.jpg", "cat/kittens/a.png", "cat/z.JPEG", "dog/old/x/y.webp")
    assert listing.classes == ("cat", "dog")
    assert listing.objects == ["cat/kittens/a.png", "cat/z.JPEG", "dog/b.jpg", "dog/old/x/y.webp"]
    assert listing.labels.tolist() == [0, 0, 1, 1]
    assert listing.lengths.tolist() == [10 + len(name) for name in listing.objects]


@pytest.mark.parametrize(
    "name",
    ["cat/notes.txt", "cat/.hidden.jpg", ".trash/a.jpg", "cat/.cache/a.jpg", "cat/jpg", "cat/.jpg", "cat/a.jpg.part"],
)
def test_hidden_names_and_what_is_no_image_are_passed_over(name):
    listing = listing_of("cat/a.jpg", name)
    assert listing.objects == ["cat/a.jpg"]
    assert listing.digest == listing_of("cat/a.jpg").digest


def test_images_in_no_folder_are_counted():
    listing = listing_of("a.jpg", "b.jpg", "cat/c.jpg")
    assert listing.objects == ["cat/c.jpg"]
    assert listing.without_class == 2


names = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0/."), min_size=1)
entries = st.builds(lambda folder, base, size, etag: Entry(f"{folder}/{base}.jpg", size, etag), names, names,
                    st.integers(0, 1 << 40), names)  # fmt: skip


@given(st.lists(entries, unique_by=lambda entry: entry.object), st.randoms())
def test_the_digest_does_not_depend_on_the_order_of_the_listing(listed, source: random.Random):
    shuffled = source.sample(listed, len(listed))
    assert list_images(shuffled).digest == list_images(listed).digest
    assert list_images(shuffled).objects == list_images(listed).objects


@given(st.lists(entries, min_size=1, unique_by=lambda entry: entry.object), st.data())
def test_any_change_of_a_name_size_or_etag_changes_the_digest(listed, data):
    row = data.draw(st.integers(0, len(listed) - 1))
    before = listed[row]
    after = data.draw(
        st.sampled_from(
            [
                before._replace(size=before.size + 1),
                before._replace(etag=before.etag + "x"),
                before._replace(object="x" + before.object),
            ]
        )
    )
    changed = [*listed[:row], after, *listed[row + 1 :]]
    assert list_images(changed).digest != list_images(listed).digest


@pytest.mark.parametrize(("name", "suffix"), [("a/b.JPG", ".jpg"), ("a.b/c", ""), ("a/.jpg", ""), ("x.tar.gz", ".gz")])
def test_a_suffix_is_that_of_the_last_part_in_lower_case(name, suffix):
    assert suffix_of(name) == suffix
