"""A head as data: away from its network it computes, learns and counts what the network's own head would."""

import pytest
import torch
from torch import nn

from frostline.core.errors import ModelError
from frostline.models import cut_network, freeze
from frostline.models.portable import PortedHead, head_from_json, head_to_json, make_portable
from support.networks import Small

SHAPE = (3, 32, 32)


def travelled(head) -> PortedHead:
    """What a process elsewhere makes of it."""
    return PortedHead(head_from_json(*head_to_json(make_portable(head))))


def learn(head, features, labels, steps=3):
    """Losses of a few steps, in train mode and after each in eval mode."""
    optimizer = torch.optim.Adam([parameter for parameter in head.parameters() if parameter.requires_grad], 1e-2)
    torch.manual_seed(5)
    losses = []
    for _ in range(steps):
        head.train()
        loss = nn.functional.cross_entropy(head(features), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        head.eval()
        with torch.no_grad():
            losses += [loss.item(), nn.functional.cross_entropy(head(features), labels).item()]
    return losses


def learns_the_same(network, features, classes):
    labels = torch.arange(len(features[0])) % classes
    away = travelled(network.head)
    assert learn(away, features, labels) == learn(network.head, features, labels)
    own = make_portable(network.head).tensors
    return all(torch.equal(tensor, own[name]) for name, tensor in away.tensors.items())


def test_attention_with_dropout_learns_what_it_learns_at_home():
    import timm

    torch.manual_seed(0)
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, depth=2, num_classes=3, proj_drop_rate=0.1, attn_drop_rate=0.1
    )
    network = cut_network(freeze(model.train(), "blocks.0", input_shape=SHAPE), SHAPE)
    features = [torch.randn(8, *shape) for shape in network.frost_line.shapes]
    assert learns_the_same(network, features, 3)


def test_frozen_layers_behind_the_frost_line_keep_mode_and_weights():
    model = freeze(Small().train(), "stem", input_shape=SHAPE)
    for parameter in model.body.parameters():
        parameter.requires_grad_(False)
    model.extra = nn.Linear(16, 16)
    model.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), model.extra, nn.Unflatten(1, (16, 1, 1)))
    network = cut_network(model.train(), SHAPE, frozen_in_eval=True)
    statistics = model.body[1].running_mean.clone()
    assert learns_the_same(network, [torch.randn(8, *network.frost_line.shapes[0])], 3)
    assert torch.equal(model.body[1].running_mean, statistics)


class Tied(nn.Module):
    """A layer that is used twice, under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 12)
        self.body = nn.Linear(12, 12)
        self.again = nn.Linear(12, 12)
        self.again.weight = self.body.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.again(torch.relu(self.body(torch.relu(self.first(x)))))


def test_sends_a_shared_weight_once_and_keeps_it_shared():
    network = cut_network(freeze(Tied().train(), "first", input_shape=(12,)), (12,))
    weights = [name for name in make_portable(network.head).tensors if name.endswith("weight")]
    assert len(weights) == 1
    assert learns_the_same(network, [torch.randn(8, 12)], 3)


class Views(nn.Module):
    """Two buffers in one memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.register_buffer("whole", torch.ones(8))
        self.register_buffer("part", self.whole[:4])
        self.last = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x)) * self.part.sum() + self.whole.sum()


class Draws(Small):
    """Draws random numbers with an operator of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + torch.rand(3)


class Decides(Small):
    """Its code after the frozen part cannot be traced."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = super().forward(x)
        return scores * 2 if scores.sum() > 0 else scores


class Two(Small):
    """Gives more than scores."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"scores": super().forward(x), "pixels": x.mean()}


@pytest.mark.parametrize(
    ("model", "until", "shape", "sentence"),
    [
        (Views(), "first", (4,), "share their memory"),
        (Draws(), "stem", SHAPE, "aten.rand"),
        (Decides(), "stem", SHAPE, "was not traced"),
        (Two(), "stem", SHAPE, "one tensor"),
    ],
    ids=lambda name: type(name).__name__ if isinstance(name, nn.Module) else None,
)
def test_explains_a_head_that_cannot_be_sent_and_how_to_mend_it(model, until, shape, sentence):
    network = cut_network(freeze(model.train(), until, input_shape=shape), shape)
    with pytest.raises(ModelError, match=f"{sentence}.*another policy"):
        make_portable(network.head)
