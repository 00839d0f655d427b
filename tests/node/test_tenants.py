"""Tenants of a node: who they are, what they may use, and how that changes while it runs.

Access to a node: tokens, quotas, reserved slots, roots and deadlines, partly over HTTP.

Weights and quotas of a node's tenants while it runs: who may change them, and that they hold at once.
"""

import hashlib
import http.client
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace

import httpx
import numpy as np
import pytest
from starlette.testclient import TestClient

from frostline.batching import FairShares
from frostline.client.http import HttpTransport
from frostline.control.app import ControlPlane
from frostline.control.settings import read_control_settings
from frostline.control.state import ControlState
from frostline.control.store import RecordStore
from frostline.core.audit import AuditLog
from frostline.core.config import ACTIONS, BATCHING, LoaderSettings, NodeSettings, TenantSettings
from frostline.core.declared import PARSED_BYTES
from frostline.core.errors import OverBudget, Overloaded, SettingError, Unauthenticated
from frostline.core.tokens import FollowedFile
from frostline.models.artifact import digest_of, write_prefix
from frostline.node import Node
from frostline.node.http.app import make_app
from frostline.node.statistics import Counters
from frostline.node.tenants import Tenants, read_tenants
from frostline.wire.connection import address_of
from frostline.wire.messages import ProfileRequest
from support.nodes import (
    artifact_of,
    busy_device,
    is_idle,
    joined,
    make_images,
    request,
    samples_of,
    served,
    small_network,
    until,
    within_budget,
)
from support.tenants import header, tenant, token_of

pytestmark = pytest.mark.promise("apart", mended="announced bodies of one tenant stopped all others")

MEMORY = 96 << 20


def node_for(images, *tenants, **settings):
    return Node(NodeSettings(memory_bytes=MEMORY, tenants=tenants, **settings), (images.as_uri(),))


@contextmanager
def client_of(node):
    with node, TestClient(make_app(node), raise_server_exceptions=False) as client:
        yield client


@pytest.fixture
def images(tmp_path):
    return make_images(tmp_path / "images", 6)


def test_a_node_with_tenants_refuses_everybody_else(images):
    with client_of(node_for(images, tenant("ann"))) as client:
        message = request(images, 1).to_json()
        for headers in ({}, {"Authorization": "Bearer nonsense"}, {"Authorization": f"Basic {token_of('ann')}"}):
            for method, path in (
                ("POST", "/v1/features"),
                ("POST", "/v1/profiles"),
                ("PUT", "/v1/prefixes/" + "0" * 64),
                ("GET", "/v1/statistics"),
                ("GET", "/v1/metrics"),
                ("GET", "/v1/health"),
            ):
                answer = client.request(method, path, headers=headers, json=message)
                assert answer.status_code == 401
                assert answer.headers["WWW-Authenticate"] == "Bearer"
                assert answer.json()["error"] == "Unauthenticated"
                assert "nonsense" not in answer.text
        assert client.post("/v1/features", json=message, headers=header("ann")).status_code == 200
        assert client.get("/v1/openapi.json").status_code == 200


def test_a_tenant_reads_only_under_its_roots(images, tmp_path):
    other = make_images(tmp_path / "other", 2)
    known = tenant("ann", roots=(other.as_uri(),)), tenant("bob")
    node = Node(NodeSettings(memory_bytes=MEMORY, tenants=known), (tmp_path.as_uri(),))
    with client_of(node) as client:

        def status(name, folder):
            return client.post("/v1/features", json=request(folder, 1).to_json(), headers=header(name))

        assert status("ann", other).status_code == 200
        refused = status("ann", images)
        assert refused.status_code == 400
        assert str(images) not in refused.json()["message"].split("it serves")[1]
        assert status("bob", images).status_code == 200
        assert client.get("/v1/health", headers=header("ann")).json()["roots"] == [other.as_uri()]


def test_a_root_of_a_tenant_that_the_node_does_not_serve_stays_unserved(images, tmp_path):
    with client_of(node_for(images, tenant("ann", roots=(tmp_path.as_uri(),)))) as client:
        outside = make_images(tmp_path / "outside", 1)
        answer = client.post("/v1/features", json=request(outside, 1).to_json(), headers=header("ann"))
        assert answer.status_code == 400


