"""Workers of PyTorch's DataLoader: the same bits, stores after a fork, and what is left when one ends.

Workers of PyTorch's DataLoader: the same bits from a network's features, and what is left when one is killed.

Workers that are forked from a process which has used an object store or Cassandra: its node reads for them.

A loop over workers that ends with an error, or early: somebody keeps the error, and still no worker is left.
"""

import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore
from torch.utils.data import DataLoader, get_worker_info

import frostline as fl
from frostline.core.config import LoaderSettings, NodeSettings
from frostline.core.errors import DataError, NodeUnreachable, SettingError, StoreError, TooManySkipped, Unavailable
from frostline.core.events import SampleSkipped
from frostline.datasets.copy.cql import put_into_table
from frostline.io_service.client import socket_address
from frostline.io_service.handler import Upstream
from frostline.io_service.start import start_io
from frostline.jobs.statistics import SkipLog, StatisticsCollector, UseTeller
from frostline.loaders import ArrayLoader, WorkerLoader
from frostline.loaders.forked_workers import serve_forked
from frostline.models import freeze
from frostline.node import Node
from frostline.node.in_process import LocalTransport
from frostline.node.process import start_node
from frostline.ordering import Order
from frostline.stores.open import open_store, survives_fork
from frostline.transport import NodeUse
from support.cassandra import KEYSPACE, PASSWORD, USER
from support.images import image_folder, tiny_preprocess
from support.matrices import sampled
from support.networks import Small
from support.nodes import until
from support.services import of_sessions, python, shared_memory

pytestmark = pytest.mark.promise("complete")

NODE = NodeSettings(memory_bytes=1 << 28, device_batch=8)
SETTINGS = LoaderSettings(samples_per_request=8, requests_in_flight=2, device_batch=8, retry_for_s=0.2)
# Shutting down, PyTorch waits up to five seconds for workers that it cannot ask.
GONE_S = 200


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return image_folder(tmp_path_factory.mktemp("images"), per_class=16)


@pytest.fixture
def node(shared_node):
    return shared_node


def job_for(folder, model=None, **options):
    options = {"settings": SETTINGS, "node": NODE, "preprocess": tiny_preprocess(), **options}
    return fl.offload(model, fl.Dataset(folder), **options)


def in_workers(loader, start, workers=2):
    return DataLoader(loader, batch_size=None, num_workers=workers, multiprocessing_context=start)


def wait_until_gone(pids):
    """Until none of these processes is left, not even one that nobody waited for; it ends the test otherwise."""
    deadline = time.monotonic() + GONE_S
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, f"processes {pids} are still there"
        time.sleep(0.05)


@pytest.mark.parametrize("cut", [1, 2, 4])
def test_workers_give_the_features_of_a_network_to_the_bit(folder, node, cut):
    torch.manual_seed(1)
    model = freeze(Small().train(), "stem", input_shape=(3, 32, 32))
    with job_for(folder, model, near=node.url, cut=cut) as job:
        alone = list(job.loader(8, shuffle=True))
        for worker, other in zip(in_workers(job.loader(8, shuffle=True), "fork"), alone, strict=True):
            assert torch.equal(worker.ids, other.ids)
            assert torch.equal(worker.features, other.features)


@pytest.mark.parametrize(
    "options",
    [
        {"preprocess": tiny_preprocess(flip=True)},
        {"augment": fl.FeatureNoise()},
        {"augment": fl.FeatureMixup()},
        {"weights": {"circle": 1, "noise": 2, "stripe": 1}, "num_samples": 50},
        {"last": "pad", "ranks": fl.Ranks(rank=1, world_size=5)},
        {"last": "drop"},
    ],
    ids=["random pixels", "noise", "mixtures", "num_samples", "ranks", "dropped end"],
)
def test_workers_give_whatever_the_loader_gives(folder, node, options):
    with job_for(folder, near=node.url) as job:
        options = {"shuffle": "weights" not in options, "seed": 3, "epoch": 2, **options}
        pairs = zip(in_workers(job.loader(7, **options), "fork"), job.loader(7, **options), strict=True)
        for pair, other in pairs:
            assert torch.equal(pair.ids, other.ids)
            assert torch.equal(pair.labels, other.labels)
            assert torch.equal(pair.features, other.features)


