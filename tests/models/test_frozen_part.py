"""The frozen part of a network: rows that stay apart, and modes that change nothing.

A frozen layer that mixes the samples of a batch is left to the loop, and named.

Frozen layers that were left in train mode, where they compute something else, are refused by name.
"""

import copy
import random
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from frostline.core import TensorSpec
from frostline.core.errors import FrozenInTrainMode, NotTraceable
from frostline.models import cut_network, freeze
from frostline.models.rows_apart import keeps_rows_apart, keeps_rows_apart_by_runs
from frostline.models.tracing import takes_parts, takes_rows, trace
from frostline.preprocess.steps import place_inputs
from support.cutting import crossed, finished, shipped_engine

pytestmark = pytest.mark.promise(
    "equal", mended="a frozen layer that mixes the rows of a batch gave a sample features of its neighbours"
)

WIDTH = 6


class Mixes(nn.Module):
    """A convolution, something that mixes rows, a frozen layer and a trained one."""

    def __init__(self, mix, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, WIDTH, 3)
        self.mix = mix
        self.last = nn.Linear(WIDTH, WIDTH)
        self.fc = nn.Linear(WIDTH, 2)
        self.requires_grad_(False).to(dtype).eval()
        self.fc.requires_grad_(True)

    def forward(self, x):
        return self.fc(torch.tanh(self.last(self.mix(self.conv(x).mean((2, 3))))))


