"""Jobs near a node are seen there by default, and go on where what the node answers is odd or nothing."""

import itertools
import json
import logging
import threading
import time

import httpx
import numpy as np
import pytest
from starlette.responses import Response
from starlette.routing import Route
from torch import nn

import frostline as fl
from frostline.control.embedded import control_routes, embedded_settings
from frostline.control.messages import Prices
from frostline.core.config import LoaderSettings, NodeSettings
from frostline.core.errors import SettingError
from frostline.jobs.activity import control_address
from frostline.node import Node
from support.nodes import make_images, preprocess, served, until
from support.tenants import header, tenant, token_of

ROWS = 48
SETTINGS = LoaderSettings(control=None, samples_per_request=8)


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return make_images(tmp_path_factory.mktemp("images"), ROWS)


def network():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
    return fl.freeze(model, until="3")


def a_node(images, **settings):
    return Node(NodeSettings(memory_bytes=128 << 20, device_batch=8, trial_s=0, **settings), (images.as_uri(),))


def seen_at(url, headers=None):
    return httpx.get(f"{url}/v1/view", headers=headers, timeout=60).raise_for_status().json()


def test_a_node_in_a_process_of_its_own_shows_jobs_too(shared_node):
    assert {"jobs", "saved", "stages"} <= seen_at(shared_node.url).keys()


def test_a_job_is_seen_at_its_node_by_default_with_the_figures_of_its_statistics(images):
    data = fl.Dataset(images.as_uri())
    with (
        a_node(images) as node,
        served(node) as url,
        fl.offload(network(), data, preprocess=preprocess(), near=url, settings=SETTINGS) as job,
    ):

        def mine():
            found = seen_at(url)["jobs"]
            return found[0]["activity"] if found else None

        assert sum(len(batch) for batch in job.loader(8, epoch=3)) == ROWS
        until(lambda: (said := mine()) and said["samples"] == ROWS and said["plan"])
        until(lambda: mine()["wire_bytes"] == job.statistics().wire_bytes)
        said, done = mine(), job.statistics()
        assert (said["epoch"], said["taken"], said["epoch_samples"]) == (3, ROWS, ROWS)
        assert said["saved"]["bytes"] == pytest.approx(data.samples.encoded_bytes - done.wire_bytes)
        assert said["plan"]["names"] == [cut.name for cut in job.cuts]
        assert said["plan"]["nbytes"][1:] == [cut.bytes_per_sample for cut in job.cuts[1:]]
        assert said["plan"]["cut"] == job.frost_line.number
        until(lambda: mine()["bottleneck"])
        assert mine()["bottleneck"].keys() == {"held_back_by", "says", "gain"}
        job.close()
        view = seen_at(url)
        assert view["jobs"] == []
        left = data.samples.encoded_bytes - job.statistics().wire_bytes
        assert view["saved"]["bytes"] == pytest.approx(left), "what it saved is still known"


def test_a_tenant_sees_its_own_jobs_at_the_node_alone(images):
    with a_node(images, tenants=(tenant("ann"), tenant("bob"))) as node, served(node) as url:
        settings = LoaderSettings(control=None, token=token_of("ann"))
        data = fl.Dataset(images.as_uri())
        with fl.offload(None, data, preprocess=preprocess(), near=url, settings=settings) as job:
            assert sum(len(batch.ids) for batch in job.arrays(8)) == ROWS
            until(lambda: seen_at(url, header("ann"))["jobs"])
            assert seen_at(url, header("bob"))["jobs"] == []
        assert httpx.get(f"{url}/v1/view", timeout=60).status_code == 401


ANSWER = {"version": 9, "settings": {}, "round_s": 1e-9, "lease_s": 1e-9, "notices": []}
SHRINKING = itertools.count(10)


def shrinking(_):
    """Ever less, so that a stage would say without end that it took less."""
    number = next(SHRINKING)
    return Response(json.dumps({**ANSWER, "version": number, "settings": {"memory_bytes": 1e9 / number}}))


