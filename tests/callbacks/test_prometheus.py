"""A job's metrics: those that its page lists, with the figures of its statistics."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import frostline as fl
from frostline.callbacks import JobCollector
from frostline.core.config import LoaderSettings, NodeSettings
from frostline.jobs.statistics import JobStatistics
from frostline.transport import NodeUse
from support.dashboards import check_queries
from support.images import image_folder, tiny_preprocess

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


@pytest.fixture
def job(tmp_path):
    data = fl.Dataset(image_folder(tmp_path / "images", per_class=6))
    settings, node = LoaderSettings(samples_per_request=8), NodeSettings(memory_bytes=1 << 28, device_batch=8)
    with fl.offload(None, data, preprocess=tiny_preprocess(), settings=settings, node=node) as job:
        yield job


def scraped(registry):
    return list(text_string_to_metric_families(generate_latest(registry).decode()))


def test_a_scrape_has_the_figures_of_the_job_as_they_grow(job):
    registry = CollectorRegistry()
    registry.register(JobCollector(job))
    for passes in (1, 2):
        assert sum(len(batch) for batch in job.loader(3)) == 18
        values = {sample.name: sample.value for family in scraped(registry) for sample in family.samples}
        done = job.statistics()
        assert values["frostline_job_samples_total"] == done.samples == 18 * passes
        assert values["frostline_job_from_cache_total"] == done.from_cache
        assert values["frostline_job_stall_seconds_total"] == pytest.approx(done.stall_s)
        assert values["frostline_job_wire_bytes_total"] == done.wire_bytes
    assert check_queries("frostline_job_", scraped(registry)) > 2
    (routed,) = [family for family in scraped(registry) if family.name == "frostline_job_routed_samples"]
    assert {(sample.labels["cut"], sample.labels["codec"]): sample.value for sample in routed.samples} == {
        (str(route.cut), route.codec): samples for route, samples in done.routed
    }


def test_the_page_lists_every_metric_of_a_job_with_its_meaning_and_no_other(job):
    registry = CollectorRegistry()
    registry.register(JobCollector(job))
    page = PAGE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(frostline_job_\w+)`(?: \(by [\w ]+\))? \| (\w+) \| \w* \| (.+) \|$", page, re.MULTILINE)
    assert sorted(rows) == sorted(
        (f"{family.name}{'_total' if family.type == 'counter' else ''}", family.type, family.documentation)
        for family in scraped(registry)
    )


def test_counts_by_node_what_was_asked_of_each():
    uses = (
        NodeUse(url="http://a:1", requests=5, samples=40, failures=2, damaged=1, trouble="it says nothing"),
        NodeUse(url="http://b:1", requests=7, samples=50, retries=2, unreadable=3),
    )
    registry = CollectorRegistry()
    registry.register(JobCollector(SimpleNamespace(statistics=lambda: JobStatistics(nodes=uses, damaged=1))))
    values = {
        (sample.name, sample.labels.get("node")): sample.value
        for family in scraped(registry)
        for sample in family.samples
    }
    assert values["frostline_job_damaged_total", None] == 1
    for name in ("requests", "samples", "retries", "failures", "unreadable", "damaged"):
        for use in uses:
            assert values[f"frostline_job_node_{name}_total", use.url] == getattr(use, name)
    assert [values["frostline_job_node_lost", use.url] for use in uses] == [1, 0]