def test_epochs_that_follow_each_other_go_through_workers(folder, node):
    with job_for(folder, near=node.url) as job:
        for loader in job.epochs(8, range(2), shuffle=True):
            expected = [batch.ids.tolist() for batch in job.loader(8, shuffle=True, epoch=loader.epoch)]
            assert [batch.ids.tolist() for batch in WorkerLoader(loader, 2, start="fork")] == expected


def test_workers_go_on_from_what_was_handed_out_ahead(folder, node):
    settings = LoaderSettings(samples_per_request=2, requests_in_flight=6, cache_bytes=0, max_reorder=None)
    with job_for(folder, near=node.url, settings=settings) as job:
        first = job.loader(5, shuffle=True)
        batches = iter(first)
        seen = [id for _ in range(3) for id in next(batches).ids.tolist()]
        state = first.state_dict()
        batches.close()
        workers = WorkerLoader(job.loader(5, shuffle=True), 2, start="fork")
        workers.load_state_dict(state)
        batches = iter(workers)
        seen += next(batches).ids.tolist()
        state = workers.state_dict()
        del batches
        last = job.loader(5, shuffle=True)
        last.load_state_dict(state)
        seen += [id for batch in last for id in batch.ids.tolist()]
        assert sorted(seen) == sorted(job.data.samples.ids.tolist())


@pytest.mark.parametrize("option", [{"batch_size": 4}, {"in_order": False}, {"persistent_workers": True}])
def test_options_with_which_batches_would_not_be_the_loaders_are_refused(folder, node, option):
    with job_for(folder, near=node.url) as job, pytest.raises(SettingError, match=f"needs {next(iter(option))}="):
        WorkerLoader(job.loader(8), 2, **option)


def test_each_epoch_of_one_loader_has_its_own_order_in_workers(folder, node):
    with job_for(folder, near=node.url) as job:
        loader = job.loader(8, shuffle=True)
        data = in_workers(loader, "fork")
        for epoch in range(3):
            loader.set_epoch(epoch)
            expected = [batch.ids.tolist() for batch in job.loader(8, shuffle=True, epoch=epoch)]
            assert [batch.ids.tolist() for batch in data] == expected


def test_a_sample_that_cannot_be_read_leaves_its_batch_shorter_in_workers(tmp_path):
    folder = image_folder(tmp_path, per_class=8)
    (folder / "noise" / "003.jpg").write_bytes(b"no image")
    settings = LoaderSettings(samples_per_request=8, requests_in_flight=2, max_skipped_fraction=0.5)
    with job_for(folder, settings=settings) as job:
        found = [len(batch) for batch in in_workers(job.loader(8, shuffle=True), "fork")]
    assert sorted(found) == [7, 8, 8]


@pytest.mark.parametrize("start", ["fork", "spawn", "forkserver"])
def test_a_loader_whose_workers_it_does_not_see_gives_no_state_but_says_who_does(folder, node, start):
    with job_for(folder, near=node.url) as job:
        loader, other = job.loader(8, shuffle=True, record=True), job.loader(8)
        workers = in_workers(loader, start, 1)
        assert loader.state_dict()["position"] == 0, "nothing has begun"
        batches = iter(workers)
        for _ in range(3):
            next(batches)
        with pytest.raises(SettingError, match="StatefulDataLoader or frostline"):
            loader.state_dict()
        with pytest.raises(SettingError, match="StatefulDataLoader or frostline"):
            loader.recorded_order()
        assert loader.state_after(3)["position"] == 24
        assert other.state_dict()["position"] == 0
        del batches
        assert len(loader) == 6
        next(passing := iter(loader))
        assert loader.state_dict()["position"] == 8, "the latest pass is here"
        passing.close()


