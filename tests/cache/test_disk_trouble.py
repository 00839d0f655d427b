"""The cache on disk under what goes wrong: a kill at any moment, a full disk, bytes that change, a strange file."""

import os
import random
import shutil
import signal
import subprocess
import sys

import pytest

from frostline.cache import FeatureStore
from support import stored
from support.stored import ENVIRONMENT, ROWS, checked, put, python, writing

pytestmark = pytest.mark.promise("intact")

SMALL = 16 << 20
# None of the rows that writers write before they are killed has to make room for others.
LARGE = 64 << 20


def killed_at_random(folder, first, draw):
    """Have a process write rows from ``first`` on, kill it, and say how far it had said to be."""
    with writing(folder, LARGE, first) as writer:
        said = first
        for _ in range(draw.randrange(1, 30)):
            said = int(writer.stdout.readline())
        for _ in range(draw.randrange(20_000)):  # a while that is not the same each time, wherever it is by then
            pass
        writer.send_signal(signal.SIGKILL)
        for line in writer.stdout:
            said = int(line) if line.endswith("\n") else said
    return said


def test_a_writer_killed_at_any_moment_leaves_all_reported_rows_right(tmp_path):
    draw, done = random.Random(5), 0
    for _ in range(10):
        stop = killed_at_random(tmp_path, done, draw)
        with FeatureStore(tmp_path, LARGE) as store:
            found = checked(store, range(stop + 10 * ROWS))
            assert found[:stop] == list(range(stop))
            assert store.statistics().resets == store.statistics().damaged == store.statistics().failed == 0
        done = stop


def test_bytes_that_changed_in_a_row_make_it_a_miss_and_it_is_dropped(tmp_path):
    with FeatureStore(tmp_path, SMALL) as store:
        put(store, range(50))
    (file,) = tmp_path.glob("*.sqlite")
    data = bytearray(file.read_bytes())
    place = data.find(stored.tensors([20])[0].tobytes())
    data[place + 1000] ^= 4
    file.write_bytes(data)
    with FeatureStore(tmp_path, SMALL) as store:
        assert checked(store, range(50)) == [number for number in range(50) if number != 20]
        assert store.statistics().damaged == 1
        assert put(store, [20]) == 1
        assert checked(store, [20]) == [20]


@pytest.mark.parametrize("seed", range(6))
def test_a_file_with_bytes_changed_anywhere_never_gives_a_wrong_row_and_works_again(tmp_path, seed):
    with FeatureStore(tmp_path, SMALL) as store:
        put(store, range(200))
    draw = random.Random(seed)
    (file,) = tmp_path.glob("*.sqlite")
    data = bytearray(file.read_bytes())
    first = 0 if seed % 2 else 100  # the first bytes name the format
    for _ in range(400):
        data[draw.randrange(first, len(data))] = draw.randrange(256)
    file.write_bytes(data)
    with FeatureStore(tmp_path, SMALL) as store:
        for _ in range(3):
            checked(store, range(200))
            put(store, range(200))
        assert checked(store, range(200)) == list(range(200))


@pytest.mark.parametrize("content", [b"", b"not a database" * 1000, b"SQLite format 3\0" + bytes(5000)])
def test_replaces_an_unknown_file_by_a_new_one(tmp_path, content):
    (tmp_path / "features-000003.sqlite").write_bytes(content)
    with FeatureStore(tmp_path, SMALL) as store:
        assert put(store, range(5)) == 5
        assert checked(store, range(5)) == list(range(5))


def test_replaces_a_truncated_file_by_a_new_one(tmp_path):
    with FeatureStore(tmp_path, SMALL) as store:
        put(store, range(200))
    (file,) = tmp_path.glob("*.sqlite")
    os.truncate(file, file.stat().st_size // 2)
    with FeatureStore(tmp_path, SMALL) as store:
        checked(store, range(200))
        put(store, range(200))
        put(store, range(200))
        assert checked(store, range(200)) == list(range(200))


def test_damage_met_while_it_is_open_costs_what_the_file_held_and_no_more(tmp_path):
    with FeatureStore(tmp_path, SMALL) as store:
        put(store, range(200))
    with FeatureStore(tmp_path, SMALL) as store:
        (file,) = tmp_path.glob("*.sqlite")
        size = file.stat().st_size
        file.write_bytes(b"\xff" * size)
        for _ in range(2):
            checked(store, range(200))
            put(store, range(200))
        assert checked(store, range(200)) == list(range(200))
        assert store.statistics().resets >= 1


WITHIN = """
import resource, signal, sys
from pathlib import Path
from frostline.cache import FeatureStore
from support.stored import checked, put

store = FeatureStore(Path(sys.argv[1]), 1 << 26)
put(store, range(64))
if len(sys.argv) > 2:  # no file may grow beyond this, as on a full disk
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), int(sys.argv[2])))
for first in range(64, 64 * 80, 64):
    put(store, range(first, first + 64))
found = checked(store, range(64 * 80))
statistics = store.statistics()
assert statistics.failed >= 1, statistics
assert statistics.rejected >= 64 * 80 - len(found), statistics
assert found[:64] == list(range(64)), len(found)
print(len(found))
"""


def ran(*argv):
    with python("-c", WITHIN, *argv) as child:
        out, err = child.communicate()
    assert child.returncode == 0, err
    return int(out)


def test_a_disk_that_takes_no_more_costs_new_rows_and_nothing_that_was_kept(tmp_path):
    found = ran(tmp_path, 3 << 20)
    with FeatureStore(tmp_path, 1 << 26) as store:
        assert len(checked(store, range(64 * 80))) == found
        assert put(store, range(64 * 80, 64 * 81)) == 64


@pytest.mark.skipif(
    shutil.which("unshare") is None
    or subprocess.run(["unshare", "-rm", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True).returncode != 0,
    reason="a small file system cannot be mounted here",
)
def test_a_full_file_system_costs_new_rows_and_nothing_that_was_kept(tmp_path):
    disk, program = tmp_path / "disk", tmp_path / "program.py"
    disk.mkdir()
    program.write_text(WITHIN)
    mounted = f'mount -t tmpfs -o size=8m none "{disk}" && "{sys.executable}" "{program}" "{disk}"'
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", mounted], env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 64
