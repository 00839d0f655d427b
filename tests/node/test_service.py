"""The node as method calls: requests, readers, and prefixes over texts.

The node within its memory: what is refused, skipped, read again, evicted and counted.

Prefixes that bring a tokenizer: bounded, checked in another process, and used only as the request names it.
"""

import itertools
import json
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace

import numpy as np
import pytest
import torch

from frostline.core import View
from frostline.core.config import NodeSettings
from frostline.core.errors import (
    BadRequest,
    ObjectNotFound,
    OverBudget,
    Overloaded,
    Unavailable,
    UnknownPrefix,
    UnsafeArtifact,
)
from frostline.engines.measure import GraphLimits
from frostline.engines.torch import TorchEngine
from frostline.models import artifact, cut_network, freeze
from frostline.models.artifact import header_of, read_outline, read_prefix, tokenizer_of, write_prefix
from frostline.models.tracing import takes_rows
from frostline.node import Node
from frostline.node import outputs as packing
from frostline.node import pipeline as requests
from frostline.node.decode import ReadWatch
from frostline.node.inspection import Inspector
from frostline.node.memory import Readers
from frostline.node.profiling import NetworkProfile, Networks
from frostline.preprocess import imagenet, text
from frostline.stores.local import FolderStore
from frostline.stores.retry import Wrapped
from frostline.wire.codecs import CODECS
from frostline.wire.messages import ProfileRequest
from frostline.wire.packing import pack
from support.nodes import (
    artifact_of,
    is_idle,
    joined,
    jpeg,
    make_images,
    request,
    samples_of,
    small_network,
    until,
    within_budget,
)
from support.texts import small_distilbert, tokenizer_of_words
from support.threads import asked_of_threads

SMALL = 96 << 20


def node_at(folder, memory_bytes=SMALL, **settings):
    return Node(NodeSettings(memory_bytes=memory_bytes, **settings), (folder.as_uri(),))


@pytest.fixture
def images(tmp_path):
    return make_images(tmp_path / "images", 6)


@pytest.mark.parametrize(("fixed", "runs"), [(True, [16, 16]), (False, [16, 8])])
def test_a_run_may_have_no_more_rows_than_are_wanted(tmp_path, monkeypatch, fixed, runs):
    """A slow network then takes half as long for a few; what one way made serves no request of the other."""
    folder, network, ran, run = make_images(tmp_path / "images", 22), small_network(), [], TorchEngine.run_divided

    def noted(engine, pixels, *more):
        ran.append(len(pixels))
        return run(engine, pixels, *more)

    monkeypatch.setattr(TorchEngine, "run_divided", noted)
    digest, body = artifact_of(network)
    samples = samples_of(folder, with_versions=True)
    asked = request(folder, network.cuts[-1].number, digest, samples)
    with node_at(folder, device_batch=16, cache_folder=str(tmp_path / "cache")) as node:
        node.put_prefix(digest, body)
        ran.clear()
        other = joined(node.features(replace(asked, fixed_rows=not fixed)))
        ran.clear()
        for _ in range(2):
            made = joined(node.features(replace(asked, fixed_rows=fixed)))
            assert made[0] == other[0]
            np.testing.assert_allclose(made[1][0], other[1][0], rtol=1e-5, atol=1e-6)
    assert ran == runs, "and the second time none"


def held_by(node, share):
    return node.statistics().memory[share]


def test_an_image_larger_than_expected_is_read_again_with_memory_for_it(images):
    (images / "0003.jpg").write_bytes(jpeg(size=(700, 500)))
    with node_at(images, decode_threads=2) as node:
        ids, _, _, skipped = joined(node.features(request(images, 1)))
        assert len(ids) == 6
        assert skipped == []
        assert node.statistics().totals.decode_retries >= 1
        assert is_idle(node)
        assert within_budget(node)


class Met(Wrapped):
    """Answers its first reads once so many of them are under way."""

    def __init__(self, store, together):
        super().__init__(store)
        self._barrier = threading.Barrier(together)
        self._first = itertools.count(together, -1)

    def read_version(self, object, offset, length):
        if next(self._first) > 0:
            self._barrier.wait(60)
        return self._store.read_version(object, offset, length)


