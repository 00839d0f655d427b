"""How a job begins: at once, with short requests, at a node that may be full, and what the next job has of it.

How a job begins: at once, with what is known; what it measures while it runs, and what the next job has of that.

A job without a network begins with short requests: the same batches and states, and whole ones from then on.

A node that is full while a job begins: the job waits for as long as the node asks, says so, and gives up in time.

Measurements that are kept: found again under the same key alone, whole or not there.
"""

import re
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import frostline as fl
from frostline.client.balanced import BalancedTransport
from frostline.core import REFERENCE, Route
from frostline.core.config import LoaderSettings, NodeSettings
from frostline.core.errors import EngineNotReady, NodeUnreachable, Overloaded, Unavailable
from frostline.core.events import (
    BatchDelivered,
    EngineChanged,
    EpochStarted,
    MeasurementFailed,
    NodeFull,
    PhaseStarted,
    Replanned,
    RequestFinished,
)
from frostline.engines.torch import TorchEngine
from frostline.jobs import beginning
from frostline.jobs.beginning import pays_for_upload
from frostline.jobs.measuring import (
    FoundHere,
    Left,
    MeasurementCache,
    Measurements,
    Measuring,
    Shipping,
    Stage,
    UploadAhead,
    wait_for_bytes,
)
from frostline.jobs.partition import PartitionedModel
from frostline.jobs.profiling import MeasuredPrefix, ProfileCache, ProfileKey, measure_link
from frostline.jobs.router import BothSides
from frostline.loaders.fetch import EngineChoice, NodeEngine, RetryPolicy, Shipment
from frostline.models import freeze
from frostline.node import Node
from frostline.node import weights as stays
from frostline.node.in_process import LocalTransport
from frostline.planning.replanning import is_worth_sending
from frostline.prefetch import ShortestWait
from frostline.profiles import CodecCost, CutCost, Trial
from frostline.testing.transports import Act, ScriptedTransport
from frostline.transport import Cancellation
from support import nodes
from support.engines import make_fastest
from support.images import image_folder, tiny_preprocess
from support.networks import Small
from support.nodes import make_images, request, served, until
from support.tenants import tenant, token_of

OTHER = "torch-channels-last"
NODE = NodeSettings(memory_bytes=1 << 28, device_batch=8, engines=(OTHER,))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return image_folder(tmp_path_factory.mktemp("images"), per_class=16)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "frostline"


@pytest.fixture
def profiled(monkeypatch):
    """Every request for a profile that has anything measured or tried."""
    seen, profile = [], LocalTransport.profile

    def watched(self, wanted, cancellation=None):
        if wanted.accuracy != "exact" or not wanted.only_engine:
            seen.append(wanted)
        return profile(self, wanted, cancellation)

    monkeypatch.setattr(LocalTransport, "profile", watched)
    return seen


def job_on(folder, events=None, **options):
    torch.manual_seed(1)
    model = fl.freeze(Small().train(), "body", input_shape=(3, 32, 32))
    settings = LoaderSettings(samples_per_request=8, device_batch=8, **options.pop("settings", {}))
    on_event = None if events is None else events.append
    return fl.offload(
        model,
        fl.Dataset(folder),
        preprocess=tiny_preprocess(),
        node=NODE,
        settings=settings,
        on_event=on_event,
        **options,
    )


def rows_of(job, epoch=0):
    return torch.cat([batch.features for batch in job.loader(batch_size=8, epoch=epoch)]).numpy()


def test_a_job_hands_out_batches_before_anything_is_measured(folder, profiled):
    with job_on(folder, accuracy="exact") as job:
        assert job.plan is None
        assert job.situation is None
        assert len(rows_of(job)) == 48
        assert "no plan was measured" in str(job.explain())
        assert dict(job.where)[f"frozen layers up to {job.frost_line.name} (cut {job.frost_line.number})"]
    assert profiled == []


def test_measures_first_where_the_plan_is_wanted_first(folder, profiled):
    with job_on(folder, accuracy="exact", settings={"measure_first": True}) as job:
        assert job.plan is not None
        rows = rows_of(job)
    assert len(profiled) == 1
    with job_on(folder, accuracy="exact") as job:
        np.testing.assert_array_equal(rows_of(job), rows)


def test_sides_with_cores_of_their_own_are_measured_if_that_pays(folder, profiled, monkeypatch):
    monkeypatch.setattr(beginning, "shares_cores", lambda *_: False)
    with job_on(folder, accuracy="exact") as job:
        rows_of(job)
        assert profiled == []  # 48 samples are not worth it
        assert job.plan is None
    monkeypatch.setattr(beginning, "is_worth_measuring", lambda **_: True)
    events = []
    with job_on(folder, events, accuracy="exact", settings={"cache_bytes": 0}) as job:
        epoch = 0
        while job.plan is None:
            rows_of(job, epoch)
            epoch += 1
        assert job.explain().first_plan is not None
        assert job.explain().situation.trainer.engine == REFERENCE
    assert len(profiled) == 1
    assert not [event for event in events if isinstance(event, MeasurementFailed)]
    with job_on(folder, accuracy="exact") as job:  # begins with the plan
        assert job.plan is not None
    assert len(profiled) == 1


