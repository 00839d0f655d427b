"""The node's description of itself names the fields of steps that stand alone."""

import json
from importlib.resources import files

import pytest

from frostline.preprocess import DecodeAudio, NamedInputs, ReadArray, Tokenize
from frostline.preprocess.spec import step_to_json


def described(name):
    steps = json.loads(files("frostline.node").joinpath("openapi.json").read_bytes())
    schemas = steps["components"]["schemas"].values()
    kinds = next(kinds for schema in schemas if (kinds := schema.get("properties", {}).get("steps", {}).get("items")))
    return next(kind for kind in kinds["anyOf"] if kind["properties"]["step"]["const"] == name)


PAIR = NamedInputs(("a", "b"), ((ReadArray((3,)),), (ReadArray((4,)),)))


@pytest.mark.parametrize("step", [ReadArray((3, 4)), DecodeAudio(16_000, 1.0), Tokenize("0" * 64, 8), PAIR])
def test_every_field_is_described_and_required(step):
    written = step_to_json(step)
    found = described(written["step"])
    assert set(found["properties"]) == set(found["required"]) == set(written)
