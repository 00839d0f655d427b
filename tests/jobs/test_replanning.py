"""Jobs whose link or parts change: the plan follows, and what holds a job back is named.

A real node behind a link whose rate changes: the plan follows, and nothing that the loop sees changes.

Jobs that something holds back, made so for real: the diagnosis names it, and a job says nothing it cannot know.
"""

import copy
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

import frostline as fl
from frostline.core import Route
from frostline.core.config import LoaderSettings, NodeSettings
from frostline.core.errors import SettingError
from frostline.core.events import Replanned
from frostline.jobs import usage
from frostline.models import freeze
from frostline.node import Node
from frostline.node.process import start_node
from frostline.planning.replanning import CACHE, NODE, NOTHING_YET, QUOTA, TRAINER, Usage
from support import plain
from support.control_planes import control_plane
from support.images import image_folder, tiny_preprocess
from support.networks import Small
from support.nodes import served
from support.paced import PacedLink
from support.tenants import tenant, token_of

SETTINGS = LoaderSettings(
    samples_per_request=32, requests_in_flight=3, device_batch=8, cache_bytes=0, measure_first=True
)
BATCH = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return image_folder(tmp_path_factory.mktemp("images"), per_class=160, size=(160, 120))


@pytest.fixture(scope="module")
def node(folder):
    with start_node((str(folder),), NodeSettings(memory_bytes=1 << 28, device_batch=8, trial_s=0)) as process:
        yield process


def frozen():
    torch.manual_seed(1)
    return freeze(Small().train(), "stem", input_shape=(3, 32, 32))


def job_for(data, near, model, **options):
    settings = options.pop("settings", SETTINGS)
    data = data if isinstance(data, fl.Dataset) else fl.Dataset(data)
    return fl.offload(model, data, preprocess=tiny_preprocess(), near=near, settings=settings, **options)


@pytest.fixture(scope="module")
def few(folder):
    """A part of the images; losses are the same for any number."""
    return fl.Dataset(folder).take(np.arange(0, 480, 4))


@pytest.fixture(scope="module")
def expected(folder, few):
    """The losses of the plain loop on a part of the images."""
    return plain.losses(frozen(), folder, few, tiny_preprocess(), batch_size=BATCH, epochs=1)


