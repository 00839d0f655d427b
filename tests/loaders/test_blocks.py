"""A shuffle in blocks end to end: a request a block of a shard, the same order whoever reads, within the bytes."""

import json

import numpy as np
import pytest

import frostline as fl
from frostline.core.config import LoaderSettings
from frostline.core.errors import OrderMismatch, SettingError, StoreUnavailable
from frostline.ordering import BlockOrder
from frostline.stores.cloud import DriverStore
from frostline.stores.open import open_store
from frostline.testing.formats import Example
from support import formats
from support.asked import versions_read
from support.bucket_peer import bucket_peer
from support.images import image_folder, tiny_preprocess

SAMPLES = 360
BLOCKS = fl.BlockShuffle(samples=12, mixed=5)
# What is asked for twice is read twice, and alone.
SETTINGS = LoaderSettings(samples_per_request=8, requests_in_flight=4, cache_bytes=0, hedge_quantile=1)


@pytest.fixture(scope="module")
def examples(tmp_path_factory):
    root = image_folder(tmp_path_factory.mktemp("images"), per_class=SAMPLES // 3)
    paths = sorted(root.rglob("*.jpg"))
    # Far enough apart that blocks which are no neighbours are not read together.
    return [Example(path.stem, path.parent.name, path.read_bytes() + bytes(9000)) for path in paths]


@pytest.fixture
def shards(tmp_path, examples):
    """Three tars in memory."""
    store = open_store(f"memory://{tmp_path.name}")
    for part in range(3):
        formats.put_webdataset(store, examples[part::3], part)
    data = fl.Dataset(store.url)
    assert len(data) == SAMPLES
    return data


@pytest.fixture
def requests(monkeypatch):
    return versions_read(monkeypatch)


def job_of(data, settings=SETTINGS, **options):
    return fl.offload(None, data, preprocess=tiny_preprocess(), settings=settings, **options)


def ids_of(batches):
    return [id for batch in batches for id in batch.ids.tolist()]


def expected(data, epoch=0, seed=0, blocks=BLOCKS):
    order = BlockOrder(size=len(data), seed=seed, epoch=epoch, blocks=blocks)
    return data.samples.ids[order.at(np.arange(len(data)))].tolist()


def test_an_epoch_is_read_by_a_request_a_block_in_the_order_of_the_seed(shards, requests):
    with job_of(shards) as job:
        requests.clear()
        assert ids_of(job.loader(20, shuffle=BLOCKS, seed=4)) == expected(shards, seed=4)
    # A block more where a shard ends in one or the listing does, and no byte twice.
    assert len(requests) <= SAMPLES / BLOCKS.samples + 3 + 1
    assert sum(length for _, _, length in requests) <= shards.samples.encoded_bytes + SAMPLES * 4096


def test_the_full_shuffle_asks_for_each_sample(shards, requests):
    with job_of(shards) as job:
        requests.clear()
        ids_of(job.loader(20, shuffle=True))
    assert len(requests) > SAMPLES / 2


def test_the_pixels_are_those_of_the_full_shuffle(shards):
    with job_of(shards) as job:
        rows = [
            {
                int(id): pixels
                for batch in job.arrays(20, shuffle=item)
                for id, pixels in zip(batch.ids, batch.features, strict=True)
            }
            for item in (True, BLOCKS)
        ]
    assert all(np.array_equal(rows[0][id], pixels) for id, pixels in rows[1].items())


def test_a_run_stopped_anywhere_goes_on_with_the_rest_by_few_requests(shards, requests):
    with job_of(shards) as job:
        loader = job.loader(7, shuffle=BLOCKS)
        batches = iter(loader)
        first = [id for _ in range(11) for id in next(batches).ids.tolist()]
        state = json.loads(json.dumps(loader.state_dict()))
        batches.close()
        requests.clear()
        again = job.loader(9, shuffle=BLOCKS)
        again.load_state_dict(state)
        assert first + ids_of(again) == expected(shards)
        assert len(requests) <= SAMPLES / BLOCKS.samples + 4
        with pytest.raises(OrderMismatch, match="'blocks of 12, 5 mixed', and this loader's is 'shuffled'"):
            job.loader(9, shuffle=True).load_state_dict(state)
        with pytest.raises(OrderMismatch, match="loader's is 'blocks of 12, 6 mixed'"):
            job.loader(9, shuffle=fl.BlockShuffle(samples=12, mixed=6)).load_state_dict(state)


def test_epochs_follow_each_other_each_by_few_requests(shards, requests):
    with job_of(shards) as job:
        requests.clear()
        found = [ids_of(epoch) for epoch in job.epochs(20, range(3), shuffle=BLOCKS)]
    assert found == [expected(shards, epoch=number) for number in range(3)]
    assert len(requests) <= 3 * (SAMPLES / BLOCKS.samples + 4)


def test_ranks_share_the_order_and_each_sample_comes_once(shards):
    with job_of(shards) as job:
        found = [ids_of(job.loader(5, shuffle=BLOCKS, ranks=fl.Ranks(rank=rank, world_size=3))) for rank in range(3)]
    assert sorted(found[0] + found[1] + found[2]) == sorted(expected(shards))
    assert found[1] == [id for step in range(0, SAMPLES, 15) for id in expected(shards)[step : step + 15][1::3]]


def test_reordered_each_sample_comes_once(shards):
    settings = LoaderSettings(samples_per_request=8, cache_bytes=0, max_reorder=None)
    with job_of(shards, settings) as job:
        assert sorted(ids_of(job.loader(20, shuffle=BLOCKS))) == sorted(expected(shards))


def test_does_not_read_cached_rows_again(shards, requests):
    with job_of(shards, LoaderSettings(samples_per_request=8)) as job:
        for epoch in range(2):
            requests.clear()
            assert ids_of(job.loader(20, shuffle=BLOCKS, epoch=epoch)) == expected(shards, epoch=epoch)
    assert requests == []


def test_encoded_samples_come_in_the_same_order(shards):
    with job_of(shards) as job:
        batches = list(job.arrays(20, shuffle=BLOCKS, encoded=True))
    assert ids_of(batches) == expected(shards)
    lengths = dict(zip(shards.samples.ids.tolist(), shards.samples.lengths.tolist(), strict=True))
    assert all(
        len(feature) == lengths[int(id)]
        for batch in batches
        for id, feature in zip(batch.ids, batch.features, strict=True)
    )


def test_a_block_that_fails_is_read_again(shards, monkeypatch):
    failed, read_version = set(), DriverStore.read_version

    def failing(self, object, offset, length):
        if length > 50_000 and (object, offset) not in failed:
            failed.add((object, offset))
            raise StoreUnavailable("no answer")
        return read_version(self, object, offset, length)

    with job_of(shards) as job:
        monkeypatch.setattr(DriverStore, "read_version", failing)
        assert ids_of(job.loader(20, shuffle=BLOCKS)) == expected(shards)
    assert len(failed) > 10


def test_over_http_a_server_gets_a_request_a_block(examples, monkeypatch):
    monkeypatch.setenv("GOOGLE_BEARER_TOKEN", "token")
    with bucket_peer() as peer:
        url = f"gs://photos?endpoint={peer.url}"
        store = open_store(url)
        for part in range(3):
            formats.put_webdataset(store, examples[part::3], part)
        data = fl.Dataset(url)
        with job_of(data) as job:
            peer.seen.clear()
            assert ids_of(job.loader(20, shuffle=BLOCKS)) == expected(data)
            assert len(peer.seen) <= SAMPLES / BLOCKS.samples + 4


def test_files_of_a_folder_come_in_the_same_order(tmp_path):
    data = fl.Dataset(image_folder(tmp_path, per_class=20))
    with job_of(data) as job:
        assert ids_of(job.loader(20, shuffle=BLOCKS)) == expected(data)


def test_refuses_values_that_do_not_fit_by_name(shards):
    settings = LoaderSettings(window_bytes=100_000)
    with job_of(shards, settings) as job:
        with pytest.raises(SettingError, match=r"5 blocks of 12 samples are .* mix fewer, or raise window_bytes"):
            job.loader(4, shuffle=BLOCKS)
        with pytest.raises(SettingError, match="shuffle=True for a mixture"):
            job.loader(4, data=fl.Mixture(parts=[shards], ratios=[1]), shuffle=BLOCKS)
        with pytest.raises(SettingError, match="neither for weights"):
            job.loader(4, weights=[1.0] * SAMPLES, shuffle=BLOCKS)
