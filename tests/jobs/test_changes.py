"""What a user changes of a network after its job was made: told in one sentence, or equal to a plain loop behind it."""

import copy
import math
import os
import pickle
import re
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from enum import Enum
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import frostline as fl
from frostline.core.config import LoaderSettings, NodeSettings
from frostline.core.errors import ModelError, NetworkChanged, SettingError
from frostline.core.events import SetupWarning
from frostline.models import changes, freeze
from frostline.models.changes import checksum, quick_sum
from frostline.models.head import SkippingHead
from frostline.models.modules import unwrap
from support import plain
from support.images import image_folder, tiny_preprocess

pytestmark = pytest.mark.promise(
    "noticed", mended="layers that were unfrozen, replaced or loaded anew after a job was made went on as they had been"
)

SETTINGS = LoaderSettings(samples_per_request=8, requests_in_flight=3, device_batch=8)
BATCH = 8


class Net(nn.Module):
    """Three frozen stages with BatchNorm, dropout and a buffer, and a head."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.body = nn.Sequential(nn.Conv2d(4, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(0.2))
        self.last = nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU())
        self.fc = nn.Linear(6, 3)
        self.register_buffer("scale", torch.ones(4, 1, 1))

    def forward(self, pixels):
        found = self.last(self.body(self.stem(pixels) * self.scale))
        return self.fc(found.mean((2, 3)))


@pytest.fixture(autouse=True)
def looked_at_in_each_pass(monkeypatch):
    """On a slow machine even a small network takes more than its share of so short a pass."""
    for limit in ("_QUICK_S", "_READ_S"):
        monkeypatch.setattr(changes, limit, 60.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return image_folder(tmp_path_factory.mktemp("images"), per_class=8)


def network(until="last"):
    torch.manual_seed(1)
    return freeze(Net().train(), until, input_shape=(3, 32, 32))


def job_for(folder, model, **options):
    options = {"settings": SETTINGS, "node": NodeSettings(memory_bytes=1 << 28, device_batch=8), **options}
    return fl.offload(model, fl.Dataset(folder), preprocess=tiny_preprocess(), **options)


def trained(network, parameters, batches):
    optimizer = torch.optim.SGD(parameters, 0.1)
    return [plain.step(network, optimizer, inputs, labels) for inputs, labels in batches]


def features_of(loader):
    return ((batch.features, batch.labels) for batch in loader)


def pixels_of(folder, epoch=0):
    return plain.batches(folder, fl.Dataset(folder), tiny_preprocess(), batch_size=BATCH, seed=0, epoch=epoch)


def other_state(model, prefix=""):
    torch.manual_seed(9)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return {name: value for name, value in other.state_dict().items() if name.startswith(prefix)}


def pruned(model):
    from torch.nn.utils import prune

    prune.l1_unstructured(model.stem[0], "weight", amount=0.5)


class Read(Net):
    """Its code reads attributes before the frost line and behind it."""

    def __init__(self):
        super().__init__()
        self.contrast, self.temperature, self.calls = 1.0, 1.0, 0
        self.body.limits = (0.0, 6.0)
        self.gains, self.weights = [1.0, 1.0], {"of all": [1.0]}

    def forward(self, pixels):
        self.calls += 1
        hidden = self.stem(pixels * self.contrast * self.gains[1]).clamp(*self.body.limits)
        return self.fc(self.last(self.body(hidden)).mean((2, 3))) * self.weights["of all"][0] / self.temperature


def test_changed_attributes_of_frozen_code_are_noticed_and_the_heads_are_not(folder):
    model = freeze(Read().train(), "last", input_shape=(3, 32, 32))
    with job_for(folder, model) as job:
        batches = iter(job.loader(BATCH))
        first = next(batches)
        model.temperature = 2.0
        model.weights["of all"][0] = 3.0
        job.head(first.features)
        next(batches)
        model.gains[1] = 2.0
        with pytest.raises(NetworkChanged, match="attribute 'gains' of the network, which its frozen layers read"):
            next(batches)
        model.gains[1] = 1.0
        batches = iter(job.loader(BATCH))
        next(batches)
        model.contrast = 0.5
        with pytest.raises(NetworkChanged, match="attribute 'contrast' of the network, which its frozen layers read"):
            next(batches)
        model.contrast, model.body.limits = 1.0, (0.0, 1.0)
        with pytest.raises(
            NetworkChanged, match=r"module 'body' is frozen, and its limits was changed.*job.refreeze\(\)"
        ):
            next(iter(job.loader(BATCH)))
        job.refreeze()
        plain_model = copy.deepcopy(model)
        with torch.no_grad():
            for (features, _), (pixels, _) in zip(
                features_of(job.loader(BATCH, shuffle=True)), pixels_of(folder), strict=True
            ):
                assert torch.allclose(job.head(features), plain_model(pixels), atol=1e-6)


class Config:
    """What nobody takes for plain values."""

    scale = 1.0

    def __init__(self):
        self.shift, self.note = 0.0, ""


class Kind(Enum):
    PLAIN, TWICE = 1.0, 2.0


KNOBS = {"gain": 1.0}
CONSTANTS = ModuleType("constants")  # as users have them in a file of their own
CONSTANTS.scale, CONSTANTS.table, CONSTANTS.runs = 1.0, [dict.fromkeys(range(200), 1.0)], 0


class Elsewhere(Net):
    """Its frozen layers read what is no plain attribute of a module."""

    def __init__(self):
        super().__init__()
        self.config, self.activation = Config(), torch.relu
        self.table, self.numbers = dict.fromkeys(range(5000), 1.0), np.ones(1, np.float32)
        self.lists = [object(), dict.fromkeys(range(100), 1.0)]
        self.library, self.kind, self.offset = SimpleNamespace(gain=1.0), Kind.PLAIN, torch.zeros(1)

    strength = 1.0

    def scaled(self, hidden):
        CONSTANTS.runs += 1
        scale = CONSTANTS.scale * CONSTANTS.table[0][199] * self.lists[1][99] * math.tau
        return hidden * self.library.gain * self.kind.value * self.strength * scale

    def forward(self, pixels):
        hidden = self.scaled(self.stem(pixels) + self.offset) * self.config.scale + self.config.shift
        hidden = self.activation(hidden) * KNOBS["gain"] * float(os.environ.get("GAIN", "1"))
        return self.fc(self.last(self.body(hidden * self.table[4999] * float(self.numbers[0]))).mean((2, 3)))


READ_ELSEWHERE = {
    "a global variable": lambda m, patch: patch.setitem(KNOBS, "gain", 2.0),
    "a variable of another file": lambda m, patch: patch.setattr(CONSTANTS, "scale", 2.0),
    "a table of another file": lambda m, patch: patch.setitem(CONSTANTS.table[0], 199, 2.0),
    "a table in a list": lambda m, patch: patch.setitem(m.lists[1], 99, 2.0),
    "a variable of a library": lambda m, patch: patch.setattr(math, "tau", 6.0),
    "the environment": lambda m, patch: patch.setenv("GAIN", "3"),
    "an object": lambda m, patch: patch.setattr(m.config, "shift", 0.5),
    "a class": lambda m, patch: patch.setattr(Config, "scale", 0.5),
    "an object that had it of its class": lambda m, patch: patch.setitem(vars(m.config), "scale", 0.5),
    "the network that had it of its class": lambda m, patch: patch.setitem(vars(m), "strength", 0.5),
    "an object of a library": lambda m, patch: patch.setattr(m.library, "gain", 0.5),
    "a member of an enumeration": lambda m, patch: patch.setattr(m, "kind", Kind.TWICE),
    "a method": lambda m, patch: patch.setattr(Elsewhere, "scaled", lambda _, hidden: hidden * 0.5),
    "a tensor": lambda m, patch: patch.setattr(m, "offset", torch.ones(1)),
    "values of a tensor": lambda m, patch: patch.setattr(m.offset, "data", torch.ones(1)),
    "a function": lambda m, patch: patch.setattr(m, "activation", torch.sigmoid),
    "a class of modules": lambda m, patch: patch.setattr(nn.ReLU, "forward", lambda _, x: x.abs()),
    "a long table": lambda m, patch: patch.setitem(m.table, 4999, 2.0),
    "an array": lambda m, patch: patch.setattr(m, "numbers", m.numbers * 2),
    "a hook of the whole network": lambda m, patch: patch.setitem(
        m._forward_pre_hooks,  # noqa: SLF001 (as register_forward_pre_hook does)
        10**6,
        lambda _, given: (given[0] * 0.5,),
    ),
    "hooks of all modules": lambda m, patch: patch.setitem(
        nn.modules.module._global_forward_hooks,  # noqa: SLF001 (as register_module_forward_hook does)
        10**6,
        lambda module, _, output: output * 2 if isinstance(module, nn.Conv2d) else output,
    ),
}


BY_A_RUN = {"a class of modules", "a long table"} | {name for name in READ_ELSEWHERE if "hook" in name}
"""What of these shows in what the frozen layers give alone."""


def test_what_frozen_code_reads_of_python_is_noticed_around_a_pass(folder, monkeypatch):
    model = freeze(Elsewhere().train(), "last", input_shape=(3, 32, 32))
    with job_for(folder, model) as job:
        for kind, change in READ_ELSEWHERE.items():
            for late in (False, True):
                batches = iter(job.loader(BATCH))
                found = [next(batches)] if late else []
                with monkeypatch.context() as patch:
                    change(model, patch)
                    with pytest.raises(NetworkChanged, match=r"(a global|its forward|variable).*refreeze\(\)"):
                        found.extend(batches)
                assert len(found) == 3 * late, kind
        expected = copy.deepcopy(model)
        with monkeypatch.context() as patch:
            patch.setitem(KNOBS, "gain", 2.0)
            job.refreeze()
            for (features, _), (pixels, _) in zip(
                features_of(job.loader(BATCH, shuffle=True)), pixels_of(folder), strict=True
            ):
                assert torch.allclose(job.head(features), expected(pixels), atol=1e-6)


def test_a_pass_that_is_refused_as_it_begins_goes_on_from_where_it_was_put(folder, monkeypatch):
    model = freeze(Elsewhere().train(), "last", input_shape=(3, 32, 32))
    with job_for(folder, model) as job:
        whole, before, loader = (
            [batch.ids.tolist() for batch in job.loader(BATCH)],
            job.loader(BATCH),
            job.loader(BATCH),
        )
        next(iter(before))
        loader.load_state_dict(before.state_dict())
        with monkeypatch.context() as patch:
            patch.setitem(KNOBS, "gain", 2.0)
            with pytest.raises(NetworkChanged, match="a global"):
                next(iter(loader))
        assert [batch.ids.tolist() for batch in loader] == whole[1:]


def test_the_runs_that_notice_it_take_a_small_share_of_the_time(folder, monkeypatch):
    model = freeze(Elsewhere().train(), "last", input_shape=(3, 32, 32))
    now, runs = 100.0, 0
    with job_for(folder, model) as job:
        watch, own = job._watch, job.head.makes_the_same_  # noqa: SLF001 (the test sets its clock)

        def runs_long(**options):
            nonlocal now, runs
            now, runs = now + 3.0, runs + 1
            return own(**options)

        for clock in ("perf_counter", "thread_time"):
            monkeypatch.setattr(f"frostline.models.changes.time.{clock}", lambda: now)
        monkeypatch.setattr(job.head, "makes_the_same_", runs_long)
        monkeypatch.setattr(changes, "_QUICK_S", 0.02)

        def pass_of_one_batch():
            watch.begin()
            watch.step()

        for look, share in ((watch.step, 0.01), (pass_of_one_batch, 0.03)):
            began, runs = now, 0
            while now < began + 1000:
                now += 5.0
                look()
            assert 1 <= runs <= 1 + share * (now - began) / 3
        monkeypatch.setitem(KNOBS, "gain", 2.0)
        now += 400.0
        with pytest.raises(NetworkChanged, match="a global variable"):
            watch.step()


CHANGES = {
    "unfrozen": (lambda m: m.last.requires_grad_(True), "parameter 'last.0.weight' is trained now"),
    "bias alone unfrozen": (lambda m: m.stem[0].bias.requires_grad_(True), "parameter 'stem.0.bias' is trained now"),
    "checkpoint": (
        lambda m: m.load_state_dict(other_state(m)),
        "parameter 'stem.0.weight' was changed in place",
    ),
    "checkpoint, assigned": (
        lambda m: m.load_state_dict(other_state(m), assign=True),
        "parameter 'stem.0.weight' was replaced",
    ),
    "behind the back of autograd": (
        lambda m: m.body[0].weight.data.copy_(torch.ones_like(m.body[0].weight)),
        "parameter 'body.0.weight' was changed in place",
    ),
    "one element": (
        lambda m: m.body[0].bias.data[1:2].add_(1e-4),
        "parameter 'body.0.bias' was changed in place",
    ),
    "by NumPy": (
        lambda m: m.stem[0].bias.detach().numpy().__setitem__(0, 7),
        "parameter 'stem.0.bias' was changed in place",
    ),
    "under no_grad": (
        lambda m: torch.no_grad()(m.stem[1].weight.mul_)(2),
        "parameter 'stem.1.weight' was changed in place",
    ),
    "by a function of nn.utils": (
        lambda m: nn.utils.vector_to_parameters(torch.zeros(456), [m.last[0].weight, m.last[0].bias, m.last[1].weight]),
        "parameter 'last.0.weight' was changed in place",
    ),
    "by data": (
        lambda m: setattr(m.stem[0].bias, "data", torch.zeros(4)),
        "parameter 'stem.0.bias' was changed in place",
    ),
    "in half precision": (
        lambda m: m.stem.to(torch.float64),
        "parameter 'stem.0.weight' was changed in place",
    ),
    "parameter replaced": (
        lambda m: setattr(m.stem[0], "weight", nn.Parameter(torch.zeros(4, 3, 3, 3), requires_grad=False)),
        "parameter 'stem.0.weight' was replaced",
    ),
    "trained parameter in its place": (
        lambda m: setattr(m.stem[0], "weight", nn.Parameter(torch.zeros(4, 3, 3, 3))),
        "parameter 'stem.0.weight' is trained now",
    ),
    "pruned": (pruned, "module 'stem.0' is frozen, and its forward or a hook"),
    "parametrized": (
        lambda m: nn.utils.parametrizations.weight_norm(m.stem[0]),
        "module 'stem.0.parametrizations' was added",
    ),
    "head replaced": (lambda m: setattr(m, "fc", nn.Linear(6, 3)), "module 'fc' was replaced"),
    "module that the head has not": (lambda m: setattr(m, "more", nn.Linear(6, 3)), "module 'more' was added"),
    "frozen module replaced": (
        lambda m: m.stem.__setitem__(2, nn.GELU()),
        "module 'stem.2' was replaced",
    ),
    "frozen module appended": (lambda m: m.last.append(nn.Tanh()), "module 'last.3' was added"),
    "frozen module taken out": (lambda m: m.last.__delitem__(2), "module 'last.2' was removed"),
    "train mode": (lambda m: m.train(), "BatchNorm2d 'stem.1' is frozen and was put into train mode"),
    "dropout in train mode": (lambda m: m.body[3].train(), "Dropout 'body.3' is frozen and was put into train mode"),
    "statistics of a frozen norm": (
        lambda m: m.last[1].running_mean.add_(1),
        "buffer 'last.1.running_mean' was changed in place",
    ),
    "buffer": (lambda m: m.scale.fill_(2), "buffer 'scale' was changed in place"),
    "buffer replaced": (lambda m: setattr(m, "scale", torch.zeros(4, 1, 1)), "buffer 'scale' was replaced"),
    "buffer taken away": (lambda m: setattr(m, "scale", None), "buffer 'scale' is no longer there"),
    "a setting of a layer": (lambda m: setattr(m.stem[1], "eps", 0.1), "module 'stem.1' is frozen, and its eps"),
    "another forward": (
        lambda m: setattr(m.stem[2], "forward", torch.tanh),
        "module 'stem.2' is frozen, and its forward or a hook",
    ),
    "a hook": (
        lambda m: m.body.register_forward_hook(lambda *a: a[-1] * 2),
        "module 'body' is frozen, and its forward or a hook",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_of_the_network_stops_the_next_pass(folder, change):
    model = network()
    with job_for(folder, model) as job:
        loader = job.loader(BATCH)
        assert len(list(loader)) == 3
        does, says = CHANGES[change]
        does(model)
        with pytest.raises(NetworkChanged, match=re.escape(says)) as told:
            next(iter(loader))
        assert "job.refreeze()" in str(told.value)


class Attends(nn.Module):
    def __init__(self, p):
        super().__init__()
        self.own = nn.MultiheadAttention(6, 2, p, batch_first=True)

    def forward(self, found):
        rows = found.flatten(2).transpose(1, 2)
        return self.own(rows, rows, rows, need_weights=False)[0].transpose(1, 2).reshape(found.shape)


class Asks(nn.Conv2d):
    """Has weights, and asks for its mode where it uses them."""

    def __init__(self, does):
        super().__init__(6, 6, 1)
        self.does = does

    def forward(self, found):
        return self.does(super().forward(found), self.training)


MINDS = {
    "attention": (lambda: Attends(0.2), r"MultiheadAttention 'last\.2\.own'"),
    "a function": (lambda: Asks(lambda h, on: nn.functional.dropout(h, 0.2, on)), r"Asks 'last\.2'"),
    "its own way": (lambda: Asks(lambda h, on: h * 2 if on else h), r"Asks 'last\.2'"),
    "attention that drops nothing": (lambda: Attends(0.0), None),
    "a function of nothing": (lambda: Asks(lambda h, on: nn.functional.dropout(h, 0.0, on)), None),
}


@pytest.mark.parametrize("kind", MINDS)
def test_frozen_layers_that_ask_for_their_mode_in_their_code_are_named(folder, kind):
    made, named = MINDS[kind]
    model = Net()
    model.last[2] = made()
    freeze(model.train(), "last", input_shape=(3, 32, 32))
    with job_for(folder, model) as job:
        before = [batch.features for batch in job.loader(BATCH)]
        model.last[2].train()
        if named is None:
            assert all(map(torch.equal, before, (batch.features for batch in job.loader(BATCH))))
            return
        says = f"{named} is frozen and was put into train mode"
        with pytest.raises(NetworkChanged, match=says):
            next(iter(job.loader(BATCH)))
        with pytest.raises(NetworkChanged, match=says):  # workers may have brought them
            job.head(before[0])


def test_modes_that_nobody_asks_for_are_not_tried(folder, monkeypatch):
    tried, makes = [], SkippingHead.makes_the_same_
    monkeypatch.setattr(SkippingHead, "makes_the_same_", lambda *said, **how: tried.append(how) or makes(*said, **how))
    model = freeze(Net().eval(), "last", input_shape=(3, 32, 32))
    with job_for(folder, model) as job:
        for module in (model.stem[2], model.body[2], model.last[2]):
            module.train()
        assert [batch.features for batch in job.loader(BATCH)]
    assert not any("training" in how for how in tried)


SAME = {
    "the same checkpoint": lambda m: m.load_state_dict({k: v.clone() for k, v in m.state_dict().items()}),
    "assigned": lambda m: m.load_state_dict({k: v.clone() for k, v in m.state_dict().items()}, assign=True),
    "another memory": lambda m: setattr(m.stem[0].weight, "data", m.stem[0].weight.data.clone()),
    "another layout": lambda m: m.to(memory_format=torch.channels_last),
    "there and back": lambda m: m.double().float(),
    "an evaluation": lambda m: m(torch.zeros(2, 3, 32, 32)),
    "trained layers": lambda m: torch.no_grad()(m.fc.weight.mul_)(2),
    "the mode of the head": lambda m: m.fc.eval(),
    "modules inside a layer of the head": lambda m: nn.utils.parametrizations.weight_norm(m.fc),
}


@pytest.mark.parametrize("change", SAME)
def test_what_is_the_same_after_all_stops_nothing(folder, change):
    model = network()
    with job_for(folder, model) as job:
        before = [batch.features for batch in job.loader(BATCH)]
        SAME[change](model)
        after = [batch.features for batch in job.loader(BATCH)]
    assert all(torch.equal(mine, other) for mine, other in zip(before, after, strict=True))


def test_a_change_in_the_middle_of_a_pass_stops_it(folder):
    model = network()
    with job_for(folder, model) as job:
        batches = iter(job.loader(BATCH))
        next(batches)
        model.last.requires_grad_(True)
        with pytest.raises(NetworkChanged, match="is trained now"):
            next(batches)


IN_A_PASS = {
    "by data": (lambda m: m.body[0].weight.data.mul_(0.5), lambda m: m.body[0].weight.data.mul_(2)),
    "by NumPy": (
        lambda m: m.body[0].weight.detach().numpy().__imul__(0.5),
        lambda m: m.body[0].weight.detach().numpy().__imul__(2),
    ),
    "another tensor": (
        lambda m: setattr(m.body[0].weight, "data", m.body[0].weight.data * 0.5),
        lambda m: setattr(m.body[0].weight, "data", m.body[0].weight.data * 2),
    ),
    "an average": (
        lambda m: [parameter.data.mul_(0.5) for parameter in m.parameters()],
        lambda m: [parameter.data.mul_(2) for parameter in m.parameters()],
    ),
    "train mode": (lambda m: m.body.train(), lambda m: m.body.eval()),
    "a constant": (lambda m: m.mean.mul_(0.5), lambda m: m.mean.mul_(2)),
    "a tensor in a list": (lambda m: m.means[0].mul_(0.5), lambda m: m.means[0].mul_(2)),
    "an array": (lambda m: m.array.__imul__(0.5), lambda m: m.array.__imul__(2)),
    "a layer in a list": (
        lambda m: m.layers[0].weight.data.mul_(0.5),
        lambda m: m.layers[0].weight.data.mul_(2),
    ),
}


class Constants(Net):
    """Has tensors, an array and a layer that are no buffers and no modules of its own, before the line."""

    def __init__(self):
        super().__init__()
        self.mean, self.means, self.array = torch.ones(3, 1, 1), [torch.ones(3, 1, 1)], np.ones((3, 1, 1), np.float32)
        self.layers = [nn.Conv2d(3, 3, 1).requires_grad_(False)]

    def forward(self, pixels):
        pixels = self.layers[0](pixels * self.mean * self.means[0] * torch.from_numpy(self.array))
        return super().forward(pixels)


def test_no_pass_that_ends_hides_what_changed_within_it(folder):
    torch.manual_seed(1)
    model = freeze(Constants().train(), "last", input_shape=(3, 32, 32))
    with job_for(folder, model) as job:
        for kind, (change, back) in IN_A_PASS.items():
            batches = iter(job.loader(BATCH))
            next(batches)
            change(model)
            with pytest.raises(NetworkChanged, match=r"refreeze\(\)"):
                list(batches)
            back(model)
            assert len(list(job.loader(BATCH))) == 3, kind


def test_what_is_switched_around_a_call_of_the_head_alone_is_noticed_by_that_call(folder, monkeypatch):
    """As a reference without an adapter is computed, before the pass goes on as it was."""
    monkeypatch.setattr(CONSTANTS, "runs", 0)
    model = freeze(Elsewhere().train(), "last", input_shape=(3, 32, 32))
    with job_for(folder, model) as job:
        [features, *_] = [batch.features for batch in job.loader(BATCH)]
        assert CONSTANTS.runs == 0, "trials of the network count nowhere"
        expected = job.head(features)
        assert CONSTANTS.runs == 1
        for kind, change in READ_ELSEWHERE.items():
            if kind in BY_A_RUN:
                continue
            with monkeypatch.context() as patch:
                change(model, patch)
                with pytest.raises(
                    ModelError, match=r"which code of the frozen layers reads, was.*refreeze\(\)"
                ) as told:
                    job.head(features)
                assert kind != "the environment" or "'os.environ'" in str(told.value)
            assert torch.equal(job.head(features), expected)
        monkeypatch.setattr(model.config, "note", "the head's")
        assert torch.equal(job.head(features), expected)


WRITTEN = {
    "another weight": lambda model: torch.no_grad()(model.body[0].weight.mul_)(1.5),
    "trained": lambda model: model.last.requires_grad_(True),
    "another tensor": lambda model: setattr(model.stem[0], "weight", nn.Parameter(model.stem[0].weight * 2)),
}


@pytest.mark.parametrize("change", WRITTEN)
def test_the_head_takes_no_kept_batch_once_the_frozen_layers_are_others(folder, change):
    model = network()
    with job_for(folder, model) as job:
        kept = [batch.features.clone() for batch in job.loader(BATCH)]
        job.head(kept[0])
        WRITTEN[change](model)
        with pytest.raises(NetworkChanged, match=r"refreeze\(\)"):
            job.head(kept[0])


def test_a_head_takes_no_batch_that_was_kept_across_a_change_of_the_frozen_part(folder):
    model = network()
    with job_for(folder, model, on_event=lambda _: None) as job:
        kept, copied = next(iter(job.loader(BATCH))).features, copy.deepcopy(job.head)
        torch.no_grad()(model.last[0].weight.mul_)(1.5)
        job.refreeze()
        with pytest.raises(ModelError, match="computed by other frozen layers"):
            job.head(kept)
        new = next(iter(job.loader(BATCH))).features
        with pytest.raises(ModelError, match="computed by other frozen layers"):
            copied(new)
        job.head(new)
        job.refreeze()
        job.head(new)


def test_weights_are_read_one_after_another_where_passes_are_short(folder, monkeypatch):
    for limit in ("_SMALL_BYTES", "_READ_S", "_READ_SHARE"):  # of the small ones one is read at each step
        monkeypatch.setattr(changes, limit, 0)
    read, model = [], network()
    with job_for(folder, model) as job:
        monkeypatch.setattr(
            changes, "quick_sum", lambda tensor, **given: [read.append(tensor), quick_sum(tensor, **given)][1]
        )
        loader = job.loader(BATCH)
        list(loader)
        assert len(read) == 2, "one as a pass begins, one as it ends"
        list(loader)
        assert len({id(tensor) for tensor in read}) == 4
        model.body[0].weight.data.mul_(2)
        with pytest.raises(NetworkChanged, match=r"body\.0\.weight.*changed in place"):
            [list(loader) for _ in range(100)]
        assert sum(tensor is model.body[0].weight for tensor in read) == 1


def test_copied_features_from_before_a_refreeze_are_told_until_a_new_pass(folder):
    model = network()
    with job_for(folder, model, on_event=lambda _: None) as job, warnings.catch_warnings():
        warnings.simplefilter("error")
        copied = torch.cat([batch.features for batch in job.loader(BATCH)])
        job.refreeze()  # which changes nothing
        job.head(copied)
        torch.no_grad()(model.last[0].weight.mul_)(1.5)
        job.refreeze()
        job.refreeze()
        with pytest.warns(UserWarning, match="no pass gave since job.refreeze"):
            job.head(copied)
        job.head(copied)  # it was told once
        torch.no_grad()(model.last[0].weight.mul_)(1.5)
        job.refreeze()
        job.head(next(iter(job.loader(BATCH))).features.clone())


def test_one_head_that_several_threads_run_gives_each_what_it_gives_alone(folder):
    model = network()
    pixels = torch.ones(2, 3, 32, 32)
    with job_for(folder, model) as job, torch.no_grad():
        head, batches = job.head.eval(), [batch.features for batch in job.loader(BATCH)]
        expected = [head(features) for features in batches]
        whole = model.eval()(pixels)

        def run(number):
            with torch.no_grad():
                if number % 4 == 3:
                    return torch.equal(model(pixels), whole)
                return torch.equal(head(batches[number % 3]), expected[number % 3])

        with ThreadPoolExecutor(4) as threads:
            assert all(threads.map(run, range(200)))
        assert "forward" not in vars(model.stem)


def test_a_run_of_epochs_is_stopped_too(folder):
    model = network()
    with job_for(folder, model) as job:
        for loader in job.epochs(BATCH, range(3)):
            if loader.epoch == 1:
                model.stem[0].weight.data.zero_()
                with pytest.raises(NetworkChanged, match=re.escape("'stem.0.weight'")):
                    list(loader)
                return
            list(loader)


@pytest.mark.parametrize("until", ["body", "stem", ""])
def test_layers_that_are_unfrozen_are_trained_as_in_a_plain_loop(folder, until):
    model = network()
    twin = copy.deepcopy(model)
    later = {"body": ["last"], "stem": ["body", "last"], "": ["stem", "body", "last"]}[until]
    with job_for(folder, model, on_event=lambda _: None) as job:
        head, loader = job.head, job.loader(BATCH, shuffle=True)
        ours = trained(head, head.parameters(), features_of(loader))
        for name in later:
            model.get_submodule(name).requires_grad_(True)
        job.refreeze()
        assert job.head is head
        torch.manual_seed(3)
        ours += trained(head, head.parameters(), features_of(loader.in_epoch(1)))
    theirs = trained(twin, twin.fc.parameters(), pixels_of(folder))
    for name in later:
        twin.get_submodule(name).requires_grad_(True)
    torch.manual_seed(3)
    asked = [parameter for parameter in twin.parameters() if parameter.requires_grad]
    theirs += trained(twin, asked, pixels_of(folder, 1))
    assert ours == pytest.approx(theirs, abs=1e-6)
    assert all(torch.allclose(value, twin.state_dict()[key], atol=1e-6) for key, value in model.state_dict().items())


REFROZEN = {
    name: CHANGES[name][0]
    for name in (
        "checkpoint",
        "behind the back of autograd",
        "parameter replaced",
        "head replaced",
        "frozen module replaced",
        "frozen module appended",
        "buffer replaced",
        "a setting of a layer",
        "parametrized",
    )
}


@pytest.mark.parametrize("change", REFROZEN)
def test_a_network_that_was_frozen_anew_has_the_losses_of_a_plain_loop(folder, change):
    model = network()
    twin = copy.deepcopy(model)
    with job_for(folder, model, on_event=lambda _: None) as job:
        loader = job.loader(BATCH, shuffle=True)
        list(loader)
        torch.manual_seed(4)
        REFROZEN[change](model)
        for module in (model.stem, model.body, model.last):
            module.requires_grad_(False)
        job.refreeze()
        ours = trained(job.head, job.head.parameters(), features_of(loader))
    torch.manual_seed(4)
    REFROZEN[change](twin)
    theirs = trained(twin, twin.fc.parameters(), pixels_of(folder))
    assert ours == pytest.approx(theirs, abs=1e-6)


class Momentum(nn.Module):
    """A network and an average of it, the scores of which it learns to give, as MoCo and BYOL have them."""

    def __init__(self, *, learns):
        super().__init__()
        self.own = network()
        self.average = copy.deepcopy(self.own).requires_grad_(learns)

    @torch.no_grad()
    def move(self):
        for own, average in zip(self.own.parameters(), self.average.parameters(), strict=True):
            average.mul_(0.5).add_(own, alpha=0.5)

    def forward(self, pixels):
        with torch.no_grad():
            meant = self.average(pixels)
        return self.own(pixels) + (self.own(pixels) - meant).square().mean(1, keepdim=True)


def momentum_trained(model, run, batches):
    optimizer = torch.optim.SGD(model.own.fc.parameters(), 0.1)
    losses = []
    for inputs, labels in batches:
        losses.append(plain.step(run, optimizer, inputs, labels))
        model.move()
    return losses


def test_an_average_that_moves_at_each_step_is_refused_with_what_helps(folder):
    model = Momentum(learns=False)
    says = r"was changed in place.*moves it at each step.*require gradients before offload.*torch\.no_grad\(\)"
    with job_for(folder, model, on_event=lambda _: None) as job, pytest.raises(NetworkChanged, match=says):
        momentum_trained(model, job.head, features_of(job.loader(BATCH)))
    model, twin = Momentum(learns=True), Momentum(learns=False)
    with job_for(folder, model, on_event=lambda _: None) as job:
        ours = momentum_trained(model, job.head, features_of(job.loader(BATCH, shuffle=True)))
    assert ours == pytest.approx(momentum_trained(twin, twin, pixels_of(folder)), rel=1e-6)


def test_a_parametrization_of_the_head_that_is_removed_is_the_loops(folder):
    model, twin, losses = network(), network(), []
    for each in (model, twin):
        nn.utils.parametrizations.weight_norm(each.fc)
    with job_for(folder, model) as job:
        for run, of, batches in (
            (job.head, model, lambda epoch: features_of(job.loader(BATCH, shuffle=True, epoch=epoch))),
            (twin, twin, lambda epoch: pixels_of(folder, epoch)),
        ):
            found = trained(run, of.fc.parameters(), batches(0))
            nn.utils.parametrize.remove_parametrizations(of.fc, "weight")
            losses.append(found + trained(run, of.fc.parameters(), batches(1)))
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    assert [*job.head.fc.state_dict()] == ["bias", "weight"]


BLOCKS = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "without gradients": torch.no_grad,
    "inference mode": torch.inference_mode,
}


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("anew", [False, True])
def test_a_job_that_is_made_within_a_block_of_torchs_is_that_without(folder, block, anew):
    """What is made holds for all loops, whatever the block around ``offload`` or ``refreeze`` does to a loop in it."""
    model = network("body" if anew else "last")
    twin = copy.deepcopy(network())
    with ExitStack() as jobs:
        with BLOCKS[block]():
            job = jobs.enter_context(job_for(folder, model, accuracy="exact"))
            if anew:
                model.last.requires_grad_(False).eval()
                job.refreeze()
        ours = trained(job.head, model.fc.parameters(), features_of(job.loader(BATCH, shuffle=True)))
    assert ours == trained(twin, twin.fc.parameters(), pixels_of(folder))


def test_epochs_that_were_asked_for_early_are_asked_for_again_behind_a_change(folder):
    settings = LoaderSettings(samples_per_request=8, requests_in_flight=3, device_batch=8, cache_bytes=0)
    model = network()
    twin = copy.deepcopy(model)
    with job_for(folder, model, settings=settings) as job:
        ours = []
        for loader in job.epochs(BATCH, range(3), shuffle=True):
            if loader.epoch:
                torch.no_grad()(model.stem[0].weight.mul_)(1.5)
                job.refreeze()
            ours += trained(job.head, job.head.parameters(), features_of(loader))
    theirs = []
    for epoch in range(3):
        if epoch:
            torch.no_grad()(twin.stem[0].weight.mul_)(1.5)
        theirs += trained(twin, twin.fc.parameters(), pixels_of(folder, epoch))
    assert ours == pytest.approx(theirs, abs=1e-6)


def test_a_pass_that_is_under_way_ends_where_the_frozen_part_is_made_anew(folder):
    model = network()
    with job_for(folder, model) as job:
        batches = iter(job.loader(BATCH))
        next(batches)
        job.refreeze()
        with pytest.raises(NetworkChanged, match="in the middle of a pass"):
            next(batches)


def test_what_is_kept_stays_where_the_frozen_part_is_the_same_again(folder):
    model = network()
    with job_for(folder, model) as job:
        list(job.loader(BATCH))
        job.refreeze()
        list(job.loader(BATCH))
        assert job.statistics().from_cache == len(job.data)


def test_features_of_the_part_before_stay_on_the_disk(folder, tmp_path):
    settings = LoaderSettings(samples_per_request=8, device_batch=8, cache_bytes=0, cache_folder=str(tmp_path))
    model = network()
    with job_for(folder, model, settings=settings, on_event=lambda _: None) as job:
        list(job.loader(BATCH))
        model.last.requires_grad_(True)
        job.refreeze()
        list(job.loader(BATCH))
        assert job.statistics().from_cache == 0
        model.last.requires_grad_(False)
        job.refreeze()
        list(job.loader(BATCH))
        assert job.statistics().from_cache == len(job.data)


def test_frozen_layers_that_run_in_eval_mode_anyway_may_be_put_into_train_mode(folder):
    model = network()
    with job_for(folder, model, frozen_in_eval=True, on_event=lambda _: None) as job:
        model.train()
        [features, *rest] = [batch.features for batch in job.loader(BATCH)]
        assert len(rest) == 2
        job.head(features)
        assert [part.training for part in (model.stem, model.body, model.last)] == [False, False, False]
        model.last.requires_grad_(True)
        job.refreeze()
        assert [part.training for part in (model.stem, model.body, model.last)] == [False, False, True]


def test_a_wrapped_network_is_looked_at_inside(folder):
    model = nn.DataParallel(network())
    with job_for(folder, model) as job:
        list(job.loader(BATCH))
        unwrap(model).stem.requires_grad_(True)
        with pytest.raises(NetworkChanged, match=re.escape("parameter 'stem.0.weight' is trained now")):
            list(job.loader(BATCH))


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_workers_are_not_started_over_a_network_that_changed(folder, start):
    model = network()
    with job_for(folder, model) as job:
        loader = job.loader(BATCH)
        model.last.requires_grad_(True)
        with pytest.raises(NetworkChanged, match="is trained now"):
            list(torch.utils.data.DataLoader(loader, batch_size=None, num_workers=1, multiprocessing_context=start))


def test_a_job_without_a_network_has_nothing_to_freeze_anew(folder):
    with job_for(folder, None) as job, pytest.raises(SettingError, match="no network to freeze"):
        job.refreeze()


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_job_is_not_copied_and_says_what_is(folder, copied):
    trainer = SimpleNamespace(job=None)
    with job_for(folder, network()) as trainer.job:
        with pytest.raises(TypeError, match=r"a job has connections.*copy job\.head.*hand job\.loader"):
            copied(trainer.job)
        with pytest.raises(TypeError, match=r"copy job\.head"):
            copy.deepcopy(trainer)
        copy.deepcopy(trainer.job.head)
        pickle.dumps(trainer.job.loader(BATCH))


def test_a_closed_job_freezes_nothing_anew(folder):
    job = job_for(folder, network())
    job.close()
    with pytest.raises(SettingError, match="closed"):
        job.refreeze()


@pytest.mark.parametrize("summed", [checksum, quick_sum])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("shape", [(2, 3, 2, 2), (64, 8, 6, 6)])
def test_checksums_follow_values_and_their_places_alone(summed, dtype, shape):
    torch.manual_seed(0)
    values = (torch.randn(shape) * 9).to(dtype)
    assert summed(values) == summed(values.to(memory_format=torch.channels_last)) == summed(values.clone())
    others = [values.flip(0), values.neg(), values.roll(1), values.roll(1, 0), values * 2]
    one = values.clone()
    one.view(-1)[-1] += 1
    assert summed(values) not in [summed(other) for other in (*others, one)]


@pytest.mark.parametrize("summed", [checksum, quick_sum])
def test_checksums_are_there_for_tensors_of_any_size_and_place(summed):
    assert summed(torch.ones(3, dtype=torch.bool)[1:]) == summed(torch.ones(2, dtype=torch.bool))
    assert summed(torch.arange(20_001, dtype=torch.uint8)[1:]) == summed(torch.arange(1, 20_001, dtype=torch.uint8))
    assert summed(torch.zeros(0)) == summed(torch.zeros(0))


def test_of_large_tensors_evenly_spaced_rows_are_read():
    values = torch.zeros(8 * 2042)  # eight rows
    before = quick_sum(values, every=2)
    values[2042] = 1
    assert quick_sum(values, every=2) == before
    values[4084] = 1
    assert quick_sum(values, every=2) != before


class Weighted(nn.Module):
    """An encoder of four frozen blocks, all outputs of which are summed with weights that are trained."""

    def __init__(self, *, batch_first):
        super().__init__()
        self.embed = nn.Conv2d(3, 8, 8, stride=8)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, batch_first=batch_first) for _ in range(4))
        self.weights = nn.Parameter(torch.zeros(5))
        self.fc = nn.Linear(8, 3)
        self.batch_first = batch_first

    def forward(self, pixels):
        tokens = self.embed(pixels).flatten(2)
        states = [tokens.transpose(1, 2) if self.batch_first else tokens.permute(2, 0, 1)]
        for block in self.blocks:
            states.append(block(states[-1]))
        mixed = (torch.stack(states) * self.weights.softmax(0)[:, None, None, None]).sum(0)
        return self.fc(mixed.mean(1 if self.batch_first else 0))


def weighted(*, batch_first):
    torch.manual_seed(2)
    model = Weighted(batch_first=batch_first).train()
    for module in (model.embed, model.blocks):
        module.requires_grad_(False).eval()
    return model


@pytest.mark.parametrize("cut", [None, 1])
def test_sums_of_all_layers_of_an_encoder_are_made_of_what_the_node_gives(folder, cut):
    model, said = weighted(batch_first=True), []
    expected = copy.deepcopy(model)
    losses = trained(expected, [expected.weights, *expected.fc.parameters()], pixels_of(folder))
    with job_for(folder, model, cut=cut, on_event=said.append) as job:
        assert not [event for event in said if isinstance(event, SetupWarning)]
        assert len(job.frost_line.tensors) == 5
        ours = trained(
            lambda features: job.head(*features),
            [model.weights, *model.fc.parameters()],
            features_of(job.loader(BATCH, shuffle=True)),
        )
    assert ours == pytest.approx(losses, rel=1e-5)


def test_frozen_work_that_runs_at_the_trainer_is_said_with_its_share(folder):
    """Tokens come first here, and what crosses has to have a row for each sample."""
    said = []
    with job_for(folder, weighted(batch_first=False), on_event=said.append) as job:
        warnings = [event.reason for event in said if isinstance(event, SetupWarning)]
        [sentence] = warnings
        found = re.fullmatch(
            r"(\d+) frozen layers run at the trainer \((\d+)% of the frozen work\), because .*", sentence
        )
        assert found is not None
        assert int(found[1]) >= 16
        assert int(found[2]) >= 50
        assert job.fallback == sentence
        assert f"{found[1]} frozen layers behind that ({found[2]}% of the frozen work): trainer" in str(job.explain())


def test_frozen_layers_behind_trained_ones_are_said_where_they_are_most_of_the_work(folder):
    torch.manual_seed(1)
    model = Net().requires_grad_(False).eval()
    model.fc.requires_grad_(True)
    model.stem[1].requires_grad_(True)
    with job_for(folder, model, on_event=lambda _: None) as job:
        assert re.match(
            r"\d frozen layers run at the trainer \(\d+% of the frozen work\), because parameter 'stem.1.weight'",
            job.fallback,
        )


def test_nothing_is_said_where_all_frozen_work_runs_at_the_node(folder):
    with job_for(folder, network()) as job:
        assert job.fallback is None
        assert "behind that" not in str(job.explain())
