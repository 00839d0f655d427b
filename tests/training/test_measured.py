"""Measured situations are kept whole, under what they were measured for."""

import json

import pytest

from frostline.core.config import LoaderSettings, NodeSettings, cache_folder
from frostline.core.errors import SettingError
from frostline.planning import make_plan
from frostline.training.settings import JobSettings
from frostline.training.what_if import find, keep, recent_situation
from support.plans import a_situation


@pytest.fixture(autouse=True)
def _cache_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def a_job(**changes):
    return JobSettings(**{"data": "s3://photos/waste", "model": "timm:resnet18", "until": "features", **changes})


def test_a_kept_measurement_gives_the_same_plan():
    measured = recent_situation(a_job(), a_situation(accuracy=0.01), fallback="it branches on values")
    path = keep(measured)
    found = find(a_job())
    assert found == measured
    assert make_plan(found.situation) == make_plan(measured.situation)
    assert path.parent == cache_folder() / "plans"


def test_a_newer_measurement_takes_the_place_of_the_older_one():
    keep(recent_situation(a_job(), a_situation()))
    path = keep(recent_situation(a_job(), a_situation(nodes=3)))
    assert find(a_job()).situation.nodes == 3
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    "changes",
    [
        {"data": "s3://photos/other"},
        {"model": "timm:resnet50"},
        {"until": "layer3"},
        {"near": "http://store-1:7070"},
        {"weights": "w.safetensors"},
        {"augment": True},
        {"accuracy": "fp16"},
        {"accuracy": 0.01},
        {"seed": 1},
        {"node": NodeSettings(memory_bytes=1 << 30)},
        {"node": NodeSettings(device="cuda")},
    ],
    ids=str,
)
def test_a_measurement_answers_only_for_what_it_was_made_for(changes):
    keep(recent_situation(a_job(), a_situation()))
    assert find(a_job(**changes)) is None


def test_shares_measurements_across_irrelevant_differences():
    near = "http://store-1:7070"
    keep(recent_situation(a_job(near=near), a_situation()))
    asked = a_job(
        near=f"{near}/", cut=3, loader=LoaderSettings(max_skipped_fraction=0.5), node=NodeSettings(device="cuda")
    )
    assert find(asked) is not None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"situation": {}}', '{"situation": {"cuts": 3}}'])
def test_treats_an_unreadable_file_as_absent(text):
    path = keep(recent_situation(a_job(), a_situation()))
    path.write_text(text)
    assert find(a_job()) is None


def test_a_password_is_refused_before_anything_is_written():
    with pytest.raises(SettingError, match="no name or password") as refused:
        recent_situation(a_job(data="s3://me:secret@photos/waste"), a_situation())
    assert "secret" not in str(refused.value)


def test_the_file_says_what_it_is_about():
    path = keep(recent_situation(a_job(), a_situation()))
    kept = json.loads(path.read_text())
    assert kept["asked"]["data"] == "s3://photos/waste"
    assert kept["asked"]["until"] == "features"
    assert kept["measured"].endswith("+00:00")
