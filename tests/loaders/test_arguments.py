"""What a job and its loaders are given: what makes no sense is one sentence that names the knob."""

import inspect
import json
import re

import numpy as np
import pytest
from torch.utils.data import DataLoader

import frostline as fl
from frostline.core.config import LoaderSettings
from frostline.core.errors import OrderMismatch, SettingError
from frostline.loaders.adapters.base import FrameworkIterator
from frostline.testing.small_jobs import BATCH, small_job


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    with small_job(tmp_path_factory.mktemp("images")) as job:
        yield job


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"batch_size": "8"}, "batch_size takes a whole number, not '8'"),
        ({"batch_size": 2.5}, "batch_size takes a whole number, not 2.5"),
        ({"seed": "x"}, "seed takes a whole number, not 'x'"),
        ({"epoch": None}, "epoch takes a whole number, not NoneType"),
        ({"shuffle": "yes"}, "shuffle takes True or False or BlockShuffle, not 'yes'"),
        ({"replay": 1}, "replay takes RecordedOrder or None, not 1"),
        ({"ranks": (0, 2)}, "ranks takes Ranks or None, not tuple"),
        ({"data": "photos"}, "data takes Dataset or Mixture or None, not 'photos'"),
        ({"weights": {"odd": 1.0}, "shuffle": True}, "leave out shuffle"),
    ],
)
@pytest.mark.parametrize("kind", ["loader", "arrays"])
def test_an_option_of_another_type_is_refused_by_its_name(job, kind, options, said):
    with pytest.raises(SettingError, match=said):
        getattr(job, kind)(**{"batch_size": BATCH, **options})


@pytest.mark.parametrize("kind", ["loader", "arrays", "epochs"])
def test_an_unknown_option_is_refused_in_the_name_of_the_called_method(job, kind):
    given = (BATCH, range(2)) if kind == "epochs" else (BATCH,)
    with pytest.raises(TypeError, match=rf"^Job\.{kind}\(\) got an unexpected keyword argument 'shufle'"):
        getattr(job, kind)(*given, shufle=True)


def test_arrays_take_what_loaders_take_and_say_what_an_option_is_called(job):
    with pytest.raises(TypeError, match="did you mean shuffle"):
        job.arrays(BATCH, shufle=True)
    with pytest.raises(TypeError, match="'change'"):
        job.arrays(BATCH, change=None)
    defaults = {parameter.name: parameter.default for parameter in inspect.signature(job.loader).parameters.values()}
    defaults.pop("batch_size")
    assert len(job.arrays(BATCH, **defaults)) == len(job.loader(BATCH))


def test_help_shows_the_options_of_an_epoch_by_name(job):
    for function in (job.loader, job.arrays, job.epochs, fl.loader):
        assert list(inspect.signature(function).parameters)[-3:] == ["targets", "record", "replay"]
    with pytest.raises(TypeError, match="say last='drop'"):
        job.loader(BATCH, drop_last=True)


def test_numbers_of_numpy_are_taken_and_states_hold_pythons(job):
    loader = job.loader(np.int64(BATCH), seed=np.int32(3), epoch=np.int64(1), shuffle=True)
    assert json.loads(json.dumps(loader.state_dict())) == job.loader(BATCH, seed=3, epoch=1, shuffle=True).state_dict()


@pytest.mark.parametrize("epochs", [3, "012", None, [0, 1.5]])
def test_epochs_that_are_no_numbers_are_refused(job, epochs):
    for make in (lambda: job.epochs(BATCH, epochs), lambda: job.arrays(BATCH).epochs(epochs)):
        with pytest.raises(SettingError, match=r"epochs (names .* such as range\(10\)|takes a whole number, not 1\.5)"):
            make()


@pytest.mark.parametrize("state", [None, 3, [], "state"])
def test_refuses_an_invalid_state(job, state):
    for loader in (job.loader(BATCH), job.arrays(BATCH), job.epochs(BATCH, range(2))):
        with pytest.raises(OrderMismatch, match="no state of a loader"):
            loader.load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"settings": {}}, "settings takes LoaderSettings or None, not dict"),
        ({"node": 3}, "node takes NodeSettings or None, not 3"),
        ({"preprocess": 224}, "preprocess takes Preprocess or None, not 224"),
        ({"data": "photos"}, "data takes Dataset, not 'photos'"),
    ],
)
def test_a_job_of_something_else_is_refused(job, options, said):
    with pytest.raises(SettingError, match=said):
        fl.offload(None, **{"data": job.data, "settings": LoaderSettings(), **options})


@pytest.mark.parametrize(
    ("ratios", "ends", "said"),
    [([0, 3], "first", "above 0, not 0, 3"), ([1], "first", "needs as many ratios"), ([1, 1], "soon", "soon")],
)
def test_refuses_an_invalid_mixture_when_it_is_made(job, ratios, ends, said):
    with pytest.raises(SettingError, match=said):
        fl.Mixture(parts=job.data.split(0.5), ratios=ratios, ends=ends)


@pytest.mark.parametrize("batch_size", [1, 4])
def test_a_dataloader_that_would_batch_again_says_what_to_give(job, batch_size):
    with pytest.raises(SettingError, match="give DataLoader batch_size=None"):
        next(iter(DataLoader(job.loader(BATCH), batch_size=batch_size)))


@pytest.mark.parametrize("make", [lambda job: job.loader(BATCH), lambda job: job.epochs(BATCH, range(2)), lambda _: 3])
def test_a_frameworks_loader_of_tensors_says_what_to_give(job, make):
    with pytest.raises(SettingError, match=re.escape("loader takes what job.arrays(...) gives")):
        FrameworkIterator(make(job), ("features",))
