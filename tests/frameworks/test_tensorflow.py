"""Batches as data sets of TensorFlow, in loops of its own and in Keras."""

import json
from dataclasses import replace

import keras
import numpy as np
import pytest
import tensorflow as tf

import frostline as fl
from frostline.core.config import NodeSettings
from frostline.core.errors import DataError, SettingError
from frostline.loaders.adapters.tensorflow import TensorFlowLoader
from frostline.testing.loaders import BreakTests, FailureTests, OrderTests, StateRefusalTests, StateTests, TargetTests
from support.frameworks import start
from support.images import image_folder, tiny_preprocess
from support.matrices import mostly_long
from support.servers import free_ports


def ids_of(elements):
    return [ids.numpy().tolist() for (ids,) in elements]


def test_the_loader_brings_no_torch(torch_was_brought):
    assert not torch_was_brought


def test_elements_are_the_batches_of_the_arrays(job):
    loader = TensorFlowLoader(job.arrays(8, shuffle=True), columns=("features", "labels", "ids"))
    for (features, labels, ids), arrays in zip(loader.dataset(), job.arrays(8, shuffle=True), strict=True):
        assert np.array_equal(features, arrays.features)
        assert np.array_equal(labels, arrays.labels)
        assert np.array_equal(ids, arrays.ids)


def test_nothing_of_tensorflow_sleeps_on_when_an_iteration_is_left(job):
    assert TensorFlowLoader(job.arrays(8), prefetch=1).dataset().options().autotune.enabled is False


@pytest.mark.parametrize(("last", "rows"), [("drop", 8), ("keep", None)])
def test_shapes_are_known_beforehand_and_whole_where_every_batch_is(job, last, rows):
    loader = TensorFlowLoader(job.arrays(8, last=last))
    features, labels = loader.dataset().element_spec
    assert features == tf.TensorSpec((rows, 3, 32, 32), tf.float32)
    assert labels == tf.TensorSpec((rows,), tf.int64)
    assert [len(labels) for _, labels in loader.dataset()] == [8] * 5 + [5] * (last == "keep")


def test_shapes_of_several_ranks_are_whole_too(job):
    ranks = fl.Ranks(rank=1, world_size=2)
    features, labels = TensorFlowLoader(job.arrays(8, last="drop", ranks=ranks)).dataset().element_spec
    assert (features.shape[0], labels.shape[0]) == (8, 8)


def test_encoded_samples_are_strings_that_tensorflow_decodes(job):
    def decoded(encoded, labels):
        return tf.map_fn(tf.io.decode_jpeg, encoded, fn_output_signature=tf.uint8), labels

    loader = TensorFlowLoader(job.arrays(9, shuffle=True, encoded=True))
    assert loader.dataset().element_spec[0] == tf.TensorSpec((None,), tf.string)
    assert {pixels.shape for pixels, _ in loader.dataset().map(decoded)} == {(9, 48, 60, 3)}


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_a_state_counts_what_the_loop_has_and_not_what_is_prefetched(job, prefetch):
    loader = TensorFlowLoader(job.arrays(8, shuffle=True), columns=("ids",), prefetch=prefetch)
    assert loader.state_dict()["position"] == 0
    whole, states = [], []
    for (ids,) in loader:
        whole.append(ids.numpy().tolist())
        states.append(json.loads(json.dumps(loader.state_dict())))
    assert [state["position"] for state in states] == [8, 16, 24, 32, 40, 45]
    for stopped in (0, 3, 5):
        again = TensorFlowLoader(job.arrays(8, shuffle=True), columns=("ids",), prefetch=prefetch)
        again.load_state_dict(states[stopped])
        assert ids_of(again.dataset()) == whole[stopped + 1 :]


def test_a_loop_over_what_is_prefetched_says_what_it_took_or_gets_no_state(job):
    loader = TensorFlowLoader(job.arrays(4, shuffle=True), columns=("ids",), prefetch=1)
    for number, _ in enumerate(loader.dataset(), 1):
        loader.count_taken()
        assert loader.state_dict()["position"] == min(4 * number, 45)
    for _ in loader.dataset():
        pass
    with pytest.raises(SettingError, match="did not say which of them it has"):
        loader.state_dict()