def test_a_tenant_sees_its_own_statistics_and_an_overseer_everybodys(images):
    known = tenant("ann"), tenant("bob", weight=2.0), tenant("eve", sees_all=True)
    with client_of(node_for(images, *known)) as client:
        client.post("/v1/features", json=request(images, 1).to_json(), headers=header("bob"))
        seen = {name: client.get("/v1/statistics", headers=header(name)).json() for name in ("ann", "bob", "eve")}
        assert list(seen["ann"]["tenants"]) == ["ann"]
        assert list(seen["eve"]["tenants"]) == ["ann", "bob", "eve"]
        assert seen["bob"]["tenants"]["bob"]["totals"]["samples"] == 6
        assert seen["ann"]["tenants"]["ann"]["totals"]["samples"] == 0
        assert seen["ann"]["totals"]["samples"] == 6
        metrics = client.get("/v1/metrics", headers=header("bob")).text
        assert 'frostline_node_tenant_samples_total{tenant="bob"} 6.0' in metrics
        assert 'frostline_node_tenant_weight{tenant="bob"} 2.0' in metrics
        assert "ann" not in metrics


def test_what_a_tenant_cannot_read_is_told_to_nobody_else_and_keeps_nobody_else_away(images):
    known = tenant("ann"), tenant("bob"), tenant("eve")
    missing = replace(samples_of(images), objects=[f"patients/{number}.jpg" for number in range(6)])
    with client_of(node_for(images, *known)) as client:

        def ask_for_what_is_missing(name):
            for _ in range(2):  # eight in a row are suspicious
                message = request(images, 1, samples=missing).to_json()
                client.post("/v1/features", json=message, headers=header(name))

        def trouble(name):
            return client.get("/v1/health", headers=header(name)).json()["trouble"]

        ask_for_what_is_missing("ann")
        assert trouble("ann").startswith("it could not read the last 12 samples, such as patients/")
        assert trouble("bob") == ""
        assert client.get("/v1/ready").json() == {"ready": True, "why": ""}
        ask_for_what_is_missing("bob")
        assert trouble("eve") == "stores of 2 tenants cannot be read"
        assert client.get("/v1/ready").json() == {"ready": False, "why": "stores of 2 tenants cannot be read"}
        for image in images.iterdir():
            image.unlink()
        images.rmdir()
        assert str(images) not in client.get("/v1/ready").text


def test_a_quota_of_requests_refuses_only_its_tenant(images):
    node = node_for(images, tenant("ann", requests=1), tenant("bob"))
    with client_of(node) as client:
        message = request(images, 1).to_json()
        with node.admit(0, node.identify(token_of("ann"))):
            answer = client.post("/v1/features", content=b"not even JSON", headers=header("ann"))
            assert answer.status_code == 429
            assert int(answer.headers["Retry-After"]) >= 1
            assert "ann" in answer.json()["message"]
            assert client.post("/v1/features", json=message, headers=header("bob")).status_code == 200
        assert client.post("/v1/features", json=message, headers=header("ann")).status_code == 200
        assert node.statistics().tenants["ann"].totals.refused_quota == 1


def test_a_tenant_beyond_its_device_seconds_waits_until_they_are_saved_up():
    now = [0.0]
    tenants = Tenants([tenant("ann", device_s_per_s=0.1), tenant("bob")], Counters(), clock=lambda: now[0])
    account = tenants.identify(token_of("ann"))
    account.check()
    account.charge_device(0.9)
    account.check()
    account.charge_device(0.6)  # one second's worth was there, and half a second is owed
    with pytest.raises(Overloaded, match="device seconds") as refused:
        account.check()
    assert refused.value.retry_after_s == pytest.approx(5.0)
    now[0] += 5.1
    account.check()


def test_a_tenant_keeps_to_a_share_that_changes_while_the_node_runs():
    now = [0.0]
    tenants = Tenants([tenant("ann"), tenant("bob")], Counters(), clock=lambda: now[0])
    account = tenants.identify(token_of("ann"))
    account.bound(0.5, 1000)
    account.check()
    assert not account.was_held_back()
    account.charge_device(5.0)  # one second's worth was there, and four are owed
    with pytest.raises(Overloaded, match="control plane") as refused:
        account.check()
    assert refused.value.retry_after_s == 1.0, "by then the share may be another one"
    assert account.was_held_back()
    assert account.claim(0.0, 1 << 20).max_bytes == 1000
    account.bound(4.0, 1 << 30)
    now[0] += 1.1
    account.check()
    assert not account.was_held_back()
    assert account.claim(0.0, 1 << 20).max_bytes == 1 << 19
    account.bound(0.0, 0)
    account.charge_device(1.0)
    with pytest.raises(Overloaded, match="control plane"):
        account.check()
    tenants.identify(token_of("bob")).check()


