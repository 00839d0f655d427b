"""Trials of engines at a node: which are made, for whom, and which known ones are enough.

The search for one job's engine, without running any engine.
"""

import errno
import json
import math
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from frostline.core import REFERENCE, Levels, Route
from frostline.core.config import NodeSettings
from frostline.core.errors import BadRequest, EngineNotReady, EngineUnsupported, UnknownPrefix
from frostline.engines.choice import Choice, Prospect
from frostline.engines.protocols import identity
from frostline.loaders.fetch import EngineChoice, Fetcher, NodeEngine, Shipment
from frostline.loaders.local_stage import LocalStage
from frostline.models.artifact import read_prefix, save_prefix
from frostline.node import Node
from frostline.node.in_process import LocalTransport
from frostline.node.memory import Cancelled
from frostline.node.prefixes import TriedEngine
from frostline.node.profiling import NetworkProfile, costs_under_engine
from frostline.node.trials import processes
from frostline.node.trials.processes import TrialJob, TrialProcess
from frostline.node.trials.queue import EngineMemory, TrialPolicy, policy_of
from frostline.node.trials.selection import Search, Trials
from frostline.profiles import CutCost, Trial
from frostline.wire.messages import ProfileRequest
from support.engines import Reference
from support.nodes import (
    SIDE,
    artifact_of,
    busy_device,
    is_idle,
    joined,
    make_images,
    preprocess,
    request,
    same,
    samples_of,
    small_network,
    until,
)
from support.prepared import PLAIN
from support.tenants import tenant

OTHER = "torch-channels-last"
NETWORK = small_network()
DIGEST, ARTIFACT = artifact_of(NETWORK)
PIXELS = np.random.default_rng(0).normal(size=(16, 3, SIDE, SIDE)).astype(np.float32)
TERMS = TrialPolicy(device="cpu", rows=(8, 16), threads=(2, 1), keeps_freed=False, max_bytes=1 << 30)
MEMORY = EngineMemory(weights_bytes=1 << 30, run_bytes=1 << 30)
LAST = NETWORK.cuts[-1].number
REFERENCE_RUN = Reference(NETWORK.prefix)
JOB = TrialJob(digest=DIGEST, prefix=NETWORK.prefix, pixels=PIXELS, reference=REFERENCE_RUN)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="module")
def chosen(folder):
    """The one real trial that most of these tests look at; its children take some seconds."""
    (folder / "unused").mkdir()
    (folder / "unused" / "old.bin").write_bytes(bytes(100))
    with closing(Trials(folder, TERMS, MEMORY, longest_s=100, engines=(OTHER,), max_bytes=0)) as trials:
        return trials.choose(JOB, "fp16")


def test_a_trial_measures_speed_error_and_memory_of_an_engine(chosen):
    found = {trial.engine: trial for trial in chosen.trials if trial.cut == LAST}
    assert set(found) == {REFERENCE, OTHER}
    one = found[OTHER]
    assert one.samples_per_s > 0
    assert one.rows in TERMS.rows
    assert one.threads in TERMS.threads
    assert one.load_bytes >= one.weight_bytes > 0
    assert one.error < 1e-5
    assert found[REFERENCE].seconds == REFERENCE_RUN.seconds(LAST)  # of the node's own run: no trial measures it
    assert found[REFERENCE].error == 0
    assert [trial.engine for trial in chosen.trials if trial.why_not is None][:1] == [chosen.engine]


def test_does_not_repeat_a_trial_on_the_same_hardware(chosen, folder):
    with closing(Trials(folder, TERMS, MEMORY, longest_s=1e-9, engines=(OTHER,))) as trials:
        assert trials.choose(JOB, "fp16") == chosen
        assert trials.find_ready(DIGEST, OTHER, LAST) is not None
        assert trials.find_ready(DIGEST, "no-such-engine", LAST) is None
    other_batches = replace(TERMS, rows=(8,))
    with closing(Trials(folder, other_batches, MEMORY, longest_s=1, engines=(OTHER,))) as trials:
        assert trials.find_ready(DIGEST, OTHER, LAST) is None


