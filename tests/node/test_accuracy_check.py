"""Errors of engines: speed holds for all data, an error only for the samples on which it was measured."""

from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from frostline.core import REFERENCE, Levels
from frostline.engines.protocols import evaluation_name, identity
from frostline.node.trials.processes import TrialJob
from frostline.node.trials.queue import EngineMemory, TrialPolicy
from frostline.node.trials.selection import Trials
from support.engines import Reference, every_instruction, make_fastest
from support.nodes import SIDE, artifact_of, preprocess, small_network

HALF = "torch-bf16"
NETWORK = small_network()
DIGEST, _ = artifact_of(NETWORK)
pytestmark = pytest.mark.timeout(400)  # trials are processes, which a busy machine takes long to start
TERMS = TrialPolicy(device="cpu", rows=(8,), threads=(1,), keeps_freed=False, max_bytes=1 << 30)
MEMORY = EngineMemory(weights_bytes=1 << 30, run_bytes=1 << 30)
LONGEST_S = 180.0  # of trials
LAST = NETWORK.cuts[-1].number
REFERENCE_RUN = Reference(NETWORK.prefix)
ONE = np.random.default_rng(0).normal(size=(16, 3, SIDE, SIDE)).astype(np.float32)
# The weights' own rounding tells more where little light comes in beside the biases.
OTHER = ONE * 100


@pytest.fixture(scope="module", autouse=True)
def any_processor():
    with every_instruction():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("engines")


def job_on(pixels):
    return TrialJob(digest=DIGEST, prefix=NETWORK.prefix, pixels=pixels, reference=REFERENCE_RUN)


def chosen(folder, pixels, accuracy, longest_s=LONGEST_S):
    with closing(Trials(folder, TERMS, MEMORY, longest_s=longest_s, engines=(HALF,))) as trials:
        return trials.choose(job_on(pixels), accuracy)


def of_half(choice):
    """Where it is furthest from the reference."""
    return max((trial for trial in choice.trials if trial.engine == HALF), key=lambda candidate: candidate.error)


@pytest.fixture(scope="module")
def errors(folder):
    """The error on each of two sets of samples, once the first job has tried the engine."""
    chosen(folder, ONE, "bf16")
    assert make_fastest(folder, HALF)
    return [of_half(chosen(folder, pixels, "bf16")).error for pixels in (ONE, OTHER)]


def test_an_error_depends_on_the_samples_and_the_speed_does_not(folder, errors):
    assert min(errors) > 0
    assert errors[0] != errors[1]
    again = chosen(folder, OTHER, "bf16", longest_s=1e-9)  # nothing is left to be measured
    assert again.engine == HALF
    assert of_half(again).error == errors[1]
    assert [trial.seconds for trial in again.trials if (trial.engine, trial.cut) == (HALF, LAST)] == [1e-9]


def test_uses_an_engine_only_on_data_on_which_it_is_accurate_enough(folder, errors):
    accuracy = sum(errors) / 2
    picked = [chosen(folder, pixels, accuracy, longest_s=1e-9) for pixels in (ONE, OTHER)]
    expected = [HALF if error <= accuracy else REFERENCE for error in errors]
    assert [choice.engine for choice in picked] == expected
    assert {HALF, REFERENCE} == set(expected)
    refused = next(choice for choice in picked if choice.engine == REFERENCE)
    assert any("accuracy allows" in (trial.why_not or "") for trial in refused.trials)


def test_uses_the_reference_if_there_is_no_time_for_trials(folder, errors):
    never_seen = ONE + np.float32(1)
    choice = chosen(folder, never_seen, "bf16", longest_s=1e-9)
    assert choice.engine == REFERENCE
    assert any("took longer than" in (trial.why_not or "") for trial in choice.trials)


def test_checks_a_named_engine_on_the_jobs_own_samples(folder, errors):
    def named(pixels, accuracy):
        return trials.prepare(job_on(pixels), HALF, LAST, accuracy)

    with closing(Trials(folder, TERMS, MEMORY, longest_s=1e-9, engines=(HALF,))) as trials:
        found = [named(pixels, 1.0).error for pixels in (ONE, OTHER)]
        assert found[0] != found[1]
        assert [named(pixels, found[0]).why_not is None for pixels in (ONE, OTHER)] == [True, found[1] <= found[0]]
        assert [named(pixels, found[1]).why_not is None for pixels in (ONE, OTHER)] == [found[0] <= found[1], True]


def test_an_error_on_unprocessed_pixels_belongs_to_the_pixels_and_their_levels(folder):
    levels, other = preprocess().levels, Levels(mean=(1.0,) * 3, std=(2.0,) * 3)
    light = np.random.default_rng(0).integers(0, 256, (16, SIDE, SIDE, 3), np.uint8)
    dark = light // 16
    assert (
        len(
            {
                evaluation_name(light, levels),
                evaluation_name(light, other),
                evaluation_name(light),
                evaluation_name(dark, levels),
            }
        )
        == 4
    )
    engine = identity(HALF, "bf16", light, levels)
    with closing(Trials(folder, TERMS, MEMORY, longest_s=LONGEST_S, engines=(HALF,))) as trials:
        found = [trials.prepare(replace(job_on(pixels), levels=levels), engine, LAST, 1.0) for pixels in (light, dark)]
    assert [(trial.engine, trial.why_not) for trial in found] == [(engine, None)] * 2
    assert min(trial.error for trial in found) > 0
    assert found[0].error != found[1].error
    assert found[0].seconds == found[1].seconds
