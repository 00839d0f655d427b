"""Batches as arrays of JAX: on one device, over several, in several processes, and Grain's own test of states."""

import json

import jax
import numpy as np
import pytest
from etils import epath
from grain.checkpoint import CheckpointHandler
from grain.experimental import assert_equal_output_after_checkpoint
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from frostline.core.errors import OrderMismatch, SettingError
from frostline.loaders.adapters.jax import JaxLoader
from frostline.testing.loaders import BreakTests, FailureTests, OrderTests, StateRefusalTests, StateTests, TargetTests
from support.frameworks import start
from support.servers import free_ports


@pytest.fixture(scope="module")
def sharding():
    return NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))


def ids_of(batches):
    return [batch["ids"].tolist() for batch in batches]


def test_the_loader_brings_no_torch(torch_was_brought):
    assert not torch_was_brought


def test_batches_are_those_of_the_arrays(job):
    columns = ("features", "labels", "ids")
    loader = JaxLoader(job.arrays(8, shuffle=True), columns=columns)
    for batch, arrays in zip(loader, job.arrays(8, shuffle=True), strict=True):
        assert tuple(batch) == columns
        assert isinstance(batch["features"], jax.Array)
        assert np.array_equal(batch["features"], arrays.features)
        assert np.array_equal(batch["labels"], arrays.labels)
        assert np.array_equal(batch["ids"], arrays.ids)  # 64 bits, which JAX would have cut


def test_rows_are_divided_over_the_devices_of_a_sharding(job, sharding):
    batches = list(JaxLoader(job.arrays(8, shuffle=True, last="drop"), sharding=sharding))
    assert len(batches) == 5
    for batch, arrays in zip(batches, job.arrays(8, shuffle=True, last="drop"), strict=True):
        assert batch["features"].sharding == sharding
        assert [shard.data.shape for shard in batch["features"].addressable_shards] == [(2, 3, 32, 32)] * 4
        assert np.array_equal(batch["features"], arrays.features)


def test_a_last_batch_that_devices_cannot_share_is_refused_with_what_to_do(job, sharding):
    with pytest.raises(SettingError, match=r"5 rows cannot be divided .* last='drop'"):
        list(JaxLoader(job.arrays(8), sharding=sharding))


def test_a_jitted_step_takes_a_batch_whole(job):
    step = jax.jit(lambda batch: batch["features"].mean() + batch["labels"].sum())
    for batch, arrays in zip(JaxLoader(job.arrays(15)), job.arrays(15), strict=True):
        assert float(step(batch)) == pytest.approx(arrays.features.mean() + arrays.labels.sum(), rel=1e-5)


def test_encoded_samples_and_tensors_are_refused_with_a_sentence(job):
    with pytest.raises(SettingError, match="without encoded=True"):
        JaxLoader(job.arrays(8, encoded=True))
    with pytest.raises(SettingError, match=r"loader takes what job\.arrays"):
        JaxLoader(range(8))


class InNumPy:
    """Iterators with the same states whose values NumPy's comparisons can take, as Grain's test makes them."""

    def __init__(self, values):
        self._values = values
        for name in ("get_state", "set_state"):
            if hasattr(values, name):
                setattr(self, name, getattr(values, name))

    def __iter__(self):
        return InNumPy(iter(self._values))

    def __next__(self):
        return jax.tree.map(np.asarray, next(self._values))


@pytest.mark.parametrize("options", [{"shuffle": True}, {"last": "drop"}, {"weights": [1] * 45, "num_samples": 20}])
def test_grain_finds_the_same_output_after_every_checkpoint(job, options):
    columns = ("features", "labels", "ids")
    assert_equal_output_after_checkpoint(InNumPy(JaxLoader(job.arrays(8, **options), columns=columns)))
    epochs = job.arrays(15, **options).epochs(range(2))
    assert_equal_output_after_checkpoint(InNumPy(JaxLoader(epochs, columns=columns)))


def test_grain_saves_and_restores_an_iterator(job, tmp_path):
    iterator = iter(JaxLoader(job.arrays(8, shuffle=True), columns=("ids",)))
    first = ids_of(next(iterator) for _ in range(3))
    handler, folder = CheckpointHandler(), epath.Path(tmp_path)
    handler.save(folder, item=iterator)
    rest = ids_of(iterator)
    restored = handler.restore(folder, item=iter(JaxLoader(job.arrays(8, shuffle=True), columns=("ids",))))
    assert ids_of(restored) == rest
    assert len(first) + len(rest) == 6
    next(tmp_path.iterdir()).write_text("{no json")
    with pytest.raises(OrderMismatch, match="no state of a loader"):
        handler.restore(folder, item=restored)


def test_two_iterations_at_once_do_not_disturb_each_other(job):
    loader = JaxLoader(job.arrays(8, shuffle=True), columns=("ids",))
    together = list(zip(loader, loader, strict=True))
    assert ids_of(item for item, _ in together) == ids_of(other for _, other in together)


