"""The nouns that all packages share: dtypes by name, numbers that are none, texts, masks, and names of data sets."""

import numpy as np
import pytest

from frostline.core import nouns
from frostline.core.nouns import (
    CELLS,
    OBJECTS,
    READINGS,
    Samples,
    Targets,
    Texts,
    array_dtype,
    finite_rows,
    is_finite,
    read_as,
    widen_bfloat16,
)


class Numbered(Texts):
    """Texts of their own numbers, which note how many are made at once."""

    def __init__(self, length):
        self.length, self.made = length, []

    def __len__(self):
        return self.length

    def take(self, rows):
        self.made.append(len(rows))
        return [f"n{row}" for row in rows.tolist()]


def test_texts_are_made_some_at_a_time_when_they_are_iterated(monkeypatch):
    monkeypatch.setattr(nouns, "_AT_ONCE", 3)
    texts = Numbered(8)
    assert list(texts) == [f"n{row}" for row in range(8)]
    assert texts.made == [3, 3, 2]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_infinities_and_nan_of_every_float_are_seen_and_the_largest_number_is_none(dtype):
    bits = {"float16": (0x7BFF, 0x7C00, 0xFC00, 0x7E00), "bfloat16": (0x7F7F, 0x7F80, 0xFF80, 0x7FC0)}.get(dtype)
    if bits is None:
        largest, *wrong = (np.array([value], dtype) for value in (np.finfo(dtype).max, np.inf, -np.inf, np.nan))
    else:
        largest, *wrong = (np.array([value], np.uint16).view(array_dtype(dtype)) for value in bits)
    assert is_finite(largest)
    assert is_finite(-largest if bits is None else (largest.view(np.uint16) | 0x8000).view(largest.dtype))
    for value in wrong:
        assert not is_finite(value)
        assert finite_rows([np.stack([largest, value])], 2, [dtype]).tolist() == [True, False]


def test_only_bfloat16_is_carried_by_other_numbers():
    assert array_dtype("bfloat16") == np.uint16
    assert [array_dtype(name).name for name in ("float16", "float32", "int64", "bool")] == [
        "float16",
        "float32",
        "int64",
        "bool",
    ]
    assert widen_bfloat16(np.array([0x3FC0], np.uint16)).tolist() == [1.5]


def test_an_address_that_is_read_in_another_way_is_another_data_set():
    names = {read_as("s3://bucket/a", reading) for reading in READINGS}
    assert len(names) == len(READINGS)
    assert read_as("s3://bucket/a", OBJECTS) == "s3://bucket/a"
    assert read_as("s3://bucket/a", CELLS) == "cells of s3://bucket/a"


def test_masks_are_samples_with_the_ids_of_their_images():
    def samples(targets):
        column = np.arange(3)
        return Samples(ids=column + 7, objects="abc", offsets=column, lengths=column, labels=column, targets=targets)

    assert [len(part) for part in samples(None).masks] == [0, 0]
    numbers = np.array([0, 5, 6])
    rows, masks = samples(
        Targets(
            objects=["", "m1", "m2"],
            offsets=numbers,
            lengths=numbers,
            versions=["", "v", "w"],
            widths=numbers,
            heights=numbers,
        )
    ).masks
    assert rows.tolist() == [1, 2]
    assert masks.ids.tolist() == [8, 9]
    assert (list(masks.objects), list(masks.versions), masks.lengths.tolist()) == (["m1", "m2"], ["v", "w"], [5, 6])
