"""Every engine that this machine can have gives the reference's features, as closely as its precision says."""

import numpy as np
import pytest
import torch
from torch import nn

from frostline.core import REFERENCE, Levels
from frostline.core.errors import BadRequest, EngineUnsupported, UnsafeArtifact
from frostline.engines.catalog import OFFERS, absence, build
from frostline.engines.protocols import (
    calibration_of,
    calibration_pixels,
    evaluation_pixels,
    identity,
    levels_of,
    offer_name,
)
from frostline.models import cut_network
from support.matrices import sampled
from support.prefixes import LEVELS, SHAPE, kept_pixels, pixels, relative_error, small_prefix

TOLERANCES = {"fp32": 1e-5, "fp16": 2e-2, "bf16": 2e-2, "int8": 2e-1}
HERE = [offer for offer in OFFERS if absence(offer.name, "cpu") is None]
CONVERTED = [offer for offer in HERE if not offer.name.startswith("torch")]

# A compiler on a busy machine.
pytestmark = pytest.mark.timeout(600)


def names(offers):
    return [offer.name for offer in offers]


def every(offers):
    """Compiled torch takes half a minute for each graph and precision; one small graph is always compiled below."""
    usual = [name for name in names(offers) if "compiled" not in name]
    return sampled(offers, usual, name=lambda offer: offer.name)


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    """One folder a prefix and cut, as a node has it."""
    return tmp_path_factory.mktemp("engines")


def built(name, prefix, cut, folder=None, **options):
    return build(name, prefix.graph, prefix.cuts, prefix.tensors, cut=cut, folder=folder, **options)


def reference(prefix, cut):
    return built(REFERENCE, prefix, cut)


def last(prefix):
    return prefix.cuts[-1].number


@pytest.mark.parametrize("offer", every(HERE))
def test_an_engine_gives_the_features_of_the_reference(offer, shelf):
    prefix, batch = small_prefix(), pixels(16)
    middle = next(cut.number for cut in prefix.cuts if cut.is_relu)
    # Compiling takes seconds.
    for cut in (last(prefix),) if "compiled" in offer.name else (middle, last(prefix)):
        folder = shelf / offer.name / str(cut)
        engine = built(offer.name, prefix, cut, folder, max_rows=16, calibration=pixels(32, seed=1))
        given = batch.copy()
        (features,) = engine.run(given, cut)
        (expected,) = reference(prefix, cut).run(batch, cut)
        assert features.shape == expected.shape
        assert features.dtype == expected.dtype
        assert features.flags.c_contiguous
        assert relative_error(features, expected) <= TOLERANCES[offer.precision]
        assert (given == batch).all()
        assert engine.name == offer.name


def test_compiled_torch_gives_the_features_of_the_reference():
    if "torch-compiled" not in names(HERE):
        pytest.skip(absence("torch-compiled", "cpu"))
    torch.manual_seed(0)
    prefix = cut_network(nn.Sequential(nn.Conv2d(3, 4, 3, 2), nn.ReLU()).eval().requires_grad_(False), SHAPE).prefix
    (features,) = built("torch-compiled", prefix, last(prefix), max_rows=8).run(pixels(8), last(prefix))
    (expected,) = reference(prefix, last(prefix)).run(pixels(8), last(prefix))
    assert relative_error(features, expected) <= TOLERANCES["fp32"]


@pytest.mark.parametrize("offer", every(HERE))
def test_fewer_rows_than_the_most_are_the_same_features(offer, shelf):
    prefix, batch = small_prefix(), pixels(16)
    cut = last(prefix)
    folder = shelf / offer.name / str(cut)
    engine = built(offer.name, prefix, cut, folder, max_rows=16, calibration=pixels(32, seed=1))
    (whole,), (few,) = engine.run(batch, cut), engine.run(batch[:3], cut)
    assert few.shape[0] == 3
    assert relative_error(few, whole[:3]) <= TOLERANCES[offer.precision]