class Rows(nn.Module):
    """A function as a layer, which has a path of its own."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, h):
        return self.function(h)


MIXING = {
    "a mean": lambda h: h - h.mean(0),
    "a small part of the mean": lambda h: h + 1e-4 * h.mean(0),
    "softmax": lambda h: h.softmax(0),
    "cumsum": lambda h: h.cumsum(0),
    "a small part of cumsum": lambda h: h + 1e-4 * h.cumsum(0),
    "cumsum from the end": lambda h: h.flip(0).cumsum(0).flip(0),
    "flip": lambda h: h.flip(0),
    "roll": lambda h: h.roll(1, 0),
    "roll by four": lambda h: h.roll(4, 0),
    "randperm": lambda h: h[torch.randperm(len(h))],
    "normalised by hand": lambda h: (h - h.mean(0)) / ((h * h).mean(0) - h.mean(0) ** 2 + 1e-5).sqrt(),
    "sort": lambda h: h.sort(0).values,
    "similarity": lambda h: h @ h.T @ h / 100,
    "attention over rows": lambda h: (h @ h.T).softmax(-1) @ h,
    "the size of the batch": lambda h: h * h.shape[0],
    "the place in the batch": lambda h: h + torch.arange(h.shape[0])[:, None],
    "the greatest of all": lambda h: h / h.abs().max(),
    "the norm of all": lambda h: h / h.norm(),
    "ranks": lambda h: h + (h.sum(1)[:, None] > h.sum(1)[None]).float().mean(1)[:, None],
    "the nearest of all": lambda h: h + (h[:, None] - h[None]).square().sum(2).argmin(1).gt(0)[:, None],
    "a norm without statistics": nn.BatchNorm1d(WIDTH, track_running_stats=False),
    "neighbours": lambda h: torch.cat([h[1:], h[:1]]),
    "a standard deviation": lambda h: h / (h.std(0, unbiased=False) + 1),
    "the first row": lambda h: h - h[:1],
    "a transposed layer": lambda h: nn.functional.layer_norm(h.t(), h.t().shape[-1:]).t(),
    "there and back": lambda h: (h.flip(0) * 2).flip(0) + h.mean(),
    # For values alone that made-up rows do not have.
    "flip of some": lambda h: torch.where(h > 50, h.flip(0), h),
    "a clipped norm": lambda h: h * (1000 / h.norm()).clamp(max=1.0),
    "a mean that is seldom added": lambda h: h + (h.mean() - 50).relu(),
}
APART = {
    "nothing": lambda h: h,
    "softmax": lambda h: h.softmax(1),
    "normalised": lambda h: (h - h.mean(1, keepdim=True)) / ((h * h).mean(1, keepdim=True) + 1e-5).sqrt(),
    "flip": lambda h: h.flip(1),
    "cumsum": lambda h: h.cumsum(1),
    "batch second": lambda h: (h.view(-1, 2, 3).transpose(0, 1) * torch.arange(2).view(2, 1, 1)).sum(0).repeat(1, 2),
    "reshaped": lambda h: torch.relu(h.reshape(-1, 3)).reshape(-1, 6),
    "outer": lambda h: (h[:, :, None] @ h[:, None]).sum(2),
}


# Each calls operators that keep rows apart, by other arguments or on other dimensions.
MIXING_BY_ARGUMENTS = {
    "a softmax over the first of them": lambda h: h.t().softmax(-1).t(),
    "read anew in another order": lambda h: h.t().reshape(-1, 6),
    "a product over rows": lambda h: (h.t() @ h.tanh() / 100)[None].expand(len(h), -1, -1).sum(1) * h,
    "attention with the batch last": lambda h: nn.functional.scaled_dot_product_attention(*[h[None]] * 3)[0],
    "joined one behind the other": lambda h: torch.cat([h, h.tanh()], 0).reshape(-1, 6, 2).sum(2),
    "one sample's own for all": lambda h: h + h.select(0, 0),
    "written into one": lambda h: h.clone().index_put_((torch.zeros(1, dtype=torch.int64),), h[-1:]),
    "padded before them": lambda h: nn.functional.pad(h, (0, 0, 1, 0))[:-1] + h,
    "normalised with the batch last": lambda h: nn.functional.layer_norm(h.t()[None], h.t().shape)[0].t(),
    "a place for each": lambda h: h + torch.ones_like(h).cumsum(0),
    "compared with all": lambda h: h + (h[:, None] > h[None]).float().mean(1),
}
ONE_BY_ONE = {
    "attention": lambda h: nn.functional.scaled_dot_product_attention(*[h.view(-1, 2, 3)] * 3).flatten(1),
    "the batch second": lambda h: sum(h.view(-1, 3, 2).permute(1, 0, 2).softmax(0).unbind(0)).tanh(),
    "windows": lambda h: nn.functional.layer_norm(h.view(-1, 3), (3,)).roll(1, 1).view(-1, 6),
    "a token for each": lambda h: torch.cat([torch.ones(1, 2).expand(len(h), -1), h], 1)[:, 2:],
    "a product with weights": lambda h: (h @ torch.ones(6, 6)).view(-1, 2, 3).transpose(1, 2).mean(2, True).flatten(1),
}


@pytest.mark.parametrize("kind", MIXING)
def test_the_frost_line_ends_before_an_operation_that_mixes_rows(kind):
    model = Mixes(Rows(MIXING[kind]))
    plain = copy.deepcopy(model)
    network = cut_network(model, (3, 8, 8))
    batch = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(3))
    torch.manual_seed(1)
    expected = plain(batch)
    assert all("mix" not in cut.name and "last" not in cut.name for cut in network.cuts[2:]), network.cuts
    if network.prefix is None:
        features = [batch]
    else:
        # Each half of the batch comes in a request of its own.
        engine = shipped_engine(network)
        parts = [crossed(engine, [half], network.frost_line) for half in (batch[:4], batch[4:])]
        features = [torch.cat(columns) for columns in zip(*parts, strict=True)]
    torch.manual_seed(1)
    assert torch.allclose(network.head(features), expected, rtol=1e-6, atol=1e-6)
    assert network.fallback or network.rest.why


@pytest.mark.parametrize("kind", ["a mean", "softmax", "flip", "roll", "cumsum"])
def test_the_reason_names_the_layer_and_the_operation_that_mixes_rows(kind):
    network = cut_network(Mixes(Rows(MIXING[kind])), (3, 8, 8))
    operation = {"a mean": "mean"}.get(kind, kind)
    assert network.fallback == (
        f"{operation} in 'mix' mixes the samples of a batch, so that a sample's features would depend on those beside "
        "it: the frozen layers from there on run here, as in your loop"
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", APART)
def test_what_treats_rows_one_by_one_is_frozen_whole(kind, dtype):
    network = cut_network(Mixes(Rows(APART[kind]), dtype), (3, 8, 8))
    assert network.frost_line.name.startswith(("last", "tanh"))
    assert network.fallback is None


def test_a_network_that_mixes_its_inputs_is_loaded_plainly():
    model = nn.Sequential(Rows(lambda x: x - x.mean(0)), nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 2))
    model.requires_grad_(False)[3].requires_grad_(True)
    network = cut_network(model, (3, 8, 8))
    assert network.prefix is None
    assert network.fallback.startswith("mean in '0' mixes the samples of a batch")
    batch = torch.randn(5, 3, 8, 8)
    assert torch.equal(network.head(batch), model(batch))


def test_cuts_before_the_mixing_give_the_uncut_answer():
    model = Mixes(Rows(MIXING["normalised by hand"]))
    network = cut_network(model, (3, 8, 8))
    batch = torch.randn(8, 3, 8, 8)
    for cut in network.cuts[1:]:
        features = crossed(shipped_engine(network), [batch], cut)
        assert torch.equal(network.head(finished(network, cut, features)), model(batch))


def test_the_next_job_on_the_same_network_runs_no_rows_again(monkeypatch):
    for kind in ("roll", "flip"):
        first = cut_network(Mixes(Rows(MIXING[kind])), (3, 8, 8))
        with monkeypatch.context() as patch:
            patch.setattr("frostline.models.row_check.make_rows", _never)
            second = cut_network(Mixes(Rows(MIXING[kind])), (3, 8, 8))
        assert (second.fallback, second.cuts) == (first.fallback, first.cuts)


def _never(*_, **__):
    raise AssertionError("rows were made again")


GENERATOR = np.random.default_rng(0)
DRAWS = {
    "numpy": lambda h: h * np.random.rand(),
    "a generator of numpy": lambda h: h * float(GENERATOR.random()),
    "python": lambda h: h * random.random(),
}


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("numpy", "draws random numbers that are not torch's"),
        ("a generator of numpy", "give something else in the next run, by what their code keeps in Python"),
        ("python", "draws random numbers that are not torch's"),
    ],
)
def test_what_draws_numbers_that_are_not_torchs_is_left_to_the_loop(kind, why):
    network = cut_network(Mixes(Rows(DRAWS[kind])), (3, 8, 8))
    assert network.frost_line.name.startswith(("pixels", "conv", "mean"))
    assert why in network.fallback
    batch = torch.randn(4, 3, 8, 8)
    features = [batch] if network.prefix is None else crossed(shipped_engine(network), [batch], network.frost_line)
    assert not torch.equal(network.head(features), network.head(features))


class Text(nn.Module):
    """Embeddings, something done with the tokens of all rows, and a trained head."""

    def __init__(self, mix):
        super().__init__()
        torch.manual_seed(0)
        self.embeddings = nn.Embedding(20, WIDTH)
        self.mix = mix
        self.requires_grad_(False)
        self.fc = nn.Linear(WIDTH, 2)

    def forward(self, input_ids, attention_mask):
        mask = attention_mask[..., None].float()
        return self.fc(self.mix(self.embeddings(input_ids) * mask, mask).sum(1))


class Pooled(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, hidden, mask):
        return self.function(hidden, mask)


TEXTS = {
    "each by its own tokens": (lambda hidden, mask: hidden / mask.sum(1, keepdim=True), None),
    "by the tokens of all": (lambda hidden, mask: hidden / mask.sum(), "sum in 'mix'"),
    "less what all have": (lambda hidden, mask: hidden - hidden.mean((0, 1)) * mask, "mean in 'mix'"),
}


@pytest.mark.parametrize("kind", TEXTS)
def test_texts_of_which_others_change_the_features_are_found(kind):
    function, named = TEXTS[kind]
    network = cut_network(
        takes_rows(Text(Pooled(function)), ("input_ids", "attention_mask")), (TensorSpec((2, 16), "int64"),)
    )
    if named is None:
        assert network.fallback is None
    else:
        assert network.fallback.startswith(f"{named} mixes the samples of a batch")


@pytest.mark.parametrize("function", [lambda h: h, lambda h: h - h.mean(0), lambda h: h.flip(0)])
def test_pixels_that_lie_in_whole_numbers_are_made_up_as_pixels(function):
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.text, self.image = nn.Embedding(20, WIDTH), nn.Conv2d(3, WIDTH, 3)
            self.mix = Rows(function)
            self.text.requires_grad_(False)
            self.image.requires_grad_(False)
            self.fc = nn.Linear(2 * WIDTH, 2)

        def forward(self, ids, pixels):
            seen = self.mix(self.image(pixels)).mean((2, 3))
            return self.fc(torch.cat([self.text(ids).mean(1), seen], 1))

    places = place_inputs([("ids", TensorSpec((4,), "int64")), ("pixels", TensorSpec((3, 8, 8), "float32"))])
    network = cut_network(takes_parts(Pair(), places), (TensorSpec((4 + 96,), "int64"),))
    mixes = not torch.equal(function(torch.eye(3)), torch.eye(3))
    assert ("in 'mix' mixes the samples" in (network.fallback or "")) == mixes


class Untraceable(Mixes):
    """Decides by values, behind leading modules of which one mixes rows."""

    def forward(self, x):
        hidden = self.mix(self.conv(x).relu() if x.dim() == 3 else self.conv(x))
        hidden = hidden if float(hidden.detach().abs().sum()) > -1 else -hidden
        return self.fc(torch.tanh(self.last(hidden.mean((2, 3)))))


def test_a_network_that_is_cut_between_its_modules_is_checked_too():
    model = Untraceable(Rows(lambda h: h - h.mean(0)))
    network = cut_network(model, (3, 8, 8))
    assert network.frost_line.name.startswith("conv")
    assert "mean in 'mix' mixes the samples of a batch" in network.fallback
    batch = torch.randn(4, 3, 8, 8)
    features = crossed(shipped_engine(network), [batch], network.frost_line)
    assert torch.allclose(network.head(features), model(batch), rtol=1e-6, atol=1e-6)


SHAPE = (3, 8, 8)


class Functional(nn.Module):
    """Draws by a function that is told the module's mode."""

    def __init__(self, function):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.function = function

    def forward(self, h):
        return self.function(h * self.scale, self.training)


