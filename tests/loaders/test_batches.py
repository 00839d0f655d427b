"""Batches: in pinned memory, within the window's bytes, decoded in order.

Where batches lie: in page-locked memory where a GPU takes them, and in the given memory in any case.

What a loader holds while its loop is slow, where samples are decoded behind the window: within ``window_bytes``.

Decoding between the window and the batches: in order, few ahead, and saying whether it lacks something to decode.
"""

import threading
import tracemalloc

import numpy as np
import pytest
import torch

import frostline as fl
from frostline.core import Cut, FeatureBatch, Samples
from frostline.core.config import LoaderSettings
from frostline.core.errors import SettingError
from frostline.core.system import usable_cores
from frostline.loaders.batches import Pinned, memory_for
from frostline.loaders.local_stage import DecodePool, LocalStage, pieces, undecoded_bytes
from frostline.prefetch.requests import BatchAssembler, Delivery
from support.images import image_folder, tiny_preprocess
from support.nodes import until

CUDA = torch.cuda.is_available()
CUTS = ((0, "encoded"), (1, "pixels"), (2, "features"))


class Noted:
    """Memory that knows what was taken from it."""

    def __init__(self):
        self.given = []

    def empty(self, shape, dtype):
        self.given.append(np.empty(shape, dtype))
        return self.given[-1]


def test_puts_every_column_of_a_batch_into_the_given_memory():
    memory = Noted()
    assembler = BatchAssembler(batch_size=3, drop_last=False, memory=memory)
    ids, rows = np.arange(7), np.arange(28.0).reshape(7, 4)
    batches = [*assembler.add(ids, rows), assembler.finish()]
    assert [len(batch[0]) for batch in batches] == [3, 3, 1]
    assert np.array_equal(np.concatenate([batch[1] for batch in batches]), rows)
    assert len(memory.given) == 6
    for batch, *given in zip(batches, memory.given[::2], memory.given[1::2], strict=True):
        assert all(np.shares_memory(*pair) for pair in zip(batch, given, strict=True))


def test_memory_is_page_locked_only_where_the_model_is_on_a_gpu_or_it_is_asked_for():
    assert memory_for(None, "cpu") is None
    assert memory_for(False, "cuda:0") is None


@pytest.mark.skipif(CUDA, reason="there is CUDA here")
def test_page_locked_memory_without_a_gpu_is_refused_with_a_sentence(tmp_path):
    data = fl.Dataset(image_folder(tmp_path / "images", per_class=2))
    settings = LoaderSettings(pin_memory=True)
    with (
        fl.offload(None, data, preprocess=tiny_preprocess(), settings=settings) as job,
        pytest.raises(SettingError, match="pin_memory=True is for GPUs that CUDA drives"),
    ):
        job.loader(2)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="there is no CUDA here")
def test_batches_are_page_locked_and_outlive_their_copies(tmp_path):
    data = fl.Dataset(image_folder(tmp_path / "images", per_class=20))
    settings = LoaderSettings(pin_memory=True, cache_bytes=0)
    with fl.offload(None, data, preprocess=tiny_preprocess(), settings=settings) as job:
        expected = [batch.features.clone() for batch in job.loader(8)]
        copies = []
        for batch in job.loader(8):
            assert batch.features.is_pinned()
            copies.append(batch.to("cuda").features)
    assert all(torch.equal(copy.cpu(), value) for copy, value in zip(copies, expected, strict=True))
    assert isinstance(memory_for(None, "cuda:0"), Pinned)


# A sample has nearly as many bytes encoded as decoded, so that too much of either shows.
SIZE, SIDE = (320, 256), 76
PIXEL_BYTES = 4 * 3 * SIDE**2
ROWS, PER_REQUEST = 2, 4
WINDOW_BYTES = 4 << 20
# Of what is no sample: requests, threads, tables.
ELSE_BYTES = 1 << 20


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return fl.Dataset(image_folder(tmp_path_factory.mktemp("large"), per_class=70, size=SIZE))


