"""PyTorch's ways to iterate a loader, held to the shipped suite: bare, in workers however they start, and stateful."""

import json
import multiprocessing

import pytest
from accelerate import Accelerator
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from frostline.core.errors import OrderMismatch
from frostline.loaders import WorkerLoader, merge_worker_states
from frostline.testing.loaders import (
    BreakTests,
    FailureTests,
    LoaderTests,
    OrderTests,
    StateRefusalTests,
    StateTests,
    TargetTests,
)
from frostline.testing.small_jobs import BATCH, SAMPLES, STEPS, flatten_ids, ids_of, reference
from support.matrices import mostly_long

# What torchdata asks of torch.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
multiprocessing.set_forkserver_preload(["torch", "frostline.loaders.torch_loader", "frostline.jobs.workers"])

ALIKE = (
    "test_a_loader_that_went_further_goes_back_to_a_state",
    "test_after_a_pass_that_was_left_the_next_one_is_whole",
    "test_each_sample_comes_exactly_once_an_epoch_in_another_order_each",
    "test_every_pass_over_a_loader_is_its_epoch",
    "test_from_the_state_after_any_batch_a_run_goes_on_with_the_next",
)
"""What runs by default of ways that differ little from one that is tried whole."""


def loader_of(job, batch_size, state, options):
    loader = job.loader(batch_size, **options)
    if state is not None:
        loader.load_state_dict(state)
    return loader


def listed(values):
    return [value if isinstance(value, float) else value.tolist() for value in values]


class TestTargetsOfArrays(TargetTests):
    """Declared targets as NumPy's arrays and lists of them."""

    def with_targets(self, job, batch_size, **options):
        for batch in job.arrays(batch_size, **options):
            yield batch.ids.tolist(), {name: listed(values) for name, values in batch.targets.items()}


class TestTargetsOfTensors(TargetTests):
    """The same as tensors, from workers."""

    def with_targets(self, job, batch_size, **options):
        for batch in WorkerLoader(job.loader(batch_size, **options), 2):
            yield batch.ids.tolist(), {name: listed(values) for name, values in batch.targets.items()}


class TestBare(OrderTests, StateTests, BreakTests, StateRefusalTests, FailureTests):
    def make(self, job, batch_size, state=None, **options):
        return loader_of(job, batch_size, state, options)


class TestArrays(OrderTests, StateTests, BreakTests, StateRefusalTests, FailureTests):
    def make(self, job, batch_size, state=None, **options):
        loader = job.arrays(batch_size, **options)
        if state is not None:
            loader.load_state_dict(state)
        return loader


class ProgressMade:
    """A ``DataLoader`` that counts what it handed out, as a training loop does."""

    def __init__(self, loader, **options):
        self._loader, self._counted = loader, [0]
        self._data = DataLoader(loader, batch_size=None, **options)

    def __iter__(self):
        counted = self._counted = [0]
        for batch in self._data:
            counted[0] += 1
            yield batch

    def state_dict(self):
        return self._loader.state_after(*self._counted) if self._data.num_workers else self._loader.state_dict()

    def load_state_dict(self, state):
        self._counted = [0]
        self._loader.load_state_dict(state)


# Where a worker fails PyTorch takes five seconds for each to shut down, so that not every way is tried.
class InDataLoader(OrderTests, BreakTests):
    workers, start = 0, None

    def make(self, job, batch_size, state=None, **options):
        loader = loader_of(job, batch_size, state, options)
        return ProgressMade(loader, num_workers=self.workers, multiprocessing_context=self.start)


class TestInTheProcessOfDataLoader(InDataLoader, StateTests, StateRefusalTests, FailureTests):
    pass


class Workers(InDataLoader, StateTests):
    """The loader learns nothing of passes in workers, so that what it was put to holds for each of them."""

    test_after_the_state_of_a_pass_that_ended_comes_nothing_or_all_and_then_all = None
    test_after_the_rest_of_an_epoch_every_pass_is_whole_again = None
    test_an_end_that_is_dropped_stays_so_where_a_run_goes_on = None


@mostly_long(*ALIKE, "test_data_that_cannot_be_read_ends_a_pass_with_a_sentence")
class TestOneForkedWorker(Workers, FailureTests):
    workers, start = 1, "fork"
    stops = (0, 1, 5)


class TestWorkerLoader(OrderTests, StateTests, BreakTests, StateRefusalTests, FailureTests):
    start = "fork"
    stops = (0, 1, 5)

    def make(self, job, batch_size, state=None, **options):
        loader = WorkerLoader(job.loader(batch_size, **options), 2, start=self.start)
        if state is not None:
            loader.load_state_dict(state)
        return loader


@mostly_long(*ALIKE)
class TestWorkerLoaderPreparedByAccelerate(OrderTests, StateTests, BreakTests):
    """Left as it is: its batches would else be divided among ranks a second time, and its states be lost."""

    stops = (0, 1, 5)

    def make(self, job, batch_size, state=None, **options):
        loader = WorkerLoader(job.loader(batch_size, **options), 1, start="fork")
        if state is not None:
            loader.load_state_dict(state)
        return Accelerator(cpu=True).prepare(loader)


