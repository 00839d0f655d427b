"""A store that says nothing: the job's own deadline ends the wait, whatever the environment would allow."""

import threading

import pytest

import frostline as fl
from frostline.core.config import LoaderSettings, NodeSettings
from frostline.core.errors import StoreUnavailable
from support.bucket_peer import bucket_peer
from support.images import image_folder, tiny_preprocess

SETTINGS = LoaderSettings(samples_per_request=8, requests_in_flight=2, deadline_s=0.5, retry_for_s=0.5)


@pytest.fixture
def hung(tmp_path, monkeypatch):
    """A bucket of images that is listed and then says nothing, and a way to have it do so."""
    # Longer than any test may take: only the job's deadline can end a wait.
    monkeypatch.setenv("FROSTLINE_STORE_TIMEOUT_S", "1000")
    monkeypatch.setenv("FROSTLINE_STORE_RETRY_FOR_S", "1000")
    monkeypatch.setenv("GOOGLE_SKIP_SIGNATURE", "true")
    folder, ends = image_folder(tmp_path / "images"), threading.Event()
    with bucket_peer() as peer:
        for path in folder.rglob("*.jpg"):
            peer.objects[str(path.relative_to(folder))] = path.read_bytes()
        data = fl.Dataset(f"gs://photos?endpoint={peer.url}", cache=tmp_path / "cache")
        assert len(data) == len(peer.objects)

        def hang():
            peer.answers = lambda: ends.wait() and None

        yield data, hang
        ends.set()


def test_a_job_ends_within_its_own_deadline_where_its_store_hangs(hung):
    data, hang = hung
    with fl.offload(None, data, preprocess=tiny_preprocess(), settings=SETTINGS) as job:
        hang()
        with pytest.raises(StoreUnavailable, match=r"nothing came from the store .*deadline_s"):
            list(job.loader(8))


def test_the_jobs_own_node_keeps_the_jobs_deadline_for_stores(hung):
    data, hang = hung
    node = NodeSettings(store_deadline_s=0.2)
    settings = LoaderSettings(samples_per_request=8, requests_in_flight=2, retry_for_s=0.2, deadline_s=1000)
    with fl.offload(None, data, preprocess=tiny_preprocess(), settings=settings, node=node) as job:
        hang()
        with pytest.raises(StoreUnavailable, match="nothing came from the store"):
            list(job.loader(8))