def test_only_the_tenant_at_its_memory_limit_waits(tmp_path):
    images = make_images(tmp_path / "images", 20)
    # Eight samples take 200 kB while they are decoded, and half of that until they are sent.
    with node_for(images, tenant("ann", work_bytes=250_000), tenant("bob")) as node:
        ann, bob = (node.identify(token_of(name)) for name in ("ann", "bob"))
        first = node.features(request(images, 1), node.admit(0, ann))
        next(first)
        second = node.features(request(images, 1), node.admit(0, ann))
        got = []
        thread = threading.Thread(target=lambda: got.append(joined(second)[0]))
        thread.start()
        until(lambda: node.statistics().memory["work"].waiting == 1)
        with pytest.raises(Overloaded, match="memory"):
            node.admit(0, ann)
        assert len(joined(node.features(request(images, 1), node.admit(0, bob)))[0]) == 20
        assert got == []
        first.close()
        thread.join(60)
        assert len(got[0]) == 20
        node.admit(0, ann).close()
        assert is_idle(node)


def test_a_tenants_quota_evicts_only_its_own_prefixes(images):
    first, second, third, foreign = (artifact_of(small_network(width=width)) for width in (100, 101, 102, 103))
    quota = len(second[1]) + len(third[1])
    with node_for(images, tenant("ann", weight_bytes=quota), tenant("bob", weight_bytes=1000)) as node:
        ann, bob = (node.identify(token_of(name)) for name in ("ann", "bob"))

        def upload(artifact, account, longest_s=60):
            digest, body = artifact
            with node.upload(digest, len(body), account) as upload:
                upload.begin(longest_s)
                upload.write(body)
                upload.finish()

        with pytest.raises(OverBudget, match="bob"):
            upload(foreign, bob)
        node.put_prefix(*foreign)
        upload(first, ann)
        upload(second, ann)
        assert node.statistics().tenants["ann"].weight_bytes <= quota
        upload(third, ann)
        assert [node.holds_prefix(digest) for digest, _ in (foreign, first, second, third)] == [True, False, True, True]
        using = [node.features(request(images, 2, digest), node.admit(0, ann)) for digest, _ in (second, third)]
        with pytest.raises(Overloaded, match="ann"):
            upload(first, ann, 0.2)
        for answer in using:
            answer.close()


def test_reserves_a_slot_for_every_tenant_without_requests_under_way(images):
    with node_for(images, tenant("ann"), tenant("bob"), tenant("cat"), max_requests=5) as node:
        ann, bob, cat = (node.identify(token_of(name)) for name in ("ann", "bob", "cat"))
        inside = [node.admit(0, ann) for _ in range(3)]
        with pytest.raises(Overloaded, match="busy"):
            node.admit(0, ann)
        inside += [node.admit(0, bob), node.admit(0, cat)]
        with pytest.raises(Overloaded):
            node.admit(0, bob)
        for admission in inside:
            admission.close()


@pytest.mark.parametrize(("many", "maximum", "each"), [(4, 4, 2), (8, 8, 4), (40, 8, 4), (3, 1, 1)])
def test_any_number_of_tenants_has_places_and_one_takes_half_of_them_at_most(images, many, maximum, each):
    names = [f"t{number}" for number in range(many)]
    given = NodeSettings(memory_bytes=512 << 20, tenants=tuple(map(tenant, names)), max_requests=maximum)
    with Node(given, (images.as_uri(),)) as node, ExitStack() as stack:
        accounts = [node.identify(token_of(name)) for name in names]
        for _ in range(each):
            stack.enter_context(node.admit(0, accounts[0]))
        if each < maximum:
            with pytest.raises(Overloaded, match="busy"):
                node.admit(0, accounts[0])
        for account in accounts[1 : 1 + maximum - each]:
            stack.enter_context(node.admit(0, account))
        with pytest.raises(Overloaded, match="busy"):
            node.admit(0, accounts[-1])


