"""The first call of a vector function is made in one thread, before anything computes in several."""

import json
import subprocess
import sys

import pytest
import torch

from frostline.engines.machine import FUNCTIONS

pytestmark = pytest.mark.usefixtures("plain_starts")

# A process of its own, in which nothing has computed yet; the dispatcher tells what is called, and how large it is.
_BUILD = """
import json
import sys
from torch.utils._python_dispatch import TorchDispatchMode
from frostline.core import Graph

class Calls(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, call, types, args=(), kwargs=None):
        made = call(*args, **(kwargs or {}))
        self.seen.append([call.overloadpacket.__name__, str(made.dtype), made.numel()])
        return made

def build(what):
    if what == "runner":
        from frostline.engines.graph_runner import Runner
        return Runner(Graph(inputs=(), leaves=(), nodes=(), outputs=()))
    from torch import nn
    from frostline.training.loop import Loop
    from frostline.wire.recipes import Recipe
    recipe = Recipe(epochs=1, batch_size=1)
    return Loop(recipe, nn.Linear(1, 1), train=lambda _: (), held_out=None, observe=lambda _: None)

with Calls() as first:
    build(sys.argv[1])
with Calls() as second:
    build(sys.argv[1])
known = set(sys.argv[2].split(","))
print(json.dumps([[call for call in calls.seen if call[0] in known] for calls in (first, second)]))
"""


def calls(what):
    command = [sys.executable, "-c", _BUILD, what, ",".join(FUNCTIONS)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def assert_settled(first, second):
    expected = {(name, dtype) for name in FUNCTIONS for dtype in ("torch.float32", "torch.float64")}
    assert {(name, dtype) for name, dtype, _ in first} == expected
    # The least that ATen shares among threads are 2,048 values.
    assert max(size for *_, size in first) < 2048
    assert second == []


def test_whatever_runs_a_graph_has_them_called_first():
    assert_settled(*calls("runner"))


def test_a_training_loop_has_them_called_before_its_first_step():
    assert_settled(*calls("loop"))


def test_all_later_cuts_are_functions_of_a_single_tensor():
    assert all(getattr(torch, name)(torch.tensor([0.5])).isfinite() for name in FUNCTIONS)