@pytest.mark.parametrize("cut", [0, 1])
def test_a_remote_store_has_read_threads_reads_in_flight(tmp_path, monkeypatch, cut):
    images = make_images(tmp_path / "images", 60)
    far = Met(FolderStore(str(images)), 50)
    monkeypatch.setattr(requests, "open_samples", lambda *_, **__: far)
    with node_at(images, read_threads=50) as node:
        ids, _, _, skipped = joined(node.features(request(images, cut)))
        assert len(ids) == 60
        assert skipped == []
        assert node.statistics().memory["ahead"].peak_bytes > 0
        until(lambda: is_idle(node))  # whoever read the last sample gives its memory back after it has come
        assert within_budget(node)


class Hung(Wrapped):
    """Does not answer reads before it may, but some objects or all others at once."""

    def __init__(self, store, hangs):
        super().__init__(store)
        self._hangs = hangs
        self.asked = Counter()
        self.go = threading.Event()

    def read_version(self, object, offset, length):
        self.asked[object] += 1
        if self._hangs(object, self.asked[object]):
            assert self.go.wait(60)
        return self._store.read_version(object, offset, length)


@pytest.mark.parametrize("cut", [0, 1])
def test_closing_an_answer_with_hanging_reads_frees_its_threads(tmp_path, monkeypatch, cut):
    images = make_images(tmp_path / "images", 60)
    names = sorted(path.name for path in images.iterdir())
    # The readers are 16, and all wait.
    store = Hung(FolderStore(str(images)), lambda name, _: name in names[:40])
    monkeypatch.setattr(requests, "open_samples", lambda *_, **__: store)
    with node_at(images, read_threads=50) as node, ThreadPoolExecutor(2) as others:
        hung, free = request(images, cut), request(images, cut)
        hung = replace(hung, samples=hung.samples.take(np.arange(40)))
        free = replace(free, samples=free.samples.take(np.arange(40, 60)))
        answer = node.features(hung)
        waits = others.submit(next, answer, None)
        until(lambda: len(store.asked) == 40)
        others.submit(answer.close).result(60)
        assert waits.result(60) is None
        assert len(others.submit(joined, node.features(free)).result(60)[0]) == 20
        assert node.statistics().memory["ahead"].reserved_bytes > 0, "what is being read takes memory all the same"
        store.go.set()
        until(lambda: is_idle(node))
        assert within_budget(node)


@pytest.mark.parametrize("cut", [0, 1])
def test_a_slow_read_is_repeated_if_hedging_is_on(tmp_path, monkeypatch, cut):
    images = make_images(tmp_path / "images", 60)
    names = sorted(path.name for path in images.iterdir())
    for quantile, again in ((0.5, 1), (1.0, 0)):
        store = Hung(FolderStore(str(images)), lambda name, times: name == names[50] and times == 1)
        monkeypatch.setattr(requests, "open_samples", lambda *_, found=store, **__: found)
        with node_at(images, read_threads=16, hedge_quantile=quantile) as node, ThreadPoolExecutor(1) as other:
            answer = other.submit(joined, node.features(request(images, cut)))
            if again:
                assert len(answer.result(60)[0]) == 60
                assert not store.go.is_set(), "the first read hangs"
            store.go.set()
            assert len(answer.result(60)[0]) == 60
            assert store.asked[names[50]] == 1 + again
            assert node.statistics().totals.hedged_reads >= again
            until(lambda node=node: is_idle(node))


def test_skips_an_image_that_never_fits_and_names_the_option(images):
    (images / "0003.jpg").write_bytes(jpeg(size=(2000, 1000)))
    with node_at(images) as node:
        batches = list(node.features(request(images, 1)))
        (lost,) = [sample for batch in batches for sample in batch.skipped]
        assert lost.object == "0003.jpg"
        assert "--memory" in lost.reason
        assert within_budget(node)


def test_skips_an_image_whose_header_declares_too_many_pixels(images):
    whole = jpeg()
    place = whole.index(b"\xff\xc0") + 5
    (images / "0003.jpg").write_bytes(whole[:place] + b"\xea\x60\xea\x60" + whole[place + 4 :])
    with node_at(images) as node:
        batches = list(node.features(request(images, 1)))
        (lost,) = [sample for batch in batches for sample in batch.skipped]
        assert lost.object == "0003.jpg"
        assert "too many pixels" in lost.reason
        assert is_idle(node)