def test_a_found_engine_is_used_from_then_on_and_by_the_next_job(folder, profiled, cache, monkeypatch):
    def engine(self, context, *_):
        context.transport.profile(_wanted(context))
        make_fastest(cache / "engines", OTHER)  # a trial on a busy machine may say that it is not
        return Measurements(choice=EngineChoice.of(context.transport.profile(_wanted(context))))

    monkeypatch.setattr("frostline.jobs.partition.PartitionedModel.engine", engine)
    monkeypatch.setattr(beginning, "is_worth_trying", lambda **_: True)
    events = []
    with job_on(folder, events, accuracy=0.001, settings={"cache_bytes": 0}) as job:
        before, epoch = rows_of(job), 1
        while not any(isinstance(event, EngineChanged) for event in events):
            rows_of(job, epoch)
            epoch += 1
        after = rows_of(job, epoch)
        engine = job.engine.engine
        assert engine.startswith(OTHER)
        assert job.explain().to_json()["engine"]["name"] == engine
        assert any(engine in where for _, where in job.where)
    [changed] = [event for event in events if isinstance(event, EngineChanged)]
    assert (changed.before, changed.after) == (REFERENCE, engine)
    np.testing.assert_allclose(before, after, rtol=1e-3, atol=1e-4)
    asked = len(profiled)
    with job_on(folder, accuracy=0.001) as job:
        assert job.engine.engine == engine
        np.testing.assert_array_equal(rows_of(job), after)
    assert len(profiled) == asked
    with job_on(folder, accuracy="exact") as job:  # what another accuracy allowed is nothing to it
        assert job.engine == EngineChoice()


def test_a_node_that_tries_an_engine_runs_the_reference_once_on_the_jobs_samples(folder, monkeypatch):
    """Seconds and features are of one run, where a run is long enough to say how long it takes."""
    ran, timed, values = [], TorchEngine.timed_run, TorchEngine.cut_values

    monkeypatch.setattr(
        TorchEngine, "timed_run", lambda self, inputs, **more: ran.append(inputs) or timed(self, inputs, **more)
    )
    monkeypatch.setattr(
        TorchEngine,
        "cut_values",
        lambda self, cuts, inputs, *more: ran.append(inputs) or values(self, cuts, inputs, *more),
    )
    monkeypatch.setattr("frostline.node.trials.selection.Search._why_not", lambda *_: None)  # it is worth a trial
    choices = []

    def engine(self, context, *_):
        ran.clear()  # the check of the network is behind it
        choices.append(EngineChoice.of(context.transport.profile(_wanted(context))))
        return Measurements(choice=choices[0])

    monkeypatch.setattr(PartitionedModel, "engine", engine)
    monkeypatch.setattr(beginning, "is_worth_trying", lambda **_: True)
    with job_on(folder, accuracy="float32", settings={"cache_bytes": 0}) as job:
        rows_of(job)
        until(lambda: choices)
    assert [len(inputs) for inputs in ran] == [8]
    assert np.all(ran[0].std(axis=(1, 2, 3)) > 0), "pixels of photographs"
    assert [trial.engine.startswith(OTHER) for trial in choices[0].trials] == [False, True]
    assert 0 < choices[0].trials[1].error < 1e-3


def _wanted(context):
    from dataclasses import replace

    from frostline.jobs.context import trial_request
    from frostline.wire.messages import ProfileRequest

    features = replace(trial_request(context), cut=context.cuts[-1].number)
    return ProfileRequest(features=features, accuracy=context.accuracy, only_here=True, only_engine=True)


def test_falls_back_to_the_reference_where_the_node_lost_the_engine(folder, monkeypatch):
    with job_on(folder, accuracy="exact") as job:
        exact = rows_of(job)

    profile = LocalTransport.profile

    def refuse(self, wanted, cancellation=None):
        if wanted.features.engine != REFERENCE:
            raise EngineNotReady("is not installed any more")
        return profile(self, wanted, cancellation)

    monkeypatch.setattr(LocalTransport, "profile", refuse)
    gone = Measurements(choice=EngineChoice(engine="openvino", error=1e-6))
    monkeypatch.setattr(MeasurementCache, "get", lambda _: gone)
    with job_on(folder, accuracy=0.001) as job:
        assert job.engine.engine == "openvino"
        np.testing.assert_array_equal(rows_of(job), exact)
        assert job.engine == EngineChoice()
        assert not any("openvino" in where for _, where in job.where)


def test_reports_a_failed_measurement_and_goes_on(folder, monkeypatch):
    def fail(*_, **__):
        raise Unavailable("the node is stopping")

    monkeypatch.setattr("frostline.jobs.partition.PartitionedModel.engine", fail)
    monkeypatch.setattr(beginning, "is_worth_trying", lambda **_: True)
    events = []
    with job_on(folder, events, accuracy=0.001, settings={"cache_bytes": 0}) as job:
        epoch = 0
        while not any(isinstance(event, MeasurementFailed) for event in events):
            assert len(rows_of(job, epoch)) == 48
            epoch += 1
        rows_of(job, epoch)
    assert [event.reason for event in events if isinstance(event, MeasurementFailed)] == ["the node is stopping"]
    assert not [event for event in events if isinstance(event, EngineChanged | Replanned)]