def test_a_trial_is_kept_with_the_versions_of_what_converts_and_runs_engines(chosen, folder):
    assert chosen.trials
    for path in (folder / DIGEST).glob("*.json"):
        packages = json.loads(path.read_text())["circumstances"]["packages"]
        assert {"onnx", "onnxruntime", "onnxscript", "openvino", "nncf", "torch"} <= set(packages)
        assert packages["torch"] == version("torch")


HERE = replace(TERMS, here=True)


def test_a_node_that_serves_one_job_tries_engines_in_its_own_process(chosen, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "frostline.node.trials.processes.TrialProcess.run", lambda *_: pytest.fail("a process was started")
    )
    with closing(Trials(tmp_path, HERE, MEMORY, longest_s=100, engines=(OTHER,))) as trials:
        choice = trials.choose(JOB, "fp16")
        (found,) = [trial for trial in choice.trials if trial.engine == OTHER]
        assert trials.find_ready(DIGEST, OTHER, LAST) == found
        made = trials.make_engine(DIGEST, NETWORK.prefix, found, None, None, "cpu")
    (apart,) = [trial for trial in chosen.trials if trial.engine == OTHER and trial.cut == LAST]
    assert found.error == pytest.approx(apart.error, rel=1e-3)
    assert found.samples_per_s > 0
    assert (found.rows, found.threads) == (HERE.rows[0], HERE.threads[0])
    assert found.load_bytes >= found.weight_bytes > 0
    assert made.name == OTHER
    assert not list(tmp_path.rglob("*.tried-here"))
    with closing(Trials(tmp_path, TERMS, MEMORY, longest_s=0, engines=(OTHER,))) as shared:
        assert shared.find_ready(DIGEST, OTHER, LAST) is None  # a node of many tries it anew, alone in a process


def started(monkeypatch):
    """Processes that are started for trials from now on."""
    made, make = [], processes.Worker
    monkeypatch.setenv(PLAIN, "1")  # a start of what prepares others would count too
    monkeypatch.setattr(processes, "Worker", lambda *said, **more: made.append(make(*said, **more)) or made[-1])
    return made


@pytest.mark.parametrize("dies", [False, True])
def test_the_first_trial_takes_the_process_that_was_warmed_unless_it_has_died(dies, tmp_path, monkeypatch):
    begun = started(monkeypatch)
    with closing(Trials(tmp_path, TERMS, MEMORY, longest_s=100, engines=(OTHER,))) as trials:
        trials.warm()
        assert len(begun) == 1
        if dies:
            begun[0].kill()
            begun[0].wait()
        choice = trials.choose(JOB, "fp16")
    assert len(begun) == 1 + dies
    assert any(trial.engine == OTHER and trial.samples_per_s for trial in choice.trials)
    assert all(process.returncode is not None for process in begun)


def test_a_disk_without_room_for_temporary_files_costs_the_trial_that_met_it_alone(tmp_path, monkeypatch):
    tries, save = [], np.save

    def full_at_first(path, array):
        tries.append(None)
        if len(tries) == 1:
            path.write_bytes(b"half of it")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save(path, array)

    def run(_, said, *__):
        tries.append(np.load(Path(json.loads(said)["folder"]) / "pixels.npy").shape)
        return 1, "it went no further"

    monkeypatch.setattr(np, "save", full_at_first)
    monkeypatch.setattr("frostline.node.trials.processes.TrialProcess.run", run)
    with closing(Trials(tmp_path, TERMS, MEMORY, longest_s=100, engines=(OTHER, "openvino"))) as trials:
        choice = trials.choose(JOB, "fp16")
    said = {trial.why_not for trial in choice.trials if trial.engine != REFERENCE}
    assert any("No space left on device" in why for why in said)
    assert PIXELS.shape in tries
    assert choice.engine == REFERENCE


def test_a_node_warms_a_process_only_where_engines_are_tried_apart(tmp_path, monkeypatch):
    begun = started(monkeypatch)
    with closing(Trials(tmp_path, TERMS, MEMORY, longest_s=100, engines=(OTHER,))) as trials:
        trials.warm()
    assert [process.returncode for process in begun] == [-signal.SIGKILL]
    for policy, longest_s, engines in ((HERE, 100, (OTHER,)), (TERMS, 0, (OTHER,)), (TERMS, 100, ())):
        with closing(Trials(tmp_path, policy, MEMORY, longest_s=longest_s, engines=engines)) as trials:
            trials.warm()
    assert len(begun) == 1