def test_announced_bodies_leave_every_other_tenant_its_part(images):
    tenants = [tenant(name) for name in ("ann", "eve", "bob")]
    with node_for(images, *tenants, max_requests=64) as node, ExitStack() as stack:
        largest = (node.statistics().memory["messages"].total_bytes // 2 - (1 << 20)) // PARSED_BYTES
        for name in ("ann", "eve"):
            with suppress(Overloaded):
                for _ in range(64):
                    stack.enter_context(node.admit(largest, node.identify(token_of(name))))
        for _ in range(3):
            node.admit(8 << 10, node.identify(token_of("bob"))).close()
        with pytest.raises(OverBudget, match="ask for fewer samples"):
            node.admit(node.statistics().memory["messages"].total_bytes // PARSED_BYTES, node.identify(token_of("bob")))


def test_cancels_an_answer_at_its_deadline(images):
    network = small_network()
    digest, body = artifact_of(network)
    message = request(images, network.cuts[-1].number, digest).to_json()
    begun, go = threading.Event(), threading.Event()
    node = node_for(images)
    with client_of(node) as client:
        node.put_prefix(digest, body)
        with busy_device(node, images, digest, begun, go):
            answer = client.post("/v1/features", json=message, headers={"Frostline-Deadline": "0.3"})
            assert answer.status_code == 503
            assert "0.3 s" in answer.json()["message"]
            assert node.statistics().totals.expired == 1
        answer = client.post("/v1/features", json=message, headers={"Frostline-Deadline": "60"})
        assert answer.status_code == 200
        until(lambda: is_idle(node))
        assert node.statistics().totals.expired == 1


def test_rows_of_two_tenants_in_one_run_give_the_same_features(images):
    network = small_network()
    digest, body = artifact_of(network)
    message = request(images, network.cuts[-1].number, digest)
    with node_for(images, tenant("ann"), tenant("bob")) as node:
        node.put_prefix(digest, body)
        ann, bob = (node.identify(token_of(name)) for name in ("ann", "bob"))
        alone = joined(node.features(message, node.admit(0, ann)))
        with ThreadPoolExecutor(2) as threads:
            with busy_device(node, images, digest, threading.Event(), threading.Event()):
                asked = [
                    threads.submit(lambda account=account: joined(node.features(message, node.admit(0, account))))
                    for account in (ann, bob)
                ]
                until(lambda: node.statistics().waiting_for_device == 3)
            for answer in asked:
                ids, (features,), _, _ = answer.result(60)
                assert ids == alone[0]
                assert np.array_equal(features, alone[1][0])
        assert node.statistics().totals.rows_merged == 6


@pytest.mark.parametrize("batching", BATCHING)
def test_every_rule_gives_the_same_features_within_the_budget(images, batching):
    network = small_network()
    digest, body = artifact_of(network)
    message = request(images, network.cuts[-1].number, digest)
    found = []
    for rule in ("fair", batching):
        with node_for(images, batching=rule) as node:
            node.put_prefix(digest, body)
            with ThreadPoolExecutor(4) as threads:
                answers = list(threads.map(lambda _, node=node: joined(node.features(message)), range(8)))
            found += [answer[1][0] for answer in answers]
            assert within_budget(node)
            assert is_idle(node)
    assert all(np.allclose(values, found[0], rtol=1e-5, atol=1e-6) for values in found)


def test_cancels_a_measurement_when_its_client_disconnects(images):
    network = small_network()
    digest, body = artifact_of(network)
    text = json.dumps(ProfileRequest(features=request(images, 2, digest)).to_json()).encode()
    with node_for(images) as node, served(node) as url:
        node.put_prefix(digest, body)
        with busy_device(node, images, digest, threading.Event(), threading.Event()):
            with socket.create_connection(address_of(url)) as peer:
                peer.sendall(
                    b"POST /v1/profiles HTTP/1.1\r\nHost: localhost\r\n" + b"Content-Length: %d\r\n\r\n" % len(text)
                )
                peer.sendall(text)
                until(lambda: node.statistics().waiting_for_device == 2)
            until(lambda: node.statistics().requests_in_progress == 1)
        until(lambda: is_idle(node))


@pytest.mark.parametrize("said", ["soon", "-1", "0", "nan", "inf"])
def test_refuses_an_invalid_deadline(images, said):
    with client_of(node_for(images)) as client:
        answer = client.post("/v1/features", json=request(images, 1).to_json(), headers={"Frostline-Deadline": said})
        assert answer.status_code == 400
        assert "Frostline-Deadline" in answer.json()["message"]


def test_a_loader_sends_its_token_and_shows_it_nowhere(images, monkeypatch, caplog):
    monkeypatch.setenv("FROSTLINE_TOKEN", token_of("ann"))
    settings = LoaderSettings(deadline_s=20)
    assert token_of("ann") not in repr(settings)
    with node_for(images, tenant("ann")) as node, served(node) as url:
        with closing(HttpTransport(url, settings)) as transport:
            assert transport.health().roots == (images.as_uri(),)
            assert len(joined(transport.features(request(images, 1)))[0]) == 6
            assert list(transport.node_statistics()["tenants"]) == ["ann"]
        with (
            closing(HttpTransport(url, LoaderSettings(deadline_s=20, token="another"))) as transport,
            pytest.raises(Unauthenticated) as refused,
        ):
            transport.health()
    assert "another" not in str(refused.value)
    assert token_of("ann") not in caplog.text


@pytest.mark.parametrize("token", ["", "two words", "new\nline", "ü", "x" * 600])
def test_refuses_an_invalid_token_without_repeating_it(token):
    with pytest.raises(SettingError) as refused:
        LoaderSettings(token=token)
    assert not token or token not in str(refused.value)


def test_tenants_are_read_from_a_file(tmp_path):
    path = tmp_path / "tenants.toml"
    path.write_text(
        f"""
        [[tenant]]
        name = "ann"
        token_sha256 = "{"a" * 64}"
        weight = 2
        requests = 8
        roots = ["s3://photos"]

        [[tenant]]
        name = "bob"
        token_sha256 = "{"b" * 64}"
        sees_all = true
        """
    )
    ann, bob = read_tenants(path)
    assert ann == TenantSettings(name="ann", token_sha256="a" * 64, weight=2, requests=8, roots=("s3://photos",))
    assert bob.sees_all
    assert bob.roots is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "tenant"),
        ("[[tenant]]\nname = 'x'", "token_sha256"),
        ("[[tenant]]\nname = 'x'\ntoken_sha256 = 'y'", "token_sha256"),
        ("[[tenant]]\nname = 'a b'\ntoken_sha256 = '" + "a" * 64 + "'", "name"),
        ("[[tenant]]\nname = 'x'\nwight = 2", "wight"),
        ("[[tenant]]\nname = 'x'\nweight = true", "weight"),
        ("[[tenant]]\nname = 'x'\nroots = [1]\ntoken_sha256 = '" + "a" * 64 + "'", "roots"),
        ("[[tenant]]\nname = 'x'\nrequests = 0\ntoken_sha256 = '" + "a" * 64 + "'", "requests"),
        ("tenant = 3", "tenant"),
        ("[", "tenants.toml"),
    ],
)
def test_refuses_an_invalid_file_of_tenants_and_names_the_field(tmp_path, text, said):
    path = tmp_path / "tenants.toml"
    path.write_text(text)
    with pytest.raises(SettingError, match=said):
        read_tenants(path)