def test_a_state_set_in_the_middle_of_a_pass_moves_it(job):
    iterator = iter(JaxLoader(job.arrays(8, shuffle=True).epochs(range(2)), columns=("ids",)))
    start = iterator.get_state()
    first = ids_of(next(iterator) for _ in range(8))
    state = json.loads(json.dumps(iterator.get_state()))
    assert (state["epoch"], state["position"]) == (1, 16)
    rest = ids_of(iterator)
    iterator.set_state(start)
    assert ids_of(next(iterator) for _ in range(8)) == first
    iterator.close()
    assert ids_of(iterator) == []
    iterator.set_state(state)
    assert ids_of(iterator) == rest


def test_an_iteration_begins_where_the_loader_was_put(job):
    whole = ids_of(JaxLoader(job.arrays(8, shuffle=True), columns=("ids",)))
    one = job.arrays(8, shuffle=True)
    taken = iter(one)
    next(taken)
    for again in (job.arrays(8, shuffle=True), job.arrays(8, shuffle=True).epochs([0])):
        again.load_state_dict(one.state_dict())
        loader = JaxLoader(again, columns=("ids",))
        assert ids_of(loader) == whole[1:]
        assert ids_of(loader) == whole
    taken.close()


@pytest.mark.parametrize("epochs", [None, [3]])
def test_replays_what_an_iterator_handed_out(job, epochs):
    arrays = job.arrays(8, shuffle=True, epoch=3, record=True)
    iterator = iter(JaxLoader(arrays if epochs is None else arrays.epochs(epochs), columns=("ids",)))
    found = ids_of(iterator)
    again = job.arrays(8, shuffle=True, epoch=3, replay=iterator.recorded_order())
    assert ids_of(JaxLoader(again, columns=("ids",))) == found


def test_a_state_that_does_not_fit_and_a_column_that_is_not_there_are_refused(job):
    iterator = iter(JaxLoader(job.arrays(8)))
    with pytest.raises(OrderMismatch, match="seed 1"):
        iterator.set_state(job.arrays(8, seed=1).state_dict())
    with pytest.raises(SettingError, match="columns are some of features"):
        JaxLoader(job.arrays(8), columns=("pixels",))
    with pytest.raises(SettingError, match="masks"):
        next(iter(JaxLoader(job.arrays(8), columns=("targets",))))


def test_processes_share_an_epoch_and_its_global_batches(folder, job):
    (port,) = free_ports(1)
    started = [start("jax", "-m", "support.jax_ranks", rank, 2, port, folder, devices=2) for rank in range(2)]
    answers = [process.communicate()[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], answers
    seen = [json.loads(answer.strip().splitlines()[-1]) for answer in answers]
    whole = [arrays.ids.tolist() for arrays in job.arrays(8, shuffle=True, last="drop")]
    assert [sorted(event + other) for event, other in zip(seen[0]["ids"], seen[1]["ids"], strict=True)] == [
        sorted(step) for step in whole
    ]
    assert seen[0]["labels"] == seen[1]["labels"]
    assert seen[0]["labels"] == [int(arrays.labels.sum()) for arrays in job.arrays(8, shuffle=True, last="drop")]
    assert seen[0]["state"] == seen[1]["state"]
    assert all("seed" in event["said"] for event in seen)


class TestTargetsOfJax(TargetTests):
    """Declared targets: lists of boxes stay arrays of NumPy's."""

    def with_targets(self, job, batch_size, **options):
        for batch in JaxLoader(job.arrays(batch_size, **options), columns=("ids", "targets")):
            targets = {
                name: [np.asarray(value).tolist() for value in values] for name, values in batch["targets"].items()
            }
            yield batch["ids"].tolist(), targets


class TestJaxLoaders(OrderTests, StateTests, BreakTests, StateRefusalTests, FailureTests):
    """The tests of every adapter; states are those of the iterator that runs."""

    def make(self, job, batch_size, state=None, **options):
        arrays = job.arrays(batch_size, **options)
        if state is not None:
            arrays.load_state_dict(state)
        return Running(arrays)

    def ids_of(self, batch):
        return batch["ids"].tolist()

    # An iterator of Grain's kind is there to keep states, and has that of its loader from the beginning.
    test_a_pass_of_which_nothing_was_taken_takes_no_state_away = None


class Running:
    """A loader that has the state of the last of its iterators."""

    def __init__(self, arrays):
        self._arrays, self._now = arrays, None
        self._loader = JaxLoader(arrays, columns=("features", "ids"))

    def __iter__(self):
        self._now = iter(self._loader)
        return self._now

    def state_dict(self):
        return self._arrays.state_dict() if self._now is None else self._now.get_state()

    def load_state_dict(self, state):
        self._arrays.load_state_dict(state)
        self._now = None
