"""A node that is full while a job begins: the job waits for as long as the node asks, says so, and gives up in time."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch

import frostline as fl
from frostline.core.config import LoaderSettings, NodeSettings
from frostline.core.errors import NodeUnreachable, Overloaded
from frostline.core.events import NodeFull, PhaseStarted
from frostline.jobs.profiling import measure_link
from frostline.loaders.fetch import RetryPolicy
from frostline.node import Node
from frostline.node import weights as stays
from frostline.testing.transports import Act, ScriptedTransport
from support import nodes
from support.images import image_folder, tiny_preprocess
from support.networks import Small
from support.nodes import make_images, request, served
from support.tenants import tenant, token_of


class Time:
    """Seconds that pass only where somebody waits."""

    def __init__(self):
        self.now = 0.0

    def wait(self, seconds):
        self.now += seconds


def asking(events, time, retry_for_s=60.0):
    return RetryPolicy(
        retry_for_s=retry_for_s, observe=events.append, clock=lambda: time.now, wait=time.wait, jitter=float
    )


def full(retry_after_s):
    return Act(error=Overloaded("64 requests are in work", retry_after_s=retry_after_s))


def test_asks_a_full_node_again_after_the_time_it_named(tmp_path):
    events, time = [], Time()
    node = ScriptedTransport([full(3.0), full(0.0)])
    asked = request(make_images(tmp_path, 4), 0)
    crossed = asking(events, time)(lambda: measure_link(node, asked))
    assert crossed.encoded.ids.tolist() == asked.samples.ids.tolist()
    assert [(event.attempt, event.delay_s) for event in events] == [(2, 3.0), (3, 0.2)]
    assert all("64 requests" in event.reason for event in events)
    assert time.now == pytest.approx(3.2)


@pytest.mark.parametrize(("retry_after_s", "waits"), [(61.0, 0), (20.0, 3)])
def test_ends_the_job_with_one_sentence_where_the_node_stays_full(retry_after_s, waits):
    events, time = [], Time()

    def ask():
        raise Overloaded("no room", retry_after_s=retry_after_s)

    with pytest.raises(NodeUnreachable, match=r"was full at .* no room; .* raise retry_for_s"):
        asking(events, time)(ask)
    assert len(events) == waits


def test_does_not_wait_for_an_unreachable_node():
    events = []
    node = ScriptedTransport()
    node.go_down()
    with pytest.raises(NodeUnreachable, match="is down"):
        asking(events, Time())(node.health)
    assert events == []


def test_a_job_begins_at_a_full_node_as_soon_as_memory_is_free(tmp_path):
    folder = image_folder(tmp_path / "images", per_class=4)
    model = fl.freeze(Small().train(), "stem", input_shape=(3, 32, 32))
    with Node(NodeSettings(memory_bytes=1 << 28, max_requests=1), (folder.as_uri(),)) as node, served(node) as url:
        others = [node.admit()]  # as other jobs' requests are in work
        events = []

        def observe(event):
            events.append(event)
            if isinstance(event, NodeFull):
                others.pop().__exit__(None, None, None)
            elif isinstance(event, PhaseStarted) and event.name.startswith("measuring"):
                others.append(node.admit())

        settings = LoaderSettings(requests_in_flight=1, measure_first=True)
        data, steps = fl.Dataset(folder), tiny_preprocess()
        with fl.offload(model, data, preprocess=steps, near=url, settings=settings, observe=observe) as job:
            rows = torch.cat([batch.ids for batch in job.loader(batch_size=4)])
    assert sorted(rows.tolist()) == sorted(data.samples.ids.tolist())
    waits = [event for event in events if isinstance(event, NodeFull)]
    assert len(waits) == 2  # for the prefix, and for the samples that cross to measure the link
    assert all(wait.delay_s >= 1 for wait in waits)


def test_jobs_whose_networks_do_not_fit_together_take_turns_and_have_all_their_features(tmp_path, monkeypatch):
    monkeypatch.setattr(stays, "_TURN_S", 0.02)
    folder = image_folder(tmp_path / "images", per_class=20)
    data, names, last = fl.Dataset(folder), ("ann", "bob", "cat", "dan"), nodes.small_network(side=8).cuts[-1].number
    # Eighteen megabytes for weights, and each network takes seven.
    settings = NodeSettings(memory_bytes=96 << 20, device_batch=8, tenants=tuple(map(tenant, names)), max_requests=32)

    def job_of(number, **options):
        torch.manual_seed(number)
        model = fl.freeze(nodes.Small(width=440).eval(), "features")
        steps = tiny_preprocess(flip=True, side=8)  # so that nothing is kept from one epoch to the next
        return fl.offload(model, data, preprocess=steps, cut=last, **options)

    def features(job):
        batches = [batch for epoch in range(4) for batch in job.loader(8, shuffle=True, seed=0, epoch=epoch)]
        return torch.cat([batch.features for batch in batches]), torch.cat([batch.ids for batch in batches])

    with Node(settings, (folder.as_uri(),)) as node, served(node) as url, ExitStack() as stack:
        asking = [LoaderSettings(token=token_of(name), samples_per_request=8, requests_in_flight=2) for name in names]
        jobs = [stack.enter_context(job_of(number, near=url, settings=item)) for number, item in enumerate(asking)]
        with ThreadPoolExecutor(len(jobs)) as threads:
            got = list(threads.map(features, jobs))
        totals = node.statistics().totals
    assert totals.evicted > len(names), "they had to wait for the places of others"
    for number, (rows, ids) in enumerate(got):
        assert sorted(ids.tolist()) == sorted(data.samples.ids.tolist() * 4)
        with job_of(number, node=NodeSettings(memory_bytes=1 << 28, device_batch=8)) as job:
            alone, their_ids = features(job)
        assert torch.equal(ids, their_ids)
        assert torch.equal(rows, alone)