def test_tenants_must_differ():
    one = tenant("ann")
    for tenants in ((one, one), (one, TenantSettings(name="bob", token_sha256=one.token_sha256))):
        with pytest.raises(SettingError, match="different"):
            NodeSettings(tenants=tenants)


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
        ("bob", {"json": {"name": "eve"}}, "ann", 400, "has no field 'name': there are"),
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
    bob = tenants.account("bob")
    bob.charge_device(1000.0)
    bob.check()
    bob.change(tenant("bob", device_s_per_s=0.5))
    bob.charge_device(20.0)
    with pytest.raises(Overloaded, match=r"0\.5 device seconds"):
        bob.check()
    bob.change(tenant("bob", device_s_per_s=2.0))
    now_s += 20.0
    bob.check()
    bob.charge_device(1000.0)
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


def written(path, *tables):
    path.write_text("\n".join(f"[[tenant]]\n{table}" for table in tables))
    path.chmod(0o600)
    return path


def line_of(name, token=None, **more):
    """A tenant as its file says it."""
    values = {"name": name, "token_sha256": hashlib.sha256((token or token_of(name)).encode()).hexdigest(), **more}
    return "\n".join(f"{key} = {json.dumps(value)}" for key, value in values.items())


def status_of(client, token):
    return client.get("/v1/health", headers={"Authorization": f"Bearer {token}"}).status_code