@mostly_long(*ALIKE)
class TestWorkersOfAForkServer(Workers):
    workers, start = 2, "forkserver"
    stops = (0, 1, 5)


class TestWorkersOnceSpawned(LoaderTests):
    """Each is a new Python, which takes seconds, so that not every test of the suite is run."""

    stops = (1,)
    make = TestWorkerLoader.make
    start = "spawn"
    test_every_pass_over_a_loader_is_its_epoch = OrderTests.test_every_pass_over_a_loader_is_its_epoch
    test_from_the_state = StateTests.test_from_the_state_after_any_batch_a_run_goes_on_with_the_next


class Stateful(OrderTests, StateTests, BreakTests):
    workers, start = 0, None

    def make(self, job, batch_size, state=None, **options):
        loader = loader_of(job, batch_size, state, options)
        return StatefulDataLoader(loader, batch_size=None, num_workers=self.workers, multiprocessing_context=self.start)

    def state_of(self, loader):
        return merge_worker_states(loader.state_dict())

    def save(self, loader):
        return json.loads(json.dumps(loader.state_dict()))

    def restore(self, job, batch_size, saved, **options):
        loader = self.make(job, batch_size, **options)
        loader.load_state_dict(saved)
        return loader

    def test_restarts_after_a_finished_epoch_as_torchdata_does(self, job):
        ended = self.make(job, BATCH, shuffle=True)
        assert self.pass_ids(ended) == reference(job)
        loader = self.restore(job, BATCH, self.save(ended), shuffle=True)
        assert merge_worker_states(loader.state_dict())["position"] == SAMPLES
        assert self.pass_ids(loader) == self.pass_ids(loader) == reference(job)

    def test_after_the_last_batch_nothing_is_left_of_an_epoch_that_was_not_ended(self, job):
        _, saved = self.stop(self.make(job, BATCH, shuffle=True), STEPS, self.save)
        loader = self.restore(job, BATCH, saved, shuffle=True)
        assert self.pass_ids(loader) == []
        assert self.pass_ids(loader) == reference(job)

    def test_the_state_of_a_resumed_loader_continues_the_run(self, job):
        first, saved = self.stop(self.make(job, BATCH, shuffle=True), 3, self.save)
        state = merge_worker_states(self.restore(job, BATCH, saved, shuffle=True).state_dict())
        again = job.loader(BATCH, shuffle=True)
        again.load_state_dict(state)
        assert first + ids_of(again) == reference(job)


class TestStatefulDataLoader(Stateful, StateRefusalTests, FailureTests):
    pass


@mostly_long(*ALIKE)
class TestStatefulDataLoaderWithWorkers(Stateful):
    workers, start = 2, "fork"
    stops = (0, 1, 3, 5)
    # torchdata starts the workers of a pass before its first batch, and they take the state with them.
    test_a_pass_of_which_nothing_was_taken_takes_no_state_away = None

    def test_workers_go_on_from_their_own_states_with_steps_of_the_same_size_alone(self, job):
        first, saved = self.stop(self.make(job, BATCH, shuffle=True), 3, self.save)
        with pytest.raises(OrderMismatch, match=f"steps of {BATCH} samples.*of 3 now.*merge_worker_states"):
            self.pass_ids(self.restore(job, 3, saved, shuffle=True))
        rest = self.pass_ids(self.make(job, 3, merge_worker_states(saved), shuffle=True))
        assert flatten_ids(first) + flatten_ids(rest) == flatten_ids(reference(job))

    @pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than this machine has cores
    @pytest.mark.parametrize("workers", [1, 4])
    def test_the_state_right_after_a_load_is_what_was_loaded_with_any_number_of_workers(self, job, workers):
        made = StatefulDataLoader(job.loader(BATCH, shuffle=True), batch_size=None, num_workers=workers)
        first, saved = self.stop(made, 3, self.save)
        again = StatefulDataLoader(job.loader(BATCH, shuffle=True), batch_size=None, num_workers=workers)
        again.load_state_dict(saved)
        state = merge_worker_states(again.state_dict())
        assert state == merge_worker_states(saved)
        rest = job.loader(BATCH, shuffle=True)
        rest.load_state_dict(state)
        assert first + ids_of(rest) == reference(job)

    def test_a_state_that_is_older_than_its_batches_is_refused_as_that_of_a_run(self, job):
        loader = StatefulDataLoader(job.loader(BATCH), batch_size=None, num_workers=2, snapshot_every_n_steps=3)
        passing = iter(loader)
        for _ in range(2):
            next(passing)
        for state in (loader.state_dict(), {"loops": [loader.state_dict()]}):
            with pytest.raises(OrderMismatch, match=r"2 batches before it.*snapshot_every_n_steps=1"):
                merge_worker_states(state)
