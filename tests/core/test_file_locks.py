"""Locks on files between processes."""

import os
import sys

import pytest

from frostline.core.errors import SettingError
from frostline.core.files import lock, try_lock


def opened(folder):
    return os.open(folder, os.O_RDONLY)


def test_keeps_a_file_locked_until_its_owner_closes_it(tmp_path):
    first, second = opened(tmp_path), opened(tmp_path)
    assert try_lock(first)
    assert not try_lock(second)
    os.close(first)
    lock(second)
    os.close(second)


def test_a_system_without_locks_says_so(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "fcntl", None)
    handle = opened(tmp_path)
    with pytest.raises(SettingError, match="no locks of files"):
        try_lock(handle)
    os.close(handle)
