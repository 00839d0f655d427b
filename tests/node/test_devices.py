"""Several devices of a node, and devices with memory of their own.

Several devices as one node: batches in proportion to speed, features as of one, and no work for one that fails.

A node computes on the device that it is given, and what it gives is what the network gives.

The memory of an accelerator is divided too, and bounds device batches there.
"""

import logging
import threading
from collections import Counter
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import frostline as fl
from frostline.batching import FairMerging, Limit, batch_size
from frostline.core.config import LoaderSettings, NodeSettings, devices_of
from frostline.core.errors import OverBudget, Overloaded, SettingError, UnsafeArtifact
from frostline.engines.machine import free_device_bytes
from frostline.engines.protocols import Footprint
from frostline.models import freeze
from frostline.node import Node
from frostline.node import resources as sharing
from frostline.node.device import Device, Devices, QueuedRows, RowWork
from frostline.node.memory import Cancelled, CancelScope, LockedFairShares, Pool, Shares
from frostline.node.process import start_node
from frostline.node.statistics import Counters
from frostline.node.tenants import Tenants
from frostline.wire.messages import ProfileRequest
from support.images import image_folder, tiny_preprocess
from support.networks import Small
from support.nodes import (
    artifact_of,
    is_idle,
    joined,
    make_images,
    request,
    samples_of,
    small_network,
    until,
    within_budget,
)
from support.tenants import tenant

RUN_ROWS = 8


class Simulated:
    """A device's engine: gives ten times what it was given, counts its runs, and fails while it is told to."""

    name = "simulated"
    weight_bytes = 0

    def __init__(self, fails=lambda _: False):
        self.runs = Counter()
        self.fails = fails

    def footprint(self, _):
        return Footprint(fixed_bytes=0, bytes_per_sample=8)

    def run(self, inputs, _):
        self.runs[threading.get_ident()] += 1
        if self.fails(inputs):
            raise UnsafeArtifact("the device fell off its bus")
        return (inputs * 10,)


