"""Networks of 16 bits: frozen, cut and run in their own precision, with features of 16 bits on the wire."""

import copy

import numpy as np
import pytest
import torch
from PIL import Image

import frostline as fl
from frostline.core.errors import EngineUnsupported
from frostline.engines.catalog import OFFERS, build
from frostline.models.cutting import cut_network
from support.cutting import crossed, finished, sent, shipped_engine
from support.networks import Small

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
            hidden = self.stem(x)
            return super().forward(x) * (2 if hidden.mean() > 0.4 else 1)

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
