"""What runs a job's frozen layers: engines that are tried, networks of 16 bits, and where pixels are decoded.

Jobs that allow less than exact: nodes try their engines, and a job says which one it got, and why.

Networks of 16 bits: frozen, cut and run in their own precision, with features of 16 bits on the wire.

Where a job without a network decodes: here, unless it is told that the node shall.
"""

import copy

import numpy as np
import pytest
import torch
from PIL import Image

import frostline as fl
from frostline.core import EXACT, REFERENCE
from frostline.core.config import LoaderSettings, NodeSettings
from frostline.core.errors import EngineUnsupported, SettingError
from frostline.core.events import NodeExcluded
from frostline.datasets.copy.ready import ingest
from frostline.engines.catalog import OFFERS, build
from frostline.models.cutting import cut_network
from frostline.node import Node
from frostline.preprocess import Applied
from frostline.wire.codecs import relative_error
from support.cutting import crossed, finished, sent, shipped_engine
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


def test_pixels_of_a_ready_format_go_into_an_engine_as_bytes(tmp_path):
    images, found = image_folder(tmp_path / "images", per_class=4), {}
    exact, explained = features(images, None, "exact")
    line = len(explained.situation.cuts) - 1
    for dtype in ("uint8", "fp16"):
        folder = tmp_path / dtype
        ingest(fl.Dataset(images), folder, Applied.to(tiny_preprocess(), dtype), on_event=lambda _: None)
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
        "on_event": events.append,
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


SHAPE = (3, 32, 32)
PREPROCESS = fl.preprocess.imagenet(32)
DTYPES = (torch.bfloat16, torch.float16)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """32 pictures of noise, in two classes."""
    folder, draw = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    for label in "ab":
        (folder / label).mkdir()
        for number in range(16):
            Image.fromarray(draw.integers(0, 255, (40, 40, 3), np.uint8)).save(folder / label / f"{number}.png")
    return str(folder)


def network(dtype):
    torch.manual_seed(0)
    model = Small(classes=2)
    model.drop.p = 0.0
    return fl.freeze(model.to(dtype).train(), "body", input_shape=SHAPE)


def learned(model, run):
    model.zero_grad()
    answer = run()
    answer.float().square().sum().backward()
    return answer.detach(), {
        name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None
    }


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_cut_gives_what_the_network_gives_on_pixels_cast_to_its_precision(dtype):
    model = network(dtype).eval()
    cut_up = cut_network(model, SHAPE)
    name = str(dtype).removeprefix("torch.")
    assert cut_up.fallback is None
    assert [cut.dtypes for cut in cut_up.cuts[1:]] == [("float32",), *[(name,)] * (len(cut_up.cuts) - 2)]
    pixels = torch.randn(8, *SHAPE)
    engine = shipped_engine(cut_up)
    expected, theirs = learned(model, lambda: model(pixels.to(dtype)))
    for cut in cut_up.cuts[1:]:
        arrived = [as_own(tensor) for tensor in sent(crossed(engine, [pixels], cut))]
        features = finished(cut_up, cut, arrived)
        answer, ours = learned(model, lambda features=features: cut_up.head(features))
        assert torch.equal(answer, expected), cut.name
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours), cut.name


def as_own(tensor):
    """What lies in uint16 is bfloat16."""
    return tensor.view(torch.bfloat16) if tensor.dtype == torch.uint16 else tensor


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"cut": 1}, {"cut": 4}, {"cut": 4, "codec": "zstd"}, {"accuracy": "int8"}])
def test_losses_are_those_of_a_plain_loop_over_the_same_network(dtype, options, pictures):
    model = network(dtype)
    plain = copy.deepcopy(model)
    data = fl.Dataset(pictures)
    with fl.offload(None, data, preprocess=PREPROCESS) as job:
        batches = [(batch.features, batch.labels) for batch in job.loader(8, shuffle=True, seed=1)]
    expected = trained(plain, [(lambda pixels=pixels: plain(pixels.to(dtype)), labels) for pixels, labels in batches])
    with fl.offload(model, data, preprocess=PREPROCESS, **options) as job:
        line = job.frost_line
        mine = list(job.loader(8, shuffle=True, seed=1))
        job.head.train()
        ours = trained(model, [(lambda batch=batch: job.head(batch.features), batch.labels) for batch in mine])
    assert {batch.features.dtype for batch in mine} == {dtype}
    assert line.bytes_per_sample == 2 * mine[0].features[0].numel()
    # Cheaper codecs round float16 further where the accuracy allows it; bfloat16 travels as it is.
    assert ours == (pytest.approx(expected, rel=0.02) if options.get("accuracy") == "int8" else expected)


