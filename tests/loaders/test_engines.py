"""Jobs that allow less than exact: nodes try their engines, and a job says which one it got, and why."""

import numpy as np
import pytest
import torch

import frostline as fl
from frostline.core import EXACT, REFERENCE
from frostline.core.config import LoaderSettings, NodeSettings
from frostline.core.events import NodeExcluded
from frostline.datasets.copy.ready import ingest
from frostline.node import Node
from frostline.preprocess import Applied
from frostline.wire.codecs import relative_error
from support.engines import every_instruction, make_fastest
from support.images import image_folder, tiny_preprocess
from support.networks import Small
from support.nodes import served

OTHER = "torch-channels-last"
MEASURED_FIRST = LoaderSettings(measure_first=True, trial_s=300)  # a few images never win a trial back
TAKING_PIXELS = f"{OTHER}+{tiny_preprocess().levels.digest}"


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """Trials are kept for all tests here: each is a process or two, and only the first that asks needs them."""
    with pytest.MonkeyPatch.context() as patch, every_instruction():
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


def features(folder, cut, accuracy):
    torch.manual_seed(1)
    model = fl.freeze(Small().train(), "body", input_shape=(3, 32, 32))
    settings = NodeSettings(memory_bytes=1 << 29, device_batch=8, engines=(OTHER,))
    with fl.offload(
        model,
        fl.Dataset(folder),
        preprocess=tiny_preprocess(),
        cut=cut,
        accuracy=accuracy,
        node=settings,
        settings=MEASURED_FIRST,
    ) as job:
        return torch.cat([batch.features for batch in job.loader(batch_size=8)]).numpy(), job.explain()


def test_a_job_uses_the_engine_that_was_chosen_for_its_accuracy_and_says_why(tmp_path):
    folder = image_folder(tmp_path / "images", per_class=4)
    exact, explained = features(folder, None, "exact")
    assert explained.plan.engine == REFERENCE
    assert explained.plan.trials == ()

    line = len(explained.situation.cuts) - 1
    inner = line - 1
    assert inner > 1
    close, explained = features(folder, inner, 0.001)
    plan = explained.plan
    assert {trial.cut for trial in plan.trials} == {inner}  # no plan is to choose another
    assert {trial.engine for trial in plan.trials} == {REFERENCE, TAKING_PIXELS}
    assert plan.engine == explained.situation.store.engine
    assert explained.situation.trainer.engine == REFERENCE
    assert {trial.engine for trial in plan.trials if trial.why_not is None} == {plan.engine}
    assert f"engine at the node: {plan.engine}" in str(explained)
    assert explained.to_json()["plan"]["engine"] == plan.engine
    np.testing.assert_allclose(close, exact, rtol=1e-3, atol=1e-4)


def test_pixels_of_a_ready_format_go_into_an_engine_as_they_are_kept_and_what_is_kept_in_16_bits_does_not(tmp_path):
    images, found = image_folder(tmp_path / "images", per_class=4), {}
    exact, explained = features(images, None, "exact")
    line = len(explained.situation.cuts) - 1
    for dtype in ("uint8", "fp16"):
        folder = tmp_path / dtype
        ingest(fl.Dataset(images), folder, Applied.to(tiny_preprocess(), dtype), observe=lambda _: None)
        found[dtype] = features(folder, line, "fp16")
    for dtype, (close, explained) in found.items():
        names = {trial.engine for trial in explained.plan.trials}
        assert names == {REFERENCE, TAKING_PIXELS if dtype == "uint8" else OTHER}
        np.testing.assert_allclose(close, exact, rtol=1e-3, atol=1e-4 if dtype == "uint8" else 1e-2)


HALF = "torch-bf16"


def node(folder, *engines):
    return Node(NodeSettings(memory_bytes=1 << 29, device_batch=8, engines=engines), (folder.as_uri(),))


def features_near(folder, near, accuracy, cut, events, until="body"):
    """Rows in the manifest's order, and what the job says of itself."""
    torch.manual_seed(1)
    model = fl.freeze(Small().train(), until, input_shape=(3, 32, 32))
    asked = {
        "near": near,
        "cut": cut,
        "codec": None if cut is None else EXACT,
        "accuracy": accuracy,
        "settings": MEASURED_FIRST,
        "observe": events.append,
    }
    with fl.offload(model, fl.Dataset(folder), preprocess=tiny_preprocess(), **asked) as job:
        return torch.cat([batch.features for batch in job.loader(batch_size=8)]).numpy(), job.explain()


@pytest.mark.timeout(400)
def test_a_node_without_the_engine_of_a_job_is_left_out_of_its_work(tmp_path, cache):
    folder = image_folder(tmp_path / "images", per_class=8)
    with (
        node(folder, HALF) as able,
        node(folder) as unable,
        served(able) as has_it,
        served(unable) as has_not,
    ):
        line = len(features_near(folder, has_it, "bf16", None, [])[1].situation.cuts) - 1
        assert make_fastest(cache, HALF)
        alone, _ = features_near(folder, has_it, "bf16", line, [])
        events = []
        # The first node carries the samples that measure the link, and so the next one is asked for its engine.
        together, explained = features_near(folder, [has_not, has_it], "bf16", line, events)
    engine = f"{HALF}+{tiny_preprocess().levels.digest}"
    assert explained.plan.engine == engine
    np.testing.assert_array_equal(together, alone)
    left_out = [event for event in events if isinstance(event, NodeExcluded)]
    assert [(item.url, item.engine) for item in left_out] == [(has_not, engine)]
    assert "--engines" in left_out[0].reason


@pytest.mark.timeout(400)  # an engine is converted and calibrated at every cut
def test_features_in_8_bits_come_through_a_job_as_exact_as_they_were_tried(tmp_path, cache):
    engine = "onnxruntime-int8"
    folder = image_folder(tmp_path / "images", per_class=8)
    with node(folder, engine) as running, served(running) as url:
        line = len(features_near(folder, url, "int8", None, [], "stem")[1].situation.cuts) - 1
        exact, _ = features_near(folder, url, "exact", line, [], "stem")
        assert make_fastest(cache, engine)
        found, explained = features_near(folder, url, "int8", line, [], "stem")
    assert explained.plan.engine.startswith(f"{engine}@")
    (tried,) = [trial for trial in explained.plan.trials if trial.engine == explained.plan.engine and trial.cut == line]
    error = relative_error(exact, found)
    assert error > 0
    # Samples that judged it are among these; others may be somewhat further off.
    assert tried.error / 2 <= error <= 4 * tried.error
    assert f"engine at the node: {engine}" in str(explained)
