"""What every adapter of a loader must do, as test classes: an adapter subclasses them, and inherits the tests.

Say in each subclass how a loader is made and read, and the tests run over your adapter under pytest:

    class TestMyFramework(OrderTests, StateTests, BreakTests, RefusalTests, FailureTests):
        def make(self, job, batch_size, state=None, **options):
            loader = job.arrays(batch_size, **options)
            if state is not None:
                loader.load_state_dict(state)
            return MyFrameworkLoader(loader)

The jobs under test read a few small images that lie in a temporary folder, with a node in the process itself.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import pytest

from frostline.core.errors import FrostlineError, OrderMismatch
from frostline.jobs import Job
from frostline.loaders import Ranks
from frostline.testing.small_jobs import (
    BATCH,
    SAMPLES,
    STEPS,
    TARGETS,
    flatten_ids,
    ids_of,
    job_of,
    names,
    options_of,
    reference,
    small_job,
    split,
    targets_job,
)

__all__ = (
    "BreakTests",
    "FailureTests",
    "LoaderTests",
    "OrderTests",
    "StateRefusalTests",
    "StateTests",
    "TargetTests",
)


_UNREADABLE = 12


class LoaderTests:
    """What the classes of this module share: subclasses say how their loaders are made and read.

    Attributes:
        stops: the numbers of batches after which runs are stopped, to go on from there.
    """

    stops: ClassVar[tuple[int, ...]] = tuple(range(STEPS + 1))

    @pytest.fixture(scope="class")
    @classmethod
    def job(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
        """A job without a model over ``SAMPLES`` images."""
        with small_job(tmp_path_factory.mktemp("images")) as job:
            yield job

    def make(self, job: Job, batch_size: int, state: Mapping[str, Any] | None = None, **options: Any) -> Any:
        """A loader under test, which can be iterated again and again.

        Args:
            job: job that it belongs to.
            batch_size: batch size of its batches.
            state: plain JSON from which its first pass goes on.
            options: options of ``Job.loader`` and ``Job.arrays``.

        Raises:
            NotImplementedError: a subclass did not say.
        """
        raise NotImplementedError("say in `make` how a loader of your adapter is made")

    def ids_of(self, batch: Any) -> list[int]:
        """The ids of a batch, in its order."""
        return [int(id) for id in batch.ids]

    def state_of(self, loader: Any) -> dict[str, Any]:
        """How far a loader is, as plain JSON that any other goes on from."""
        return dict(loader.state_dict())

    def save(self, loader: Any) -> Any:
        """How far a loader is, as its own framework keeps it."""
        return self.state_of(loader)

    def restore(self, job: Job, batch_size: int, saved: Any, **options: Any) -> Any:
        """A loader whose first pass goes on from what ``save`` gave."""
        return self.make(job, batch_size, saved, **options)

    def go_back(self, loader: Any, saved: Any) -> None:
        """Let the next pass over a loader that was used go on from what ``save`` gave."""
        loader.load_state_dict(saved)

    def pass_ids(self, loader: Any) -> list[list[int]]:
        """The ids of each batch of a pass."""
        return [self.ids_of(batch) for batch in loader]

    def stop(self, loader: Any, batches: int, save: Callable[[Any], Any]) -> tuple[list[list[int]], Any]:
        """The ids of the first batches, and what was saved after them; the rest of the pass is left."""
        passing = iter(loader)
        found = [self.ids_of(next(passing)) for _ in range(batches)]
        saved = save(loader)
        del passing
        return found, saved


class OrderTests(LoaderTests):
    """Each sample once an epoch, in the order that the seed says."""

    @pytest.mark.parametrize("epoch", [0, 3])
    def test_the_batches_are_those_of_the_reference_order(self, job: Job, epoch: int) -> None:
        found = self.pass_ids(self.make(job, BATCH, shuffle=True, seed=5, epoch=epoch))
        assert found == reference(job, seed=5, epoch=epoch)

    def test_each_sample_comes_exactly_once_an_epoch_in_another_order_each(self, job: Job) -> None:
        epochs = [flatten_ids(self.pass_ids(self.make(job, BATCH, shuffle=True, epoch=epoch))) for epoch in range(2)]
        assert [sorted(ids) for ids in epochs] == [sorted(job.data.samples.ids.tolist())] * 2
        assert epochs[0] != epochs[1]

    def test_every_pass_over_a_loader_is_its_epoch(self, job: Job) -> None:
        loader = self.make(job, BATCH, shuffle=True)
        assert self.pass_ids(loader) == self.pass_ids(loader) == reference(job)

    def test_a_dropped_end_is_dropped(self, job: Job) -> None:
        found = self.pass_ids(self.make(job, BATCH, shuffle=True, last="drop"))
        assert found == reference(job)[:-1]

    @pytest.mark.parametrize("batch_size", [1, SAMPLES, SAMPLES + 1])
    def test_batches_of_one_sample_and_of_all_are_the_same_order(self, job: Job, batch_size: int) -> None:
        found = self.pass_ids(self.make(job, batch_size, shuffle=True))
        assert found == split(flatten_ids(reference(job)), batch_size)

    @pytest.mark.parametrize(("num_samples", "batch_size"), [(1, BATCH), (BATCH, BATCH)])
    def test_an_epoch_of_one_batch_comes_whole_and_again(self, job: Job, num_samples: int, batch_size: int) -> None:
        options: dict[str, Any] = {"weights": {"odd": 1, "even": 1}, "num_samples": num_samples}
        loader = self.make(job, batch_size, **options)
        expected = ids_of(job.arrays(batch_size, **options))
        assert [len(ids) for ids in expected] == [num_samples]
        assert self.pass_ids(loader) == self.pass_ids(loader) == expected

    def test_an_epoch_without_a_batch_is_empty_each_time(self, job: Job) -> None:
        loader = self.make(job, SAMPLES + 1, shuffle=True, last="drop")
        assert self.pass_ids(loader) == self.pass_ids(loader) == []

    @pytest.mark.parametrize(
        "order", ["in blocks", "drawn by weights", "a mixture", "a padded share of ranks", "replayed"]
    )
    def test_other_orders_come_as_they_do_without_a_framework(self, job: Job, order: str) -> None:
        options = options_of(job, order)
        assert self.pass_ids(self.make(job, BATCH, **options)) == ids_of(job.arrays(BATCH, **options))


class StateTests(LoaderTests):
    """States at every step, and who goes on from them."""

    def test_from_the_state_after_any_batch_a_run_goes_on_with_the_next(self, job: Job) -> None:
        for stop in self.stops:
            first, saved = self.stop(self.make(job, BATCH, shuffle=True), stop, self.save)
            rest = self.pass_ids(self.restore(job, BATCH, saved, shuffle=True))
            if stop < STEPS:
                assert first + rest == reference(job)
            else:
                assert rest in ([], reference(job)), "what is over is not begun in its middle"

    def test_the_state_before_any_pass_is_the_beginning(self, job: Job) -> None:
        saved = self.save(self.make(job, BATCH, shuffle=True))
        assert self.pass_ids(self.restore(job, BATCH, saved, shuffle=True)) == reference(job)

    def test_after_the_state_of_a_pass_that_ended_comes_nothing_or_all_and_then_all(self, job: Job) -> None:
        ended = self.make(job, BATCH, shuffle=True)
        assert self.pass_ids(ended) == reference(job)
        loader = self.restore(job, BATCH, self.save(ended), shuffle=True)
        assert self.pass_ids(loader) in ([], reference(job))
        assert self.pass_ids(loader) == reference(job)

    def test_after_the_rest_of_an_epoch_every_pass_is_whole_again(self, job: Job) -> None:
        first, saved = self.stop(self.make(job, BATCH, shuffle=True), 2, self.save)
        loader = self.restore(job, BATCH, saved, shuffle=True)
        assert first + self.pass_ids(loader) == reference(job)
        assert self.pass_ids(loader) == self.pass_ids(loader) == reference(job)

    def test_a_loader_that_went_further_goes_back_to_a_state(self, job: Job) -> None:
        loader = self.make(job, BATCH, shuffle=True)
        first, saved = self.stop(loader, 2, self.save)
        self.stop(loader, 4, self.save)
        for _ in range(2):
            self.go_back(loader, saved)
            assert first + self.pass_ids(loader) == reference(job)

    def test_asking_for_states_changes_nothing_and_they_stay_as_they_were(self, job: Job) -> None:
        loader = self.make(job, BATCH, shuffle=True)
        found, saved = [], []
        for batch in loader:
            found.append(self.ids_of(batch))
            saved.append([self.save(loader) for _ in range(2)])
        assert found == reference(job)
        for item in saved[1]:
            assert found[:2] + self.pass_ids(self.restore(job, BATCH, item, shuffle=True)) == found

    def test_a_state_that_is_asked_for_right_after_going_on_counts_from_the_beginning(self, job: Job) -> None:
        first, saved = self.stop(self.make(job, BATCH, shuffle=True), 3, self.save)
        second, saved = self.stop(self.restore(job, BATCH, saved, shuffle=True), 0, self.save)
        third, saved = self.stop(self.restore(job, BATCH, saved, shuffle=True), 1, self.save)
        rest = self.pass_ids(self.restore(job, BATCH, saved, shuffle=True))
        assert second == []
        assert first + third + rest == reference(job)

    def test_the_state_right_after_going_on_says_how_far_that_is(self, job: Job) -> None:
        for stop in (0, 1, 3, STEPS):
            _, saved = self.stop(self.make(job, BATCH, shuffle=True), stop, self.save)
            state = self.state_of(self.restore(job, BATCH, saved, shuffle=True))
            assert state["position"] == min(BATCH * stop, SAMPLES)

    def test_a_pass_of_which_nothing_was_taken_takes_no_state_away(self, job: Job) -> None:
        first, saved = self.stop(self.make(job, BATCH, shuffle=True), 2, self.save)
        loader = self.restore(job, BATCH, saved, shuffle=True)
        self.stop(loader, 0, lambda _: None)
        assert first + self.pass_ids(loader) == reference(job)

    def test_an_end_that_is_dropped_stays_so_where_a_run_goes_on(self, job: Job) -> None:
        options: dict[str, Any] = {"shuffle": True, "last": "drop"}
        first, saved = self.stop(self.make(job, BATCH, **options), 2, self.save)
        loader = self.restore(job, BATCH, saved, **options)
        assert first + self.pass_ids(loader) == self.pass_ids(loader) == reference(job)[:-1]

    def test_states_are_plain_json_that_counts_what_was_handed_out(self, job: Job) -> None:
        loader = self.make(job, BATCH, shuffle=True)
        positions = []
        for _ in loader:
            state = self.state_of(loader)
            assert json.loads(json.dumps(state)) == state
            positions.append(state["position"])
        assert positions == [min(BATCH * step, SAMPLES) for step in range(1, STEPS + 1)]

    def test_a_run_goes_on_without_a_framework_and_comes_back(self, job: Job) -> None:
        first, state = self.stop(self.make(job, BATCH, shuffle=True), 2, self.state_of)
        plain = job.arrays(BATCH, shuffle=True)
        plain.load_state_dict(state)
        batches = iter(plain)
        second = [next(batches).ids.tolist()]
        state = plain.state_dict()
        batches.close()
        assert first + second + self.pass_ids(self.make(job, BATCH, state, shuffle=True)) == reference(job)

    def test_a_run_goes_on_with_another_batch_size_and_other_ranks(self, job: Job) -> None:
        first, state = self.stop(self.make(job, BATCH, shuffle=True), 3, self.state_of)
        ranks = [Ranks(rank=rank, world_size=2) for rank in range(2)]
        rest = [self.pass_ids(self.make(job, 3, state, shuffle=True, ranks=rank)) for rank in ranks]
        assert sorted(flatten_ids(first) + flatten_ids(rest[0]) + flatten_ids(rest[1])) == sorted(
            flatten_ids(reference(job))
        )
        assert len(rest[0]) == len(rest[1])

    def test_a_loader_that_went_on_stops_again(self, job: Job) -> None:
        first, saved = self.stop(self.make(job, BATCH, shuffle=True), 1, self.save)
        second, saved = self.stop(self.restore(job, BATCH, saved, shuffle=True), 2, self.save)
        third = self.pass_ids(self.restore(job, BATCH, saved, shuffle=True))
        assert first + second + third == reference(job)

    def test_reordered_each_sample_comes_once_also_where_a_run_was_stopped(self, tmp_path: Path) -> None:
        with small_job(tmp_path, max_reorder=None) as job:
            first, saved = self.stop(self.make(job, BATCH, shuffle=True), 3, self.save)
            rest = self.pass_ids(self.restore(job, BATCH, saved, shuffle=True))
            assert sorted(flatten_ids(first + rest)) == sorted(job.data.samples.ids.tolist())


class BreakTests(LoaderTests):
    """Passes that are left early."""

    @pytest.mark.parametrize("batches", [1, STEPS - 1])
    def test_after_a_pass_that_was_left_the_next_one_is_whole(self, job: Job, batches: int) -> None:
        loader = self.make(job, BATCH, shuffle=True)
        self.stop(loader, batches, lambda _: None)
        assert self.pass_ids(loader) == reference(job)

    def test_of_passes_that_overlap_the_last_one_is_whole_and_has_the_state(self, job: Job) -> None:
        loader = self.make(job, BATCH, shuffle=True)
        older = iter(loader)
        head = [self.ids_of(next(older)) for _ in range(3)]
        newer = iter(loader)
        found = [self.ids_of(next(newer))]
        with suppress(
            StopIteration, OrderMismatch
        ):  # an older one may go on or end, and say why; it gives nothing else
            head.append(self.ids_of(next(older)))
        saved = self.save(loader)
        found += [self.ids_of(batch) for batch in newer]
        del older, newer
        assert head == reference(job)[: len(head)]
        assert found == reference(job)
        assert found[:1] + self.pass_ids(self.restore(job, BATCH, saved, shuffle=True)) == reference(job)

    def test_a_pass_of_which_nothing_was_taken_leaves_the_next_one_whole(self, job: Job) -> None:
        loader = self.make(job, BATCH, shuffle=True)
        for _ in range(3):
            self.stop(loader, 0, lambda _: None)
        assert self.pass_ids(loader) == reference(job)

    def test_loaders_of_one_job_do_not_disturb_each_other(self, job: Job) -> None:
        first = self.make(job, BATCH, shuffle=True)
        second = self.make(job, BATCH, shuffle=True, epoch=1)
        passing = iter(first)
        head = [self.ids_of(next(passing))]
        assert self.pass_ids(second) == reference(job, epoch=1)
        assert head + [self.ids_of(batch) for batch in passing] == reference(job)


class StateRefusalTests(LoaderTests):
    """States that do not fit are refused with a sentence."""

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ({"seed": 1}, "seed"),
            ({"manifest": "0" * 64}, "other samples"),
            ({"frostline_order": 99}, "newer Frostline"),
            ({"epoch": 4}, "epoch"),
            ({"position": -1}, "damaged"),
        ],
    )
    def test_a_state_that_does_not_fit_is_refused(self, job: Job, change: dict[str, Any], said: str) -> None:
        state = {**job.arrays(BATCH, shuffle=True).state_dict(), **change}
        with pytest.raises(OrderMismatch, match=said):
            self.pass_ids(self.make(job, BATCH, state, shuffle=True))

    def test_refuses_an_invalid_state(self, job: Job) -> None:
        with pytest.raises(OrderMismatch, match="no state of a loader"):
            self.pass_ids(self.make(job, BATCH, {"epoch": 0}, shuffle=True))


class TargetTests(LoaderTests):
    """Declared targets are those of their samples, whatever they are."""

    def with_targets(self, job: Job, batch_size: int, **options: Any) -> Iterator[tuple[list[int], dict[str, Any]]]:
        """The ids of each batch of a pass, and its declared targets by name, of numbers and lists.

        Raises:
            NotImplementedError: a subclass did not say.
        """
        raise NotImplementedError("say in `with_targets` what a batch of your adapter has")

    @pytest.mark.parametrize("options", [{}, {"shuffle": True, "epoch": 2}, {"shuffle": True, "last": "drop"}])
    def test_targets_of_every_kind_are_those_of_their_samples(self, tmp_path: Path, options: dict[str, Any]) -> None:
        with targets_job(tmp_path) as job:
            rows = {id: row for row, id in enumerate(job.data.samples.ids.tolist())}
            found = list(self.with_targets(job, BATCH, **options))
            assert [ids for ids, _ in found] == ids_of(job.arrays(BATCH, **options))
            for ids, targets in found:
                assert targets == {name: [values[rows[id]] for id in ids] for name, values in TARGETS.items()}


class FailureTests(LoaderTests):
    """What goes wrong while data is read reaches the loop as an error with a sentence, and nothing hangs."""

    failure: ClassVar[type[Exception]] = FrostlineError
    """What the loop is given; its text holds ours."""

    def test_data_that_cannot_be_read_ends_a_pass_with_a_sentence(self, tmp_path: Path) -> None:
        sentence = "samples are unreadable and the job allows"
        with small_job(tmp_path, unreadable=_UNREADABLE) as job, pytest.raises(self.failure, match=sentence):
            self.pass_ids(self.make(job, BATCH, shuffle=True))

    def test_a_pass_after_one_that_failed_fails_with_the_same_sentence(self, tmp_path: Path) -> None:
        sentence = "samples are unreadable and the job allows"
        with small_job(tmp_path, unreadable=_UNREADABLE) as job:
            loader = self.make(job, BATCH, shuffle=True)
            for _ in range(2):
                with pytest.raises(self.failure, match=sentence):
                    self.pass_ids(loader)

    def test_batches_before_a_failure_are_in_order_and_another_run_goes_on_after_them(self, tmp_path: Path) -> None:
        images, away = tmp_path / "images", tmp_path / "away"
        found: list[list[int]] = []
        with small_job(images) as job:
            expected = reference(job)
            last = [images / name for name in names(job, flatten_ids(expected[3:]))]
            away.mkdir()
            for path in last:
                path.rename(away / path.name)
            loader = self.make(job, BATCH, shuffle=True)
            with pytest.raises(self.failure, match="unreadable"):
                found.extend(self.ids_of(batch) for batch in loader)
            saved = self.state_of(loader)
        assert found == expected[: len(found)]
        for path in last:
            (away / path.name).rename(path)
        with job_of(images) as job:
            assert found + self.pass_ids(self.make(job, BATCH, saved, shuffle=True)) == expected
