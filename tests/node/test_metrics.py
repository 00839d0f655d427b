"""The node's metrics: the page that lists them and the dashboard that draws them name what a live scrape has."""

from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from frostline.core.config import NodeSettings
from frostline.node import Node
from frostline.node.http.app import make_app, metrics_text
from frostline.node.statistics import BOUNDS_S, STAGES, Counters
from frostline.preprocess.decoders import DecoderStatistics
from frostline.stores.disk_tier import TierStatistics
from support import metric_pages
from support.dashboards import check_queries, dashboard
from support.nodes import artifact_of, joined, make_images, request, samples_of, small_network

COUNT = 12


@pytest.fixture(scope="module")
def scraped(tmp_path_factory):
    """Metrics by name, after a request of frozen layers, at a node that keeps features; and its own statistics.

    Only a store away from the node gives it a local tier, and only tenants decoders: both stand beside the scrape.
    """
    folder = tmp_path_factory.mktemp("node")
    images, digest = make_images(folder / "images", COUNT), None
    (folder / "shared").mkdir()
    settings = NodeSettings(
        memory_bytes=128 << 20,
        device_batch=8,
        cache_folder=str(folder / "cache"),
        shared_cache=(folder / "shared").as_uri(),
        shared_cache_wait_s=60,
    )
    network = small_network()
    digest, body = artifact_of(network)
    with Node(settings, (images.as_uri(),)) as node, TestClient(make_app(node)) as client:
        node.put_prefix(digest, body)
        samples = samples_of(images, with_versions=True)
        wanted = request(images, network.cuts[-1].number, prefix=digest, samples=samples)
        assert len(joined(node.features(wanted))[0]) == COUNT
        text = client.get("/v1/metrics").text
        statistics = node.statistics()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    apart = DecoderStatistics(confined_by="seccomp", started=1, ended={"time": 1})
    with_tier = replace(statistics, local_tier=TierStatistics(budget_bytes=1), decoders=apart)
    for family in text_string_to_metric_families(metrics_text(with_tier).decode()):
        if family.name.startswith(("frostline_node_local_tier", "frostline_node_decoders")):
            families[family.name] = family
    return families, statistics


def test_the_page_lists_every_metric_of_a_node_with_its_kind_and_unit_and_no_other(scraped):
    families, _ = scraped
    assert len(families) > 60
    assert metric_pages.listed("frostline_node_") == metric_pages.scraped(families.values())


def test_every_query_of_the_dashboard_names_metrics_and_labels_that_a_scrape_has(scraped):
    families, _ = scraped
    assert check_queries("frostline_node_", families.values()) > 10


def test_each_panel_of_the_dashboard_has_a_place_of_its_own():
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells


def test_every_stage_of_a_batch_is_timed_and_adds_up_to_the_seconds_that_are_counted(scraped):
    families, statistics = scraped
    found = {stage: sum(statistics.latencies[stage].counts) for stage in STAGES}
    assert found["read"] >= 1
    assert found["decode"] >= 1
    assert found["device_wait"] >= 2, "twelve rows in batches of eight"
    assert found["compute"] == statistics.totals.runs
    assert found["send"] == statistics.totals.batches
    assert statistics.latencies["read"].seconds == pytest.approx(statistics.totals.read_s)
    assert statistics.latencies["decode"].seconds == pytest.approx(statistics.totals.decode_s)
    assert statistics.latencies["compute"].seconds == pytest.approx(statistics.totals.compute_s)
    samples = families["frostline_node_stage_seconds"].samples
    for stage in STAGES:
        mine = [sample for sample in samples if sample.labels["stage"] == stage]
        buckets = [sample.value for sample in mine if sample.name.endswith("_bucket")]
        (count,) = [sample.value for sample in mine if sample.name.endswith("_count")]
        assert buckets == sorted(buckets), "they are cumulative"
        assert len(buckets) == len(BOUNDS_S) + 1
        assert buckets[-1] == count == found[stage]


def test_a_latency_is_counted_in_the_bucket_whose_bound_it_does_not_pass():
    counters = Counters()
    counters.observe("send", BOUNDS_S[0], BOUNDS_S[1], 1e-9, BOUNDS_S[-1] + 1)
    latency = counters.latencies()["send"]
    assert latency.counts[0] == 2
    assert latency.counts[1] == latency.counts[-1] == 1
    assert sum(latency.counts) == 4
    assert latency.seconds == pytest.approx(BOUNDS_S[0] + BOUNDS_S[1] + BOUNDS_S[-1] + 1)


def test_a_tenants_latencies_are_the_nodes():
    whole = Counters()
    tenant = Counters(whole)
    Counters(tenant).add(read_s=0.2, bytes_read=10)
    assert tenant.totals().read_s == whole.totals().read_s == 0.2
    assert sum(whole.latencies()["read"].counts) == 1
    assert sum(tenant.latencies()["read"].counts) == 0
