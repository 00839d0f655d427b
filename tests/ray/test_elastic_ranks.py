"""Ranks join or leave in mid-epoch: training goes on at the next sample, each comes once, losses are the order's."""

import json
import os
import signal
import subprocess
import sys
from itertools import groupby

import pytest

import frostline as fl
from support import elastic_ranks
from support.elastic_ranks import train_in_turns
from support.images import image_folder
from support.ray_here import scratch_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Nine steps of eight samples."""
    return image_folder(tmp_path_factory.mktemp("images"), per_class=24, size=(40, 36))


@pytest.fixture(scope="module")
def alone(folder):
    """What one rank sees that nobody disturbs."""
    return train_in_turns(folder, [(1, None)])


def check(history, alone, folder):
    """Each sample once, in the order of one rank, with its losses."""
    assert [step["ids"] for step in history] == [step["ids"] for step in alone]
    assert sorted(id for step in history for id in step["ids"]) == sorted(fl.Dataset(folder).samples.ids.tolist())
    assert [step["loss"] for step in history] == pytest.approx([step["loss"] for step in alone], rel=1e-4)


def in_turns(history):
    return [(ranks, len(list(steps))) for ranks, steps in groupby(step["ranks"] for step in history)]


def test_one_rank_then_two_then_one_train_as_one_that_nobody_disturbed(folder, alone):
    history = train_in_turns(folder, [(1, 2), (2, 3), (1, None)])
    assert in_turns(history) == [(1, 2), (2, 3), (1, 4)]
    check(history, alone, folder)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_workers_of_ray_train_come_and_go_and_nothing_is_lost(folder, alone, shared_node, tmp_path):
    pytest.importorskip("ray", reason="training under Ray needs the extra frostline[ray]")
    with scratch_folder() as scratch:
        own = {"RAY_TMPDIR": scratch, "TMPDIR": scratch, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
        own |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, elastic_ranks.__file__, folder, tmp_path, shared_node.url]
        history = json.loads(said_by(command, {**os.environ, **own}).splitlines()[-1])["history"]
    turns = in_turns(history)
    assert [ranks for ranks, _ in turns] == [1, 2, 1]
    assert turns[0][1] + turns[1][1] <= 5, "steps of workers that Ray has not heard of are not in it"
    check(history, alone, folder)


def said_by(command, environment):
    """What a process writes that ends well; it and all that it started are ended in any case."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, env=environment, text=True, start_new_session=True, **pipes)
    try:
        said, complained = process.communicate(timeout=600)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, complained[-4000:]
    return said
