"""A ring of three real servers, each row on two of them, of which one is killed: nothing lost, nothing doubled."""

import signal
import threading
import uuid

import pytest
import torch
from cassandra import ConsistencyLevel

import frostline as fl
from frostline.core.config import LoaderSettings, NodeSettings
from frostline.models import freeze
from frostline.node.process import start_node
from frostline.stores.open import open_store
from frostline.stores.protocols import LABELS, ByteRange
from support.cassandra import KEYSPACE, cassandra, why_no_cassandra
from support.images import image_folder, tiny_preprocess
from support.networks import Small

READS = 3000

pytestmark = pytest.mark.skipif(why_no_cassandra() is not None, reason=str(why_no_cassandra()))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return image_folder(tmp_path_factory.mktemp("photos"), per_class=20)


@pytest.fixture(scope="module")
def ring(tmp_path_factory, folder):
    """Three servers with every photograph as a row that all of its replicas have."""
    with cassandra(tmp_path_factory.mktemp("ring"), nodes=3, replicas=2) as ring:
        put(ring, folder)
        yield ring


def put(ring, folder):
    columns = "id uuid PRIMARY KEY, label text, name text, data blob"
    ring.make_table(f"CREATE TABLE IF NOT EXISTS {KEYSPACE}.waste ({columns})")
    with ring.session() as session:
        insert = session.prepare(f"INSERT INTO {KEYSPACE}.waste (id, label, name, data) VALUES (?, ?, ?, ?)")
        insert.consistency_level = ConsistencyLevel.ALL
        for path in sorted(folder.rglob("*.jpg")):
            name = str(path.relative_to(folder))
            row = (uuid.uuid5(uuid.NAMESPACE_URL, name), path.parent.name, name, path.read_bytes())
            session.execute(insert, row)


def test_a_replica_that_answers_late_doubles_no_read(ring):
    """Its reads are asked of the other replica too, and then both answer."""
    store = open_store(f"cql://{ring.place}/{KEYSPACE}/waste?protocol=3")
    rows = [entry.object for entry in store.list() if entry.object != LABELS]
    places = [ByteRange(name, 0, 1) for name in rows] * (READS // len(rows))
    late = ring.processes[ring.hosts[1]]
    late.send_signal(signal.SIGSTOP)
    goes_on = threading.Timer(3.0, late.send_signal, [signal.SIGCONT])
    goes_on.start()
    reads = store.read_many(places, maximum=256)
    seen = [index for index, _ in reads]
    goes_on.join()
    assert sorted(seen) == list(range(len(places)))


def test_a_replica_that_is_killed_costs_no_sample_and_doubles_none(ring, folder, tmp_path):
    """The last test of this ring, which has two servers afterwards."""
    url = f"cql://{ring.place}/{KEYSPACE}/waste?protocol=3"
    data = fl.Dataset(url, cache=tmp_path)
    wanted = {name: (folder / name).read_bytes() for name in data.names}
    contents = dict(zip(data.samples.objects, (wanted[name] for name in data.names), strict=True))
    store = open_store(url)
    names = [*contents] * (READS // len(contents))
    reads = store.read_many([ByteRange(name, 0, len(contents[name])) for name in names], maximum=256)
    seen = [next(reads) for _ in range(READS // 4)]

    came = epochs(url, data, preprocess=tiny_preprocess(flip=True), kill=lambda: ring.kill(ring.hosts[1]))
    for epoch in came:
        assert sorted(epoch) == sorted(data.samples.ids.tolist())

    # 256 of these were under way when the replica was killed.
    seen.extend(reads)
    assert sorted(index for index, _ in seen) == list(range(len(names)))
    assert all(bytes(found[0]) == contents[names[index]] for index, found in seen)
    assert {entry.object for entry in store.list() if entry.object != LABELS} == set(contents)


def epochs(url, data, *, preprocess, kill):
    """Ids of the samples of each of three epochs; early in the second one somebody is killed."""
    model = freeze(Small().train(), "stem", input_shape=(3, 32, 32))
    settings = LoaderSettings(samples_per_request=4, device_batch=8)
    came = []
    with (
        start_node((url,), NodeSettings(memory_bytes=1 << 28, device_batch=8)) as node,
        fl.offload(model, data, preprocess=preprocess, near=node.url, settings=settings) as job,
    ):
        # Views change with the epoch, so that every epoch reads every photograph again.
        for epoch in range(3):
            came.append([])
            for batch in job.loader(4, shuffle=True, seed=0, epoch=epoch):
                came[-1].extend(torch.as_tensor(batch.ids).tolist())
                if epoch == 1 and len(came[-1]) == 4:
                    kill()
    return came
