"""A tenant's heavy network holds up neither the light request of another nor the node, once its client has gone."""

import json
import select
import socket
import time
from contextlib import closing

import torch

from frostline.client.http import HttpTransport
from frostline.core.config import LoaderSettings, NodeSettings
from frostline.models.artifact import digest_of
from frostline.node.process import start_node
from frostline.wire.connection import address_of
from support.hostile import X, artifact, chain, node
from support.nodes import SIDE, artifact_of, joined, make_images, request, small_network, until
from support.tenants import tenant, token_of

PRODUCTS, WIDTH = 1500, 1536
"""Some minutes of a core."""
DEADLINE_S = 1.0
# An operation is over in a tenth of a second; the rest is for a machine that does other work too.
SLACK_S = 8.0


def heavy_prefix():
    weight = {"ref": "w"}
    products = chain("aten.mm.default", PRODUCTS, weight, begin=weight)
    added = [
        node("s", "aten.sum.default", {"ref": products[-1]["name"]}),
        node("e", "aten.add.Tensor", X, {"ref": "s"}),
    ]
    shape = (3, SIDE, SIDE)
    body = artifact([*products, *added], {"w": torch.zeros(WIDTH, WIDTH)}, shape=shape, inputs=shape)
    return digest_of(body), body


def transport_of(name, url):
    return closing(HttpTransport(url, LoaderSettings(deadline_s=300, token=token_of(name))))


def asked(url, name, message, *headers):
    """A connection on which features were asked for."""
    body = json.dumps(message.to_json()).encode()
    peer = socket.create_connection(address_of(url))
    lines = ("POST /v1/features HTTP/1.1", "Host: x", f"Authorization: Bearer {token_of(name)}", *headers)
    peer.sendall("\r\n".join((*lines, f"Content-Length: {len(body)}", "", "")).encode() + body)
    return peer


def test_answers_a_light_request_beside_a_heavy_one_and_ends_that_with_its_client(tmp_path):
    images = make_images(tmp_path / "images", 6)
    network = small_network()
    settings = NodeSettings(memory_bytes=512 << 20, tenants=(tenant("ann"), tenant("bob")), max_run_s=1e9)
    with (
        start_node((images.as_uri(),), settings) as process,
        transport_of("ann", process.url) as ann,
        transport_of("bob", process.url) as bob,
    ):
        heavy = heavy_prefix()
        ann.put_prefix(*heavy)
        bob.put_prefix(*artifact_of(network))
        with asked(process.url, "ann", request(images, 2, heavy[0])) as waiting:
            # It is charged while it runs.
            until(lambda: ann.node_statistics()["tenants"]["ann"]["totals"]["compute_s"] > 0)
            light = request(images, network.cuts[-1].number, artifact_of(network)[0])
            assert len(joined(bob.features(light))[0]) == 6
            assert not select.select([waiting], [], [], 0)[0]
            assert bob.node_statistics()["waiting_for_device"] == 1
        until(lambda: bob.node_statistics()["waiting_for_device"] == 0)
        until(lambda: ann.node_statistics()["tenants"]["ann"]["totals"]["abandoned"] == 1)


def test_a_heavy_run_leaves_the_device_at_the_deadline_that_its_client_has_named(tmp_path):
    images = make_images(tmp_path / "images", 2)
    settings = NodeSettings(memory_bytes=512 << 20, tenants=(tenant("ann"), tenant("bob")), max_run_s=1e9)
    with start_node((images.as_uri(),), settings) as process, transport_of("ann", process.url) as ann:
        heavy = heavy_prefix()
        ann.put_prefix(*heavy)
        began = time.monotonic()
        with asked(process.url, "ann", request(images, 2, heavy[0]), f"Frostline-Deadline: {DEADLINE_S}") as waiting:
            until(lambda: ann.node_statistics()["tenants"]["ann"]["totals"]["compute_s"] > 0)
            until(lambda: ann.node_statistics()["waiting_for_device"] == 0)
            assert time.monotonic() - began < DEADLINE_S + SLACK_S
            assert waiting.recv(1 << 16).startswith(b"HTTP/1.1 503")
        assert ann.node_statistics()["tenants"]["ann"]["totals"]["expired"] == 1
