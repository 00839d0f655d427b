"""Where batches lie: in page-locked memory where a GPU takes them, and in the given memory in any case."""

import numpy as np
import pytest
import torch

import frostline as fl
from frostline.core.config import LoaderSettings
from frostline.core.errors import SettingError
from frostline.loaders.batches import Pinned, memory_for
from frostline.prefetch.requests import BatchAssembler
from support.images import image_folder, tiny_preprocess

CUDA = torch.cuda.is_available()


class Noted:
    """Memory that knows what was taken from it."""

    def __init__(self):
        self.given = []

    def empty(self, shape, dtype):
        self.given.append(np.empty(shape, dtype))
        return self.given[-1]


def test_puts_every_column_of_a_batch_into_the_given_memory():
    memory = Noted()
    assembler = BatchAssembler(batch_size=3, drop_last=False, memory=memory)
    ids, rows = np.arange(7), np.arange(28.0).reshape(7, 4)
    batches = [*assembler.add(ids, rows), assembler.finish()]
    assert [len(batch[0]) for batch in batches] == [3, 3, 1]
    assert np.array_equal(np.concatenate([batch[1] for batch in batches]), rows)
    assert len(memory.given) == 6
    for batch, *given in zip(batches, memory.given[::2], memory.given[1::2], strict=True):
        assert all(np.shares_memory(*pair) for pair in zip(batch, given, strict=True))


def test_memory_is_page_locked_only_where_the_model_is_on_a_gpu_or_it_is_asked_for():
    assert memory_for(None, "cpu") is None
    assert memory_for(False, "cuda:0") is None


@pytest.mark.skipif(CUDA, reason="there is CUDA here")
def test_page_locked_memory_without_a_gpu_is_refused_with_a_sentence(tmp_path):
    data = fl.Dataset(image_folder(tmp_path / "images", per_class=2))
    settings = LoaderSettings(pin_memory=True)
    with (
        fl.offload(None, data, preprocess=tiny_preprocess(), settings=settings) as job,
        pytest.raises(SettingError, match="pin_memory=True is for GPUs that CUDA drives"),
    ):
        job.loader(2)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="there is no CUDA here")
def test_batches_are_page_locked_and_outlive_their_copies(tmp_path):
    data = fl.Dataset(image_folder(tmp_path / "images", per_class=20))
    settings = LoaderSettings(pin_memory=True, cache_bytes=0)
    with fl.offload(None, data, preprocess=tiny_preprocess(), settings=settings) as job:
        expected = [batch.features.clone() for batch in job.loader(8)]
        copies = []
        for batch in job.loader(8):
            assert batch.features.is_pinned()
            copies.append(batch.to("cuda").features)
    assert all(torch.equal(copy.cpu(), value) for copy, value in zip(copies, expected, strict=True))
    assert isinstance(memory_for(None, "cuda:0"), Pinned)
