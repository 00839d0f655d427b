"""A loop over workers that ends with an error, or early: somebody keeps the error, and still no worker is left."""

import multiprocessing

import pytest
from torch.utils.data import get_worker_info

import frostline as fl
from frostline.core.config import LoaderSettings, NodeSettings
from frostline.core.errors import DataError
from frostline.loaders import WorkerLoader
from support.images import image_folder, tiny_preprocess
from support.matrices import sampled
from support.nodes import until
from support.services import of_sessions, python, shared_memory

NODE = NodeSettings(memory_bytes=1 << 28, device_batch=8)
SETTINGS = LoaderSettings(samples_per_request=4, requests_in_flight=2, retry_for_s=0.2, skip_allowance=0)
GONE_S = 200  # a worker looks for its parent every 5 s

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


def job_for(folder):
    return fl.offload(None, fl.Dataset(folder), preprocess=tiny_preprocess(), settings=SETTINGS, node=NODE)


def children():
    return {child.pid for child in multiprocessing.active_children()}


def none_but(before, memory):
    """Until no other child is left, nor memory that any had."""
    until(lambda: children() <= before)
    until(lambda: shared_memory() <= memory)


@pytest.fixture
def folder(tmp_path):
    return image_folder(tmp_path / "images", per_class=16)


def test_a_kept_error_of_the_data_keeps_no_worker(folder):
    (folder / "circle" / "007.jpg").write_bytes(b"no image")
    before, memory = children(), shared_memory()
    with job_for(folder) as job, pytest.raises(DataError) as raised:
        list(WorkerLoader(job.loader(2), 2, start="fork"))
    none_but(before, memory)
    assert raised.traceback, "which is held all the time"


def test_a_kept_error_of_the_users_code_in_a_worker_keeps_no_worker(folder):
    before, memory = children(), shared_memory()
    # A RuntimeError, as what PyTorch says of a death is.
    with job_for(folder) as job, pytest.raises(Broken, match="in the worker") as raised:
        list(WorkerLoader(job.loader(2, augment=breaks), 2, start="fork"))
    none_but(before, memory)
    assert raised.traceback, "which is held all the time"


def test_a_kept_error_of_the_loop_keeps_no_worker(folder):
    def train(loader):
        for _ in loader:
            raise Broken("in the loop")

    before, memory = children(), shared_memory()
    with job_for(folder) as job, pytest.raises(Broken, match="in the loop") as raised:
        train(WorkerLoader(job.loader(2), 2, start="fork"))
    none_but(before, memory)
    assert raised.traceback, "which is held all the time"


def test_a_kept_pass_goes_on_until_it_is_closed(folder):
    before, memory = children(), shared_memory()
    with job_for(folder) as job:
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


@pytest.mark.parametrize("start", sampled(["fork", "spawn", "forkserver"], usual=("fork", "forkserver")))
def test_a_process_that_an_error_of_its_loop_ends_leaves_no_worker(folder, start):
    memory = shared_memory()
    with python(TRAINER, folder, start) as process:
        said = process.communicate(timeout=GONE_S)[1]
        assert process.returncode == 1
        assert said.rstrip().endswith("ZeroDivisionError: in the loop")
        until(lambda: not of_sessions({process.pid}))
    until(lambda: shared_memory() <= memory)
