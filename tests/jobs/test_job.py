"""A job end to end, with a real node: the losses of a plain loop, and what it says when it is made.

A job end to end, with a real node: the same losses as the plain loop, each sample once, nothing crosses twice.

The way to a node in this process takes over what a job says of asking twice.

A job that lost its gain says so when it is made: one test for each way in which a network is not cut as asked.

The promise on real input: real photographs, real weights, a real node, BatchNorm and dropout in what is trained.

The same training from an S3 store: a real server, the node beside it in a process of its own.
"""

import copy
import os
import re
import signal
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote, urlsplit

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import frostline as fl
from frostline.core.config import LoaderSettings, NodeSettings
from frostline.core.errors import DataError, NodeUnreachable, SettingError, TooManySkipped
from frostline.core.events import RequestRetried, SampleSkipped, SetupWarning
from frostline.jobs import connect as reaching
from frostline.models import freeze
from frostline.node.process import start_node
from frostline.ordering import Order
from frostline.preprocess import CenterCrop, ColorJitter, Decode, Normalize, Preprocess, Resize
from frostline.training.networks import load_model
from support import plain
from support.images import image_folder, tiny_preprocess
from support.networks import Small
from support.nodes import make_images
from support.threads import no_thread_is_left

pytestmark = pytest.mark.promise("equal")

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
    # Memory for one request at a time, so that most are still to be made when the node dies.
    settings = LoaderSettings(samples_per_request=8, requests_in_flight=2, window_bytes=60_000, device_batch=8)
    node = NodeSettings(memory_bytes=1 << 28, device_batch=8)
    with start_node((str(folder),), node) as process:

        def on_event(event):
            events.append(event)
            if isinstance(event, RequestRetried):
                process.restart_if_dead()

        with job_for(folder, model, near=process.url, settings=settings, on_event=on_event) as job:
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
    """Weights of 34 MB on 32 x 32 pixels, which a node of 64 MiB has no memory for."""

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
        job = stack.enter_context(job_for(folder, model, **asked, settings=MEASURED_FIRST, on_event=events.append))
        [said] = [event.reason for event in events if isinstance(event, SetupWarning)]
        assert "the frozen layers run here" in said
        assert job.plan.cut == 0
        assert all(
            "start the node with more --memory" in candidate.rejected
            for candidate in job.plan.candidates
            if candidate.cut
        )
        job = stack.enter_context(job_for(folder, model, **asked, on_event=events.append))
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
    with job_for(folder, model, near=node.url, on_event=events.append) as job:
        assert SetupWarning(reason=job.fallback) in events


def test_refuses_a_cut_that_a_full_node_cannot_hold_and_says_why(folder):
    model = freeze(Wide().train(), "wide", input_shape=(3, 32, 32))
    small = NodeSettings(memory_bytes=64 << 20)
    with pytest.raises(SettingError, match="start the node with more --memory"):
        job_for(folder, model, cut=2, node=small, on_event=[].append)


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
    settings = LoaderSettings(samples_per_request=8, max_skipped_fraction=0.1)
    with job_for(folder, frozen(), settings=settings, on_event=events.append) as job:
        ids = [id for batch in job.loader(BATCH, shuffle=True) for id in batch.ids.tolist()]
        assert len(ids) == len(set(ids)) == 34
        assert {sample.object for sample in job.statistics().skipped} == {"noise/003.jpg", "stripe/004.jpg"}
        assert len(job.loader(34)) == 1
        list(job.loader(BATCH, epoch=1))
    assert sum(isinstance(event, SampleSkipped) for event in events) == 2
    with job_for(folder, frozen()) as job, pytest.raises(TooManySkipped, match="max_skipped_fraction"):
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
def test_an_untraceable_network_trains_with_the_losses_of_the_plain_loop(folder, node, at_once):
    torch.manual_seed(1)
    model = freeze(Restless(at_once=at_once).train(), "stem", input_shape=(3, 32, 32))
    twin = copy.deepcopy(model)
    told = pytest.warns(UserWarning, match="cannot trace Restless") if at_once else nullcontext()
    with told:
        job = job_for(folder, model, near=node.url)
    with job:
        assert bool(job.fallback) == at_once  # behind the frozen part code may decide by what it likes
        assert (job.fallback or "") in str(job.explain())
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


@pytest.mark.parametrize(
    ("of_job", "of_node", "holds"), [(0.95, 0.95, 0.95), (1.0, 0.95, 1.0), (0.95, 0.99, 0.99), (0.5, 0.9, 0.9)]
)
def test_halves_the_rate_when_asked_twice(tmp_path, monkeypatch, of_job, of_node, holds):
    made = []

    class Told(reaching.Node):
        def __init__(self, settings, roots):
            made.append(settings)
            super().__init__(settings, roots)

    monkeypatch.setattr(reaching, "Node", Told)
    make_images(tmp_path / "images" / "cats", 2)
    data = fl.Dataset(tmp_path / "images")
    with ExitStack() as stack:
        settings, node = LoaderSettings(hedge_quantile=of_job), NodeSettings(hedge_quantile=of_node)
        reaching.reach((), data, settings, node, lambda *_: None, stack)
    assert [item.hedge_quantile for item in made] == [holds]