class DropPath(nn.Module):
    """As in timm: whole samples, of which few are left out."""

    def __init__(self, probability):
        super().__init__()
        self.probability = probability

    def forward(self, h):
        if not self.training or not self.probability:
            return h
        kept = 1 - self.probability
        return h * h.new_empty((len(h), *[1] * (h.dim() - 1))).bernoulli_(kept) / kept


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.MultiheadAttention(6, 2, dropout=0.1, batch_first=True)

    def forward(self, h):
        tokens = h.flatten(2).transpose(1, 2)
        return self.inner(tokens, tokens, tokens, need_weights=False)[0].transpose(1, 2).reshape(h.shape)


class Network(nn.Module):
    def __init__(self, layer):
        super().__init__()
        torch.manual_seed(0)
        self.backbone = nn.Sequential(nn.Conv2d(3, 6, 3), layer, nn.ReLU()).requires_grad_(False)
        self.fc = nn.Linear(6, 2)

    def forward(self, x):
        return self.fc(self.backbone(x).mean((2, 3)))


MINDING = {
    "dropout": (lambda: nn.Dropout(0.1), "Dropout 'backbone.1'"),
    "dropout of channels": (lambda: nn.Dropout2d(0.1), "Dropout2d 'backbone.1'"),
    "alpha dropout": (lambda: nn.AlphaDropout(0.1), "AlphaDropout 'backbone.1'"),
    "rrelu": (lambda: nn.RReLU(), "RReLU 'backbone.1'"),
    "drop path": (lambda: DropPath(0.01), "DropPath 'backbone.1'"),
    "functional dropout": (lambda: Functional(lambda h, on: functional.dropout(h, 0.1, on)), "Functional 'backbone.1'"),
    "functional rrelu": (lambda: Functional(lambda h, on: functional.rrelu(h, training=on)), "Functional 'backbone.1'"),
    "noise": (lambda: Functional(lambda h, on: h + 0.1 * torch.randn_like(h) if on else h), "Functional 'backbone.1'"),
    "another scale": (lambda: Functional(lambda h, on: h * 1.01 if on else h), "Functional 'backbone.1'"),
    "attention": (Attention, "MultiheadAttention 'backbone.1.inner'"),
    "batch norm": (lambda: nn.BatchNorm2d(6), "BatchNorm2d 'backbone.1'"),
    "lazily nested": (lambda: nn.Sequential(nn.Conv2d(6, 6, 1), nn.Dropout(0.5)), "Dropout 'backbone.1.1'"),
}