def test_wrong_lengths_reserve_no_memory_beyond_the_budget(images):
    samples = samples_of(images)
    samples.lengths[:3] = (2**62, 20 << 20, 3 << 20)
    with node_at(images) as node:
        for cut in (0, 1):
            ids, _, _, skipped = joined(node.features(request(images, cut, samples=samples)))
            assert ids == samples.ids[3:].tolist()
            assert skipped == samples.ids[:3].tolist()
        assert is_idle(node)
        assert within_budget(node)


def test_refuses_a_request_that_can_never_run_before_anything_is_read(images):
    network = small_network(width=64, side=256)
    digest, body = artifact_of(network)
    with node_at(images) as node:
        node.put_prefix(digest, body)
        with pytest.raises(OverBudget, match="--memory"):
            node.features(request(images, network.cuts[-1].number, digest, side=256))
        assert node.statistics().totals.bytes_read == 0
        assert is_idle(node)


def test_weights_that_can_never_fit_are_refused(images):
    network = small_network(width=700)
    with node_at(images) as node, pytest.raises(OverBudget, match="--memory"):
        node.put_prefix(*artifact_of(network))


def test_evicts_the_least_recently_used_prefix(images):
    # Nineteen megabytes for weights, and each takes seven.
    first, second, third = (artifact_of(small_network(width=width)) for width in (440, 441, 442))
    last = small_network().cuts[-1].number
    with node_at(images) as node:
        node.put_prefix(*first)
        node.put_prefix(*second)
        list(node.features(request(images, 1)))
        with pytest.raises(OverBudget, match="running"):  # it is used, if only to be refused
            node.features(request(images, last, first[0]))
        node.put_prefix(*third)
        assert node.holds_prefix(first[0])
        assert not node.holds_prefix(second[0])
        with pytest.raises(UnknownPrefix):
            node.features(request(images, last, second[0]))
        assert node.statistics().totals.evicted == 1
        assert within_budget(node)


def test_never_evicts_a_prefix_in_use(images):
    network = small_network()
    last = network.cuts[-1].number
    used, larger, large, third = (
        artifact_of(network),
        *(artifact_of(small_network(width=width)) for width in (470, 471, 400)),
    )
    with node_at(images) as node:
        for artifact in (used, larger, large):
            node.put_prefix(*artifact)
        answer = node.features(request(images, last, used[0]))
        node.put_prefix(*third)
        assert node.holds_prefix(used[0])
        assert not node.holds_prefix(larger[0])
        assert len(joined(answer)[0]) == 6


@pytest.mark.parametrize(("usable_gib", "nbytes"), [(8, 343_300_000), (12, 537_100_000)])
def test_a_node_has_room_for_large_networks_by_default(images, monkeypatch, usable_gib, nbytes):
    """ViT-B/16 with eight gibibytes to use, VGG-16 up to its last layer with twelve."""
    monkeypatch.setattr("frostline.core.config.usable_memory_bytes", lambda: usable_gib << 30)
    with Node(NodeSettings(), (images.as_uri(),)) as node:
        with node.upload("0" * 64, nbytes) as upload:
            upload.begin()  # sets memory aside, and takes none
            assert held_by(node, "weights").reserved_bytes >= nbytes
        assert is_idle(node)


def test_an_upload_that_finds_only_prefixes_in_use_is_asked_to_wait(images):
    first, second, third = (artifact_of(small_network(width=width, side=16)) for width in (440, 441, 442))
    with node_at(images, device_batch=8) as node:
        node.put_prefix(*first)
        node.put_prefix(*second)
        answers = [node.features(request(images, 2, digest, side=16)) for digest, _ in (first, second)]
        digest, body = third
        with node.upload(digest, len(body)) as upload, pytest.raises(Overloaded, match="in use"):
            upload.begin(longest_s=0.2)
        for answer in answers:
            answer.close()
        node.put_prefix(*third)
        assert within_budget(node)


