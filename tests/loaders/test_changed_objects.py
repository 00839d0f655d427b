"""A job does what it was told about objects that change behind its manifest, and never uses them."""

import io
import uuid

import numpy as np
import pytest

import frostline as fl
from frostline.core.config import LoaderSettings, NodeSettings
from frostline.core.errors import DataChanged
from frostline.node import Node
from frostline.stores.open import open_store
from support.images import tiny_preprocess
from support.nodes import served

COUNT = 12
SETTINGS = LoaderSettings(samples_per_request=4, device_batch=8, skip_allowance=0.2)


def array(value):
    file = io.BytesIO()
    np.save(file, np.full((40, 40), value, np.uint8))
    return file.getvalue()


@pytest.fixture(params=["folder", "s3"])
def store(request, tmp_path, monkeypatch):
    """Twelve grey pictures, of which number n is as bright as n tens."""
    if request.param == "folder":
        found = open_store(str(tmp_path))
    else:
        server = request.getfixturevalue("s3")
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        server.make_bucket("changing")
        found = open_store(f"s3://changing/{uuid.uuid4()}")
    for number in range(COUNT):
        found.write(f"{'even' if number % 2 == 0 else 'odd'}/{number:02}.npy", array(10 * number))
    return found


def job_on(data, **options):
    return fl.offload(None, data, preprocess=tiny_preprocess(), settings=SETTINGS, **options)


def seen(batches):
    """How bright the pictures were, in tens."""
    return sorted(round(float(feature.mean()) * 6.4 + 12.7) for batch in batches for feature in batch.features)


def test_leaves_out_changed_objects_and_goes_on(store):
    data = fl.Dataset(store.url)
    with job_on(data) as job:
        store.write("even/04.npy", array(250))
        assert seen(job.loader(4)) == [0, 1, 2, 3, *range(5, COUNT)]
        (skipped,) = job.statistics().skipped
        assert skipped.changed
        assert skipped.object == "even/04.npy"


@pytest.mark.parametrize("over", ["process", "http"])
def test_changed_objects_end_a_job_that_refuses_them(store, over):
    data = fl.Dataset(store.url, changed="refuse")
    assert len(data) == COUNT
    # A local tier would give the second job what was listed.
    settings = NodeSettings(device_batch=8, local_tier_bytes=0)
    with Node(settings, (store.url,)) as node, served(node) as url:
        where = {"near": url} if over == "http" else {"node": settings}
        with job_on(data, **where) as job:
            assert seen(job.loader(4)) == list(range(COUNT))
        store.write("even/04.npy", array(250))
        with (
            job_on(data, **where) as job,
            pytest.raises(DataChanged, match=r"even/04\.npy is not what it was.*changed='rebuild' .*--changed rebuild"),
        ):
            list(job.loader(4))


def test_reads_the_data_as_it_is_when_the_job_begins(store):
    data = fl.Dataset(store.url, changed="rebuild")
    train, held_out = data.split(0.5, seed=1)
    number = next(int(name[-6:-4]) for name in train.names)
    name = next(name for name in train.names if name.endswith(f"{number:02}.npy"))
    store.write(name, array(200))
    store.write("odd/13.npy", array(130))
    with job_on(data) as job:
        assert job.data.digest != data.digest
        assert seen(job.loader(4)) == sorted({*range(COUNT), 13, 20} - {number})
        here = seen(job.loader(4, data=train))
        assert 20 in here
        assert sorted([*here, *seen(job.loader(4, data=held_out))]) == sorted({*range(COUNT), 20} - {number})
        assert not job.statistics().skipped


def test_never_in_the_middle_of_an_epoch(store):
    data = fl.Dataset(store.url, changed="rebuild")
    with job_on(data) as job:
        before = job.data.digest
        store.write("odd/11.npy", array(250))
        for _ in range(2):
            assert seen(job.loader(4)) == list(range(COUNT - 1))
        assert job.data.digest == before
        assert [sample.object for sample in job.statistics().skipped] == ["odd/11.npy"]
    with job_on(data) as job:
        assert seen(job.loader(4)) == [*range(COUNT - 1), 25]


def test_an_object_that_is_gone_has_changed_too(tmp_path):
    (tmp_path / "odd").mkdir()
    for number in range(COUNT):
        (tmp_path / "odd" / f"{number:02}.npy").write_bytes(array(10 * number))
    data = fl.Dataset(tmp_path, changed="refuse")
    assert len(data) == COUNT
    (tmp_path / "odd" / "03.npy").unlink()
    with job_on(data) as job, pytest.raises(DataChanged, match=r"odd/03\.npy"):
        list(job.loader(4))


def test_an_image_that_is_broken_has_not_changed(tmp_path):
    (tmp_path / "odd").mkdir()
    for number in range(COUNT):
        (tmp_path / "odd" / f"{number:02}.npy").write_bytes(array(10 * number) if number else b"broken")
    with job_on(fl.Dataset(tmp_path, changed="refuse")) as job:
        assert seen(job.loader(4)) == list(range(1, COUNT))
        assert [sample.changed for sample in job.statistics().skipped] == [False]


def test_a_mask_that_changes_ends_a_job_that_refuses_it(tmp_path):
    store = open_store(str(tmp_path))
    for number in range(4):
        store.write(f"images/{number}.npy", array(number))
        store.write(f"masks/{number}.npy", array(number))
    data = fl.Dataset(tmp_path, changed="refuse")
    with job_on(data) as job:
        store.write("masks/2.npy", array(9))
        with pytest.raises(DataChanged, match=r"masks/2\.npy is not what it was"):
            list(job.loader(4))
