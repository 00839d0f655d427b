"""Colour jitter changes pixels as torchvision does, and draws the same on every side."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from frostline.core import View
from frostline.core.errors import SettingError
from frostline.preprocess import CenterCrop, ColorJitter, Decode, Normalize, Preprocess, RandomHorizontalFlip
from frostline.preprocess.apply import decode_into
from frostline.preprocess.images import jitter_colours
from support.nodes import jpeg

PIXELS = Normalize(mean=(0.0,) * 3, std=(1.0,) * 3)
# What Fisher and Yates make of the first three draws; the last four are the factors'.
ORDERS = {
    (0.99, 0.99, 0.99): (0, 1, 2, 3),
    (0.0, 0.0, 0.0): (1, 2, 3, 0),
    (0.6, 0.1, 0.9): (3, 1, 0, 2),
}


def picture(mode="RGB"):
    random = np.random.default_rng(4)
    return Image.fromarray(random.integers(0, 256, (24, 20, 3), np.uint8)).convert(mode)


def by_torchvision(image, step, draws):
    change = pytest.importorskip("torchvision.transforms.functional", exc_type=(ImportError, RuntimeError))
    amounts = (step.brightness, step.contrast, step.saturation)
    factors = [
        max(0, 1 - amount) + (1 + amount - max(0, 1 - amount)) * draw
        for amount, draw in zip(amounts, draws[3:], strict=False)
    ]
    changes = [
        lambda image: change.adjust_brightness(image, factors[0]),
        lambda image: change.adjust_contrast(image, factors[1]),
        lambda image: change.adjust_saturation(image, factors[2]),
        lambda image: change.adjust_hue(image, (2 * draws[6] - 1) * step.hue),
    ]
    for number in ORDERS[draws[:3]]:
        image = changes[number](image)
    return image


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("drawn", [(0.1, 0.9, 0.4, 0.2), (0.8, 0.3, 0.7, 0.95)])
def test_the_same_factors_in_the_same_order_give_torchvisions_pixels(mode, order, drawn):
    step, draws = ColorJitter(0.4, 1.5, 0.3, 0.2), (*order, *drawn)
    ours = jitter_colours(step, picture(mode), iter(draws).__next__)
    assert np.array_equal(np.asarray(ours), np.asarray(by_torchvision(picture(mode), step, draws)))


def test_every_order_is_drawn():
    grid = [(index + 0.5) / 12 for index in range(12)]
    strong = ColorJitter(0.9, 0.9, 0.9, 0.5)
    factors = (0.1, 0.9, 0.95, 0.3)
    changed = {
        jitter_colours(strong, picture(), iter((a, b, c, *factors)).__next__).tobytes()
        for a in grid
        for b in grid
        for c in grid
    }
    assert len(changed) == 24


@given(st.lists(st.floats(0, 1, exclude_max=True), min_size=7, max_size=7))
def test_no_amounts_change_nothing_and_seven_numbers_are_drawn(draws):
    left = iter(draws)
    assert jitter_colours(ColorJitter(), picture(), left.__next__).tobytes() == picture().tobytes()
    assert next(left, None) is None


def decoded(preprocess, id, view):
    out = np.empty(preprocess.shape, np.float32)
    decode_into(preprocess, jpeg(1, (80, 60)), out, id=id, view=view)
    return out


def test_jitter_is_seeded_by_view_and_sample_and_changes_no_earlier_draw():
    plain = Preprocess(steps=(Decode(), CenterCrop(32), RandomHorizontalFlip(), PIXELS))
    jitter = Preprocess(steps=(*plain.steps[:-1], ColorJitter(0.4, 0.4, 0.4, 0.1), PIXELS))
    assert jitter.is_random
    view = View(seed=1, epoch=0)
    assert np.array_equal(decoded(jitter, 5, view), decoded(jitter, 5, view))
    others = [
        decoded(jitter, 6, view),
        decoded(jitter, 5, View(seed=1, epoch=1)),
        decoded(jitter, 5, View(seed=2, epoch=0)),
    ]
    assert not any(np.array_equal(decoded(jitter, 5, view), other) for other in others)
    still = Preprocess(steps=(*plain.steps[:-1], ColorJitter(), PIXELS))
    assert np.array_equal(decoded(still, 5, view), decoded(plain, 5, view))


def test_jitter_before_the_size_is_known_is_refused():
    with pytest.raises(SettingError, match="behind CenterCrop"):
        Preprocess(steps=(Decode(), ColorJitter(0.1), CenterCrop(32), PIXELS))


@pytest.mark.parametrize("amounts", [{"brightness": -1}, {"hue": 0.6}, {"contrast": "1"}, {"saturation": float("nan")}])
def test_refuses_invalid_amounts(amounts):
    with pytest.raises(SettingError, match=next(iter(amounts))):
        ColorJitter(**amounts)
