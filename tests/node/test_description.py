"""The node's description of itself names the fields of requests and of steps as the code does."""

import json
from dataclasses import fields
from importlib.resources import files

import pytest

from frostline.preprocess import DecodeAudio, NamedInputs, ReadArray, Tokenize
from frostline.preprocess.spec import step_to_json
from frostline.wire.listings import ListingRequest
from frostline.wire.messages import FeatureRequest

SCHEMAS = json.loads(files("frostline.node").joinpath("openapi.json").read_bytes())["components"]["schemas"]


@pytest.mark.parametrize("request_type", [FeatureRequest, ListingRequest])
def test_every_field_of_a_request_is_described(request_type):
    assert set(SCHEMAS[request_type.__name__]["properties"]) == {field.name for field in fields(request_type)}


def described(name):
    properties = [schema.get("properties", {}) for schema in SCHEMAS.values()]
    kinds = next(kinds for some in properties if (kinds := some.get("steps", {}).get("items")))
    return next(kind for kind in kinds["anyOf"] if kind["properties"]["step"]["const"] == name)


PAIR = NamedInputs(("a", "b"), ((ReadArray((3,)),), (ReadArray((4,)),)))


@pytest.mark.parametrize("step", [ReadArray((3, 4)), DecodeAudio(16_000, 1.0), Tokenize("0" * 64, 8), PAIR])
def test_every_field_is_described_and_required(step):
    written = step_to_json(step)
    found = described(written["step"])
    assert set(found["properties"]) == set(found["required"]) == set(written)
