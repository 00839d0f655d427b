"""A second network that shares layers with one that a node has: what is sent of it, and what is refused."""

import hashlib
import json
import tracemalloc
from contextlib import ExitStack, closing, suppress
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from frostline.client.http import HttpTransport
from frostline.core.config import LoaderSettings, NodeSettings, TenantSettings
from frostline.core.errors import BadRequest, OverBudget, UnknownPrefix
from frostline.models import cut_network, freeze
from frostline.models.artifact import read_prefix
from frostline.node import Node
from frostline.node.inspection import Inspector
from frostline.node.known_weights import KnownWeights, weight_files
from frostline.node.torch_bridge import TorchBridge
from frostline.wire.pieces import MEDIA_TYPE, MIN_BYTES, Piece, names_from_json, pieces_from_json, pieces_of, without
from support.nodes import artifact_of, make_images, request, samples_of, served, small_network
from support.tenants import tenant, token_of

PATH = "/v1/prefixes/"


class Blocks(nn.Module):
    """Three blocks, of which the first two have the most weights."""

    def __init__(self):
        super().__init__()
        shapes = ((3, 192), (192, 192), (192, 32))
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Conv2d(*shape, 3, stride=2), nn.ReLU()) for shape in shapes))
        self.head = nn.Linear(32, 2)

    def forward(self, pixels):
        return self.head(self.blocks(pixels).mean((2, 3)))


def artifact(last=0.0):
    """A network of those blocks; another number makes other weights in the last one."""
    torch.manual_seed(0)
    model = Blocks().eval()
    with torch.no_grad():
        model.blocks[2][0].weight += last
    return artifact_of(cut_network(freeze(model, "blocks"), (3, 32, 32)))


FIRST, SECOND = artifact(), artifact(last=0.5)
LAST_BYTES = 192 * 32 * 9 * 4


@pytest.fixture
def opened():
    """Opens a node and ways to it: ``node, transport, ... = opened(*settings, tokens=...)``."""
    with ExitStack() as stack:

        def made(*tokens, **settings):
            node = stack.enter_context(Node(NodeSettings(**{"memory_bytes": 256 << 20, "trial_s": 0, **settings}), ()))
            url = stack.enter_context(served(node))
            ways = (HttpTransport(url, LoaderSettings(token=token)) for token in tokens or (None,))
            return node, *(stack.enter_context(closing(way)) for way in ways)

        yield made


def weights_of(upload):
    """What a file of these weights would hold, by names of its own."""
    tensors = read_prefix(upload[1]).tensors.values()
    return {f"layer{number}": tensor.contiguous() for number, tensor in enumerate(tensors)}


@pytest.mark.parametrize("name", ["model.safetensors", "model.pth", "legacy.pt", "deep/checkpoint.ckpt"])
def test_weights_that_the_nodes_owner_has_are_not_sent(name, opened, tmp_path, monkeypatch):
    path, tensors = tmp_path / name, weights_of(FIRST)
    path.parent.mkdir(exist_ok=True)
    if name.endswith("safetensors"):
        save_file(tensors, path)
    else:
        turned = {key: tensor.transpose(0, -1).contiguous().transpose(0, -1) for key, tensor in tensors.items()}
        torch.save({"model": {"state": turned}, "epoch": 3}, path, _use_new_zipfile_serialization="legacy" not in name)
    (tmp_path / "broken.pt").write_bytes(b"no weights")
    known = KnownWeights(weight_files([str(tmp_path)]))
    known.read()
    monkeypatch.setattr(TorchBridge, "known", known)
    _, transport = opened()
    assert sent(transport, FIRST) < len(FIRST[1]) // 20
    transport.features(request(make_images(tmp_path / "images", 2), 2, FIRST[0])).close()
    assert sent(transport, SECOND) < LAST_BYTES + len(FIRST[1]) // 20


def test_a_node_that_serves_others_reads_the_weights_that_it_was_given(tmp_path):
    save_file(weights_of(FIRST), tmp_path / "model.safetensors")
    settings = NodeSettings(memory_bytes=256 << 20, trial_s=0, weight_folders=(str(tmp_path),))
    with Inspector() as inspector, Node(settings, (), inspector) as node:
        node.warm()
        assert {piece.digest for piece in pieces_of(FIRST[1])} <= node.held_pieces()
    with Node(settings, ()) as alone:
        alone.warm()
        assert not alone.held_pieces()


