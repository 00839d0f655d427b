"""PyTorch's ways to iterate a loader, held to the shipped suite: bare, in workers however they start, and stateful."""

import json
import multiprocessing

import pytest
from accelerate import Accelerator
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from frostline.loaders import WorkerLoader, furthest
from frostline.testing.loaders import BreakTests, FailureTests, OrderTests, RefusalTests, StateTests

# What torchdata asks of torch.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
multiprocessing.set_forkserver_preload(["torch", "frostline.loaders.loader", "frostline.loaders.reopening"])


def loader_of(job, batch_size, state, options):
    loader = job.loader(batch_size, **options)
    if state is not None:
        loader.load_state_dict(state)
    return loader


class TestBare(OrderTests, StateTests, BreakTests, RefusalTests, FailureTests):
    def make(self, job, batch_size, state=None, **options):
        return loader_of(job, batch_size, state, options)


class TestArrays(OrderTests, StateTests, BreakTests, RefusalTests, FailureTests):
    def make(self, job, batch_size, state=None, **options):
        loader = job.arrays(batch_size, **options)
        if state is not None:
            loader.load_state_dict(state)
        return loader


class Counted:
    """A ``DataLoader`` that counts what it handed out, as a training loop does."""

    def __init__(self, loader, **options):
        self._loader, self._batches = loader, 0
        self._data = DataLoader(loader, batch_size=None, **options)

    def __iter__(self):
        self._batches = 0
        for batch in self._data:
            self._batches += 1
            yield batch

    def state_dict(self):
        return self._loader.state_after(self._batches) if self._data.num_workers else self._loader.state_dict()


# Where a worker fails PyTorch takes five seconds for each to shut down, so that not every way is tried.
class InDataLoader(OrderTests, BreakTests):
    workers, start = 0, None

    def make(self, job, batch_size, state=None, **options):
        loader = loader_of(job, batch_size, state, options)
        return Counted(loader, num_workers=self.workers, multiprocessing_context=self.start)


class TestInTheProcessOfDataLoader(InDataLoader, StateTests, RefusalTests, FailureTests):
    pass


class TestOneForkedWorker(InDataLoader, StateTests, FailureTests):
    workers, start = 1, "fork"


class TestWorkerLoader(OrderTests, StateTests, BreakTests, RefusalTests, FailureTests):
    def make(self, job, batch_size, state=None, **options):
        loader = WorkerLoader(job.loader(batch_size, **options), 2, start="fork")
        if state is not None:
            loader.load_state_dict(state)
        return loader


class TestWorkerLoaderPreparedByAccelerate(OrderTests, StateTests, BreakTests):
    """Left as it is: its batches would else be divided among ranks a second time, and its states be lost."""

    stops = (0, 1, 5)

    def make(self, job, batch_size, state=None, **options):
        loader = WorkerLoader(job.loader(batch_size, **options), 1, start="fork")
        if state is not None:
            loader.load_state_dict(state)
        return Accelerator(cpu=True).prepare(loader)


class TestWorkersOfAForkServer(InDataLoader, StateTests):
    workers, start = 2, "forkserver"
    stops = (0, 1, 5)


class Stateful(OrderTests, StateTests, BreakTests):
    workers, start = 0, None

    def make(self, job, batch_size, state=None, **options):
        loader = loader_of(job, batch_size, state, options)
        return StatefulDataLoader(loader, batch_size=None, num_workers=self.workers, multiprocessing_context=self.start)

    def state_of(self, loader):
        return furthest(loader.state_dict())

    def save(self, loader):
        return json.loads(json.dumps(loader.state_dict()))

    def restore(self, job, batch_size, saved, **options):
        loader = self.make(job, batch_size, **options)
        loader.load_state_dict(saved)
        return loader


class TestStatefulDataLoader(Stateful, RefusalTests, FailureTests):
    pass


class TestStatefulDataLoaderWithWorkers(Stateful):
    workers, start = 2, "fork"