@pytest.mark.parametrize(("samples", "is_brief"), [(None, False), (10_000, True), (10_000_000, False)])
def test_a_short_job_has_an_engine_tried_at_one_setting(samples, is_brief, tmp_path, monkeypatch):
    said, run = [], TrialProcess.run
    monkeypatch.setattr(TrialProcess, "run", lambda *words: said.append(json.loads(words[1])) or run(*words))
    monkeypatch.setattr("frostline.node.trials.selection.Search._why_not", lambda *_: None)
    slow = Reference(NETWORK.prefix)
    monkeypatch.setattr(slow, "seconds", lambda _: 0.01, raising=False)
    with closing(Trials(tmp_path, TERMS, MEMORY, longest_s=100, engines=(OTHER,))) as trials:
        choice = trials.choose(replace(JOB, reference=slow), "fp16", samples=samples)
    assert [one["is_brief"] for one in said] == [is_brief]
    (found,) = [trial for trial in choice.trials if trial.engine == OTHER]
    assert found.samples_per_s > 0
    assert found.error < 1e-5
    assert not is_brief or (found.rows, found.threads) == (TERMS.rows[0], TERMS.threads[0])


def test_tries_an_engine_that_crashed_a_process_in_a_process_of_its_own(tmp_path, monkeypatch):
    marks = []

    def ends(*_):
        marks.extend(tmp_path.rglob("*.tried-here"))
        raise Cancelled

    with monkeypatch.context() as ending:
        ending.setattr("frostline.node.trials.processes.try_briefly", ends)
        with (
            closing(Trials(tmp_path, HERE, MEMORY, longest_s=100, engines=(OTHER,))) as trials,
            pytest.raises(Cancelled),
        ):
            trials.choose(JOB, "fp16")
    (mark,) = marks
    assert not mark.exists()
    mark.touch()  # as it is left by a process that was killed
    processes, run = [], TrialProcess.run
    monkeypatch.setattr(TrialProcess, "run", lambda *said: processes.append(1) or run(*said))
    with closing(Trials(tmp_path, HERE, MEMORY, longest_s=100, engines=(OTHER,))) as trials:
        choice = trials.choose(JOB, "fp16")
    assert processes == [1]
    assert any(trial.engine == OTHER and trial.samples_per_s for trial in choice.trials)


def test_an_engine_that_does_not_fit_is_refused_in_the_nodes_process_too(tmp_path, monkeypatch):
    def unfit(*_, **__):
        raise EngineUnsupported("it has no such layer")

    monkeypatch.setattr("frostline.engines.trials.build", unfit)
    with closing(Trials(tmp_path, HERE, MEMORY, longest_s=100, engines=(OTHER,))) as trials:
        choice = trials.choose(JOB, "fp16")
    assert choice.engine == REFERENCE
    assert [trial.why_not for trial in choice.trials if trial.engine == OTHER] == ["it has no such layer"]
    assert not list(tmp_path.rglob("*.tried-here"))


def test_a_job_that_is_too_short_for_a_trial_starts_none(tmp_path):
    reference = Reference(NETWORK.prefix)
    with closing(Trials(tmp_path / "none", TERMS, MEMORY, longest_s=100)) as trials:
        choice = trials.choose(replace(JOB, reference=reference), "float32", samples=200)
    assert choice.engine == REFERENCE
    assert any("it would save this job" in (trial.why_not or "") for trial in choice.trials)
    assert reference.asked == 0
    assert not (tmp_path / "none").exists()


def test_a_job_that_forbids_trials_uses_known_ones(chosen, folder, tmp_path):
    for place, engines in ((folder, {REFERENCE, OTHER}), (tmp_path, {REFERENCE})):
        with closing(Trials(place, TERMS, MEMORY, longest_s=100, engines=(OTHER,))) as trials:
            found = trials.choose(JOB, "fp16", max_s=0)
        assert {trial.engine for trial in found.trials if trial.samples_per_s} == engines


