"""A job that lost its gain says so when it is made: one test for each way in which a network is not cut as asked."""

import re

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import frostline as fl
from frostline.core.events import SetupWarning
from support.networks import Small

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
    """Decides by values behind its stem: it is cut between its modules."""

    def forward(self, x):
        hidden = self.body(self.stem(x))
        return self.fc(torch.flatten(self.pool(hidden), 1)) * (2 if hidden.mean() > 0.4 else 1)


class LooksAtItsInput(Small):
    """Decides by its input: nothing of it can be cut."""

    def forward(self, x):
        return super().forward(x) * (2.0 if x.mean() > 0 else 1.0)


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


def frozen(kind, until="body"):
    return lambda: fl.freeze(kind().train(), until, input_shape=SHAPE)


def dropping():
    """Drops at random before the layer that was asked for, since it was put into train mode again."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Dropout(0.5), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(3136, 3))
    fl.freeze(model.train(), "2", input_shape=SHAPE)[1].train()
    return model


LOST = {
    "cut between modules": (frozen(Branching), "its modules up to 'body' can be traced", "choose by torch.where"),
    "not cut": (frozen(LooksAtItsInput), "the whole network runs here", "choose by torch.where"),
    "an operator in the middle": (frozen(Odd), "a node does not run aten.special_bessel_j0", "by other operators"),
    "an operator at the start": (
        frozen(BeginsOddly),
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
def test_a_job_whose_network_is_not_cut_as_asked_warns_when_it_is_made_and_names_the_mend(name, data):
    make, sentence, mend = LOST[name]
    model, told = make(), []
    preprocess = fl.preprocess.imagenet(32)
    with fl.offload(model, data, preprocess=preprocess, observe=told.append) as job:
        fallback = job.fallback
    [event] = [event for event in told if isinstance(event, SetupWarning)]
    assert sentence in event.reason
    assert mend in event.reason
    assert event.reason == fallback
    with pytest.warns(UserWarning, match=re.escape(sentence)) as warned, fl.offload(model, data, preprocess=preprocess):
        pass
    assert [str(warning.message) for warning in warned] == [event.reason]


def test_a_job_that_is_cut_as_asked_warns_of_nothing(data):
    with fl.offload(frozen(Small)(), data, preprocess=fl.preprocess.imagenet(32)) as job:
        assert job.fallback is None
