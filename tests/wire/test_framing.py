import json
import zlib
from itertools import combinations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from frostline.core import FeatureBatch, Skipped
from frostline.core.errors import AccessDenied, AnswerDamaged, FrostlineError, NodeUnreachable, Unavailable
from frostline.wire.codecs import CODECS
from frostline.wire.framing import Encoder, decode
from frostline.wire.packing import pack, unpack

pytestmark = pytest.mark.promise("intact", mended="a flipped bit in an answer was a wrong feature")


class Bytes:
    def __init__(self, data):
        self.data, self.at, self.checksum = memoryview(data), 0, 0

    def read(self, nbytes):
        part = self.data[self.at : self.at + nbytes]
        self.at += len(part)
        self.checksum = zlib.crc32(part, self.checksum)
        return part


def stream(*batches):
    encoder = Encoder()
    parts = [part for batch in batches for part in encoder.encode(batch)]
    return b"".join([*parts, encoder.finish()])


def batch(rows=4, shape=(3, 5), dtype=np.float32, first=0, skipped=()):
    values = np.arange(rows * int(np.prod(shape))).reshape(rows, *shape).astype(dtype)
    return FeatureBatch(ids=np.arange(first, first + rows), tensors=(values,), skipped=skipped)


def same(one, other):
    assert one.error == other.error
    for mine, its in zip(one.packed, other.packed, strict=True):
        assert (mine.codec, mine.shape, mine.dtype) == (its.codec, its.shape, its.dtype)
        assert mine.nbytes == its.nbytes
    one, other = unpack(one), unpack(other)
    assert one.ids.tolist() == other.ids.tolist()
    assert one.skipped == other.skipped
    assert [bytes(part) for part in one.encoded] == [bytes(part) for part in other.encoded]
    assert len(one.tensors) == len(other.tensors)
    for mine, its in zip(one.tensors, other.tensors, strict=True):
        assert mine.dtype == its.dtype
        assert mine.shape == its.shape
        assert mine.tobytes() == its.tobytes()


DTYPES = st.sampled_from([np.float32, np.float16, np.float64, np.int64, np.uint8, np.bool_])


@given(st.data(), st.integers(0, 5), st.integers(1, 3))
def test_tensors_of_any_shape_come_back_as_they_were(data, rows, count):
    shapes = [data.draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)) for _ in range(count)]
    tensors = tuple(data.draw(hnp.arrays(data.draw(DTYPES), (rows, *shape))) for shape in shapes)
    sent = FeatureBatch(ids=np.arange(rows), tensors=tensors)
    (got,) = decode(Bytes(stream(sent)))
    same(got, sent)


@given(st.lists(st.binary(max_size=20), max_size=5))
def test_encoded_samples_come_back_as_they_were(encoded):
    sent = FeatureBatch(ids=np.arange(len(encoded)), encoded=tuple(encoded))
    (got,) = decode(Bytes(stream(sent)))
    same(got, sent)


def test_skipped_samples_travel_with_their_batch_and_batches_may_be_empty():
    lost = Skipped(id=7, object="a/ü.jpg", reason="broken image")
    sent = [batch(), batch(rows=0, skipped=(lost,)), batch(first=9)]
    for got, request in zip(decode(Bytes(stream(*sent))), sent, strict=True):
        same(got, request)


def test_large_tensors_are_sent_and_read_without_a_copy():
    sent = batch(rows=8, shape=(64, 64))
    parts = Encoder().encode(sent)
    assert any(np.shares_memory(np.frombuffer(part, np.uint8), sent.tensors[0]) for part in parts)
    whole = np.frombuffer(stream(sent), np.uint8)
    (got,) = decode(Bytes(whole))
    assert np.shares_memory(got.tensors[0], whole)


def test_small_parts_are_merged():
    assert len(list(Encoder().encode(batch()))) == 1


@given(st.data())
def test_an_answer_cut_short_anywhere_counts_as_broken_off(data):
    whole = stream(batch(), batch(first=4))
    end = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(NodeUnreachable, match="broke off"):
        list(decode(Bytes(whole[:end])))


@given(st.binary(min_size=64, max_size=200))
def test_anything_else_is_refused_with_a_sentence(junk):
    with pytest.raises(FrostlineError):
        list(decode(Bytes(junk)))


