"""The local tier: what it keeps is found again, within its bound, whoever is killed and whatever is damaged."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from frostline.core.errors import SettingError
from frostline.stores import disk_tier as module
from frostline.stores.disk_tier import LocalTier, tier_name
from frostline.stores.protocols import ByteRange

HOUR_S = 3600.0


class Clock:
    """Shows what it is set to, a while from the files' own times."""

    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


def name_of(number, version="v"):
    return tier_name("s3://photos", ByteRange(f"{number}.jpg", 0, 100), version)


def held(folder):
    return sum(path.stat().st_size for path in folder.iterdir())


def test_finds_kept_rows_by_their_key_alone(tmp_path):
    tier = LocalTier(tmp_path / "a" / "tier", budget_bytes=10_000)
    tier.put(name_of(1), b"x" * 100)
    for item in (tier, LocalTier(tmp_path / "a" / "tier", budget_bytes=10_000)):
        assert item.has(name_of(1))
        assert bytes(item.get(name_of(1), 100)) == b"x" * 100
        for other in (name_of(2), name_of(1, "w"), tier_name("s3://others", ByteRange("1.jpg", 0, 100), "v")):
            assert not item.has(other)
            assert item.get(other, 100) is None
    found = tier.statistics()
    assert (found.kept, found.hits, found.misses) == (1, 1, 3)


def test_it_stays_within_its_bound_and_what_is_in_use_stays(tmp_path):
    clock = Clock()
    tier = LocalTier(tmp_path, budget_bytes=10_000, clock=clock)
    for number in range(300):
        clock.now_s += 61  # a full one looks again after a minute
        tier.put(name_of(number), bytes(100))
        assert held(tmp_path) <= 10_000
    first = [number for number in range(300) if tier.has(name_of(number))]
    assert first == list(range(len(first)))
    assert len(first) * 132 >= 8_000
    assert tier.statistics().rejected == 300 - len(first)


def test_a_clock_that_is_set_back_does_not_have_it_rest_for_as_long(tmp_path):
    clock = Clock()
    clock.now_s = 2 * HOUR_S
    tier = LocalTier(tmp_path, budget_bytes=10_000, clock=clock)
    for number in range(100):
        tier.put(name_of(number), bytes(100))
    assert tier.statistics().rejected
    for path in tmp_path.iterdir():
        path.unlink()
    tier.put(name_of(100), bytes(100))
    assert not tier.has(name_of(100)), "a full one looks again after a minute"
    clock.now_s -= HOUR_S
    tier.put(name_of(101), bytes(100))
    assert tier.has(name_of(101))
    os.utime(tmp_path / name_of(101), (2 * HOUR_S,) * 2)
    tier.get(name_of(101), 100)
    assert (tmp_path / name_of(101)).stat().st_mtime == clock.now_s, "it is in use now, and not in an hour"


def test_evicts_what_was_unused_for_an_hour(tmp_path):
    clock = Clock()
    tier = LocalTier(tmp_path, budget_bytes=10_000, clock=clock)
    for number in range(60):
        tier.put(name_of(number), bytes(100))
        os.utime(tmp_path / name_of(number), (0, 0))
    clock.now_s = HOUR_S
    assert tier.get(name_of(5), 100) is not None  # which notes that it is in use
    for number in range(100, 160):
        tier.put(name_of(number), bytes(100))
        os.utime(tmp_path / name_of(number), (clock.now_s,) * 2)
    assert held(tmp_path) <= 10_000
    assert tier.has(name_of(5))
    assert tier.has(name_of(159))
    assert not tier.has(name_of(0))
    assert tier.statistics().removed > 0


def test_several_share_a_folder_and_its_bound(tmp_path):
    tiers = [LocalTier(tmp_path, budget_bytes=20_000) for _ in range(8)]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda number: tiers[number % 8].put(name_of(number), bytes(100)), range(400)))
    assert 8_000 <= held(tmp_path) <= 20_000
    kept = [number for number in range(400) if tiers[0].has(name_of(number))]
    assert all(tiers[3].get(name_of(number), 100) is not None for number in kept)


@pytest.mark.parametrize("how", ["cut", "empty", "bit", "other"])
def test_a_damaged_file_is_never_given(tmp_path, how):
    tier = LocalTier(tmp_path, budget_bytes=10_000)
    tier.put(name_of(1), b"0123456789")
    tier.put(name_of(2), b"9876543210")
    path = tmp_path / name_of(1)
    data = path.read_bytes()
    bad = {
        "cut": data[: len(data) // 2],
        "empty": b"",
        "bit": data[:-1] + bytes([data[-1] ^ 1]),
        "other": (tmp_path / name_of(2)).read_bytes(),
    }
    path.write_bytes(bad[how])
    assert tier.get(name_of(1), 10) is None
    assert not tier.has(name_of(1))
    assert tier.statistics().damaged == 1
    tier.put(name_of(1), b"0123456789")
    assert bytes(tier.get(name_of(1), 10)) == b"0123456789"


def test_removes_unfinished_files_of_killed_processes_and_no_others(tmp_path):
    (tmp_path / "mine.jpg").write_bytes(bytes(1000))
    (tmp_path / ".partial-0").write_bytes(b"of one that was killed")
    os.utime(tmp_path / ".partial-0", (0, 0))
    tier = LocalTier(tmp_path, budget_bytes=300)
    for number in range(5):
        tier.put(name_of(number), bytes(100))
    assert (tmp_path / "mine.jpg").stat().st_size == 1000
    assert not (tmp_path / ".partial-0").exists()


def test_a_full_disk_and_a_folder_that_is_gone_cost_no_more_than_the_speed(tmp_path, monkeypatch):
    tier = LocalTier(tmp_path / "tier", budget_bytes=10_000)
    (tmp_path / "tier").rmdir()
    tier.put(name_of(1), bytes(100))
    assert tier.get(name_of(1), 100) is None
    monkeypatch.setattr(module, "_LEFT_BYTES", 1 << 62)
    full = LocalTier(tmp_path / "full", budget_bytes=10_000)
    full.put(name_of(1), bytes(100))
    assert (full.statistics().rejected, full.has(name_of(1))) == (1, False)


def test_reports_an_unusable_location(tmp_path):
    with pytest.raises(SettingError, match="budget_bytes"):
        LocalTier(tmp_path, budget_bytes=0)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(SettingError, match=r"samples cannot be kept in .*file/tier: Not a directory"):
        LocalTier(tmp_path / "file" / "tier", budget_bytes=100)


KILLED = """
import sys
from pathlib import Path
from frostline.stores.protocols import ByteRange
from frostline.stores.disk_tier import LocalTier, tier_name

tier = LocalTier(Path(sys.argv[1]), budget_bytes=1 << 22)
for number in range(1 << 30):
    whole = ByteRange(f"{number % 500}.jpg", 0, 100)
    tier.put(tier_name("s3://photos", whole, "v"), bytes([number % 500 % 256]) * 4000)
    if number == 100:
        print("under way", flush=True)
"""


def test_a_killed_process_leaves_nothing_that_is_wrong(tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    argv = [sys.executable, "-c", KILLED, tmp_path]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, env=environment) as process:
        process.stdout.readline()
        process.kill()
    tier = LocalTier(tmp_path, budget_bytes=1 << 22)
    found = [tier.get(name_of(number), 4000) for number in range(500)]
    assert [item is None or bytes(item) == bytes([number % 256]) * 4000 for number, item in enumerate(found)] == [
        True
    ] * 500
    assert tier.statistics().hits >= 100
    assert tier.statistics().damaged == 0
