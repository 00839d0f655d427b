"""The record of a run's steps: what is due, what a sketch says, and what is read of a file that anybody wrote."""

import json
import os
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from frostline.core import Samples
from frostline.core.errors import SettingError
from frostline.loaders import Batch
from frostline.training.report.steps import (
    RecordedStep,
    RecordedSteps,
    SourceDigests,
    StepRecorder,
    digests_of,
    fingerprint,
    sketched_error,
)
from frostline.training.verify import compare_steps, spread
from frostline.wire.codecs import relative_error
from support.networks import Small


def table(count, **changes):
    columns = {
        "ids": np.arange(count, dtype=np.int64)[::-1] * 7,
        "objects": [f"{row}.jpg" for row in range(count)],
        "offsets": np.zeros(count, np.int64),
        "lengths": np.full(count, 9, np.int64),
        "labels": np.zeros(count, np.int64),
        "versions": [f"v{row}" for row in range(count)],
    }
    return Samples(**{**columns, **changes})


def batch_of(features, ids=None):
    first = features[0] if isinstance(features, tuple) else features
    ids = torch.arange(len(first)) * 7 if ids is None else ids
    return Batch(features=features, labels=torch.zeros_like(ids), ids=ids)


def taken(features, step=1, ids=None, sources=b""):
    return fingerprint(batch_of(features, ids), sources, step=step, epoch=0, number=step - 1, engine="torch-eager")


def drawn(*shape, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape, np.float32))