def test_a_loader_has_a_state_again_once_it_is_put_somewhere(folder, node):
    with job_for(folder, near=node.url) as job:
        loader = job.loader(8, shuffle=True)
        pickle.dumps(loader)
        assert loader.state_dict()["position"] == 0, "nobody was started with that"
        for epoch in range(2):
            loader.set_epoch(epoch)
            assert loader.state_dict()["epoch"] == epoch
            list(in_workers(loader, "fork", 1))
        loader.load_state_dict(loader.state_after(2))
        assert loader.state_dict()["position"] == 16
        next(iter(in_workers(loader, "fork", 1)))
        assert WorkerLoader(loader, 1).state_dict()["position"] == 16, "where its next pass begins"


def broken_folder(place):
    """Forty-five pictures, three of which are none."""
    folder = image_folder(place, per_class=15)
    names = ("circle/001.jpg", "noise/007.jpg", "stripe/012.jpg")
    for name in names:
        (folder / name).write_bytes(b"no image")
    return folder, set(names)


@pytest.mark.parametrize("start", sampled(["fork", "spawn", "forkserver"], usual=("forkserver",)))
def test_workers_of_a_job_share_one_limit_of_unreadable_samples(tmp_path, start):
    folder, _ = broken_folder(tmp_path)
    settings = LoaderSettings(samples_per_request=8, requests_in_flight=2, max_skipped_fraction=0.04)
    said = "3 samples are unreadable and the job allows 2, by the count of the job's process and its workers together"
    with job_for(folder, settings=settings) as job:
        with pytest.raises(TooManySkipped, match=said):
            list(WorkerLoader(job.loader(4), 2, start=start))
        assert len(job.statistics().skipped) == 3


def test_workers_report_unreadable_samples_once_for_all(tmp_path):
    folder, names = broken_folder(tmp_path)
    events = []
    settings = LoaderSettings(samples_per_request=8, requests_in_flight=2, max_skipped_fraction=0.1)
    with job_for(folder, settings=settings, on_event=events.append) as job:
        for epoch in range(2):
            assert sum(map(len, WorkerLoader(job.loader(4, epoch=epoch), 2, start="fork"))) == 42
            assert sorted(event.object for event in events if isinstance(event, SampleSkipped)) == sorted(names)
        assert {sample.object for sample in job.statistics().skipped} == names
        assert sum(map(len, job.loader(4))) == 42
        assert len(job.loader(42)) == 1
    assert sum(isinstance(event, SampleSkipped) for event in events) == 3


@pytest.mark.parametrize("start", sampled(["fork", "spawn", "forkserver"], usual=("forkserver",)))
def test_what_workers_ask_of_each_node_counts_in_the_job(folder, node, start):
    with start_node((str(folder),), NODE) as other, job_for(folder, near=[node.url, other.url], cut=1) as job:
        total, passes = len(job.data), 0
        # A node that is slow to answer as the workers of a pass begin, as on a busy machine, is asked by the next ones.
        while passes < 2 or not all(use.samples and use.requests for use in job.statistics().nodes):
            passes += 1
            assert passes < 10
            assert sum(map(len, WorkerLoader(job.loader(8, epoch=passes), 2, start=start))) == total
            until(lambda passes=passes: sum(use.samples for use in job.statistics().nodes) >= passes * total)
        before = {use.url: use for use in job.statistics().nodes}
        assert sum(use.samples for use in before.values()) < (passes + 1) * total  # late ones are asked twice
        # What this process asks counts beside it, once.
        assert sum(map(len, job.loader(8))) == total
        own = sum(use.samples for use in job.statistics().nodes) - sum(use.samples for use in before.values())
        assert total <= own < 2 * total