def test_tenants_join_leave_and_change_tokens_roots_and_quotas_as_their_file_says(images, tmp_path, caplog):
    caplog.set_level(logging.INFO, "frostline.node")
    path = written(tmp_path / "tenants.toml", line_of("ann"), line_of("bob", weight=2))
    node = Node(NodeSettings(memory_bytes=MEMORY, tenants=read_tenants(path)), (images.as_uri(),))
    with client_of(node) as client:
        file = node.follow_tenants(path)
        ann = node.identify(token_of("ann"))
        assert status_of(client, "next-of-ann") == 401
        both = line_of("ann", next_token_sha256=hashlib.sha256(b"next-of-ann").hexdigest(), requests=3)
        written(path, both, line_of("cy", roots=["file:///nowhere"]))
        file.distrust()
        assert [status_of(client, token) for token in ("next-of-ann", token_of("ann"), token_of("cy"))] == [200] * 3
        assert status_of(client, token_of("bob")) == 401
        assert node.identify("next-of-ann") is ann, "what it uses is counted on"
        assert ann.settings.requests == 3
        assert client.get("/v1/health", headers=header("cy")).json()["roots"] == ["file:///nowhere"]
        (told,) = [record.fields for record in caplog.records if record.getMessage() == "tenants_renewed"]
        assert told == {"joined": ["cy"], "left": ["bob"]}
        for broken in ("nonsense", "", "tenant = []", line_of("ann")[5:]):
            path.write_text(broken)
            file.distrust()
            assert status_of(client, token_of("ann")) == 200, broken
            assert client.get("/v1/health").status_code == 401, "a broken file opens nothing"
        path.chmod(0o666)
        written_for_all = line_of("mallory")
        path.write_text(f"[[tenant]]\n{written_for_all}")
        file.distrust()
        assert status_of(client, token_of("mallory")) == 401


def test_a_token_that_ran_out_is_refused_and_one_without_an_end_is_not(images):
    gone, later = tenant("ann", expires_at_s=1.0), tenant("bob", expires_at_s=4e9)
    with client_of(node_for(images, gone, later)) as client:
        answer = client.get("/v1/health", headers=header("ann"))
        assert (answer.status_code, "has expired" in answer.json()["message"]) == (401, True)
        assert client.get("/v1/health", headers=header("bob")).status_code == 200


def test_events_end_when_the_token_of_who_is_sent_them_runs_out(images):
    ann = tenant("ann", expires_at_s=time.time() + 1.5)
    with node_for(images, ann) as node, served(node) as url:
        head = {**header("ann"), "Accept": "text/event-stream"}
        with httpx.stream("GET", f"{url}/v1/statistics", headers=head, timeout=30) as answer:
            assert 1 <= sum(line.startswith("data: ") for line in answer.iter_lines()) <= 3


def asked(client, name, method, path, **said):
    answer = client.request(method, path, headers={**header(name), "frostline-deadline": "60"}, **said)
    return answer.status_code


@pytest.mark.parametrize("action", [*ACTIONS, None])
def test_a_tenant_does_what_its_actions_allow_and_nothing_else(images, action):
    network = small_network()
    artifact = write_prefix(network.prefix)
    digest = digest_of(artifact)
    actions = () if action is None else (action,)
    holders = tenant("ann", actions=actions, sees_all=True), tenant("all")
    with client_of(node_for(images, *holders, allow_training=True)) as client:
        put = asked(client, "ann", "PUT", f"/v1/prefixes/{digest}", content=artifact)
        assert put == (201 if action == "upload" else 403)
        assert asked(client, "ann", "POST", "/v1/pieces", json=[]) == (200 if action == "upload" else 403)
        assert asked(client, "all", "PUT", f"/v1/prefixes/{digest}", content=artifact) in (200, 201)
        cut = network.frost_line.number
        bodies = {
            "read": ("/v1/features", request(images, 0).to_json()),
            "compute": ("/v1/features", request(images, cut, digest).to_json()),
            "list": ("/v1/listings", {"data": images.as_uri()}),
        }
        for name, (path, body) in bodies.items():
            status = asked(client, "ann", "POST", path, json=body)
            assert (status == 200) == (name == action), (name, status)
            assert status in (200, 403)
        measured = ProfileRequest(features=request(images, cut, digest)).to_json()
        assert (asked(client, "ann", "POST", "/v1/profiles", json=measured) == 403) == (action != "compute")
        training = asked(client, "ann", "POST", f"/v1/trainings?prefix={digest}", content=b"no training")
        assert (training == 403) == (action != "train")
        assert asked(client, "ann", "GET", "/v1/statistics") == 200


def test_a_tenant_runs_and_uploads_its_prefixes_alone(images):
    network = small_network()
    artifact = write_prefix(network.prefix)
    digest, cut = digest_of(artifact), network.frost_line.number
    holders = tenant("ann", prefixes=("0" * 64,)), tenant("bob", prefixes=(digest,))
    with client_of(node_for(images, *holders)) as client:
        assert asked(client, "ann", "PUT", f"/v1/prefixes/{digest}", content=artifact) == 403
        assert asked(client, "bob", "PUT", f"/v1/prefixes/{digest}", content=artifact) == 201
        body = request(images, cut, digest).to_json()
        assert asked(client, "ann", "POST", "/v1/features", json=body) == 403
        assert asked(client, "bob", "POST", "/v1/features", json=body) == 200
        assert asked(client, "ann", "POST", "/v1/features", json=request(images, 0).to_json()) == 200


