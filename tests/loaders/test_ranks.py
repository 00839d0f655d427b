"""Ranks in processes of their own, over loopback: they share an epoch, and refuse to when they would not."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import frostline as fl
from frostline.core.errors import SettingError
from support.images import image_folder

WORLD = 3


@pytest.fixture(scope="module")
def seen(shared_node, tmp_path_factory):
    """What each of three ranks saw."""
    place = tmp_path_factory.mktemp("ranks")
    folder, other = image_folder(place / "images", per_class=10), image_folder(place / "other", per_class=11)
    command = [sys.executable, "-m", "support.ranks"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(WORLD), str(folder), str(other), shared_node.url, str(place)],
            cwd=Path(__file__).parents[1],
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(WORLD)
    ]
    try:
        return [json.loads(rank.communicate(timeout=200)[0]) for rank in ranks], fl.Dataset(folder)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def test_ranks_of_a_process_group_share_an_epoch_without_being_told(seen):
    found, data = seen
    assert sorted(id for item in found for batch in item["ids"] for id in batch) == sorted(data.samples.ids.tolist())
    assert [len(item["ids"]) for item in found] == [3, 3, 3]
    assert found[0]["state"] == found[1]["state"] == found[2]["state"]


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("seed", "the seed differs: rank 0 has 0, rank 1 has 1"),
        ("epoch", "the epoch differs: rank 0 has 0, rank 1 has 7"),
        ("manifest", "the manifest of the samples differs"),
        ("store", "the seed differs: rank 0 has 0, rank 1 has 1"),
        ("workers", "the seed differs: rank 0 has 0, rank 1 has 1"),
    ],
)
def test_ranks_that_differ_are_refused_everywhere_with_what_differs_and_where(seen, what, said):
    assert all(said in event["said"][what] and "rank 1 has" in event["said"][what] for event in seen[0])


def test_agreeing_ranks_go_on_after_a_refusal_and_a_single_rank_asks_none(seen):
    assert all(not {"nothing", "alone"} & event["said"].keys() for event in seen[0])


def test_a_rank_that_never_comes_is_named(seen):
    assert "rank 1 did not say what it is about to read" in seen[0][0]["said"]["absent"]


def test_without_a_process_group_there_is_one_rank():
    assert fl.Ranks.current() == fl.Ranks()


@pytest.mark.parametrize(("rank", "world_size"), [(2, 2), (-1, 2), (0, 0)])
def test_refuses_an_unknown_rank_in_one_sentence(rank, world_size):
    with pytest.raises(SettingError, match="rank must lie"):
        fl.Ranks(rank=rank, world_size=world_size)