@pytest.mark.parametrize("kind", MINDING)
def test_a_frozen_layer_that_minds_train_mode_is_refused_by_name_with_what_to_do(kind):
    make, named = MINDING[kind]
    model = Network(make()).requires_grad_(False)
    model.fc.requires_grad_(True)
    model.train()
    with pytest.raises(FrozenInTrainMode) as refused:
        cut_network(model, SHAPE)
    assert str(refused.value).startswith(f"{named} is frozen but in train mode, where ")
    for mend in (".eval()", "frostline.freeze", "frozen_in_eval=True"):
        assert mend in str(refused.value)
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("kind", MINDING)
@pytest.mark.parametrize("mend", ["eval", "freeze", "frozen_in_eval"])
def test_each_way_out_that_the_sentence_names_cuts_the_network(kind, mend):
    make, _ = MINDING[kind]
    model = Network(make()).train().requires_grad_(False)
    model.fc.requires_grad_(True)
    if mend == "eval":
        model.backbone.eval()
    if mend == "freeze":
        freeze(model, "backbone", input_shape=SHAPE)
    network = cut_network(model, SHAPE, frozen_in_eval=mend == "frozen_in_eval")
    assert network.prefix is not None


@pytest.mark.parametrize(
    "layer",
    [
        lambda: nn.Dropout(0.0),
        lambda: DropPath(0.0),
        lambda: nn.GroupNorm(2, 6),
        lambda: nn.Sequential(nn.Conv2d(6, 6, 1), nn.SiLU()),
    ],
)
def test_frozen_layers_in_train_mode_that_do_the_same_there_are_cut(layer):
    model = Network(layer()).train()
    before = torch.get_rng_state()
    network = cut_network(model, SHAPE)
    assert network.frost_line.name.startswith(("backbone", "mean"))
    assert torch.equal(torch.get_rng_state(), before)


