"""Features that a node keeps: on its disk, and in a store for several nodes.

The node's cache: cached features are not read, decoded or computed again, and are bit-identical.

A cache that nodes share: what one node computed, another one reads; whatever happens there, answers stay right.
"""

import hashlib
import os
from dataclasses import replace

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from frostline.client.http import HttpTransport
from frostline.core import View
from frostline.core.config import NodeSettings, TenantSettings
from frostline.core.errors import BadRequest, SettingError
from frostline.node import Node
from frostline.node.http.app import metrics_text
from frostline.preprocess import Preprocess, RandomHorizontalFlip
from support.nodes import (
    artifact_of,
    is_idle,
    joined,
    make_images,
    preprocess,
    request,
    same,
    samples_of,
    served,
    small_network,
    until,
    within_budget,
)

COUNT = 20


@pytest.fixture(scope="module")
def network():
    return small_network()


@pytest.fixture
def images(tmp_path):
    return make_images(tmp_path / "images", COUNT)


def node_with_cache(tmp_path, *roots, memory_bytes=128 << 20):
    roots = roots or (tmp_path / "images",)
    settings = NodeSettings(
        memory_bytes=memory_bytes, device_batch=8, cache_folder=str(tmp_path / "cache"), cache_bytes=32 << 20
    )
    return Node(settings, tuple(root.as_uri() for root in roots))


def asked(node, images, network, cut=None, rows=None, **fields):
    """The answer to a request for some rows, and what the node did for it."""
    digest, body = artifact_of(network)
    node.put_prefix(digest, body)
    samples = fields.pop("samples", None) or samples_of(images, with_versions=True)
    samples = samples if rows is None else samples.take(np.array(rows))
    before = node.statistics().totals
    cut = network.cuts[-1].number if cut is None else cut
    answer = joined(node.features(request(images, cut, prefix=digest, samples=samples, **fields)))
    after = node.statistics().totals
    names = ("cache_hits", "cache_misses", "bytes_read", "read_s", "decode_s", "compute_s")
    assert is_idle(node)
    assert within_budget(node)
    return answer, {name: getattr(after, name) - getattr(before, name) for name in names}


NOTHING = {"cache_misses": 0, "bytes_read": 0, "read_s": 0, "decode_s": 0, "compute_s": 0}


@pytest.mark.parametrize("cut", [1, 2, None])
def test_cached_features_are_neither_read_nor_decoded_nor_computed_again(tmp_path, images, network, cut):
    with node_with_cache(tmp_path) as node:
        first, did = asked(node, images, network, cut)
        assert did["cache_misses"] == COUNT
        second, did = asked(node, images, network, cut)
        assert did == {"cache_hits": COUNT, **NOTHING}
    with node_with_cache(tmp_path) as node:  # and another node with its folder later
        third, did = asked(node, images, network, cut)
        assert did == {"cache_hits": COUNT, **NOTHING}
    assert same(first, second)
    assert same(first, third)
    assert first[0] == samples_of(images).ids.tolist()


def test_features_are_bit_identical_whatever_part_of_a_request_is_cached(tmp_path, images, network):
    with Node(NodeSettings(memory_bytes=128 << 20, device_batch=8), (images.as_uri(),)) as plain:
        expected, _ = asked(plain, images, network)
    with node_with_cache(tmp_path) as node:
        asked(node, images, network, rows=[1, 2, 3, 9, 16, 17, 18])
        found, did = asked(node, images, network)
        assert (did["cache_hits"], did["cache_misses"]) == (7, 13)
    assert same(found, expected)