def train(job, between, epochs=3):
    """Losses and ids; ``between`` is called with the number of samples taken after each batch."""
    losses, ids, taken = [], [], 0
    optimizer = torch.optim.SGD([parameter for parameter in job.head.parameters() if parameter.requires_grad], lr=0.1)
    for epoch in range(epochs):
        job.head.train()
        torch.manual_seed(epoch)
        for batch in job.loader(BATCH, shuffle=True, seed=3, epoch=epoch):
            loss = torch.nn.functional.cross_entropy(job.head(batch.features), batch.labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
            ids += batch.ids.tolist()
            taken += len(batch)
            between(taken)
    return losses, ids


def test_the_plan_follows_a_link_that_becomes_thin_and_the_loop_sees_no_difference(folder, node):
    model = frozen()
    undisturbed, events = copy.deepcopy(model), []
    with PacedLink(node.url, 50e6) as link, job_for(folder, link.url, model, on_event=events.append) as job:
        job.use({Route(1): 1.0}, replan=True)  # pixels: the heaviest way, as on a link without bound

        def thinner(taken):
            if taken == 4 * BATCH:
                link.bytes_per_s = 1e6

        losses, ids = train(job, thinner)
        replans = [event for event in events if isinstance(event, Replanned)]
        statistics = job.statistics()
    with job_for(folder, node.url, undisturbed, settings=SETTINGS) as job:
        expected = train(job, lambda _: None)
    assert (losses, ids) == expected
    assert replans
    assert replans[0].before.startswith("100 % cut 1")
    assert "may cross the link" in replans[0].reason
    assert statistics.replans == tuple(replans)
    assert len(statistics.routed) > 1
    assert sum(rows for _, rows in statistics.routed) == len(ids)


def test_the_plan_follows_a_share_of_a_control_plane_as_it_follows_a_link(folder, node, tmp_path):
    """The link would carry pixels; this job may move so few of its bytes that no busy machine is slower still."""
    with control_plane(tmp_path, time.time, bytes_per_s=3e5) as (control, _):
        settings = replace(SETTINGS, control=control, hedge_quantile=1.0)
        with job_for(folder, node.url, frozen(), settings=settings) as job:
            job.use({Route(1): 1.0}, replan=True)
            for _ in range(12):  # on a busy machine it takes longer until the rates are believed
                train(job, lambda _: None, epochs=1)
                if replans := job.statistics().replans:
                    break
    assert replans
    assert replans[0].before.startswith("100 % cut 1")
    assert "300 kB/s may cross" in replans[0].reason


@pytest.mark.parametrize(
    "shares",
    [
        {Route(0): 0.5, Route(4): 0.5},
        {Route(0): 0.2, Route(1): 0.3, Route(2): 0.25, Route(3): 0.25},
        {Route(1, "zstd"): 0.4, Route(2, "sparse+lz4"): 0.3, Route(4, "lz4"): 0.3},
    ],
    ids=["two cuts", "four cuts", "lossless codecs"],
)
@pytest.mark.parametrize("over_http", [False, True], ids=["in-process", "http"])
def test_any_mixture_of_cuts_and_lossless_codecs_has_the_losses_of_the_plain_loop(
    few, node, expected, shares, over_http
):
    settings = replace(SETTINGS, samples_per_request=8)
    options = {"settings": settings, "node": NodeSettings(device_batch=8)}
    with job_for(few, node.url if over_http else None, frozen(), **options) as job:
        job.use(shares)
        ours = plain.through(job, batch_size=BATCH, epochs=1)
        routed = dict(job.statistics().routed)
    assert ours == expected
    assert set(routed) == set(shares)
    for route, share in shares.items():
        assert abs(routed[route] - share * len(few)) <= 2 * settings.samples_per_request


@pytest.mark.parametrize(
    ("codec", "accuracy", "bound"),
    [("fp16", "fp16", 1e-3), ("int8", "int8", 2e-2), ("bf16", 0.005, 0.005), ("int8", 0.005, 0.005)],
)
def test_a_lossy_codec_keeps_to_the_allowed_error_and_reports_it(few, node, codec, accuracy, bound):
    kept = {}
    for name in ("exact", codec):
        with job_for(few, node.url, frozen(), accuracy=accuracy) as job:
            job.use({Route(job.frost_line.number, name): 1.0})
            batches = list(job.loader(BATCH))
            kept[name] = {
                id: row for batch in batches for id, row in zip(batch.ids.tolist(), batch.features.numpy(), strict=True)
            }
            error, text = job.statistics().codec_error, str(job.explain())
    ours, theirs = (np.array([kept[name][id] for id in sorted(kept["exact"])], np.float64) for name in ("exact", codec))
    inner = tuple(range(1, ours.ndim))
    worst = np.sqrt(np.mean((theirs - ours) ** 2, inner) / np.mean(ours**2, inner)).max()
    assert worst <= bound
    assert error == pytest.approx(worst, rel=1e-3)
    assert ("largest relative error" in text) == (worst > 0)


def test_refuses_shares_that_do_not_sum_to_one_and_unknown_cuts(folder, node):
    with job_for(folder, node.url, frozen()) as job:
        with pytest.raises(SettingError, match="sum to 1"):
            job.use({Route(0): 0.5})
        with pytest.raises(SettingError, match="no cut 99"):
            job.use({Route(99): 1.0})


@pytest.mark.parametrize("policy", ["baseline", "freeze", "min_bytes", "neurosurgeon", "hapi_v1", "hapi_v3"])
def test_every_published_rule_runs_with_the_losses_of_the_plain_loop(few, node, expected, policy):
    with job_for(few, node.url, frozen(), policy=policy) as job:
        assert job.plan.policy == policy
        assert plain.through(job, batch_size=BATCH, epochs=1) == expected


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"policy": "fastest"}, "there is no policy 'fastest'"),
        ({"policy": "freeze", "cut": 1}, "a cut or a policy, not both"),
        ({"codec": "fp16"}, "needs the cut"),
        ({"accuracy": "fp8"}, "accuracy"),
        ({"accuracy": -1.0}, "accuracy"),
    ],
)
def test_an_impossible_plan_is_a_one_sentence_error(folder, options, sentence):
    with pytest.raises(SettingError, match=sentence):
        job_for(folder, None, frozen(), **options)


