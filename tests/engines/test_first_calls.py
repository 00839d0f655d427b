"""The first call of a vector function is made in one thread, before anything computes in several."""

import json
import subprocess
import sys

import pytest
import torch

from frostline.engines.machine import FUNCTIONS

# Forks of a process in which nothing has computed yet; the dispatcher tells what is called, and how large it is.
_BUILD = """
import json
import os
import sys
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from frostline.core import Graph
from frostline.engines.graph_runner import Runner
from frostline.training.loop import Loop
from frostline.wire.recipes import Recipe

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
        return Runner(Graph(inputs=(), leaves=(), nodes=(), outputs=()))
    recipe = Recipe(epochs=1, batch_size=1)
    return Loop(recipe, nn.Linear(1, 1), train=lambda _: (), held_out=None, on_event=lambda _: None)

known = set(sys.argv[1].split(","))
for what in sys.argv[2:]:
    if not os.fork():
        with Calls() as first:
            build(what)
        with Calls() as second:
            build(what)
        seen = [[call for call in calls.seen if call[0] in known] for calls in (first, second)]
        print(json.dumps([what, seen]), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
"""


@pytest.fixture(scope="module")
def calls(plain_starts):
    """What is called where each is built for the first time, and then where it is for the second."""
    command = [sys.executable, "-c", _BUILD, ",".join(FUNCTIONS), "runner", "loop"]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return dict(map(json.loads, said.splitlines()))


def assert_settled(first, second):
    expected = {(name, dtype) for name in FUNCTIONS for dtype in ("torch.float32", "torch.float64")}
    assert {(name, dtype) for name, dtype, _ in first} == expected
    # The least that ATen shares among threads are 2,048 values.
    assert max(size for *_, size in first) < 2048
    assert second == []


def test_whatever_runs_a_graph_has_them_called_first(calls):
    assert_settled(*calls["runner"])


def test_a_training_loop_has_them_called_before_its_first_step(calls):
    assert_settled(*calls["loop"])


def test_all_later_cuts_are_functions_of_a_single_tensor():
    assert all(getattr(torch, name)(torch.tensor([0.5])).isfinite() for name in FUNCTIONS)
