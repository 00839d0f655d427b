"""What an operation takes is near its estimate, whatever its kind of numbers; usual networks are taken."""

import math
import time

import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision
from torch import nn

from frostline.core.config import NodeSettings
from frostline.core.errors import OverBudget
from frostline.engines import machine
from frostline.engines.machine import quick_dtypes
from frostline.engines.measure import GraphLimits, count_operations
from frostline.models import cut_network
from frostline.models.artifact import read_prefix
from frostline.node import Node
from frostline.node.inspection import Inspector
from support.hostile import after, artifact, node

CORE_PER_S = 5e10
LIMITS = GraphLimits(
    max_nodes=4000, max_values=20_000, max_run_s=math.inf, max_operation_s=math.inf, operations_per_s=CORE_PER_S
)
# Ten times the estimate is what nobody may take; a busy machine makes anything slower.
MOST = 10
WHOLE = ("int64", "int32", "uint8")
REAL = ("float32", "float64", "bfloat16", "float16")


def estimated_s(op, dtype, shapes, *args, **kwargs):
    """What an operation on ones of some shapes is estimated to take on one core."""
    leaves = {f"leaf{number}": torch.ones(shape, dtype=getattr(torch, dtype)) for number, shape in enumerate(shapes)}
    found = read_prefix(artifact(after(node("n", op, *({"ref": name} for name in leaves), *args, **kwargs)), leaves))
    counted = count_operations(found.graph, [found.tensors[name] for name in leaves], found.cuts, LIMITS)
    return counted[2].heaviest / CORE_PER_S


def took_s(call, dtype, shapes):
    """Seconds of a core, of the quicker of two runs."""
    tensors = [torch.ones(shape, dtype=getattr(torch, dtype)) for shape in shapes]
    runs = []
    for _ in range(2):
        began = time.thread_time()
        call(*tensors)
        runs.append(time.thread_time() - began)
    return min(runs)


@pytest.fixture(autouse=True)
def _on_one_core():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def assert_near(op, call, dtype, shapes, *args):
    call_s = took_s(lambda *tensors: call(*tensors, *args), dtype, shapes)
    assert call_s < MOST * estimated_s(op, dtype, shapes, *args)


@pytest.mark.parametrize("dtype", [*REAL, *WHOLE])
def test_a_product_takes_no_more_than_ten_times_its_estimate(dtype):
    assert_near("aten.mm.default", torch.mm, dtype, [(400, 400)] * 2)
    assert_near("aten.bmm.default", torch.bmm, dtype, [(4, 200, 200)] * 2)
    assert_near("aten.linear.default", F.linear, dtype, [(400, 400)] * 2)


