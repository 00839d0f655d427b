"""What a job does where its frozen layers mix samples, or give Inf or NaN: the plain loop's losses, or a sentence."""

import copy
import re

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import frostline as fl
from frostline.core.config import LoaderSettings, NodeSettings
from frostline.core.errors import NotFinite
from frostline.core.events import RowsNotFinite, SetupWarning
from frostline.core.nouns import finite_rows

PREPROCESS = fl.preprocess.imagenet(32)
EACH = 6


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Grey pictures in one class and white ones, whose features are beyond all bounds, in the other."""
    folder, draw = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    for label, low, high in (("grey", 100, 140), ("white", 250, 256)):
        (folder / label).mkdir()
        for number in range(EACH):
            pixels = draw.integers(low, high, (40, 40, 3)).astype(np.uint8)
            Image.fromarray(pixels).save(folder / label / f"{number}.png")
    return str(folder)


class Scaled(nn.Module):
    """A mean that is far beyond what 16 bits hold for white pictures."""

    def __init__(self, function, dtype):
        super().__init__()
        self.scale = nn.Parameter(torch.full((3,), 5e4))
        self.function = function
        self.fc = nn.Linear(3, 2)
        self.to(dtype).requires_grad_(False).eval()
        self.fc.requires_grad_(True)

    def forward(self, x):
        return self.fc(self.function(x.mean((2, 3)), self.scale))


def overflowing():
    return Scaled(lambda mean, scale: mean * scale, torch.float16)


def undefined():
    return Scaled(lambda mean, scale: (1.5 - mean).log() * scale, torch.float32)


def infinite():
    return Scaled(lambda mean, scale: torch.relu(mean * scale).pow(9), torch.bfloat16)


NETWORKS = {"float16": overflowing, "float32": undefined, "bfloat16": infinite}


def settings_for(**changes):
    return LoaderSettings(**{"samples_per_request": 4, "device_batch": 8, "replan": False, **changes})


def finite(loader):
    """Which rows are finite, in the order of their classes."""
    batches = list(loader)
    rows = torch.cat([batch.features.float().isfinite().all(1) for batch in batches])
    return rows[torch.cat([batch.labels for batch in batches]).argsort(stable=True)].tolist()


GREY_ALONE = [True] * EACH + [False] * EACH


class Mixes(nn.Module):
    def __init__(self, mix):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.inner, self.fc = nn.Conv2d(3, 6, 5), nn.Linear(6, 6), nn.Linear(6, 2)
        self.mix = mix
        self.requires_grad_(False).eval()
        self.fc.requires_grad_(True)

    def forward(self, x):
        return self.fc(torch.tanh(self.inner(self.mix(self.conv(x).mean((2, 3))))))


MIXING = {
    "mean": lambda h: h - h.mean(0),
    "softmax": lambda h: h.softmax(0),
    "roll": lambda h: h.roll(1, 0),
    "similarity": lambda h: h @ h.t() @ h,
    "a small part": lambda h: h + 1e-3 * h.cumsum(0),
}


def losses(parameters, steps):
    optimizer, found = torch.optim.SGD(parameters, lr=0.5), []
    for run, labels in steps:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(run(), labels)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("kind", MIXING)
def test_losses_are_a_plain_loops_if_a_frozen_layer_mixes_samples(pictures, kind):
    model, data = Mixes(MIXING[kind]), fl.Dataset(pictures)
    plain, order = copy.deepcopy(model), {"shuffle": True, "seed": 3}
    with fl.offload(None, data, preprocess=PREPROCESS) as job:
        batches = [(batch.features, batch.labels) for batch in job.loader(6, **order)]
    expected = losses(plain.fc.parameters(), [(lambda x=x: plain(x), labels) for x, labels in batches])
    told = []
    with fl.offload(model, data, preprocess=PREPROCESS, settings=settings_for(), on_event=told.append) as job:
        mine = list(job.loader(6, **order))
        ours = losses(model.fc.parameters(), [(lambda b=b: job.head(b.features), b.labels) for b in mine])
        assert job.frost_line.name.startswith(("conv", "mean"))
        assert "mixes the samples of a batch" in job.fallback
    assert ours == pytest.approx(expected, rel=1e-6)
    assert [event.reason for event in told if isinstance(event, SetupWarning)] == [job.fallback]


@pytest.mark.parametrize("dtype", NETWORKS)
@pytest.mark.parametrize("cut", [None, 0, 1])
def test_the_first_sample_that_is_not_finite_ends_the_job_and_is_named(pictures, dtype, cut):
    with fl.offload(NETWORKS[dtype](), fl.Dataset(pictures), preprocess=PREPROCESS, settings=settings_for()) as job:
        by = "torch-eager" if cut is None else "torch-eager here"
        if cut is not None:
            job.use({fl.core.Route(cut): 1.0})
        with pytest.raises(NotFinite) as refused:
            list(job.loader(4, shuffle=False))
    said = str(refused.value)
    # Several requests are under way: the first that fails names its first one.
    assert re.match(r"the frozen layers gave Inf or NaN for sample white/\d+\.png \(id \d+\) at ", said)
    assert f"in {dtype} by {by}" in said
    assert "allow_nonfinite=True of LoaderSettings, --allow-nonfinite" in said
    assert "\n" not in said


def test_the_node_over_http_is_judged_alike(pictures, tmp_path):
    from frostline.node import Node
    from support.nodes import served

    settings = NodeSettings(memory_bytes=128 << 20, cache_folder=str(tmp_path))
    with Node(settings, (f"file://{pictures}",)) as node, served(node) as url:
        asked = {"preprocess": PREPROCESS, "near": url}
        with (
            fl.offload(overflowing(), fl.Dataset(pictures), settings=settings_for(), **asked) as job,
            pytest.raises(NotFinite, match=r"white/\d+\.png"),
        ):
            list(job.loader(4, shuffle=False))
        allowed = settings_for(allow_nonfinite=True, cache_bytes=0)
        for _ in range(2):
            with fl.offload(overflowing(), fl.Dataset(pictures), settings=allowed, **asked) as job:
                assert finite(job.loader(4)) == GREY_ALONE
        assert node.statistics().cache.kept == EACH
        assert node.statistics().totals.nonfinite > 2 * EACH


@pytest.mark.parametrize("dtype", NETWORKS)
def test_allowed_rows_are_delivered_counted_and_kept_nowhere(pictures, dtype, tmp_path):
    model, data = NETWORKS[dtype](), fl.Dataset(pictures)
    asked = {"preprocess": PREPROCESS, "settings": settings_for(allow_nonfinite=True, cache_folder=str(tmp_path))}
    for epochs_before in (0, 2):
        with fl.offload(model, data, **asked) as job:
            for epoch in range(2):
                assert finite(job.loader(4, epoch=epoch)) == GREY_ALONE
            done, explained = job.statistics(), job.explain()
        assert done.nonfinite == 2 * EACH
        assert done.from_cache == (2 * EACH if epochs_before else EACH)
        assert "white/" in done.first_nonfinite
        assert f"not finite: {2 * EACH} samples as they came; the frozen layers gave Inf or NaN" in str(explained)
        assert explained.to_json()["measured"]["nonfinite"] == 2 * EACH


def test_workers_end_the_job_by_the_same_sentence(pictures):
    with (
        fl.offload(overflowing(), fl.Dataset(pictures), preprocess=PREPROCESS, settings=settings_for()) as job,
        pytest.raises(NotFinite, match=r"white/\d\.png"),
    ):
        list(torch.utils.data.DataLoader(job.loader(4), batch_size=None, num_workers=1))


def test_rows_that_workers_get_are_counted_by_the_job(pictures):
    settings = settings_for(allow_nonfinite=True)
    with fl.offload(overflowing(), fl.Dataset(pictures), preprocess=PREPROCESS, settings=settings) as job:
        list(torch.utils.data.DataLoader(job.loader(4), batch_size=None, num_workers=2))
        done = job.statistics()
    assert done.nonfinite == EACH
    assert "white/" in done.first_nonfinite


def test_observers_are_told_of_every_row_and_of_the_first_by_name(pictures):
    settings, told = settings_for(allow_nonfinite=True, cache_bytes=0), []
    asked = {"preprocess": PREPROCESS, "settings": settings, "on_event": told.append}
    with fl.offload(overflowing(), fl.Dataset(pictures), **asked) as job:
        list(torch.utils.data.DataLoader(job.loader(4), batch_size=None, num_workers=2))
        list(job.loader(4, epoch=1))
        done = job.statistics()
    mine = [event for event in told if isinstance(event, RowsNotFinite)]
    assert sum(event.rows for event in mine) == mine[-1].total == done.nonfinite == 2 * EACH
    assert [event.first for event in mine if event.total == event.rows] == [done.first_nonfinite]


def test_who_does_not_observe_finds_the_first_one_in_the_log_once(pictures, caplog):
    asked = {"preprocess": PREPROCESS, "settings": settings_for(allow_nonfinite=True, cache_bytes=0)}
    with fl.offload(overflowing(), fl.Dataset(pictures), **asked) as job:
        for epoch in range(2):
            list(job.loader(4, epoch=epoch))
        first = job.statistics().first_nonfinite
    assert [record.getMessage() for record in caplog.records] == [f"{first}; more are counted by the job's statistics"]


def test_rows_of_a_training_beside_the_store_are_counted_by_the_job(pictures):
    from frostline.node.process import start_node
    from frostline.wire.recipes import Recipe

    told, settings = [], settings_for(allow_nonfinite=True)
    asked = {"preprocess": PREPROCESS, "settings": settings, "policy": "all_in_store", "on_event": told.append}
    with start_node((f"file://{pictures}",), NodeSettings(memory_bytes=1 << 29, allow_training=True)) as node:
        with fl.offload(undefined(), fl.Dataset(pictures), near=node.url, **asked) as job:
            assert job.train(Recipe(epochs=1, batch_size=4)).is_whole
            done = job.statistics()
        with (
            fl.offload(
                undefined(), fl.Dataset(pictures), near=node.url, preprocess=PREPROCESS, policy="all_in_store"
            ) as job,
            pytest.raises(fl.core.errors.FrostlineError, match=r"gave Inf or NaN for sample white/\d+\.png"),
        ):
            job.train(Recipe(epochs=1, batch_size=4))
    assert done.nonfinite == EACH
    assert "for sample white/" in done.first_nonfinite
    assert sum(event.rows for event in told if isinstance(event, RowsNotFinite)) == EACH


def test_a_loader_without_a_network_hands_pixels_on_as_they_are(pictures):
    with fl.offload(None, fl.Dataset(pictures), preprocess=PREPROCESS) as job:
        assert sum(len(batch.labels) for batch in job.loader(4)) == 2 * EACH
        assert job.statistics().nonfinite == 0


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "bfloat16"])
def test_rows_with_any_number_that_is_none_are_found(value, dtype):
    tensor = torch.randn(5, 3, 2).to(getattr(torch, dtype))
    tensor[0, 0, 0] = torch.finfo(tensor.dtype).max
    tensor[1, 2, 1] = torch.finfo(tensor.dtype).min
    array = (tensor.view(torch.uint16) if dtype == "bfloat16" else tensor).numpy()
    assert finite_rows([array], 5, [dtype]).all()
    tensor[3, 1, 1] = value
    assert finite_rows([array], 5, [dtype]).tolist() == [True, True, True, False, True]
    assert finite_rows([array, array], 5).tolist() == [True, True, True, False, True]


def test_masks_and_whole_numbers_are_always_finite():
    mask = np.full((4, 3), 0xFFFF, np.uint16)
    assert finite_rows([np.zeros((4, 2), np.float32), mask], 4, ["float32", "uint16"]).all()
    assert finite_rows([np.full((4, 1), -1), np.ones((4, 0), np.float32)], 4).all()
