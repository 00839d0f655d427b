"""What a loader holds while its loop is slow, where samples are decoded behind the window: within ``window_bytes``."""

import tracemalloc

import pytest

import frostline as fl
from frostline.core.config import LoaderSettings
from frostline.core.system import usable_cores
from support.images import image_folder, tiny_preprocess
from support.nodes import until

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
