"""The node over HTTP: its routes, and their description.

The node over HTTP, in this process: routes, refusals, and the description against the app.

The node's description of itself says of every field what it means.
"""

import json
import os
import re
import time
import tracemalloc

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance
from starlette.testclient import TestClient

from frostline.control.embedded import control_routes, embedded_settings
from frostline.core.config import NodeSettings
from frostline.core.declared import PARSED_BYTES
from frostline.core.errors import BadRequest
from frostline.node import Node
from frostline.node.http.app import describe_node, make_app
from frostline.node.http.requests import parsed_json
from frostline.preprocess import DecodeAudio, NamedInputs, ReadArray, Tokenize
from frostline.preprocess.spec import step_to_json
from frostline.wire.messages import PROTOCOL_HEADER, fields_of_patch
from support.nodes import artifact_of, make_images, request, small_network

MEMORY = 128 << 20


def whole_app(node):
    """The routes of a node and of the control plane within it."""
    return make_app(node, control_routes(embedded_settings(node.settings)))


with Node(NodeSettings(memory_bytes=MEMORY), ("file:///tmp",)) as a_node:
    DESCRIPTION = describe_node(whole_app(a_node))


@pytest.fixture
def images(tmp_path):
    return make_images(tmp_path / "images", 4)


@pytest.fixture
def node(images):
    with Node(NodeSettings(memory_bytes=MEMORY, max_requests=2), (images.as_uri(),)) as node:
        yield node


@pytest.fixture
def client(node):
    with TestClient(whole_app(node), raise_server_exceptions=False) as client:
        yield client


def refused(answer, status, error):
    assert answer.status_code == status, answer.text
    assert answer.json()["error"] == error
    return answer.json()["message"]


def post(client, message):
    return client.post("/v1/features", json=message.to_json())


def test_every_route_is_described_and_the_node_answers_with_that(node, client):
    assert {route.path for route in whole_app(node).routes} == set(DESCRIPTION["paths"])
    assert client.get("/v1/openapi.json").json() == DESCRIPTION


def test_a_prefix_is_taken_in_once_and_known_by_its_digest(client):
    digest, body = artifact_of(small_network())
    assert client.head(f"/v1/prefixes/{digest}").status_code == 404
    assert client.put(f"/v1/prefixes/{digest}", content=body).status_code == 201
    assert client.put(f"/v1/prefixes/{digest}", content=body).status_code == 200
    assert client.head(f"/v1/prefixes/{digest}").status_code == 200


def test_refuses_a_prefix_that_does_not_match_its_digest(client, node):
    _, body = artifact_of(small_network())
    assert "digest" in refused(client.put("/v1/prefixes/" + "0" * 64, content=body), 400, "BadRequest")
    refused(client.put("/v1/prefixes/short", content=body), 400, "BadRequest")
    assert node.statistics().prefixes == 0


def test_refuses_a_body_that_is_not_a_prefix(client):
    import hashlib

    junk = b"\x80\x04cos\nsystem\n" * 10
    answer = client.put(f"/v1/prefixes/{hashlib.sha256(junk).hexdigest()}", content=junk)
    refused(answer, 422, "UnsafeArtifact")


def test_an_upload_that_can_never_fit_is_refused_before_it_is_read(client, node):
    def endless():
        raise AssertionError("the body was read")
        yield b""

    answer = client.put("/v1/prefixes/" + "0" * 64, content=endless(), headers={"Content-Length": str(MEMORY)})
    assert "--memory" in refused(answer, 413, "OverBudget")
    assert node.statistics().memory["work"].peak_bytes == 0


def test_a_body_without_a_length_is_refused(client):
    answer = client.post("/v1/features", content=(part for part in [b"{}"]))
    assert "Content-Length" in refused(answer, 400, "BadRequest")


def test_a_request_that_is_too_long_is_refused_before_it_is_parsed(client):
    answer = client.post("/v1/features", content=b" " * (1 << 20))
    assert "--memory" in refused(answer, 413, "OverBudget")


@pytest.mark.parametrize("body", [b"", b"{", b"[" * 50_000, b"[]", b'{"data": 1}', b"\xff"])
def test_refuses_a_body_that_is_not_a_request(client, body):
    refused(client.post("/v1/features", content=body), 400, "BadRequest")


def test_a_body_with_a_field_twice_is_refused_in_time_whatever_else_it_has():
    began_s = time.thread_time()
    body = ",".join(f'"{number}":0' for number in range(20_000)) + ',"x":0,"x":0'
    with pytest.raises(BadRequest, match="the field 'x' twice"):
        parsed_json(bytearray(f"{{{body}}}".encode()))
    assert time.thread_time() - began_s < 1.0, "it took seconds, and four times as many with twice the fields"