def test_uploading_the_same_prefix_from_many_threads_keeps_one(images):
    digest, body = artifact_of(small_network())
    with node_at(images) as node:
        # No more at once than the memory for messages lets in: the node refuses the rest, as it should.
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(lambda _: node.put_prefix(digest, body), range(16)))
        assert node.statistics().prefixes == 1
        before = held_by(node, "weights").reserved_bytes
        node.put_prefix(digest, body)
        assert held_by(node, "weights").reserved_bytes == before
        assert held_by(node, "work").reserved_bytes == 0


def test_random_views_are_the_same_for_the_same_seed_and_epoch(images):
    steps = imagenet(16, augment=True).to_json()

    def pixels(node, seed, epoch):
        view = View(seed=seed, epoch=epoch)
        return joined(node.features(request(images, 1, preprocess=steps, view=view)))[1][0]

    with node_at(images) as node:
        assert np.array_equal(pixels(node, 1, 0), pixels(node, 1, 0))
        assert not np.array_equal(pixels(node, 1, 0), pixels(node, 1, 1))
        with pytest.raises(BadRequest, match="view"):
            node.features(request(images, 1, preprocess=steps))


def test_many_requests_at_once_are_all_answered_within_the_budget(images):
    network = small_network()
    digest, body = artifact_of(network)
    cuts = [0, 1, 2, network.cuts[-1].number]
    with node_at(images, max_requests=64, device_batch=8) as node:
        node.put_prefix(digest, body)

        def work(index):
            answer = node.features(request(images, cuts[index % 4], digest))
            if index % 5 == 0:
                next(answer)
                answer.close()
                return None
            return joined(answer)

        with ThreadPoolExecutor(3) as threads:
            answers = list(threads.map(work, range(60)))
        for index, answer in enumerate(answers):
            assert answer is None or len(answer[0]) == 6, index
        assert is_idle(node)
        assert within_budget(node)
        totals = node.statistics().totals
        assert totals.finished + totals.abandoned == 60


def test_packing_is_counted_and_keeps_off_the_thread_that_runs_the_network(images, monkeypatch):
    network = small_network(side=64)
    digest, body = artifact_of(network)
    answer_bytes = network.cuts[2].bytes_per_sample
    threads, reserved = [], []
    with node_at(images, device_batch=8) as node:

        def watched(*args):
            threads.append(threading.current_thread().name)
            reserved.append(held_by(node, "work").reserved_bytes)
            return pack(*args)

        monkeypatch.setattr(packing, "pack", watched)
        node.put_prefix(digest, body)
        answer = node.features(request(images, 2, digest, side=64, codec="sparse+zstd"))
        batch = next(answer)
        assert reserved[0] >= 8 * 3 * answer_bytes  # as computed, without those skipped, and packed
        assert batch.nbytes <= held_by(node, "work").reserved_bytes < 8 * answer_bytes
        del batch
        answer.close()
        assert is_idle(node)
        assert node.statistics().totals.encode_s > 0
    assert not any("device" in name for name in threads)


def test_refuses_answers_that_do_not_fit_packed_and_names_the_option(images):
    with node_at(images, memory_bytes=80 << 20, device_batch=8) as node:
        assert len(joined(node.features(request(images, 1, side=224)))[0]) == 6
        with pytest.raises(OverBudget, match="--memory"):
            node.features(request(images, 1, side=224, codec="sparse+zstd"))


def test_measures_codecs_only_within_the_budget(images):
    network = small_network(side=64)
    digest, body = artifact_of(network)
    asked = ProfileRequest(features=request(images, 2, digest, side=64), codecs=CODECS)
    found = []
    for memory_bytes in (64 << 20, 256 << 20):
        with node_at(images, memory_bytes) as node:
            node.put_prefix(digest, body)
            profile = node.profile(asked)
            assert len(profile.cuts) == len(network.cuts)
            found.append({codec.cut for codec in profile.codecs})
            assert within_budget(node)
            assert is_idle(node)
    assert found[0] <= found[1]
    assert found[0]


