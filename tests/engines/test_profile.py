"""One instrumented run tells of every cut what separate runs would."""

import itertools

import numpy as np
import pytest
import torch

from frostline.engines.graph_runner import leaf_values
from frostline.engines.measure import cut_values, timed_run
from frostline.engines.torch import TorchEngine
from frostline.models import cut_network
from support.networks import Small
from support.prefixes import pixels, small_prefix

SHAPE = (3, 32, 32)


def whole_network():
    torch.manual_seed(0)
    return cut_network(Small().eval().requires_grad_(False), SHAPE).prefix


def test_the_values_at_the_cuts_are_those_that_the_engine_gives():
    """Also before an operation that works in place."""
    prefix = whole_network()
    engine = TorchEngine(prefix.graph, prefix.cuts, prefix.tensors)
    batch = np.random.default_rng(0).standard_normal((8, *SHAPE), np.float32)
    found = cut_values(prefix.graph, leaf_values(prefix.graph, prefix.tensors), prefix.cuts, batch)
    assert list(found) == [cut.number for cut in prefix.cuts]
    for number, values in found.items():
        expected = engine.run(batch, number)
        assert all((value == other).all() for value, other in zip(values, expected, strict=True))


def test_values_can_be_had_of_some_cuts_only():
    prefix = whole_network()
    batch = np.zeros((8, *SHAPE), np.float32)
    found = cut_values(prefix.graph, leaf_values(prefix.graph, prefix.tensors), prefix.cuts[2:4], batch)
    assert set(found) == {3, 4}


def test_gives_seconds_a_sample_for_each_repeat_and_cut():
    prefix = whole_network()
    ticks = itertools.count()
    batch = np.zeros((8, *SHAPE), np.float32)
    leaves = leaf_values(prefix.graph, prefix.tensors)
    seconds = timed_run(prefix.graph, leaves, prefix.cuts, batch, repeats=2, clock=lambda: next(ticks))[0]
    assert seconds.tolist() == [[(cut.after + 1) / 8 for cut in prefix.cuts]] * 2


def test_measures_an_operation_without_what_others_do_between():
    prefix = small_prefix()
    engine = TorchEngine(prefix.graph, prefix.cuts, prefix.tensors)
    now = [0.0]

    def clock():
        now[0] += 1.0
        return now[0]

    def between():
        now[0] += 1000.0

    measured = engine.timed_run(pixels(8), repeats=1, clock=clock, between=between)[0]
    assert measured.max() * 8 < 1000


@pytest.mark.parametrize(("tick_s", "ticks"), [(1.0, "the first run"), (1e-6, "another one")])
def test_one_run_that_takes_long_is_measured_without_another_to_warm_up(tick_s, ticks):
    prefix = small_prefix()
    engine = TorchEngine(prefix.graph, prefix.cuts, prefix.tensors)
    calls = itertools.count()
    measured = engine.timed_run(pixels(8), repeats=1, clock=lambda: next(calls) * tick_s)[0]
    runs = 1 if ticks == "the first run" else 2
    assert len(measured) == 1
    assert next(calls) == runs * (len(prefix.graph.nodes) + 1)
