"""Weights and quotas of a node's tenants while it runs: who may change them, and that they hold at once."""

import logging

import pytest
from starlette.testclient import TestClient

from frostline.batching import FairShares
from frostline.core.config import NodeSettings, TenantSettings
from frostline.core.errors import Overloaded, SettingError
from frostline.node import Node
from frostline.node.http.app import make_app
from frostline.node.statistics import Counters
from frostline.node.tenants import Tenants
from support.tenants import header, tenant

TENANTS = tenant("ann", sees_all=True, may_change=True), tenant("bob", requests=4)


@pytest.fixture
def client(tmp_path):
    settings = NodeSettings(memory_bytes=96 << 20, tenants=TENANTS)
    with Node(settings, (tmp_path.as_uri(),)) as node, TestClient(make_app(node)) as client:
        client.node = node
        yield client


def patch(client, body, name="bob", by="ann"):
    return client.patch(f"/v1/tenants/{name}", headers=header(by), **body)


def test_weight_and_quotas_hold_at_once_and_are_logged(client, caplog):
    with caplog.at_level(logging.INFO, "frostline.node"):
        answer = patch(client, {"json": {"weight": 3, "requests": 1, "device_s_per_s": 0.5}})
        assert patch(client, {"json": {"weight": 3}}).json() == answer.json()
    assert answer.json() == {
        "name": "bob",
        "weight": 3,
        "requests": 1,
        "work_bytes": None,
        "device_s_per_s": 0.5,
        "weight_bytes": None,
    }
    seen = client.get("/v1/statistics", headers=header("ann")).json()
    assert seen["may_change"]
    assert (seen["tenants"]["bob"]["weight"], seen["tenants"]["bob"]["quotas"]["requests"]) == (3, 1)
    bob = client.node.identify("the-token-of-bob")
    with client.node.admit(10, bob), pytest.raises(Overloaded, match="has 1 requests in work"):
        client.node.admit(10, bob)
    [told] = [record.fields for record in caplog.records if record.msg == "tenant_changed"]
    assert (told["by"], told["tenant"], told["before"]["weight"], told["after"]["weight"]) == ("ann", "bob", 1, 3)
    assert patch(client, {"json": {"requests": None}}).json()["requests"] is None
    with client.node.admit(10, bob), client.node.admit(10, bob):
        pass


@pytest.mark.parametrize(
    ("name", "body", "by", "status", "said"),
    [
        ("bob", {"json": {"weight": 3}}, "bob", 403, "tenant bob may change nothing here"),
        ("carl", {"json": {"weight": 3}}, "ann", 404, "there is no tenant 'carl'"),
        ("bob", {"json": {"weight": 0}}, "ann", 400, "weight of tenant bob must be above 0"),
        ("bob", {"json": {"weight": None}}, "ann", 400, "weight takes a number, not None"),
        ("bob", {"json": {"requests": 1.5}}, "ann", 400, "requests takes a whole number"),
        ("bob", {"json": {"device_s_per_s": "much"}}, "ann", 400, "device_s_per_s takes a number"),
        ("bob", {"json": {"name": "eve"}}, "ann", 400, "one or more of weight, requests"),
        ("bob", {"content": b'{"work_bytes": 1e999}'}, "ann", 400, "a finite number"),
        ("bob", {"content": b" " * 5000}, "ann", 413, "a change has at most 4,096 bytes"),
    ],
)
def test_a_change_that_cannot_be_is_refused_with_a_sentence(client, name, body, by, status, said):
    answer = patch(client, body, name, by)
    assert answer.status_code == status
    assert said in answer.json()["message"]


def test_a_node_without_tenants_is_changed_by_nobody(tmp_path):
    with Node(NodeSettings(memory_bytes=96 << 20), (tmp_path.as_uri(),)) as node, TestClient(make_app(node)) as client:
        answer = client.patch("/v1/tenants/everybody", json={"weight": 2})
        assert not client.get("/v1/statistics").json()["may_change"]
    assert answer.status_code == 403
    assert "this node has no tenants" in answer.json()["message"]


def test_a_quota_of_device_seconds_comes_and_goes():
    now_s = 100.0
    tenants = Tenants((tenant("bob"),), Counters(), clock=lambda: now_s)
    bob = tenants.named("bob")
    bob.used(1000.0)
    bob.check()
    bob.change(tenant("bob", device_s_per_s=0.5))
    bob.used(20.0)
    with pytest.raises(Overloaded, match=r"0\.5 device seconds"):
        bob.check()
    bob.change(tenant("bob", device_s_per_s=2.0))
    now_s += 20.0
    bob.check()
    bob.used(1000.0)
    bob.change(tenant("bob"))
    bob.check()


def test_another_weight_divides_what_comes_and_not_what_was():
    shares = FairShares({"ann": 1.0, "bob": 1.0})
    for name in ("ann", "bob"):
        shares.arrive(name)
        shares.charge(name, 8.0)
    shares.change_weight("bob", 4.0)
    assert shares.tag("ann") == shares.tag("bob") == 8.0
    shares.charge("bob", 8.0)
    assert shares.tag("bob") == 10.0


def test_who_may_change_must_see_everybody():
    with pytest.raises(SettingError, match="set sees_all too"):
        TenantSettings(name="ann", token_sha256="0" * 64, may_change=True)
