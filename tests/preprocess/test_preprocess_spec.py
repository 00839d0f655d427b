"""Preprocessing as data: JSON in and out, strict and bounded."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frostline.core.errors import BadRequest, SettingError
from frostline.preprocess import (
    CenterCrop,
    ColorJitter,
    Decode,
    Normalize,
    Preprocess,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
    efficientnet_lite,
    imagenet,
)

NORMALIZE = Normalize(mean=(1.0, 2.0, 3.0), std=(4.0, 5.0, 6.0))

sides = st.integers(1, 4096)
filters = st.sampled_from(["bilinear", "bicubic"])
steps = st.one_of(
    st.builds(Resize, sides, filters),
    st.builds(CenterCrop, sides),
    st.builds(RandomResizedCrop, sides, filter=filters),
    st.builds(RandomHorizontalFlip, st.floats(0, 1)),
    st.builds(ColorJitter, *[st.floats(0, 0.5)] * 4),
)


def preprocess_of(*between):
    return Preprocess(steps=(Decode(), *between, NORMALIZE))


@given(st.lists(steps, max_size=11), sides)
def test_every_preprocessing_comes_back_from_its_json(between, side):
    given_one = Preprocess(steps=(Decode(reduced=True), Resize(side), CenterCrop(side), *between, NORMALIZE))
    again = Preprocess.from_json(json.loads(json.dumps(given_one.to_json())))
    assert again == given_one
    assert again.digest == given_one.digest
    assert again.shape == given_one.shape


def test_digest_depends_on_the_steps():
    assert len({imagenet(224).digest, imagenet(192).digest, imagenet(224, augment=True).digest}) == 3
    assert len({efficientnet_lite(224).digest, imagenet(224).digest}) == 2


def test_imagenet_and_efficientnet_lite_are_what_the_networks_were_trained_with():
    assert imagenet(224).steps[1:3] == (Resize(256, "bilinear"), CenterCrop(224))
    assert efficientnet_lite(224).steps[1:3] == (Resize(256, "bicubic"), CenterCrop(224))
    assert efficientnet_lite(224).steps[3] == Normalize(mean=(127.0,) * 3, std=(128.0,) * 3)
    assert imagenet(224).shape == (3, 224, 224)


def test_only_steps_that_draw_make_it_random():
    assert imagenet(224, augment=True).is_random
    assert preprocess_of(CenterCrop(8), RandomHorizontalFlip(0.5)).is_random
    assert not imagenet(224).is_random


def wrong(**change):
    value = imagenet(224).to_json()
    value["steps"][1].update(change)
    return value


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        {},
        {"steps": 3},
        {"steps": []},
        {"steps": [3, 4, 5]},
        {"steps": [{"step": "decode", "mode": "RGB"}] * 17},
        {**imagenet(224).to_json(), "more": 1},
        {"steps": imagenet(224).to_json()["steps"][1:]},
        {"steps": imagenet(224).to_json()["steps"][:-1]},
        {"steps": [*imagenet(224).to_json()["steps"], {"step": "exec", "code": "x"}]},
        wrong(shorter=0),
        wrong(shorter=4097),
        wrong(shorter=2.5),
        wrong(shorter=True),
        wrong(shorter="256"),
        wrong(shorter=None),
        wrong(filter="lanczos"),
        wrong(filter=["bilinear"]),
        wrong(more=1),
        wrong(step="no_such_step"),
        wrong(step=["resize"]),
    ],
)
def test_refuses_an_invalid_preprocessing(value):
    with pytest.raises(BadRequest, match="preprocess") as caught:
        Preprocess.from_json(value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "value",
    [
        {"mean": [1.0], "std": [1.0]},
        {"mean": [1.0] * 3, "std": [0.0] * 3},
        {"mean": [float("nan")] * 3, "std": [1.0] * 3},
        {"mean": ["1"] * 3, "std": [1.0] * 3},
        {"mean": [1.0] * 100_000, "std": [1.0] * 3},
        {"mean": 1.0, "std": [1.0] * 3},
    ],
)
def test_refuses_an_invalid_normalisation(value):
    whole = imagenet(224).to_json()
    whole["steps"][-1].update(value)
    with pytest.raises(BadRequest):
        Preprocess.from_json(whole)


keys = st.sampled_from(["steps", "step", "mode", "size", "decode"])
leaves = st.none() | st.booleans() | st.integers() | st.floats() | keys
jsons = st.recursive(leaves, lambda inner: st.lists(inner) | st.dictionaries(keys, inner), max_leaves=10)


@given(jsons)
def test_refuses_arbitrary_json(value):
    with pytest.raises(BadRequest):
        Preprocess.from_json(value)


def test_a_preprocessing_of_unknown_size_is_refused():
    with pytest.raises(SettingError, match="CenterCrop"):
        preprocess_of(Resize(256))


def test_a_grey_image_has_one_channel():
    grey = Preprocess(steps=(Decode("L"), CenterCrop(8), Normalize(mean=(0,), std=(255,))))
    assert grey.shape == (1, 8, 8)
    assert Preprocess.from_json(grey.to_json()) == grey
