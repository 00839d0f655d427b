"""Jobs over several nodes, which come, go and are killed.

Jobs over several nodes: each node keeps its own part, and order, values, states and failures are those of one.

Nodes come and go while a job runs, or are killed: batches and losses are those of a run that nothing disturbed.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import numpy as np
import pytest
import torch

import frostline as fl
from frostline.client import membership
from frostline.client.http import HttpTransport
from frostline.core.config import LoaderSettings, NodeSettings
from frostline.core.errors import NodeUnreachable, Unavailable
from frostline.core.events import BatchDelivered, NodeBack, NodeJoined, NodeLeft, NodeLost
from frostline.node.process import start_node
from support import plain
from support.images import image_folder, tiny_preprocess
from support.many_nodes import epoch, frozen, hits, job, same, some_nodes
from support.nodes import stop, until
from support.prepared import PLAIN

pytestmark = pytest.mark.promise("survives")

PER_CLASS = 128
COUNT = 3 * PER_CLASS


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return image_folder(tmp_path_factory.mktemp("images"), per_class=PER_CLASS, size=(40, 36))


@pytest.fixture(scope="module")
def alone(folder, tmp_path_factory):
    """Two epochs with one node."""
    with some_nodes(folder, tmp_path_factory.mktemp("kept"), 1) as (nodes, urls), job(folder, urls) as running:
        found = [epoch(running, number) for number in (0, 1)]
        assert hits(nodes) == COUNT
        return found


@pytest.mark.parametrize("count", [2, 3])
def test_a_second_epoch_on_several_nodes_hits_as_on_one_with_the_same_batches(folder, alone, tmp_path, count):
    with some_nodes(folder, tmp_path, count) as (nodes, urls), job(folder, urls) as running:
        assert same(epoch(running, 0), alone[0])
        assert hits(nodes) == 0
        assert same(epoch(running, 1), alone[1])
        assert hits(nodes) == COUNT
        each = [node.statistics().totals.samples / 2 for node in nodes]
        assert max(each) <= 1.6 * COUNT / count  # 24 blocks of 16 rows divide roughly


def test_another_job_and_a_part_of_the_data_find_what_the_first_job_left(folder, tmp_path):
    with some_nodes(folder, tmp_path, 3) as (nodes, urls):
        with job(folder, urls) as first:
            epoch(first, 0)
        before = hits(nodes)
        part, _ = fl.Dataset(folder).split(0.5, seed=1)
        with job(folder, urls[::-1], part) as second:
            taken = sum(len(batch) for batch in epoch(second, 5))
        assert hits(nodes) - before == taken == len(part)


def test_a_run_goes_on_from_a_state_where_it_was(folder, alone, tmp_path):
    with some_nodes(folder, tmp_path, 2) as (_, urls), job(folder, urls) as running:
        loader = running.loader(16, shuffle=True, seed=3, epoch=0)
        taken = []
        for batch in loader:
            taken.append(batch)
            if len(taken) == 5:
                break
        state = loader.state_dict()
        again = running.loader(16, shuffle=True, seed=3, epoch=0)
        again.load_state_dict(state)
        assert same([*taken, *again], alone[0])


def test_epochs_that_run_into_each_other_keep_their_order(folder, alone, tmp_path):
    with some_nodes(folder, tmp_path, 2) as (_, urls), job(folder, urls) as running:
        found = [list(loader) for loader in running.epochs(16, range(2), shuffle=True, seed=3)]
    assert all(map(same, found, alone))


def test_samples_that_cannot_be_read_are_skipped_and_the_order_stays(tmp_path):
    images = image_folder(tmp_path / "images", per_class=40, size=(40, 36))
    for name in ("circle/003.jpg", "noise/017.jpg", "stripe/039.jpg"):
        (images / name).write_bytes(b"no image")
    found = []
    for count in (1, 3):
        nodes = some_nodes(images, tmp_path / f"kept-{count}", count)
        with nodes as (_, urls), job(images, urls, max_skipped_fraction=0.1) as running:
            found.append(epoch(running, 0))
    assert same(*found)
    assert sum(map(len, found[0])) == 117


def test_plain_and_encoded_samples_come_in_order_too(folder, tmp_path):
    settings = LoaderSettings(samples_per_request=8, cache_bytes=0)
    found = []
    for count in (1, 3):
        with (
            some_nodes(folder, tmp_path / str(count), count) as (_, urls),
            fl.offload(None, fl.Dataset(folder), preprocess=tiny_preprocess(), near=urls, settings=settings) as run,
        ):
            pixels = list(run.arrays(32, shuffle=True, seed=2))
            encoded = list(run.arrays(32, shuffle=True, seed=2, encoded=True))
        found.append((pixels, encoded))
    for one_node, several in zip(*found, strict=True):
        for expected, batch in zip(one_node, several, strict=True):
            assert np.array_equal(batch.ids, expected.ids)
            assert batch.features.tolist() == expected.features.tolist()


COUNT_OF_NODES_COME_AND_GO = 3 * 96


@pytest.fixture(scope="module")
def folder_of_nodes_come_and_go(tmp_path_factory):
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


def test_from_four_nodes_to_two_to_six_while_a_job_runs(folder_of_nodes_come_and_go, tmp_path, quick):
    with (
        some_nodes(folder_of_nodes_come_and_go, tmp_path / "alone", 1) as (_, urls),
        job(folder_of_nodes_come_and_go, urls) as running,
    ):
        expected = [epoch(running, number) for number in range(5)]
    file, told, found = tmp_path / "nodes.json", [], []
    with some_nodes(folder_of_nodes_come_and_go, tmp_path / "kept", 6) as (nodes, urls):
        write(file, urls[:4])
        with job(folder_of_nodes_come_and_go, file.as_uri(), on_event=told.append) as running:

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
        assert hits(nodes) >= 0.6 * 4 * COUNT_OF_NODES_COME_AND_GO


def test_killed_nodes_cost_their_requests_and_losses_are_those_of_an_undisturbed_run(
    folder_of_nodes_come_and_go, tmp_path, quick
):
    draw, data = random.Random(7), fl.Dataset(folder_of_nodes_come_and_go)
    settings = NodeSettings(memory_bytes=256 << 20, device_batch=8, trial_s=0)
    expected = plain.losses(frozen(), folder_of_nodes_come_and_go, data, tiny_preprocess(), batch_size=16, epochs=2)
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

        with job(folder_of_nodes_come_and_go, file.as_uri(), on_event=kill_at_random, retry_for_s=60) as running:
            torch.manual_seed(0)
            losses = plain.through(running, batch_size=16, epochs=2)
    assert len(killed) == 2
    assert losses == expected


def _longest_gap(running, number=0, hang=None, at=4):
    """An epoch's batches, and the longest time between two of them; ``hang`` is called after some."""
    batches, seen, longest = [], time.monotonic(), 0.0
    for batch in running.loader(16, shuffle=True, seed=3, epoch=number):
        longest, seen = max(longest, time.monotonic() - seen), time.monotonic()
        batches.append(batch)
        if hang is not None and len(batches) == at:
            hang()
            seen = time.monotonic()
    return batches, longest


