"""Jobs that are killed, and systems that lack what Linux has: nothing is lost, and nothing is left.

Two jobs with workers that share an I/O service, and someone is killed: nothing is lost, and nothing is left.

Trainers on systems that lack what Linux alone has, as macOS does: all of it is taken away before Frostline comes.
"""

import itertools
import json
import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

import frostline as fl
from frostline.core.config import IoSettings, NodeSettings
from frostline.io_service.handler import Upstream
from frostline.io_service.start import start_io
from support.images import image_folder, tiny_preprocess
from support.matrices import sampled
from support.nodes import until
from support.services import descriptors, of_sessions, python, shared_memory

pytestmark = pytest.mark.promise("survives")

NODE = NodeSettings(memory_bytes=1 << 28, device_batch=8)
GONE_S = 200  # a worker looks for its parent every 5 s

# Says each batch and the state after it. After some it says who its workers are, and waits for a line. Without a start
# method it has no workers and no torch, which takes seconds to import.
TRAINER = """
    import json, multiprocessing, os, signal, sys
    import frostline as fl
    from frostline.core.errors import Unavailable
    from support.images import tiny_preprocess

    def say(**what):
        print(json.dumps(what), flush=True)

    os.setsid()
    preloaded = ["torch", "frostline.loaders.torch_loader", "frostline.jobs.workers"]
    multiprocessing.set_forkserver_preload(preloaded)
    folder, near, start, seed, state = sys.argv[1:]
    settings = fl.LoaderSettings(samples_per_request=4, requests_in_flight=2, cache_bytes=0, retry_for_s=60)
    with fl.offload(None, fl.Dataset(folder), preprocess=tiny_preprocess(), near=near, settings=settings) as job:
        if start:
            from frostline.loaders import WorkerLoader

            loader = job.loader(2, shuffle=True, seed=int(seed))
            loader = WorkerLoader(loader, 2 if start == "fork" else 1, start=start)
        else:
            loader = job.arrays(2, shuffle=True, seed=int(seed))
        loader.load_state_dict(json.loads(state) or loader.state_dict())
        taken, failed = 0, True
        while failed:
            failed = False
            try:
                for batch in loader:
                    say(ids=batch.ids.tolist(), state=loader.state_dict())
                    taken += 1
                    if taken == 3:
                        # PyTorch's handler raises between any two lines, also where a batch was given but not yet said.
                        # Without it the loader itself finds that a worker is gone, as it waits for the next batch.
                        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                        say(workers=[child.pid for child in multiprocessing.active_children()])
                        sys.stdin.readline()
            except (Unavailable, RuntimeError) as error:
                if isinstance(error, RuntimeError) and "exited unexpectedly" not in str(error):
                    raise
                say(failed=str(error))
                failed = True
                loader.load_state_dict(loader.state_dict())
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return image_folder(tmp_path_factory.mktemp("images"), per_class=16)


class Trainer:
    """What a training process said."""

    def __init__(self, process):
        self.process = process
        self.ids, self.failures, self.state, self.workers = [], [], None, []

    def read(self):
        """All that it says until it waits or ends."""
        for line in self.process.stdout:
            said = json.loads(line)
            if "workers" in said:
                self.workers = said["workers"]
                return
            if "failed" in said:
                self.failures.append(said["failed"])
            else:
                self.ids.append(said["ids"])
                self.state = said["state"]

    def finish(self):
        """Let it train to the end of its epoch."""
        self.process.stdin.write("go on\n")
        self.process.stdin.flush()
        self.read()
        assert self.process.wait(GONE_S) == 0, self.process.stderr.read()


def trainer(folder, service, start, seed, state=None):
    return python(TRAINER, folder, service.url, start, seed, json.dumps(state))


def kill(killed, service, trainers, gone):
    """End what is to be killed; a service is started again."""
    if killed == "a worker":
        os.kill(trainers[0].workers[0], signal.SIGKILL)
    elif killed == "the service":
        os.kill(service.pid, signal.SIGKILL)
        until(lambda: service.pid == 0)
        service.start()
    for each in gone:
        each.process.kill()
    for each in gone:
        each.process.wait()


STARTS = ("fork", "spawn", "forkserver")
EVERYBODY = ("a worker", "the service", "a trainer")
OFTEN = {("fork", "a worker"), ("spawn", "the service")}
CASES = sampled((*itertools.product(STARTS, EVERYBODY), ("fork", "both trainers")), OFTEN, name=lambda case: case)


@pytest.mark.parametrize(("start", "killed"), CASES)
def test_two_jobs_that_share_a_service_lose_nothing_and_leave_nothing(folder, start, killed):
    with fl.offload(None, fl.Dataset(folder), preprocess=tiny_preprocess(), node=NODE) as job:
        wholes = [[array.ids.tolist() for array in job.arrays(2, shuffle=True, seed=seed)] for seed in range(2)]
    memory = shared_memory()
    upstream = Upstream(roots=(folder.as_uri(),), node=NODE)
    with start_io(upstream, IoSettings(memory_bytes=64 << 20)) as service, closing(service.transport()) as watching:
        assert watching.health().roots
        before = descriptors(service.pid)
        with trainer(folder, service, start, 0) as one, trainer(folder, service, "", 1) as other:
            trainers = [Trainer(one), Trainer(other)]
            for each in trainers:
                each.read()
                assert len(each.ids) == 3, each.process.stderr.read()
            assert len(trainers[0].workers) == (2 if start == "fork" else 1)
            sessions = {each.process.pid for each in trainers}
            gone = {"a trainer": trainers[:1], "both trainers": trainers}.get(killed, [])
            kill(killed, service, trainers, gone)
            for each in trainers:
                if each not in gone:
                    each.finish()
            for each, whole in zip(trainers, wholes, strict=True):
                failed = [killed] if each.failures else []
                assert failed == (["a worker"] if killed == "a worker" and each is trainers[0] else [])
                assert each.ids == whole[: len(each.ids)]
                assert (len(each.ids) < len(whole)) == (each in gone)
            until(lambda: not of_sessions(sessions))
        until(lambda: len(watching.service_statistics()["jobs"]) == 1)
        until(lambda: watching.service_statistics()["window"]["used_bytes"] == 0)
        if killed != "the service":
            until(lambda: descriptors(service.pid) <= before)
        for seed, each in enumerate(trainers):
            if each in gone:
                with trainer(folder, service, start, seed, each.state) as again:
                    rest = Trainer(again)
                    rest.read()
                    rest.finish()
                    assert each.ids + rest.ids == wholes[seed]
    until(lambda: shared_memory() <= memory)


WITHOUT = """
import importlib, json, sys

