"""What names a feature: everything that its numbers depend on, and nothing else."""

from dataclasses import fields, replace

import numpy as np
import pytest

from frostline.cache import Scope, row_keys
from frostline.cache.disk import ScopeUsage, idle_scopes, stored_bytes
from frostline.cache.keys import add_checksum, verify_checksum
from frostline.core import Samples, View

SCOPE = Scope(
    data="s3://photos", prefix="ab", cut=3, preprocess="cd", engine="torch-eager", shapes=((3,),), dtypes=("float32",)
)
OTHER = {
    "data": "s3://other",
    "prefix": "ac",
    "cut": 4,
    "preprocess": "ce",
    "engine": "openvino",
    "batch_rows": 32,
    "shapes": ((4,),),
    "dtypes": ("float16",),
    "view": View(seed=0, epoch=1),
}
COLUMNS = {"ids": 8, "objects": "b.jpg", "offsets": 1, "lengths": 11, "versions": "e2"}


def samples(**columns):
    values = {"ids": 7, "objects": "a.jpg", "offsets": 0, "lengths": 10, "versions": "e1", **columns}
    numbers = {name: np.array([values.pop(name)]) for name in ("ids", "offsets", "lengths")}
    return Samples(labels=np.array([-1]), **numbers, **{name: [value] for name, value in values.items()})


@pytest.mark.parametrize("name", [field.name for field in fields(Scope)])
def test_features_of_another_scope_have_another_name(name):
    assert replace(SCOPE, **{name: OTHER[name]}).digest != SCOPE.digest
    assert replace(SCOPE).digest == SCOPE.digest


@pytest.mark.parametrize("name", COLUMNS)
def test_another_sample_or_another_version_of_it_has_another_name(name):
    assert row_keys(samples(**{name: COLUMNS[name]})) != row_keys(samples())
    assert row_keys(samples()) == row_keys(samples())


def test_a_sample_without_a_version_has_no_cache_key():
    assert row_keys(samples(versions="")) == [None]
    assert row_keys(replace(samples(), versions=())) == [None]


def test_a_value_opens_for_its_own_key_and_whole_alone():
    value = add_checksum(b"key", [b"abc", memoryview(b"defg")])
    assert verify_checksum(b"key", value, 7) == b"abcdefg"
    assert verify_checksum(b"kez", value, 7) is None
    assert verify_checksum(b"key", value[:-1], 7) is None
    assert verify_checksum(b"key", value[:-1], 6) is None
    assert verify_checksum(b"key", b"", 7) is None


def test_evicts_the_least_recently_used_and_never_the_requester():
    # By their sizes they would stand in another order, either way.
    about = ((1, 50, 2), (2, 10, 1), (3, 30, 3))
    shelves = [ScopeUsage(number=number, used_s=used_s, row_bytes=size) for number, used_s, size in about]
    idle = idle_scopes(shelves, wanting=2, now_s=100, idle_s=60)
    assert [shelf.number for shelf in idle] == [3]
    idle = idle_scopes(shelves, wanting=9, now_s=110, idle_s=60)
    assert [shelf.number for shelf in idle] == [2, 3, 1]


@pytest.mark.parametrize("row_bytes", [1, 100, 5000, 8100, 8200, 16_300, 16_400, 700_000])
def test_a_row_is_reckoned_with_what_it_takes_at_least(row_bytes):
    assert row_bytes < stored_bytes(row_bytes) < row_bytes + (16_384 if row_bytes > 5000 else 500) + 100