def test_returns_cached_rows_in_one_batch_and_computes_others_in_full_runs(tmp_path, images, network):
    digest, _ = artifact_of(network)
    samples = samples_of(images, with_versions=True)

    def lengths(rows):
        wanted = request(images, network.cuts[-1].number, prefix=digest, samples=samples.take(np.array(rows)))
        return [len(batch) for batch in node.features(wanted)]

    with node_with_cache(tmp_path) as node:
        asked(node, images, network, rows=range(0, COUNT, 2))
        assert lengths(range(0, COUNT, 2)) == [COUNT // 2]
        assert lengths(range(COUNT)) == [17, 3]  # eight to compute and nine beside them; two and one
        assert lengths(range(COUNT)) == [COUNT]
        assert is_idle(node)


def test_damaged_cached_rows_are_computed_in_as_many_runs_as_they_need(tmp_path, images, network):
    with node_with_cache(tmp_path) as node:
        expected, _ = asked(node, images, network)
        tensors = expected[1]
    (file,) = (tmp_path / "cache").glob("*.sqlite")
    data = bytearray(file.read_bytes())
    for row in range(1, COUNT):
        place = data.find(np.ascontiguousarray(tensors[0][row]).tobytes())
        data[place + 2] ^= 1
    file.write_bytes(data)
    with node_with_cache(tmp_path) as node:
        found, did = asked(node, images, network)
        assert (did["cache_hits"], did["cache_misses"]) == (1, COUNT - 1)
        assert asked(node, images, network)[1] == {"cache_hits": COUNT, **NOTHING}
    assert same(found, expected)


def test_every_codec_finds_the_same_features(tmp_path, images, network):
    with node_with_cache(tmp_path) as node:
        (_, (exact,), _, _), _ = asked(node, images, network)
        digest, _ = artifact_of(network)
        samples = samples_of(images, with_versions=True)
        wanted = request(images, network.cuts[-1].number, prefix=digest, samples=samples, codec="fp16")
        packed = np.concatenate([batch.packed[0].body for batch in node.features(wanted)])
        assert node.statistics().totals.cache_hits == COUNT
    assert np.array_equal(packed.reshape(exact.shape), exact.astype(np.float16))


def test_broken_samples_are_reported_each_time_and_never_cached(tmp_path, network):
    images = make_images(tmp_path / "images", COUNT, broken=(0, 3, 19))
    with node_with_cache(tmp_path) as node:
        first, _ = asked(node, images, network)
        second, did = asked(node, images, network)
        assert (did["cache_hits"], did["cache_misses"]) == (COUNT - 3, 3)
        assert len(second[3]) == 3
        third, _ = asked(node, images, network, rows=[0, 3])
    assert same(first, second)
    assert third[0] == []
    assert len(third[3]) == 2


def test_computes_a_changed_object_again_once_it_is_listed_again(tmp_path, images, network):
    with node_with_cache(tmp_path) as node:
        before, _ = asked(node, images, network)
        make_images(tmp_path / "others", COUNT, size=(64, 64))
        (images / "0005.jpg").write_bytes((tmp_path / "others" / "0007.jpg").read_bytes())
        after, did = asked(node, images, network)
        assert (did["cache_hits"], did["cache_misses"]) == (COUNT - 1, 1)
    assert [np.array_equal(row, other) for row, other in zip(before[1][0], after[1][0], strict=True)].index(False) == 5


def test_does_not_cache_an_object_that_changed_since_it_was_listed(tmp_path, images, network):
    stale = samples_of(images, with_versions=True)
    data = (images / "0005.jpg").read_bytes()
    (images / "0005.jpg").write_bytes(data[:-2] + b"\xff\xd9")  # as long as before, at another time
    with node_with_cache(tmp_path) as node:
        for _ in range(2):
            answer, did = asked(node, images, network, samples=stale)
            assert len(answer[0]) == COUNT - 1
            assert list(answer[3]) == [stale.ids[5]]
        assert (did["cache_hits"], did["cache_misses"]) == (COUNT - 1, 1)


def test_does_not_cache_samples_without_a_version(tmp_path, images, network):
    with node_with_cache(tmp_path) as node:
        for _ in range(2):
            _, did = asked(node, images, network, samples=samples_of(images))
            assert did["cache_hits"] == 0
        assert node.statistics().cache.kept == 0


def test_other_preprocessing_and_other_cuts_miss_the_cache(tmp_path, images, network):
    other = preprocess()
    other = Preprocess(steps=(*other.steps[:-1], replace(other.steps[-1], mean=(120.0,) * 3)))
    with node_with_cache(tmp_path) as node:
        asked(node, images, network)
        assert asked(node, images, network, preprocess=other.to_json())[1]["cache_hits"] == 0
        assert asked(node, images, network, cut=2)[1]["cache_hits"] == 0
        assert asked(node, images, small_network(width=16))[1]["cache_hits"] == 0


def test_caches_only_random_views_that_recur(tmp_path, images, network):
    steps = preprocess().steps
    flips = Preprocess(steps=(*steps[:-1], RandomHorizontalFlip(0.5), steps[-1])).to_json()
    with node_with_cache(tmp_path) as node:
        fresh = View(seed=1, epoch=0)
        first, _ = asked(node, images, network, preprocess=flips, view=fresh)
        assert node.statistics().cache.kept == 0
        again = replace(fresh, recurs=True)
        second, _ = asked(node, images, network, preprocess=flips, view=again)
        third, did = asked(node, images, network, preprocess=flips, view=again)
        assert did == {"cache_hits": COUNT, **NOTHING}
        other = replace(again, epoch=1)
        fourth, did = asked(node, images, network, preprocess=flips, view=other)
        assert did["cache_hits"] == 0
    assert same(first, second)
    assert same(first, third)
    assert not same(first, fourth)


def test_refuses_data_that_is_not_served_even_if_it_is_cached(tmp_path, images, network):
    make_images(tmp_path / "elsewhere", 3)
    with node_with_cache(tmp_path, images, tmp_path / "elsewhere") as node:
        asked(node, images, network)
    with node_with_cache(tmp_path, tmp_path / "elsewhere") as node, pytest.raises(BadRequest, match="does not serve"):
        asked(node, images, network)


def test_a_tenant_shares_cached_features_only_of_data_that_it_may_read(tmp_path, images, network):
    others = make_images(tmp_path / "elsewhere", 3)
    digest, body = artifact_of(network)
    tokens = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("ann", "bob", "cy")}
    tenants = [TenantSettings(name=name, token_sha256=token) for name, token in tokens.items()]
    tenants[2] = replace(tenants[2], roots=(others.as_uri(),))
    settings = NodeSettings(
        memory_bytes=128 << 20, device_batch=8, cache_folder=str(tmp_path / "cache"), tenants=tuple(tenants)
    )
    samples = samples_of(images, with_versions=True)
    wanted = request(images, network.cuts[-1].number, prefix=digest, samples=samples)
    with Node(settings, (images.as_uri(), others.as_uri())) as node:
        node.put_prefix(digest, body)
        first = joined(node.features(wanted, node.admit(account=node.identify("ann"))))
        second = joined(node.features(wanted, node.admit(account=node.identify("bob"))))
        assert node.statistics().tenants["bob"].totals.cache_hits == COUNT
        with pytest.raises(BadRequest):
            node.features(wanted, node.admit(account=node.identify("cy")))
    assert same(first, second)


