"""One order, one state file and one memory for all frameworks."""

import dataclasses
import itertools
import json

import jax
import numpy as np
import pytest
import tensorflow as tf
import torch
from nvidia.dali import pipeline_def

import frostline as fl
from frostline.core.config import NodeSettings
from frostline.core.errors import SettingError
from frostline.loaders.adapters.dali import DaliSource
from frostline.loaders.adapters.jax import JaxLoader
from frostline.loaders.adapters.tensorflow import TensorFlowLoader
from support.images import tiny_preprocess
from support.networks import Small

BATCH = 2


class InTorch:
    def __init__(self, job):
        self._loader = job.loader(BATCH, shuffle=True)
        self.load, self.state = self._loader.load_state_dict, self._loader.state_dict

    def ids(self):
        return (batch.ids.tolist() for batch in self._loader)


class InNumPy:
    def __init__(self, job):
        self._loader = job.arrays(BATCH, shuffle=True)
        self.load, self.state = self._loader.load_state_dict, self._loader.state_dict

    def ids(self):
        return (batch.ids.tolist() for batch in self._loader)


class InJax:
    def __init__(self, job):
        self._iterator = iter(JaxLoader(job.arrays(BATCH, shuffle=True), columns=("features", "ids")))
        self.load, self.state = self._iterator.set_state, self._iterator.get_state

    def ids(self):
        return (batch["ids"].tolist() for batch in self._iterator)


class InTensorFlow:
    def __init__(self, job):
        self._loader = TensorFlowLoader(job.arrays(BATCH, shuffle=True), columns=("features", "ids"), prefetch=2)
        self.load, self.state = self._loader.load_state_dict, self._loader.state_dict

    def ids(self):
        return (ids.numpy().tolist() for _, ids in self._loader)


class InDali:
    def __init__(self, job):
        self._source = DaliSource(job.arrays(BATCH, shuffle=True, encoded=True), columns=("features", "ids"))
        self.load, self.state = self._source.load_state_dict, self._source.state_dict

    def ids(self):
        @pipeline_def(batch_size=BATCH, num_threads=1, device_id=None)
        def pipeline():
            return tuple(self._source.read())

        return (ids.as_array().tolist() for _, ids in self._source.run(pipeline()))


FRAMEWORKS = (InTorch, InNumPy, InJax, InTensorFlow, InDali)


def every_change(kinds):
    """A walk in which each kind follows each other kind once."""
    left, walk = set(itertools.permutations(kinds, 2)), [kinds[0]]

    def walked():
        if not left:
            return True
        for change in [kind for kind in kinds if (walk[-1], kind) in left]:
            left.remove((walk[-1], change))
            walk.append(change)
            if walked():
                return True
            left.add((walk[-2], walk.pop()))
        return False

    assert walked()
    return walk


def test_resumes_a_run_in_another_framework_at_the_next_sample(job, tmp_path):
    file = tmp_path / "state.json"
    whole = [id for batch in job.loader(BATCH, shuffle=True) for id in batch.ids.tolist()]
    walk = every_change(FRAMEWORKS)
    assert len(walk) == 21
    seen = []
    for kind in walk:
        run = kind(job)
        if file.exists():
            run.load(json.loads(file.read_text(encoding="utf-8")))
        batches = run.ids()
        seen += next(batches)
        file.write_text(json.dumps(run.state()), encoding="utf-8")
        batches.close()
    last = job.loader(BATCH, shuffle=True)
    last.load_state_dict(json.loads(file.read_text(encoding="utf-8")))
    assert seen + [id for batch in last for id in batch.ids.tolist()] == whole


@pytest.mark.parametrize("rows", [2, 15])
def test_every_framework_uses_an_arrays_memory_without_a_copy(job, rows):
    features = next(iter(job.arrays(rows))).features
    address = features.ctypes.data
    assert torch.from_dlpack(features).data_ptr() == address
    assert np.from_dlpack(features).ctypes.data == address
    tensor = tf.experimental.dlpack.from_dlpack(features.__dlpack__())
    assert np.from_dlpack(tensor).ctypes.data == address
    assert np.array_equal(jax.numpy.from_dlpack(features), features)
    if features.nbytes >= 64 << 10:  # small memory lies where the C library put it, and XLA asks for whole cache lines
        assert jax.numpy.from_dlpack(features, copy=False).unsafe_buffer_pointer() == address


@pytest.mark.parametrize("whole", [False, True])
def test_explains_shapes_that_change_beyond_what_tensorflow_allows(job, whole):
    def flat(batch, _):
        return dataclasses.replace(batch, features=batch.features.flatten(1))

    loader = TensorFlowLoader(job.arrays(BATCH, augment=flat, last="drop" if whole else "keep"))
    with pytest.raises(
        SettingError, match=r"augment or map made float32 \[2, 3072\], and the data set has float32 \[.*map"
    ):
        next(iter(loader))


@pytest.fixture(scope="module")
def job_of_16_bits(folder):
    """A job whose network computes in bfloat16."""
    torch.manual_seed(0)
    preprocess = tiny_preprocess()
    model = fl.freeze(Small().to(torch.bfloat16).train(), "body", input_shape=preprocess.shape)
    node = NodeSettings(memory_bytes=1 << 28, device_batch=8)
    with fl.offload(model, fl.Dataset(folder), preprocess=preprocess, node=node, accuracy="exact") as job:
        yield job


def features_in_jax(job):
    return [np.asarray(batch["features"]) for batch in JaxLoader(job.arrays(BATCH), columns=("features",))]


def features_in_tensorflow(job):
    return [batch[0].numpy() for batch in TensorFlowLoader(job.arrays(BATCH), columns=("features", "ids"))]


def features_in_dali(job):
    source = DaliSource(job.arrays(BATCH), columns=("features", "ids"))

    @pipeline_def(batch_size=BATCH, num_threads=1, device_id=None)
    def pipeline():
        return tuple(source.read())

    return [features.as_array() for features, _ in source.run(pipeline())]


@pytest.mark.parametrize("features_in", [features_in_jax, features_in_tensorflow, features_in_dali])
def test_features_of_bfloat16_come_as_float32_with_all_their_bits(job_of_16_bits, features_in):
    meant = [batch.features for batch in job_of_16_bits.loader(BATCH)]
    assert {features.dtype for features in meant} == {torch.bfloat16}
    found = features_in(job_of_16_bits)
    assert len(found) == len(meant)
    for ours, theirs in zip(found, meant, strict=True):
        assert ours.dtype == np.float32
        assert np.array_equal(ours, theirs.float().numpy())