class Bench:
    """Devices, and work for them."""

    def __init__(self, engines):
        self.engines = engines
        self.counters = Counters()
        self.account = Tenants((), self.counters).everybody
        shares = LockedFairShares({})
        self.members = [
            Device(name=f"cpu:{number}", memory=Pool(1 << 20), rule=FairMerging(), fair_shares=shares,
                   counters=self.counters)
            for number in range(len(engines))
        ]  # fmt: skip
        self.devices = Devices(self.members)
        self.works = tuple(RowWork(engine=engine, cut=1, run_rows=RUN_ROWS) for engine in engines)

    def run(self, value, rows=RUN_ROWS, scope=None):
        slab = np.full((RUN_ROWS, 1), value, np.float32)
        slab[rows:] = 0
        batch = QueuedRows(
            account=self.account,
            is_abandoned=lambda: False,
            work=self.works[0],
            slab=slab,
            rows=rows,
            served=lambda _: None,
        )
        return self.devices.run(batch, self.works, scope or CancelScope(()))[0][:rows]

    def run_at_once(self, values):
        results = {}
        threads = [
            threading.Thread(target=lambda value=value: results.update({value: self.run(value)})) for value in values
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return results


@contextmanager
def bench(*engines):
    made = Bench(engines)
    try:
        yield made
    finally:
        made.devices.close()
        assert made.devices.waiting == 0
        assert made.devices.memory_statistics().reserved_bytes == 0


def test_all_devices_work_and_each_batch_is_what_one_device_gives():
    with bench(Simulated(), Simulated()) as made:
        results = made.run_at_once(range(40))
        assert {value: set(result.ravel().tolist()) for value, result in results.items()} == {
            value: {10.0 * value} for value in range(40)
        }
        assert all(engine.runs for engine in made.engines)
        assert made.counters.totals().rows_run == sum(sum(engine.runs.values()) for engine in made.engines) * RUN_ROWS


def test_each_device_runs_in_a_thread_of_its_own_while_the_other_runs():
    both = threading.Barrier(2, timeout=200)
    with bench(*(Simulated(lambda _: both.wait() < 0) for _ in range(2))) as made:
        assert len(made.run_at_once(range(2))) == 2  # each waits until the other runs too


def test_a_device_that_fails_alone_is_taken_out_with_one_warning(caplog):
    with bench(Simulated(lambda _: True), Simulated()) as made, caplog.at_level(logging.WARNING, "frostline.node"):
        results = made.run_at_once(range(12))
        assert len(results) == 12
        assert made.devices.in_service() == (1,)
        before = sum(made.engines[0].runs.values())
        made.run_at_once(range(5))
        assert sum(made.engines[0].runs.values()) == before
        (said,) = [record.getMessage() for record in caplog.records]
        assert "cpu:0" in said
        assert "fell off its bus" in said


def test_what_fails_on_every_device_is_refused_and_blames_none():
    def dislikes(inputs):
        return bool(np.isnan(inputs).any())

    with bench(Simulated(dislikes), Simulated(dislikes)) as made:
        with pytest.raises(UnsafeArtifact):
            made.run(np.nan)
        assert made.devices.in_service() == (0, 1)
        assert set(made.run(3.0).ravel().tolist()) == {30.0}


def test_the_last_device_stays():
    broken = threading.Event()
    broken.set()
    with bench(Simulated(lambda _: True), Simulated(lambda _: broken.is_set())) as made:
        for _ in range(3):
            with pytest.raises(UnsafeArtifact):
                made.run(1.0)
        broken.clear()
        made.run(1.0)
        assert made.devices.in_service() == (1,)
        broken.set()
        with pytest.raises(UnsafeArtifact):
            made.run(1.0)
        assert made.devices.in_service() == (1,)


def test_a_tenant_whose_work_is_made_to_fail_takes_a_device_from_itself_alone(caplog):
    tenants = Tenants([tenant("ann"), tenant("bob"), tenant("boss", sees_all=True)], Counters())
    fails = {1.0}
    with bench(Simulated(lambda inputs: inputs.flat[0] in fails), Simulated()) as made:

        def runs_on_the_first(name, value):
            made.account, before = tenants.account(name), sum(made.engines[0].runs.values())
            assert set(made.run(value).ravel().tolist()) == {value * 10}
            return sum(made.engines[0].runs.values()) - before

        def comes_to_the_first(name, value):
            """On a busy machine the other device may be ready for the next run before it."""
            return until(lambda: runs_on_the_first(name, value)) > 0

        assert comes_to_the_first("ann", 1.0)
        assert "gets no more work of ann until" in caplog.messages[-1]
        assert runs_on_the_first("ann", 2.0) == 0
        assert comes_to_the_first("bob", 2.0)
        assert made.devices.in_service() == (0, 1)
        assert comes_to_the_first("bob", 1.0)
        assert "gets no more work until" in caplog.messages[-1]
        assert made.devices.in_service() == (1,)
    with bench(Simulated(lambda _: True), Simulated()) as made:
        made.account = tenants.account("boss")
        made.run(1.0)
        assert made.devices.in_service() == (1,)


def test_a_cancelled_request_blames_no_device():
    with bench(Simulated(), Simulated()) as made:
        scope = CancelScope(())
        scope.cancel()
        with pytest.raises(Cancelled):
            made.run(1.0, scope=scope)
        assert made.devices.in_service() == (0, 1)
        assert set(made.run(2.0).ravel().tolist()) == {20.0}


def test_calls_on_all_devices_give_what_each_took_and_the_speed_of_all():
    with bench(Simulated(), Simulated(), Simulated()) as made:
        calls = {number: (lambda number=number: number) for number in range(3)}
        assert made.devices.run_on_each(calls, made.account, CancelScope(())) == {0: 0, 1: 1, 2: 2}
        assert made.devices.speed == 3
        made.devices.record_seconds({0: 1.0, 1: 2.0, 2: 4.0})
        assert made.devices.speed == 1.75


def test_a_device_whose_measurement_fails_takes_itself_out():
    def fails():
        raise RuntimeError("out of memory")

    with bench(Simulated(), Simulated()) as made:
        found = made.devices.run_on_each({0: fails, 1: lambda: 7}, made.account, CancelScope(()))
        assert found == {1: 7}
        assert made.devices.in_service() == (1,)
        with pytest.raises(RuntimeError):
            made.devices.run_on_each({1: fails}, made.account, CancelScope(()))


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("cpu", ("cpu",)),
        ("cuda", ("cuda",)),
        ("cuda:1", ("cuda:1",)),
        ("cuda:0,cuda:1", ("cuda:0", "cuda:1")),
        ("cpu:0,cpu:1", ("cpu", "cpu")),
    ],
)
def test_devices_are_named_with_commas(said, expected):
    assert devices_of(said) == expected
    assert NodeSettings(device=said).device == said


@pytest.mark.parametrize(
    "said", ["", "cuda,", "cuda:0,cuda:0", "cpu:0,cuda:0", "cuda,cuda:1", "cpu:1", "tpu", "cuda:x"]
)
def test_refuses_devices_that_make_no_sense(said):
    with pytest.raises(SettingError, match="cuda:0,cuda:1"):
        NodeSettings(device=said)


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return make_images(tmp_path_factory.mktemp("images"), 40)


def node_on(device, images, **settings):
    given = {"memory_bytes": 256 << 20, "device_batch": 8, "trial_s": 0, **settings}
    return Node(NodeSettings(device=device, **given), (images.as_uri(),))


def answers(node, images, prefix):
    """Two requests at once, so that both devices have something to do."""
    digest, body = prefix
    node.put_prefix(digest, body)
    found = {}

    def ask(number):
        found[number] = joined(node.features(request(images, 3, digest)))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return found


def test_features_of_a_node_with_two_devices_are_those_of_one_to_the_bit(images):
    prefix = artifact_of(small_network())
    with node_on("cpu", images) as one, node_on("cpu:0,cpu:1", images) as two:
        expected, found = answers(one, images, prefix), answers(two, images, prefix)
        for number in range(2):
            for tensor, other in zip(found[number], expected[number], strict=True):
                assert np.array_equal(tensor, other)
        assert is_idle(two)
        assert within_budget(two)
        assert (one.statistics().devices_in_service, two.statistics().devices_in_service) == (1, 2)