def test_changes_of_what_was_asked_are_told_and_no_more_often_than_once_a_second():
    log, now, counts = SkipLog(), [0.0], [NodeUse(url="http://a:1", requests=1, samples=8, trouble="it is away")]
    teller, hears = UseTeller(log, lambda: now[0]), StatisticsCollector(lambda _: None, max_skipped=0, shared=log)
    teller.take_batch(None, None)  # before there is a way to the nodes
    teller.counts = lambda: tuple(counts)
    teller.take_batch(None, None)
    assert hears.with_workers(()) == (NodeUse(url="http://a:1", requests=1, samples=8),)
    counts[:] = [NodeUse(url="http://a:1", requests=3, samples=20, failures=1), NodeUse(url="http://b:1")]
    now[0] = 0.5
    teller.take_batch(None, None)
    assert hears.with_workers(())[0].samples == 8
    now[0] = 1.0
    teller.take_batch(None, None)
    teller.tell()
    own = NodeUse(url="http://a:1", samples=2, trouble="it says nothing")
    found = NodeUse(url="http://a:1", requests=3, samples=22, failures=1, trouble="it says nothing")
    assert hears.with_workers((own,)) == (found,)
    UseTeller(None).tell()


def test_samples_skipped_in_workers_of_a_data_loader_count_for_the_job(tmp_path):
    folder, names = broken_folder(tmp_path)
    settings = LoaderSettings(samples_per_request=8, requests_in_flight=2, max_skipped_fraction=0.04)
    with job_for(folder, settings=settings) as job:
        with pytest.raises(TooManySkipped, match="3 samples are unreadable and the job allows 2"):
            list(in_workers(job.loader(4), "fork"))
        assert {sample.object for sample in job.statistics().skipped} == names
    assert {sample.object for sample in job.statistics().skipped} == names


def test_a_loader_that_reached_another_process_by_other_ways_counts_for_itself(tmp_path):
    folder, _ = broken_folder(tmp_path)
    settings = LoaderSettings(samples_per_request=8, requests_in_flight=2, max_skipped_fraction=0.04)
    with job_for(folder, settings=settings) as job:
        elsewhere = pickle.loads(pickle.dumps(job.loader(4)))
        with pytest.raises(TooManySkipped, match="by the count of this process alone"):
            list(elsewhere)
        assert not job.statistics().skipped


# PyTorch tells of a death from its signal handler, which may be just where a file was opened.
@pytest.mark.filterwarnings("ignore:Exception ignored in. <_io:pytest.PytestUnraisableExceptionWarning")
def test_a_worker_that_is_killed_is_an_error_and_nothing_is_left(folder, node):
    before = {child.pid for child in multiprocessing.active_children()}
    with job_for(folder, near=node.url) as job:
        whole = [batch.ids.tolist() for batch in job.loader(2, shuffle=True)]
        loader = WorkerLoader(job.loader(2, shuffle=True), 2, start="fork")
        batches = iter(loader)
        seen = [next(batches).ids.tolist()]
        workers = [child.pid for child in multiprocessing.active_children() if child.pid not in before]
        assert len(workers) == 2
        os.kill(workers[0], signal.SIGKILL)
        with pytest.raises(Unavailable, match="a worker of the loader is gone") as raised:
            seen.extend(batch.ids.tolist() for batch in batches)
        wait_until_gone(workers)
        assert raised.traceback, "which is held all the time"
        loader.load_state_dict(loader.state_dict())
        assert seen + [batch.ids.tolist() for batch in loader] == whole


def test_workers_of_a_process_that_is_killed_go_too(folder, node):
    code = (
        "import multiprocessing, sys, time, frostline as fl\n"
        "from torch.utils.data import DataLoader\n"
        "from torch.utils.data._utils import worker\n"
        "worker.MP_STATUS_CHECK_INTERVAL = 0.2\n"  # how often a worker looks for its parent; 5 s by default
        "from support.images import tiny_preprocess\n"
        "job = fl.offload(None, fl.Dataset(sys.argv[1]), preprocess=tiny_preprocess(), near=sys.argv[2])\n"
        "batches = iter(DataLoader(job.loader(2), batch_size=None, num_workers=2, multiprocessing_context='fork'))\n"
        "next(batches)\n"
        "print(*(child.pid for child in multiprocessing.active_children()), flush=True)\n"
        "time.sleep(600)\n"
    )
    command = [sys.executable, "-c", code, str(folder), node.url]
    with subprocess.Popen(command, cwd=Path(__file__).parents[1], stdout=subprocess.PIPE, text=True) as parent:
        try:
            workers = [int(word) for word in parent.stdout.readline().split()]
        finally:
            parent.kill()
    assert len(workers) == 2
    wait_until_gone(workers)