@pytest.mark.parametrize("piece", ["[" * 200 + "]" * 200, '{"":' * 200 + "0" + "}" * 200, '{"":0}', "[{}]", "[]"])
def test_no_body_takes_more_memory_than_is_reserved_to_parse_it(piece):
    body = bytearray(f'[{",".join([piece] * (400_000 // len(piece)))},"\U0001f600"]'.encode())
    tracemalloc.start()
    try:
        parsed_json(body)
        assert tracemalloc.get_traced_memory()[1] < (PARSED_BYTES - 1) * len(body)
    finally:
        tracemalloc.stop()


def test_data_outside_the_roots_is_not_served(client, images):
    for url in (
        "file:///etc",
        images.parent.as_uri(),
        images.as_uri() + "/../..",
        images.as_uri() + "2",
        "s3://x",
        "/",
    ):
        refused(post(client, request(images, 0, data=url)), 400, "BadRequest")


def test_names_that_leave_the_data_are_refused_before_anything_is_sent(client, images):
    for name in ("../secret", "/etc/passwd", "a/../../b", ""):
        message = request(images, 0).to_json()
        message["samples"]["objects"][-1] = name
        refused(client.post("/v1/features", json=message), 400, "BadRequest")


@pytest.mark.parametrize("half", ["\\ud800", "\\uDFFF", "\\udc00\\ud800", "\\ud800\\ud800"])
@pytest.mark.parametrize("place", ["file://", "exact", "objects", "decode", "0000.jpg"])
def test_half_a_character_is_refused_in_a_sentence_wherever_it_stands(client, images, half, place):
    body = json.dumps(request(images, 1).to_json())
    assert place in body
    answer = client.post("/v1/features", content=body.replace(place, place + half, 1))
    assert refused(answer, 400, "BadRequest").startswith("the body has half a character in a text: \\ud")


def test_half_a_character_in_raw_bytes_is_no_json_and_whole_ones_are_taken():
    for raw in (b'["\xed\xa0\x80"]', json.dumps("\ud800", ensure_ascii=False).encode("utf-16", "surrogatepass")):
        with pytest.raises(BadRequest, match="the body is not JSON"):
            parsed_json(bytearray(raw))
    for text in ("\U0001f600", "a\udc80b", "\\ud800", "\u00e9"):
        for encoding in ("utf-8", "utf-8-sig", "utf-16"):
            assert parsed_json(bytearray(json.dumps([text]).encode(encoding))) == [text]


def test_a_sample_named_twice_is_refused(client, images):
    message = request(images, 0).to_json()
    message["samples"]["ids"][1] = message["samples"]["ids"][0]
    assert "ids" in refused(client.post("/v1/features", json=message), 400, "BadRequest")


def test_a_prefix_must_be_held_named_and_fit_the_pixels(client, images):
    digest, body = artifact_of(small_network())
    refused(post(client, request(images, 2, digest)), 404, "UnknownPrefix")
    refused(post(client, request(images, 2, None)), 400, "BadRequest")
    client.put(f"/v1/prefixes/{digest}", content=body)
    assert "shape" in refused(post(client, request(images, 2, digest, side=16)), 400, "BadRequest")
    assert "cut" in refused(post(client, request(images, 99, digest)), 400, "BadRequest")


def test_a_codec_must_be_known_and_fit_the_cut(client, images):
    for cut, others in ((1, {"codec": "gzip"}), (0, {"codec": "fp16"}), (1, {"codec": 7}), (1, {"codec": None})):
        message = {**request(images, cut).to_json(), **others}
        assert "codec" in refused(client.post("/v1/features", json=message), 400, "BadRequest")
    for tolerance in (-1, "0.1", True):
        message = {**request(images, 1, codec="fp16").to_json(), "tolerance": tolerance}
        assert "tolerance" in refused(client.post("/v1/features", json=message), 400, "BadRequest")
    for codecs in (["gzip"], "fp16", [1], ["fp16"] * 99):
        message = {**request(images, 1).to_json(), "codecs": codecs}
        assert "codecs" in refused(client.post("/v1/profiles", json=message), 400, "BadRequest")


def test_refuses_a_request_beyond_the_limit_before_its_body_is_read(client, node, images):
    with node.admit(), node.admit():
        answer = client.post("/v1/features", content=b"not even JSON")
        refused(answer, 429, "Overloaded")
        assert int(answer.headers["Retry-After"]) >= 1
        refused(client.post("/v1/profiles", json=request(images, 1).to_json()), 429, "Overloaded")
    assert post(client, request(images, 1)).status_code == 200
    assert node.statistics().totals.refused_busy == 2


