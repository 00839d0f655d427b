"""Which etags name one version."""

import pytest

from frostline.stores.protocols import is_other_version, version_of_time


@pytest.mark.parametrize(
    ("listed", "found", "is_other"),
    [
        ("a", "a", False),
        ("a", "b", True),
        ('"a"', "a", False),
        ('W/"a"', '"a"', False),
        ("", "a", False),
        ("a", "", False),
        ("modified-1", "modified-1", False),
        ("modified-1", "modified-2", True),
        ("modified-1", "a", False),
        ("a", "modified-1", False),
    ],
)
def test_quotation_marks_do_not_distinguish_versions(listed, found, is_other):
    assert is_other_version(listed, found) is is_other


@pytest.mark.parametrize(("changed_s", "version"), [(0.0, ""), (-5.0, ""), (7.9, "modified-7"), (7.1, "modified-7")])
def test_takes_the_time_of_change_to_the_second_for_a_version(changed_s, version):
    assert version_of_time(changed_s) == version