@pytest.fixture(scope="module")
def folder_of_diagnosis(tmp_path_factory):
    return image_folder(tmp_path_factory.mktemp("images"), per_class=64)


def take(job, epochs=1, pause_s=0.0, until=lambda _: False):
    """Take whole epochs, or end when the diagnosis says what is waited for."""
    for epoch in range(epochs):
        for number, _ in enumerate(job.loader(8, epoch=epoch)):
            time.sleep(pause_s)
            if number % 8 == 7 and until(job.diagnosis()):
                return


def offloaded(folder, **options):
    model = Small(3)
    freeze(model, "body")
    settings = fl.LoaderSettings(**{"cache_bytes": 0, "measure_first": False, **options.pop("settings", {})})
    return fl.offload(model, fl.Dataset(folder), preprocess=tiny_preprocess(), settings=settings, **options)


def test_a_loop_that_is_slower_than_its_data_is_told_that_nothing_is_wrong(folder_of_diagnosis):
    with offloaded(folder_of_diagnosis) as job:
        take(job, epochs=4, pause_s=0.3, until=lambda found: found.held_back_by == TRAINER)
        found = job.diagnosis()
    assert found.held_back_by == TRAINER
    assert found.gain > 1.0, "a faster loop would be fed faster"
    assert "nothing is wrong" in found.mend


def test_a_job_that_has_not_run_says_that_it_cannot_say(folder_of_diagnosis):
    with offloaded(folder_of_diagnosis) as job:
        assert job.diagnosis().held_back_by == NOTHING_YET
        assert str(job.explain()).startswith("too few batches")


def test_a_quota_is_named_from_the_refusals_that_the_job_met(folder_of_diagnosis):
    # A tenth of a device second in a second: the first request uses it up, and the next ones wait for more.
    settings = NodeSettings(memory_bytes=1 << 28, trial_s=0, tenants=(tenant("ann", requests=1),))
    node = Node(settings, (str(folder_of_diagnosis),))
    with node, served(node) as url:
        own = {"token": token_of("ann"), "samples_per_request": 8, "requests_in_flight": 8, "hedge_quantile": 1.0}
        with offloaded(folder_of_diagnosis, near=url, settings=own) as job:
            take(job, epochs=30, until=lambda found: found.held_back_by == QUOTA)
            found = job.diagnosis()
    assert found.held_back_by == QUOTA, found
    assert "quota" in found.mend


def test_a_cache_without_room_is_named_from_the_samples_that_came_again(folder_of_diagnosis):
    with offloaded(folder_of_diagnosis, settings={"cache_bytes": 4096}) as job:
        take(job, epochs=60, until=lambda found: found.held_back_by == CACHE)
        found = job.diagnosis()
    assert found.held_back_by == CACHE, found
    assert found.gain > 1.0


@pytest.mark.parametrize(("accuracy", "untried"), [("float32", (NODE,)), ("exact", ())])
def test_an_engine_that_nobody_tried_is_named_where_it_holds_a_job_back(
    folder_of_diagnosis, monkeypatch, accuracy, untried
):
    monkeypatch.setattr(usage, "_SETTLED_S", 0.0)
    monkeypatch.setattr(
        usage, "Usage", lambda **seen: Usage(**{**seen, "seconds": 10.0, "stall_s": 9.0, "busy": {NODE: 1.0}})
    )
    with offloaded(folder_of_diagnosis, accuracy=accuracy) as job:
        take(job, epochs=3, until=lambda found: found.held_back_by == NODE)
        found, explained = job.diagnosis(), job.explain()
    assert found.held_back_by == NODE, found
    assert found.untried == untried
    assert ("no faster engine was tried" in str(explained)) == bool(untried)
    assert tuple(explained.to_json()["diagnosis"]["untried"]) == untried


def test_json_of_an_explanation_has_the_diagnosis(folder_of_diagnosis):
    with offloaded(folder_of_diagnosis) as job:
        assert job.explain().to_json()["diagnosis"]["held_back_by"] == NOTHING_YET
