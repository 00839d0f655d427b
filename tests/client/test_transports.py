"""What all ways to a node promise: the same tests over HTTP, within the process, and through an I/O service."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from frostline.client.http import HttpTransport
from frostline.core.config import LoaderSettings, NodeSettings
from frostline.core.errors import BadRequest, OverBudget, Overloaded, StoreUnavailable, Unavailable, UnknownPrefix
from frostline.engines.torch import TorchEngine
from frostline.node import Node
from frostline.node.in_process import LocalTransport
from frostline.preprocess.apply import decode_into
from frostline.stores.local import FolderStore
from frostline.transport import Cancellation
from frostline.wire.codecs import CODECS, Codec
from frostline.wire.messages import ProfileRequest
from frostline.wire.packing import unpack
from support.nodes import (
    artifact_of,
    busy_device,
    is_idle,
    joined,
    make_images,
    preprocess,
    request,
    samples_of,
    served,
    small_network,
    until,
    within_budget,
)
from support.services import serving_node

COUNT = 43
BROKEN = (3, 17, 42)
NETWORK = small_network()
DIGEST, ARTIFACT = artifact_of(NETWORK)
SETTINGS = LoaderSettings(deadline_s=30)


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return make_images(tmp_path_factory.mktemp("images"), COUNT, broken=BROKEN)


@pytest.fixture(params=["http", "local", "io"])
def way(request, images):
    """Opens a node with some settings and the way to it: ``node, transport = way(...)``."""
    with ExitStack() as stack:

        def opened(**settings):
            node = stack.enter_context(
                Node(NodeSettings(**{"memory_bytes": 256 << 20, **settings}), (images.as_uri(),))
            )
            if request.param == "local":
                return node, LocalTransport(node)
            if request.param == "io":
                _, transport = stack.enter_context(serving_node(node))
                return node, transport
            transport = HttpTransport(stack.enter_context(served(node)), SETTINGS)
            stack.callback(transport.close)
            return node, transport

        yield opened


def expected(images, cut):
    """What an answer holds, computed one sample after another."""
    samples, steps = samples_of(images), preprocess()
    kept = [row for row in range(COUNT) if row not in BROKEN]
    pixels = np.zeros((-(-len(kept) // 8) * 8, *steps.shape), np.float32)
    for place, row in enumerate(kept):
        encoded = (images / samples.objects[row]).read_bytes()
        decode_into(steps, encoded, pixels[place], id=int(samples.ids[row]), view=None)
    engine = TorchEngine(NETWORK.prefix.graph, NETWORK.prefix.cuts, NETWORK.prefix.tensors)
    return samples.ids[kept].tolist(), [tensor[: len(kept)] for tensor in engine.run(pixels, cut)]


@pytest.mark.parametrize("cut", range(1, len(NETWORK.cuts)))
def test_every_sample_comes_once_in_order_bit_for_bit_or_is_skipped(way, images, cut):
    node, transport = way()
    transport.put_prefix(DIGEST, ARTIFACT)
    ids, tensors, _, skipped = joined(transport.features(request(images, cut, DIGEST)))
    wanted_ids, wanted = expected(images, cut)
    assert ids == wanted_ids
    assert skipped == samples_of(images).ids[list(BROKEN)].tolist()
    for got, want in zip(tensors, wanted, strict=True):
        assert got.dtype == want.dtype
        assert got.tobytes() == want.tobytes()
    until(lambda: is_idle(node))
    assert within_budget(node)


def unpacked(answer):
    batches = list(answer)
    return batches, joined(map(unpack, batches))


@pytest.mark.parametrize("codec", [name for name in CODECS if Codec.parse(name).is_lossless])
def test_a_lossless_codec_changes_no_bit(way, images, codec):
    node, transport = way(device_batch=8)
    transport.put_prefix(DIGEST, ARTIFACT)
    for cut in (1, 3, NETWORK.cuts[-1].number):
        batches, (ids, tensors, _, skipped) = unpacked(transport.features(request(images, cut, DIGEST, codec=codec)))
        wanted_ids, wanted = expected(images, cut)
        assert ids == wanted_ids
        assert skipped == samples_of(images).ids[list(BROKEN)].tolist()
        assert [got.tobytes() for got in tensors] == [want.tobytes() for want in wanted]
        assert all(batch.error == 0.0 for batch in batches)
        assert {item.codec for batch in batches for item in batch.packed} == ({codec} - {"exact"})
    until(lambda: is_idle(node))
    assert within_budget(node)
    assert (node.statistics().totals.encode_s > 0) == (codec != "exact")


@pytest.mark.parametrize(("codec", "maximum"), [("fp16", 0.001), ("bf16+zstd", 0.01), ("int8+sparse+lz4", 0.02)])
def test_a_lossy_codec_tells_what_it_lost(way, images, codec, maximum):
    _, transport = way()
    transport.put_prefix(DIGEST, ARTIFACT)
    batches, (_, (got,), _, _) = unpacked(transport.features(request(images, 5, DIGEST, codec=codec)))
    _, (wanted,) = expected(images, 5)
    lost = np.square(got - wanted).sum((1, 2, 3)) / np.square(wanted).sum((1, 2, 3))
    assert 0 < np.sqrt(lost.max()) == pytest.approx(max(batch.error for batch in batches), rel=1e-3)
    assert max(batch.error for batch in batches) < maximum


def test_batches_above_the_tolerance_come_without_loss_among_the_others(way, images):
    _, transport = way(device_batch=8)
    transport.put_prefix(DIGEST, ARTIFACT)
    every = request(images, 5, DIGEST, codec="int8+zstd")
    tolerance = float(np.median([batch.error for batch in transport.features(every)]))
    some = request(images, 5, DIGEST, codec="int8+zstd", tolerance=tolerance)
    batches, (ids, _, _, _) = unpacked(transport.features(some))
    assert ids == expected(images, 5)[0]
    assert {batch.packed[0].codec for batch in batches} == {"int8+zstd", "zstd"}
    assert all(batch.error <= tolerance for batch in batches)
    none = request(images, 5, DIGEST, codec="int8+zstd", tolerance=0.0)
    _, (_, (got,), _, _) = unpacked(transport.features(none))
    assert got.tobytes() == expected(images, 5)[1][0].tobytes()


def test_both_ways_give_the_same_packed_bytes(images):
    message = request(images, 1, codec="int8+sparse+zstd")
    with (
        Node(NodeSettings(memory_bytes=256 << 20), (images.as_uri(),)) as node,
        served(node) as url,
        closing(HttpTransport(url, SETTINGS)) as over_http,
    ):
        for mine, its in zip(over_http.features(message), LocalTransport(node).features(message), strict=True):
            assert mine.packed[0].body.tobytes() == its.packed[0].body.tobytes()
            assert mine.packed[0].bounds.tolist() == its.packed[0].bounds.tolist()
            assert mine.error == its.error


def test_fewer_bytes_cross_where_they_are_packed(images):
    with Node(NodeSettings(memory_bytes=256 << 20), (images.as_uri(),)) as node, served(node) as url:
        crossed = []
        for codec in ("exact", "fp16", "int8"):
            with closing(HttpTransport(url, SETTINGS)) as transport:
                list(transport.features(request(images, 1, codec=codec)))
                crossed.append(transport.statistics().bytes_received)
    assert 0.5 < crossed[1] / crossed[0] < 0.55
    assert 0.25 < crossed[2] / crossed[0] < 0.3


def test_cut_0_ships_the_encoded_samples_as_they_are_also_broken_ones(way, images):
    _, transport = way()
    ids, _, encoded, skipped = joined(transport.features(request(images, 0)))
    samples = samples_of(images)
    assert ids == samples.ids.tolist()
    assert encoded == [(images / name).read_bytes() for name in samples.objects]
    assert skipped == []


def test_answers_do_not_depend_on_the_size_of_batches_and_requests(way, images):
    last = NETWORK.cuts[-1].number
    answers = []
    for device_batch in (8, 16, 32):
        _, transport = way(device_batch=device_batch)
        transport.put_prefix(DIGEST, ARTIFACT)
        for size in (1, 5, 13, COUNT):
            parts = (np.arange(start, min(start + size, COUNT)) for start in range(0, COUNT, size))
            requests = [request(images, last, DIGEST, samples_of(images).take(rows)) for rows in parts]
            answers.append([batch for request in requests for batch in transport.features(request)])
    _, first, _, _ = joined(answers[0])
    for answer in answers[1:]:
        assert joined(answer)[1][0].tobytes() == first[0].tobytes()


def test_missing_and_shortened_objects_are_skipped_at_every_cut(way, images):
    _, transport = way()
    samples = samples_of(images).take(np.arange(3))
    samples.objects[0] = "nowhere.jpg"
    samples.lengths[1] = 1 << 40
    samples.lengths[2] += 1
    for cut in (0, 1):
        ids, _, _, skipped = joined(transport.features(request(images, cut, samples=samples)))
        assert ids == []
        assert skipped == samples.ids.tolist()


def test_samples_may_be_parts_of_objects(way, images, tmp_path):
    _, transport = way()
    samples = samples_of(images).take(np.arange(2))
    samples.offsets[:] = (10, 0)
    samples.lengths[:] = (20, 30)
    _, _, encoded, _ = joined(transport.features(request(images, 0, samples=samples)))
    assert encoded == [
        (images / samples.objects[0]).read_bytes()[10:30],
        (images / samples.objects[1]).read_bytes()[:30],
    ]


def test_several_threads_share_a_transport(way, images):
    node, transport = way()
    transport.put_prefix(DIGEST, ARTIFACT)
    cuts = [0, 1, 2, NETWORK.cuts[-1].number] * 4
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda cut: joined(transport.features(request(images, cut, DIGEST))), cuts))
    for cut, answer in zip(cuts, answers, strict=True):
        assert len(answer[0]) == COUNT - len(BROKEN) * (cut > 0)
    until(lambda: is_idle(node))
    assert within_budget(node)


def test_an_answer_that_is_closed_early_frees_everything(way, images):
    node, transport = way(device_batch=8)
    for _ in range(3):
        answer = transport.features(request(images, 1))
        assert len(next(answer)) > 0
        answer.close()
        assert next(answer, None) is None
    until(lambda: is_idle(node))
    assert len(joined(transport.features(request(images, 1)))[0]) == COUNT - len(BROKEN)


@pytest.mark.parametrize("way", ["http", "local"], indirect=True)  # a service reads answers whole: see tests/io
def test_closing_frees_a_thread_that_waits_for_the_next_batch(way, images):
    # Twelve megabytes for batches: one unread answer of large pixels leaves no memory for another.
    node, transport = way(memory_bytes=96 << 20, device_batch=8)
    first = transport.features(request(images, 1, side=224))
    assert len(next(first)) > 0
    second = transport.features(request(images, 1, side=224))
    got = []
    thread = threading.Thread(target=lambda: got.append(next(second, None)))
    thread.start()
    until(lambda: node.statistics().memory["work"].waiting == 1)
    second.close()
    thread.join(60)
    assert got == [None]
    rest = sum(len(batch) + len(batch.skipped) for batch in first)
    assert rest > 0
    until(lambda: is_idle(node))


def test_a_slow_reader_delays_no_other_and_gets_everything(way, images):
    node, transport = way(device_batch=8)
    slow = transport.features(request(images, 1))
    batches = [next(slow)]
    for _ in range(4):
        assert len(joined(transport.features(request(images, 1)))[0]) == COUNT - len(BROKEN)
        batches.append(next(slow))
    assert joined([*batches, *slow])[0] == expected(images, 1)[0]
    until(lambda: is_idle(node))


def test_errors_arrive_as_themselves(way, images):
    node, transport = way(memory_bytes=64 << 20, max_requests=1)
    with pytest.raises(UnknownPrefix, match="upload"):
        list(transport.features(request(images, 2, DIGEST)))
    with pytest.raises(BadRequest, match=r"does not serve .*/etc; it serves .*: .* add more by serve --data-root"):
        list(transport.features(request("/etc", 0, samples=samples_of(images))))
    with pytest.raises(BadRequest, match="digest"):
        transport.put_prefix("0" * 64, ARTIFACT)
    with pytest.raises(OverBudget, match="--memory"):
        transport.put_prefix("0" * 64, bytes(64 << 20))
    with pytest.raises(OverBudget, match="--memory"):
        list(transport.features(request(images, 1, side=2048)))
    with node.admit(), pytest.raises(Overloaded, match="busy") as caught:
        list(transport.features(request(images, 1)))
    assert caught.value.retry_after_s > 0
    assert is_idle(node)
    assert transport.statistics().failures == 6


@pytest.mark.parametrize("fails_at", ["0000.jpg", "0030.jpg"])
def test_a_store_that_fails_ends_the_answer_with_its_own_error(way, images, monkeypatch, fails_at):
    node, transport = way(device_batch=8)
    read = FolderStore.read_version

    def failing(store, object, offset, length):
        if object == fails_at:
            raise StoreUnavailable("the store is on fire")
        return read(store, object, offset, length)

    monkeypatch.setattr(FolderStore, "read_version", failing)
    seen = []
    with pytest.raises(StoreUnavailable, match="on fire"):
        seen.extend(transport.features(request(images, 1)))
    assert (len(seen) > 0) == (fails_at == "0030.jpg")
    until(lambda: is_idle(node))
    assert node.statistics().totals.failed == 1


def test_a_profile_measures_reading_decoding_and_every_cut(way, images):
    _, transport = way()
    transport.put_prefix(DIGEST, ARTIFACT)
    profile = transport.profile(ProfileRequest(features=request(images, NETWORK.cuts[-1].number, DIGEST)))
    assert [cut.number for cut in profile.cuts] == [cut.number for cut in NETWORK.cuts]
    assert profile.read_s > 0
    assert profile.cuts[1].seconds > 0
    assert profile.cuts[-1].seconds >= profile.cuts[1].seconds
    assert profile.cuts[-1].bytes_per_sample > 0
    rests = [cut.remaining_bytes_per_sample for cut in profile.cuts]
    assert rests[0] == rests[1] > rests[-1]
    assert profile.cuts[0].remaining_fixed_bytes > 0
    assert profile.device == "cpu"
    assert set(profile.cores) == os.sched_getaffinity(0)
    assert profile.codecs == ()


def test_a_profile_measures_the_codecs_that_are_asked_for_where_they_may_be_worth_it(way, images):
    node, transport = way()
    transport.put_prefix(DIGEST, ARTIFACT)
    profile = transport.profile(
        ProfileRequest(features=request(images, 2, DIGEST), codecs=("exact", "lz4", "sparse+zstd", "int8"))
    )
    found = {(codec.cut, codec.codec): codec for codec in profile.codecs}
    for cut in NETWORK.cuts[1:]:
        codecs = {"int8", "sparse+zstd"} if cut.is_relu else {"int8", "lz4"}
        is_small = cut.bytes_per_sample <= 4 * samples_of(images).encoded_bytes / COUNT
        assert {codec for number, codec in found if number == cut.number} == (codecs if is_small else set())
    assert {cut for cut, _ in found} >= {NETWORK.cuts[-1].number}
    for (cut, codec), cost in found.items():
        assert cost.encode_s > 0
        assert cost.decode_s > 0
        assert (cost.error > 0) == (codec == "int8")
        assert 0 < cost.bytes_per_sample < 1.1 * NETWORK.cuts[cut].bytes_per_sample + 16
    assert is_idle(node)
    assert within_budget(node)


def test_measures_a_networks_cost_once(way, images):
    _, transport = way()
    transport.put_prefix(DIGEST, ARTIFACT)
    asked = ProfileRequest(features=request(images, 2, DIGEST), codecs=("int8",))
    first = transport.profile(asked)
    again = transport.profile(replace(asked, codecs=("int8", "fp16")))
    steps = [
        [after.seconds - before.seconds for before, after in pairwise(profile.cuts[1:])] for profile in (first, again)
    ]
    assert steps[1] == pytest.approx(steps[0], abs=1e-12)
    assert again.read_s != first.read_s
    assert [codec for codec in again.codecs if codec.codec == "int8"] == list(first.codecs)
    assert {codec.codec for codec in again.codecs} == {"int8", "fp16"}
    narrow = transport.profile(replace(asked, codecs=("fp16",))).codecs
    assert narrow == tuple(codec for codec in again.codecs if codec.codec == "fp16")
    few = request(images, 2, DIGEST, samples_of(images).take(np.arange(5)))
    assert transport.profile(replace(asked, features=few)).codecs != first.codecs  # another device batch


def test_a_profile_that_is_cancelled_ends_at_the_node_too(way, images):
    node, transport = way()
    transport.put_prefix(DIGEST, ARTIFACT)
    other, body = artifact_of(small_network(width=4))
    node.put_prefix(other, body)
    asked, cancellation = ProfileRequest(features=request(images, 2, DIGEST)), Cancellation()
    with (
        busy_device(node, images, other, threading.Event(), threading.Event()),
        ThreadPoolExecutor(1) as threads,
    ):
        profiling = threads.submit(transport.profile, asked, cancellation)
        until(lambda: node.statistics().waiting_for_device == 2)
        cancellation.cancel()
        with pytest.raises(Unavailable):
            profiling.result(60)
        until(lambda: node.statistics().requests_in_progress == 1)
        with pytest.raises(Unavailable, match="given up"):
            transport.profile(asked, cancellation)
    assert len(transport.profile(asked).cuts) == len(NETWORK.cuts)


def test_health_names_the_node_and_statistics_count(way, images):
    node, transport = way()
    assert transport.health() == node.health()
    assert transport.health().roots == (images.as_uri(),)
    assert set(transport.health().cores) == os.sched_getaffinity(0)
    before = transport.statistics()
    list(transport.features(request(images, 0)))
    after = transport.statistics()
    assert after.requests == before.requests + 1
    assert after.bytes_received - before.bytes_received >= samples_of(images).encoded_bytes
    assert after.receive_s > before.receive_s
    assert after.failures == 0
