"""Ranks join or leave in mid-epoch: training goes on at the next sample, each comes once, losses are the order's."""

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path

import pytest

import frostline as fl
from support import elastic_ranks
from support.elastic_ranks import train_in_turns
from support.images import image_folder
from support.nodes import until


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
def test_workers_of_ray_train_come_and_go_in_mid_epoch_and_nothing_is_lost_or_doubled(folder, alone, here, tmp_path):
    pytest.importorskip("ray", reason="training under Ray needs the extra frostline[ray]")
    with ThreadPoolExecutor(1) as threads, seat(here):
        history = threads.submit(here.module, elastic_ranks.__file__, folder, tmp_path)
        until(lambda: history.done() or Path(tmp_path, "held-by-1").exists(), timeout_s=300)
        with seat(here):
            until(lambda: history.done() or Path(tmp_path, "held-by-2").exists(), timeout_s=300)
        history = json.loads(history.result().splitlines()[-1])["history"]
    assert in_turns(history) == [(1, 2), (2, 3), (1, 4)], "steps of workers that were not kept are not in it"
    check(history, alone, folder)


@contextmanager
def seat(here):
    """A host of Ray that has room for one worker, until it dies."""
    options = ["--num-cpus=0", "--object-store-memory=80000000", '--resources={"seat": 1}', "--disable-usage-stats"]
    command = [sys.executable, "-P", "-m", "ray.scripts.scripts", "start", "--block", f"--address={here.address}"]
    process = subprocess.Popen(
        [*command, *options], env=here.joining, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield
    finally:
        for raylet in raylets_of(process.pid):
            os.kill(raylet, signal.SIGKILL)
        process.terminate()
        process.wait()


def raylets_of(parent):
    """The process that stands for a host, among those that a command has started."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [
        int(child) for child in children if b"/raylet" in Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")[0]
    ]