def test_a_node_and_its_control_plane_follow_the_tenants_file_after_sighup(images, tmp_path):
    path = written(tmp_path / "tenants.toml", line_of("ann"))
    with subprocess.Popen(
        [
            *(sys.executable, "-c", "from frostline.cli import main; main()", "serve", "--data-root", str(images)),
            *("--listen", "127.0.0.1:0", "--tenants", str(path), "--json"),
        ],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        text=True,
    ) as process:
        try:
            url = json.loads(process.stdout.readline())["url"]

            def status(token, method="GET", route="/v1/health", body=None):
                with closing(http.client.HTTPConnection(*address_of(url), timeout=60)) as peer:
                    peer.request(method, route, body, {"Authorization": f"Bearer {token}"})
                    return peer.getresponse().status

            assert (status(token_of("ann")), status(token_of("bob"))) == (200, 401)
            written(path, line_of("bob"))
            process.send_signal(signal.SIGHUP)
            until(lambda: status(token_of("bob"), "POST", "/v1/stages", b"{}") == 400)  # known, and no report
            assert status(token_of("ann"), "POST", "/v1/stages", b"{}") == 401
            assert (status(token_of("ann")), status(token_of("bob"))) == (401, 200)
            written(path, line_of("ann"), line_of("bob"))
            until(lambda: status(token_of("ann")) != 401)  # by the change alone
        finally:
            process.terminate()


def test_a_control_plane_follows_the_tenants_of_its_config(tmp_path):
    config = tmp_path / "control.toml"
    written(config, line_of("ann", sees_all=True))
    settings = read_control_settings(config)
    with closing(RecordStore(tmp_path / "state")) as store:
        plane = ControlPlane(ControlState(settings, now_s=1000.0), store)
        file = FollowedFile(config, lambda: plane.renew(read_control_settings(config).tenants))
        plane.follow(file)
        assert plane.identify(token_of("ann")) == "ann"
        written(config, line_of("ann"), line_of("bob", weight=3, sees_all=True))
        file.distrust()
        assert plane.identify(token_of("bob")) == "bob"
        assert (plane.rights("ann").tenant, plane.rights("bob").tenant) == ("ann", None)
        written(config, "name = 3")
        file.distrust()
        assert plane.identify(token_of("bob")) == "bob"
        config.write_text("")
        file.distrust()
        with pytest.raises(Unauthenticated):
            plane.identify(token_of("eve"))