def test_caches_profiles_of_a_limited_number_of_prefixes():
    networks = Networks()
    measured = [NetworkProfile(seconds=np.zeros((3, 2))) for _ in range(65)]
    for number, network in enumerate(measured):
        networks.put((number,), network)
        networks.get((0,))
    assert networks.get((0,)) is measured[0]
    assert networks.get((1,)) is None
    assert networks.get((64,)) is measured[64]


def test_memory_of_messages_is_counted_too(images):
    with node_at(images) as node:
        admissions = [node.admit(10_000) for _ in range(4)]
        with pytest.raises(Overloaded):
            node.admit(10_000)
        assert within_budget(node)
        for admission in admissions:
            admission.read()
            admission.close()
            admission.close()
        assert is_idle(node)


def test_closing_the_node_ends_answers_and_refuses_requests(images):
    node = node_at(images, device_batch=8)
    with node:
        make_images(images, 20)
        reading = node.features(request(images, 1, side=224))
        next(reading)
        waiting = node.features(request(images, 1, side=224))
        got = []
        thread = threading.Thread(target=lambda: got.append(next(waiting, None)))
        thread.start()
        until(lambda: held_by(node, "work").waiting == 1)
    thread.join(60)
    assert got == [None]
    assert next(reading, None) is None
    assert not reading.is_complete
    assert is_idle(node)
    with pytest.raises(Overloaded):
        node.features(request(images, 1))
    node.close()


def held(executor, count, go):
    """Reads that do not end before they are told to."""
    begun = [threading.Event() for _ in range(count)]
    return [executor.submit(lambda event=event: (event.set(), go.wait(60))) for event in begun], begun


@pytest.mark.promise("apart", mended="two tenants whose stores hung held all threads that read, and stopped the others")
def test_tenants_whose_stores_hang_together_leave_each_other_one_a_thread():
    go = threading.Event()
    readers = Readers(threads=4, maximum=2, spare=2)
    try:
        slow = [held(readers.executor_for(name), 10, go) for name in ("ann", "bob")]
        for _, begun in slow:
            assert begun[0].wait(60)
            assert begun[1].wait(60)
        quick = [readers.executor_for(name).submit(lambda: 1) for name in ("cy", "dee") for _ in range(20)]
        assert sum(future.result(60) for future in quick) == 40
        assert [sum(event.is_set() for event in begun) for _, begun in slow] == [2, 2]
    finally:
        go.set()
        wait([future for futures, _ in slow for future in futures], 60)
        readers.close()


def test_a_tenant_whose_store_hangs_leaves_threads_to_others():
    go = threading.Event()
    readers = Readers(threads=4, maximum=2)
    try:
        slow, begun = held(readers.executor_for("slow"), 50, go)
        assert begun[0].wait(60)
        assert begun[1].wait(60)
        quick = [readers.executor_for("quick").submit(lambda number=number: number) for number in range(50)]
        assert [future.result(60) for future in quick] == list(range(50))
        assert sum(event.is_set() for event in begun) == 2
    finally:
        go.set()
        readers.close()
    assert all(future.done() for future in slow)


def test_threads_that_never_rest_are_not_asked_again_and_again():
    readers, go, before = Readers(threads=2, maximum=2), threading.Event(), asked_of_threads()
    try:
        first, begun = held(readers.executor_for("one"), 2, go)
        assert all(event.wait(60) for event in begun)
        made = [readers.executor_for("one").submit(lambda number=number: number) for number in range(500)]
        assert asked_of_threads() <= before + 4
        go.set()
        assert [future.result(60) for future in made] == list(range(500))
        # Whoever finds all threads asleep wakes one, however often that was so.
        assert [
            readers.executor_for("two").submit(lambda number=number: number).result(60) for number in range(50)
        ] == [*range(50)]
    finally:
        go.set()
        readers.close()
    assert all(future.done() for future in first)


