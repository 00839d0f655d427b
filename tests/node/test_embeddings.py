"""Embeddings over HTTP: those of the network itself, for texts and images that come with the request; bounded."""

import base64
import http.client
import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
import torch
from starlette.testclient import TestClient
from tokenizers import normalizers, pre_tokenizers

from frostline.core import Samples
from frostline.core.config import NodeSettings
from frostline.models import cut_network, freeze
from frostline.models.artifact import digest_of, write_prefix
from frostline.models.tracing import takes_rows
from frostline.node import Node, pipeline
from frostline.node.http.app import make_app
from frostline.node.process import start_node
from frostline.preprocess import text
from frostline.preprocess.apply import decode_into
from frostline.wire.connection import address_of
from support import hostile
from support.nodes import artifact_of, is_idle, jpeg, make_images, preprocess, request, small_network
from support.tenants import header, tenant
from support.texts import TEXTS, small_words, tokenizer_of_words

pytestmark = pytest.mark.usefixtures("plain_starts")

URL = "data:image/jpeg;base64,"


@pytest.fixture
def images(tmp_path):
    return make_images(tmp_path / "images", 2)


@pytest.fixture
def node(images):
    with Node(NodeSettings(memory_bytes=128 << 20), (images.as_uri(),)) as node:
        yield node


@pytest.fixture
def client(node):
    with TestClient(make_app(node), raise_server_exceptions=False) as client:
        yield client


def sent(client, model, inputs, **fields):
    return client.post("/v1/embeddings", json={"model": model, "input": inputs, **fields})


def refused(answer, status, words):
    assert answer.status_code == status, answer.text
    assert words in answer.json()["message"]
    assert "\n" not in answer.json()["message"]


def urls(*encoded):
    return [URL + base64.b64encode(data).decode() for data in encoded]


def put(client, network, headers=None):
    digest, body = artifact_of(network)
    assert client.put(f"/v1/prefixes/{digest}", content=body, headers=headers).status_code == 201
    return digest


def test_embeddings_of_images_are_the_features_at_the_frost_line(client, node, images):
    network = small_network()
    model, encoded = put(client, network), [jpeg(1), jpeg(2), jpeg(3)]
    answer = sent(client, model, urls(*encoded), preprocess=preprocess().to_json())
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert (body["object"], body["model"]) == ("list", model)
    assert body["usage"] == {"prompt_tokens": 0, "total_tokens": 0}
    assert [(item["object"], item["index"]) for item in body["data"]] == [("embedding", row) for row in range(3)]
    found = np.array([item["embedding"] for item in body["data"]], np.float32)
    # The same images as files of the data, by the way that features go.
    for number, data in enumerate(encoded):
        (images / f"same-{number}.jpg").write_bytes(data)
    names = [f"same-{number}.jpg" for number in range(3)]
    zeros = np.zeros(3, np.int64)
    lengths = np.array([len(data) for data in encoded])
    samples = Samples(ids=np.arange(3), objects=names, offsets=zeros, lengths=lengths, labels=zeros)
    line = len(network.prefix.cuts)
    with closing(node.features(request(images, line, model, samples))) as stream:
        expected = np.concatenate([batch.tensors[0].reshape(len(batch), -1) for batch in stream])
    assert np.array_equal(found, expected)
    packed = sent(client, model, urls(*encoded), preprocess=preprocess().to_json(), encoding_format="base64").json()
    numbers = [np.frombuffer(base64.b64decode(item["embedding"]), "<f4") for item in packed["data"]]
    assert np.array_equal(np.stack(numbers), expected)
    assert is_idle(node)


def test_embeddings_of_texts_are_those_of_the_network_and_their_tokens_are_counted(client):
    tokens = text(tokenizer_of_words(), max_length=12)
    model = freeze(small_words(), "words", input_shape=tokens.inputs).eval()
    network = cut_network(takes_rows(model, tokens.tokens.names), (tokens.sample,), frozen_in_eval=True)
    body = write_prefix(replace(network.prefix, tokenizer=tokens.tokenizer))
    digest = digest_of(body)
    assert client.put(f"/v1/prefixes/{digest}", content=body).status_code == 201
    answer = sent(client, digest, list(TEXTS))
    assert answer.status_code == 200, answer.text
    rows = np.zeros((len(TEXTS), 2, 12), np.int64)
    for row, words in zip(rows, TEXTS, strict=True):
        decode_into(tokens, words.encode(), row, id=0, view=None)
    assert answer.json()["usage"]["total_tokens"] == int(rows[:, 1].sum())
    ids, shown = torch.from_numpy(rows[:, 0]), torch.from_numpy(rows[:, 1])[..., None]
    with torch.no_grad():
        expected = ((model.words(ids) * shown).sum(1) / shown.sum(1)).numpy()
    found = np.array([item["embedding"] for item in answer.json()["data"]])
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    single = sent(client, digest, TEXTS[0]).json()["data"]
    assert len(single) == 1
    np.testing.assert_allclose(single[0]["embedding"], answer.json()["data"][0]["embedding"], rtol=1e-5, atol=1e-6)
    refused(sent(client, digest, ["a"], preprocess=preprocess().to_json()), 400, "texts are tokenized")
    half = client.post("/v1/embeddings", content=json.dumps({"model": digest, "input": ["\ud800"]}))
    refused(half, 400, "half a character")