@pytest.mark.parametrize(
    ("accuracy", "longest_s", "engines"), [("exact", 9, (OTHER,)), (0.1, 0, (OTHER,)), (0.1, 9, ())]
)
def test_nothing_is_tried_where_only_the_reference_may_be_used(tmp_path, accuracy, longest_s, engines):
    with closing(Trials(tmp_path / "none", TERMS, MEMORY, longest_s=longest_s, engines=engines)) as trials:
        nothing = Choice(engine=REFERENCE, trials=())
        assert trials.choose(JOB, accuracy) == nothing
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("changes", "longest_s", "why"), [({}, 0.01, "took longer than"), ({"max_bytes": 1}, 60, "takes more than 1 B")]
)
def test_a_trial_beyond_its_time_or_memory_is_killed_with_the_reason(tmp_path, changes, longest_s, why):
    terms = replace(TERMS, **changes)
    with closing(Trials(tmp_path, terms, MEMORY, longest_s=longest_s, engines=(OTHER,))) as trials:
        choice = trials.choose(JOB, 0.1)
    assert choice.engine == REFERENCE
    assert any(why in (trial.why_not or "") for trial in choice.trials), choice.trials


def test_refuses_a_named_engine_that_was_calibrated_on_other_samples(tmp_path):
    other = identity("onnxruntime-int8", "int8", PIXELS + 1)
    with closing(Trials(tmp_path, TERMS, MEMORY, longest_s=60)) as trials:
        found = trials.prepare(JOB, other, LAST)
    assert "was calibrated on other samples" in found.why_not
    assert identity("onnxruntime-int8", "int8", PIXELS) in found.why_not
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_cache_folder_is_the_reason_of_a_trial_and_not_an_error(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with closing(Trials(tmp_path / "file" / "engines", TERMS, MEMORY, longest_s=60, engines=(OTHER,))) as trials:
        choice = trials.choose(JOB, 0.1)
    assert choice.engine == REFERENCE
    assert "cannot be tried here" in choice.trials[-1].why_not


def test_does_not_use_an_engine_that_does_not_fit(chosen, folder):
    for memory in (replace(MEMORY, weights_bytes=1), replace(MEMORY, run_bytes=-1)):
        with closing(Trials(folder, TERMS, memory, longest_s=1e-9, engines=(OTHER,))) as trials:
            choice = trials.choose(JOB, "fp16")
            assert choice.engine == REFERENCE
            assert any("--memory" in (trial.why_not or "") for trial in choice.trials)
            assert trials.find_ready(DIGEST, OTHER, LAST) is None


def test_where_others_wait_an_engine_runs_few_rows_or_is_refused(chosen, folder):
    (found,) = [trial for trial in chosen.trials if trial.engine == OTHER and trial.cut == LAST]
    found_s = found.seconds
    for share, rows in ((0.3, 2), (0.7, 4), (1.5, 8), (100.0, found.rows)):
        terms = replace(TERMS, max_run_s=share * 8 * found_s)
        with closing(Trials(folder, terms, MEMORY, longest_s=1e-9, engines=(OTHER,))) as trials:
            assert trials.find_ready(DIGEST, OTHER, LAST).rows == rows
    terms = replace(TERMS, max_run_s=0.2 * 8 * found_s)
    with closing(Trials(folder, terms, MEMORY, longest_s=1e-9, engines=(OTHER,))) as trials:
        choice = trials.choose(JOB, "fp16")
        assert choice.engine == REFERENCE
        assert any("--max-operation" in (trial.why_not or "") for trial in choice.trials)
        assert trials.find_ready(DIGEST, OTHER, LAST) is None


@pytest.mark.parametrize(
    ("tenants", "is_open", "is_bounded"),
    [((), False, False), ((), True, True), (("ann",), False, False), (("ann", "bob"), False, True)],
)
def test_bounds_runs_where_another_tenant_may_wait(tenants, is_open, is_bounded):
    settings = NodeSettings(tenants=tuple(map(tenant, tenants)), allow_anonymous=is_open, max_operation_s=0.25)
    assert policy_of(settings).max_run_s == (0.25 if is_bounded else math.inf)


@pytest.mark.parametrize(
    ("rows", "max_run_s", "bounded"),
    [(32, 1.0, 32), (32, 0.7, 16), (32, 0.3, 8), (8, 0.3, 8), (32, 0.2, 4), (8, 0.1, 2)],
)
def test_rows_are_cut_to_those_that_end_in_time(rows, max_run_s, bounded):
    trial = Trial(engine=OTHER, precision="fp32", cut=LAST, seconds=1 / 32, rows=rows)
    assert replace(TERMS, max_run_s=max_run_s).limit_rows(trial) == replace(trial, rows=bounded)


class Parts(Reference):
    """Keeps how many rows each of its runs had, and can be given several batches at once."""

    def __init__(self):
        super().__init__(NETWORK.prefix)
        self.rows = []

    def run(self, inputs, cut):
        self.rows += [len(array) for array in inputs]
        return self.features(inputs[0], cut)

    def begin(self, inputs, cut):
        raise AssertionError("what runs in parts has others go first")


@pytest.mark.parametrize("inputs", [PIXELS[:8], [PIXELS[:8]]])
def test_others_go_first_between_the_parts_of_a_long_run(inputs):
    found, parts, looks = Trial(engine=OTHER, precision="fp32", cut=LAST, seconds=0.3, rows=4), Parts(), []
    engine = TriedEngine(engine=parts, trial=found)
    made = engine.run_divided(inputs, LAST, lambda: looks.append(len(parts.rows)))
    for mine, whole in zip(made, REFERENCE_RUN.features(PIXELS[:8], LAST), strict=True):
        np.testing.assert_allclose(mine, whole, rtol=1e-4, atol=1e-5)
    assert (parts.rows, looks, engine.begin(inputs, LAST)) == ([4, 4], [1, 2], None)


def test_removes_the_least_recently_used_prefix_from_a_full_trial_folder(chosen, folder):
    assert [path.name for path in folder.iterdir()] == [DIGEST]


def test_a_prefix_written_in_pieces_is_the_same(tmp_path):
    path = tmp_path / "prefix.safetensors"
    with path.open("wb") as file:
        save_prefix(NETWORK.prefix, file)
    again = read_prefix(path.read_bytes())
    assert again.graph == read_prefix(ARTIFACT).graph
    assert again.cuts == NETWORK.prefix.cuts
    for name, tensor in NETWORK.prefix.tensors.items():
        assert again.tensors[name].equal(tensor)
        assert again.tensors[name].stride() == tensor.stride()


def test_seconds_and_memory_are_those_of_the_engine_in_use():
    cuts = NETWORK.prefix.cuts
    seconds = np.arange(len(cuts), dtype=np.float64)[None]
    costs = [
        CutCost(number=number, seconds=float(number), spread_s=0.0, fixed_bytes=7, bytes_per_sample=7)
        for number in range(len(cuts) + 1)
    ]
    trial = Trial(
        engine=OTHER, precision="fp32", cut=LAST, seconds=(len(cuts) - 1) / 2, weight_bytes=1000, fixed_bytes=80,
        bytes_per_sample=8,
    )  # fmt: skip
    changed = costs_under_engine(
        costs, NetworkProfile(seconds=seconds), cuts, 1.0, Choice(engine=OTHER, trials=(trial,))
    )
    assert list(changed[:2]) == costs[:2]
    assert [cost.seconds for cost in changed[2:]] == pytest.approx([1 + (cut.number - 1) / 2 for cut in cuts[1:]])
    assert changed[-1].fixed_bytes == 1100
    assert changed[-1].bytes_per_sample == 10 + cuts[-1].bytes_per_sample


def test_cuts_behind_the_last_tried_cut_keep_the_reference_costs():
    cuts = NETWORK.prefix.cuts
    costs = [
        CutCost(number=number, seconds=float(number), spread_s=0.0, fixed_bytes=7, bytes_per_sample=7)
        for number in range(len(cuts) + 1)
    ]
    only = cuts[1].number
    assert only < LAST
    trial = Trial(engine=OTHER, precision="fp32", cut=only, seconds=0.25)
    seconds = np.arange(len(cuts), dtype=np.float64)[None]
    changed = costs_under_engine(
        costs, NetworkProfile(seconds=seconds), cuts, 1.0, Choice(engine=OTHER, trials=(trial,))
    )
    assert changed[only].seconds == 1.25
    assert [changed_cost for changed_cost in changed if changed_cost.number != only] == [
        cost for cost in costs if cost.number != only
    ]


@contextmanager
def node_over(images):
    with Node(NodeSettings(memory_bytes=256 << 20, device_batch=8, engines=(OTHER,)), (images.as_uri(),)) as node:
        yield node, images


@pytest.fixture(scope="module")
def tried(tmp_path_factory):
    """What nodes keep of trials, for all tests that do not ask whether there was one."""
    return tmp_path_factory.mktemp("tried")


@pytest.fixture
def node(tmp_path, monkeypatch, tried):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tried))
    with node_over(make_images(tmp_path / "images")) as both:
        yield both