@pytest.mark.parametrize(
    ("weights", "began"),
    [
        ({}, ["many", "few", "many", "few", "many", "many", "many"]),
        ({"many": 1.0, "few": 2.0}, ["many", "few", "few", "many", "many", "many", "many"]),
        ({"many": 4.0}, ["many", "few", "many", "many", "many", "few", "many"]),
    ],
)
def test_threads_serve_tenants_by_their_weights_however_much_one_has_queued(weights, began):
    go, order = threading.Event(), []
    readers = Readers(threads=1, maximum=1, weights=weights, clock=itertools.count().__next__)  # a second each
    try:
        (first,), _ = held(readers.executor_for("first"), 1, go)
        made = [readers.executor_for(name).submit(order.append, name) for name in ["many"] * 5 + ["few", "few"]]
        go.set()
        wait([first, *made], 20)
    finally:
        readers.close()
    assert order == began


def test_a_changed_weight_holds_for_threads_from_then_on():
    go, order = threading.Event(), []
    readers = Readers(threads=1, maximum=1, clock=itertools.count().__next__)
    try:
        (first,), _ = held(readers.executor_for("first"), 1, go)
        made = [readers.executor_for(name).submit(order.append, name) for name in ["one"] * 30 + ["other"] * 30]
        readers.change_weight("other", 5.0)
        go.set()
        wait([first, *made], 20)
    finally:
        readers.close()
    assert order[:30].count("other") == 25


def test_whoever_was_at_work_when_all_stood_still_does_not_wait_as_long_again():
    now, order = [0.0], []
    readers = Readers(threads=1, maximum=1, clock=lambda: now[0])
    one, other = readers.executor_for("one"), readers.executor_for("other")
    take, quick = (lambda seconds: now.__setitem__(0, now[0] + seconds)), 0.1
    go = threading.Event()
    try:
        one.submit(take, 600.0).result(60)  # its store hung, or the node was stopped
        (first,), _ = held(readers.executor_for("first"), 1, go)
        made = [
            executor.submit(lambda executor=executor: (take(quick), order.append(executor)))
            for executor in [other, one] * 50
        ]
        go.set()
        wait([first, *made], 60)
    finally:
        readers.close()
    assert order.index(one) <= 11


def test_cancelled_tasks_do_not_run_and_failed_ones_pass_their_error_on():
    go, done = threading.Event(), []
    readers = Readers(threads=1, maximum=1)
    executor = readers.executor_for("one")
    try:
        (first,), begun = held(executor, 1, go)
        assert begun[0].wait(60)
        cancelled, failing, last = (
            executor.submit(done.append, 1),
            executor.submit(lambda: 1 / 0),
            executor.submit(done.append, 2),
        )
        assert cancelled.cancel()
        go.set()
        with pytest.raises(ZeroDivisionError):
            failing.result(60)
        last.result(60)
    finally:
        readers.close()
    assert first.done()
    assert done == [2]


def test_refuses_tasks_while_the_node_stops():
    readers = Readers(2, 1)
    readers.close()
    for _ in range(5):
        with pytest.raises(Unavailable, match="the node is stopping"):
            readers.executor_for("ann").submit(int)


def test_urgent_tasks_run_before_the_tenants_earlier_ones():
    go, order = threading.Event(), []
    readers = Readers(threads=1, maximum=1)
    try:
        (first,), begun = held(readers.executor_for("one"), 1, go)
        assert begun[0].wait(60)
        made = [readers.executor_for("one").submit(order.append, number) for number in range(3)]
        made += [
            readers.executor_for("one", is_urgent=True).submit(order.append, f"urgent {letter}") for letter in "ab"
        ]
        go.set()
        wait([first, *made], 20)
    finally:
        readers.close()
    assert order == ["urgent a", "urgent b", 0, 1, 2]


LIMITS = GraphLimits(max_nodes=2000, max_values=50_000, max_run_s=60, max_operation_s=10, operations_per_s=1e9)


@pytest.fixture(scope="module")
def prefix():
    tokens = text(tokenizer_of_words(), max_length=12)
    model = freeze(small_distilbert(), "distilbert.transformer.layer.0", input_shape=tokens.inputs)
    found = cut_network(takes_rows(model, tokens.tokens.names), (tokens.sample,), frozen_in_eval=True)
    return replace(found.prefix, tokenizer=tokens.tokenizer)


@pytest.fixture(scope="module")
def inspector():
    with Inspector() as made:
        yield made


def inspect(inspector, body):
    asked = {"max_rows": 32, "max_check_s": 30.0, "limits": LIMITS, "tokenizer": tokenizer_of(body)}
    return inspector.inspect(header_of(body), **asked)


