"""Measurements that are kept: found again under the same key alone, whole or not there."""

from dataclasses import replace

import pytest

from frostline.jobs.profiling import MeasuredPrefix, ProfileCache, ProfileKey
from frostline.profiles import CodecCost, CutCost

KEY = ProfileKey(
    prefix="ab" * 32, hardware="cpu, 2 threads", engine="torch 2", device_batch=32, codecs=("lz4",), packed_cuts=(1,)
)
MEASURED = MeasuredPrefix(
    cuts=(
        CutCost(number=1, seconds=0.01, spread_s=0.001, fixed_bytes=10, bytes_per_sample=20, remaining_fixed_bytes=3),
    ),
    codecs=(CodecCost(cut=1, codec="lz4", bytes_per_sample=12.5, encode_s=1e-4, decode_s=2e-4),),
)


def test_the_next_process_finds_kept_features(tmp_path):
    ProfileCache(tmp_path / "profiles").put(KEY, MEASURED)
    assert ProfileCache(tmp_path / "profiles").get(KEY) == MEASURED


@pytest.mark.parametrize(
    "other",
    [
        {"prefix": "cd" * 32},
        {"hardware": "cpu, 1 threads"},
        {"engine": "torch 3"},
        {"device_batch": 8},
        {"codecs": ()},
        {"packed_cuts": ()},
    ],
)
def test_another_network_machine_or_engine_is_measured_anew(tmp_path, other):
    kept = ProfileCache(tmp_path)
    kept.put(KEY, MEASURED)
    assert kept.get(replace(KEY, **other)) is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"cuts": [{}], "codecs": []}', '{"cuts": 3}'])
def test_a_file_that_says_something_else_counts_as_not_there(tmp_path, text):
    kept = ProfileCache(tmp_path)
    kept.put(KEY, MEASURED)
    next(tmp_path.glob("*.json")).write_text(text)
    assert kept.get(KEY) is None


def test_a_folder_that_takes_no_file_costs_nothing_but_the_next_measurement(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    kept = ProfileCache(blocked / "profiles")
    kept.put(KEY, MEASURED)
    assert kept.get(KEY) is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]
