"""What ``frostline top`` shows of nodes: rates between two looks, and those that do not answer."""

import json

import pytest

from frostline.cli import top
from frostline.cli.top import view_of
from frostline.core.config import NodeSettings
from frostline.node import Node
from support.commands import run
from support.nodes import joined, make_images, request, served
from support.servers import free_ports

COUNT = 6


@pytest.fixture
def node(tmp_path):
    images = make_images(tmp_path / "images", COUNT)
    with Node(NodeSettings(memory_bytes=128 << 20), (images.as_uri(),)) as node, served(node) as url:
        yield node, url, images


def statistics(uptime_s, samples, tenants=(), **totals):
    counted = {"samples": samples, "bytes_read": 0, "bytes_sent": 0, "compute_s": 0.0, "cache_hits": 0}
    return {
        "uptime_s": uptime_s,
        "totals": {**counted, "cache_misses": 0, **totals},
        "tenants": {name: {"totals": {"samples": samples}} for name in tenants},
        "memory": {
            "work": {"reserved_bytes": 10, "total_bytes": 40},
            "device": {"reserved_bytes": 0, "total_bytes": 0},
        },
        "requests_in_progress": 3,
        "waiting_for_device": 2,
        "devices_in_service": 2,
    }


def test_rates_are_those_between_two_looks_by_the_nodes_own_clock():
    before = statistics(100.0, 1_000, ["ann"], compute_s=50.0, cache_hits=10)
    now = statistics(
        104.0, 1_200, ["ann", "bob"], compute_s=54.0, cache_hits=40, cache_misses=10, bytes_read=8_000, bytes_sent=400
    )
    view = view_of("http://here", "a machine", before, now)
    assert view.samples_per_s == 50.0
    assert view.read_bytes_per_s == 2_000.0
    assert view.sent_bytes_per_s == 100.0
    assert view.device_share == 0.5, "of two devices"
    assert view.cache_share == 0.75
    assert view.memory == {"work": 0.25}
    assert (view.requests, view.waiting) == (3, 2)
    assert view.tenants == {"ann": 50.0, "bob": 300.0}


def test_a_node_that_was_started_again_counts_from_its_start():
    view = view_of("http://here", "", statistics(100.0, 1_000), statistics(2.0, 50))
    assert view.samples_per_s == 25.0
    assert view.cache_share is None


def test_a_script_gets_what_a_node_did_between_two_looks_as_one_line(capsys, node, monkeypatch):
    node, url, images = node

    def answer_meanwhile(_):
        assert len(joined(node.features(request(images, 1)))[0]) == COUNT

    monkeypatch.setattr(top, "_pause", answer_meanwhile)
    code, out, err = run(capsys, "top", "--near", url, "--once", "--json")
    assert code == 0, err
    (line,) = out.splitlines()
    (view,) = json.loads(line)
    assert view["url"] == url
    assert view["error"] is None
    assert view["samples_per_s"] > 0
    assert view["read_bytes_per_s"] > 0
    assert "work" in view["memory"]


def test_a_table_names_nodes_that_do_not_answer_beside_those_that_do(capsys, node):
    _, url, _ = node
    (port,) = free_ports(1)
    gone = f"http://127.0.0.1:{port}"
    code, out, _ = run(capsys, "top", "--near", url, "--near", gone, "--once", "--every", "0.05")
    assert code == 1
    assert "samples/s" in out
    lines = [line for line in out.splitlines() if url in line or gone in line]
    assert "no answer" not in lines[0]
    assert "no answer" in lines[1]
