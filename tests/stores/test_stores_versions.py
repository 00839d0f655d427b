"""Which etags name one version."""

import pytest

from frostline.stores.versions import is_other_version


@pytest.mark.parametrize(
    ("listed", "found", "is_other"),
    [
        ("a", "a", False),
        ("a", "b", True),
        ('"a"', "a", False),
        ('W/"a"', '"a"', False),
        ("", "a", False),
        ("a", "", False),
    ],
)
def test_quotation_marks_tell_no_versions_apart_and_the_unknown_is_no_other(listed, found, is_other):
    assert is_other_version(listed, found) is is_other