for module, names in {
    "mmap": ("MADV_HUGEPAGE", "MAP_NORESERVE", "MAP_POPULATE", "MAP_STACK"),
    "os": (
        "MFD_ALLOW_SEALING", "MFD_CLOEXEC", "SCHED_BATCH", "SCHED_OTHER", "eventfd", "memfd_create", "pidfd_open",
        "posix_fadvise", "sched_getaffinity", "sched_getscheduler", "sched_setaffinity", "sched_setscheduler",
    ),
    "select": ("EPOLLIN", "EPOLLRDHUP", "epoll"),
    "socket": ("SO_PEERCRED", "TCP_KEEPIDLE"),
}.items():
    for name in names:
        vars(importlib.import_module(module)).pop(name, None)
sys.modules["fcntl"] = None

import frostline as fl
from frostline.core.config import LoaderSettings
from frostline.core.errors import SettingError
from frostline.loaders import WorkerLoader
from frostline.stores.local import FolderStore
from support.images import tiny_preprocess

data, near = fl.Dataset(sys.argv[1]), sys.argv[2]
settings = LoaderSettings(samples_per_request=8, max_skipped_fraction=0.1)
said = {}

for place in ("", near):
    with fl.offload(None, data, preprocess=tiny_preprocess(), near=place or None, settings=settings) as job:
        said["over a node" if place else "here"] = {
            "arrays": sum(map(len, job.arrays(8))),
            "loader": sum(map(len, job.loader(8, shuffle=True))),
            "workers": sum(map(len, WorkerLoader(job.loader(8, epoch=1), 2, start="fork"))),
            "skipped": [sample.object for sample in job.statistics().skipped],
        }

from support.networks import Small

model = fl.freeze(Small().train(), "stem", input_shape=(3, 32, 32))
with fl.offload(model, data, preprocess=tiny_preprocess(), near=near, settings=settings) as job:
    said["trained on"] = sum(len(job.head(batch.features)) for batch in job.loader(8))

for name, ask in {
    "lock": lambda: FolderStore(sys.argv[1]).lock_for_writing().__enter__(),
    "service": lambda: fl.offload(None, data, near="unix:///run/frostline/io.sock"),
}.items():
    try:
        ask()
    except SettingError as error:
        said[name] = str(error)
import frostline.cli.commands
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def said(shared_node, tmp_path_factory):
    """What one process found: a new one imports torch, which takes most of its time."""
    folder = image_folder(tmp_path_factory.mktemp("images"), per_class=8)
    (folder / "noise" / "003.jpg").write_bytes(b"no image")
    command = [sys.executable, "-c", WITHOUT, str(folder), shared_node.url]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("place", ["over a node", "here"])
def test_a_plain_loader_reads_and_its_workers_and_their_skipped_samples_are_counted(said, place):
    assert said[place] == {"arrays": 23, "loader": 23, "workers": 23, "skipped": ["noise/003.jpg"]}


def test_a_network_is_cut_and_its_head_trained_over_a_node(said):
    assert said["trained on"] == 23


def test_explains_what_the_operating_system_lacks(said):
    assert "no locks of files" in said["lock"]
    assert "only Linux has" in said["service"]