@given(st.data())
def test_an_answer_with_changed_bits_is_never_taken_for_other_features(data):
    lost = (Skipped(id=1, object="a", reason="b"),)
    sent = data.draw(
        st.sampled_from(
            [
                [batch(skipped=lost), batch(first=4)],
                [FeatureBatch(ids=np.arange(3), encoded=[b"first", b"", b"third"], skipped=lost)],
                *([features(relu(), codec=codec), features(relu(), codec="exact")] for codec in CODECS),
            ]
        )
    )
    whole = bytearray(stream(*sent))
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    found = []
    try:
        for got in decode(Bytes(whole), max_bytes=1 << 20):
            found.append(got)
    except Unavailable:  # and nothing else: it is worth asking again
        pass
    # A length that became none looks like the end: whoever asked for more rows sees that.
    for got, expected in zip(found, sent, strict=False):
        same(got, expected)


def test_one_flipped_bit_in_a_value_is_damage():
    whole = bytearray(stream(batch(rows=64, shape=(64, 64))))
    whole[len(whole) // 2] ^= 1
    with pytest.raises(AnswerDamaged, match="a batch of 64 rows has another checksum"):
        list(decode(Bytes(whole)))


def test_a_part_of_a_senseless_length_is_not_allocated():
    whole = stream(batch(rows=64, shape=(64, 64)))
    with pytest.raises(FrostlineError, match="no stream of features"):
        list(decode(Bytes(whole), max_bytes=1000))


def test_a_failure_after_the_first_batch_reaches_the_reader_as_itself():
    encoder = Encoder()
    parts = [*encoder.encode(batch()), *encoder.fail(AccessDenied("no entry"))]
    answer = decode(Bytes(b"".join(parts)))
    assert len(next(answer)) == 4
    with pytest.raises(AccessDenied, match="no entry"):
        next(answer)


def relu(rows=4, shape=(6, 5, 5), seed=0):
    return np.maximum(np.random.default_rng(seed).normal(size=(rows, *shape)), 0).astype(np.float32)


def features(*tensors, codec, first=0):
    return pack(FeatureBatch(ids=np.arange(first, first + len(tensors[0])), tensors=tensors), codec)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("rows", [0, 1, 4])
def test_packed_batches_come_back_as_they_were(codec, rows):
    mask = np.ones((rows, 3), np.bool_)
    sent = [features(relu(rows), mask, codec=codec), features(relu(rows, seed=1), mask, codec=codec, first=9)]
    for got, request in zip(decode(Bytes(stream(*sent))), sent, strict=True):
        same(got, request)


@pytest.mark.parametrize(("one", "other"), list(combinations(["exact", "fp16", "int8", "sparse+zstd", "int8+lz4"], 2)))
def test_packs_each_batch_of_a_response_by_its_own_codec(one, other):
    names = [one, other, other, one]
    sent = [features(relu(seed=place), codec=name, first=place) for place, name in enumerate(names)]
    got = list(decode(Bytes(stream(*sent))))
    for mine, its in zip(got, sent, strict=True):
        same(mine, its)


def test_an_exact_response_is_one_stream_for_any_arrow_reader():
    whole = stream(batch(), batch(first=4))
    reader = pa.ipc.open_stream(whole)
    assert [field.name for field in reader.schema] == ["id", "features_0"]
    assert not reader.schema.field("features_0").metadata
    assert reader.read_all().num_rows == 8


def test_a_schema_says_how_its_columns_are_packed():
    tensors = relu(2, (4, 3, 3)), np.arange(6).reshape(2, 3)
    schema = pa.ipc.open_stream(stream(features(*tensors, codec="int8"))).schema
    assert schema.names == ["id", "features_0", "features_0_scale", "features_1"]
    assert schema.field(1).metadata == {
        b"frostline.codec": b"int8",
        b"frostline.dtype": b"float32",
        b"frostline.shape": b"[4, 3, 3]",
    }
    assert schema.field(3).metadata[b"frostline.codec"] == b"exact"
    schema = pa.ipc.open_stream(stream(features(*tensors, codec="int8+zstd"))).schema
    assert schema.names == ["id", "features_0", "features_1"]
    assert schema.field(1).type == pa.large_binary()


@pytest.mark.parametrize("codec", ["fp16", "bf16", "sparse", "zstd"])
def test_packed_bytes_are_sent_and_read_without_a_copy(codec):
    sent = features(relu(8, (64, 16, 16)), codec=codec)
    parts = Encoder().encode(sent)
    assert any(np.shares_memory(np.frombuffer(part, np.uint8), sent.packed[0].body) for part in parts)
    whole = np.frombuffer(stream(sent), np.uint8)
    (got,) = decode(Bytes(whole))
    assert np.shares_memory(got.packed[0].body, whole)


@given(st.data())
def test_an_answer_of_several_streams_cut_short_anywhere_counts_as_broken_off(data):
    whole = stream(features(relu(), codec="fp16"), features(relu(), codec="sparse"), features(relu(), codec="fp16"))
    end = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(NodeUnreachable, match="broke off"):
        list(decode(Bytes(whole[:end])))


# For what it holds, and not because it has no checksum.
NO_STREAM = r"no stream of features: (?!.*crc32)"


def sent_by_a_stranger(metadata, column, *others):
    """One batch of two rows with a column of the untrusted client's own."""
    fields = [pa.field("id", pa.int64()), pa.field("features_0", column.type, metadata=metadata)]
    fields += [pa.field(f"features_0_{place}", other.type) for place, other in others]
    columns = [pa.array([1, 2]), column, *(other for _, other in others)]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, pa.schema(fields)) as writer:
        writer.write_batch(pa.record_batch(columns, schema=pa.schema(fields)))
    return list(decode(Bytes(sink.getvalue())))


