"""Tenants of a node keep to what a control plane says, and report what they use."""

import time
from contextlib import closing

import pytest

from frostline.control.reporter import ControlLink, node_reporter
from frostline.control.settings import ControlledJob
from frostline.core.config import NodeSettings
from frostline.core.errors import Overloaded, SettingError
from frostline.node import Node
from frostline.node.process import NodeProcess, start_node
from support.control_planes import Clock, control_plane
from support.nodes import artifact_of, joined, make_images, request, small_network, until
from support.tenants import tenant, token_of

JOBS = ControlledJob(name="ann", weight=3.0), ControlledJob(name="bob")


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return make_images(tmp_path_factory.mktemp("images"), 8)


def a_node(images, *tenants):
    return Node(NodeSettings(memory_bytes=96 << 20, device_batch=8, tenants=tenants), (images.as_uri(),))


def compute(node, images, account):
    digest, body = artifact_of(small_network())
    node.put_prefix(digest, body)
    joined(node.features(request(images, 2, digest), node.admit(0, account)))


def test_each_tenant_is_a_job_and_they_divide_the_device_and_the_memory_by_weight(tmp_path, images):
    clock = Clock()
    with (
        a_node(images, tenant("ann"), tenant("bob")) as node,
        control_plane(tmp_path, clock, jobs=JOBS, compute_s_per_s=0.8, memory_bytes=8e6) as (url, state),
        closing(node_reporter(node, ControlLink(url, None))) as reporter,
    ):
        for _ in range(3):
            reporter.report()
            clock.now_s += 1
        shares = {record.report.job: record.report.in_force for record in state.records}
        assert {record.report.kind for record in state.records} == {"node"}
        assert [shares[name].memory_bytes for name in ("ann", "bob")] == pytest.approx([6e6, 2e6])
        pool_bytes = node.statistics().memory["work"].total_bytes
        accounts = {name: node.identify(token_of(name)) for name in ("ann", "bob")}
        assert accounts["bob"].claim(0.0, pool_bytes).max_bytes == pytest.approx(2e6)
        compute(node, images, accounts["ann"])
        reporter.report()
        used = {record.report.job: record.report.used for record in state.records}
        assert used["ann"].compute_s_per_s > 0
        assert used["bob"].compute_s_per_s == 0


def test_a_node_without_tenants_is_one_job_and_leaves_when_it_ends(tmp_path, images):
    clock = Clock()
    with a_node(images) as node, control_plane(tmp_path, clock, compute_s_per_s=0.5) as (url, state):
        with closing(node_reporter(node, ControlLink(f"{url}?job=store", None))) as reporter:
            reporter.begin()
            [record] = state.records
            assert (record.report.job, record.report.kind) == ("store", "node")
            assert node.limits()[0].name == "everybody"
        assert state.records == []


def test_a_share_of_zero_stops_work_until_the_lease_of_a_gone_control_plane_ends(tmp_path, images):
    clock = Clock()
    with a_node(images) as node:
        with control_plane(tmp_path, clock, compute_s_per_s=0.0) as (url, _):
            reporter = node_reporter(node, ControlLink(url, None), clock)
            reporter.report()
            account = node.identify(None)
            account.charge_device(1.0)
            with pytest.raises(Overloaded, match="control plane"):
                account.check()
        reporter.report()
        with pytest.raises(Overloaded, match="control plane"):
            account.check()
        clock.now_s += 31
        reporter.report()
        account.check()
        reporter.close()


def test_a_tenant_whose_name_no_job_can_have_is_refused_at_the_start(images):
    with a_node(images, tenant("_ann")) as node, pytest.raises(SettingError, match="tenant of this node"):
        node_reporter(node, ControlLink("http://127.0.0.1:1", None))


def test_a_served_node_follows_the_control_plane_that_is_named(tmp_path, images, monkeypatch):
    settings = NodeSettings(memory_bytes=64 << 20)
    with control_plane(tmp_path, time.time, memory_bytes=8e6) as (url, state):

        def jobs():
            return {record.report.job for record in state.records if record.report.kind == "node"}

        monkeypatch.setenv("FROSTLINE_CONTROL", f"{url}?job=machine")
        with start_node((images.as_uri(),), settings):
            until(lambda: jobs() == {"machine"})
        with start_node((images.as_uri(),), settings, control=f"{url}?job=named"):
            until(lambda: jobs() == {"named"})
        with NodeProcess((images.as_uri(),), settings, "127.0.0.1", 0, reports=False) as own:
            own.start()
            assert jobs() == set()