def sent(transport, upload):
    before = transport.statistics().bytes_sent
    transport.put_prefix(*upload)
    return transport.statistics().bytes_sent - before


def test_of_a_network_that_differs_in_its_last_block_only_that_block_is_sent(opened):
    node, transport = opened()
    assert sent(transport, FIRST) > len(FIRST[1])
    assert LAST_BYTES < sent(transport, SECOND) < LAST_BYTES + 60_000
    assert len(SECOND[1]) > 5 * LAST_BYTES
    assert node.holds_prefix(FIRST[0])
    assert node.holds_prefix(SECOND[0])


def test_what_is_sent_yields_to_samples_where_it_is_much(opened):
    """The last block alone is less than a mebibyte."""
    _, transport = opened()
    assert len(FIRST[1]) > 1 << 20 > LAST_BYTES
    yielded = []
    for upload in (FIRST, FIRST, SECOND):
        transport.put_prefix(*upload, lambda upload=upload: yielded.append(upload[0]))
    assert yielded == [FIRST[0]]


def test_a_network_from_pieces_computes_what_it_does_whole(opened, tmp_path):
    images = make_images(tmp_path / "images", 3)
    features = []
    for uploads in ((FIRST, SECOND), (SECOND,)):
        with ExitStack() as stack:
            settings = NodeSettings(memory_bytes=256 << 20, trial_s=0)
            node = stack.enter_context(Node(settings, (images.as_uri(),)))
            transport = stack.enter_context(closing(HttpTransport(stack.enter_context(served(node)), LoaderSettings())))
            for upload in uploads:
                transport.put_prefix(*upload)
            answer = transport.features(request(images, 4, SECOND[0], samples=samples_of(images)))
            features.append(np.concatenate([batch.tensors[0] for batch in answer]))
    assert np.array_equal(*features)


def test_a_piece_that_is_not_what_it_is_called_is_refused(opened):
    node, transport = opened()
    transport.put_prefix(*FIRST)
    held = [piece for piece in pieces_of(SECOND[1]) if piece.digest in node.held_pieces()]
    other = Piece(digest=held[0].digest, start=held[0].start + 4, stop=held[0].stop + 4)
    whole = len(SECOND[1])
    body = bytearray(without(SECOND[1], held))
    body[-1] ^= 1
    for nbytes, damaged in (
        (whole, bytes(body)),
        (whole, without(SECOND[1], [other])),
        (whole, without(SECOND[1], [Piece(digest=held[0].digest, start=held[0].start, stop=held[0].stop - 4)])),
        (whole, without(SECOND[1], [Piece(digest="0" * 64, start=held[0].start, stop=held[0].stop)])),
        (whole - 4, without(SECOND[1], held)),
        (whole, without(SECOND[1], held)[:-5]),
        (whole, without(SECOND[1], held) + b"more"),
        (whole, without(SECOND[1], [Piece(digest=held[0].digest, start=0, stop=held[0].stop)])),
        (whole, b"\x05\0\0\0\0\0\0\0[[1]]"),
        (whole, (1 << 40).to_bytes(8, "little")),
    ):
        with pytest.raises((BadRequest, UnknownPrefix)):
            uploaded(node, nbytes, damaged)
    assert not node.holds_prefix(SECOND[0])
    uploaded(node, len(SECOND[1]), without(SECOND[1], held))
    assert node.holds_prefix(SECOND[0])


def uploaded(node, length, body, chunk=100_003):
    with node.upload(SECOND[0], length, is_in_pieces=True) as upload:
        upload.begin()
        for start in range(0, len(body), chunk):
            upload.write(body[start : start + chunk])
        upload.finish()


def test_what_comes_in_pieces_takes_no_more_memory_than_was_reserved(opened):
    node, transport = opened()
    transport.put_prefix(*FIRST)
    with pytest.raises(OverBudget):
        uploaded(node, 1 << 40, without(SECOND[1], []))
    before = node.statistics().memory["weights"].reserved_bytes
    with pytest.raises(BadRequest):
        uploaded(node, len(SECOND[1]), without(SECOND[1], [])[:-1])
    assert node.statistics().memory["weights"].reserved_bytes == before