@pytest.mark.parametrize("dtype", [*REAL, *WHOLE])
@pytest.mark.parametrize(("channels", "groups", "side"), [(32, 1, 28), (1, 1, 128), (64, 64, 56), (32, 16, 56)])
def test_a_convolution_takes_no_more_than_ten_times_its_estimate(dtype, channels, groups, side):
    shapes = [(8, channels, side, side), (channels, channels // groups, 3, 3)]
    assert_near("aten.conv2d.default", F.conv2d, dtype, shapes, None, [1, 1], [1, 1], [1, 1], groups)


@pytest.mark.parametrize("dtype", REAL)
@pytest.mark.parametrize("kind", ["bicubic", "bilinear"])
def test_enlarging_takes_no_more_than_ten_times_its_estimate(dtype, kind):
    def enlarged(pixels, *_):
        return F.interpolate(pixels, (192, 192), mode=kind)

    assert_near(f"aten.upsample_{kind}2d.vec", enlarged, dtype, [(8, 3, 48, 48)], [192, 192], False, None)


@pytest.mark.parametrize("window", [3, 21])
@pytest.mark.parametrize(("name", "call"), [("max_pool2d", F.max_pool2d), ("avg_pool2d", F.avg_pool2d)])
def test_a_pool_takes_no_more_than_ten_times_its_estimate(name, call, window):
    sides, halves = [window] * 2, [window // 2] * 2
    assert_near(f"aten.{name}.default", call, "float32", [(8, 4, 48, 48)], sides, [1, 1], halves)


def test_a_device_with_instructions_for_16_bits_is_taken_to_multiply_them_as_fast():
    assert quick_dtypes(frozenset({"avx2"})) == ("float32",)
    assert quick_dtypes(frozenset({"avx512_bf16"})) == ("float32", "bfloat16")
    assert quick_dtypes(frozenset({"cuda"})) == ("float32", "bfloat16", "float16", "float64")


class Narrow(nn.Module):
    """A network that computes in 16 bits on the pixels of 32 that it is given."""

    def __init__(self, network, dtype):
        super().__init__()
        self.network, self.dtype = network.to(dtype), dtype

    def forward(self, pixels):
        return self.network(pixels.to(self.dtype)).float()


def prefix_of(network):
    return cut_network(network.eval().requires_grad_(False), (3, 224, 224)).prefix


def counted(prefix, cores, max_operation_s):
    limits = GraphLimits(
        max_nodes=4000,
        max_values=20_000,
        max_run_s=NodeSettings().max_run_s,
        max_operation_s=max_operation_s,
        operations_per_s=cores * CORE_PER_S,
        cores=cores,
    )
    return count_operations(
        prefix.graph, [prefix.tensors[name] for _, name in prefix.graph.leaves], prefix.cuts, limits
    )


def whole_vit():
    return timm.create_model("vit_small_patch16_224")


@pytest.mark.parametrize("build", [torchvision.models.resnet18, whole_vit])
def test_usual_networks_in_16_bits_are_taken_by_a_node_without_instructions_for_them(build):
    prefix = prefix_of(Narrow(build(), torch.bfloat16))
    for cores in (1, 2, 64):
        assert counted(prefix, cores, NodeSettings().max_operation_s), cores


def test_a_node_of_one_core_takes_the_heaviest_usual_network():
    # of VGG-16
    prefix = prefix_of(nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.Conv2d(64, 64, 3, padding=1)))
    assert counted(prefix, 1, NodeSettings().max_operation_s)
    with pytest.raises(OverBudget, match="--max-operation"):
        counted(prefix, 1, 0.3)


@pytest.fixture
def speed(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "frostline" / "speed"


def test_a_machines_speed_is_measured_once_and_kept(speed, monkeypatch):
    first = machine.operations_per_s("cpu")
    assert 1e8 < first < 1e14
    monkeypatch.setattr(machine, "_measured_operations_per_s", lambda _: 7e10)
    assert machine.operations_per_s("cpu") == pytest.approx(first, rel=1e-3)
    (kept,) = speed.iterdir()
    for damaged in (b"", b"fast", b"nan", b"-1", b"inf", b"\xff"):
        kept.write_bytes(damaged)
        assert machine.operations_per_s("cpu") == 7e10
        assert float(kept.read_text()) == 7e10


def test_to_measure_a_machine_changes_nothing_of_its_process(speed):
    torch.manual_seed(3)
    drawn, types = torch.get_rng_state(), torch.get_default_dtype()
    with torch.device("meta"):  # a user's own default
        torch.set_default_dtype(torch.float64)
        try:
            assert machine.operations_per_s("cpu") > 0
        finally:
            torch.set_default_dtype(types)
    assert torch.equal(torch.get_rng_state(), drawn)


def test_a_node_says_its_speed_once_it_is_warm(speed, tmp_path):
    with Inspector() as inspector, Node(NodeSettings(memory_bytes=1 << 28), (), inspector) as running:
        assert running.health().operations_per_s == 0
        running.warm()
        assert running.health().operations_per_s == pytest.approx(machine.operations_per_s("cpu"), rel=1e-3)
