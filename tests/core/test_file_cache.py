"""A cache of small files: what cannot be read or written is as if it had not been kept."""

import os
import stat

import pytest

from frostline.core.files import FileCache


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "a" / "b"


def test_finds_a_kept_profile_by_its_key_alone(folder):
    files = FileCache(folder, ".json")
    assert files.is_empty
    assert files.get("one") is None
    files.put("one", b"1")
    files.put("one", b"2")
    files.put("two", b"3")
    assert not files.is_empty
    assert FileCache(folder, ".json").get("one") == b"2"
    assert files.get("two") == b"3"
    assert files.get("three") is None
    assert FileCache(folder, ".other").is_empty


def test_those_that_were_not_used_for_longest_go_first(folder, monkeypatch):
    monkeypatch.setattr("frostline.core.files._MAX_FILES", 2)
    files = FileCache(folder, ".json")
    for age, key in enumerate("abc"):
        files.put(key, key.encode())
        if key != "c":
            os.utime(folder / f"{key}.json", (age, age))
    assert files.get("a") is None
    assert files.get("b") == b"b"  # used now, so that c goes before it
    os.utime(folder / "c.json", (1, 1))
    files.put("d", b"d")
    assert files.get("c") is None
    assert files.get("b") == b"b"


def test_only_their_user_may_read_them_and_nothing_unfinished_stays(folder):
    FileCache(folder, ".json").put("one", b"1")
    assert [path.name for path in folder.iterdir()] == ["one.json"]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "one.json").stat().st_mode) == 0o600


def test_keeps_nothing_where_nothing_can_be_kept(folder):
    folder.parent.mkdir()
    folder.write_text("a file where the folder would be")
    files = FileCache(folder, ".json")
    files.put("one", b"1")
    assert files.get("one") is None
    assert files.is_empty
