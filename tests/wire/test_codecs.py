"""Codecs: names, what they keep, what they lose, and what untrusted clients may send."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from frostline.core import EXACT, FeatureBatch, PackedTensor
from frostline.core import LOSSY as PRECISIONS
from frostline.core.errors import FrostlineError, SettingError
from frostline.wire.codecs import CODECS, Codec, offered_codecs, relative_error
from frostline.wire.packing import pack, packing_memory, unpack

LOSSLESS = [name for name in CODECS if Codec.parse(name).is_lossless]
LOSSY = [name for name in CODECS if not Codec.parse(name).is_lossless]
BY_ROW = [name for name in CODECS if Codec.parse(name).by_row]
DTYPES = ["bool", "uint8", "int32", "int64", "float16", "float32", "float64"]
SHAPES = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5)


def batch(*tensors):
    return FeatureBatch(ids=np.arange(len(tensors[0])), tensors=tensors)


def there_and_back(tensor, codec, tolerance=None):
    packed = pack(batch(tensor), codec, tolerance)
    return packed, unpack(packed).tensors[0]


def any_bits(dtype, shape):
    """Arrays of any bits, infinities, NaN of any kind and -0.0 among them; many zeros."""
    dtype = np.dtype(dtype)
    if dtype == np.bool_:
        return hnp.arrays(dtype, shape)
    words = hnp.arrays(f"u{dtype.itemsize}", shape, elements=st.integers(0, 2 ** (8 * dtype.itemsize) - 1))
    return words.map(lambda item: item.view(dtype) if item.ndim else item)


def relu_like(rows=6, shape=(7, 5, 5), seed=0, dtype=np.float32):
    random = np.random.default_rng(seed)
    return np.maximum(random.normal(size=(rows, *shape)), 0).astype(dtype)


def test_a_name_gives_a_codec_and_the_codec_its_name():
    assert len(set(CODECS)) == len(CODECS) >= 24
    assert CODECS[0] == "exact"
    for name in CODECS:
        assert Codec.parse(name).name == name
    assert Codec.parse("int8+sparse+zstd") == Codec(precision="int8", sparse=True, compression="zstd")
    assert Codec.parse("sparse").is_lossless


def test_every_accuracy_in_fewer_bits_allows_codecs_that_are_finer():
    assert {Codec.parse(name).precision for name in CODECS} == {EXACT, *PRECISIONS}
    for place, accuracy in enumerate(PRECISIONS):
        names = offered_codecs(accuracy, is_relu=False, dtypes=["float32"])
        assert {Codec.parse(name).precision for name in names} == {EXACT, *PRECISIONS[: place + 1]}


@pytest.mark.parametrize("name", ["", "exact+zstd", "zstd+sparse", "fp8", "fp16+", "FP16"])
def test_any_other_name_is_refused_with_the_nearest(name):
    with pytest.raises(SettingError, match="no codec"):
        Codec.parse(name)
    with pytest.raises(SettingError, match="did you mean fp16"):
        Codec.parse("fp-16")


def test_an_accuracy_offers_what_it_allows_and_sparse_only_behind_a_relu():
    assert offered_codecs("exact", is_relu=False, dtypes=["float32"]) == ("exact", "lz4", "zstd")
    assert offered_codecs("exact", is_relu=True, dtypes=["float32"]) == ("exact", "sparse", "sparse+lz4", "sparse+zstd")
    assert offered_codecs("float32", is_relu=True, dtypes=["float32"]) == offered_codecs(
        "exact", is_relu=True, dtypes=["float32"]
    )
    assert offered_codecs("bf16", is_relu=False, dtypes=["float32"])[3:] == ("fp16", "fp16+zstd", "bf16", "bf16+zstd")
    assert offered_codecs("fp16", is_relu=False, dtypes=["float32"])[3:] == ("fp16", "fp16+zstd")
    for accuracy in ("int8", 0.01, 0):
        names = offered_codecs(accuracy, is_relu=True, dtypes=["float32"])
        assert {Codec.parse(name).precision for name in names} == {"exact", "fp16", "bf16", "int8"}
        assert set(names) <= set(CODECS)


def test_only_floats_that_become_shorter_are_narrowed():
    assert offered_codecs("int8", is_relu=False, dtypes=["int64", "bool"]) == ("exact", "lz4", "zstd")
    assert offered_codecs("int8", is_relu=False, dtypes=["float16"])[3:] == ("int8", "int8+zstd")
    assert "fp16" in offered_codecs("fp16", is_relu=False, dtypes=["int64", "float32"])


@pytest.mark.parametrize("accuracy", ["fp8", "", -0.1, float("nan"), float("inf"), True, None])
def test_refuses_an_invalid_accuracy(accuracy):
    with pytest.raises(SettingError, match="accuracy is"):
        offered_codecs(accuracy, is_relu=False, dtypes=["float32"])


@given(st.data(), st.sampled_from(LOSSLESS), st.sampled_from(DTYPES), st.integers(0, 4), SHAPES)
def test_a_lossless_codec_gives_the_same_bits(data, codec, dtype, rows, shape):
    tensor = data.draw(any_bits(dtype, (rows, *shape)))
    packed, got = there_and_back(tensor, codec)
    assert packed.error == 0.0
    assert got.dtype == tensor.dtype
    assert got.shape == tensor.shape
    assert got.tobytes() == tensor.tobytes()


@pytest.mark.parametrize("codec", LOSSLESS)
def test_minus_zero_and_every_kind_of_nan_stay(codec):
    words = np.array([[0x80000000, 0x7FC00001, 0xFFC12345, 0x7F800001, 0, 1, 0x7F800000, 0]], np.uint32)
    _, got = there_and_back(words.view(np.float32), codec)
    assert got.view(np.uint32).tolist() == words.tolist()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("shape", [(7, 5, 5), (64, 56, 56), (9, 16), (70_000,), ()])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_a_batch_equals_its_rows_computed_singly(codec, shape, dtype):
    rows = relu_like(3, shape, dtype=dtype)
    whole, together = there_and_back(rows, codec)
    apart = [there_and_back(rows[row : row + 1], codec) for row in range(3)]
    assert together.tobytes() == b"".join(got.tobytes() for _, got in apart)
    assert whole.error == max(packed.error for packed, _ in apart)
    assert whole.nbytes == sum(packed.nbytes for packed, _ in apart)


@pytest.mark.parametrize("codec", [*BY_ROW, "fp16", "int8"])
@pytest.mark.parametrize("rows", [relu_like(), -relu_like(seed=3), np.zeros((2, 9), np.float32)])
def test_packing_takes_no_more_than_it_says(codec, rows):
    packed = pack(batch(rows), codec)
    assert packed.nbytes <= len(rows) * packing_memory([rows.shape[1:]], [rows.dtype], codec).bytes_per_sample
    assert sum(item.body.base is None or item.body.base.nbytes == item.body.nbytes for item in packed.packed) == 1


def test_packs_zeros_and_equal_values_small():
    sizes = {codec: pack(batch(relu_like(8, (32, 14, 14))), codec).nbytes for codec in CODECS if codec != "exact"}
    assert 0.5 < sizes["sparse"] / (8 * 32 * 14 * 14 * 4) < 0.55
    assert sizes["sparse+zstd"] < sizes["sparse+lz4"] < sizes["sparse"]
    assert sizes["int8+sparse+zstd"] < sizes["fp16+sparse+zstd"] < sizes["sparse+zstd"]
    assert pack(batch(np.zeros((8, 4096), np.float32)), "zstd").nbytes < 300


FLOATS = st.floats(-65504, 65504, width=32)


@given(hnp.arrays(np.float32, st.tuples(st.integers(1, 3), st.integers(1, 9)), elements=FLOATS))
def test_fp16_rounds_to_nearest_even(tensor):
    packed, got = there_and_back(tensor, "fp16")
    wanted = tensor.astype(np.float16)
    assert packed.packed[0].body.tobytes() == wanted.tobytes()
    assert got.tobytes() == wanted.astype(np.float32).tobytes()


def test_fp16_rounds_every_pattern_of_bits_near_a_tie_as_numpy_does():
    halves = np.arange(0x7BFF, dtype=np.uint16).view(np.float16).astype(np.float32)
    ties = ((halves[1:].astype(np.float64) + halves[:-1]) / 2).astype(np.float32)
    values = np.concatenate([ties, np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(1e9)), halves])
    for tensor in (values[None], -values[None]):
        assert pack(batch(tensor), "fp16").packed[0].body.tobytes() == tensor.astype(np.float16).tobytes()


@given(any_bits("float32", (2, 40)))
def test_bf16_rounds_to_nearest_even(tensor):
    tensor = np.where(np.isfinite(tensor), tensor, 1)
    packed, got = there_and_back(tensor, "bf16")
    wanted = torch.from_numpy(tensor).to(torch.bfloat16).to(torch.float32).numpy()
    if np.isfinite(wanted).all():
        assert packed.packed[0].codec == "bf16"
        assert got.tobytes() == wanted.tobytes()
    else:
        assert got.tobytes() == tensor.tobytes()


CHANNELS = {(3, 4, 2): (1, 2), (5, 3): (0,), (6,): (0,), (4, 1, 1): (0, 1, 2), (1, 4): (0, 1), (2, 3, 2, 2): (1, 2, 3)}


@given(st.data(), st.sampled_from(list(CHANNELS)), st.sampled_from([1e-38, 1e-3, 1.0, 1e30]))
def test_int8_is_off_by_half_a_step_of_its_channel_at_most(data, shape, size):
    elements = st.floats(-1, 1, width=32)
    tensor = data.draw(hnp.arrays(np.float32, (2, *shape), elements=elements)) * np.float32(size)
    packed, got = there_and_back(tensor, "int8")
    assert packed.packed[0].codec == "int8"
    axes = tuple(axis + 1 for axis in CHANNELS[shape])
    top = np.abs(tensor).max(axes, keepdims=True).astype(np.float64)
    assert packed.packed[0].scale.shape == (2, top[0].size)
    assert (np.abs(got.astype(np.float64) - tensor) <= np.maximum(top * (1 / 254 + 2**-22), 2.0**-127)).all()


def error_of(tensor, got):
    ours, its = (item.astype(np.float64).reshape(len(item), -1) for item in (tensor, got))
    power = np.square(ours).sum(1)
    return np.sqrt(np.square(ours - its).sum(1)[power > 0] / power[power > 0]).max(initial=0.0)


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("size", [1e-4, 1.0, 300.0])
@pytest.mark.parametrize("shape", [(64, 40, 40), (50,)])
def test_the_error_is_that_of_the_worst_sample(codec, size, shape):
    tensor = relu_like(4, shape) * np.array([size, 0, 1, 7], np.float32).reshape(-1, *[1] * len(shape))
    packed, got = there_and_back(tensor, codec)
    assert packed.error == pytest.approx(error_of(tensor, got), rel=1e-4)
    assert 0 < packed.error < 0.01
    assert relative_error(tensor, got) == pytest.approx(packed.error)


@given(
    hnp.arrays(np.float32, (2, 6), elements=st.floats(-(2**100), 2**100, width=32)), st.sampled_from(["bf16", "int8"])
)
def test_reports_errors_at_any_scale(tensor, codec):
    packed, got = there_and_back(tensor, codec)
    assert packed.error == pytest.approx(error_of(tensor, got), rel=1e-4)


def test_errors_of_samples_that_have_none():
    zeros, ones = np.zeros((1, 3), np.float32), np.ones((1, 3), np.float32)
    assert relative_error(ones, ones) == 0.0
    assert relative_error(zeros, zeros) == 0.0
    assert relative_error(zeros, ones) == np.inf
    assert relative_error(ones, ones * np.nan) == np.inf
    assert relative_error(np.zeros((0, 3)), np.zeros((0, 3))) == 0.0


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, 3.4e38])
def test_sends_values_that_a_lossy_codec_cannot_hold_losslessly(codec, value):
    tensor = relu_like(3)
    tensor[1, 2, 3, 4] = value
    packed, got = there_and_back(tensor, codec)
    twin = Codec.parse(codec).lossless.name
    assert [item.codec for item in packed.packed] == ([] if twin == "exact" else [twin])
    assert packed.error == 0.0
    assert got.tobytes() == tensor.tobytes()


@pytest.mark.parametrize(("value", "holds"), [(65519.0, True), (-65519.0, True), (65520.0, False), (1e9, False)])
def test_fp16_holds_what_rounds_to_a_finite_value(value, holds):
    packed, got = there_and_back(np.full((1, 3), value, np.float32), "fp16")
    assert bool(packed.packed) == holds
    assert got[0, 0] == (np.float32(np.float16(value)) if holds else value)


def test_an_error_above_the_tolerance_makes_a_batch_lossless():
    tensor = relu_like()
    error = pack(batch(tensor), "int8").error
    assert pack(batch(tensor), "int8+zstd", error).error == error
    strict = pack(batch(tensor), "int8+zstd", error / 2)
    assert strict.error == 0.0
    assert unpack(strict).tensors[0].tobytes() == tensor.tobytes()


def test_each_tensor_of_a_cut_is_packed_as_its_dtype_allows():
    mask = np.arange(12, dtype=np.int64).reshape(4, 3) % 2
    hidden = relu_like(4, (6, 8))
    packed = pack(batch(hidden, mask), "fp16+zstd")
    assert [item.codec for item in packed.packed] == ["fp16+zstd", "zstd"]
    got = unpack(packed)
    assert got.error == packed.error > 0
    assert got.tensors[1].tobytes() == mask.tobytes()
    assert [item.codec for item in pack(batch(hidden, mask), "fp16").packed] == ["fp16", "exact"]


@pytest.mark.parametrize("codec", CODECS)
def test_batches_without_rows_or_tensors_pass(codec):
    empty = pack(batch(np.zeros((0, 3, 4), np.float32)), codec)
    assert unpack(empty).tensors[0].shape == (0, 3, 4)
    encoded = FeatureBatch(ids=np.arange(1), encoded=[b"jpeg"])
    assert pack(encoded, codec) is encoded


@pytest.mark.parametrize("codec", BY_ROW)
@given(st.data())
def test_changed_bytes_give_features_of_that_shape_or_a_sentence(codec, data):
    (packed,) = pack(batch(relu_like(2, (3, 3, 3))), codec).packed
    body = packed.body.copy()
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] ^= data.draw(st.integers(1, 255))
    bounds = packed.bounds.copy()
    bounds[1] = data.draw(st.integers(0, len(body)))
    sent = PackedTensor(codec=codec, shape=packed.shape, dtype=packed.dtype, body=body, bounds=bounds)
    sentence = ""
    try:
        (got,) = unpack(FeatureBatch(ids=np.arange(2), packed=(sent,))).tensors
    except FrostlineError as error:
        sentence = str(error)
    if sentence:
        assert "cannot be unpacked" in sentence
        assert "\n" not in sentence
    else:
        assert got.shape == (2, 3, 3, 3)
        assert got.dtype == np.float32


def sent_row(codec, row, shape=(16,)):
    body = np.frombuffer(row, np.uint8)
    packed = PackedTensor(
        codec=codec, shape=shape, dtype=np.dtype(np.float32), body=body, bounds=np.array([0, len(body)], np.int64)
    )
    return unpack(FeatureBatch(ids=np.arange(1), packed=(packed,)))


def raw(length, body=b""):
    return length.to_bytes(8, "little") + body


def frame(codec, data):
    import pyarrow as pa

    return pa.Codec(codec).compress(data, asbytes=True)


@pytest.mark.parametrize(
    ("codec", "row"),
    [
        ("zstd", raw(1 << 60, b"x")),
        ("lz4", raw(1 << 40, b"x")),
        ("zstd", raw(63)),
        ("zstd", b"short"),
        ("sparse+lz4", raw(2 + 17 * 4, b"x")),
        ("sparse+lz4", raw(1, b"x")),
        ("sparse", b"\0"),
        ("sparse", b"\3\0" + bytes(4)),
        ("sparse", b"\1\0" + bytes(5)),
        ("int8+zstd", raw(15)),
    ],
)
def test_lengths_that_lie_are_refused_before_anything_is_made(codec, row):
    with pytest.raises(FrostlineError, match="cannot be unpacked: a row"):
        sent_row(codec, row)


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
@pytest.mark.parametrize("held", [0, 10, 63, 65, 1 << 24])
def test_a_frame_that_holds_more_or_less_than_it_says_is_refused(codec, held):
    with pytest.raises(FrostlineError, match="cannot be unpacked"):
        sent_row(codec, raw(64, frame(codec, bytes(held))))
    assert not sent_row(codec, raw(64, frame(codec, bytes(64)))).tensors[0].any()


def test_bits_of_values_that_a_row_does_not_have_are_refused():
    with pytest.raises(FrostlineError, match="does not have"):
        sent_row("sparse", b"\0\x80" + bytes(4), shape=(15,))


@pytest.mark.parametrize("codec", LOSSY)
def test_scales_and_values_of_a_stranger_give_no_warning(codec):
    (packed,) = pack(batch(relu_like(2, (3, 3, 3))), codec).packed
    body = np.full_like(packed.body, 0xFF if packed.bounds is None and packed.body.dtype == np.uint16 else 1)
    if packed.bounds is None:
        scale = None if packed.scale is None else np.full_like(packed.scale, np.float32(3.4e38))
        sent = PackedTensor(codec=codec, shape=packed.shape, dtype=packed.dtype, body=body, scale=scale)
        assert unpack(FeatureBatch(ids=np.arange(2), packed=(sent,))).tensors[0].shape == (2, 3, 3, 3)
