"""Lightning's trainer and that of transformers, held to the shipped suite: they run the loop, and the tests follow."""

import pytest

from frostline.testing.loaders import BreakTests, FailureTests, OrderTests, StateRefusalTests, StateTests
from support.matrices import mostly_long
from support.stepped import Fitted, Trained

# What these packages warn of is theirs.
pytestmark = pytest.mark.filterwarnings("ignore")


class Trainers(OrderTests, StateTests, BreakTests, StateRefusalTests, FailureTests):
    test_of_passes_that_overlap_the_last_one_is_whole_and_has_the_state = None  # a trainer has one loop at a time

    stops = (0, 1, 5, 6)

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path):
        self.folder = tmp_path / "checkpoints"
        self.folder.mkdir()


class TestLightning(Trainers):
    """What is saved is the checkpoint that Lightning writes, and a run that goes on is its ``ckpt_path``."""

    # A run that goes on from an epoch's end puts the loader there, and makes no pass.
    test_after_the_state_of_a_pass_that_ended_comes_nothing_or_all_and_then_all = None
    # It gives the loader its state when a run begins, and not before.
    test_the_state_right_after_going_on_says_how_far_that_is = None

    def make(self, job, batch_size, state=None, **options):
        loader = job.loader(batch_size, **options)
        if state is not None:
            loader.load_state_dict(state)
        return Fitted(loader, self.folder)

    def save(self, loader):
        return loader.checkpoint()

    def restore(self, job, batch_size, saved, **options):
        loader = self.make(job, batch_size, **options)
        loader.load_state_dict(saved)
        return loader


# A run of this trainer takes three times as long as one of the other.
@mostly_long(
    "test_after_a_pass_that_was_left_the_next_one_is_whole",
    "test_batches_before_a_failure_are_in_order_and_another_run_goes_on_after_them",
    "test_each_sample_comes_exactly_once_an_epoch_in_another_order_each",
    "test_every_pass_over_a_loader_is_its_epoch",
    "test_from_the_state_after_any_batch_a_run_goes_on_with_the_next",
)
class TestTransformers(Trainers):
    stops = (0, 2)
    test_an_epoch_without_a_batch_is_empty_each_time = None  # this trainer refuses one

    def make(self, job, batch_size, state=None, **options):
        loader = job.loader(batch_size, augment=Trained.inputs, **options)
        if state is not None:
            loader.load_state_dict(state)
        return Trained(loader, self.folder)

    def ids_of(self, batch):
        return batch.tolist()
