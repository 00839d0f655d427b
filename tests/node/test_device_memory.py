"""The memory of an accelerator is divided too, and bounds device batches there."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from frostline.batching import Limit, batch_size
from frostline.core.config import NodeSettings
from frostline.core.errors import OverBudget
from frostline.engines.machine import free_device_bytes
from frostline.node import Node
from frostline.node import resources as sharing
from frostline.node.memory import Shares
from support.nodes import artifact_of, is_idle, joined, make_images, request, small_network, within_budget

GIB = 1 << 30
HOST = Shares.of(2 * GIB)
NETWORK = small_network(side=64)
DIGEST, ARTIFACT = artifact_of(NETWORK)
LAST = NETWORK.cuts[-1].number


@given(host=st.integers(64 << 20, 1 << 40), free=st.integers(0, 1 << 40))
def test_weights_and_activations_fit_an_accelerators_memory_together(host, free):
    shares = Shares.of(host, free)
    assert 0 <= shares.weights <= Shares.of(host).weights
    assert shares.device >= 0
    assert shares.weights + shares.device <= free
    assert (shares.messages, shares.work, shares.decode) == (
        Shares.of(host).messages,
        Shares.of(host).work,
        Shares.of(host).decode,
    )


def test_a_large_accelerator_runs_more_at_once_than_the_processors_budget_would_let_it():
    assert Shares.of(2 * GIB, 80 * GIB).device > 50 * GIB > HOST.device
    assert Shares.of(2 * GIB, 80 * GIB).weights == HOST.weights


@pytest.mark.parametrize(("free", "rows"), [(80 * GIB, 32), (GIB, 24), (GIB // 2, 8), (GIB // 8, 0)])
def test_the_less_memory_an_accelerator_has_free_the_smaller_is_the_batch(free, rows):
    limit = Limit(room_bytes=Shares.of(2 * GIB, free).device, bytes_per_row=20 << 20)
    assert batch_size([limit], wanted=100, maximum=32) == rows


def test_counts_no_memory_of_the_processor_beside_the_nodes_budget():
    assert free_device_bytes("cpu") is None


def test_a_node_makes_its_batches_as_small_as_the_devices_memory_wants_them(tmp_path, monkeypatch):
    images = make_images(tmp_path / "images", 20, size=(80, 80))
    wanted = request(images, LAST, DIGEST, side=64)
    runs, features = {}, {}
    for free in (None, 12 << 20, 1 << 20):
        monkeypatch.setattr(sharing, "free_device_bytes", lambda _, free=free: free)
        with Node(NodeSettings(memory_bytes=256 << 20), (images.as_uri(),)) as node:
            node.put_prefix(DIGEST, ARTIFACT)
            if free == 1 << 20:
                with pytest.raises(OverBudget, match="running 8 samples"):
                    node.features(wanted)
                continue
            features[free] = joined(node.features(wanted))
            runs[free] = node.statistics().totals.runs
            assert within_budget(node)
            assert is_idle(node)
    assert runs[None] == 1
    assert runs[12 << 20] > 1
    assert features[None][0] == features[12 << 20][0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA here")
def test_on_cuda_a_run_may_take_what_is_free_there(tmp_path):
    images = make_images(tmp_path / "images", 20, size=(80, 80))
    before = free_device_bytes("cuda")
    with Node(NodeSettings(memory_bytes=256 << 20, device="cuda"), (images.as_uri(),)) as node:
        memory = node.statistics().memory
        assert memory["device"].total_bytes == Shares.of(256 << 20, free_device_bytes("cuda")).device <= before
        node.put_prefix(DIGEST, ARTIFACT)
        assert len(joined(node.features(request(images, LAST, DIGEST, side=64)))[0]) == 20
        assert torch.cuda.max_memory_allocated() <= memory["weights"].total_bytes + memory["device"].total_bytes