@pytest.mark.parametrize("offer", every(HERE))
def test_an_answer_is_the_callers_own(offer, shelf):
    """The next run must not write over it."""
    prefix = small_prefix()
    cut = last(prefix)
    folder = shelf / offer.name / str(cut)
    engine = built(offer.name, prefix, cut, folder, max_rows=16, calibration=pixels(32, seed=1))
    (first,) = engine.run(pixels(16), cut)
    before = first.copy()
    engine.run(pixels(16, seed=5), cut)
    assert (first == before).all()


@pytest.mark.parametrize("offer", CONVERTED, ids=names(CONVERTED))
def test_a_second_build_loads_what_the_first_has_converted(offer, tmp_path):
    """Shown with other weights, which it does not look at."""
    prefix, other, batch = small_prefix(), small_prefix(seed=9), pixels(8)
    cut = last(prefix)
    (first,) = built(offer.name, prefix, cut, tmp_path, calibration=batch).run(batch, cut)
    (second,) = built(offer.name, other, cut, tmp_path).run(batch, cut)
    assert (first == second).all()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("offer", every(HERE))
def test_refuses_what_an_engine_cannot_run(offer, shelf):
    prefix = small_prefix()
    cut = last(prefix)
    folder = shelf / offer.name / str(cut)
    engine = built(offer.name, prefix, cut, folder, calibration=pixels(32, seed=1))
    with pytest.raises(BadRequest):
        engine.run(pixels(8)[:, :2], cut)
    with pytest.raises(BadRequest):
        engine.run(pixels(8).astype(np.float64), cut)


def taking_pixels(offer, prefix, cut, shelf, levels=LEVELS, **options):
    """The engine that takes pixels as they are kept."""
    some = kept_pixels(48, seed=1)
    name = identity(offer.name, offer.precision, some, levels)
    folder = shelf / offer.name / str(cut)
    return built(name, prefix, cut, folder, levels=levels, calibration=calibration_pixels(some), **options)


# Compiled torch has the same front in both precisions, and takes as long to compile for each.
BESIDE = [offer for offer in HERE if offer.takes_pixels and offer.name != "torch-compiled-bf16"]
# Compiling takes seconds for each meaning.
QUICK = [offer for offer in BESIDE if "compiled" not in offer.name]


@pytest.mark.parametrize("offer", every(BESIDE))
def test_an_engine_on_bytes_of_pixels_gives_the_references_features(offer, shelf):
    prefix, batch = small_prefix(), kept_pixels(16)
    cut = last(prefix)
    engine, given = taking_pixels(offer, prefix, cut, shelf, max_rows=16), batch.copy()
    (features,) = engine.run(given, cut)
    (expected,) = reference(prefix, cut).run(LEVELS.apply(batch), cut)
    assert (features.shape, features.dtype) == (expected.shape, expected.dtype)
    assert relative_error(features, expected) <= TOLERANCES[offer.precision]
    assert (given == batch).all()
    assert levels_of(engine.name) == LEVELS.digest


@pytest.mark.parametrize("offer", QUICK, ids=names(QUICK))
def test_features_of_ready_pixels_do_not_depend_on_their_neighbours_in_a_run(offer, shelf):
    prefix, batch = small_prefix(), kept_pixels(16)
    cut = last(prefix)
    engine = taking_pixels(offer, prefix, cut, shelf, max_rows=16)
    (features,) = engine.run(batch, cut)
    beside = np.concatenate([batch[:5], kept_pixels(8, seed=7), np.zeros_like(batch[:3])])
    (again,) = engine.run(beside, cut)
    assert (again[:5] == features[:5]).all()
    (turned,) = engine.run(batch[::-1].copy(), cut)
    assert (turned[::-1] == features).all()


@pytest.mark.parametrize("offer", QUICK, ids=names(QUICK))
def test_engines_of_two_meanings_of_pixels_are_kept_apart(offer, shelf):
    prefix, batch = small_prefix(), kept_pixels(16)
    cut = last(prefix)
    other = Levels(mean=(0.0, 0.0, 0.0), std=(255.0, 255.0, 255.0))
    for levels in (LEVELS, other):
        (features,) = taking_pixels(offer, prefix, cut, shelf, levels, max_rows=16).run(batch, cut)
        (expected,) = reference(prefix, cut).run(levels.apply(batch), cut)
        assert relative_error(features, expected) <= TOLERANCES[offer.precision]
    engine = built(offer.name, prefix, cut, shelf / offer.name / str(cut), calibration=pixels(32, seed=1))
    with pytest.raises(BadRequest):
        engine.run(batch, cut)
    with pytest.raises(BadRequest):
        taking_pixels(offer, prefix, cut, shelf).run(LEVELS.apply(batch), cut)