# What is promised is 3 s; the rest is for a machine on which much else runs.
STANDSTILL_S = 3.0 + 3.0


@pytest.fixture(scope="module")
def three(folder_of_nodes_come_and_go):
    settings = NodeSettings(memory_bytes=256 << 20, device_batch=8, trial_s=0)
    with ExitStack() as stack:
        url = fl.Dataset(folder_of_nodes_come_and_go).url
        yield [stack.enter_context(start_node((url,), settings)) for _ in range(3)]


@pytest.fixture(scope="module")
def undisturbed(folder_of_nodes_come_and_go, three):
    with job(folder_of_nodes_come_and_go, three[0].url) as running:
        return epoch(running, 0)


def near_of(kind, nodes, folder):
    urls = [process.url for process in nodes]
    if kind == "addresses":
        return urls
    write(folder / "nodes.json", urls)
    return (folder / "nodes.json").as_uri()


@pytest.mark.parametrize("kind", ["addresses", "a list"])
def test_a_node_that_hangs_costs_three_seconds_and_has_a_name_and_comes_back(
    folder_of_nodes_come_and_go, three, undisturbed, tmp_path, kind
):
    told, hung = [], three[1]
    near = near_of(kind, three, tmp_path)
    try:
        with job(folder_of_nodes_come_and_go, near, on_event=told.append) as running:
            found, longest_s = _longest_gap(running, hang=lambda: os.kill(hung.pid, signal.SIGSTOP))
            assert same(found, undisturbed)
            assert longest_s < STANDSTILL_S
            until(lambda: any(isinstance(event, NodeLost) for event in told))
            losses = [event for event in told if isinstance(event, NodeLost)]
            assert [event.url for event in losses] == [hung.url], losses
            lost = losses[0]
            # A read that is silent, or a probe that is over its time, whichever comes first.
            assert "said nothing for too long" in lost.reason or "did not answer within" in lost.reason
            uses = {use.url: use for use in running.statistics().nodes}
            assert uses[hung.url].trouble == lost.reason
            assert hung.url in str(running.explain())
            os.kill(hung.pid, signal.SIGCONT)
            until(lambda: NodeBack(url=hung.url) in told)
            before = uses[hung.url].samples
            assert same(epoch(running, 0), undisturbed)
            after = {use.url: use for use in running.statistics().nodes}[hung.url]
            assert after.samples > before
            assert after.trouble == ""
    finally:
        os.kill(hung.pid, signal.SIGCONT)