class Behind(Network):
    """Frozen layers that run at the trainer, behind the frost line or in the head too."""

    def __init__(self, kind):
        super().__init__(nn.Sequential(nn.Conv2d(6, 6, 1), nn.BatchNorm2d(6), nn.Dropout(0.3)))
        self.kind, self.adapter = kind, nn.Conv2d(6, 6, 1)
        if kind == "shared":
            self.drop = self.backbone[1][2]
        if kind == "mixed rows":
            self.backbone[0] = nn.Sequential(self.backbone[0], Rows(lambda h: h - h.mean(0)))

    def forward(self, x):
        if self.kind == "by values" and float(x.sum()) > 1e9:
            x = x * 2
        hidden = self.backbone[0](x)
        hidden = self.backbone[1:](self.adapter(hidden) if self.kind == "behind a trained layer" else hidden)
        hidden = hidden.mean((2, 3)) if self.kind != "by values" or float(hidden.sum()) < 1e9 else hidden
        return self.fc(self.drop(hidden) if self.kind == "shared" else hidden)


@pytest.mark.parametrize("kind", ["shared", "mixed rows", "behind a trained layer", "by values"])
def test_frozen_layers_that_run_at_the_trainer_run_in_eval_mode_there_too(kind):
    model = Behind(kind).train()
    model.backbone.requires_grad_(False)
    plain = copy.deepcopy(model)
    network = cut_network(model, SHAPE, frozen_in_eval=True)
    assert model.training, "it is the head that changes modes"
    for training in (True, False, True):
        plain.train(training).backbone.eval()
        network.head.train(training)
        if training:
            model.train()
        batch = torch.randn(4, *SHAPE)
        features = [batch]
        if network.prefix is not None:
            features = crossed(shipped_engine(network), [batch], network.frost_line)
        torch.manual_seed(1)
        found = network.head(features)
        torch.manual_seed(1)
        assert torch.allclose(found, plain(batch), rtol=1e-6, atol=1e-6)
        for (name, value), meant in zip(model.state_dict().items(), plain.state_dict().values(), strict=True):
            assert torch.equal(value, meant), name


BY = [keeps_rows_apart, keeps_rows_apart_by_runs]


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("kind", [*MIXING, *MIXING_BY_ARGUMENTS])
def test_no_operations_that_mix_rows_are_taken_for_others(kind, by):
    with suppress(NotTraceable):
        assert not is_known_apart({**MIXING, **MIXING_BY_ARGUMENTS}[kind], by)


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("kind", ONE_BY_ONE)
def test_operations_that_keep_rows_apart_are_not_run_to_find_that_out(kind, by):
    assert is_known_apart(ONE_BY_ONE[kind], by)


def is_known_apart(function, by):
    spec = TensorSpec((6,), "float32")
    traced = trace(Rows(function), [spec], training={"": False})
    # A node trusts nobody's word for dimensions, and is told none.
    bare = replace(traced.graph, nodes=tuple(replace(node, shape=None, size=None) for node in traced.graph.nodes))
    return by(traced.graph if by is keeps_rows_apart else bare, [spec], traced.constants)