ODD = {
    "nothing there": lambda _: Response(status_code=404),
    "no JSON": lambda _: Response(b"\xff\x00<html>"),
    "deep": lambda _: Response(b"[" * 60_000),
    "endless": lambda _: Response(b" " * (1 << 20)),
    "a list": lambda _: Response(b"[1]"),
    "other fields": lambda _: Response(json.dumps({**ANSWER, "version": "x"})),
    "a refusal that is none": lambda _: Response(b"[]", status_code=500),
    "ever less": shrinking,
}


@pytest.fixture(scope="module")
def odd_node(images):
    """A node whose control plane answers what a test puts into the list."""
    answers = []
    routes = [Route("/v1/stages", lambda request: answers[-1](request), methods=["POST"])]
    with a_node(images) as node, served(node, routes=routes) as url:
        yield url, answers


@pytest.mark.parametrize("kind", ODD)
def test_a_job_goes_on_in_silence_whatever_its_node_answers_to_reports(images, odd_node, caplog, kind):
    url, answers = odd_node
    asked = threading.Event()

    def answer(request):
        asked.set()
        return ODD[kind](request)

    answers.append(answer)
    data = fl.Dataset(images.as_uri())
    with caplog.at_level(logging.INFO, "frostline"):
        with fl.offload(None, data, preprocess=preprocess(), near=url, settings=SETTINGS) as job:
            found = np.concatenate([batch.ids for batch in job.arrays(8, shuffle=True)])
            assert asked.wait(60)
            closing_s = time.monotonic()
        assert time.monotonic() - closing_s < 30
    assert sorted(found.tolist()) == sorted(data.samples.ids.tolist())
    assert [record for record in caplog.records if record.name == "frostline.control"] == []


def test_a_named_control_plane_goes_before_the_node_and_none_is_silent():
    near = ["http://store-1:7070"]
    assert control_address(SETTINGS, near, None) == near[0]
    assert control_address(LoaderSettings(control="none"), near, None) is None
    assert control_address(LoaderSettings(control="http://c:7075"), near, None) == "http://c:7075"
    assert control_address(SETTINGS, [], None) is None, "a node in this process"
    assert control_address(SETTINGS, ["unix:///run/io.sock"], None) is None, "an I/O service reports itself"


def test_a_node_bounds_jobs_where_a_file_says_so_by_the_weights_of_its_tenants(images, tmp_path):
    config = tmp_path / "control.toml"
    config.write_text("[capacity]\nbytes_per_s = 1000\n[prices]\nper_gb = 0.1\ncurrency = 'EUR'\n")
    node = NodeSettings(memory_bytes=128 << 20, tenants=(tenant("ann", weight=5000.0), tenant("bob")))
    found = embedded_settings(node, config)
    assert found.weights == {"ann": 1000.0, "bob": 1.0}
    assert found.capacity.bytes_per_s == 1000
    assert found.prices == Prices(per_gb=0.1, currency="EUR")
    assert embedded_settings(node, config, Prices(per_gb=1.0)).prices.per_gb == 1.0
    assert embedded_settings(node).capacity.to_json() == {}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[capacity]\ncompute_s_per_s = 1\n", "by the weights of its tenants"),
        ("[[tenant]]\nname = 'x'\n", "--tenants"),
        ("[prices]\nper_litre = 1\n", "per_litre"),
        ("prices = 3\n", "table \\[prices\\]"),
    ],
)
def test_a_file_for_a_node_that_makes_no_sense_is_refused(tmp_path, text, said):
    config = tmp_path / "control.toml"
    config.write_text(text)
    with pytest.raises(SettingError, match=said):
        embedded_settings(NodeSettings(), config)


def test_a_node_that_is_to_have_no_control_plane_has_none(images, monkeypatch):
    assert embedded_settings(NodeSettings(), control="none") is None
    with pytest.raises(SettingError, match="--prices"):
        embedded_settings(NodeSettings(), None, Prices(), control="none")
    monkeypatch.setenv("FROSTLINE_CONTROL", "none")
    with a_node(images) as node, served(node, routes=control_routes(embedded_settings(node.settings))) as url:
        assert httpx.get(f"{url}/v1/view", timeout=60).status_code == 404
