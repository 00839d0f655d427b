"""A job that allows less than exact: the node tries its engines, and the job says which one it got and why."""

import numpy as np
import torch

import frostline as fl
from frostline.config import NodeSettings
from frostline.core import REFERENCE
from frostline.datasets.ingest import ingest
from frostline.preprocess import Applied
from support.images import image_folder, tiny_preprocess
from support.networks import Small

OTHER = "torch-channels-last"
TAKING_PIXELS = f"{OTHER}+{tiny_preprocess().levels.digest}"


def features(folder, cut, accuracy):
    torch.manual_seed(1)
    model = fl.freeze(Small().train(), "body", input_shape=(3, 32, 32))
    settings = NodeSettings(memory_bytes=1 << 29, device_batch=8, engines=(OTHER,))
    with fl.offload(
        model, fl.Dataset(folder), preprocess=tiny_preprocess(), cut=cut, accuracy=accuracy, node=settings
    ) as job:
        return torch.cat([batch.features for batch in job.loader(batch_size=8)]).numpy(), job.explain()


def test_a_job_uses_the_engine_that_was_chosen_for_its_accuracy_and_says_why(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = image_folder(tmp_path / "images", per_class=4)
    exact, explained = features(folder, None, "exact")
    assert explained.plan.engine == REFERENCE
    assert explained.plan.trials == ()

    line = len(explained.situation.cuts) - 1
    close, explained = features(folder, line, 0.001)
    plan = explained.plan
    assert {one.engine for one in plan.trials} == {REFERENCE, TAKING_PIXELS}
    assert plan.engine == explained.situation.store.engine
    assert explained.situation.trainer.engine == REFERENCE
    assert {one.engine for one in plan.trials if one.why_not is None} == {plan.engine}
    assert f"engine at the node: {plan.engine}" in str(explained)
    assert explained.to_json()["plan"]["engine"] == plan.engine
    np.testing.assert_allclose(close, exact, rtol=1e-3, atol=1e-4)


def test_pixels_of_a_ready_form_go_into_an_engine_as_they_are_kept_and_what_is_kept_in_16_bits_does_not(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    images, found = image_folder(tmp_path / "images", per_class=4), {}
    exact, explained = features(images, None, "exact")
    line = len(explained.situation.cuts) - 1
    for dtype in ("uint8", "fp16"):
        folder = tmp_path / dtype
        ingest(fl.Dataset(images), folder, Applied.to(tiny_preprocess(), dtype), observe=lambda _: None)
        found[dtype] = features(folder, line, "fp16")
    for dtype, (close, explained) in found.items():
        names = {one.engine for one in explained.plan.trials}
        assert names == {REFERENCE, TAKING_PIXELS if dtype == "uint8" else OTHER}
        np.testing.assert_allclose(close, exact, rtol=1e-3, atol=1e-4 if dtype == "uint8" else 1e-2)