def test_devices_of_one_node_share_its_cache_its_memory_and_its_places(images, tmp_path):
    prefix = artifact_of(small_network())
    with (
        node_on("cpu", images) as one,
        node_on("cpu:0,cpu:1", images, cache_folder=str(tmp_path), max_requests=3) as two,
    ):
        assert two.statistics().memory.keys() == one.statistics().memory.keys()
        for name, pool in two.statistics().memory.items():
            assert pool.total_bytes <= one.statistics().memory[name].total_bytes
        asked = request(images, 3, prefix[0], samples=samples_of(images, with_versions=True))
        two.put_prefix(*prefix)
        first = joined(two.features(asked))
        again = joined(two.features(asked))
        assert two.statistics().totals.cache_hits == len(samples_of(images))
        for tensor, other in zip(first, again, strict=True):
            assert np.array_equal(tensor, other)
        held = [two.admit() for _ in range(3)]
        with pytest.raises(Overloaded):
            two.admit()
        for admission in held:
            admission.close()


def test_the_cost_that_a_node_tells_the_plan_is_that_of_all_its_devices(images, monkeypatch):
    digest, body = artifact_of(small_network())
    measured, told = [], {}
    monkeypatch.setattr(Devices, "record_seconds", lambda _, seconds: measured.append(seconds))
    with node_on("cpu:0,cpu:1", images) as node:
        node.put_prefix(digest, body)
        wanted = ProfileRequest(features=request(images, 3, digest))
        node.profile(wanted)  # measures the network once; what follows computes with its figures
        for speed in (2.0, 5.0):
            monkeypatch.setattr(Devices, "speed", speed)
            costs = {cost.number: cost.seconds for cost in node.profile(wanted).cuts}
            told[speed] = costs[max(costs)] - costs[1]
    assert [seconds.keys() for seconds in measured] == [{0, 1}]
    assert told[2.0] == pytest.approx(2.5 * told[5.0])


def test_a_job_trains_on_a_node_with_two_devices(images, tmp_path):
    folder = image_folder(tmp_path / "images", per_class=8)
    torch.manual_seed(1)
    model = fl.freeze(Small().train(), "stem", input_shape=(3, 32, 32))
    found = []
    for device in ("cpu", "cpu:0,cpu:1"):
        with (
            start_node((str(folder),), NodeSettings(device=device, device_batch=8, trial_s=0)) as node,
            fl.offload(
                model, fl.Dataset(folder), near=node.url, accuracy="exact", preprocess=tiny_preprocess(),
                settings=LoaderSettings(samples_per_request=8, device_batch=8),
            ) as job,
        ):  # fmt: skip
            found.append(torch.cat([batch.features for batch in job.loader(8, shuffle=True, seed=3)]))
    assert torch.equal(*found)


CUDA = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),  # tuning of kernels
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA here"),
]


@pytest.mark.parametrize(
    ("device", "accuracy", "tolerance"),
    [
        ("cpu", "exact", 1e-6),
        pytest.param("cuda", "exact", 5e-3, marks=CUDA),  # TensorFloat-32
        pytest.param("cuda", "fp16", 5e-2, marks=CUDA),
    ],
)
def test_a_node_process_gives_the_networks_features(tmp_path, device, accuracy, tolerance):
    folder = image_folder(tmp_path / "images", per_class=8)
    torch.manual_seed(1)
    model = freeze(Small().train(), "stem", input_shape=(3, 32, 32))
    settings = LoaderSettings(samples_per_request=8, device_batch=8)
    engines = ("torch-channels-last", "torch-bf16")
    common = {"preprocess": tiny_preprocess(), "settings": settings}
    with (
        start_node((str(folder),), NodeSettings(device=device, device_batch=8, engines=engines)) as node,
        fl.offload(model, fl.Dataset(folder), near=node.url, accuracy=accuracy, **common) as job,
        fl.offload(None, fl.Dataset(folder), near=node.url, **common) as plain,
    ):
        given = torch.cat([batch.features for batch in job.loader(8, shuffle=False)])
        pixels = torch.cat([batch.features for batch in plain.loader(8, shuffle=False)])
    with torch.no_grad():
        expected = model.stem(pixels).reshape(given.shape)
    assert torch.linalg.vector_norm(given - expected) <= tolerance * torch.linalg.vector_norm(expected)


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


def test_a_large_accelerator_is_not_held_to_the_processors_budget():
    assert Shares.of(2 * GIB, 80 * GIB).device > 50 * GIB > HOST.device
    assert Shares.of(2 * GIB, 80 * GIB).weights == HOST.weights


@pytest.mark.parametrize(("free", "rows"), [(80 * GIB, 32), (GIB, 24), (GIB // 2, 8), (GIB // 8, 0)])
def test_the_less_memory_an_accelerator_has_free_the_smaller_is_the_batch(free, rows):
    limit = Limit(budget_bytes=Shares.of(2 * GIB, free).device, bytes_per_row=20 << 20)
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
