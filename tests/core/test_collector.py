"""The garbage collector rests for a while, and never for good."""

import gc

import pytest

from frostline.core.system import collector_rests, imports_stay


def test_the_collector_rests_and_goes_on_afterwards_whatever_happens():
    assert gc.isenabled()
    with collector_rests():
        assert not gc.isenabled()
        with collector_rests():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError), collector_rests():
        1 / 0  # noqa: B018 (it fails)
    assert gc.isenabled()


def test_stays_off_if_the_user_turned_it_off():
    gc.disable()
    try:
        with collector_rests():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_what_was_imported_is_not_looked_through_again():
    before = gc.get_freeze_count()
    try:
        with imports_stay():
            assert not gc.isenabled()
            made = [[]]
        assert gc.isenabled()
        assert gc.get_freeze_count() > before
        assert not any(found is made for found in gc.get_objects())
    finally:
        gc.unfreeze()