def batch(samples=8, from_cache=0):
    return BatchDelivered(epoch=0, samples=samples, from_cache=from_cache, stall_s=0.0)


def measuring(measure, *, samples=100, is_worth=lambda **_: True, clock=lambda: 0.0):
    ticks = iter(range(1000))
    stages = [Stage(is_worth=is_worth, measure=measure)]
    return Measuring(samples=samples, stages=stages, clock=lambda: float(next(ticks)))


def test_measuring_begins_once_and_is_told_what_is_left_when_it_asks():
    asked, go_on = [], threading.Event()

    def measure(cancellation, left):
        assert go_on.wait(30)
        asked.append(left())
        return Measurements()

    judged = []
    found = measuring(measure, is_worth=lambda **known: judged.append((*known.values(),)) or len(judged) > 1)
    found.on_event(EpochStarted(epoch=0, samples=100))
    for _ in range(4):
        found.on_event(batch())
    go_on.set()
    found.close()
    assert judged == [(92, 8.0), (84, 8.0)]  # eight samples a tick
    assert asked == [Left(samples=68, samples_per_s=8.0)]
    assert found.take_result() == Measurements()
    assert found.take_result() is None


@pytest.mark.parametrize(
    ("samples", "samples_per_s", "trial_s", "found", "pays"),
    [
        (1000, None, None, FoundHere(), True),
        (1000, 30.0, None, FoundHere(), True),
        (150, 9.3, None, FoundHere(), False),
        (150, 9.3, 5.0, FoundHere(), True),
        (490, 6.6, None, FoundHere(), True),
        (490, 6.6, None, FoundHere(samples_per_s=6.6, speed_up=1.0), False),  # a trainer like it found nothing faster
        (490, 6.6, None, FoundHere(samples_per_s=7.6, speed_up=1.15), False),  # a seventh of it is less than the trial
        (490, 6.6, None, FoundHere(samples_per_s=12.0, speed_up=1.8), True),
        (260, 27.0, None, FoundHere(samples_per_s=30.0, speed_up=2.0), True),  # by the node's rate, not the trainer's
        (260, 60.0, None, FoundHere(samples_per_s=30.0), False),  # nothing else was tried there
        (150, None, None, FoundHere(samples_per_s=9.3), False),  # its loop has no batch yet
    ],
)
def test_a_node_tries_an_engine_if_what_is_left_behind_the_upload_pays_for_it(
    samples, samples_per_s, trial_s, found, pays
):
    assert beginning.pays_for_trial(Left(samples=samples, samples_per_s=samples_per_s), trial_s, found) is pays


def test_a_loop_past_its_announced_end_is_expected_to_last_as_long_again():
    judged = []
    found = measuring(lambda *_: None, samples=16, is_worth=lambda samples_left, **_: judged.append(samples_left))
    for epoch in range(3):
        found.on_event(EpochStarted(epoch=epoch, samples=16))
        found.on_event(batch())
        found.on_event(batch())
    assert judged == [8, 8, 24, 16]
    found.close()


def test_stages_begin_one_after_another_each_when_it_pays():
    order, go_on = [], threading.Event()

    def stage(name, least):
        def measure(*_):
            order.append(name)
            return Measurements(choice=EngineChoice(engine=name)) if go_on.wait(60) else None

        return Stage(is_worth=lambda **_: least <= len(judged), measure=measure)

    judged, ticks = [], iter(range(1000))
    stages = [stage("engine", 1), stage("plan", 3)]
    found = Measuring(samples=1000, stages=stages, clock=lambda: float(next(ticks)))
    found.on_event(EpochStarted(epoch=0, samples=1000))
    judged.append(1)
    found.on_event(batch())
    until(lambda: order == ["engine"])
    judged += [1, 1]
    found.on_event(batch())  # the first is under way
    assert order == ["engine"]
    go_on.set()
    until(lambda: found.take_result() == Measurements(choice=EngineChoice(engine="engine")))
    until(lambda: found.on_event(batch()) or order == ["engine", "plan"])
    found.close()
    assert found.take_result() == Measurements(choice=EngineChoice(engine="plan"))


def test_measuring_may_begin_before_the_first_batch_and_is_waited_for_a_while():
    go_on = threading.Event()
    at_once = measuring(lambda _, left: Measurements(choice=EngineChoice(engine=f"{left().samples} left")))
    assert at_once.begin(wait_s=60) == Measurements(choice=EngineChoice(engine="100 left"))
    assert at_once.take_result() is None
    at_once.on_event(EpochStarted(epoch=0, samples=100))
    at_once.on_event(batch())  # it was done
    at_once.close()
    assert at_once.take_result() is None

    later = measuring(lambda *_: Measurements() if go_on.wait(60) else None)
    assert later.begin(wait_s=0.01) is None
    go_on.set()
    later.close()
    assert later.take_result() == Measurements()


