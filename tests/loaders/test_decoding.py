"""Decoding between the window and the batches: in order, few ahead, and saying whether it lacks something to decode."""

import threading

import numpy as np
import pytest

from frostline.core import FeatureBatch, Samples
from frostline.loaders.local_stage import DecodePool, pieces, undecoded_bytes
from frostline.prefetch.requests import Delivery
from support.images import tiny_preprocess

PIXEL_BYTES = 4 * int(np.prod(tiny_preprocess().shape))


def delivery(start, stop):
    places = np.arange(start, stop)
    batch = FeatureBatch(ids=places, encoded=[str(place).encode() for place in places])
    return Delivery(positions=places, stop=stop, reach=stop, batch=batch)


def samples(lengths):
    count = len(lengths)
    return Samples(
        ids=np.arange(count),
        objects=[str(index) for index in range(count)],
        offsets=np.zeros(count, np.int64),
        lengths=np.asarray(lengths, np.int64),
        labels=np.zeros(count, np.int64),
    )


def test_it_is_starved_where_nothing_arrived_and_not_while_it_decodes_or_at_the_end():
    gate, arrived = threading.Event(), []

    def decode(piece):
        assert gate.wait(60)
        return piece

    def arriving():
        while (one := arrived.pop(0) if arrived else None) != "end":
            yield one

    with DecodePool(decode, threads=1, rows=2) as decoding:
        decoded = threading.Semaphore(0)  # counts the pieces that are
        decoding.listen(decoded.release)
        found = decoding.deliveries(arriving())
        assert next(found) is None
        assert decoding.is_starved
        arrived.append(delivery(0, 2))
        assert next(found) is None
        assert not decoding.is_starved, "its only thread decodes"
        gate.set()
        assert decoded.acquire(timeout=200)
        assert next(found).positions.tolist() == [0, 1]
        assert decoding.is_starved
        arrived.append("end")
        assert next(found, "over") == "over"
        assert not decoding.is_starved, "nothing will arrive"


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8])
def test_pieces_are_the_same_rows_and_promise_nothing_that_a_later_piece_has(rows):
    found = list(pieces(delivery(3, 8), rows))
    assert [place for item in found for place in item.positions.tolist()] == list(range(3, 8))
    assert [bytes(row) for item in found for row in item.batch.encoded] == [b"3", b"4", b"5", b"6", b"7"]
    assert max(len(item.positions) for item in found) <= rows
    assert [item.stop for item in found] == [*(int(item.positions[0]) for item in found[1:]), 8]


def test_a_window_holds_as_many_encoded_samples_as_decoded_ones():
    found = undecoded_bytes(samples([100] * 5000), tiny_preprocess(), 50 * PIXEL_BYTES)
    assert found == 50 * 100
    larger = samples([3 * PIXEL_BYTES] * 10)
    assert undecoded_bytes(larger, tiny_preprocess(), 50 * PIXEL_BYTES) == 50 * PIXEL_BYTES
    assert undecoded_bytes(samples([]), tiny_preprocess(), 77) == 77
