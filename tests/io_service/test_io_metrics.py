"""The metrics of an I/O service: served over HTTP where they are asked for, and each of them is on the page."""

import socket
import threading
import time
from contextlib import ExitStack, closing
from types import SimpleNamespace
from urllib.error import HTTPError
from urllib.request import ProxyHandler, build_opener

import pytest
from prometheus_client.parser import text_string_to_metric_families

from frostline.control.reporter import ControlLink
from frostline.core.config import IoSettings, NodeSettings
from frostline.core.errors import SettingError
from frostline.io_service.start import IoCollector, controlled_service, listen_at, serve_metrics, unnamed_address
from frostline.node import Node
from frostline.transport import NODE_COUNTS, NodeUse
from support.control_planes import control_plane
from support.dashboards import check_queries
from support.metric_pages import listed, scraped
from support.nodes import joined, make_images, request, samples_of
from support.servers import free_ports
from support.services import serving_node


def fetched(port, query=""):
    with closing(build_opener(ProxyHandler({})).open(f"http://127.0.0.1:{port}/metrics{query}", timeout=30)) as answer:
        return answer.read().decode()


def test_a_parameter_of_its_address_is_refused_by_its_name():
    [port] = free_ports(1)
    with (
        serve_metrics(f"127.0.0.1:{port}", dict),
        pytest.raises(HTTPError) as refused,
    ):
        fetched(port, "?job=a")
    with refused.value:
        assert refused.value.code == 400
        assert "the address has no field 'job'" in refused.value.read().decode()


def test_they_count_what_the_service_did_and_each_is_on_the_page(tmp_path):
    images = make_images(tmp_path / "images", 4)
    [port] = free_ports(1)
    with (
        Node(NodeSettings(memory_bytes=64 << 20), (images.as_uri(),)) as node,
        serving_node(node) as (service, transport),
        serve_metrics(f"127.0.0.1:{port}", service.statistics),
    ):
        for _ in range(2):
            joined(transport.features(request(images, 0, samples=samples_of(images, with_versions=True))))
        text = fetched(port)
        totals = service.statistics()["totals"]
    assert scraped(text) == listed("frostline_io_")
    assert check_queries("frostline_io_", text) > 2
    values = {
        family.name: [sample.value for sample in family.samples] for family in text_string_to_metric_families(text)
    }
    assert values["frostline_io_samples"] == [totals["samples"]] == [8]
    assert values["frostline_io_cache_hits"] == [4]
    assert values["frostline_io_job_processes"] == [1]


def test_they_count_by_node_what_was_asked_of_each(tmp_path):
    sick = NodeUse(url="http://a:1", requests=5, samples=40, failures=2, damaged=1, trouble="it says nothing")
    uses = (sick, NodeUse(url="http://b:1", requests=7, samples=50, retries=2, unreadable=3))
    several = SimpleNamespace(uses=lambda: uses)
    with (
        control_plane(tmp_path, time.time) as (plane, _),
        listen_at(unnamed_address()) as listening,
        controlled_service(several, IoSettings(), listening, ControlLink(f"{plane}?job=machine", None)) as service,
    ):
        families = {family.name: family for family in IoCollector(service.statistics).collect()}
    for name in NODE_COUNTS:
        counted = families[f"frostline_io_node_{name}"].samples
        assert [(sample.labels["node"], sample.value) for sample in counted] == [
            (use.url, getattr(use, name)) for use in uses
        ]
    assert [sample.value for sample in families["frostline_io_node_lost"].samples] == [1, 0]


@pytest.mark.parametrize("address", ["9101", ":9101", "127.0.0.1:", "127.0.0.1:99999", "127.0.0.1:http"])
def test_an_address_that_makes_no_sense_is_refused(address):
    with pytest.raises(SettingError, match="--metrics takes HOST:PORT"), serve_metrics(address, dict):
        pass


def test_a_port_that_is_taken_is_named():
    [port] = free_ports(1)
    address = f"127.0.0.1:{port}"
    with (
        serve_metrics(address, dict),
        pytest.raises(SettingError, match=f"metrics cannot be served at {address}"),
        serve_metrics(address, dict),
    ):
        pass


@pytest.mark.promise(
    "bounded", mended="endless heads and idle connections took threads and descriptors of an I/O service"
)
def test_a_stranger_who_reaches_them_is_bounded():
    [port] = free_ports(1)
    threads = threading.active_count()
    with serve_metrics(f"127.0.0.1:{port}", dict), ExitStack() as stack:
        for begun in [b"", b"GET /metrics HTTP/1.1\r\n", b"GET /metrics HTTP/1.1\r\nHost: localhost\r\na: "] * 30:
            stack.enter_context(socket.create_connection(("127.0.0.1", port))).sendall(begun)
        endless = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10.0))
        endless.sendall(b"GET /metrics HTTP/1.1\r\n" + b"a: b\r\n" * 200)
        assert endless.recv(65_536).startswith(b"HTTP/1.1 431 ")
        rebound = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10.0))
        rebound.sendall(b"GET /metrics HTTP/1.1\r\nHost: page.example\r\n\r\n")
        assert rebound.recv(65_536).startswith(b"HTTP/1.1 403 ")
        assert threading.active_count() <= threads + 4