def test_an_engine_that_is_found_soon_serves_the_first_batch_too(folder, monkeypatch):
    monkeypatch.setattr(beginning, "_MIN_TO_TRY", 0)
    found = EngineChoice(engine=REFERENCE, error=0.0, trials=(Trial(engine=REFERENCE, precision="fp32", cut=2),))
    monkeypatch.setattr("frostline.jobs.partition.PartitionedModel.engine", lambda *_: Measurements(choice=found))
    events = []
    with job_on(folder, events, accuracy="float32") as job:
        assert job.engine == found
    assert [event.name for event in events if isinstance(event, PhaseStarted)][-1] == "trying an engine"


def test_a_remote_nodes_engine_is_tried_before_both_sides_are_measured(folder, monkeypatch):
    monkeypatch.setattr(beginning, "_MIN_TO_TRY", 0)
    monkeypatch.setattr(beginning, "shares_cores", lambda *_: False)
    order, pays = [], threading.Event()
    found = EngineChoice(engine=REFERENCE, error=0.0, trials=(Trial(engine=REFERENCE, precision="fp32", cut=2),))
    whole = PartitionedModel.measurements

    def engine(*_):
        order.append("engine")
        return Measurements(choice=found)

    def measurements(*arguments):
        order.append("both sides")
        return whole(*arguments)

    monkeypatch.setattr(PartitionedModel, "engine", engine)
    monkeypatch.setattr(PartitionedModel, "measurements", measurements)
    monkeypatch.setattr(beginning, "is_worth_measuring", lambda **_: pays.is_set())
    with job_on(folder, accuracy="float32", settings={"cache_bytes": 0}) as job:
        assert job.engine == found
        rows_of(job)
        assert order == ["engine"]
        pays.set()
        epoch = 1
        while job.plan is None:
            rows_of(job, epoch)
            epoch += 1
        assert order == ["engine", "both sides"]
    with job_on(folder, accuracy="float32") as job:  # both were kept
        assert job.plan is not None
        assert len(order) == 2


def test_an_engine_alone_that_was_kept_leaves_the_plan_to_be_measured(folder, monkeypatch):
    monkeypatch.setattr(beginning, "shares_cores", lambda *_: False)
    monkeypatch.setattr(beginning, "is_worth_measuring", lambda **_: True)
    kept = Measurements(choice=EngineChoice(engine=REFERENCE, error=0.0))
    monkeypatch.setattr(MeasurementCache, "get", lambda _: kept)
    monkeypatch.setattr(PartitionedModel, "engine", lambda *_: pytest.fail("it is known"))
    with job_on(folder, accuracy="float32", settings={"cache_bytes": 0}) as job:
        epoch = 0
        while job.plan is None:
            rows_of(job, epoch)
            epoch += 1


def test_reports_an_engine_whose_trial_fails_and_begins(folder, monkeypatch):
    monkeypatch.setattr(beginning, "_MIN_TO_TRY", 0)

    def fail(*_, **__):
        raise Unavailable("the node is stopping")

    monkeypatch.setattr("frostline.jobs.partition.PartitionedModel.engine", fail)
    events = []
    with job_on(folder, events, accuracy="float32") as job:
        assert len(rows_of(job)) == 48
    assert [event.reason for event in events if isinstance(event, MeasurementFailed)] == ["the node is stopping"]


def test_cached_samples_give_no_reason_to_measure():
    found = measuring(lambda *_: pytest.fail("was measured"))
    found.on_event(EpochStarted(epoch=0, samples=100))
    found.on_event(batch(from_cache=8))
    found.close()


def test_a_closed_job_gives_up_what_it_measures():
    begun = threading.Event()

    def measure(cancellation: Cancellation, _):
        ended = threading.Event()
        with cancellation.ends(ended.set):
            begun.set()
            assert ended.wait(60)
        cancellation.check()

    found = measuring(measure)
    found.on_event(EpochStarted(epoch=0, samples=100))
    found.on_event(batch())
    assert begun.wait(30)
    found.close()
    until(lambda: isinstance(found.take_result(), MeasurementFailed))


ASKED = {"prefix": "ab", "accuracy": 0.01}
FOUND = Measurements(choice=EngineChoice(engine="a", error=0.1, trials=(Trial(engine="a", precision="fp32", cut=2),)))


def test_findings_are_kept_for_what_they_depend_on(tmp_path):
    MeasurementCache(tmp_path, ASKED).put(FOUND)
    assert MeasurementCache(tmp_path, ASKED).get() == FOUND
    assert MeasurementCache(tmp_path, {**ASKED, "accuracy": "exact"}).get() is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"choice": {"engine": 1}, "situation": null}', '{"choice": 3}'])
def test_findings_that_say_something_else_count_as_not_there(tmp_path, text):
    kept = MeasurementCache(tmp_path, ASKED)
    kept.put(FOUND)
    next(tmp_path.glob("*.json")).write_text(text)
    assert kept.get() is None


def test_a_codec_may_lose_what_the_engine_leaves_of_the_accuracy():
    engine = NodeEngine(0.01)
    assert engine.tolerance == 0.01
    engine.choice = EngineChoice(engine="a", error=0.004)
    assert engine.tolerance == pytest.approx(0.006)
    assert NodeEngine("fp16").tolerance is None