SHAPE = (3, 32, 32)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Eight pictures of one class."""
    folder = tmp_path_factory.mktemp("pictures")
    (folder / "a").mkdir()
    for number in range(8):
        Image.fromarray(np.full((40, 40, 3), 10 * number, np.uint8)).save(folder / "a" / f"{number}.png")
    return fl.Dataset(str(folder))


class Branching(Small):
    """Decides by values behind its stem, which is frozen with its body: it is cut there."""

    def forward(self, x):
        hidden = self.stem(x)
        return self.fc(torch.flatten(self.pool(self.body(hidden * 2 if hidden.mean() > 0.4 else hidden)), 1))


class Hiding(Small):
    """Hides from whoever traces it that it decides by values: it is cut between its modules."""

    def forward(self, x):
        hidden = self.stem(x)
        is_high = not torch.compiler.is_exporting() and hidden.mean() > 0.4
        return self.fc(torch.flatten(self.pool(self.body(hidden * 2 if is_high else hidden)), 1))


class LooksAtItsInput(Small):
    """Decides by its input: nothing of it can be cut."""

    def forward(self, x):
        scale = 2.0 if x.mean() > 0 else 1.0
        return super().forward(x) * scale


class Odd(Small):
    """Computes with an operator that nodes do not run."""

    def forward(self, x):
        hidden = torch.special.bessel_j0(self.stem(x))
        return self.fc(torch.flatten(self.pool(self.body(hidden)), 1))


class BeginsOddly(Small):
    """Begins with such an operator."""

    def forward(self, x):
        return super().forward(torch.special.bessel_j0(x))


def trained_inside():
    """Its stem is trained though it was frozen behind it."""
    model = fl.freeze(Small().train(), "body", input_shape=SHAPE)
    model.body[0].weight.requires_grad_(True)
    return model


def frozen_of_setup_warnings(kind, until="body"):
    return lambda: fl.freeze(kind().train(), until, input_shape=SHAPE)


def dropping():
    """Drops at random before the layer that was asked for, since it was put into train mode again."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Dropout(0.5), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(3136, 3))
    fl.freeze(model.train(), "2", input_shape=SHAPE)[1].train()
    return model


LOST = {
    "cut where it decides": (
        frozen_of_setup_warnings(Branching),
        "by the values of a tensor; the frozen part ends at 'stem.2:relu', before that",
        "choose by torch.where",
    ),
    "cut between modules": (
        frozen_of_setup_warnings(Hiding),
        "its modules up to 'stem' can be traced",
        "freeze up to a layer",
    ),
    "not cut": (frozen_of_setup_warnings(LooksAtItsInput), "the whole network runs here", "choose by torch.where"),
    "an operator in the middle": (
        frozen_of_setup_warnings(Odd),
        "a node does not run aten.special_bessel_j0",
        "by other operators",
    ),
    "an operator at the start": (
        frozen_of_setup_warnings(BeginsOddly),
        "which a node does not run: the whole network runs here",
        "freeze up to a layer",
    ),
    "a frost line that moved": (
        trained_inside,
        "not behind body as asked: parameter 'body.0.weight' is trained",
        "call requires_grad_(False) of it",
    ),
    "train mode": (dropping, "1 changes from run to run, as in train mode", "pass frozen_in_eval=True"),
}


@pytest.mark.parametrize("name", LOST)
def test_a_job_warns_of_a_network_that_is_cut_elsewhere_and_names_the_mend(name, data):
    make, sentence, mend = LOST[name]
    model, told = make(), []
    preprocess = fl.preprocess.imagenet(32)
    with fl.offload(model, data, preprocess=preprocess, on_event=told.append) as job:
        fallback = job.fallback
    [event] = [event for event in told if isinstance(event, SetupWarning)]
    assert sentence in event.reason
    assert mend in event.reason
    assert event.reason == fallback
    with pytest.warns(UserWarning, match=re.escape(sentence)) as warned, fl.offload(model, data, preprocess=preprocess):
        pass
    assert [str(warning.message) for warning in warned] == [event.reason]


def test_a_job_that_is_cut_as_asked_warns_of_nothing(data):
    with fl.offload(frozen_of_setup_warnings(Small)(), data, preprocess=fl.preprocess.imagenet(32)) as job:
        assert job.fallback is None


def test_the_losses_on_photographs_are_those_of_the_plain_loop(photographs, shared_node):
    data = fl.Dataset(photographs)
    data = data.take(np.linspace(0, len(data) - 1, 32).astype(np.int64))
    network = load_model("demo:efficientnet_lite0", classes=len(data.classes))
    model = fl.freeze(network.model, until="_blocks.13")
    twin = copy.deepcopy(model)
    with fl.offload(model, data, preprocess=network.preprocess, near=shared_node.url) as job:
        ours = plain.through(job, batch_size=16, epochs=2)
        received = job.statistics().wire_bytes
    folder = Path(unquote(urlsplit(data.url).path))
    assert ours == plain.losses(twin, folder, data, network.preprocess, batch_size=16, epochs=2)
    # Two epochs crossed once; the rest is headers, and the few encoded samples that measured the link.
    assert received < 32 * job.frost_line.bytes_per_sample + 10 * data.samples.lengths.max() + 20_000


def losses(url: str) -> list[float]:
    torch.manual_seed(1)
    model = freeze(Small().train(), "stem", input_shape=(3, 32, 32))
    settings = LoaderSettings(samples_per_request=8, device_batch=8)
    with (
        start_node((url,), NodeSettings(memory_bytes=1 << 28, device_batch=8)) as node,
        fl.offload(model, fl.Dataset(url), preprocess=tiny_preprocess(), near=node.url, settings=settings) as job,
    ):
        return plain.through(job, batch_size=8, epochs=2)


def test_training_from_s3_has_the_losses_of_training_from_a_folder(s3, tmp_path, monkeypatch):
    folder = image_folder(tmp_path)
    s3.put_folder(folder, "training")
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    assert losses("s3://training") == losses(str(folder))
