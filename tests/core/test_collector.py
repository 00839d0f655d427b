"""The garbage collector rests for a while, and never for good."""

import gc

import pytest

from frostline.core.system import collector_rests


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
