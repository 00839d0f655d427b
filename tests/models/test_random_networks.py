"""Networks at random: every cut gives their answer, and they train as a plain loop does, whole, cut or refused."""

from collections import Counter

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from frostline.models import cut_network
from support.cutting import crossed, finished, shipped_engine
from support.random_training import outcome_of

pytestmark = pytest.mark.promise("equal")

SHAPE = (4, 6, 6)


def scaled(one, _):
    """By a constant that is made in place."""
    scale = torch.ones(1, 4, 1, 1)
    scale[:, 1:3] = 0.5
    return one * scale


def counted(one, _):
    """By each sample's place in the batch."""
    return one + 0.1 * torch.arange(one.shape[0]).view(-1, 1, 1, 1)


def masked(one, other):
    """By an expansion of something small."""
    keep = (other.mean((1, 2, 3)) > 0).view(-1, 1, 1, 1).expand_as(one)
    return one.masked_fill(keep, 0.25)


def slice_doubled(one, _):
    one[:, :2].mul_(2)
    return one


def shifted_in_place(one, _):
    one.transpose(1, 2).add_(0.5)
    return one


STEPS = {
    "add": lambda item, other: item + other,
    "choose": lambda item, other: torch.cat([item[:, 2:], other[:, :2]], 1),
    "count": counted,
    "double": lambda item, _: item * 2,
    "halves": lambda item, _: torch.cat(item.chunk(2, 1)[::-1], 1),
    "mask": masked,
    "relu": lambda item, _: torch.relu(item),
    "relu in place": lambda item, _: torch.relu_(item),
    "scale": scaled,
    "shift in place": shifted_in_place,
    "slice in place": slice_doubled,
    "squeeze": lambda item, _: item * item.mean((2, 3), keepdim=True),
    "turn": lambda item, _: item.transpose(2, 3),
    "turn to memory": lambda item, _: item.transpose(2, 3).contiguous(),
}
PROGRAMS = st.lists(
    st.tuples(st.sampled_from(["conv", *sorted(STEPS)]), st.integers(0, 3), st.integers(0, 3)), min_size=2, max_size=8
)


class Program(nn.Module):
    """Keeps what it has made, newest first, and at each step works on some of the last four."""

    def __init__(self, program):
        super().__init__()
        torch.manual_seed(0)
        self.program = program
        self.conv = nn.Conv2d(4, 4, 3, padding=1).requires_grad_(False)
        self.fc = nn.Linear(4, 2)

    def forward(self, x):
        made = [x]
        for name, first, second in self.program:
            one, other = made[first % len(made)], made[second % len(made)]
            made.insert(0, self.conv(one) if name == "conv" else STEPS[name](one, other))
        return self.fc((made[0] + made[min(2, len(made) - 1)]).mean((2, 3)))


@settings(max_examples=25)
@given(program=PROGRAMS, channels_last=st.booleans())
@example(program=[("conv", 0, 0), ("slice in place", 0, 0), ("conv", 1, 0)], channels_last=False)
@example(program=[("conv", 0, 0), ("turn", 0, 0), ("relu in place", 0, 0), ("add", 0, 2)], channels_last=True)
@example(program=[("slice in place", 0, 0), ("mask", 0, 0), ("conv", 0, 0)], channels_last=False)
def test_every_cut_of_a_random_network_gives_its_answer(program, channels_last):
    model = Program(program)
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
    batch = torch.randn(8, *SHAPE)
    expected = model(batch.clone())
    network = cut_network(model, SHAPE)
    if network.prefix is None:
        assert torch.equal(network.head(batch), expected)
        return
    engine = shipped_engine(network)
    for cut in network.cuts[1:]:
        assert torch.equal(network.head(finished(network, cut, crossed(engine, [batch], cut))), expected), cut.name


EACH, NETWORKS = 20, 200


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("first", range(0, NETWORKS, EACH))
def test_networks_at_random_learn_what_they_learn_in_a_plain_loop_or_are_refused(first):
    outcomes = Counter(outcome_of(seed)[0].partition(",")[0] for seed in range(first, first + EACH))
    assert outcomes["cut"] >= EACH // 2, outcomes
    assert outcomes["cut"] + outcomes["all at the trainer"] + outcomes["refused: FrozenInTrainMode"] == EACH, outcomes
