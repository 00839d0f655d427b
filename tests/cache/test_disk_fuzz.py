"""Damaged cache files: whatever their bytes are, nothing but hits and misses reaches the caller.

A few hundred in a test. For longer, from another seed on:

    PYTHONPATH=src:tests python tests/cache/test_disk_fuzz.py FIRST COUNT
"""

import random
import sqlite3
import sys
import tempfile
from pathlib import Path

import pytest

from frostline.cache import FeatureStore, RowLayout
from support.stored import SCOPE, checked, keys, put

pytestmark = pytest.mark.promise("intact")

SMALL = 16 << 20
LAYOUT = RowLayout(shapes=((5,), (7,)), dtypes=("float32", "int64"))
ROWS = range(60)
# A file at rest, and a log and its index as a kill leaves them.
PARTS = (".sqlite", ".sqlite-wal", ".sqlite-shm")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return files_of(tmp_path_factory.mktemp("whole"))


def files_of(folder):
    """Files of a cache at rest, and of one in use, by name."""
    with FeatureStore(folder / "rest", SMALL) as store:
        put(store, ROWS, layout=LAYOUT)
    with FeatureStore(folder / "used", SMALL) as store:
        put(store, ROWS, layout=LAYOUT)
        used = {path.name: path.read_bytes() for path in (folder / "used").iterdir()}
    return {path.name: path.read_bytes() for path in (folder / "rest").iterdir()}, used


def damaged(files, part, seed):
    """The same with a few bytes changed, seldom where there is nothing."""
    draw = random.Random(seed)
    (name,) = (name for name in files if name.endswith(part))
    data = bytearray(files[name])
    written = [place for place, byte in enumerate(data) if byte]
    for _ in range(draw.choice((1, 1, 2, 4, 16, 64))):
        data[draw.choice(written)] = draw.choice((0, 1, 0x80, 0xFF, draw.randrange(256)))
    return {**files, name: bytes(data)}


def used_as_ever(folder, files):
    """A cache of these files raises nothing, gives no wrong row, and takes rows."""
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    with FeatureStore(folder, SMALL, idle_s=0.0) as store:
        for _ in range(2):
            checked(store, ROWS, layout=LAYOUT)
            put(store, ROWS, layout=LAYOUT)
            store.contains(SCOPE, keys(ROWS))
            store.statistics()
        new = range(1000, 1060)
        put(store, new, b"x" * 32, LAYOUT)  # where there is no file to leave, one try notices the damage
        put(store, new, b"x" * 32, LAYOUT)
        checked(store, new, b"x" * 32, LAYOUT)


@pytest.mark.parametrize(("part", "count"), [(".sqlite", 150), (".sqlite-wal", 30), (".sqlite-shm", 30)])
def test_damaged_files_cost_rows_and_raise_nothing(tmp_path, whole, part, count):
    rest, used = whole
    for seed in range(count):
        used_as_ever(tmp_path / str(seed), damaged(rest if part == ".sqlite" else used, part, seed))


def changed(folder, *statements):
    with FeatureStore(folder, SMALL) as store:
        put(store, ROWS, layout=LAYOUT)
    (file,) = folder.glob("*.sqlite")
    connection = sqlite3.connect(file)
    for statement in statements:
        connection.execute(statement)
    connection.commit()
    connection.close()


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE features SET value = 7",
        "UPDATE features SET value = ''",
        "UPDATE features SET value = CAST(X'ff' AS TEXT)",
        "UPDATE features SET row = CAST(row AS TEXT)",
        "UPDATE features SET row = 5 WHERE number = 1",
        "UPDATE scopes SET used = 'never'",
        "UPDATE scopes SET row_bytes = -24",
        "UPDATE scopes SET row_bytes = 'x'",
        "UPDATE sqlite_sequence SET seq = 'x'",
        "DROP INDEX places",
        "DROP TABLE scopes",
    ],
)
def test_values_of_other_kinds_than_were_written_are_misses_or_damage(tmp_path, statement):
    changed(tmp_path, statement)
    with FeatureStore(tmp_path, SMALL, idle_s=0.0) as store:
        for scope in (SCOPE, b"x" * 32):
            for _ in range(3):
                checked(store, ROWS, scope, LAYOUT)
                put(store, ROWS, scope, LAYOUT)
            assert checked(store, ROWS, scope, LAYOUT) == list(ROWS)


def test_a_damaged_file_for_turns_is_made_anew(tmp_path):
    with FeatureStore(tmp_path, SMALL) as store:
        (tmp_path / "turn").write_bytes(b"garbage" * 3000)
        put(store, ROWS, layout=LAYOUT)
        assert put(store, ROWS, layout=LAYOUT) == len(ROWS)
        assert checked(store, ROWS, layout=LAYOUT) == list(ROWS)


if __name__ == "__main__":
    first, count = map(int, sys.argv[1:])
    with tempfile.TemporaryDirectory() as place:
        rest, used = files_of(Path(place))
        for seed in range(first, first + count):
            with tempfile.TemporaryDirectory() as folder:
                part = PARTS[seed % 3]
                files = damaged(rest if part == ".sqlite" else used, part, seed)
                print(seed, part, end="\r", flush=True)
                used_as_ever(Path(folder) / "cache", files)
