"""torch.export, by which engines are compiled, changes what other threads compute; not so where Frostline calls it."""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from frostline.core import TensorSpec
from frostline.engines.machine import trace_slot
from frostline.engines.torch import TorchEngine
from frostline.models import cut_network, freeze
from frostline.models.tracing import trace
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
        other, batch = Small().eval(), {0: torch.export.Dim("batch")}
        for _ in range(3):
            trace(other, [TensorSpec(SHAPE)], training={path: False for path, _ in other.named_modules()})
            with trace_slot():
                torch.export.export(other, (torch.zeros(2, *SHAPE),), strict=False, dynamic_shapes=(batch,))
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


def test_networks_that_are_cut_at_the_same_time_are_cut_as_if_alone():
    models = [freeze(Small().train(), "stem", input_shape=SHAPE) for _ in range(8)]
    alone = cut_network(models[0], SHAPE)
    with ThreadPoolExecutor(4) as threads:
        networks = list(threads.map(lambda model: cut_network(model, SHAPE), models))
    assert [network.fallback for network in networks] == [None] * 8
    assert all([cut.name for cut in network.cuts] == [cut.name for cut in alone.cuts] for network in networks)