def says(codec="zstd", shape="[4]", dtype="float32"):
    return {"frostline.codec": codec, "frostline.shape": shape, "frostline.dtype": dtype}


def rows_of(values):
    values = np.ascontiguousarray(values)
    return pa.FixedShapeTensorArray.from_numpy_ndarray(values)


BINARY = pa.array([b"x" * 8, b"y" * 8], pa.large_binary())
HALVES = rows_of(np.ones((2, 4), np.float16))


@pytest.mark.parametrize(
    ("metadata", "column"),
    [
        (says(shape=f"[{1 << 40}]"), BINARY),
        (says(shape=f"[{1 << 20}, {1 << 11}]"), BINARY),
        (says(shape="[-1, -4]"), BINARY),
        (says(shape="[1.5]"), BINARY),
        (says(shape="[true]"), BINARY),
        (says(shape="4"), BINARY),
        (says(shape=json.dumps([1] * 99)), BINARY),
        (says(shape="[" * 10_000), BINARY),
        (says(codec="fp99"), BINARY),
        (says(dtype="object"), BINARY),
        (says(dtype="complex64"), BINARY),
        (says(codec="fp16+zstd", dtype="int64"), BINARY),
        (says(codec="zstd"), HALVES),
        (says(codec="fp16"), BINARY),
        (says(codec="fp16", shape="[2]"), HALVES),
        (says(codec="bf16"), HALVES),
        (says(codec="exact"), HALVES),
        (says(codec="int8"), rows_of(np.ones((2, 4), np.int8))),
        ({"frostline.codec": "zstd"}, BINARY),
        (says(), pa.array([b"x", None], pa.large_binary())),
        (says(), pa.array([b"x", b"y"], pa.binary())),
    ],
)
def test_a_column_that_is_not_what_it_says_is_refused(metadata, column):
    with pytest.raises(FrostlineError, match=NO_STREAM):
        sent_by_a_stranger(metadata, column)


@pytest.mark.parametrize("scale", [np.ones((2, 2), np.float32), np.ones((2, 1), np.float64)])
def test_scales_that_do_not_fit_are_refused(scale):
    column = rows_of(np.ones((2, 4), np.int8))
    with pytest.raises(FrostlineError, match=NO_STREAM):
        sent_by_a_stranger(says("int8"), column, ("scale", rows_of(scale)))
    with pytest.raises(FrostlineError, match=NO_STREAM):
        sent_by_a_stranger(says("fp16"), HALVES, ("scale", rows_of(scale)))


@pytest.mark.parametrize("error", [b"NaN", b"-1.0", b"Infinity", b"true", b'"a"', b"["])
def test_refuses_an_invalid_error(error):
    sink = pa.BufferOutputStream()
    schema = pa.schema([pa.field("id", pa.int64()), pa.field("features_0", HALVES.type, metadata=says("fp16"))])
    with pa.ipc.new_stream(sink, schema) as writer:
        one = pa.record_batch([pa.array([1, 2]), HALVES], schema=schema)
        writer.write_batch(one, custom_metadata={"frostline.error": error})
    with pytest.raises(FrostlineError, match=NO_STREAM):
        list(decode(Bytes(sink.getvalue())))


def test_nothing_may_follow_what_a_stream_calls_its_end():
    sink = pa.BufferOutputStream()
    ids = pa.record_batch([pa.array([1], pa.int64())], names=["id"])
    with pa.ipc.new_stream(sink, ids.schema) as writer:
        writer.write_batch(ids, custom_metadata={"frostline.next": "1"})
        writer.write_batch(ids)
    with pytest.raises(FrostlineError, match="goes on after its end"):
        list(decode(Bytes(sink.getvalue())))