def test_a_worker_reports_a_dead_node_in_one_sentence(folder):
    with start_node((str(folder),), NODE) as node:
        job = job_for(folder, near=node.url)
    with closing(job), pytest.raises(NodeUnreachable, match=node.url):
        list(in_workers(job.loader(8), "fork", 1))


def test_a_token_of_the_environment_does_not_travel(folder, monkeypatch):
    monkeypatch.setenv("FROSTLINE_TOKEN", "a-very-secret-token")
    with job_for(folder, settings=LoaderSettings()) as job:
        travelling = pickle.dumps(job.loader(8, shuffle=True))
    assert b"a-very-secret-token" not in travelling
    monkeypatch.setenv("FROSTLINE_TOKEN", "another")
    loader = pickle.loads(travelling)
    assert [len(batch) for batch in loader] == [8] * 6


@pytest.mark.parametrize(
    "options",
    [
        lambda function: {"map": function},
        lambda function: {"augment": function},
        lambda function: {"augment": partial(function, 3)},
    ],
)
def test_functions_of_a_notebook_are_refused_for_spawned_workers(folder, monkeypatch, options):
    """A notebook's module has no file, which a process that is spawned would run to have the function."""
    notebook = sys.modules["__main__"]
    monkeypatch.delattr(notebook, "__file__", raising=False)
    exec("def changed(sample, rng=None, view=None):\n    return sample", vars(notebook))
    function = vars(notebook)["changed"]
    monkeypatch.setattr(notebook, "changed", function)
    with job_for(folder) as job:
        loader = job.loader(8, **options(function))
        for workers in (in_workers(loader, "spawn", 1), WorkerLoader(loader, 1, start="forkserver")):
            with pytest.raises(
                SettingError, match=r"processes that are spawned: changed is defined in a notebook.*fork"
            ):
                list(workers)
        assert isinstance(pickle.loads(pickle.dumps(loader)), type(loader))


def test_a_store_over_which_ranks_compare_does_not_travel(folder, node):
    with job_for(folder, near=node.url) as job:
        ranks = fl.Ranks.by_store(HashStore(), 1, 2)
        loader = job.loader(7, shuffle=True, ranks=ranks)
        alone = [batch.ids.tolist() for batch in job.loader(7, shuffle=True, ranks=fl.Ranks(rank=1, world_size=2))]
        assert [batch.ids.tolist() for batch in in_workers(loader, "spawn", 1)] == alone


def test_a_loader_that_no_job_made_does_not_travel():
    class Nothing:
        digest, samples = "", ()

    loader = ArrayLoader(lambda _: None, Nothing, order=Order(size=1, seed=0, epoch=0), batch_size=1)
    with pytest.raises(SettingError, match="only a loader that a job made"):
        pickle.dumps(loader)


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
def folder_of_forked_stores(tmp_path_factory):
    return image_folder(tmp_path_factory.mktemp("images"), per_class=8)


@pytest.fixture(scope="module")
def url(folder_of_forked_stores):
    return in_memory(folder_of_forked_stores)


def job_for_of_forked_stores(url, model=None, **options):
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


def test_workers_give_all_batches_of_a_store_used_before_the_fork(url):
    with job_for_of_forked_stores(url) as job:
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
    with job_for_of_forked_stores(url) as job:
        assert sum(map(len, forked(job.loader(4)))) == 24


def test_forked_workers_give_the_features_of_a_network_to_the_bit(url):
    torch.manual_seed(1)
    model = freeze(Small().train(), "stem", input_shape=(3, 32, 32))
    with job_for_of_forked_stores(url, model, cut=2) as job:
        alone = list(job.loader(8, shuffle=True))
        for batch, other in zip(forked(job.loader(8, shuffle=True)), alone, strict=True):
            assert torch.equal(batch.ids, other.ids)
            assert torch.equal(batch.features, other.features)