def test_a_command_lists_its_data_and_launches_its_node_before_it_imports_pytorch(plain_starts):
    line = (
        "import sys, frostline.cli.train, frostline.cli.extract_predict, frostline.training.start, "
        "frostline.training.feature_files; print('torch' in sys.modules)"
    )
    said = subprocess.run([sys.executable, "-c", line], check=True, capture_output=True, text=True)
    assert said.stdout.strip() == "False"


NODE_OF_SHORT_BEGINNINGS = NodeSettings(memory_bytes=1 << 28, device_batch=8)
SHORT = LoaderSettings(samples_per_request=8, requests_in_flight=4, cache_bytes=0, device_batch=8)
WHOLE = replace(SHORT, ramp=False)
# Of 45 samples: a round of four, and whole ones.
BEGINS = Counter([4] * 4 + [8] * 3 + [5])
ALL_WHOLE = Counter([8] * 5 + [5])


@pytest.fixture(scope="module")
def folder_of_short_beginnings(tmp_path_factory):
    return image_folder(tmp_path_factory.mktemp("images"), per_class=15)


def job_for(folder, settings, *, model=None, on_event=None, **options):
    data = fl.Dataset(folder)
    return fl.offload(
        model,
        data,
        preprocess=tiny_preprocess(),
        settings=settings,
        node=NODE_OF_SHORT_BEGINNINGS,
        on_event=on_event,
        **options,
    )


def steps(loader):
    """What the loop has, and what a state says after it, batch by batch."""
    return [(batch.ids.tolist(), batch.features, loader.state_dict()) for batch in loader]


def asked_for(events):
    return Counter(event.samples for event in events if isinstance(event, RequestFinished))


@pytest.mark.parametrize("cut", [0, 1])
def test_batches_and_states_are_those_of_whole_requests(folder_of_short_beginnings, cut):
    found, events = [], []
    for settings in (SHORT, WHOLE):
        seen = []
        with job_for(folder_of_short_beginnings, settings, cut=cut, on_event=seen.append) as job:
            found.append(steps(job.loader(6, shuffle=True, seed=5)))
            again = job.loader(6, shuffle=True, seed=5)
            again.load_state_dict(found[-1][2][2])
            assert [ids for ids, _, _ in steps(again)] == [ids for ids, _, _ in found[-1][3:]]
        events.append(seen)
    for (ids, features, state), (others, expected, same) in zip(*found, strict=True):
        assert (ids, state) == (others, same)
        assert torch.equal(features, expected)
    assert asked_for(events[0])[4] > 0
    assert asked_for(events[1])[4] == 0


@pytest.mark.parametrize(("settings", "lengths"), [(SHORT, BEGINS), (WHOLE, ALL_WHOLE)], ids=["short", "whole"])
def test_only_the_first_requests_of_a_window_are_short(folder_of_short_beginnings, settings, lengths):
    events = []
    with job_for(folder_of_short_beginnings, settings, on_event=events.append) as job:
        for loader in job.epochs(9, range(3)):
            list(loader)
    assert asked_for(events) == lengths + ALL_WHOLE + ALL_WHOLE


def test_a_network_is_run_on_whole_requests_from_the_first_on(folder_of_short_beginnings):
    torch.manual_seed(1)
    model = freeze(Small().train(), "stem", input_shape=(3, 32, 32))
    events = []
    with job_for(folder_of_short_beginnings, SHORT, model=model, cut=2, on_event=events.append) as job:
        list(job.loader(9))
    assert asked_for(events) == ALL_WHOLE


class Time:
    """Seconds that pass only where somebody waits."""

    def __init__(self):
        self.now = 0.0

    def wait(self, seconds):
        self.now += seconds


def asking(events, time, retry_for_s=60.0):
    return RetryPolicy(
        retry_for_s=retry_for_s, on_event=events.append, clock=lambda: time.now, wait=time.wait, jitter=float
    )


def full(retry_after_s):
    return Act(error=Overloaded("64 requests are in work", retry_after_s=retry_after_s))


def test_asks_a_full_node_again_after_the_time_it_named(tmp_path):
    events, time = [], Time()
    node = ScriptedTransport([full(3.0), full(0.0)])
    asked = request(make_images(tmp_path, 4), 0)
    crossed = asking(events, time)(lambda: measure_link(node, asked))
    assert crossed.encoded.ids.tolist() == asked.samples.ids.tolist()
    assert [(event.attempt, event.delay_s) for event in events] == [(2, 3.0), (3, 0.2)]
    assert all("64 requests" in event.reason for event in events)
    assert time.now == pytest.approx(3.2)


@pytest.mark.parametrize(("retry_after_s", "waits"), [(61.0, 0), (20.0, 3)])
def test_ends_the_job_with_one_sentence_where_the_node_stays_full(retry_after_s, waits):
    events, time = [], Time()

    def ask():
        raise Overloaded("no memory", retry_after_s=retry_after_s)

    with pytest.raises(NodeUnreachable, match=r"was full at .* no memory; .* raise retry_for_s"):
        asking(events, time)(ask)
    assert len(events) == waits


