"""Workers that are forked from a process which has used an object store or Cassandra: its node reads for them."""

import multiprocessing
import socket
import subprocess
import sys
import threading
import time
import uuid
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

import frostline as fl
from frostline.core.config import LoaderSettings, NodeSettings
from frostline.core.errors import StoreError
from frostline.datasets.copy.cql import put_into_table
from frostline.io_service.client import socket_address
from frostline.io_service.handler import Upstream
from frostline.io_service.start import start_io
from frostline.loaders import WorkerLoader
from frostline.loaders.forked_workers import serve_forked
from frostline.models import freeze
from frostline.node import Node
from frostline.node.in_process import LocalTransport
from frostline.stores.open import open_store, survives_fork
from support.cassandra import KEYSPACE, PASSWORD, USER
from support.images import image_folder, tiny_preprocess
from support.networks import Small

NODE = NodeSettings(memory_bytes=1 << 28, device_batch=8)
SETTINGS = LoaderSettings(samples_per_request=8, requests_in_flight=2, device_batch=8, retry_for_s=0.2)
GONE_S = 200


def in_memory(folder, copies=1):
    """The files of a folder as objects in this process's memory, which object stores' driver reads."""
    url = f"memory://{uuid.uuid4()}"
    store = open_store(url)
    for path in sorted(folder.rglob("*.jpg")):
        for copy in range(copies):
            name = path.relative_to(folder).with_stem(f"{path.stem}-{copy}" if copy else path.stem)
            store.write(name.as_posix(), path.read_bytes())
    return url


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return image_folder(tmp_path_factory.mktemp("images"), per_class=8)


@pytest.fixture(scope="module")
def url(folder):
    return in_memory(folder)


def job_for(url, model=None, **options):
    options = {"settings": SETTINGS, "node": NODE, "preprocess": tiny_preprocess(), **options}
    return fl.offload(model, fl.Dataset(url), **options)


def forked(loader, workers=2):
    return DataLoader(loader, batch_size=None, num_workers=workers, multiprocessing_context="fork")


def ids_of(loader):
    return [batch.ids.tolist() for batch in loader]


def is_running(pid):
    """Whether a process has not ended, be it collected by its parent or not."""
    with suppress(OSError):
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    return False


def said_in_a_fork(say):
    """What a process says that is forked from this one."""
    receiving, sending = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=lambda: sending.send(say()))
    child.start()
    sending.close()
    said = receiving.recv()
    child.join()
    return said


def test_workers_give_the_batches_of_a_store_that_this_process_has_used_pass_after_pass(url):
    with job_for(url) as job:
        loader = job.loader(4, shuffle=True)
        whole = ids_of(loader)
        assert ids_of(forked(loader)) == ids_of(forked(loader, 1)) == whole
        assert ids_of(WorkerLoader(loader, 2, start="fork")) == whole
        assert ids_of(loader) == whole, "and the training process goes on by itself"


def test_workers_start_after_a_job_only_listed_a_store_that_cannot_fork(url):
    data = fl.Dataset(url)
    assert len(data) == 24
    assert not survives_fork(url)
    assert survives_fork("/photos")
    assert survives_fork("https://host/photos")
    with job_for(url) as job:
        assert sum(map(len, forked(job.loader(4)))) == 24


def test_workers_give_the_features_of_a_network_to_the_bit(url):
    torch.manual_seed(1)
    model = freeze(Small().train(), "stem", input_shape=(3, 32, 32))
    with job_for(url, model, cut=2) as job:
        alone = list(job.loader(8, shuffle=True))
        for batch, other in zip(forked(job.loader(8, shuffle=True)), alone, strict=True):
            assert torch.equal(batch.ids, other.ids)
            assert torch.equal(batch.features, other.features)


def test_the_job_counts_samples_that_the_node_cannot_read(folder):
    url = in_memory(folder)
    open_store(url).write("noise/003.jpg", b"no image")
    settings = LoaderSettings(samples_per_request=8, requests_in_flight=2, skip_allowance=0.1)
    with job_for(url, settings=settings) as job:
        assert sum(map(len, forked(job.loader(4, shuffle=True)))) == 23
        assert [sample.object for sample in job.statistics().skipped] == ["noise/003.jpg"]


def test_only_a_forked_process_asks_and_only_where_it_cannot_read(folder, url):
    def asked(place, node, near=()):
        with ExitStack() as stack:
            served = serve_forked(near, transport, fl.Dataset(place), SETTINGS, node, stack)
            assert served is None or served.nodes == ()
            return 0 if served is None else len(said_in_a_fork(lambda: served.nodes))

    with Node(NODE, (str(folder), url)) as node:
        transport = LocalTransport(node)
        assert asked(folder, NODE) == 0
        assert asked(url, NODE) == 1
        assert asked(folder, replace(NODE, shared_cache=url)) == 1
        assert asked(url, NODE, near=["http://node"]) == 0