def test_the_job_counts_samples_that_the_node_cannot_read(folder_of_forked_stores):
    url = in_memory(folder_of_forked_stores)
    open_store(url).write("noise/003.jpg", b"no image")
    settings = LoaderSettings(samples_per_request=8, requests_in_flight=2, max_skipped_fraction=0.1)
    with job_for_of_forked_stores(url, settings=settings) as job:
        assert sum(map(len, forked(job.loader(4, shuffle=True)))) == 23
        assert [sample.object for sample in job.statistics().skipped] == ["noise/003.jpg"]


def test_only_a_forked_process_asks_and_only_where_it_cannot_read(folder_of_forked_stores, url):
    def asked(place, node, near=()):
        with ExitStack() as stack:
            served = serve_forked(near, transport, fl.Dataset(place), SETTINGS, node, stack)
            assert served is None or served.nodes == ()
            return 0 if served is None else len(said_in_a_fork(lambda: served.nodes))

    with Node(NODE, (str(folder_of_forked_stores), url)) as node:
        transport = LocalTransport(node)
        assert asked(folder_of_forked_stores, NODE) == 0
        assert asked(url, NODE) == 1
        assert asked(folder_of_forked_stores, replace(NODE, shared_cache=url)) == 1
        assert asked(url, NODE, near=["http://node"]) == 0


