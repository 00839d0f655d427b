"""A job end to end, with a real node: the same losses as the plain loop, each sample once, nothing crosses twice."""

import copy
import os
import signal
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest
import torch

import frostline as fl
from frostline.core.config import LoaderSettings, NodeSettings
from frostline.core.errors import DataError, NodeUnreachable, SettingError, TooManySkipped
from frostline.core.events import RequestRetried, SampleSkipped, SetupWarning
from frostline.models import freeze
from frostline.node.process import start_node
from frostline.ordering import Order
from frostline.preprocess import CenterCrop, ColorJitter, Decode, Normalize, Preprocess, Resize
from support import plain
from support.images import image_folder, tiny_preprocess
from support.networks import Small
from support.threads import no_thread_is_left

SMALL_REQUESTS = LoaderSettings(samples_per_request=8, requests_in_flight=3, device_batch=8)
MEASURED_FIRST = LoaderSettings(samples_per_request=8, requests_in_flight=3, device_batch=8, measure_first=True)
BATCH = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return image_folder(tmp_path_factory.mktemp("images"), per_class=16)  # 48: whole batches of eight


@pytest.fixture(scope="module")
def node(folder):
    with start_node((str(folder),), NodeSettings(memory_bytes=1 << 28, device_batch=8)) as process:
        yield process


def frozen(until: str = "stem") -> Small:
    torch.manual_seed(1)
    return freeze(Small().train(), until, input_shape=(3, 32, 32))


def job_for(folder, model, *, near=None, **options):
    options = {"settings": SMALL_REQUESTS, "node": NodeSettings(memory_bytes=1 << 28, device_batch=8), **options}
    return fl.offload(
        model, fl.Dataset(folder), preprocess=options.pop("preprocess", tiny_preprocess()), near=near, **options
    )


def test_colours_change_alike_on_both_sides_of_the_network(folder, node):
    steps = [Decode(), Resize(36), CenterCrop(32), Normalize(mean=(127.0,) * 3, std=(64.0,) * 3)]
    jitter = ColorJitter(brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1)

    def rows(cut, *more):
        preprocess = Preprocess(steps=(*steps[:-1], *more, steps[-1]))
        with job_for(folder, frozen(), near=node.url, cut=cut, preprocess=preprocess) as job:
            return torch.cat([batch.features for batch in job.loader(BATCH, shuffle=True, seed=3, epoch=1)])

    at_the_trainer, at_the_node = rows(0, jitter), rows(1, jitter)
    assert torch.equal(at_the_trainer, at_the_node)
    assert not torch.equal(at_the_trainer, rows(0))