def test_does_not_wait_for_an_unreachable_node():
    events = []
    node = ScriptedTransport()
    node.go_down()
    with pytest.raises(NodeUnreachable, match="is down"):
        asking(events, Time())(node.health)
    assert events == []


def test_a_job_begins_at_a_full_node_as_soon_as_memory_is_free(tmp_path):
    folder = image_folder(tmp_path / "images", per_class=4)
    model = fl.freeze(Small().train(), "stem", input_shape=(3, 32, 32))
    with Node(NodeSettings(memory_bytes=1 << 28, max_requests=1), (folder.as_uri(),)) as node, served(node) as url:
        others = [node.admit()]  # as other jobs' requests are in work
        events = []

        def on_event(event):
            events.append(event)
            if isinstance(event, NodeFull):
                others.pop().__exit__(None, None, None)
            elif isinstance(event, PhaseStarted) and event.name.startswith("measuring"):
                others.append(node.admit())

        settings = LoaderSettings(requests_in_flight=1, measure_first=True)
        data, steps = fl.Dataset(folder), tiny_preprocess()
        with fl.offload(model, data, preprocess=steps, near=url, settings=settings, on_event=on_event) as job:
            rows = torch.cat([batch.ids for batch in job.loader(batch_size=4)])
    assert sorted(rows.tolist()) == sorted(data.samples.ids.tolist())
    waits = [event for event in events if isinstance(event, NodeFull)]
    assert len(waits) == 2  # for the prefix, and for the samples that cross to measure the link
    assert all(wait.delay_s >= 1 for wait in waits)


def test_jobs_whose_networks_do_not_fit_together_take_turns(tmp_path, monkeypatch):
    monkeypatch.setattr(stays, "_TURN_S", 0.02)
    folder = image_folder(tmp_path / "images", per_class=10)
    data, names, last = fl.Dataset(folder), ("ann", "bob", "cat", "dan"), nodes.small_network(side=8).cuts[-1].number
    # Eighteen megabytes for weights, and each network takes seven, and eleven to be read.
    known = tuple(tenant(name, work_bytes=12 << 20) for name in names)
    settings = NodeSettings(memory_bytes=96 << 20, device_batch=8, tenants=known, max_requests=32)

    def job_of(number, **options):
        torch.manual_seed(number)
        model = fl.freeze(nodes.Small(width=440).eval(), "features")
        steps = tiny_preprocess(flip=True, side=8)  # so that nothing is kept from one epoch to the next
        return fl.offload(model, data, preprocess=steps, cut=last, **options)

    def features(job):
        batches = [batch for epoch in range(3) for batch in job.loader(8, shuffle=True, seed=0, epoch=epoch)]
        return torch.cat([batch.features for batch in batches]), torch.cat([batch.ids for batch in batches])

    with Node(settings, (folder.as_uri(),)) as node, served(node) as url, ExitStack() as stack:
        asking = [LoaderSettings(token=token_of(name), samples_per_request=8, requests_in_flight=2) for name in names]
        jobs = [stack.enter_context(job_of(number, near=url, settings=item)) for number, item in enumerate(asking)]
        with ThreadPoolExecutor(len(jobs)) as threads:
            got = list(threads.map(features, jobs))
        totals = node.statistics().totals
    assert totals.evicted > len(names), "they had to wait for the places of others"
    for number, (rows, ids) in enumerate(got):
        assert sorted(ids.tolist()) == sorted(data.samples.ids.tolist() * 3)
        with job_of(number, node=NodeSettings(memory_bytes=1 << 28, device_batch=8)) as job:
            alone, their_ids = features(job)
        assert torch.equal(ids, their_ids)
        assert torch.equal(rows, alone)


KEY = ProfileKey(
    prefix="ab" * 32, hardware="cpu, 2 threads", engine="torch 2", device_batch=32, codecs=("lz4",), packed_cuts=(1,)
)
MEASURED = MeasuredPrefix(
    cuts=(
        CutCost(number=1, seconds=0.01, spread_s=0.001, fixed_bytes=10, bytes_per_sample=20, remaining_fixed_bytes=3),
    ),
    codecs=(CodecCost(cut=1, codec="lz4", bytes_per_sample=12.5, encode_s=1e-4, decode_s=2e-4),),
)


def test_the_next_process_finds_kept_features(tmp_path):
    ProfileCache(tmp_path / "profiles").put(KEY, MEASURED)
    assert ProfileCache(tmp_path / "profiles").get(KEY) == MEASURED


@pytest.mark.parametrize(
    "other",
    [
        {"prefix": "cd" * 32},
        {"hardware": "cpu, 1 threads"},
        {"engine": "torch 3"},
        {"device_batch": 8},
        {"codecs": ()},
        {"packed_cuts": ()},
    ],
)
def test_another_network_machine_or_engine_is_measured_anew(tmp_path, other):
    kept = ProfileCache(tmp_path)
    kept.put(KEY, MEASURED)
    assert kept.get(replace(KEY, **other)) is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"cuts": [{}], "codecs": []}', '{"cuts": 3}'])