def test_workers_of_a_closed_job_fail_and_name_what_to_use_instead(url):
    with job_for_of_forked_stores(url) as job:
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
def test_workers_that_read_a_store_go_with_a_killed_process(folder_of_forked_stores, copies):
    """Those that wait for something to do, and those that ask for samples, which would ask again for ten minutes."""
    code = (
        "import multiprocessing, sys, time, frostline as fl\n"
        "from torch.utils.data import DataLoader\n"
        "from torch.utils.data._utils import worker\n"
        "worker.MP_STATUS_CHECK_INTERVAL = 0.2\n"
        "from support.images import tiny_preprocess\n"
        "from loaders.test_workers import in_memory\n"
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
    command = [sys.executable, "-c", code, str(folder_of_forked_stores), str(copies)]
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


def test_s3_is_read_for_forked_workers_and_by_spawned_ones_and_by_the_io_service(
    s3, folder_of_forked_stores, monkeypatch
):
    s3.put_folder(folder_of_forked_stores, "workers")
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    with job_for_of_forked_stores("s3://workers") as job:
        loader = job.loader(4, shuffle=True)
        whole = ids_of(loader)
        assert ids_of(forked(loader)) == whole
        spawned = DataLoader(loader, batch_size=None, num_workers=1, multiprocessing_context="spawn")
        assert ids_of(spawned) == whole
    upstream = Upstream(roots=("s3://workers",), node=NODE)
    with start_io(upstream) as service, job_for_of_forked_stores("s3://workers", near=service.url) as job:
        assert ids_of(forked(job.loader(4, shuffle=True))) == whole


def test_cassandra_is_read_for_forked_workers(cql, folder_of_forked_stores, monkeypatch, tmp_path):
    monkeypatch.setenv("FROSTLINE_CQL_PASSWORD", PASSWORD)
    url = f"cql://{USER}@{cql.place}/{KEYSPACE}/t{uuid.uuid4().hex}?protocol=3"
    put_into_table(fl.Dataset(folder_of_forked_stores, cache=tmp_path), url, on_event=lambda _: None)
    with job_for_of_forked_stores(url) as job:
        loader = job.loader(4, shuffle=True)
        whole = ids_of(loader)
        assert sum(map(len, whole)) == 24
        assert ids_of(forked(loader)) == whole


SETTINGS_OF_ERRORS_IN_WORKERS = LoaderSettings(
    samples_per_request=4, requests_in_flight=2, retry_for_s=0.2, max_skipped_fraction=0
)

# Begins a pass, keeps it, and ends by an error of its own code: when each worker has given a batch, since PyTorch says
# of one that is ended before it has begun that it was killed.
TRAINER = """
    import os, sys
    import frostline as fl
    from frostline.loaders import WorkerLoader
    from support.images import tiny_preprocess

    os.setsid()
    job = fl.offload(None, fl.Dataset(sys.argv[1]), preprocess=tiny_preprocess())
    batches = iter(WorkerLoader(job.loader(2), 2, start=sys.argv[2]))
    for number, batch in enumerate(batches):
        if number == 1:
            raise ZeroDivisionError("in the loop")
"""


class Broken(RuntimeError):
    """Of the user's code."""


def breaks(batch, _):
    """An ``augment`` that one of the workers cannot do, so that the others wait for what to do next."""
    if get_worker_info().id == 1:
        raise Broken("in the worker")
    return batch


def job_for_of_errors_in_workers(folder):
    return fl.offload(
        None, fl.Dataset(folder), preprocess=tiny_preprocess(), settings=SETTINGS_OF_ERRORS_IN_WORKERS, node=NODE
    )


def children():
    return {child.pid for child in multiprocessing.active_children()}


def none_but(before, memory):
    """Until no other child is left, nor memory that any had."""
    until(lambda: children() <= before)
    until(lambda: shared_memory() <= memory)


@pytest.fixture
def folder_of_errors_in_workers(tmp_path):
    return image_folder(tmp_path / "images", per_class=16)


def test_a_kept_error_of_the_data_keeps_no_worker(folder_of_errors_in_workers):
    (folder_of_errors_in_workers / "circle" / "007.jpg").write_bytes(b"no image")
    before, memory = children(), shared_memory()
    with job_for_of_errors_in_workers(folder_of_errors_in_workers) as job, pytest.raises(DataError) as raised:
        list(WorkerLoader(job.loader(2), 2, start="fork"))
    none_but(before, memory)
    assert raised.traceback, "which is held all the time"


def test_a_kept_error_of_the_users_code_in_a_worker_keeps_no_worker(folder_of_errors_in_workers):
    before, memory = children(), shared_memory()
    # A RuntimeError, as what PyTorch says of a death is.
    with (
        job_for_of_errors_in_workers(folder_of_errors_in_workers) as job,
        pytest.raises(Broken, match="in the worker") as raised,
    ):
        list(WorkerLoader(job.loader(2, augment=breaks), 2, start="fork"))
    none_but(before, memory)
    assert raised.traceback, "which is held all the time"


def test_a_kept_error_of_the_loop_keeps_no_worker(folder_of_errors_in_workers):
    def train(loader):
        for _ in loader:
            raise Broken("in the loop")

    before, memory = children(), shared_memory()
    with (
        job_for_of_errors_in_workers(folder_of_errors_in_workers) as job,
        pytest.raises(Broken, match="in the loop") as raised,
    ):
        train(WorkerLoader(job.loader(2), 2, start="fork"))
    none_but(before, memory)
    assert raised.traceback, "which is held all the time"


def test_a_kept_pass_goes_on_until_it_is_closed(folder_of_errors_in_workers):
    before, memory = children(), shared_memory()
    with job_for_of_errors_in_workers(folder_of_errors_in_workers) as job:
        whole = [batch.ids.tolist() for batch in job.loader(2)]
        batches = iter(WorkerLoader(job.loader(2), 2, start="fork"))
        seen = []
        for batch in batches:
            seen.append(batch.ids.tolist())
            if len(seen) == 3:
                break
        assert len(children() - before) == 2
        seen.append(next(batches).ids.tolist())
        batches.close()
        none_but(before, memory)
        assert seen == whole[:4]
        assert next(batches, None) is None


@pytest.mark.parametrize("start", sampled(["fork", "spawn", "forkserver"], usual=("forkserver",)))
def test_a_process_that_an_error_of_its_loop_ends_leaves_no_worker(folder_of_errors_in_workers, start):
    memory = shared_memory()
    with python(TRAINER, folder_of_errors_in_workers, start) as process:
        said = process.communicate(timeout=GONE_S)[1]
        assert process.returncode == 1
        assert said.rstrip().endswith("ZeroDivisionError: in the loop")
        until(lambda: not of_sessions({process.pid}))
    until(lambda: shared_memory() <= memory)