@pytest.mark.parametrize("over_http", [False, True], ids=["in-process", "http"])
@pytest.mark.parametrize("cut", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("flip", [False, True], ids=["fixed", "random"])
def test_training_through_a_job_has_the_losses_of_the_plain_loop(folder, node, over_http, cut, flip):
    model, preprocess = frozen(), tiny_preprocess(flip=flip)
    twin = copy.deepcopy(model)
    with job_for(folder, model, near=node.url if over_http else None, cut=cut, preprocess=preprocess) as job:
        ours = plain.through(job, batch_size=BATCH, epochs=2)
    expected = plain.losses(twin, folder, fl.Dataset(folder), preprocess, batch_size=BATCH, epochs=2)
    assert ours == expected
    assert all(torch.equal(value, twin.state_dict()[key]) for key, value in model.state_dict().items())


def test_an_epoch_has_every_sample_once_in_the_seeded_order(folder, node):
    data = fl.Dataset(folder)
    with job_for(folder, frozen(), near=node.url) as job:
        for epoch in (0, 1):
            ids = np.concatenate([batch.ids for batch in job.loader(5, shuffle=True, seed=3, epoch=epoch)])
            order = Order(size=len(data), seed=3, epoch=epoch).indices(0, len(data))
            assert ids.tolist() == data.samples.ids[order].tolist()


def test_the_second_epoch_crosses_no_network(folder, node):
    with job_for(folder, frozen(), near=node.url) as job:
        first = [batch.features for batch in job.loader(BATCH)]
        received = job.statistics().wire_bytes
        second = [batch.features for batch in job.loader(BATCH)]
        assert job.statistics().wire_bytes == received
        assert job.statistics().from_cache == len(fl.Dataset(folder))
    assert all(torch.equal(item, two) for item, two in zip(first, second, strict=True))


def test_a_cache_with_room_for_a_part_asks_for_the_rest_again(folder, node):
    settings = LoaderSettings(samples_per_request=8, cache_bytes=80_000)
    with job_for(folder, frozen(), near=node.url, settings=settings) as job:
        first = [batch.features for batch in job.loader(BATCH, shuffle=True)]
        second = [batch.features for batch in job.loader(BATCH, shuffle=True)]
        kept = job.statistics().from_cache
    assert 0 < kept < len(fl.Dataset(folder))
    assert all(torch.equal(item, two) for item, two in zip(first, second, strict=True))


def test_random_views_are_computed_each_epoch_and_are_the_same_for_the_same_epoch(folder):
    with job_for(folder, frozen(), preprocess=tiny_preprocess(flip=True)) as job:
        one, again, other = (
            torch.cat([batch.features for batch in job.loader(BATCH, epoch=epoch)]) for epoch in (0, 0, 1)
        )
        assert job.statistics().from_cache == 0
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


def test_a_node_that_is_killed_and_comes_back_without_its_prefix_costs_no_sample(folder):
    model = frozen()
    twin = copy.deepcopy(model)
    events = []
    # Room for one request at a time, so that most are still to be made when the node dies.
    settings = LoaderSettings(samples_per_request=8, requests_in_flight=2, window_bytes=60_000, device_batch=8)
    node = NodeSettings(memory_bytes=1 << 28, device_batch=8)
    with start_node((str(folder),), node) as process:

        def observe(event):
            events.append(event)
            if isinstance(event, RequestRetried):
                process.restart_if_dead()

        with job_for(folder, model, near=process.url, settings=settings, observe=observe) as job:
            optimizer = torch.optim.SGD(job.head.parameters(), 0.1)
            ours, ids = [], []
            torch.manual_seed(0)
            for number, batch in enumerate(job.loader(BATCH, shuffle=True, seed=0, epoch=0)):
                if number == 1:
                    os.kill(process.pid, signal.SIGKILL)
                ours.append(plain.step(job.head, optimizer, batch.features, batch.labels))
                ids.extend(batch.ids.tolist())
    delays = [event.delay_s for event in events if isinstance(event, RequestRetried)]
    assert delays
    assert any(delay_s not in (0.1, 0.2, 0.4, 0.8, 1.6) for delay_s in delays), (
        "jobs that fail together come back apart"
    )
    assert sorted(ids) == sorted(fl.Dataset(folder).samples.ids.tolist())
    assert ours == plain.losses(twin, folder, fl.Dataset(folder), tiny_preprocess(), batch_size=BATCH, epochs=1)


def test_a_node_that_stays_away_ends_the_job_with_the_knob_in_the_sentence(folder):
    settings = LoaderSettings(samples_per_request=8, requests_in_flight=1, window_bytes=60_000, retry_for_s=0.3)
    with (
        start_node((str(folder),), NodeSettings(memory_bytes=1 << 28)) as process,
        job_for(folder, frozen(), near=process.url, settings=settings) as job,
    ):
        batches = iter(job.loader(BATCH))
        next(batches)
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(NodeUnreachable, match="retry_for_s"):
            list(batches)


def test_held_out_samples_may_be_read_without_the_random_steps(folder):
    with job_for(folder, frozen(), preprocess=tiny_preprocess(flip=True)) as job:
        one, two = (
            torch.cat([batch.features for batch in job.loader(BATCH, epoch=epoch, preprocess=tiny_preprocess())])
            for epoch in (0, 1)
        )
        assert job.statistics().from_cache == 48
    assert torch.equal(one, two)


def test_data_that_changed_since_the_job_was_made_is_refused(tmp_path):
    folder = image_folder(tmp_path, per_class=3)
    with job_for(folder, frozen()) as job:
        (folder / "noise" / "001.jpg").write_bytes((folder / "circle" / "002.jpg").read_bytes() + b"changed")
        with pytest.raises(SettingError, match="listed when the job was made"):
            job.loader(4, data=fl.Dataset(folder))


def test_a_network_that_does_not_fit_the_node_runs_at_the_trainer(tmp_path):
    folder = image_folder(tmp_path, per_class=3)
    big = torch.nn.Sequential(torch.nn.Conv2d(3, 128, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
    model = torch.nn.Sequential(big, torch.nn.Linear(128, 3)).train()
    freeze(model, "0")
    asked = {"preprocess": fl.preprocess.imagenet(224), "node": NodeSettings(memory_bytes=64 << 20)}
    with pytest.warns(UserWarning, match="--memory"):
        job = job_for(folder, model, **asked)
    with job:
        assert "--memory" in job.fallback
        assert dict(job.where)["decoding"] == "trainer"
        assert next(iter(job.loader(9))).features.shape == (9, 128)
    with job_for(folder, model, **asked, settings=MEASURED_FIRST) as job:
        assert job.plan.cut == 0
        assert "--memory" in job.plan.candidates[-1].rejected
        assert next(iter(job.loader(9))).features.shape == (9, 128)


def test_leaves_nothing_to_a_trainer_without_memory_for_it(folder, node):
    tight = replace(MEASURED_FIRST, trainer_memory_bytes=1)
    with job_for(folder, frozen(), near=node.url, settings=tight) as job:
        line = len(job.situation.cuts) - 1
        assert {share.route.cut for share in job.plan.mixture} == {line}
        assert all("trainer_memory_bytes" in item.rejected for item in job.plan.candidates if item.cut < line)
        assert next(iter(job.loader(BATCH))).features.shape[0] == BATCH
    with pytest.raises(SettingError, match="trainer_memory_bytes"):
        job_for(folder, frozen(), near=node.url, settings=tight, cut=1)


class Wide(torch.nn.Module):
    """Weights of 34 MB on 32 x 32 pixels, which a node of 64 MiB has no room for."""

    def __init__(self):
        super().__init__()
        self.wide = torch.nn.Linear(3 * 32 * 32, 2700)
        self.fc = torch.nn.Linear(2700, 3)

    def forward(self, x):
        return self.fc(torch.relu(self.wide(x.flatten(1))))


@pytest.mark.parametrize("where", ["in this process", "in another", "two of them"])
def test_a_network_too_large_for_the_node_runs_at_the_trainer(folder, where):
    small = NodeSettings(memory_bytes=64 << 20)
    torch.manual_seed(0)
    model = freeze(Wide().train(), "wide", input_shape=(3, 32, 32))
    with ExitStack() as stack:
        nodes = {"in this process": 0, "in another": 1, "two of them": 2}[where]
        near = [stack.enter_context(start_node((str(folder),), small)).url for _ in range(nodes)]
        asked, events = {"near": near or None, "node": small}, []
        job = stack.enter_context(job_for(folder, model, **asked, settings=MEASURED_FIRST, observe=events.append))
        [said] = [event.reason for event in events if isinstance(event, SetupWarning)]
        assert "the frozen layers run here" in said
        assert job.plan.cut == 0
        assert all(
            "start the node with more --memory" in candidate.rejected
            for candidate in job.plan.candidates
            if candidate.cut
        )
        job = stack.enter_context(job_for(folder, model, **asked, observe=events.append))
        assert "start the node with more --memory" in str(job.explain())
        whole = next(iter(job.loader(9)))
        pixels = next(iter(stack.enter_context(job_for(folder, None)).loader(9)))
        with torch.no_grad():  # as many rows at once as a processor's kernels like: the last bits differ
            torch.testing.assert_close(job.head(whole.features), model(pixels.features))


def test_warns_and_explains_if_the_frost_line_is_not_where_it_was_asked_for(folder, node):
    model = freeze(Small().train(), "body", input_shape=(3, 32, 32))
    model.body[0].bias.requires_grad_(True)
    with pytest.warns(UserWarning, match="not behind body as asked") as warned:
        job = job_for(folder, model, near=node.url)
    with job:
        assert "parameter 'body.0.bias' is trained" in str(job.explain())
        assert job.explain().to_json()["fallback"] == str(warned[0].message)
        assert warned[0].filename == __file__
    events = []
    with job_for(folder, model, near=node.url, observe=events.append) as job:
        assert SetupWarning(reason=job.fallback) in events


def test_refuses_a_cut_that_a_full_node_cannot_hold_and_says_why(folder):
    model = freeze(Wide().train(), "wide", input_shape=(3, 32, 32))
    small = NodeSettings(memory_bytes=64 << 20)
    with pytest.raises(SettingError, match="start the node with more --memory"):
        job_for(folder, model, cut=2, node=small, observe=[].append)


def test_leaving_an_epoch_early_leaves_no_thread(folder, node):
    with job_for(folder, frozen(), near=node.url) as job:
        list(job.loader(BATCH))
        with no_thread_is_left():
            for _ in job.loader(4, epoch=1, shuffle=True):
                break


def test_broken_images_are_counted_listed_and_skipped_within_the_allowance(tmp_path, node):
    folder = image_folder(tmp_path)
    broken = folder / "noise" / "003.jpg"
    broken.write_bytes(broken.read_bytes()[:200])
    (folder / "stripe" / "004.jpg").write_bytes(b"no image")
    events = []
    settings = LoaderSettings(samples_per_request=8, skip_allowance=0.1)
    with job_for(folder, frozen(), settings=settings, observe=events.append) as job:
        ids = [id for batch in job.loader(BATCH, shuffle=True) for id in batch.ids.tolist()]
        assert len(ids) == len(set(ids)) == 34
        assert {sample.object for sample in job.statistics().skipped} == {"noise/003.jpg", "stripe/004.jpg"}
        assert len(job.loader(34)) == 1
        list(job.loader(BATCH, epoch=1))
    assert sum(isinstance(event, SampleSkipped) for event in events) == 2
    with job_for(folder, frozen()) as job, pytest.raises(TooManySkipped, match="skip_allowance"):
        list(job.loader(BATCH))


def test_without_a_model_the_batches_are_pixels(folder, node):
    with job_for(folder, None, near=node.url) as job:
        batch = next(iter(job.loader(6)))
        assert batch.features.shape == (6, 3, 32, 32)
        with pytest.raises(SettingError, match="without a model"):
            job.head  # noqa: B018
    expected, _ = next(plain.batches(folder, fl.Dataset(folder), tiny_preprocess(), batch_size=48, seed=0, epoch=0))
    assert any(torch.equal(batch.features[0], value) for value in expected)


def test_a_part_of_the_data_is_loaded_alone_and_other_data_is_refused(folder, tmp_path):
    train, held_out = fl.Dataset(folder).split(0.25, 0)
    with job_for(folder, frozen()) as job:
        ids = [id for batch in job.loader(4, data=held_out) for id in batch.ids.tolist()]
        assert ids == held_out.samples.ids.tolist()
        with pytest.raises(SettingError, match="make another job"):
            job.loader(4, data=fl.Dataset(image_folder(tmp_path, per_class=2)))
    assert len(train) + len(held_out) == 48


def test_the_explanation_names_the_cut_what_ran_where_and_what_was_measured(folder, node):
    with job_for(folder, frozen(), near=node.url, settings=MEASURED_FIRST) as job:
        list(job.loader(BATCH))
        text, value = str(job.explain()), job.explain().to_json()
    assert node.url in text
    assert "samples/s" in text
    assert value["measured"]["samples"] == 48
    assert value["plan"]["cut"] == job.plan.cut


@pytest.mark.parametrize("cut", [-1, 99])
def test_an_unknown_cut_is_a_one_sentence_error(folder, cut):
    with pytest.raises(SettingError, match=f"no cut {cut}"):
        job_for(folder, frozen(), cut=cut)


def test_an_empty_folder_is_a_sentence(tmp_path):
    with pytest.raises(DataError):
        job_for(tmp_path, frozen())


class Restless(Small):
    """Decides by the values of what it sees; by default behind its frozen stem."""

    def __init__(self, *, at_once: bool) -> None:
        super().__init__()
        self.at_once = at_once

    def forward(self, x):
        hidden = (x if x.mean() > 0 else -x) if self.at_once else self.stem(x)
        hidden = self.stem(hidden) if self.at_once else (hidden if hidden.mean() > 0 else -hidden)
        return self.fc(self.drop(torch.flatten(self.pool(self.body(hidden)), 1)))


@pytest.mark.parametrize("at_once", [False, True], ids=["behind the frozen part", "before it"])
def test_a_network_that_cannot_be_traced_still_trains_with_the_losses_of_the_plain_loop(folder, node, at_once):
    torch.manual_seed(1)
    model = freeze(Restless(at_once=at_once).train(), "stem", input_shape=(3, 32, 32))
    twin = copy.deepcopy(model)
    with pytest.warns(UserWarning, match="cannot trace Restless"):
        job = job_for(folder, model, near=node.url)
    with job:
        assert job.fallback
        assert job.fallback in str(job.explain())
        assert (job.frost_line.number == 1) == at_once  # pixels, where nothing is left to ship
        ours = plain.through(job, batch_size=BATCH, epochs=2)
    assert ours == plain.losses(twin, folder, fl.Dataset(folder), tiny_preprocess(), batch_size=BATCH, epochs=2)


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("encoded", [False, True])
def test_loaders_of_a_closed_job_say_so_at_once(folder, begun, encoded):
    job = job_for(folder, None, settings=LoaderSettings(samples_per_request=8, window_bytes=1, cache_bytes=0))
    batches = iter(job.arrays(BATCH, encoded=encoded))
    if begun:
        next(batches)
    job.close()
    with pytest.raises(SettingError, match=r"this job is closed"):
        list(batches)


def test_a_window_of_a_byte_holds_a_batch(folder):
    with job_for(folder, None, settings=LoaderSettings(window_bytes=1)) as job:
        assert sum(len(batch) for batch in job.arrays(BATCH)) == 48
