"""How a job begins: at once, with what is known; what it measures while it runs, and what the next job has of that."""

import subprocess
import sys
import threading

import numpy as np
import pytest
import torch

import frostline as fl
from frostline.core import REFERENCE
from frostline.core.config import LoaderSettings, NodeSettings
from frostline.core.errors import EngineNotReady, Unavailable
from frostline.core.events import (
    BatchDelivered,
    EngineChanged,
    EpochStarted,
    MeasurementFailed,
    PhaseStarted,
    Replanned,
)
from frostline.jobs import beginning
from frostline.jobs.measuring import MeasurementCache, Measurements, Measuring
from frostline.loaders.fetch import EngineChoice, NodeEngine
from frostline.node.in_process import LocalTransport
from frostline.profiles import Trial
from frostline.transport import Cancellation
from support.engines import make_fastest
from support.images import image_folder, tiny_preprocess
from support.networks import Small
from support.nodes import until

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
    observe = None if events is None else events.append
    return fl.offload(
        model,
        fl.Dataset(folder),
        preprocess=tiny_preprocess(),
        node=NODE,
        settings=settings,
        observe=observe,
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


def test_sides_with_cores_of_their_own_are_measured_while_the_job_runs_where_that_pays(folder, profiled, monkeypatch):
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


def test_an_engine_that_was_found_is_used_from_then_on_and_from_the_beginning_by_the_next_job(
    folder, profiled, cache, monkeypatch
):
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


def _wanted(context):
    from dataclasses import replace

    from frostline.jobs.context import tried
    from frostline.wire.messages import ProfileRequest

    features = replace(tried(context), cut=context.cuts[-1].number)
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


def measuring(measure, *, samples=100, is_worth=lambda *_: True, clock=lambda: 0.0):
    ticks = iter(range(1000))
    return Measuring(samples=samples, is_worth=is_worth, measure=measure, clock=lambda: float(next(ticks)))


def test_measuring_begins_once_with_the_number_of_samples_left():
    asked, done = [], threading.Event()

    def measure(cancellation, samples_left):
        asked.append(samples_left)
        done.set()
        return Measurements()

    judged = []
    found = measuring(measure, is_worth=lambda *known: judged.append(known) or len(judged) > 1)
    found.observe(EpochStarted(epoch=0, samples=100))
    for _ in range(4):
        found.observe(batch())
    assert done.wait(30)
    assert judged == [(92, 8.0), (84, 8.0)]  # eight samples a tick
    assert asked == [84]
    found.close()
    assert found.found() == Measurements()
    assert found.found() is None


def test_measuring_may_begin_before_the_first_batch_and_is_waited_for_a_while():
    go_on = threading.Event()
    at_once = measuring(lambda _, samples_left: Measurements(choice=EngineChoice(engine=f"{samples_left} left")))
    assert at_once.begin(wait_s=60) == Measurements(choice=EngineChoice(engine="100 left"))
    assert at_once.found() is None
    at_once.observe(EpochStarted(epoch=0, samples=100))
    at_once.observe(batch())  # it was done
    at_once.close()
    assert at_once.found() is None

    later = measuring(lambda *_: Measurements() if go_on.wait(60) else None)
    assert later.begin(wait_s=0.01) is None
    go_on.set()
    later.close()
    assert later.found() == Measurements()


def test_an_engine_that_is_found_soon_serves_the_first_batch_too(folder, monkeypatch):
    monkeypatch.setattr(beginning, "_MIN_TO_TRY", 0)
    found = EngineChoice(engine=REFERENCE, error=0.0, trials=(Trial(engine=REFERENCE, precision="fp32", cut=2),))
    monkeypatch.setattr("frostline.jobs.partition.PartitionedModel.engine", lambda *_: Measurements(choice=found))
    events = []
    with job_on(folder, events, accuracy="float32") as job:
        assert job.engine == found
    assert [event.name for event in events if isinstance(event, PhaseStarted)][-1] == "trying an engine"


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
    found.observe(EpochStarted(epoch=0, samples=100))
    found.observe(batch(from_cache=8))
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
    found.observe(EpochStarted(epoch=0, samples=100))
    found.observe(batch())
    assert begun.wait(30)
    found.close()
    until(lambda: isinstance(found.found(), MeasurementFailed))


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


def test_a_command_lists_its_data_and_launches_its_node_before_it_imports_pytorch():
    line = (
        "import sys, frostline.cli.train, frostline.cli.extract_predict, frostline.training.start, "
        "frostline.training.feature_files; print('torch' in sys.modules)"
    )
    said = subprocess.run([sys.executable, "-c", line], check=True, capture_output=True, text=True)
    assert said.stdout.strip() == "False"
