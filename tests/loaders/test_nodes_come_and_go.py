"""Nodes come and go while a job runs, or are killed: batches and losses are those of a run that nothing disturbed."""

import json
import os
import random
import signal

import pytest
import torch

import frostline as fl
from frostline.client import membership
from frostline.core.config import LoaderSettings, NodeSettings
from frostline.core.events import BatchDelivered, NodeJoined, NodeLeft
from frostline.node.process import start_node
from support import plain
from support.images import image_folder, tiny_preprocess
from support.many_nodes import epoch, frozen, hits, job, same, some_nodes
from support.nodes import until

COUNT = 3 * 96


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return image_folder(tmp_path_factory.mktemp("images"), per_class=96, size=(40, 36))


@pytest.fixture
def quick(monkeypatch):
    """Files are looked at often."""
    monkeypatch.setattr(membership, "_FILE_EVERY_S", 0.02)
    monkeypatch.setattr(membership, "_EVERY_S", 0.2)


def write(file, urls):
    part = file.with_suffix(".part")
    part.write_text(json.dumps(list(urls)))
    part.replace(file)


def test_from_four_nodes_to_two_to_six_while_a_job_runs(folder, tmp_path, quick):
    with some_nodes(folder, tmp_path / "alone", 1) as (_, urls), job(folder, urls) as running:
        expected = [epoch(running, number) for number in range(5)]
    file, told, found = tmp_path / "nodes.json", [], []
    with some_nodes(folder, tmp_path / "kept", 6) as (nodes, urls):
        write(file, urls[:4])
        with job(folder, file.as_uri(), observe=told.append) as running:

            def change_to(count, kind):
                before = sum(isinstance(event, kind) for event in told)
                write(file, urls[:count])
                wanted = before + (2 if kind is NodeLeft else 4)
                until(lambda: sum(isinstance(event, kind) for event in told) == wanted)

            for number in range(5):
                batches = []
                for batch in running.loader(16, shuffle=True, seed=3, epoch=number):
                    batches.append(batch)
                    if len(batches) == 9 and number == 1:
                        change_to(2, NodeLeft)
                    if len(batches) == 9 and number == 3:
                        change_to(6, NodeJoined)
                found.append(batches)
        assert all(map(same, found, expected))
        assert all(node.statistics().totals.samples > 0 for node in nodes)
        # Half of the blocks had to move first, and two thirds of them later.
        assert hits(nodes) >= 0.6 * 4 * COUNT


def test_killed_nodes_cost_their_requests_and_losses_are_those_of_an_undisturbed_run(folder, tmp_path, quick):
    draw, data = random.Random(7), fl.Dataset(folder)
    settings = NodeSettings(memory_bytes=256 << 20, device_batch=8, trial_s=0)
    expected = plain.losses(frozen(), folder, data, tiny_preprocess(), batch_size=16, epochs=2)
    file, taken, killed = tmp_path / "nodes.json", [], []
    with (
        start_node((data.url,), settings) as first,
        start_node((data.url,), settings) as second,
        start_node((data.url,), settings) as third,
    ):
        alive = [first, second, third]
        write(file, [process.url for process in alive])

        def kill_at_random(event):
            if isinstance(event, BatchDelivered):
                taken.append(event)
                if len(taken) in (5, 23):
                    victim = alive.pop(draw.randrange(len(alive)))
                    os.kill(victim.pid, signal.SIGKILL)
                    killed.append(victim)
                if len(taken) == 12:  # the list says so later, or never
                    write(file, [process.url for process in alive])

        with job(folder, file.as_uri(), observe=kill_at_random, retry_for_s=60) as running:
            torch.manual_seed(0)
            losses = plain.through(running, batch_size=16, epochs=2)
    assert len(killed) == 2
    assert losses == expected


def test_worker_processes_follow_the_list_too(folder, tmp_path):
    with some_nodes(folder, tmp_path, 2) as (nodes, urls):
        file = tmp_path / "nodes.json"
        write(file, urls)
        with job(folder, file.as_uri()) as running:
            loader = torch.utils.data.DataLoader(
                running.loader(16, shuffle=True, seed=3), batch_size=None, num_workers=2
            )
            assert sum(len(batch) for batch in loader) == COUNT
        assert all(node.statistics().totals.samples > 0 for node in nodes)


def test_a_list_that_names_no_node_is_refused_when_the_job_is_made(folder, tmp_path):
    file = tmp_path / "nodes.json"
    write(file, [])
    with pytest.raises(fl.errors.NodeUnreachable, match="there is no node in file:"):
        fl.offload(None, fl.Dataset(folder), near=file.as_uri(), settings=LoaderSettings())
