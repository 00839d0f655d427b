"""torch.export changes what other threads compute; tracing through Frostline does not."""

import threading

import torch

from frostline.core import TensorSpec
from frostline.engines.torch_eager import TorchEngine
from frostline.models import cut_network, freeze
from frostline.models.trace import trace
from support.networks import Small

SHAPE = (3, 32, 32)


def test_features_computed_while_another_thread_traces_are_the_same_bits():
    torch.manual_seed(1)
    network = cut_network(freeze(Small().train(), "stem", input_shape=SHAPE), SHAPE)
    engine = TorchEngine(network.prefix.graph, network.prefix.cuts, network.prefix.tensors)
    batch, last = torch.randn(8, *SHAPE).numpy(), network.frost_line.number
    expected = engine.run(batch, last)[0]
    done = threading.Event()

    def trace_some():
        other = Small()
        for _ in range(3):
            trace(other, [TensorSpec(SHAPE)], training={path: False for path, _ in other.named_modules()})
        done.set()

    thread = threading.Thread(target=trace_some)
    thread.start()
    runs = wrong = 0
    while not done.is_set():
        wrong += int((engine.run(batch, last)[0] != expected).any())
        runs += 1
    thread.join()
    assert runs > 0
    assert wrong == 0