def test_workers_of_a_closed_job_fail_and_name_what_to_use_instead(url):
    with job_for(url) as job:
        loader = job.loader(4)
        assert sum(map(len, forked(loader, 1))) == 24
    with pytest.raises(StoreError, match="frostline io --data-root memory://"):
        list(forked(loader, 1))


def test_a_fork_does_not_keep_open_a_connection_that_is_being_accepted(url, monkeypatch):
    accepted, accept = threading.Event(), socket.socket.accept

    def slow_accept(listening):
        found = accept(listening)
        accepted.set()
        time.sleep(0.5)
        return found

    with Node(NODE, (url,)) as node, ExitStack() as stack:
        served = serve_forked((), LocalTransport(node), fl.Dataset(url), SETTINGS, NODE, stack)
        address = socket_address(said_in_a_fork(lambda: served.nodes[0]))
        monkeypatch.setattr(socket.socket, "accept", slow_accept)
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(GONE_S)
            client.connect(address)
            assert accepted.wait(GONE_S)
            child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
            child.start()
            try:
                served.close()
                assert client.recv(1) == b""
            finally:
                child.kill()
                child.join()


@pytest.mark.parametrize("copies", [1, 200])
def test_workers_of_a_process_that_is_killed_go_too(folder, copies):
    """Those that wait for something to do, and those that ask for samples, which would ask again for ten minutes."""
    code = (
        "import multiprocessing, sys, time, frostline as fl\n"
        "from torch.utils.data import DataLoader\n"
        "from torch.utils.data._utils import worker\n"
        "worker.MP_STATUS_CHECK_INTERVAL = 0.2\n"
        "from support.images import tiny_preprocess\n"
        "from loaders.test_forked_stores import in_memory\n"
        "from pathlib import Path\n"
        "data = fl.Dataset(in_memory(Path(sys.argv[1]), int(sys.argv[2])))\n"
        "settings = fl.LoaderSettings(retry_for_s=600)\n"
        "job = fl.offload(None, data, preprocess=tiny_preprocess(), settings=settings)\n"
        "how = {'num_workers': 2, 'prefetch_factor': 1 << 12, 'multiprocessing_context': 'fork'}\n"
        "batches = iter(DataLoader(job.loader(2), batch_size=None, **how))\n"
        "next(batches)\n"
        "print(*(child.pid for child in multiprocessing.active_children()), flush=True)\n"
        "time.sleep(600)\n"
    )
    command = [sys.executable, "-c", code, str(folder), str(copies)]
    with subprocess.Popen(command, cwd=Path(__file__).parents[1], stdout=subprocess.PIPE, text=True) as parent:
        try:
            workers = [int(word) for word in parent.stdout.readline().split()]
        finally:
            parent.kill()
    assert len(workers) == 2
    deadline = time.monotonic() + GONE_S
    while any(map(is_running, workers)):
        assert time.monotonic() < deadline, f"processes {workers} are still there"
        time.sleep(0.05)


def test_s3_is_read_for_forked_workers_and_by_spawned_ones_and_by_the_io_service(s3, folder, monkeypatch):
    s3.put_folder(folder, "workers")
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    with job_for("s3://workers") as job:
        loader = job.loader(4, shuffle=True)
        whole = ids_of(loader)
        assert ids_of(forked(loader)) == whole
        spawned = DataLoader(loader, batch_size=None, num_workers=1, multiprocessing_context="spawn")
        assert ids_of(spawned) == whole
    upstream = Upstream(roots=("s3://workers",), node=NODE)
    with start_io(upstream) as service, job_for("s3://workers", near=service.url) as job:
        assert ids_of(forked(job.loader(4, shuffle=True))) == whole


def test_cassandra_is_read_for_forked_workers(cql, folder, monkeypatch, tmp_path):
    monkeypatch.setenv("FROSTLINE_CQL_PASSWORD", PASSWORD)
    url = f"cql://{USER}@{cql.place}/{KEYSPACE}/t{uuid.uuid4().hex}?protocol=3"
    put_into_table(fl.Dataset(folder, cache=tmp_path), url, observe=lambda _: None)
    with job_for(url) as job:
        loader = job.loader(4, shuffle=True)
        whole = ids_of(loader)
        assert sum(map(len, whole)) == 24
        assert ids_of(forked(loader)) == whole