@pytest.fixture
def new_node(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with node_over(make_images(tmp_path / "images")) as both:
        yield both


def test_prepares_an_engine_on_request_and_its_features_are_nearly_the_same(new_node):
    node, images = new_node
    transport = LocalTransport(node)
    asked = request(images, LAST, DIGEST, engine=OTHER)
    with pytest.raises(UnknownPrefix):
        list(transport.features(asked))
    transport.put_prefix(DIGEST, ARTIFACT)
    with pytest.raises(EngineNotReady, match="request a profile"):
        list(transport.features(asked))
    with pytest.raises(BadRequest, match="no engine 'no-such-engine'"):
        transport.profile(ProfileRequest(features=request(images, LAST, DIGEST, engine="no-such-engine")))
    with pytest.raises(BadRequest, match=f"cut must be from 1 to {LAST} for this prefix, not {LAST + 1}"):
        transport.profile(ProfileRequest(features=request(images, LAST + 1, DIGEST), accuracy=0.1, only_here=True))
    fetcher = Fetcher(
        transport=transport,
        url=images.as_uri(),
        reading="objects",
        preprocess=preprocess(),
        shipment=Shipment(digest=DIGEST, artifact=ARTIFACT),
        local_stage=LocalStage(cuts=NETWORK.cuts),
        engine=NodeEngine("exact", EngineChoice(engine=OTHER)),
        arrived=(),
    )
    first = joined(fetcher.fetch(asked.samples, Route(LAST), None))[1][0]
    ids, tensors, *_ = joined(transport.features(asked))
    wanted_ids, wanted, *_ = joined(transport.features(request(images, LAST, DIGEST)))
    assert ids == wanted_ids
    np.testing.assert_allclose(tensors[0], wanted[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(first, tensors[0])
    assert fetcher.request(asked.samples, Route(1), None).engine == REFERENCE
    statistics = node.statistics()
    assert statistics.totals.trial_s == statistics.tenants["everybody"].totals.trial_s > 0
    assert is_idle(node)


def test_uses_the_reference_at_a_cut_where_the_engine_cannot_be_used(node):
    node, images = node
    transport = LocalTransport(node)
    transport.put_prefix(DIGEST, ARTIFACT)
    other = identity("onnxruntime-int8", "int8", PIXELS)  # which the node was started without
    fetcher = Fetcher(
        transport=transport,
        url=images.as_uri(),
        reading="objects",
        preprocess=preprocess(),
        shipment=Shipment(digest=DIGEST, artifact=ARTIFACT),
        local_stage=LocalStage(cuts=NETWORK.cuts),
        engine=NodeEngine("int8", EngineChoice(engine=other)),
        arrived=(),
    )
    samples = request(images, LAST, DIGEST).samples
    found = joined(fetcher.fetch(samples, Route(LAST), None))
    assert same(found, joined(transport.features(request(images, LAST, DIGEST))))
    assert fetcher.request(samples, Route(LAST), None).engine == REFERENCE
    assert fetcher.request(samples, Route(LAST - 1), None).engine == other
    assert is_idle(node)


def test_an_engine_that_is_named_is_made_ready_on_a_single_sample_too(new_node):
    node, images = new_node
    transport = LocalTransport(node)
    transport.put_prefix(DIGEST, ARTIFACT)
    one = samples_of(images).take(np.array([0]))
    asked = request(images, LAST, DIGEST, samples=one, engine=OTHER)
    found = transport.profile(ProfileRequest(features=asked, accuracy=0.1, only_here=True, only_engine=True))
    assert [trial.engine for trial in found.trials] == [OTHER]
    assert found.trials[0].samples_per_s > 0
    assert joined(transport.features(asked))[3] == []


def test_an_engine_on_raw_pixels_gives_the_same_features_as_one_on_floats(node):
    node, images = node
    transport = LocalTransport(node)
    transport.put_prefix(DIGEST, ARTIFACT)
    levels = preprocess().levels
    both = {}
    for engine in (OTHER, identity(OTHER, "fp32", PIXELS, levels)):
        asked = request(images, LAST, DIGEST, engine=engine)
        transport.profile(ProfileRequest(features=asked))
        both[engine] = joined(transport.features(asked))
    plain, kept = both.values()
    reference = joined(transport.features(request(images, LAST, DIGEST)))
    assert plain[0] == kept[0] == reference[0]
    assert plain[3] == kept[3] == reference[3] == []
    for answer in (plain, kept):
        np.testing.assert_allclose(answer[1][0], reference[1][0], rtol=1e-4, atol=1e-5)
    assert is_idle(node)


def test_pixels_and_floats_do_not_share_a_run(node):
    node, images = node
    transport = LocalTransport(node)
    other, body = artifact_of(small_network(width=4))
    for digest, artifact in ((DIGEST, ARTIFACT), (other, body)):
        transport.put_prefix(digest, artifact)
    names = (OTHER, identity(OTHER, "fp32", PIXELS, preprocess().levels))
    few = request(images, LAST, DIGEST).samples.take(np.arange(3))
    alone = {}
    for engine in names:
        transport.profile(ProfileRequest(features=request(images, LAST, DIGEST, engine=engine)))
        alone[engine] = joined(transport.features(request(images, LAST, DIGEST, samples=few, engine=engine)))
    asked = [request(images, LAST, DIGEST, samples=few, engine=engine) for engine in (*names, *names)]
    with ThreadPoolExecutor(len(asked)) as threads:
        with busy_device(node, images, other, threading.Event(), threading.Event()):
            answers = [threads.submit(lambda wanted=wanted: joined(transport.features(wanted))) for wanted in asked]
            until(lambda: node.statistics().waiting_for_device == 1 + len(asked))
        for wanted, answer in zip(asked, answers, strict=True):
            assert same(answer.result(60), alone[wanted.engine])
    assert node.statistics().totals.rows_merged == 6
    assert is_idle(node)


def test_refuses_an_engine_for_pixels_with_other_levels(node):
    node, images = node
    transport = LocalTransport(node)
    transport.put_prefix(DIGEST, ARTIFACT)
    other = identity(OTHER, "fp32", PIXELS, Levels(mean=(1.0, 1.0, 1.0), std=(2.0, 2.0, 2.0)))
    asked = request(images, LAST, DIGEST, engine=other)
    with pytest.raises(BadRequest, match="other mean and std"):
        list(node.features(asked))
    with pytest.raises(BadRequest, match="other mean and std"):
        transport.profile(ProfileRequest(features=asked))
    assert is_idle(node)


REFERENCE_S = 0.03
OWN = Trial(engine=REFERENCE, precision="fp32", cut=5, seconds=REFERENCE_S)
FAST = Prospect(engine="fast", speed_up=2.0, ready_s=10)
SLOW = Prospect(engine="slow", speed_up=1.2, ready_s=10)


def trial(engine, **changes):
    return Trial(
        **{"engine": engine, "precision": "fp32", "cut": 5, "seconds": REFERENCE_S / 2, "error": 1e-6, **changes}
    )


class KnownErrors:
    """Knows the errors of all, but of those that are named; to measure one takes a second."""

    def __init__(self, *unknown):
        self.runner = SimpleNamespace(spent_s=0.0)
        self.missing = set(unknown)
        self.measured = []

    def measure_here(self, one):
        return one

    def unknown_trials(self, trials):
        return [trial for trial in trials if trial.engine in self.missing]

    def measure(self, trials):
        self.measured += [trial.engine for trial in trials]
        self.missing -= {trial.engine for trial in trials}

    def fill_errors(self, choice, trials):
        return choice


def searched(accuracy_check=None, results=None, **changes):
    """The choice, what was tried, and what was kept of the reference."""
    accuracy_check, asked, kept = accuracy_check or KnownErrors(), [], []

    def tried(name):
        asked.append(name)
        accuracy_check.runner.spent_s += 1
        return (results or {}).get(name, trial(name))

    search = Search(
        **{
            "own": lambda: OWN,
            "kept": None,
            "keep": kept.append,
            "known": (),
            "refused": (),
            "empty": {name: trial(name, seconds=0.0, error=0.0) for name in ("fast", "slow")},
            "left": (FAST, SLOW),
            "accuracy": "float32",
            "samples": None,
            **changes,
        }
    )
    return search.run(accuracy_check, tried), asked, kept


def test_the_search_ends_if_no_other_engine_is_expected_to_be_faster():
    choice, asked, kept = searched()
    assert (choice.engine, asked) == ("fast", ["fast"])
    assert "not expected to be faster" in next(trial.why_not for trial in choice.trials if trial.engine == "slow")
    assert kept == [OWN]


def test_tries_the_next_prospect_if_the_first_one_fails():
    failed = {"fast": trial("fast", seconds=0.0, why_not="cannot take this network")}
    choice, asked, _ = searched(results=failed)
    assert (choice.engine, asked) == ("slow", ["fast", "slow"])


def test_uses_the_engine_found_before_the_time_was_used_up():
    late = {"slow": trial("slow", seconds=0.0, why_not="was not tried: the time for trials was used up")}
    found = {"fast": trial("fast", seconds=REFERENCE_S * 0.9)}
    choice, asked, _ = searched(results={**late, **found})
    assert asked == ["fast", "slow"]
    assert choice.engine == "fast"
    assert {trial.engine: trial.why_not for trial in choice.trials}[REFERENCE].startswith("is slower")


def test_a_job_too_short_for_trials_tries_nothing_and_says_so():
    choice, asked, kept = searched(samples=100)
    assert (choice.engine, asked, kept) == (REFERENCE, [], [])
    why_not = {trial.engine: trial.why_not for trial in choice.trials}
    assert "it would save this job 1.50 s" in why_not["fast"]


def test_a_job_of_any_size_uses_the_trials_of_earlier_jobs():
    known = (trial("fast"),)
    choice, asked, _ = searched(samples=8, known=known, left=(SLOW,), kept=OWN)
    assert (choice.engine, asked) == ("fast", [])


def test_the_reference_is_not_run_where_all_that_may_be_used_is_known():
    def measured():
        raise AssertionError("the reference was run")

    choice, asked, kept = searched(own=measured, samples=8, known=(trial("fast"),), left=(SLOW,), kept=OWN)
    assert (choice.engine, asked, kept) == ("fast", [], [])


def test_a_large_job_checks_an_engine_that_was_tried_on_other_samples():
    known = (trial("fast"),)
    for samples, expected in ((10_000, "fast"), (100, REFERENCE)):
        accuracy_check = KnownErrors("fast")
        choice, asked, _ = searched(accuracy_check, samples=samples, known=known, left=(), kept=OWN)
        assert choice.engine == expected
        assert accuracy_check.measured == (["fast"] if expected == "fast" else [])
        assert asked == []


def test_the_references_speed_is_the_one_measured_with_the_engines():
    kept = Trial(engine=REFERENCE, precision="fp32", cut=5, seconds=REFERENCE_S / 10)
    known = (trial("fast", seconds=REFERENCE_S / 20),)
    choice, _, _ = searched(samples=10, known=known, left=(), kept=kept)
    assert choice.engine == "fast"
    assert {trial.engine: trial.seconds for trial in choice.trials}[REFERENCE] == kept.seconds