def test_an_epoch_left_early_leaves_the_next_one_complete(job):
    loader = TensorFlowLoader(job.arrays(8, shuffle=True), columns=("ids",), prefetch=1)
    whole = ids_of(loader)
    for _ in loader:
        break
    assert ids_of(loader) == whole


class Seen(keras.callbacks.Callback):
    """Keeps the states after each batch."""

    def __init__(self, loader):
        super().__init__()
        self._loader = loader
        self.states = []

    def on_train_batch_end(self, batch, logs=None):
        self.states.append(self._loader.state_dict())


def network(**options):
    keras.utils.set_random_seed(0)
    made = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(3)])
    made.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), **options)
    return made


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize(("prefetch", "steps"), [(0, 1), (2, 1), (2, 2)])
def test_keras_fits_over_epochs_and_a_run_that_was_stopped_ends_as_a_whole_one(job, prefetch, steps):
    def loader_of(epochs):
        arrays = job.arrays(8, shuffle=True, last="drop").epochs(epochs)
        return TensorFlowLoader(arrays, prefetch=prefetch)

    def fit(model, loader, epochs):
        seen = Seen(loader)
        model.fit(loader.dataset(), epochs=epochs, verbose=0, shuffle=False, callbacks=[loader.callback(), seen])
        return seen.states

    whole, parted = network(steps_per_execution=steps), network(steps_per_execution=steps)
    states = fit(whole, loader_of(range(3)), 3)
    assert [state["epoch"] for state in states if state["position"] == 16] == [0, 1, 2]
    first = loader_of(range(1))
    fit(parted, first, 1)
    rest = loader_of(range(3))
    rest.load_state_dict(first.state_dict())
    fit(parted, rest, 2)
    for weight, other in zip(whole.get_weights(), parted.get_weights(), strict=True):
        assert np.array_equal(weight, other)


def test_an_error_keeps_its_sentence(tmp_path):
    folder = image_folder(tmp_path, per_class=4)
    for path in folder.glob("*/*.jpg"):
        path.write_bytes(b"no image")
    node = NodeSettings(memory_bytes=1 << 28, device_batch=8)
    with fl.offload(None, fl.Dataset(folder), preprocess=tiny_preprocess(), node=node) as job:
        loader = TensorFlowLoader(job.arrays(4))
        with pytest.raises(DataError, match=r"cannot be read|unreadable"):
            list(loader)
        with pytest.raises(tf.errors.OpError, match=r"cannot be read|unreadable"):
            list(loader.dataset())


def test_refuses_values_that_do_not_fit(job):
    with pytest.raises(SettingError, match="columns are some of"):
        TensorFlowLoader(job.arrays(8), columns="features")
    with pytest.raises(SettingError, match="0 batches or more"):
        TensorFlowLoader(job.arrays(8), prefetch=-1)
    with pytest.raises(SettingError, match="0 batches or more, not -2"):
        TensorFlowLoader(job.arrays(8), ahead=-2)
    with pytest.raises(SettingError, match="masks"):
        list(TensorFlowLoader(job.arrays(8), columns=("targets",)))


def workers(folder, count):
    """What each of so many workers of tf.distribute saw; one alone has two devices."""
    ports = ",".join(map(str, free_ports(count))) if count > 1 else ""
    started = [start("tensorflow", "-m", "support.tensorflow_ranks", rank, ports, folder) for rank in range(count)]
    answers = [process.communicate()[0] for process in started]
    assert [process.returncode for process in started] == [0] * count, answers
    return [json.loads(answer.strip().splitlines()[-1]) for answer in answers]