@pytest.mark.parametrize("requests", [4, None])
def test_a_slow_loop_fills_the_windows_bytes_and_no_more(data, requests):
    encoded_bytes = data.samples.encoded_bytes / len(data)
    assert 0.6 * PIXEL_BYTES < encoded_bytes < PIXEL_BYTES
    assert len(data) * encoded_bytes > 2 * WINDOW_BYTES
    settings = LoaderSettings(
        samples_per_request=PER_REQUEST, requests_in_flight=requests, window_bytes=WINDOW_BYTES, cache_bytes=0
    )
    decoded_at_once = (len(usable_cores()) + 1) * PER_REQUEST * (encoded_bytes + PIXEL_BYTES)
    # The next batch, the one that is filled, and the loop's, which has one more while it takes it.
    batches = 4 * ROWS * PIXEL_BYTES
    with fl.offload(None, data, preprocess=tiny_preprocess(side=SIDE), settings=settings) as job:
        next(iter(job.arrays(ROWS)))  # what is imported and made once is no part of it
        tracemalloc.start()
        try:
            for number, _ in enumerate(job.arrays(ROWS)):
                if number < 5:
                    until(lambda: tracemalloc.get_traced_memory()[0] > WINDOW_BYTES / 2)
            maximum = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert maximum < WINDOW_BYTES + decoded_at_once + batches + ELSE_BYTES


PIXEL_BYTES_OF_DECODING = 4 * int(np.prod(tiny_preprocess().shape))


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
    found = undecoded_bytes(samples([100] * 5000), tiny_preprocess(), 50 * PIXEL_BYTES_OF_DECODING)
    assert found == 50 * 100
    larger = samples([3 * PIXEL_BYTES_OF_DECODING] * 10)
    assert undecoded_bytes(larger, tiny_preprocess(), 50 * PIXEL_BYTES_OF_DECODING) == 50 * PIXEL_BYTES_OF_DECODING
    assert undecoded_bytes(samples([]), tiny_preprocess(), 77) == 77


class Noting:
    """The rest of a frozen part that notes the rows it runs, and waits at the first ones."""

    def __init__(self):
        self.seen, self.begun, self.may_end = [], threading.Event(), threading.Event()
        self.at_once, self.running, self.changing = [], 0, threading.Lock()

    def run(self, arrays, size):
        with self.changing:
            self.running += len(arrays[0])
            self.at_once.append(self.running)
            self.seen.append(int(arrays[0][0, 0]))
        self.begun.set()
        assert self.may_end.wait(30)
        with self.changing:
            self.running -= len(arrays[0])
        return tuple(arrays)


def cut(number, name):
    of = {"tensors": (name,), "shapes": ((1,),), "dtypes": ("float32",), "after": number, "bytes_per_sample": 4}
    return Cut(number=number, name=name, **of)


def start_finishing(stage, turn, rows):
    def finish():
        batch = FeatureBatch(ids=np.full(rows, turn), tensors=(np.full((rows, 1), turn, np.float32),))
        stage.finish(batch, None, cut=1, preprocess=None, view=None, turn=turn)

    thread = threading.Thread(target=finish)
    thread.start()
    return thread


def test_a_few_rows_run_beside_others_until_they_are_as_many_as_a_run_has():
    rest = Noting()
    stage = LocalStage(cuts=[cut(number, name) for number, name in CUTS], rest=lambda _: rest)
    threads = [start_finishing(stage, stage.turn(), rows=3) for _ in range(5)]
    until(lambda: len(rest.seen) == 2)
    threads.append(start_finishing(stage, stage.turn(), rows=20))
    rest.may_end.set()
    for thread in threads:
        thread.join(30)
    assert max(rest.at_once[:5]) == 6
    assert (rest.seen[-1], rest.at_once[-1]) == (5, 20), "a whole run is alone"


def test_what_was_asked_for_first_is_computed_first_whenever_it_arrives():
    rest, waiting = Noting(), len(usable_cores()) + 1
    stage = LocalStage(cuts=[cut(number, name) for number, name in CUTS], rest=lambda _: rest)
    turns = [stage.turn() for _ in range(waiting + 6)]

    def start(turn):
        return start_finishing(stage, turn, rows=8)

    threads = [start(turn) for turn in turns[:waiting]]
    assert rest.begun.wait(30)
    until(lambda: stage._decoded._slots == 0)  # noqa: SLF001 (as many are in as may be)
    for arrived, turn in enumerate(reversed(turns[waiting:]), 1):
        threads.append(start(turn))
        until(lambda: len(stage._decoded._waiting) == arrived)  # noqa: SLF001, B023 (it waits within the loop)
    rest.may_end.set()
    for thread in threads:
        thread.join(30)
    assert set(rest.seen[:waiting]) == set(turns[:waiting])
    assert rest.seen[waiting:] == turns[waiting:]