def test_an_engine_is_not_made_for_pixels_of_another_meaning():
    prefix, other = small_prefix(), Levels(mean=(0.0,) * 3, std=(1.0,) * 3)
    name = identity("torch-channels-last", "fp32", kept_pixels(8), LEVELS)
    for levels in (other, None):
        with pytest.raises(EngineUnsupported, match="mean something else"):
            built(name, prefix, last(prefix), levels=levels)


def test_the_reference_takes_no_pixels_as_they_are_kept():
    prefix = small_prefix()
    with pytest.raises(EngineUnsupported, match="takes no pixels"):
        built(identity(REFERENCE, "fp32", kept_pixels(8), LEVELS), prefix, last(prefix), levels=LEVELS)


def test_pixels_of_other_channels_than_the_network_takes_are_refused():
    prefix, grey = small_prefix(), Levels(mean=(0.0,), std=(1.0,))
    name = identity("torch-channels-last", "fp32", kept_pixels(8), grey)
    with pytest.raises(EngineUnsupported, match="channels"):
        built(name, prefix, last(prefix), levels=grey)


def test_offers_the_reference_first_and_always():
    assert OFFERS[0].name == REFERENCE
    assert absence(REFERENCE, "cpu") is None
    assert len(set(names(OFFERS))) == len(OFFERS)


def test_an_engine_that_is_not_there_says_what_would_help():
    assert "cuda" in absence("torch-fp16", "cpu")
    assert "this node computes on cuda" in absence("openvino", "cuda")
    prefix = small_prefix()
    with pytest.raises(EngineUnsupported, match="runs on cuda"):
        built("torch-fp16", prefix, 2)
    with pytest.raises(EngineUnsupported, match="did you mean openvino"):
        built("openvin", prefix, 2)


@pytest.mark.parametrize("offer", [offer for offer in HERE if offer.precision == "int8"], ids=lambda offer: offer.name)
def test_8_bits_are_not_made_without_pixels_to_calibrate_on(offer):
    prefix = small_prefix()
    with pytest.raises(EngineUnsupported, match="real samples"):
        built(offer.name, prefix, last(prefix))
    with pytest.raises(EngineUnsupported, match="something else"):
        built(offer.name, prefix, last(prefix), calibration=np.zeros((4, 8), np.float32))


@pytest.mark.parametrize("offer", [offer for offer in HERE if offer.precision == "int8"], ids=lambda offer: offer.name)
def test_engines_of_two_calibrations_each_give_their_own_features(offer, tmp_path):
    prefix, batch = small_prefix(), pixels(8)
    cut, features = last(prefix), []
    for some in (pixels(16, seed=1), 3 * pixels(16, seed=2)):
        engine = built(identity(offer.name, "int8", some), prefix, cut, tmp_path, calibration=calibration_pixels(some))
        features.append(engine.run(batch, cut)[0])
    again = built(identity(offer.name, "int8", pixels(16, seed=1)), prefix, cut, tmp_path)  # without pixels
    assert not (features[0] == features[1]).all()
    assert (again.run(batch, cut)[0] == features[0]).all()


def test_only_what_is_calibrated_has_the_calibration_in_its_name():
    assert identity("openvino", "fp32", pixels(8)) == "openvino"
    name = identity("openvino-int8", "int8", pixels(8))
    assert (offer_name(name), len(calibration_of(name))) == ("openvino-int8", 16)
    assert name == identity("openvino-int8", "int8", pixels(8).copy())
    assert name != identity("openvino-int8", "int8", pixels(6))
    assert name != identity("openvino-int8", "int8", pixels(8, seed=3))