def trained(model, steps):
    optimizer = torch.optim.SGD([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.1)
    losses = []
    for run, labels in steps:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(run().float(), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_features_of_16_bits_take_half_of_the_wire_without_a_codec(pictures):
    sizes = {}
    for dtype in (torch.float32, torch.bfloat16):
        with fl.offload(network(dtype), fl.Dataset(pictures), preprocess=PREPROCESS, accuracy="exact") as job:
            sizes[dtype] = job.frost_line.bytes_per_sample
    assert sizes[torch.float32] == 2 * sizes[torch.bfloat16]


def test_arrays_hold_bfloat16_as_the_same_values_of_float32(pictures):
    with fl.offload(network(torch.bfloat16), fl.Dataset(pictures), preprocess=PREPROCESS) as job:
        tensors = [batch.features for batch in job.loader(8)]
        arrays = [batch.features for batch in job.arrays(8)]
    assert {array.dtype for array in arrays} == {np.dtype(np.float32)}
    assert all(
        torch.equal(tensor.float(), torch.from_numpy(array)) for tensor, array in zip(tensors, arrays, strict=True)
    )


def test_kept_features_are_those_that_came(pictures, tmp_path):
    settings = fl.LoaderSettings(cache_folder=str(tmp_path))
    with fl.offload(network(torch.bfloat16), fl.Dataset(pictures), preprocess=PREPROCESS, settings=settings) as job:
        first, second = ([batch.features for batch in job.loader(8, epoch=epoch)] for epoch in (0, 1))
        assert all(torch.equal(item, other) for item, other in zip(first, second, strict=True))
        assert second[0].dtype == torch.bfloat16


def test_features_are_augmented_in_their_precision(pictures):
    with fl.offload(network(torch.bfloat16), fl.Dataset(pictures), preprocess=PREPROCESS) as job:
        for change in (fl.FeatureNoise(share=0.1), fl.FeatureMixup()):
            batch = next(iter(job.loader(8, augment=change)))
            assert batch.features.dtype == torch.bfloat16
            job.head(batch.features)


@pytest.mark.parametrize("dtype", DTYPES)
def test_engines_that_would_compute_in_another_precision_say_so(dtype):
    cut_up = cut_network(network(dtype), SHAPE)
    prefix, refused = cut_up.prefix, set()
    for offer in OFFERS:
        if offer.name.startswith(("onnx", "openvino", "tensorrt")):
            with pytest.raises(EngineUnsupported):
                build(offer.name, prefix.graph, prefix.cuts, prefix.tensors, cut=2)
            refused.add(offer.name)
    assert refused >= {"openvino", "onnxruntime"}


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_network_that_is_not_traced_gets_its_input_in_its_precision(dtype):
    class Branching(Small):
        def forward(self, x):
            scale = 2 if x.mean() > 0.4 else 1
            return super().forward(x) * scale

    model = fl.freeze(Branching().to(dtype).train(), "body", input_shape=SHAPE)
    cut_up = cut_network(model, SHAPE)
    assert "cannot trace Branching" in cut_up.fallback
    model.eval()
    pixels = torch.randn(8, *SHAPE)
    made = crossed(shipped_engine(cut_up), [pixels], cut_up.frost_line) if cut_up.prefix else [pixels]
    features = [as_own(tensor) for tensor in made]
    with torch.no_grad():
        assert torch.equal(cut_up.head(features), model(pixels.to(dtype)))


def test_a_network_of_64_bits_is_cut_in_its_precision_too():
    model = network(torch.float64).eval()
    cut_up = cut_network(model, SHAPE)
    pixels = torch.randn(8, *SHAPE)
    features = crossed(shipped_engine(cut_up), [pixels], cut_up.frost_line)
    assert torch.equal(cut_up.head(features), model(pixels.double()))


NODE = NodeSettings(memory_bytes=1 << 28, device_batch=8)
SETTINGS = LoaderSettings(samples_per_request=8, cache_bytes=0, max_skipped_fraction=0.2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = image_folder(tmp_path_factory.mktemp("images"), per_class=10)
    next(folder.glob("*/*")).write_bytes(b"no image")
    return folder


def job_for(folder, **options):
    return fl.offload(
        None, fl.Dataset(folder), preprocess=tiny_preprocess(flip=True), settings=SETTINGS, node=NODE, **options
    )


def taken(job):
    batches = list(job.loader(4, shuffle=True, seed=2, epoch=3))
    return torch.cat([batch.ids for batch in batches]), torch.cat([batch.features for batch in batches])


def test_decoding_at_the_node_equals_decoding_in_this_process(folder):
    with job_for(folder, cut=1) as job, job_for(folder) as other:
        assert ("decoding", "node in this process") in job.where
        assert ("decoding", "trainer") in other.where
        for found, expected in zip(taken(job), taken(other), strict=True):
            assert torch.equal(found, expected)
        assert job.statistics().skipped == other.statistics().skipped != ()
        assert job.stages()["trainer: decode"] == 0
        assert other.stages()["trainer: decode"] > 0


def test_a_node_elsewhere_sends_samples_as_they_are_stored(folder, shared_node):
    with job_for(folder, near=shared_node.url) as job:
        assert ("decoding", "trainer") in job.where
        assert len(taken(job)[0]) == 29


def test_refuses_an_unknown_cut_and_names_the_known_ones(folder):
    with pytest.raises(SettingError, match="has cuts 0 to 1"):
        job_for(folder, cut=2)
