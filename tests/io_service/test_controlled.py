"""An I/O service keeps to what a control plane says, and jobs get the same rows from it."""

import time

import pytest

import frostline as fl
from frostline.control.reporter import ControlLink
from frostline.core.config import IoSettings, LoaderSettings, NodeSettings
from frostline.io_service.client import IoTransport
from frostline.io_service.service import IoService
from frostline.io_service.start import controlled_service, listen_at, unnamed_address
from frostline.node import Node
from frostline.node.in_process import LocalTransport
from support.control_planes import control_plane
from support.images import tiny_preprocess
from support.nodes import joined, make_images, request, same, samples_of, until
from support.services import SETTINGS

MIB = 1 << 20


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return make_images(tmp_path_factory.mktemp("images"), 8)


def test_a_service_keeps_to_its_shares_and_its_rows_are_the_same(tmp_path, images):
    url, settings = unnamed_address(), IoSettings(memory_bytes=8 * MIB)
    asked = request(images, 0, samples=samples_of(images, with_versions=True))
    with (
        Node(NodeSettings(memory_bytes=96 * MIB, device_batch=8), (images.as_uri(),)) as node,
        control_plane(tmp_path, time.time, requests=3.0, bytes_per_s=1e9, memory_bytes=2.0 * MIB) as (plane, state),
        listen_at(url) as listening,
    ):
        link = ControlLink(f"{plane}?job=machine", None)
        with controlled_service(LocalTransport(node), settings, listening, link) as service:
            stages = {record.report.kind: record for record in state.records}
            assert {record.report.job for record in state.records} == {"machine"}
            assert set(stages) == {"io", "cache"}
            until(lambda: service.statistics()["cache"]["budget_bytes"] > 0)  # it waits until the other holds less
            transport = IoTransport(url, SETTINGS)
            assert same(joined(transport.features(asked)), joined(node.features(asked)))
            transport.close()
            stands = service.statistics()
            budgets = stands["window"]["budget_bytes"] + stands["cache"]["budget_bytes"]
            assert budgets <= 2 * MIB
            assert stands["cache"]["bytes"] > 0
            service.bound_cache(0)
            assert service.statistics()["cache"]["bytes"] == 0
        assert state.records == []


@pytest.mark.parametrize("does_report", [True, False])
def test_bytes_of_a_job_and_its_service_are_counted_once(tmp_path, images, does_report):
    url, settings = unnamed_address(), IoSettings(memory_bytes=8 * MIB)
    with (
        Node(NodeSettings(memory_bytes=96 * MIB, device_batch=8), (images.as_uri(),)) as node,
        control_plane(tmp_path, time.time, requests=8.0, bytes_per_s=1e9, memory_bytes=64.0 * MIB) as (plane, state),
        listen_at(url) as listening,
        service_at(node, settings, listening, f"{plane}?job=machine" if does_report else None),
    ):
        own = LoaderSettings(control=f"{plane}?job=own", cache_bytes=0)
        with fl.offload(None, fl.Dataset(images), preprocess=tiny_preprocess(), near=url, settings=own) as job:
            assert sum(len(batch.labels) for batch in job.loader(4)) == 8
            until(lambda: sum(moved(state).values()) > 0)
            assert moved(state)["own"] == 0 if does_report else moved(state)["own"] > 0
            (report,) = [record.report for record in state.records if record.report.job == "own"]
            assert (report.demand.bytes_per_s, report.demand.requests) == (0, 0) or not does_report
            assert report.demand.memory_bytes == own.window_bytes


def service_at(node, settings, listening, control):
    if control is None:
        return IoService(LocalTransport(node), settings, listening)
    return controlled_service(LocalTransport(node), settings, listening, ControlLink(control, None))


def moved(state):
    reports = [record.report for record in state.records]
    return {job: sum(report.moved_bytes for report in reports if report.job == job) for job in ("own", "machine")}