@pytest.mark.promise("bounded", mended="a piece that was longer than the place named for it took memory unreserved")
def test_a_piece_that_is_longer_than_its_place_takes_no_memory(opened):
    node, transport = opened()
    transport.put_prefix(*FIRST)
    largest = max(pieces_of(FIRST[1]), key=lambda piece: piece.stop - piece.start)
    assert largest.digest in node.held_pieces()
    assert largest.stop - largest.start > 1 << 20
    short = Piece(digest=largest.digest, start=8, stop=9)
    with node.upload("1" * 64, 64, is_in_pieces=True) as upload:
        upload.begin()
        upload.write(without(bytes(64), [short]))
        tracemalloc.start()
        try:
            with pytest.raises(UnknownPrefix):
                upload.finish()
            assert tracemalloc.get_traced_memory()[1] < 1 << 19
        finally:
            tracemalloc.stop()


def test_pieces_that_were_evicted_after_the_question_cost_one_more_round(opened, monkeypatch):
    # A quota for one of them.
    ann = tenant("ann", weight_bytes=len(FIRST[1]) + 1000)
    node, transport = opened(token_of("ann"), tenants=(ann,))
    transport.put_prefix(*FIRST)
    rounds, held = [], node.held_pieces

    def asked(account=None):
        found = held(account)
        if not rounds:
            with node.upload("1" * 64, len(FIRST[1]), account) as other:
                other.begin()
        rounds.append(found)
        return found

    monkeypatch.setattr(node, "held_pieces", asked)
    assert sent(transport, SECOND) > len(SECOND[1])
    assert [bool(found) for found in rounds] == [True, False]
    assert not node.holds_prefix(FIRST[0])
    assert node.holds_prefix(SECOND[0])


def test_a_tenant_is_told_nothing_of_the_pieces_of_others(opened):
    tokens = ("ann-token", "bob-token")
    tenants = tuple(
        TenantSettings(name=token[:3], token_sha256=hashlib.sha256(token.encode()).hexdigest()) for token in tokens
    )
    _, ann, bob = opened(*tokens, tenants=tenants)
    ann.put_prefix(*FIRST)
    assert sent(bob, SECOND) > len(SECOND[1])


def test_small_networks_are_sent_whole_without_a_question(opened, monkeypatch):
    node, transport = opened()
    monkeypatch.setattr(node, "held_pieces", None)
    transport.put_prefix(*artifact_of(small_network()))


@given(st.binary(max_size=200))
def test_what_is_no_file_has_no_pieces_and_what_is_no_list_is_refused(body):
    assert pieces_of(body) == ()
    for read in (lambda: pieces_from_json(body, 1 << 20), lambda: names_from_json(body)):
        with suppress(BadRequest):
            assert isinstance(read(), tuple)


@given(st.lists(st.integers(1, 400), max_size=8), st.data())
def test_a_file_without_some_pieces_is_the_list_and_the_rest(lengths, data):
    edges = np.cumsum([8, *lengths]).tolist()  # behind the length of the header
    body = data.draw(st.binary(min_size=edges[-1], max_size=edges[-1]))
    held = [
        Piece(digest=hashlib.sha256(body[start:stop]).hexdigest(), start=start, stop=stop)
        for start, stop in pairwise(edges)
        if data.draw(st.booleans())
    ]
    sent = without(body, held)
    listed = int.from_bytes(sent[:8], "little")
    assert pieces_from_json(sent[8 : 8 + listed], len(body)) == tuple(held)
    rest = sent[8 + listed :]
    assert len(rest) == len(body) - sum(piece.stop - piece.start for piece in held)
    assert json.loads(sent[8 : 8 + listed]) == [[piece.start, piece.stop, piece.digest] for piece in held]


def test_large_tensors_are_pieces_and_no_others():
    body = FIRST[1]
    found = pieces_of(body)
    assert [piece.stop - piece.start for piece in found] == sorted((192 * 192 * 36, LAST_BYTES), reverse=True)
    assert all(piece.stop - piece.start >= MIN_BYTES for piece in found)
    assert MEDIA_TYPE.startswith("application/")
