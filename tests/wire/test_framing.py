import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from frostline.core import FeatureBatch, Skipped
from frostline.errors import AccessDenied, FrostlineError, NodeUnreachable
from frostline.wire.framing import Encoder, decode


class Bytes:
    def __init__(self, data):
        self.data, self.at = memoryview(data), 0

    def read(self, nbytes):
        part = self.data[self.at : self.at + nbytes]
        self.at += len(part)
        return part


def stream(*batches):
    encoder = Encoder()
    parts = [part for batch in batches for part in encoder.encode(batch)]
    return b"".join([*parts, *encoder.finish()])


def batch(rows=4, shape=(3, 5), dtype=np.float32, first=0, skipped=()):
    values = np.arange(rows * int(np.prod(shape))).reshape(rows, *shape).astype(dtype)
    return FeatureBatch(ids=np.arange(first, first + rows), tensors=(values,), skipped=skipped)


def same(one, other):
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
    for got, one in zip(decode(Bytes(stream(*sent))), sent, strict=True):
        same(got, one)


def test_large_tensors_are_sent_and_read_without_a_copy():
    sent = batch(rows=8, shape=(64, 64))
    parts = Encoder().encode(sent)
    assert any(np.shares_memory(np.frombuffer(part, np.uint8), sent.tensors[0]) for part in parts)
    whole = np.frombuffer(stream(sent), np.uint8)
    (got,) = decode(Bytes(whole))
    assert np.shares_memory(got.tensors[0], whole)


def test_small_parts_are_merged():
    assert len(Encoder().encode(batch())) == 1


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
def test_a_changed_byte_gives_a_batch_or_a_sentence(data):
    whole = bytearray(stream(batch(skipped=(Skipped(id=1, object="a", reason="b"),))))
    whole[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        list(decode(Bytes(whole), most_bytes=1 << 20))
    except FrostlineError:
        return


def test_a_part_of_a_senseless_length_is_not_allocated():
    whole = stream(batch(rows=64, shape=(64, 64)))
    with pytest.raises(FrostlineError, match="no stream of features"):
        list(decode(Bytes(whole), most_bytes=1000))


def test_a_failure_after_the_first_batch_reaches_the_reader_as_itself():
    encoder = Encoder()
    parts = [*encoder.encode(batch()), *encoder.fail(AccessDenied("no entry"))]
    answer = decode(Bytes(b"".join(parts)))
    assert len(next(answer)) == 4
    with pytest.raises(AccessDenied, match="no entry"):
        next(answer)
