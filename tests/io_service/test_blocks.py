"""Rows that go through shared memory are the rows that went in."""

import json
import mmap
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from frostline.core import FeatureBatch, Skipped
from frostline.io_service.handler import share_parts
from frostline.wire.codecs import CODECS
from frostline.wire.packing import pack, unpack
from frostline.wire.shared_memory import RowBlock, is_alike, lay_out, read_block


def batch(start, rows, *, codec="exact"):
    ids = np.arange(start, start + rows)
    random = np.random.default_rng(start)
    tensors = (random.standard_normal((rows, 6, 5, 4), np.float32), random.random((rows, 3)) < 0.5)
    return pack(FeatureBatch(ids=ids, tensors=tensors), codec)


def through_memory(pieces, skipped=()):
    block = lay_out(pieces, skipped)
    descriptor = share_parts(block.parts)
    try:
        with mmap.mmap(descriptor, block.nbytes, prot=mmap.PROT_READ) as memory:
            return read_block(block.says, memoryview(bytes(memory)))
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("codec", list(CODECS))
def test_rows_of_several_batches_come_out_as_they_went_in(codec):
    one, other = batch(10, 8, codec=codec), batch(50, 5, codec=codec)
    assert is_alike(one, other)
    pieces = [
        RowBlock(batch=one, start=2, stop=5),
        RowBlock(batch=other, start=0, stop=5),
        RowBlock(batch=one, start=7, stop=8),
    ]
    found = unpack(through_memory(pieces))
    mine, its = unpack(one), unpack(other)
    assert found.ids.tolist() == [12, 13, 14, 50, 51, 52, 53, 54, 17]
    for place in range(2):
        wanted = np.concatenate([mine.tensors[place][2:5], its.tensors[place], mine.tensors[place][7:8]])
        assert found.tensors[place].tobytes() == wanted.tobytes()
        assert found.tensors[place].dtype == wanted.dtype
    assert found.error == max(one.error, other.error)


def test_encoded_samples_keep_their_bytes_also_none():
    ids = np.arange(4)
    encoded = [b"first", b"", bytes(range(200)), memoryview(b"last")]
    found = through_memory([RowBlock(batch=FeatureBatch(ids=ids, encoded=encoded), start=1, stop=4)])
    assert [bytes(item) for item in found.encoded] == [bytes(item) for item in encoded[1:]]


def test_sends_skipped_samples_beside_any_number_of_rows():
    skipped = (Skipped(id=3, object="a.jpg", reason="it broke", changed=True),)
    block = lay_out([RowBlock(batch=batch(0, 4), start=2, stop=2)], skipped)
    found = read_block(block.says, memoryview(b""))
    assert found.skipped == skipped
    assert [tensor.shape for tensor in found.tensors] == [(0, 6, 5, 4), (0, 3)]


def test_memory_that_is_shared_can_neither_be_written_nor_cut_short():
    descriptor = share_parts([memoryview(b"abc")])
    try:
        with pytest.raises(OSError, match="permitted"):
            os.pwrite(descriptor, b"x", 0)
        with pytest.raises(OSError, match="permitted"):
            os.ftruncate(descriptor, 1)
        with pytest.raises(OSError, match="permitted"):
            mmap.mmap(descriptor, 3, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(descriptor)


@pytest.mark.parametrize(
    "change",
    [
        {"ids": {"at": 1 << 40, "shape": [4], "dtype": "<i8"}},
        {"ids": {"at": -8, "shape": [4], "dtype": "<i8"}},
        {"ids": {"at": 0, "shape": [4], "dtype": "|O"}},
        {"ids": {"at": 0, "shape": [1 << 60], "dtype": "<i8"}},
        {"tensors": [{"at": 0, "shape": [3, 2], "dtype": "<f4"}]},
        {"tensors": [{"at": "0", "shape": [4], "dtype": "<f4"}]},
        {"skipped": [[1]]},
    ],
)
def test_a_block_that_does_not_hold_what_it_says_is_refused(change):
    block = lay_out([RowBlock(batch=batch(0, 4), start=0, stop=4)], ())
    memory = memoryview(b"".join(block.parts))
    with pytest.raises((KeyError, TypeError, ValueError)) as caught:
        read_block({**block.says, **change}, memory)
    assert "checksum" not in str(caught.value)


@given(st.data(), st.sampled_from(list(CODECS)))
def test_a_changed_bit_in_memory_or_in_what_says_where_rows_lie_is_seen(data, codec):
    skipped = (Skipped(id=3, object="a.jpg", reason="it broke"),)
    block = lay_out([RowBlock(batch=batch(0, 4, codec=codec), start=0, stop=4)], skipped)
    memory = bytearray(b"".join(block.parts))
    said = bytearray(json.dumps(block.says).encode())
    changed = data.draw(st.sampled_from([memory, said]))
    changed[data.draw(st.integers(0, len(changed) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        says = json.loads(bytes(said))
    except ValueError:
        return
    if says == block.says and bytes(memory) == b"".join(block.parts):
        return  # a space more
    with pytest.raises((AttributeError, KeyError, TypeError, ValueError)):
        read_block(says, memoryview(memory))
