"""A job without a network begins with short requests: the same batches and states, and whole ones from then on."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

import frostline as fl
from frostline.core.config import LoaderSettings, NodeSettings
from frostline.core.events import RequestFinished
from frostline.models import freeze
from support.images import image_folder, tiny_preprocess
from support.networks import Small

NODE = NodeSettings(memory_bytes=1 << 28, device_batch=8)
SHORT = LoaderSettings(samples_per_request=8, requests_in_flight=4, cache_bytes=0, device_batch=8)
WHOLE = replace(SHORT, ramp=False)
# Of 45 samples: a round of four, and whole ones.
BEGINS = Counter([4] * 4 + [8] * 3 + [5])
ALL_WHOLE = Counter([8] * 5 + [5])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return image_folder(tmp_path_factory.mktemp("images"), per_class=15)


def job_for(folder, settings, *, model=None, observe=None, **options):
    data = fl.Dataset(folder)
    return fl.offload(
        model, data, preprocess=tiny_preprocess(), settings=settings, node=NODE, observe=observe, **options
    )


def steps(loader):
    """What the loop has, and what a state says after it, batch by batch."""
    return [(batch.ids.tolist(), batch.features, loader.state_dict()) for batch in loader]


def asked_for(events):
    return Counter(event.samples for event in events if isinstance(event, RequestFinished))


@pytest.mark.parametrize("cut", [0, 1])
def test_batches_and_states_are_those_of_whole_requests(folder, cut):
    found, events = [], []
    for settings in (SHORT, WHOLE):
        seen = []
        with job_for(folder, settings, cut=cut, observe=seen.append) as job:
            found.append(steps(job.loader(6, shuffle=True, seed=5)))
            again = job.loader(6, shuffle=True, seed=5)
            again.load_state_dict(found[-1][2][2])
            assert [ids for ids, _, _ in steps(again)] == [ids for ids, _, _ in found[-1][3:]]
        events.append(seen)
    for (ids, features, state), (others, expected, same) in zip(*found, strict=True):
        assert (ids, state) == (others, same)
        assert torch.equal(features, expected)
    assert asked_for(events[0])[4] > 0
    assert asked_for(events[1])[4] == 0


@pytest.mark.parametrize(("settings", "lengths"), [(SHORT, BEGINS), (WHOLE, ALL_WHOLE)], ids=["short", "whole"])
def test_only_the_first_requests_of_a_window_are_short(folder, settings, lengths):
    events = []
    with job_for(folder, settings, observe=events.append) as job:
        for loader in job.epochs(9, range(3)):
            list(loader)
    assert asked_for(events) == lengths + ALL_WHOLE + ALL_WHOLE


def test_a_network_is_run_on_whole_requests_from_the_first_on(folder):
    torch.manual_seed(1)
    model = freeze(Small().train(), "stem", input_shape=(3, 32, 32))
    events = []
    with job_for(folder, SHORT, model=model, cut=2, observe=events.append) as job:
        list(job.loader(9))
    assert asked_for(events) == ALL_WHOLE
