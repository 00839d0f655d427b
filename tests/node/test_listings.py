"""Listings at the node: who may ask, what is refused, and that a cancelled listing leaves nothing behind."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
from contextlib import closing, contextmanager
from pathlib import Path

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import frostline as fl
from frostline.core.config import NodeSettings
from frostline.core.errors import OverBudget, Unavailable
from frostline.node.operations import Listings
from frostline.node.pipeline import Stores
from frostline.node.process import start_node
from frostline.wire.connection import address_of
from frostline.wire.listings import ListingRequest
from support.images import image_folder
from support.listing_nodes import listers, listing_node
from support.nodes import is_idle, until
from support.tenants import header, tenant, token_of
from support.trainings import runs


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return image_folder(tmp_path_factory.mktemp("photos"), per_class=2)


@contextmanager
def silent_store():
    """A bucket at a server that takes connections and never answers."""
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        yield f"s3://bucket?anonymous=true&endpoint=http://127.0.0.1:{silent.getsockname()[1]}"


def asking(url, data, who=None):
    """A connection on which a listing was asked for, and its first bytes came."""
    peer = socket.create_connection(address_of(url))
    body = json.dumps({"data": data}).encode()
    lines = ["POST /v1/listings HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}"]
    lines += [f"Authorization: Bearer {token_of(who)}"] if who else []
    peer.sendall("\r\n".join((*lines, "", "")).encode() + body)
    assert b"200" in peer.recv(1000)
    return peer


def ask(url, body, **headers):
    return httpx.post(f"{url}/v1/listings", json=body, headers=headers, timeout=60)


@pytest.mark.parametrize(("more", "has_keys"), [((), False), (("s3://bucket?anonymous=true",), True)])
def test_a_listing_has_keys_of_the_node_only_where_a_store_may_ask_for_them(monkeypatch, photos, more, has_keys):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden")
    with closing(Listings(NodeSettings(), Stores((photos.as_uri(), *more)))) as listings:
        listings.warm()
        until(listers)  # a process has its command when it has begun
        [lister] = listers()
        environment = Path(f"/proc/{lister}/environ")
        until(environment.read_bytes)
        assert (b"hidden" in environment.read_bytes()) is has_keys


def test_a_listing_is_a_stream_of_lines_and_then_the_manifest(photos):
    with listing_node(photos.as_uri()) as node:
        answer = ask(node.url, {"data": photos.as_uri()})
        assert answer.status_code == 200
        said, rest = [], answer.content
        while not said or said[-1]["event"] != "listed":
            line, _, rest = rest.partition(b"\n")
            said += [json.loads(line)] if line else []  # an empty one only says that the node is there
        assert [event["event"] for event in said] == ["phase", "counted", "phase", "listed"]
        assert said[-1]["nbytes"] == len(rest)
        assert rest.startswith(b"PAR1")
        until(lambda: is_idle(node))


@pytest.mark.parametrize(
    "body",
    [
        [],
        {},
        {"data": ""},
        {"data": 3},
        {"data": "s3://b", "format": 1},
        {"data": "s3://b", "format": "../x"},
        {"data": "s3://b", "relist": "yes"},
        {"data": "s3://b", "on_change": "maybe"},
        {"data": "s3://b", "known": ["x"]},
        {"data": "s3://b", "known": ["0" * 64] * 9},
        {"data": "s3://b", "cache": "/etc"},
        {"data": "s3://b"},
        {"data": "file:///etc"},
    ],
)
def test_refuses_invalid_listing_requests_and_data_that_is_not_served(photos, body):
    with listing_node(photos.as_uri()) as node:
        answer = ask(node.url, body)
        assert (answer.status_code, answer.json()["error"]) == (400, "BadRequest")
        assert not listers()
        until(lambda: is_idle(node))


def test_refuses_an_unknown_format_and_one_that_names_hosts_before_reading(photos):
    with listing_node(photos.as_uri()) as node:
        unknown = ask(node.url, {"data": photos.as_uri(), "format": "folder"})
        assert (unknown.status_code, unknown.json()["error"]) == (400, "BadRequest")
        assert "folders" in unknown.json()["message"]
        hosts = ask(node.url, {"data": photos.as_uri(), "format": "urls"})
        assert (hosts.status_code, hosts.json()["error"]) == (403, "Forbidden")


def test_refuses_a_body_that_is_longer_than_any_request(photos):
    with listing_node(photos.as_uri()) as node:
        answer = ask(node.url, {"data": "x" * 100_000})
        assert (answer.status_code, answer.json()["error"]) == (413, "OverBudget")


def test_refuses_unidentified_clients_before_the_body_is_read(photos):
    with listing_node(photos.as_uri(), tenants=(tenant("ann"), tenant("bob", roots=("s3://other",)))) as node:
        for headers in ({}, {"Authorization": "Bearer nonsense"}):
            answer = httpx.post(f"{node.url}/v1/listings", content=b"no json", headers=headers)
            assert (answer.status_code, answer.json()["error"]) == (401, "Unauthenticated")
        refused = ask(node.url, {"data": photos.as_uri()}, **header("bob"))
        assert refused.status_code == 400
        assert "serve" in refused.json()["message"]
        assert ask(node.url, {"data": photos.as_uri()}, **header("ann")).status_code == 200


def test_limits_each_tenant_to_one_listing_at_a_time(photos):
    with (
        silent_store() as silent,
        listing_node(photos.as_uri(), silent, tenants=(tenant("ann"), tenant("bob"))) as node,
        closing(asking(node.url, silent, "ann")),
    ):
        busy = ask(node.url, {"data": photos.as_uri()}, **header("ann"))
        assert (busy.status_code, busy.json()["error"]) == (429, "Overloaded")
        assert busy.headers["Retry-After"] == "2"
        assert ask(node.url, {"data": photos.as_uri()}, **header("bob")).status_code == 200


def test_a_client_waits_while_its_tenant_lists_something_else(photos, tmp_path):
    with silent_store() as silent, listing_node(photos.as_uri(), silent) as node:
        first, names = asking(node.url, silent), []

        def on_event(event):
            names.append(getattr(event, "name", ""))
            if "waiting" in names[-1]:
                first.close()

        assert len(fl.Dataset(photos, near=node.url, cache=tmp_path, on_event=on_event)) == 6
        assert "waiting for the node to list the data" in names


def test_a_client_that_leaves_ends_its_listing(photos):
    with silent_store() as silent, listing_node(silent) as node:
        peer = asking(node.url, silent)
        until(listers)
        peer.close()
        until(lambda: not listers())
        until(lambda: is_idle(node))


def test_a_node_that_closes_ends_its_listings(photos):
    with silent_store() as silent, listing_node(photos.as_uri(), silent) as node:
        with closing(asking(node.url, silent)):
            node.close()
            assert not listers()
        with pytest.raises(Unavailable, match="stopping"):
            node.listings.begin(ListingRequest(data=photos.as_uri()), node.identify(None))


def test_a_node_that_is_killed_takes_its_listing_with_it():
    settings = NodeSettings(memory_bytes=1 << 28)
    with silent_store() as silent, start_node((silent,), settings) as node, closing(asking(node.url, silent)):
        until(lambda: listers(node.pid))
        [lister] = listers(node.pid)
        os.kill(node.pid, signal.SIGKILL)
        until(lambda: not runs(lister))


def test_a_listing_gets_no_more_memory_than_its_node_gives_it(photos):
    with (
        silent_store() as silent,
        listing_node(silent, listing_memory_bytes=300 << 20) as node,
        closing(asking(node.url, silent)),
    ):
        until(listers)
        [lister] = listers()
        lines = Path(f"/proc/{lister}/limits").read_text().splitlines()
        [line] = [text for text in lines if text.startswith("Max data size")]
        assert line.split()[3:5] == [str(300 << 20)] * 2


def test_a_listing_beyond_its_memory_is_refused_with_the_option_that_raises_it(tmp_path):
    """Images with captions of a megabyte."""
    folder = tmp_path / "data"
    folder.mkdir()
    captions = [random.randbytes(1 << 19).hex() for _ in range(200)]
    table = pa.table({"image": [b"P5 1 1 255 x"] * 200, "label": ["a"] * 200, "caption": captions})
    pq.write_table(table, folder / "0.parquet", compression="none", use_dictionary=False)
    with (
        listing_node(folder.as_uri(), listing_memory_bytes=256 << 20) as node,
        pytest.raises(OverBudget, match="--listing-memory"),
    ):
        len(fl.Dataset(folder, near=node.url, cache=tmp_path / "client"))


def test_a_listing_that_is_killed_from_outside_says_so(photos, tmp_path):
    with silent_store() as silent, listing_node(silent) as node:
        peer = asking(node.url, silent)
        until(listers)
        [lister] = listers()
        os.kill(lister, signal.SIGKILL)
        said = b""
        while b"failed" not in said and (more := peer.recv(4096)):
            said += more
        assert b"signal 9" in said
        assert b"--listing-memory" in said
        peer.close()
        until(lambda: is_idle(node))


def test_the_next_listing_is_done_by_a_process_that_waits_for_it(photos, monkeypatch):
    with listing_node(photos.as_uri()) as node:
        node.listings.warm()
        [waiting] = listers()
        monkeypatch.setattr(Listings, "_new", lambda _: pytest.fail("another process was started"))
        node.listings.warm()
        answer = ask(node.url, {"data": photos.as_uri()})
        assert b"PAR1" in answer.content
        until(lambda: not runs(waiting))


def test_some_time_after_a_listing_another_process_waits(photos, monkeypatch):
    monkeypatch.setattr("frostline.node.operations._REST_S", 0.0)
    with listing_node(photos.as_uri()) as node:
        node.listings.warm()
        [first] = listers()
        assert ask(node.url, {"data": photos.as_uri()}).status_code == 200
        until(lambda: len(listers()) == 1 and listers() != [first])
        assert ask(node.url, {"data": photos.as_uri()}).status_code == 200
        node.close()
        assert not listers()
        node.listings.warm()
        assert not listers(), "it is closed"


def test_a_waiting_process_that_died_is_replaced_and_one_that_nobody_needs_ends(photos):
    with listing_node(photos.as_uri()) as node:
        node.listings.warm()
        [waiting] = listers()
        os.kill(waiting, signal.SIGKILL)
        until(lambda: Path(f"/proc/{waiting}/stat").read_text().rpartition(")")[2].split()[0] == "Z")
        assert b"PAR1" in ask(node.url, {"data": photos.as_uri()}).content
    command = [sys.executable, "-P", "-m", "frostline.datasets.listing_process"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