@pytest.mark.parametrize("begins", [False, True], ids=["in the middle", "at the start"])
def test_an_only_node_that_hangs_is_named_within_seconds_and_goes_on_where_it_was(
    folder_of_nodes_come_and_go, three, undisturbed, begins
):
    told, hung = [], three[0]

    def happened(kind):
        return any(isinstance(event, kind) and event.url == hung.url for event in told)

    def run():
        with job(folder_of_nodes_come_and_go, hung.url, on_event=told.append) as running:
            found = epoch(running, 0) if begins else _longest_gap(running, hang=lambda: stop(hung.pid))[0]
            until(lambda: happened(NodeBack))  # a job that is over tells nothing more
            return found

    with ThreadPoolExecutor(1) as pool:
        try:
            if begins:
                stop(hung.pid)
            found, started = pool.submit(run), time.monotonic()
            until(lambda: happened(NodeLost))
            took_s = time.monotonic() - started
        finally:
            os.kill(hung.pid, signal.SIGCONT)
        assert same(found.result(), undisturbed)
    assert took_s < 60
    [event] = [event for event in told if isinstance(event, NodeLost)]
    assert event.sentence == f"{hung.url} is waited for: {event.reason}"
    assert "did not answer within 1.5 s" in event.reason
    assert "; the job ends after about 300 s of silence (twice deadline_s, now 120 s, and retry_for_s" in event.reason


def test_an_only_node_that_stays_silent_ends_a_job_within_the_bound_that_is_said(folder_of_nodes_come_and_go, three):
    hung, stopped_at = three[0], []

    def hang():
        stop(hung.pid)
        stopped_at.append(time.monotonic())

    limits, hedged = {"deadline_s": 3.0, "retry_for_s": 2.0}, {"hedge_quantile": 0.5, "samples_per_request": 2}
    try:
        with job(folder_of_nodes_come_and_go, hung.url, **limits, **hedged) as running:
            with pytest.raises(NodeUnreachable):
                _longest_gap(running, hang=hang, at=1)
            took_s = time.monotonic() - stopped_at[0]
    finally:
        os.kill(hung.pid, signal.SIGCONT)
    assert took_s < 2 * limits["deadline_s"] + limits["retry_for_s"] + STANDSTILL_S


