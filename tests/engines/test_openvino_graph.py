"""A prefix goes to OpenVINO as it was traced, without a second trace, and else by way of one."""

import numpy as np
import pytest
import torch
from torch import nn

from frostline.core import REFERENCE
from frostline.engines import openvino
from frostline.engines.catalog import absence, build
from frostline.engines.protocols import identity
from frostline.models import cut_network, freeze
from support.matrices import sampled
from support.networks import UNTIL
from support.networks import build as network
from support.prefixes import LEVELS, kept_pixels, pixels, relative_error, small_prefix

pytestmark = pytest.mark.skipif(absence("openvino", "cpu") is not None, reason="OpenVINO is not installed")

SIDE = 96
# One of convolutions without normalisation, one with BatchNorm and padding, one with LayerNorm and attention.
DIRECT = ("alexnet", "efficientnet_lite0", "resnet18", "vit_small")


def prefix_of(model, until, side=SIDE):
    shape = (3, side, side)
    return cut_network(freeze(model.train(), until, input_shape=shape), shape).prefix


def engine(name, prefix, **options):
    return build(name, prefix.graph, prefix.cuts, prefix.tensors, cut=len(prefix.cuts), **options)


def error_of(prefix, side=SIDE):
    batch = np.random.default_rng(0).standard_normal((8, 3, side, side), np.float32)
    last = len(prefix.cuts)
    (ours,), (theirs,) = engine("openvino", prefix).run(batch, last), engine(REFERENCE, prefix).run(batch, last)
    return relative_error(ours, theirs)


@pytest.fixture
def no_trace(monkeypatch):
    def refuse(order):
        raise AssertionError("it was traced again")

    monkeypatch.setattr(openvino, "export_prefix", refuse)


@pytest.mark.parametrize("name", sampled(DIRECT, ("alexnet", "efficientnet_lite0", "vit_small")))
def test_a_network_is_converted_without_being_traced_again(name, no_trace):
    torch.manual_seed(0)
    assert error_of(prefix_of(network(name), UNTIL[name])) < 1e-5


def test_pixels_as_they_are_kept_are_taken_without_a_trace_too(no_trace):
    prefix, given = small_prefix(), kept_pixels(8)
    last = len(prefix.cuts)
    (ours,) = engine(identity("openvino", "fp32", given, LEVELS), prefix, levels=LEVELS).run(given, last)
    (theirs,) = engine(REFERENCE, prefix).run(LEVELS.apply(given), last)
    assert relative_error(ours, theirs) < 1e-5


class Padded(nn.Module):
    """With a padding that OpenVINO is given in smaller operators alone."""

    def __init__(self):
        super().__init__()
        self.body = nn.Conv2d(3, 4, 3, padding="same")
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.body(x).mean((2, 3)))


def test_traces_again_what_cannot_be_handed_over(monkeypatch):
    traces = []
    exported = openvino.export_prefix
    monkeypatch.setattr(openvino, "export_prefix", lambda order: traces.append(order) or exported(order))
    assert error_of(prefix_of(Padded(), "body", 32), 32) < 1e-5
    assert len(traces) == 1


def test_a_graph_that_was_checked_before_is_not_run_on_shapes_again(monkeypatch):
    prefix, last = small_prefix(), len(small_prefix().cuts)
    checked = engine(REFERENCE, prefix).footprint(last)
    monkeypatch.setattr("frostline.engines.recipe.dry_run", lambda *_, **__: pytest.fail("it was run again"))
    made = engine("openvino", prefix, checked=checked)
    assert made.footprint(last) == checked
    assert made.run(pixels(8), last)[0].shape[0] == 8