def growing(steps):
    """A prefix for texts whose tokenizer makes each `a` four letters, so many times over."""
    tokenizer = tokenizer_of_words()
    tokenizer.normalizer = normalizers.Sequence([normalizers.Replace("a", "aaaa")] * steps)
    tokenizer.pre_tokenizer = pre_tokenizers.Split("a", "isolated")
    tokens = text(tokenizer, max_length=12)
    model = freeze(small_words(), "words", input_shape=tokens.inputs).eval()
    network = cut_network(takes_rows(model, tokens.tokens.names), (tokens.sample,), frozen_in_eval=True)
    return write_prefix(replace(network.prefix, tokenizer=tokens.tokenizer))


def test_no_tokenizer_takes_more_memory_of_a_node_than_it_has_for_that(images):
    with start_node((images.as_uri(),), NodeSettings(memory_bytes=1 << 30)) as node:
        assert hostile.put(node.url, growing(4))[0] == 413, "the product of its steps is bounded"
        body = growing(3)
        assert hostile.put(node.url, body)[0] == 201
        before = hostile.peak_bytes(node.pid)

        def asked(*texts):
            wanted = json.dumps({"model": digest_of(body), "input": texts}).encode()
            with closing(http.client.HTTPConnection(*address_of(node.url), timeout=120)) as connection:
                connection.request("POST", "/v1/embeddings", wanted)
                return connection.getresponse().status

        assert asked("a" * 30_000) == 413
        assert asked("the film was good", "a" * 30_000) == 413
        assert asked("a" * 5000) == 200
        with ThreadPoolExecutor(8) as threads:
            assert set(threads.map(asked, ["a" * 5000] * 8)) <= {200, 429}
        # What is decoded takes at most its share, of three sixteenths.
        assert hostile.peak_bytes(node.pid) - before < (192 << 20) + (96 << 20)


def test_refuses_what_is_no_input_of_the_network_with_one_sentence(client, node):
    model, (url,) = put(client, small_network()), urls(jpeg(1))
    how = {"preprocess": preprocess().to_json()}
    refused(sent(client, "0" * 64, [url], **how), 404, "does not hold the prefix")
    refused(sent(client, "short", [url], **how), 400, "model must be the digest")
    refused(sent(client, model, [url]), 400, "say how this network's images are prepared")
    refused(sent(client, model, ["a cat"], **how), 400, "input[0] is a text, and this network takes images")
    refused(sent(client, model, [url, URL + "%%"], **how), 400, "input[1] holds no base64")
    refused(sent(client, model, [url, *urls(b"no image")], **how), 400, "input[1]: ")
    refused(sent(client, model, [], **how), 400, "input must have from 1 to 2048")
    refused(sent(client, model, [[1, 2]], **how), 400, "input must be a text")
    refused(sent(client, model, [url], dimensions=8, **how), 400, "leave it out")
    refused(sent(client, model, [url], encoding_format="hex", **how), 400, "encoding_format")
    assert is_idle(node)


def test_an_answer_that_would_be_too_large_is_refused(client, monkeypatch):
    model = put(client, small_network())
    monkeypatch.setattr(pipeline, "MAX_NUMBERS", 7)
    refused(sent(client, model, urls(jpeg(1)), preprocess=preprocess().to_json()), 413, "send fewer inputs")


def test_the_memory_of_an_answer_stays_reserved_until_it_is_sent(node, images):
    """A reader that takes none of it holds what counts as its own."""
    app, idle = make_app(node), []

    async def watched(scope, receive, send):
        async def watched_send(message):
            if scope.get("path") == "/v1/embeddings" and message["type"] == "http.response.body":
                idle.append(is_idle(node))
            await send(message)

        await app(scope, receive, watched_send)

    with TestClient(watched) as client:
        digest = put(client, small_network())
        assert sent(client, digest, urls(jpeg(1)), preprocess=preprocess().to_json()).status_code == 200
    assert idle
    assert not any(idle)
    assert is_idle(node)


def test_tenants_alone_are_answered(images):
    settings = NodeSettings(memory_bytes=128 << 20, tenants=(tenant("ann"),))
    with Node(settings, (images.as_uri(),)) as node, TestClient(make_app(node)) as client:
        model = put(client, small_network(), header("ann"))
        body = json.dumps({"model": model, "input": urls(jpeg(1)), "preprocess": preprocess().to_json()})
        assert client.post("/v1/embeddings", content=body).status_code == 401
        assert client.post("/v1/embeddings", content=body, headers=header("ann")).status_code == 200
