"""Jobs that something holds back, made so for real: the diagnosis names it, and a job says nothing it cannot know."""

import time

import pytest

import frostline as fl
from frostline.core.config import NodeSettings
from frostline.models import freeze
from frostline.node import Node
from frostline.planning.replanning import CACHE, NOTHING_YET, QUOTA, TRAINER
from support.images import image_folder, tiny_preprocess
from support.networks import Small
from support.nodes import served
from support.tenants import tenant, token_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
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


def test_a_loop_that_is_slower_than_its_data_is_told_that_nothing_is_wrong(folder):
    with offloaded(folder) as job:
        take(job, epochs=4, pause_s=0.3, until=lambda found: found.held_back_by == TRAINER)
        found = job.diagnosis()
    assert found.held_back_by == TRAINER
    assert found.gain > 1.0, "a faster loop would be fed faster"
    assert "nothing is wrong" in found.mend


def test_a_job_that_has_not_run_says_that_it_cannot_say(folder):
    with offloaded(folder) as job:
        assert job.diagnosis().held_back_by == NOTHING_YET
        assert str(job.explain()).startswith("too few batches")


def test_a_quota_is_named_from_the_refusals_that_the_job_met(folder):
    # A tenth of a device second in a second: the first request uses it up, and the next ones wait for more.
    settings = NodeSettings(memory_bytes=1 << 28, trial_s=0, tenants=(tenant("ann", requests=1),))
    node = Node(settings, (str(folder),))
    with node, served(node) as url:
        own = {"token": token_of("ann"), "samples_per_request": 8, "requests_in_flight": 8, "hedge_quantile": 1.0}
        with offloaded(folder, near=url, settings=own) as job:
            take(job, epochs=30, until=lambda found: found.held_back_by == QUOTA)
            found = job.diagnosis()
    assert found.held_back_by == QUOTA, found
    assert "quota" in found.mend


def test_a_cache_without_room_is_named_from_the_samples_that_came_again(folder):
    with offloaded(folder, settings={"cache_bytes": 4096}) as job:
        take(job, epochs=60, until=lambda found: found.held_back_by == CACHE)
        found = job.diagnosis()
    assert found.held_back_by == CACHE, found
    assert found.gain > 1.0


def test_json_of_an_explanation_has_the_diagnosis(folder):
    with offloaded(folder) as job:
        assert job.explain().to_json()["diagnosis"]["held_back_by"] == NOTHING_YET
