"""An I/O service keeps to what a control plane says, and jobs get the same rows from it."""

import time

import pytest

from frostline.config import IoSettings, NodeSettings
from frostline.control.link import ControlLink
from frostline.io_service.addresses import listening_at, unnamed
from frostline.io_service.client.transport import IoTransport
from frostline.io_service.controlled import controlled_service
from frostline.node import Node
from frostline.node.in_process import LocalTransport
from support.control_planes import control_plane
from support.nodes import joined, make_images, request, same, samples_of, until
from support.services import SETTINGS

MIB = 1 << 20


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return make_images(tmp_path_factory.mktemp("images"), 8)


def test_a_service_keeps_to_its_shares_and_its_rows_are_the_same(tmp_path, images):
    url, settings = unnamed(), IoSettings(memory_bytes=8 * MIB)
    asked = request(images, 0, samples=samples_of(images, with_versions=True))
    with (
        Node(NodeSettings(memory_bytes=96 * MIB, device_batch=8), (images.as_uri(),)) as node,
        control_plane(tmp_path, time.time, requests=3.0, bytes_per_s=1e9, memory_bytes=2.0 * MIB) as (plane, state),
        listening_at(url) as listening,
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