def test_a_profile_counts_every_cut(client, images):
    network = small_network()
    digest, body = artifact_of(network)
    client.put(f"/v1/prefixes/{digest}", content=body)
    answer = client.post("/v1/profiles", json=request(images, 2, digest).to_json()).json()
    assert [cut["number"] for cut in answer["cuts"]] == [cut.number for cut in network.cuts]
    assert answer["cuts"][1]["seconds"] > 0
    assert [cut["number"] for cut in client.post("/v1/profiles", json=request(images, 1).to_json()).json()["cuts"]] == [
        0,
        1,
    ]


def test_every_figure_of_the_statistics_is_a_metric(client, node, images):
    post(client, request(images, 1))
    text = client.get("/v1/metrics").text
    statistics = client.get("/v1/statistics").json()
    assert "frostline_node_samples_total 4.0" in text
    assert 'frostline_node_memory_reserved_bytes{share="work"} 0.0' in text
    for name in (
        *statistics["totals"],
        *(name for name, value in statistics.items() if type(value) in (int, float)),
    ):
        assert f"frostline_node_{name.removesuffix('_s')}" in text


def test_unknown_paths_and_methods_are_refused_as_json(client):
    refused(client.get("/v1/nothing"), 404, "Refused")
    refused(client.get("/v1/features"), 405, "Refused")


OPERATIONS = [(path, method) for path, item in DESCRIPTION["paths"].items() for method in item]


# The usual ones of what is no valid request, and that it is too large besides.
REFUSALS = schemathesis.Config.from_dict(
    {"checks": {"negative_data_rejection": {"expected-statuses": [400, 401, 403, 404, 405, 409, 413, 415, 422, 429]}}}
)


@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_the_app_does_what_its_description_says(node, path, method):
    described = schemathesis.openapi.from_asgi("/v1/openapi.json", whole_app(node), config=REFUSALS)
    operation = described[path][method]

    @given(case=st.one_of(operation.as_strategy(), operation.as_strategy(GenerationMode.NEGATIVE)))
    @settings(max_examples=25, suppress_health_check=list(HealthCheck))
    def holds(case):
        # Whether a valid request is accepted depends on what the node holds and serves.
        case.call_and_validate(excluded_checks=[positive_data_acceptance])

    holds()


SCHEMAS = DESCRIPTION["components"]["schemas"]


def test_every_field_is_described_by_a_sentence():
    fields = {(name, field): said for name, schema in SCHEMAS.items() for field, said in schema["properties"].items()}
    changes = {"TenantChange", "ChangedTenant"}  # as the settings of tenants say
    assert {key for key, said in fields.items() if not said.get("description")} <= {
        (name, field) for name, field in fields if name in changes or field in ("digest", "held", "id")
    }


def described(name):
    kinds = SCHEMAS["Preprocess"]["properties"]["steps"]["items"]["anyOf"]
    return next(kind for kind in kinds if kind["properties"]["step"]["const"] == name)


PAIR = NamedInputs(("a", "b"), ((ReadArray((3,)),), (ReadArray((4,)),)))


@pytest.mark.parametrize("step", [ReadArray((3, 4)), DecodeAudio(16_000, 1.0), Tokenize("0" * 64, 8), PAIR])
def test_every_field_is_described_and_required(step):
    written = step_to_json(step)
    found = described(written["step"])
    assert set(found["properties"]) == set(found["required"]) == set(written)


MISSPELT = [
    ("/v1/features", {"tolerence": 1e-6}, "tolerance"),
    ("/v1/features", {"samples": {"object": []}}, "objects"),
    ("/v1/features", {"view": {"seed": 1, "epoch": 0, "recurrs": True}}, "recurs"),
    ("/v1/features", {"codecs": ["fp16"]}, "codec"),
    ("/v1/profiles", {"trial": 0.0}, "trial_s"),
    ("/v1/profiles", {"tolerence": 1e-6}, "tolerance"),
    ("/v1/embeddings", {"inputs": ["a"]}, "input"),
    ("/v1/listings", {"relists": True}, "relist"),
]