def test_hits_stay_within_the_smallest_memory(tmp_path, images, network):
    with node_with_cache(tmp_path, memory_bytes=64 << 20) as node:
        first, _ = asked(node, images, network, cut=1)
        second, did = asked(node, images, network, cut=1)
        assert did["cache_hits"] == COUNT
    assert same(first, second)


def test_a_cache_hit_over_http_equals_one_in_the_process(tmp_path, images, network):
    digest, _ = artifact_of(network)
    with node_with_cache(tmp_path) as node:
        expected, _ = asked(node, images, network)
        with served(node) as url:
            transport = HttpTransport(url)
            samples = samples_of(images, with_versions=True)
            wanted = request(images, network.cuts[-1].number, prefix=digest, samples=samples)
            assert same(joined(transport.features(wanted)), expected)
            assert transport.node_statistics()["totals"]["cache_hits"] == COUNT
            assert transport.node_statistics()["cache"]["hits"] == COUNT
            transport.close()


def test_the_cache_shows_in_the_metrics(tmp_path, images, network):
    with node_with_cache(tmp_path) as node:
        asked(node, images, network)
        asked(node, images, network)
        text = metrics_text(node.statistics()).decode()
    values = {sample.name: sample.value for family in text_string_to_metric_families(text) for sample in family.samples}
    assert values["frostline_node_cache_hits_total"] == COUNT
    assert values["frostline_node_cache_budget_bytes"] == 32 << 20


COUNTED = ("cache_hits", "cache_misses", "bytes_read", "decode_s", "compute_s")
NOTHING_OF_SHARED_CACHE = {"cache_misses": 0, "bytes_read": 0, "decode_s": 0, "compute_s": 0}


@pytest.fixture
def shared(tmp_path):
    (tmp_path / "shared").mkdir()
    return (tmp_path / "shared").as_uri()


def node_at(url, *roots, **settings):
    wanted = NodeSettings(memory_bytes=128 << 20, device_batch=8, shared_cache=url, shared_cache_wait_s=60, **settings)
    return Node(wanted, tuple(root.as_uri() for root in roots))


def asked_of_shared_cache(node, images, network):
    """The answer to a request, and what the node did for it."""
    digest, body = artifact_of(network)
    node.put_prefix(digest, body)
    samples = samples_of(images, with_versions=True)
    before = node.statistics().totals
    answer = joined(node.features(request(images, network.cuts[-1].number, prefix=digest, samples=samples)))
    after = node.statistics().totals
    assert is_idle(node)
    assert within_budget(node)
    return answer, {name: getattr(after, name) - getattr(before, name) for name in COUNTED}


def computed(images, network):
    with Node(NodeSettings(memory_bytes=128 << 20, device_batch=8), (images.as_uri(),)) as plain:
        return asked_of_shared_cache(plain, images, network)[0]


def test_a_second_node_computes_nothing_and_copies_shared_features_to_its_disk(tmp_path, images, network, shared):
    with node_at(shared, images, cache_folder=str(tmp_path / "one")) as node:
        first, did = asked_of_shared_cache(node, images, network)
        assert did["cache_misses"] == COUNT
    with node_at(shared, images, cache_folder=str(tmp_path / "other")) as node:
        second, did = asked_of_shared_cache(node, images, network)
        assert did == {"cache_hits": COUNT, **NOTHING_OF_SHARED_CACHE}
        third, did = asked_of_shared_cache(node, images, network)
        assert did == {"cache_hits": COUNT, **NOTHING_OF_SHARED_CACHE}
        assert node.statistics().shared_cache.hits == node.statistics().cache.hits == COUNT
    assert same(first, second)
    assert same(first, third)


