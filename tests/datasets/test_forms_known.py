"""Which form a listing has."""

import pytest

from frostline.datasets import Dataset
from frostline.datasets.forms.known import FORMS, form_named, form_of
from frostline.datasets.ready import LAYOUT
from frostline.errors import SettingError
from frostline.stores.objects import Entry


def form_in(*names):
    return form_of([Entry(name, 1, "e") for name in names]).name


def test_the_first_form_that_claims_a_listing_has_it():
    assert form_in("cat/1.jpg") == "folders"
    assert form_in("cat/1.jpg", LAYOUT) == "ready"


def test_of_a_listing_that_no_form_claims_class_folders_say_what_is_missing():
    assert form_in("notes.txt") == "folders"
    assert form_in() == "folders"


def test_a_form_is_found_by_its_name():
    assert [form_named(form.name) for form in FORMS] == list(FORMS)
    with pytest.raises(SettingError, match=r"there is no 'folder', only ready, .*folders, .*; did you mean folders"):
        Dataset("memory://x", form="folder")