def test_workers_of_a_strategy_share_an_epoch_and_refuse_to_where_they_would_not(folder, job):
    seen = workers(folder, 2)
    arrays = list(job.arrays(8, shuffle=True, last="drop"))
    steps = [[id for (ids,) in step for id in ids] for step in zip(*(event["ids"] for event in seen), strict=True)]
    assert [sorted(step) for step in steps] == [sorted(array.ids.tolist()) for array in arrays]
    for event in seen:
        assert event["labels"] == [int(step.labels.sum()) for step in arrays]
        assert event["positions"] == [8, 16, 24, 32, 45]
        assert "the seed differs: rank 0 has 0, rank 1 has 1" in event["said"]


def test_devices_of_a_strategy_share_the_batches_and_keras_trains_on_them_as_on_one(folder, job):
    (seen,) = workers(folder, 1)
    batches = [arrays.ids.tolist() for arrays in job.arrays(4, shuffle=True, last="drop")]
    assert [ids for step in seen["ids"] for ids in step] == batches[:10]  # one batch for two devices is no step
    assert seen["positions"] == [8, 16, 24, 32, 40]
    on_two, on_one = ([np.array(weight) for weight in weights] for weights in seen["weights"])
    for item, other in zip(on_two, on_one, strict=True):
        np.testing.assert_allclose(item, other, rtol=1e-4, atol=1e-6)


class TestTargetsOfTensorFlow(TargetTests):
    """Declared targets, of which those of any length are ragged."""

    def with_targets(self, job, batch_size, **options):
        for ids, targets in TensorFlowLoader(job.arrays(batch_size, **options), columns=("ids", "targets")):
            assert isinstance(targets["boxes"], tf.RaggedTensor)
            found = {
                name: values.to_list() if name == "boxes" else values.numpy().tolist()
                for name, values in targets.items()
            }
            yield ids.numpy().tolist(), found


def test_texts_and_single_columns_have_static_shapes(folder):
    data = fl.Dataset(folder, targets="words")
    words = [f"é{row}" for row in range(len(data.whole.samples))]
    with fl.offload(None, data.with_columns({"words": words}), preprocess=tiny_preprocess()) as job:
        loader = TensorFlowLoader(job.arrays(8, last="drop"), columns=("targets",))
        assert loader.dataset().element_spec == (tf.TensorSpec((8,), tf.string),)
        assert [word.decode() for (texts,) in loader for word in texts.numpy().tolist()] == words[:40]
    data = fl.Dataset(folder, targets=["tags", "n"]).with_columns(
        {"tags": [["a"] * (row % 3) for row in range(45)], "n": range(45)}
    )
    with fl.offload(None, data, preprocess=tiny_preprocess()) as job:
        loader = TensorFlowLoader(job.arrays(8), columns=("targets",))
        assert [texts for (targets,) in loader for texts in targets["tags"].to_list()] == [
            [b"a"] * (row % 3) for row in range(45)
        ]
        changed = job.arrays(8, map=lambda sample: replace(sample, target={"n": sample.target["n"]}))
        with pytest.raises(SettingError, match="map made other targets"):
            list(TensorFlowLoader(changed, columns=("targets",)))


class TestTensorFlowLoaders(OrderTests, StateTests, BreakTests, StateRefusalTests, FailureTests):
    """The tests of every adapter."""

    prefetch = 0

    def make(self, job, batch_size, state=None, **options):
        loader = TensorFlowLoader(
            job.arrays(batch_size, **options), columns=("features", "ids"), prefetch=self.prefetch
        )
        if state is not None:
            loader.load_state_dict(state)
        return loader

    def ids_of(self, batch):
        return batch[1].numpy().tolist()


@mostly_long(
    "test_a_loader_that_went_further_goes_back_to_a_state",
    "test_after_a_pass_that_was_left_the_next_one_is_whole",
    "test_batches_before_a_failure_are_in_order_and_another_run_goes_on_after_them",
    "test_every_pass_over_a_loader_is_its_epoch",
    "test_from_the_state_after_any_batch_a_run_goes_on_with_the_next",
)
class TestPrefetchingTensorFlowLoaders(TestTensorFlowLoaders):
    """The same where TensorFlow holds batches that the loop does not have yet."""

    prefetch = 2