def test_over_s3_a_node_without_a_disk_computes_nothing_either(images, network, s3, monkeypatch):
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    s3.make_bucket("shared-features")
    with node_at("s3://shared-features/here", images) as node:
        first, _ = asked_of_shared_cache(node, images, network)
    with node_at("s3://shared-features/here", images) as node:
        second, did = asked_of_shared_cache(node, images, network)
        assert did == {"cache_hits": COUNT, **NOTHING_OF_SHARED_CACHE}
        values = {
            sample.name: sample.value
            for family in text_string_to_metric_families(metrics_text(node.statistics()).decode())
            for sample in family.samples
        }
    assert values["frostline_node_shared_cache_hits_total"] == values["frostline_node_cache_hits_total"] == COUNT
    assert values["frostline_node_shared_cache_bytes"] >= 0
    assert same(first, second)


def test_features_removed_for_another_nodes_are_computed_again(tmp_path, images, network, shared):
    other_network = small_network(width=16)
    with node_at(shared, images) as node:
        expected, _ = asked_of_shared_cache(node, images, network)
    objects = tmp_path / "shared"
    bound_bytes = 2 * sum(path.stat().st_size for path in objects.rglob("*.rows1"))
    with node_at(shared, images) as node:
        _, did = asked_of_shared_cache(node, images, network)
        assert did["cache_hits"] == COUNT
        until(lambda: list(objects.rglob("used")))  # noted that they are in use
        for path in objects.rglob("*"):
            os.utime(path, (1000, 1000))
        with node_at(shared, images, shared_cache_bytes=bound_bytes) as other:
            asked_of_shared_cache(other, images, other_network)
        assert other.statistics().shared_cache.cleared
        assert sum(path.stat().st_size for path in objects.rglob("*.rows1")) <= bound_bytes
        answer, did = asked_of_shared_cache(node, images, network)
        assert did["cache_misses"] == COUNT
        assert node.statistics().shared_cache.failed == 0
    assert same(answer, expected)


def test_damaged_shared_features_are_computed_again(tmp_path, images, network, shared):
    with node_at(shared, images) as node:
        asked_of_shared_cache(node, images, network)
    (path,) = (tmp_path / "shared").rglob("*.rows1")
    data = bytearray(path.read_bytes())
    data[-1] ^= 255
    path.write_bytes(data)
    with node_at(shared, images) as node:
        answer, did = asked_of_shared_cache(node, images, network)
        assert (did["cache_hits"], did["cache_misses"]) == (COUNT - 1, 1)
        assert node.statistics().shared_cache.damaged == 1
    assert same(answer, computed(images, network))


def test_a_missing_store_only_costs_the_hits(images, network, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "nothing")
    with node_at("s3://nowhere/at/all", images) as node:
        answer, did = asked_of_shared_cache(node, images, network)
        assert did["cache_misses"] == COUNT
    assert node.statistics().shared_cache.kept == 0
    assert node.statistics().shared_cache.failed
    assert same(answer, computed(images, network))


def test_a_removed_folder_only_costs_the_hits(images, network, shared, tmp_path):
    with node_at(shared, images) as node:
        (tmp_path / "shared").rmdir()
        answer, _ = asked_of_shared_cache(node, images, network)
    assert node.statistics().shared_cache.failed
    assert same(answer, computed(images, network))


def test_refuses_a_missing_cache_folder_at_the_start(images, tmp_path):
    with pytest.raises(SettingError, match="no folder"):
        node_at((tmp_path / "missing").as_uri(), images)


def test_nodes_that_serve_other_data_miss_the_cache(tmp_path, images, network, shared):
    others = make_images(tmp_path / "others", COUNT)
    with node_at(shared, images) as node:
        asked_of_shared_cache(node, images, network)
    with node_at(shared, others) as node:
        _, did = asked_of_shared_cache(node, others, network)
        assert did["cache_hits"] == 0
        with pytest.raises(BadRequest, match="does not serve"):
            asked_of_shared_cache(node, images, network)


@pytest.mark.parametrize("place", ["images", "images/features", ""])
def test_refuses_a_cache_inside_a_data_root(tmp_path, images, place):
    with pytest.raises(SettingError, match="must not contain each other"):
        node_at((tmp_path / place).as_uri(), images)


def test_the_memory_of_the_shared_cache_is_part_of_the_budget(images, shared):
    with node_at(shared, images) as node, Node(replace(node.settings, shared_cache=None), ()) as plain:
        shares = [sum(pool.total_bytes for pool in served.statistics().memory.values()) for served in (node, plain)]
    assert shares[0] == pytest.approx(shares[1] * 15 / 16, rel=1e-3)