def test_what_an_only_node_may_take_long_for_is_broken_off_where_it_hangs(folder_of_nodes_come_and_go, three):
    hung, told = three[0], []
    with closing(HttpTransport(hung.url, LoaderSettings(deadline_s=60))) as transport, ThreadPoolExecutor(1) as pool:
        roles = ("joined", "left", "refused", "lost", "back")
        watch = membership.NodeWatch(**{role: lambda *said: told.append(said) for role in roles})

        def probe(url):
            return HttpTransport(url, LoaderSettings(deadline_s=1.5))

        try:
            stop(hung.pid)
            watching = membership.watch_node(hung.url, transport, probe=probe, watch=watch, patience_s=2.0)
            with watching, pytest.raises(Unavailable):
                pool.submit(transport.health).result(30)
        finally:
            os.kill(hung.pid, signal.SIGCONT)
    assert told[0][0] == hung.url


def test_a_job_begins_though_a_node_of_a_list_hangs_from_the_start(
    folder_of_nodes_come_and_go, three, undisturbed, tmp_path
):
    told, hung, near = [], three[2], near_of("a list", three, tmp_path)
    try:
        stop(hung.pid)
        started = time.monotonic()
        with job(folder_of_nodes_come_and_go, near, on_event=told.append) as running:
            begun_s = time.monotonic() - started
            assert same(epoch(running, 0), undisturbed)
        ended_s = time.monotonic() - started
    finally:
        os.kill(hung.pid, signal.SIGCONT)
    assert [event.url for event in told if isinstance(event, NodeLost)] == [hung.url]
    assert begun_s < STANDSTILL_S + 5.0  # tracing the network too
    assert ended_s < 60


def test_worker_processes_follow_the_list_too(folder_of_nodes_come_and_go, tmp_path):
    with some_nodes(folder_of_nodes_come_and_go, tmp_path, 2) as (nodes, urls):
        file = tmp_path / "nodes.json"
        write(file, urls)
        with job(folder_of_nodes_come_and_go, file.as_uri()) as running:
            loader = torch.utils.data.DataLoader(
                running.loader(16, shuffle=True, seed=3), batch_size=None, num_workers=2
            )
            assert sum(len(batch) for batch in loader) == COUNT_OF_NODES_COME_AND_GO
        assert all(node.statistics().totals.samples > 0 for node in nodes)


def test_a_list_that_names_no_node_is_refused_when_the_job_is_made(folder_of_nodes_come_and_go, tmp_path):
    file = tmp_path / "nodes.json"
    write(file, [])
    with pytest.raises(fl.errors.NodeUnreachable, match="there is no node in file:"):
        fl.offload(None, fl.Dataset(folder_of_nodes_come_and_go), near=file.as_uri(), settings=LoaderSettings())


UNCLOSED = """
import sys, threading
import frostline as fl

job = fl.offload(None, sys.argv[1], near=sys.argv[2:], preprocess=fl.preprocess.imagenet(28))
for batch in job.loader(8, shuffle=True):
    threading.Timer(1.6, print, ["still here"]).start()  # nodes that are lost are asked again meanwhile
    raise KeyError("a mistake in the loop")
"""


def test_a_script_that_ends_without_closing_its_job_says_nothing_but_its_own_mistake(folder, tmp_path, monkeypatch):
    monkeypatch.setenv(PLAIN, "1")  # it is what Python does at its very end that is tried
    with some_nodes(folder, tmp_path, 2) as (_, urls):
        dead = "http://127.0.0.1:9"
        command = [sys.executable, "-c", UNCLOSED, str(folder), *urls, dead]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout) == (1, "still here\n")
    # The node that is not there is told of when it has been asked, which may be before the mistake or after it.
    said = [line for line in ended.stderr.splitlines() if not line.startswith(f"node {dead} is asked nothing for now")]
    assert (said[0], said[-1]) == ("Traceback (most recent call last):", "KeyError: 'a mistake in the loop'")
    assert len([line for line in said if "Traceback" in line or "Exception" in line]) == 1, ended.stderr