def audited(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_who_read_brought_changed_and_was_refused_stands_in_the_audit_log(images, tmp_path):
    path, network = tmp_path / "audit.jsonl", small_network()
    artifact = write_prefix(network.prefix)
    digest, cut = digest_of(artifact), network.frost_line.number
    holders = (
        tenant("ann", actions=("read", "compute", "upload", "list")),
        tenant("boss", sees_all=True, may_change=True),
    )
    node = Node(NodeSettings(memory_bytes=MEMORY, tenants=holders), (images.as_uri(),), audit=AuditLog(path))
    with client_of(node) as client:
        assert asked(client, "ann", "PUT", f"/v1/prefixes/{digest}", content=artifact) == 201
        for _ in range(3):
            assert asked(client, "ann", "POST", "/v1/features", json=request(images, cut, digest).to_json()) == 200
        assert asked(client, "ann", "POST", "/v1/features", json=request(images, 0).to_json()) == 200
        assert asked(client, "ann", "POST", "/v1/listings", json={"data": images.as_uri()}) == 200
        assert asked(client, "ann", "POST", f"/v1/trainings?prefix={digest}", content=b"x") == 403
        assert asked(client, "eve", "GET", "/v1/health") == 401
        assert asked(client, "ann", "PATCH", "/v1/tenants/ann", json={"weight": 9}) == 403
        assert asked(client, "boss", "PATCH", "/v1/tenants/ann", json={"weight": 9}) == 200
        away = request(images, 0, data="file:///etc").to_json()
        assert asked(client, "ann", "POST", "/v1/features", json=away) == 400
    found = audited(path)
    by_event = {}
    for line in found:
        by_event.setdefault(line["event"], []).append(line)
    ann, data = {"tenant": "ann"}, {"data": images.as_uri()}
    (upload,), (read,), (listed,) = by_event["upload"], by_event["read"], by_event["list"]
    assert upload.items() >= {**ann, "prefix": digest, "address": "testclient"}.items()
    assert read.items() >= {**ann, **data, "samples": 6, "times": 1}.items()
    assert listed.items() >= {**ann, **data}.items()
    assert [(line["times"], line["samples"]) for line in by_event["compute"]] == [(1, 6), (2, 12)]
    assert all(line.items() >= {**ann, **data, "prefix": digest}.items() for line in by_event["compute"])
    (change,) = by_event["change"]
    assert (change["by"], change["tenant"], change["after"]["weight"]) == ("boss", "ann", 9)
    refused = {(line.get("tenant"), line["route"], line["kind"]) for line in by_event["refused"]}
    assert refused == {
        ("ann", "/v1/trainings", "Forbidden"),
        (None, "/v1/health", "Unauthenticated"),
        ("ann", "/v1/tenants/{name}", "Forbidden"),
        ("ann", "/v1/features", "BadRequest"),
    }
    assert token_of("ann") not in path.read_text()
    assert token_of("eve") not in path.read_text()


FULL_DISK = """
import json, resource, signal, sys
from dataclasses import replace
from pathlib import Path
from frostline.control.app import ControlPlane
from frostline.control.messages import StageReport
from frostline.control.settings import ControlSettings
from frostline.control.shares import Amounts
from frostline.control.state import ControlState
from frostline.control.store import RecordStore
from frostline.core.errors import Unavailable

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
store = RecordStore(Path(sys.argv[1]))
plane = ControlPlane(ControlState(ControlSettings(capacity=Amounts(bytes_per_s=8.0)), now_s=1.0), store, lambda: 2.0)

def report(number, stage):
    value = {"stage": stage, "job": "night", "kind": "window", "sequence": number, "version": 0}
    value |= {"demand": Amounts(bytes_per_s=1.0).to_json(), "used": Amounts().to_json()}
    return StageReport.from_json({**value, **json.loads(sys.argv[2])})

plane.receive("everybody", report(1, "first"))
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (1, hard))
said = []
for number in (2, 3):
    try:
        plane.receive("everybody", report(number, f"second-{number}"))
    except Unavailable as error:
        said.append(str(error))
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
plane.receive("everybody", report(4, "third"))
store.close()
kept = sorted(record.report.stage for record in RecordStore(Path(sys.argv[1])).records())
print(json.dumps({"said": said, "kept": kept}))
"""


def test_a_control_plane_with_a_full_disk_loses_nothing_that_it_answered(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path / "state"), "{}"],
        capture_output=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}, text=True,
        timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found["said"]) == 2
    assert all("cannot keep its state" in sentence and "free space" in sentence for sentence in found["said"])
    assert found["kept"] == ["first", "second-2", "second-3", "third"]
    assert done.stderr.count("cannot write the state to") == 1, "once a minute at most"


def test_the_statistics_of_all_tenants_come_in_pages(tmp_path, monkeypatch):
    monkeypatch.setattr("frostline.node.resources.PAGE_TENANTS", 2)
    tenants = tuple(tenant(name, sees_all=name == "a") for name in "abcde")
    node = Node(NodeSettings(memory_bytes=96 << 20, tenants=tenants), (tmp_path.as_uri(),))
    with node, served(node) as url:

        def page(query, name="a"):
            found = httpx.get(f"{url}/v1/statistics{query}", headers=header(name), timeout=60)
            return found.status_code, [*found.json().get("tenants", ())], found.json().get("next")

        assert page("") == (200, ["a", "b"], 2)
        assert page("?tenants=2") == (200, ["c", "d"], 4)
        assert page("?tenants=4") == (200, ["e"], None)
        assert page("?tenants=999999999") == (200, [], None)
        assert page("", "c") == (200, ["c"], None)
        assert page("?tenants=-1")[0] == page("?tenants=٣")[0] == page("?tenants=1e9")[0] == 400
        event = "text/event-stream"
        with httpx.stream("GET", f"{url}/v1/statistics?tenants=4", headers={**header("a"), "accept": event}) as sent:
            told = next(line for line in sent.iter_lines() if line.startswith("data:"))
        assert [*json.loads(told.removeprefix("data:"))["tenants"]] == ["e"]
    assert node.statistics().next is None
    assert len(node.statistics().tenants) == 5