class Clock:
    """Goes on by a millisecond whenever it is asked, and by more where a test says so."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 0.001
        return self.now


def a_recorder(folder, clock=None):
    recorder = StepRecorder(folder, table(8), clock or Clock())
    recorder.begin({"stem.weight": "aa"}, "exact")
    return recorder


def test_a_record_grows_with_the_logarithm_of_the_steps(tmp_path):
    clock = Clock()
    recorder = a_recorder(tmp_path, clock)
    clock.now = 1e9
    due = [step for step in range(1, 1 << 16) if recorder.is_due(step)]
    assert due[:255] == list(range(1, 256))
    octaves = [sum(low <= step < 2 * low for step in due) for low in (256, 512, 1 << 14, 1 << 15)]
    assert octaves == [128] * 4


def test_recording_takes_a_hundredth_of_the_time_at_most_and_a_short_run_has_some(tmp_path):
    clock = Clock()
    recorder, recorded = a_recorder(tmp_path, clock), []
    for step in range(1, 2000):
        clock.now += 0.01
        if recorder.is_due(step):
            recorder.add(batch_of(drawn(2, 4)), step=step, epoch=0, number=step, engine="e")
            recorded.append(step)
    # By this clock a step is recorded in a millisecond.
    assert recorded[:50] == list(range(1, 51))
    assert 0.1 < len(recorded) * 0.001 < 0.002 + 0.01 * clock.now
    assert recorded[-1] > 1900


def test_a_step_costs_little_beside_its_own_bytes(tmp_path):
    recorder = StepRecorder(tmp_path, table(64))
    recorder.begin({}, "exact")
    batch = batch_of(drawn(32, 1280), torch.arange(32) * 7)
    recorder.add(batch, step=1, epoch=0, number=0, engine="e")
    best = []
    for step in range(2, 12):
        began = time.perf_counter()
        recorder.add(batch, step=step, epoch=0, number=step, engine="e")
        best.append(time.perf_counter() - began)
    assert min(best) < 0.02


def test_a_record_is_its_users_alone_and_comes_back_as_it_was(tmp_path):
    recorder = a_recorder(tmp_path)
    features = (drawn(3, 5), torch.ones(3, 2, dtype=torch.bool), drawn(3, 4).to(torch.bfloat16))
    recorder.add(batch_of(features), step=1, epoch=2, number=3, engine="onnx")
    assert (tmp_path / "steps.jsonl").stat().st_mode & 0o777 == 0o600
    found = RecordedSteps.read(tmp_path)
    [step] = found.steps
    assert (found.accuracy, found.weights, found.damaged) == ("exact", {"stem.weight": "aa"}, ())
    assert (step.step, step.epoch, step.number, step.engine, step.ids.tolist()) == (1, 2, 3, "onnx", [0, 7, 14])
    assert step.sketch.shape == (2, 3, 9)
    assert compare_steps(step, taken(features), str, 0.0).differences == ()


def test_of_a_large_batch_the_first_samples_are_recorded():
    step = taken(drawn(1000, 2))
    assert (len(step.ids), len(step.rows)) == (256, 256 * 16)
    assert len(json.dumps(step.to_json())) < 30_000


@pytest.mark.parametrize("change", ["value", "sign of zero", "type", "shape"])
def test_a_bit_another_type_and_another_shape_are_other_features(change):
    was = drawn(4, 6)
    was[2, 1] = 0.0
    now = was.clone()
    if change == "value":
        now[2, 1] = 1e-45
    elif change == "sign of zero":
        now[2, 1] = -0.0
    elif change == "type":
        now = now.view(torch.int32)
    else:
        now = now.reshape(4, 3, 2)
    assert taken(was).rows_unlike(taken(now)) == ([2] if change in {"value", "sign of zero"} else [0, 1, 2, 3])


@given(
    size=st.integers(1, 300),
    error=st.floats(1e-5, 1.0),
    scale=st.sampled_from([1e-6, 1.0, 1e6]),
    seed=st.integers(0, 1 << 20),
)
def test_a_sketch_estimates_the_relative_error_of_the_worst_sample(size, error, scale, seed):
    was = drawn(32, size, seed=seed) * scale
    now = was + was.square().mean(1, keepdim=True).sqrt() * error * drawn(32, size, seed=seed + 1)
    real = relative_error(was.numpy(), now.numpy())
    estimated = sketched_error(taken(was), taken(now))
    assert real / 3 < estimated < 3 * real + 1e-6
    assert sketched_error(taken(was), taken(was.clone())) == 0.0


def test_a_sketch_says_nothing_of_values_that_are_not_finite_and_of_other_tensors():
    was = drawn(2, 4)
    lost = was.clone()
    lost[1, 1] = float("nan")
    assert sketched_error(taken(was), taken(lost)) is None
    assert sketched_error(taken(was), taken((was, was))) is None
    [said] = compare_steps(taken(was), taken(lost), lambda id: f"{id}.jpg", 0.5).differences
    assert said.part == "features"
    assert "1 of 2 samples differ by an amount that nobody can tell, such as 7.jpg" in said.what


def test_what_is_within_a_bound_is_none_where_bits_are_to_be_equal():
    was = drawn(2, 64)
    near = compare_steps(taken(was), taken(was * 1.00001), str, 1e-4)
    assert (near.differences, near.samples, near.equal) == ((), 2, 0)
    assert 0 < near.error < 1e-4
    assert [one.part for one in compare_steps(taken(was), taken(was * 1.00001), str, 0.0).differences] == ["features"]
    assert [one.part for one in compare_steps(taken(was), taken(was * 1.01), str, 1e-4).differences] == ["features"]
    assert [one.part for one in compare_steps(taken(was * 0), taken(was), str, 0.5).differences] == ["features"]


def test_other_samples_are_another_order_and_no_features_are_compared():
    was = drawn(3, 2)
    for ids in ([7, 0, 14], [0, 7, 21], [0, 7]):
        now = taken(was[: len(ids)], ids=torch.tensor(ids))
        assert [one.part for one in compare_steps(taken(was), now, str, 0.0).differences] == ["order"]


@pytest.mark.parametrize("column", ["objects", "offsets", "lengths", "versions"])
def test_an_object_that_is_listed_otherwise_is_named(column):
    plain = table(4)
    values = np.array(getattr(plain, column), dtype=object)
    values[2] = "other" if column in {"objects", "versions"} else 5
    changed = table(4, **{column: list(values) if isinstance(values[2], str) else values.astype(np.int64)})
    ids = torch.tensor([0, 7, 14, 21])
    was, now = (
        taken(torch.ones(4, 2), ids=ids, sources=SourceDigests(samples).of(ids.numpy())) for samples in (plain, changed)
    )
    assert was.sources_unlike(now) == [1]  # the ids go down with the rows
    [said] = compare_steps(was, now, lambda id: f"named {id}", 0.0).differences
    assert (said.part, said.what) == ("data", "step 1: other name, size or version of named 7")
    assert SourceDigests(plain).of(np.array([0, 3])) == b"", "nobody knows the id 3"


def test_every_frozen_tensor_and_buffer_has_a_digest():
    model = Small()
    for parameter in model.stem.parameters():
        parameter.requires_grad_(False)
    before = digests_of(model)
    assert {"stem.0.weight", "stem.1.running_var", "body.1.running_mean"} <= before.keys()
    assert "fc.weight" not in before
    with torch.no_grad():
        model.stem[0].weight.view(-1)[0] += 1e-7
    assert [name for name, digest in digests_of(model).items() if before[name] != digest] == ["stem.0.weight"]


def test_a_run_that_goes_on_keeps_the_steps_before_its_checkpoint(tmp_path):
    recorder = a_recorder(tmp_path)
    for step in range(1, 6):
        recorder.add(batch_of(drawn(2, 2)), step=step, epoch=0, number=step - 1, engine="killed")
    path = tmp_path / "steps.jsonl"
    path.write_bytes(path.read_bytes()[:-20])  # as a kill leaves it
    assert [one.step for one in RecordedSteps.read(tmp_path).steps] == [1, 2, 3, 4]
    again = StepRecorder(tmp_path, table(8), Clock())
    assert not again.is_due(4), "before it has begun"
    again.begin({}, "exact", after=3)
    again.add(batch_of(drawn(2, 2)), step=4, epoch=0, number=3, engine="resumed")
    found = RecordedSteps.read(tmp_path)
    assert [(one.step, one.engine) for one in found.steps] == [*((n, "killed") for n in (1, 2, 3)), (4, "resumed")]
    assert found.damaged == ()


def test_a_record_that_cannot_be_written_ends_and_the_run_does_not(tmp_path):
    recorder = a_recorder(tmp_path)
    (tmp_path / "steps.jsonl").unlink()
    (tmp_path / "steps.jsonl").mkdir()
    recorder.add(batch_of(drawn(2, 2)), step=1, epoch=0, number=0, engine="e")
    assert not recorder.is_due(2)


@given(place=st.integers(0, 1 << 20), byte=st.integers(0, 255))
def test_a_changed_byte_of_a_line_is_seen(tmp_path_factory, place, byte):
    folder = tmp_path_factory.mktemp("record")
    recorder = a_recorder(folder)
    for step in (1, 2):
        recorder.add(batch_of(drawn(2, 2)), step=step, epoch=0, number=step - 1, engine="e")
    path = folder / "steps.jsonl"
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    place = first + place % (len(whole) - first - 1)
    path.write_bytes(whole[:place] + bytes([byte]) + whole[place + 1 :])
    found = RecordedSteps.read(folder)
    steps = {one.step: one for one in found.steps}
    if whole[place] == byte:
        assert steps.keys() == {1, 2}
    else:  # blanks between two words of JSON, of which there is one value
        assert found.damaged or [step.to_json() for step in steps.values()] == [
            step.to_json() for step in RecordedSteps.read(written(folder, whole)).steps
        ]


def written(folder, content):
    (folder / "steps.jsonl").write_bytes(content)
    return folder


@pytest.mark.parametrize(
    "change",
    [
        {"step": -1},
        {"step": 1 << 60},
        {"step": True},
        {"step": "1"},
        {"epoch": 1.5},
        {"number": None},
        {"engine": 5},
        {"ids": ""},
        {"ids": "AAAA"},
        {"ids": 7},
        {"rows": "AA=="},
        {"sources": "AAAA"},
        {"sketch": "AAAA"},
        {"sketch": "not base64"},
        {"ids": None, "rows": None},
    ],
    ids=str,
)
def test_a_step_that_makes_no_sense_is_no_step(change):
    plain = taken(drawn(2, 3)).to_json()
    assert RecordedStep.from_json(plain).ids.tolist() == [0, 7]
    with pytest.raises(ValueError, match=r"sense|belong|length|base64|padding|characters"):
        RecordedStep.from_json({**plain, **change})


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "sparse", "lines", "one line", "deep", "empty", "NaN"])
def test_a_strangers_record_is_read_within_bounds(tmp_path, kind):
    path = tmp_path / "steps.jsonl"
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/zero")
        case "folder":
            path.mkdir()
        case "sparse":
            path.touch()
            os.truncate(path, 1 << 40)
        case "lines":
            path.write_bytes(b"{}\n" * 100_000)
        case "one line":
            path.write_bytes(b"[" * (5 << 20) + b"\n")
        case "deep":
            path.write_bytes(b"[" * (1 << 20) + b"\n")
        case "empty":
            path.touch()
        case "NaN":
            path.write_text('{"schema": 1, "accuracy": NaN, "weights": {}}\n')
    with pytest.raises(SettingError, match=r"nothing can be compared|cannot be read|is no file"):
        RecordedSteps.read(tmp_path)


def test_steps_are_spread_over_what_was_recorded():
    steps = list(range(1, 101))
    assert spread(steps, 3) == [1, 50, 100]
    assert spread(steps, 1) == [1]
    assert spread(steps, 500) == steps
    assert spread([], 5) == []
