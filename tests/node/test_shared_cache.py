"""A cache that nodes share: what one node computed, another one reads; whatever happens there, answers stay right."""

import os
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from frostline.core.config import NodeSettings
from frostline.core.errors import BadRequest, SettingError
from frostline.node import Node
from frostline.node.http.app import metrics_text
from support.nodes import (
    artifact_of,
    is_idle,
    joined,
    make_images,
    request,
    same,
    samples_of,
    small_network,
    until,
    within_budget,
)

COUNT = 20
COUNTED = ("cache_hits", "cache_misses", "bytes_read", "decode_s", "compute_s")
NOTHING = {"cache_misses": 0, "bytes_read": 0, "decode_s": 0, "compute_s": 0}


@pytest.fixture(scope="module")
def network():
    return small_network()


@pytest.fixture
def images(tmp_path):
    return make_images(tmp_path / "images", COUNT)


@pytest.fixture
def shared(tmp_path):
    (tmp_path / "shared").mkdir()
    return (tmp_path / "shared").as_uri()


def node_at(url, *roots, **settings):
    wanted = NodeSettings(memory_bytes=128 << 20, device_batch=8, shared_cache=url, shared_cache_wait_s=60, **settings)
    return Node(wanted, tuple(root.as_uri() for root in roots))


def asked(node, images, network):
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
        return asked(plain, images, network)[0]


def test_a_second_node_computes_nothing_and_copies_shared_features_to_its_disk(tmp_path, images, network, shared):
    with node_at(shared, images, cache_folder=str(tmp_path / "one")) as node:
        first, did = asked(node, images, network)
        assert did["cache_misses"] == COUNT
    with node_at(shared, images, cache_folder=str(tmp_path / "other")) as node:
        second, did = asked(node, images, network)
        assert did == {"cache_hits": COUNT, **NOTHING}
        third, did = asked(node, images, network)
        assert did == {"cache_hits": COUNT, **NOTHING}
        assert node.statistics().shared_cache.hits == node.statistics().cache.hits == COUNT
    assert same(first, second)
    assert same(first, third)


def test_over_s3_a_node_without_a_disk_computes_nothing_either(images, network, s3, monkeypatch):
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    s3.make_bucket("shared-features")
    with node_at("s3://shared-features/here", images) as node:
        first, _ = asked(node, images, network)
    with node_at("s3://shared-features/here", images) as node:
        second, did = asked(node, images, network)
        assert did == {"cache_hits": COUNT, **NOTHING}
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
        expected, _ = asked(node, images, network)
    objects = tmp_path / "shared"
    bound_bytes = 2 * sum(path.stat().st_size for path in objects.rglob("*.rows1"))
    with node_at(shared, images) as node:
        _, did = asked(node, images, network)
        assert did["cache_hits"] == COUNT
        until(lambda: list(objects.rglob("used")))  # noted that they are in use
        for path in objects.rglob("*"):
            os.utime(path, (1000, 1000))
        with node_at(shared, images, shared_cache_bytes=bound_bytes) as other:
            asked(other, images, other_network)
        assert other.statistics().shared_cache.cleared
        assert sum(path.stat().st_size for path in objects.rglob("*.rows1")) <= bound_bytes
        answer, did = asked(node, images, network)
        assert did["cache_misses"] == COUNT
        assert node.statistics().shared_cache.failed == 0
    assert same(answer, expected)


def test_damaged_shared_features_are_computed_again(tmp_path, images, network, shared):
    with node_at(shared, images) as node:
        asked(node, images, network)
    (path,) = (tmp_path / "shared").rglob("*.rows1")
    data = bytearray(path.read_bytes())
    data[-1] ^= 255
    path.write_bytes(data)
    with node_at(shared, images) as node:
        answer, did = asked(node, images, network)
        assert (did["cache_hits"], did["cache_misses"]) == (COUNT - 1, 1)
        assert node.statistics().shared_cache.damaged == 1
    assert same(answer, computed(images, network))


def test_a_missing_store_only_costs_the_hits(images, network, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "nothing")
    with node_at("s3://nowhere/at/all", images) as node:
        answer, did = asked(node, images, network)
        assert did["cache_misses"] == COUNT
    assert node.statistics().shared_cache.kept == 0
    assert node.statistics().shared_cache.failed
    assert same(answer, computed(images, network))


def test_a_removed_folder_only_costs_the_hits(images, network, shared, tmp_path):
    with node_at(shared, images) as node:
        (tmp_path / "shared").rmdir()
        answer, _ = asked(node, images, network)
    assert node.statistics().shared_cache.failed
    assert same(answer, computed(images, network))


def test_refuses_a_missing_cache_folder_at_the_start(images, tmp_path):
    with pytest.raises(SettingError, match="no folder"):
        node_at((tmp_path / "missing").as_uri(), images)


def test_nodes_that_serve_other_data_miss_the_cache(tmp_path, images, network, shared):
    others = make_images(tmp_path / "others", COUNT)
    with node_at(shared, images) as node:
        asked(node, images, network)
    with node_at(shared, others) as node:
        _, did = asked(node, others, network)
        assert did["cache_hits"] == 0
        with pytest.raises(BadRequest, match="does not serve"):
            asked(node, images, network)


@pytest.mark.parametrize("place", ["images", "images/features", ""])
def test_refuses_a_cache_inside_a_data_root(tmp_path, images, place):
    with pytest.raises(SettingError, match="must not contain each other"):
        node_at((tmp_path / place).as_uri(), images)


def test_the_memory_of_the_shared_cache_is_part_of_the_budget(images, shared):
    with node_at(shared, images) as node, Node(replace(node.settings, shared_cache=None), ()) as plain:
        shares = [sum(pool.total_bytes for pool in served.statistics().memory.values()) for served in (node, plain)]
    assert shares[0] == pytest.approx(shares[1] * 15 / 16, rel=1e-3)