def test_a_name_says_what_pixels_mean_that_an_engine_takes():
    some, other = kept_pixels(8), Levels(mean=(0.0,) * 3, std=(1.0,) * 3)
    assert identity("openvino", "fp32", some, LEVELS) == f"openvino+{LEVELS.digest}"
    assert identity("openvino", "fp32", some, LEVELS, takes_pixels=False) == "openvino"
    narrow = identity("openvino-int8", "int8", some, LEVELS)
    assert (offer_name(narrow), levels_of(narrow), len(calibration_of(narrow))) == ("openvino-int8", LEVELS.digest, 16)
    names = [narrow, identity("openvino-int8", "int8", some, other), identity("openvino-int8", "int8", some)]
    names.append(identity("openvino-int8", "int8", some, LEVELS, takes_pixels=False))
    names.append(identity("openvino-int8", "int8", LEVELS.apply(some)))
    assert len(set(names)) == len(names)
    assert len({LEVELS.digest, other.digest, Levels(mean=(0.0,), std=(1.0,)).digest}) == 3


def test_refuses_an_unknown_cut():
    prefix = small_prefix()
    with pytest.raises(BadRequest, match="cut must be from 1 to"):
        built("torch-channels-last", prefix, 99)


class LooksUp(nn.Module):
    """Reads a table where its input says."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(5, 4), requires_grad=False)

    def forward(self, x):
        return self.table[x.mean((1, 2, 3)).clamp(0, 4).long()]


@pytest.mark.parametrize("offer", CONVERTED, ids=names(CONVERTED))
def test_a_network_that_reads_where_its_input_says_stays_with_engines_that_check_it(offer):
    prefix = cut_network(LooksUp(), SHAPE).prefix
    with pytest.raises(EngineUnsupported, match="engines that check its indices"):
        built(offer.name, prefix, last(prefix), calibration=pixels(8))


@pytest.mark.parametrize("offer", every(HERE))
def test_a_graph_that_does_not_give_what_it_declares_is_refused(offer):
    from dataclasses import replace

    prefix = small_prefix()
    cuts = [*prefix.cuts[:-1], replace(prefix.cuts[-1], shapes=((7,),))]
    with pytest.raises(UnsafeArtifact):
        build(offer.name, prefix.graph, cuts, prefix.tensors, cut=len(cuts), calibration=pixels(8))


@pytest.mark.skipif(absence("openvino", "cpu") is not None, reason="OpenVINO is not installed")
def test_features_do_not_depend_on_how_openvino_divides_a_batch():
    """By how many threads it has, runs are cut in other pieces: what one node keeps, another may use."""
    prefix, batch = small_prefix(), pixels(32)
    cut = last(prefix)
    engines = [built("openvino", prefix, cut, max_rows=32, threads=threads) for threads in (1, 2, 3)]
    (expected,) = engines[0].run(batch, cut)
    for engine in engines[1:]:
        assert (engine.run(batch, cut)[0] == expected).all()
        assert (engine.run(batch[:24], cut)[0] == expected[:24]).all()


@pytest.mark.skipif(absence("openvino", "cpu") is not None, reason="OpenVINO is not installed")
def test_batches_that_openvino_runs_behind_each_other_give_what_each_gives_alone():
    prefix = small_prefix()
    cut = last(prefix)
    engine = built("openvino", prefix, cut, max_rows=32, threads=2)
    batches = [pixels(32, seed=seed) for seed in range(3)]
    alone = [engine.run(batch, cut) for batch in batches]
    begun = [engine.begin(batch, cut) for batch in batches]
    for entry in begun:
        entry.drain()
    for item, (expected,) in zip(begun, alone, strict=True):
        (features,) = item.outputs()
        assert (features == expected).all()


@pytest.mark.parametrize("rows", [2, 8, 31, 96])
def test_no_engine_is_judged_on_samples_that_it_was_calibrated_on(rows):
    numbers = np.arange(rows, dtype=np.float32)[:, None]
    calibrated, judged = calibration_pixels(numbers), evaluation_pixels(numbers)
    assert sorted([*calibrated[:, 0], *judged[:, 0]]) == list(range(rows))
    assert len(calibrated) >= 2 * len(judged) - 1 >= 1