@pytest.mark.parametrize(("path", "beside", "meant"), MISSPELT)
def test_a_field_that_nobody_reads_is_refused_by_its_name(client, images, path, beside, meant):
    whole = {
        "/v1/features": request(images, 1).to_json(),
        "/v1/profiles": {**request(images, 1).to_json(), "codecs": []},
        "/v1/embeddings": {"model": "0" * 64, "input": "a", "user": "somebody"},
        "/v1/listings": {"data": images.as_uri()},
    }[path]
    body = {**whole, **{name: {**whole[name], **more} if name == "samples" else more for name, more in beside.items()}}
    message = refused(client.post(path, json=body), 400, "BadRequest")
    wrong = next(iter(beside.get("samples", beside)))
    wrong = "recurrs" if wrong == "view" else wrong
    assert f"has no field {wrong!r}" in message
    assert meant in message.partition("did you mean")[2]


def test_a_change_and_a_report_with_another_field_are_refused(client):
    with pytest.raises(BadRequest, match="a change has no field 'wieght'; did you mean weight"):
        fields_of_patch({"wieght": 2}, ("weight", "requests"))
    report = {"stage": "a", "job": "b", "sequence": 1, "has_endet": True}
    assert "has_ended" in refused(client.post("/v1/stages", json=report), 400, "BadRequest")


def test_a_parameter_of_an_address_that_nobody_reads_is_refused_on_every_route(client):
    assert {"get", "patch", "post", "put"} <= {method for _, method in OPERATIONS}
    for path, method in OPERATIONS:
        if path != "/":  # a page, of which a browser keeps what it likes
            asked = f"{re.sub('{.*?}', '0' * 64, path)}?tenant=a"
            answer = client.request(method, asked)
            assert answer.status_code == 400
            assert method == "head" or "no field 'tenant'" in refused(answer, 400, "BadRequest")
    said = refused(client.get("/v1/view?jobs=1&jobs=2"), 400, "BadRequest")
    assert said == "the address has the field 'jobs' twice"


def test_a_field_that_stands_twice_in_a_body_is_refused_wherever_it_stands(client):
    for path, body in (
        ("/v1/features", '{"tolerance": 1e-6, "tolerance": 1}'),
        ("/v1/features", '{"samples": {"ids": [1], "tolerance": 1, "tolerance": 1}}'),
        ("/v1/listings", '{"data": "file:///a", "tolerance": 1, "tolerance": 1}'),
        ("/v1/stages", '{"tolerance": 1, "tolerance": 1}'),
    ):
        answer = client.post(path, content=body, headers={"Content-Type": "application/json"})
        assert refused(answer, 400, "BadRequest") == "the body has the field 'tolerance' twice"


def test_is_ready_until_its_folder_is_gone_or_it_drains(client, node, images):
    assert client.get("/v1/ready").json() == {"ready": True, "why": ""}
    moved = images.rename(images.with_name("moved"))
    answer = client.get("/v1/ready")
    assert answer.status_code == 503
    assert "cannot be listed" in answer.json()["why"]
    moved.rename(images)
    assert client.get("/v1/ready").status_code == 200
    node.drain()
    assert client.get("/v1/ready").json() == {"ready": False, "why": "draining"}
    assert client.get("/v1/health").json()["trouble"] == "draining"
    assert client.get("/v1/openapi.json").status_code == 200, "it is alive"
    assert "draining" in refused(client.post("/v1/features", json=request(images, 1).to_json()), 503, "NodeUnreachable")


def test_whether_a_node_is_ready_does_not_depend_on_how_much_its_folders_hold(tmp_path):
    """All names of a folder of a million take longer than a disk may that does not hang."""
    (tmp_path / "0").touch()
    for number in range(1, 20_000):
        os.link(tmp_path / "0", tmp_path / f"{number:0100}")
    with Node(NodeSettings(memory_bytes=MEMORY), (tmp_path.as_uri(),)) as node:
        node.not_ready()
        tracemalloc.start()
        began_s = time.thread_time()
        assert node.not_ready() == ""
        assert time.thread_time() - began_s < 0.1
        assert tracemalloc.get_traced_memory()[1] < 1 << 20, "their names alone have two megabytes"
        tracemalloc.stop()


def test_a_full_node_is_not_ready_and_in_no_trouble(client, node):
    with node.admit(), node.admit():
        assert client.get("/v1/ready").status_code == 503
        assert client.get("/v1/health").json()["trouble"] == ""
    assert client.get("/v1/ready").status_code == 200


@pytest.mark.parametrize(("said", "status"), [("1", 200), ("", 200), ("0", 400), ("2", 400), ("one", 400), ("-1", 400)])
def test_a_request_of_a_protocol_that_the_node_does_not_speak_is_refused(client, said, status):
    answer = client.get("/v1/health", headers={PROTOCOL_HEADER: said} if said else {})
    assert answer.status_code == status
    assert status == 400 or answer.json()["protocol"] == [1, 1]
