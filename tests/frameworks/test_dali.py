"""Batches for pipelines of DALI on the processor, and on a GPU where there is one."""

import numpy as np
import pytest
from nvidia.dali import fn, pipeline_def

from frostline.core.errors import OrderMismatch, SettingError
from frostline.loaders.adapters.dali import DaliSource
from frostline.testing.loaders import BreakTests, FailureTests, OrderTests, StateRefusalTests, StateTests, TargetTests


def made(source, *, decode=None, batch_size=8, depth=2, device=None):
    """A pipeline of what a source gives; decoded and brought to one size where told to."""

    @pipeline_def(batch_size=batch_size, num_threads=2, device_id=device, prefetch_queue_depth=depth)
    def pipeline():
        first, *rest = source.read()
        if decode:
            first = fn.resize(fn.decoders.image(first, device=decode), size=(32, 32))
        return first, *rest

    return pipeline()


def read(source, pipeline):
    """The batches of an epoch as NumPy arrays, and the position after each."""
    found, positions = [], []
    for outputs in source.run(pipeline):
        found.append([np.asarray(output.as_tensor()) for output in outputs])
        positions.append(source.state_dict()["position"])
    return found, positions


def test_the_loader_brings_no_torch(torch_was_brought):
    assert not torch_was_brought


def test_dali_decodes_encoded_samples_of_the_store(job):
    source = DaliSource(job.arrays(8, shuffle=True, encoded=True), columns=("features", "labels", "ids"))
    found, positions = read(source, made(source, decode="cpu"))
    assert positions == [8, 16, 24, 32, 40, 45]
    for (pixels, labels, ids), arrays in zip(found, job.arrays(8, shuffle=True), strict=True):
        assert pixels.shape == (len(arrays), 32, 32, 3)
        assert pixels.std() > 10
        assert np.array_equal(labels, arrays.labels)
        assert np.array_equal(ids, arrays.ids)


def test_features_go_through_a_pipeline_as_they_are(job):
    source = DaliSource(job.arrays(8, shuffle=True))
    found, _ = read(source, made(source))
    for (features, labels), arrays in zip(found, job.arrays(8, shuffle=True), strict=True):
        assert np.array_equal(features, arrays.features)
        assert np.array_equal(labels, arrays.labels)


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_a_state_counts_what_the_loop_has_and_not_what_the_pipeline_holds(job, depth):
    source = DaliSource(job.arrays(8, shuffle=True), columns=("ids",), ahead=depth)
    found, positions = read(source, made(source, depth=depth))
    assert positions == [8, 16, 24, 32, 40, 45]
    assert np.concatenate([ids for (ids,) in found]).tolist() == [
        id for arrays in job.arrays(8, shuffle=True) for id in arrays.ids.tolist()
    ]


def test_a_pipeline_goes_on_where_another_was_stopped(job):
    whole = [arrays.ids.tolist() for epoch in job.arrays(8, shuffle=True).epochs(range(2)) for arrays in epoch]
    for stopped in (0, 1, 4, 6):
        source = DaliSource(job.arrays(8, shuffle=True).epochs(range(2)), columns=("ids",))
        runs = source.run(made(source))
        first = [next(runs)[0].as_array().tolist() for _ in range(stopped)]
        again = DaliSource(job.arrays(8, shuffle=True).epochs(range(2)), columns=("ids",))
        again.load_state_dict(source.state_dict())
        pipeline = made(again)
        rest = [ids.as_array().tolist() for (ids,) in again.run(pipeline)]
        if stopped < 6:
            rest += [ids.as_array().tolist() for (ids,) in again.run(pipeline)]
        assert first + rest == whole


def test_a_loop_that_does_not_say_what_it_took_gets_no_state(job):
    source = DaliSource(job.arrays(4, shuffle=True), columns=("ids",))
    pipeline = made(source)
    for _ in range(6):
        pipeline.run()
    with pytest.raises(SettingError, match="did not say which of them it has"):
        source.state_dict()


def test_refuses_values_that_do_not_fit(job):
    with pytest.raises(SettingError, match="columns are some of"):
        DaliSource(job.arrays(8), columns=("pixels",))
    with pytest.raises(SettingError, match="0 batches or more"):
        DaliSource(job.arrays(8), ahead=-1)
    with pytest.raises(OrderMismatch, match="seed"):
        DaliSource(job.arrays(8)).load_state_dict(job.arrays(8, seed=1).state_dict())


@pytest.mark.gpu
def test_dali_decodes_on_the_gpu(job):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("there is no accelerator that CUDA drives")
    source = DaliSource(job.arrays(8, shuffle=True, encoded=True))
    for pixels, labels in source.run(made(source, decode="mixed", device=0)):
        assert pixels.as_cpu().as_tensor().shape()[1:] == [32, 32, 3]
        assert len(labels) <= 8


def test_a_pipeline_of_smaller_batches_says_what_to_give(job):
    source = DaliSource(job.arrays(8))
    with pytest.raises(SettingError, match="8 rows do not fit a pipeline with batch_size=4: give it batch_size=8"):
        next(source.run(made(source, batch_size=4)))


class TestTargetsOfDali(TargetTests):
    """Declared targets, an output each."""

    def with_targets(self, job, batch_size, **options):
        source = DaliSource(job.arrays(batch_size, **options), columns=("ids", "targets"))
        for outputs in Piped(source, batch_size):
            ids, *targets = ([np.asarray(row).tolist() for row in output] for output in outputs)
            yield ids, dict(zip(("score", "vector", "boxes"), targets, strict=True))


class TestDaliSources(OrderTests, StateTests, BreakTests, StateRefusalTests, FailureTests):
    """The tests of every adapter; each pass has a pipeline of its own."""

    encoded = False

    def make(self, job, batch_size, state=None, **options):
        source = DaliSource(job.arrays(batch_size, encoded=self.encoded, **options), columns=("features", "ids"))
        if state is not None:
            source.load_state_dict(state)
        return Piped(source, batch_size)

    def ids_of(self, batch):
        return batch[1].as_array().tolist()


class TestDaliSourcesOfEncodedSamples(TestDaliSources):
    """The same without Frostline's decoding, which would have found what cannot be read."""

    encoded = True
    test_data_that_cannot_be_read_ends_a_pass_with_a_sentence = None
    test_a_pass_after_one_that_failed_fails_with_the_same_sentence = None


class Piped:
    """A source, and a pipeline for each pass."""

    def __init__(self, source, batch_size):
        self._source, self._batch_size = source, batch_size
        self.state_dict, self.load_state_dict = source.state_dict, source.load_state_dict

    def __iter__(self):
        return self._source.run(made(self._source, batch_size=self._batch_size))