def test_a_tokenizer_travels_in_the_file_of_the_prefix(prefix):
    body = write_prefix(prefix)
    assert body == write_prefix(prefix)
    assert read_prefix(body).tokenizer == tokenizer_of(body) == prefix.tokenizer
    assert set(read_prefix(body).tensors) == set(prefix.tensors)
    assert read_outline(header_of(body)).tokenizer == b""  # it has the sizes alone
    assert tokenizer_of(write_prefix(replace(prefix, tokenizer=b""))) == b""


def test_a_tokenizer_is_read_in_another_process_first(prefix, inspector):
    body = write_prefix(prefix)
    assert inspect(inspector, body).memory
    for broken in (b"{}", b"\xff" * 10, b'{"model": {"type": "BPE"}}', prefix.tokenizer[:-20]):
        with pytest.raises(UnsafeArtifact, match="tokenizer"):
            inspect(inspector, write_prefix(replace(prefix, tokenizer=broken)))


def test_a_tokenizer_whose_time_nothing_bounds_is_left_to_the_trainer(prefix, inspector):
    slow = json.loads(prefix.tokenizer)
    slow["pre_tokenizer"] = {"type": "Split", "pattern": {"Regex": "(a+)+b"}, "behavior": "Isolated", "invert": False}
    with pytest.raises(OverBudget, match="does not run this tokenizer"):
        inspect(inspector, write_prefix(replace(prefix, tokenizer=json.dumps(slow).encode())))


def test_a_tokenizer_that_is_too_large_is_refused(prefix, monkeypatch):
    body = write_prefix(prefix)
    monkeypatch.setattr(artifact, "MAX_TOKENIZER_BYTES", 100)
    for read in (read_prefix, tokenizer_of, lambda whole: read_outline(header_of(whole))):
        with pytest.raises(UnsafeArtifact, match="tokenizer"):
            read(body)


def test_refuses_a_tokenizer_entry_of_another_type(prefix, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(torch, "frombuffer", lambda *_, **__: torch.zeros(3, 3))
        body = write_prefix(prefix)
    with pytest.raises(UnsafeArtifact, match="tokenizer"):
        read_prefix(body)


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_a_store_whose_reads_do_not_end_is_in_trouble_until_one_does():
    clock = Clock()
    reads = ReadWatch(clock)
    with reads.watch_read("a.jpg"):
        clock.now += 1.4
        assert reads.trouble() == ""
        with reads.watch_read("b.jpg"):
            clock.now += 0.05
        clock.now += 1.4
        assert reads.trouble() == "", "another read ended meanwhile"
        clock.now += 0.2
        assert reads.trouble() == "no read of its store has ended for 1.6 s, with 1 under way"
    assert reads.trouble() == ""


def test_a_store_that_is_always_slow_is_not_in_trouble():
    clock = Clock()
    reads = ReadWatch(clock)
    with reads.watch_read("a.jpg"):
        clock.now += 5
    with reads.watch_read("b.jpg"):
        clock.now += 14
        assert reads.trouble() == ""
        clock.now += 2
        assert "no read of its store" in reads.trouble()


def test_eight_failed_reads_in_a_row_make_a_store_suspect_for_a_while(caplog):
    clock = Clock()
    reads = ReadWatch(clock)

    def fail(name):
        with pytest.raises(ObjectNotFound), reads.watch_read(name):
            raise ObjectNotFound("stale file handle")

    for number in range(7):
        fail(f"{number}.jpg")
    assert reads.trouble() == ""
    fail("7.jpg")
    assert reads.trouble() == "it could not read the last 8 samples, such as 7.jpg: stale file handle"
    assert [record.getMessage() for record in caplog.records] == [
        "cannot read 0.jpg: stale file handle (1 since the last such line)"
    ]
    clock.now += 31
    assert reads.trouble() == ""
    fail("8.jpg")
    assert caplog.records[-1].getMessage() == "cannot read 8.jpg: stale file handle (8 since the last such line)"
    with reads.watch_read("9.jpg"):
        pass
    fail("10.jpg")
    assert reads.trouble() == ""