def test_a_file_that_says_something_else_counts_as_not_there(tmp_path, text):
    kept = ProfileCache(tmp_path)
    kept.put(KEY, MEASURED)
    next(tmp_path.glob("*.json")).write_text(text)
    assert kept.get(KEY) is None


def test_a_folder_that_takes_no_file_costs_nothing_but_the_next_measurement(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    kept = ProfileCache(blocked / "profiles")
    kept.put(KEY, MEASURED)
    assert kept.get(KEY) is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


class Asked:
    """A network that is shipped at once, and whose node answers when it is let."""

    def __init__(self, *, unsent=None, answer=None):
        self.unsent, self.answer, self.may_answer = unsent, answer, threading.Event()

    def ship(self, _, before_upload):
        before_upload()
        return self.unsent

    def lacking_memory(self, _):
        assert self.may_answer.wait(60)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def settle(self, _, find):
        return find()


def shipping_of(asked, told, transport=None, is_worth=None, cancellation=None):
    asking, shipment = SimpleNamespace(on_event=told.append), SimpleNamespace(artifact=bytes(20 << 20))
    context = SimpleNamespace(asking=asking, shipment=shipment, transport=transport or ScriptedTransport())
    return Shipping(context, asked, cancellation or Cancellation(), first_bytes=0, is_worth=is_worth)


def thin_link(mib_per_s):
    seen = SimpleNamespace(bytes_received=0, transfer_bytes=1 << 20, transfer_s=1 / mib_per_s)
    return SimpleNamespace(statistics=lambda: seen, break_off=lambda: None)


def known_here(samples_per_s):
    """What the trainer found; None where it has not yet."""
    found = Future()
    if samples_per_s is not None:
        found.set_result(FoundHere(samples_per_s=samples_per_s))
    return found


@pytest.mark.parametrize(
    ("needed_s", "found_here", "pays", "has_choice"),
    [(150, None, False, False), (15, None, None, True), (15, 0.0, True, True), (150, 0.0, False, False)],
)
def test_weights_that_come_too_late_beside_any_engine_are_waited_for_by_nobody(needed_s, found_here, pays, has_choice):
    now = [0.0]
    request_source = ShortestWait(
        {Route(5): 1, Route(0): 1}, samples_per_request=8, bytes_per_sample=lambda _: 1, clock=lambda: now[0]
    )
    sides = BothSides(request_source)
    sides.close(Route(5))

    def judged():
        left = Left(samples=500, samples_per_s=None)
        return pays_for_upload(sides, Route(5), known_here(found_here), lambda: left, None, needed_s)

    assert judged() is None, "nothing is known of the trainer"
    following = sides.next_request(500)
    now[0] += 0.8
    sides.finish_rows(following.route, following.rows)  # ten rows a second
    assert (judged(), sides.has_choice) == (pays, has_choice)


@pytest.mark.parametrize(("needed_s", "pays"), [(15, True), (150, False)])
def test_a_trial_says_how_fast_the_trainers_engine_is_before_it_ran_a_row(needed_s, pays):
    request_source = ShortestWait(
        {Route(5): 1, Route(0): 1}, samples_per_request=8, bytes_per_sample=lambda _: 1, clock=lambda: 0.0
    )
    left = Left(samples=500, samples_per_s=None)
    assert pays_for_upload(BothSides(request_source), Route(5), known_here(10.0), lambda: left, None, needed_s) is pays


@pytest.mark.parametrize(("needed_s", "pays"), [(15, None), (150, False)])
def test_the_checks_of_a_network_say_which_weights_come_too_late_beside_any_engine(needed_s, pays):
    request_source = ShortestWait(
        {Route(5): 1, Route(0): 1}, samples_per_request=8, bytes_per_sample=lambda _: 1, clock=lambda: 0.0
    )
    sides, left = BothSides(request_source), Left(samples=500, samples_per_s=None)
    sides.close(Route(5))
    assert pays_for_upload(sides, Route(5), known_here(None), lambda: left, 0.1, needed_s) is pays
    assert sides.has_choice is (pays is None), "nothing that has come waits for the node"


def test_weights_are_sent_when_the_job_has_something_of_them():
    assert is_worth_sending(needed_s=38, samples_left=1200, samples_per_s=20)
    assert not is_worth_sending(needed_s=38, samples_left=460, samples_per_s=25), "it is done after 18 s"
    assert not is_worth_sending(needed_s=38, samples_left=980, samples_per_s=25), "they would be there for a second"
    assert not is_worth_sending(needed_s=38, samples_left=0, samples_per_s=25)


def test_a_long_upload_waits_until_it_pays_which_is_told_once(monkeypatch):
    monkeypatch.setattr("frostline.jobs.measuring._ASK_S", 0.001)
    answers, asked, told = iter([None, False, False, None, True]), Asked(), []
    asked.may_answer.set()
    needed = []
    shipping = shipping_of(asked, told, thin_link(1), lambda needed_s: [needed.append(needed_s), next(answers)][1])
    assert shipping.is_sent()
    assert shipping.is_run()
    assert needed == [20] * 5
    [warning] = told
    assert re.search("21 MB, which take 20 s on this link.*--weights", warning.reason)


def test_a_short_upload_is_not_put_off():
    asked = Asked()
    asked.may_answer.set()
    assert shipping_of(asked, [], thin_link(4), is_worth=None).is_sent()


@pytest.mark.parametrize(
    ("received", "transfer_bytes", "transfer_s", "is_sent"),
    [
        (2 << 20, 2 << 20, 0.5, True),
        (2 << 20, 2 << 20, 1.5, False),
        (2 << 20, 100, 0.0, False),
        (1 << 20, 1 << 20, 0.1, False),
    ],
    ids=["five seconds", "fifteen seconds", "a link that nobody knows", "before the first batch"],
)
def test_weights_go_ahead_where_that_is_short_and_delays_no_first_batch(received, transfer_bytes, transfer_s, is_sent):
    seen = SimpleNamespace(bytes_received=received, transfer_bytes=transfer_bytes, transfer_s=transfer_s)
    sent = []

    def puts(digest, artifact, before_upload):
        before_upload()
        sent.append((digest, artifact))

    shipment = shipped_ahead(SimpleNamespace(statistics=lambda: seen, put_prefix=puts))
    assert sent == [("d", shipment.artifact)] * is_sent
    assert shipment.is_there == is_sent


def shipped_ahead(transport):
    shipment = Shipment(digest="d", artifact=bytes(20 << 20))
    UploadAhead(transport, first_bytes=2 << 20).begin(shipment)
    assert shipment.under_way.wait(60)
    return shipment


def test_nodes_that_have_the_weights_need_no_link_that_is_known():
    seen = SimpleNamespace(bytes_received=0, transfer_bytes=0, transfer_s=0.0)
    assert shipped_ahead(SimpleNamespace(statistics=lambda: seen, put_prefix=lambda *_: None)).is_there


@pytest.mark.parametrize("have", [(True, True), (True, False), (False, False)], ids=["both", "one", "none"])
def test_nodes_without_the_weights_get_them_later_and_are_not_left_out(have):
    class Counting(ScriptedTransport):
        def __init__(self, has_it):
            super().__init__()
            self.has_it, self.puts = has_it, 0

        def put_prefix(self, digest, artifact, before_upload=None):
            self.puts += 1
            if not self.has_it and before_upload is not None:
                before_upload()

    nodes = [Counting(has_it) for has_it in have]
    with closing(BalancedTransport(nodes)) as transport:
        shipment = shipped_ahead(transport)
        assert shipment.is_there == all(have)
        transport.put_prefix(shipment.digest, shipment.artifact)
        assert [node.puts for node in nodes] == [2, 2]
        wanted = request("/data", 2, prefix=shipment.digest, samples=[])
        assert all(transport.others(wanted, {number}) for number in (0, 1)), "none is left out"


def test_nothing_is_sent_once_a_job_is_over_that_waited_with_its_upload():
    over, told = Cancellation(), []
    shipping = shipping_of(Asked(), told, thin_link(1), lambda _: over.cancel(), over)
    assert not shipping.is_sent()
    assert not shipping.is_run()
    assert "ended before" in told[0].reason


@pytest.mark.parametrize(
    ("answer", "is_run", "said"),
    [(None, True, 0), ("it has no memory", False, 0), (Unavailable("it is gone"), False, 1)],
    ids=["runs", "refused", "lost"],
)
def test_engines_can_be_tried_before_a_node_has_said_that_it_runs_the_network(monkeypatch, answer, is_run, said):
    monkeypatch.setattr("frostline.jobs.measuring._FIRST_S", 60.0)  # nobody waits for samples that no loop asks for
    asked, told = Asked(answer=answer), []
    shipping = shipping_of(asked, told)
    assert shipping.is_sent()
    asked.may_answer.set()
    assert shipping.is_run() == is_run
    assert len(told) == said
    assert all("it is gone" in event.reason for event in told)


def test_no_engine_is_tried_where_the_network_could_not_be_sent():
    shipping = shipping_of(Asked(unsent="it takes too much memory"), [])
    assert not shipping.is_sent()
    assert not shipping.is_run()


def test_an_upload_lets_the_first_samples_pass(monkeypatch):
    monkeypatch.setattr("frostline.jobs.measuring._FIRST_S", 60.0)
    seen = []

    def received():
        seen.append(50_000 + 1000 * len(seen))
        return seen[-1]

    wait_for_bytes(10_000, received, Cancellation())
    assert seen[-1] == seen[0] + 10_000


def test_an_upload_waits_for_no_loop_that_has_not_begun_and_no_job_that_is_over(monkeypatch):
    monkeypatch.setattr("frostline.jobs.measuring._FIRST_S", 0.1)
    started = time.monotonic()
    wait_for_bytes(10_000, lambda: 50_000, Cancellation())
    assert time.monotonic() - started >= 0.1
    monkeypatch.setattr("frostline.jobs.measuring._FIRST_S", 60.0)
    over, seen = Cancellation(), []
    wait_for_bytes(10_000, lambda: seen.append(over.cancel()) or 0, over)
    assert len(seen) < 5
    wait_for_bytes(10_000, lambda: seen.append(None) or 0, over)
    assert len(seen) < 10, "it was over before"
