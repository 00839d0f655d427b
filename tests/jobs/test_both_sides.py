"""Both sides of a job compute: a node on one core, the trainer on another, and the same features whoever made them."""

import os
import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import frostline as fl
from frostline.client.http import HttpTransport
from frostline.core import REFERENCE, Route
from frostline.core.config import LoaderSettings, NodeSettings
from frostline.core.errors import ModelError, OverBudget, Overloaded, Unavailable, UnsafeArtifact
from frostline.core.events import SetupWarning
from frostline.engines.catalog import absence
from frostline.engines.choice import Choice
from frostline.engines.torch import COMPILER, has_compiler
from frostline.jobs import beginning, both_sides, measuring
from frostline.jobs.measuring import FoundHere, Measurements
from frostline.jobs.partition import PartitionedModel, TorchLocalPrefix
from frostline.loaders.fetch import EngineChoice, Shipment
from frostline.models import cutting
from frostline.node.process import start_node
from frostline.ordering import Order
from frostline.wire.connection import Exchange
from support.images import image_folder, tiny_preprocess
from support.networks import Small
from support.nodes import until
from support.texts import small_distilbert, tokenizer_of_words, write_reviews

CORES = sorted(os.sched_getaffinity(0))
ROWS = 3 * 80

pytestmark = [
    pytest.mark.skipif(len(CORES) < 2, reason="node and trainer share the only core here"),
    pytest.mark.promise("equal"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return image_folder(tmp_path_factory.mktemp("photos"), per_class=ROWS // 3)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "frostline"


@contextmanager
def pinned(*cores):
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def node_elsewhere(folder, **settings):
    """A node on the first core; this process has the others meanwhile."""
    with pinned(CORES[0]):
        node = start_node((folder.as_uri(),), NodeSettings(**{"memory_bytes": 1 << 28, "device_batch": 8, **settings}))
    with node, pinned(*CORES[1:]):
        yield node.url


def network():
    torch.manual_seed(1)
    return fl.freeze(Small().train(), "body", input_shape=(3, 32, 32))


def job_near(url, folder, *, model=None, events=None, settings=None, **options):
    return fl.offload(
        network() if model is None else model,
        fl.Dataset(folder),
        preprocess=tiny_preprocess(),
        near=url,
        settings=LoaderSettings(**{"samples_per_request": 8, "device_batch": 8, "cache_bytes": 0, **(settings or {})}),
        on_event=None if events is None else events.append,
        **options,
    )


def rows_of(job, epoch=0):
    made = [batch.features for batch in job.loader(8, shuffle=True, seed=0, epoch=epoch)]
    if isinstance(made[0], tuple):  # several tensors cross
        made = [torch.cat([tensor.flatten(1).float() for tensor in tensors], 1) for tensors in made]
    return torch.cat(made).numpy()


def sides(job):
    """Samples by the cut at which each came."""
    return {route.cut: count for route, count in job.statistics().routed}


@pytest.fixture(scope="module")
def expected(folder, tmp_path_factory):
    """Features of a node in this process, in the order of the first epoch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        with fl.offload(
            network(),
            fl.Dataset(folder),
            preprocess=tiny_preprocess(),
            accuracy="exact",
            settings=LoaderSettings(samples_per_request=8, device_batch=8),
        ) as job:
            return rows_of(job)


def test_both_sides_give_the_references_features_to_the_bit_if_asked(folder, expected):
    once = {"hedge_quantile": 1.0}  # a request that is made twice on a busy machine counts twice
    with node_elsewhere(folder) as url, job_near(url, folder, accuracy="exact", settings=once) as job:
        passes = 0
        while len(sides(job)) < 2:  # the node takes some seconds to be ready
            np.testing.assert_array_equal(rows_of(job), expected)
            passes += 1
        assert set(sides(job)) == {0, job.frost_line.number}
        assert sum(sides(job).values()) == passes * ROWS
        assert job.plan is None
        said = str(job.explain())
    assert "node and trainer both ran the frozen layers" in said
    assert "trainer" in said


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    write_reviews(folder / "train.parquet", rows=ROWS)
    return folder


def job_on_texts(folder, **options):
    tokens = fl.preprocess.text(tokenizer_of_words(), max_length=12)
    model = fl.freeze(small_distilbert(), "distilbert.transformer.layer.0", input_shape=tokens.inputs)
    settings = LoaderSettings(samples_per_request=8, device_batch=8, cache_bytes=0, hedge_quantile=1.0)
    data = fl.Dataset(folder, column="text")
    return fl.offload(model, data, preprocess=tokens, settings=settings, frozen_in_eval=True, **options)


def test_both_sides_compute_texts_to_the_bit(texts):
    with job_on_texts(texts) as job:
        expected = rows_of(job)
    with node_elsewhere(texts) as url, job_on_texts(texts, near=url) as job:
        while len(sides(job)) < 2:
            np.testing.assert_array_equal(rows_of(job), expected)


def test_a_trainer_without_the_package_of_texts_leaves_them_to_the_node(texts, monkeypatch):
    monkeypatch.setattr(both_sides, "has_tokenizers", lambda: False)
    with node_elsewhere(texts) as url, job_on_texts(texts, near=url) as job:
        rows_of(job)
        assert set(sides(job)) == {job.frost_line.number}


def test_no_run_of_the_trainer_is_filled_up_where_another_request_could_fill_it(folder, monkeypatch):
    """Eager torch runs as many rows each time, so that each sample has the bits of the reference."""
    runs = []
    run = TorchLocalPrefix.run

    def noted(self, arrays, size):
        runs.append((len(arrays[0]), size))
        return run(self, arrays, size)

    monkeypatch.setattr(TorchLocalPrefix, "run", noted)
    settings = {"samples_per_request": 16, "device_batch": 16, "hedge_quantile": 1.0}
    with node_elsewhere(folder) as url, job_near(url, folder, accuracy="exact", settings=settings) as job:
        rows_of(job)
    assert runs
    assert [rows for rows, size in runs if rows < size][1:] == []  # the last samples of the pass


@pytest.mark.parametrize(("accuracy", "fixed"), [("exact", True), ("float32", False)])
def test_a_node_fills_up_runs_only_where_every_bit_is_wanted(folder, expected, monkeypatch, accuracy, fixed):
    monkeypatch.setattr(beginning, "_MIN_TO_TRY", 0)
    asked, features = [], HttpTransport.features

    def noted(transport, request):
        asked.extend([request.fixed_rows] * (request.cut > 1))
        return features(transport, request)

    monkeypatch.setattr(HttpTransport, "features", noted)
    with node_elsewhere(folder) as url, job_near(url, folder, accuracy=accuracy) as job:
        while not asked:  # the node takes some seconds to be ready
            np.testing.assert_allclose(rows_of(job), expected, rtol=1e-3, atol=1e-4)
    assert set(asked) == {fixed}


@pytest.mark.skipif(absence("openvino", "cpu") is not None, reason="OpenVINO is not installed")
def test_the_trainer_computes_by_an_engine_too_and_the_next_job_knows_it(folder, expected, monkeypatch):
    monkeypatch.setattr(beginning, "_MIN_TO_TRY", 0)
    monkeypatch.setattr("frostline.node.trials.selection.Search._why_not", lambda *_: None)  # it is worth a trial
    tried, brief = [], "frostline.node.trials.processes.try_briefly"
    from frostline.engines.trials import try_briefly

    monkeypatch.setattr(brief, lambda *said: tried.append(said[1]) or try_briefly(*said))
    with node_elsewhere(folder) as url:
        for turn in range(2):
            with job_near(url, folder) as job:
                for _ in range(2):
                    rows = rows_of(job, 0)
                    np.testing.assert_allclose(rows, expected, rtol=1e-3, atol=1e-4)
                assert sum(sides(job).values()) == 2 * ROWS
                chosen = {where for part, where in job.where if "frozen" in part and where.startswith("trainer")}
            assert ("openvino" in tried) == (turn == 0)
            assert len(chosen) == 1
            tried.clear()


def test_a_first_job_runs_its_first_rows_at_once_and_tries_engines_after_them(folder, expected, monkeypatch):
    monkeypatch.setattr(beginning, "_MIN_TO_TRY", 0)
    monkeypatch.setattr(both_sides, "_FIRST_S", 60.0)
    done, run, choose = [], TorchLocalPrefix.run, both_sides.Trials.choose

    def noted(prefix, arrays, size):
        done.append(len(arrays[0]))
        return run(prefix, arrays, size)

    def chosen(*said, **more):
        done.append("tried")
        return choose(*said, **more)

    monkeypatch.setattr(TorchLocalPrefix, "run", noted)
    monkeypatch.setattr(both_sides.Trials, "choose", chosen)
    with node_elsewhere(folder) as url, job_near(url, folder, settings={"device_batch": 16}) as job:
        np.testing.assert_allclose(rows_of(job), expected, rtol=1e-3, atol=1e-4)
    assert done[: done.index("tried")] == [8, 8], "as many rows as a run of the device has, and no more"


def test_the_features_of_samples_that_judge_engines_are_the_jobs(folder, expected, monkeypatch):
    """The reference ran on them to be compared with, and nothing runs on them again, in any epoch."""

    def refuses(*_):
        raise OverBudget("this network takes 9 GB: start the node with more --memory")

    found, ran, find = [], [], both_sides.Judges.find
    monkeypatch.setattr(HttpTransport, "profile", refuses)
    monkeypatch.setattr(beginning, "_MIN_TO_TRY", 0)
    monkeypatch.setattr("frostline.node.trials.selection.Search._why_not", lambda *_: None)  # it is worth a trial

    def noted(judges, pixels):
        here = find(judges, pixels)
        found.append(len(here))
        ran.append(len(pixels) - len(here))
        return here

    monkeypatch.setattr(both_sides.Judges, "find", noted)
    once = {"hedge_quantile": 1.0}
    with node_elsewhere(folder) as url, job_near(url, folder, events=[], settings=once) as job:
        for _ in range(2):
            np.testing.assert_allclose(rows_of(job), expected, rtol=1e-3, atol=1e-4)
        assert set(sides(job)) == {0}
    assert sum(found) >= 8, "all of them in the second epoch, and those in the first that came after the trial"
    assert sum(found) + sum(ran) <= 2 * ROWS


@pytest.mark.parametrize("rows", [0, 1, 5, 8, 21])
def test_judges_stand_where_they_were_among_rows_that_are_not_known(rows):
    generator = np.random.default_rng(rows)
    judging = generator.normal(size=(8, 3, 16, 16)).astype(np.float32)

    def run(pixels):
        return pixels.sum(axis=(2, 3)), pixels[:, 0, 0, 0] * 2

    judges = both_sides.Judges(judging, run(judging))
    pixels = generator.normal(size=(rows, 3, 16, 16)).astype(np.float32)
    places = dict(zip(range(0, rows, 3), [7, 0, 3, 3, 1, 2, 5], strict=False))
    for row, place in places.items():
        pixels[row] = judging[place]
    almost = pixels[:1].copy()
    almost[:, -1, -1, -1] += 1.0
    assert judges.find(pixels) == places
    assert judges.find(almost) == {}, "all of a sample is compared"
    rest = np.delete(pixels, list(places), axis=0)
    merged = judges.merge(places, run(rest) if len(rest) else (), rows)
    for mine, theirs in zip(merged, run(pixels), strict=True):
        np.testing.assert_array_equal(mine, theirs)
        assert mine.dtype == theirs.dtype


@pytest.mark.skipif(not has_compiler(), reason=f"torch compiles with {COMPILER}, which is not installed")
def test_an_accelerators_engines_that_are_compiled_are_tried_while_the_job_runs(folder, expected, monkeypatch):
    """The processor stands for an accelerator: a loop that trains elsewhere does not wait for it."""
    names = (REFERENCE, "torch-channels-last", "torch-compiled")
    choices, choose = [], both_sides.Trials.choose
    monkeypatch.setattr(beginning, "_MIN_TO_TRY", 0)
    monkeypatch.setattr(both_sides, "OFFERS", tuple(offer for offer in both_sides.OFFERS if offer.name in names))
    monkeypatch.setattr(both_sides, "is_accelerator", lambda device: device == "cpu")
    monkeypatch.setattr("frostline.node.trials.selection.Search._why_not", lambda *_: None)  # it is worth a trial
    monkeypatch.setattr(
        both_sides.Trials, "choose", lambda *said, **more: choices.append(choose(*said, **more)) or choices[-1]
    )
    with node_elsewhere(folder) as url, job_near(url, folder) as job:
        while len(choices) < 2:
            np.testing.assert_allclose(rows_of(job), expected, rtol=1e-3, atol=1e-4)
        chosen = "trainer" if choices[1].engine == REFERENCE else f"trainer, by {choices[1].engine}"
        until(lambda: any("frozen" in part and where == chosen for part, where in job.where))
        np.testing.assert_allclose(rows_of(job), expected, rtol=1e-3, atol=1e-4)
    first, second = ({trial.engine: trial for trial in choice.trials} for choice in choices)
    assert "torch-compiled" not in first
    assert second["torch-compiled"].samples_per_s > 0
    assert first.keys() < second.keys()


def test_an_engine_that_was_found_stays_where_no_compiled_one_is_faster(folder, expected, monkeypatch):
    choose, told = both_sides.Trials.choose, []

    def chosen(*said, **more):
        told.append(said)
        if len(told) > 1:
            return Choice(engine=REFERENCE, trials=())  # beside a job's runs eager torch may seem the fastest
        choice = choose(*said, **more)
        return replace(choice, engine=next(trial.engine for trial in choice.trials if trial.engine != REFERENCE))

    monkeypatch.setattr(beginning, "_MIN_TO_TRY", 0)
    monkeypatch.setattr(
        both_sides,
        "OFFERS",
        tuple(offer for offer in both_sides.OFFERS if offer.name in (REFERENCE, "torch-channels-last")),
    )
    monkeypatch.setattr(both_sides, "is_accelerator", lambda device: device == "cpu")
    monkeypatch.setattr("frostline.node.trials.selection.Search._why_not", lambda *_: None)  # it is worth a trial
    monkeypatch.setattr(both_sides.Trials, "choose", chosen)
    with node_elsewhere(folder) as url, job_near(url, folder) as job:
        until(lambda: len(told) > 1)
        np.testing.assert_allclose(rows_of(job), expected, rtol=1e-3, atol=1e-4)
        assert any(where.startswith("trainer, by torch-channels-last") for _, where in job.where)


def test_a_job_that_ends_while_an_engine_is_compiled_ends_that_too(folder, monkeypatch):
    begun, closed = threading.Event(), threading.Event()

    def compiles(self, job, accuracy, **_):
        if not begun.is_set():
            begun.set()
            return Choice(engine=REFERENCE, trials=())
        assert closed.wait(60)
        raise Unavailable("the node is stopping")

    monkeypatch.setattr(beginning, "_MIN_TO_TRY", 0)
    monkeypatch.setattr(both_sides, "is_accelerator", lambda device: device == "cpu")
    monkeypatch.setattr(both_sides.Trials, "choose", compiles)
    monkeypatch.setattr(both_sides.Trials, "close", lambda _: begun.is_set() and closed.set())
    events = []
    with node_elsewhere(folder) as url, job_near(url, folder, events=events) as job:
        rows_of(job)
        until(begun.is_set)
    assert closed.is_set()
    assert not [event for event in events if isinstance(event, SetupWarning)], "it is no news that nobody waited for it"


@pytest.mark.parametrize(("device", "can"), [("cpu", True), ("mps", False), ("xpu", False)])
def test_engines_are_tried_where_the_trainers_device_has_one_that_is_ready_soon(device, can):
    context = SimpleNamespace(
        ahead=object(), prefix=SimpleNamespace(lengths=None), device=device, data=range(64), accuracy="float32",
        preprocess=SimpleNamespace(dtype="float32"),
    )  # fmt: skip
    assert both_sides.can_be_tried(context) == can
    assert not both_sides.can_be_tried(SimpleNamespace(**{**vars(context), "accuracy": "exact"}))
    assert not both_sides.can_be_tried(SimpleNamespace(**{**vars(context), "data": range(3)}))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA here")
@pytest.mark.parametrize(("accuracy", "engine", "within"), [("float32", "channels", 5e-3), ("bf16", "bf16", 5e-2)])
def test_an_accelerators_engine_runs_the_trainers_share(folder, expected, monkeypatch, accuracy, engine, within):
    monkeypatch.setattr(beginning, "_MIN_TO_TRY", 0)
    monkeypatch.setattr("frostline.node.trials.selection.Search._why_not", lambda *_: None)  # it is worth a trial
    choices, choose = [], both_sides.Trials.choose
    monkeypatch.setattr(
        both_sides.Trials, "choose", lambda *said, **more: choices.append(choose(*said, **more)) or choices[-1]
    )
    model = network().to("cuda")
    with node_elsewhere(folder) as url, job_near(url, folder, model=model, accuracy=accuracy) as job:
        while not choices:
            scale = np.abs(expected).max()
            np.testing.assert_allclose(rows_of(job), expected, rtol=within, atol=within * scale)
    assert any(engine in trial.engine and trial.samples_per_s for trial in choices[0].trials)


@pytest.mark.parametrize(
    ("row_s", "samples", "rows"),
    [
        (0.02, 1041, 32),  # a first batch takes less time than a trial
        (0.15, 500, 0),
        (0.15, 20, 32),  # no trial pays
        (None, 1041, 32),
    ],
)
def test_a_slow_network_is_tried_before_its_first_rows_if_that_pays(row_s, samples, rows):
    assert beginning.rows_before_trial(32, row_s, samples) == rows


def test_a_slow_networks_first_batch_is_computed_by_the_engine_that_was_found(folder, expected, monkeypatch):
    monkeypatch.setattr(beginning, "_MIN_TO_TRY", 0)
    monkeypatch.setattr(beginning, "rows_before_trial", lambda *_: 0)
    done, run, choose = [], TorchLocalPrefix.run, both_sides.Trials.choose
    monkeypatch.setattr(
        TorchLocalPrefix, "run", lambda prefix, arrays, size: done.append(len(arrays[0])) or run(prefix, arrays, size)
    )
    monkeypatch.setattr(
        both_sides.Trials, "choose", lambda *said, **more: done.append("tried") or choose(*said, **more)
    )
    with node_elsewhere(folder) as url, job_near(url, folder, settings={"device_batch": 16}) as job:
        np.testing.assert_allclose(rows_of(job), expected, rtol=1e-3, atol=1e-4)
        assert job.fallback is None
    assert done[0] == "tried"


def test_a_job_too_short_for_a_trial_computes_nothing_to_know_that(folder, expected, monkeypatch):
    monkeypatch.setattr(beginning, "_MIN_TO_TRY", 0)
    monkeypatch.setattr(both_sides, "_FIRST_S", 60.0)
    choices, choose = [], both_sides.Trials.choose
    monkeypatch.setattr(both_sides, "features", lambda *_: pytest.fail("the reference ran once more"))
    monkeypatch.setattr(
        both_sides.Trials, "choose", lambda *said, **more: choices.append(choose(*said, **more)) or choices[-1]
    )
    with node_elsewhere(folder) as url, job_near(url, folder, settings={"device_batch": 16}) as job:
        np.testing.assert_allclose(rows_of(job), expected, rtol=1e-3, atol=1e-4)
        until(lambda: choices)
        assert job.fallback is None
    assert [choice.engine for choice in choices] == [REFERENCE]
    assert choices[0].trials[0].seconds > 0


def test_a_slow_trainer_knows_from_its_second_run_whether_a_trial_pays(folder, expected, monkeypatch):
    """The first seconds are over while its first run is under way."""
    began, passed = threading.Event(), threading.Event()

    class Waits(threading.Event):
        def wait(self, timeout=None):
            if timeout != 0.125:
                return super().wait(timeout)
            assert began.wait(60)
            monkeypatch.setattr(both_sides, "_FIRST_S", 60.0)
            passed.set()
            return False

    run, choices, choose = TorchLocalPrefix.run, [], both_sides.Trials.choose

    def slow(prefix, arrays, size):
        began.set()
        assert passed.wait(60)
        return run(prefix, arrays, size)

    monkeypatch.setattr(beginning, "_MIN_TO_TRY", 0)
    monkeypatch.setattr(both_sides, "_FIRST_S", 0.125)
    monkeypatch.setattr(both_sides.threading, "Event", Waits)
    monkeypatch.setattr(TorchLocalPrefix, "run", slow)
    monkeypatch.setattr(both_sides, "features", lambda *_: pytest.fail("the reference ran once more"))
    monkeypatch.setattr(
        both_sides.Trials, "choose", lambda *said, **more: choices.append(choose(*said, **more)) or choices[-1]
    )
    with node_elsewhere(folder) as url, job_near(url, folder, settings={"device_batch": 64}) as job:
        np.testing.assert_allclose(rows_of(job), expected, rtol=1e-3, atol=1e-4)
        until(lambda: choices)
        assert job.fallback is None
    assert [choice.engine for choice in choices] == [REFERENCE]


def test_it_is_known_from_the_checks_of_the_network_how_long_a_row_takes_here(folder, expected, monkeypatch):
    """So that a slow trainer takes no more of a fast link than it can do before the node is ready."""
    made, known, shortest = [], [], both_sides.ShortestWait

    def dealing(*said, **more):
        known.append(more["row_s"])
        return shortest(*said, **more)

    of = PartitionedModel.of
    monkeypatch.setattr(PartitionedModel, "of", lambda *said, **more: made.append(of(*said, **more)) or made[-1])
    monkeypatch.setattr(both_sides, "ShortestWait", dealing)
    with node_elsewhere(folder) as url, job_near(url, folder, accuracy="exact") as job:
        np.testing.assert_array_equal(rows_of(job), expected)
    assert known == [{Route(0): made[0].row_s}]
    assert 0 < made[0].row_s < 1
    assert made[0].row_s == made[0].parts.part.row_s[-1]
    elsewhere = replace(made[0], device="cuda")
    assert elsewhere.row_s is None, "an accelerator takes many rows at once"


@pytest.mark.parametrize(
    ("said", "node_is_believed"),
    [
        ({"operations_per_s": 8e10}, 4.0),
        # It has just started: both are estimated, the trainer by the cores that it has here.
        ({"operations_per_s": 0.0, "hardware": "a processor, 3 threads", "cores": (990, 991, 992)}, 3 / len(CORES[1:])),
        ({"operations_per_s": 0.0, "hardware": "some accelerator"}, 200 / len(CORES[1:])),
    ],
)
def test_each_side_is_believed_at_first_to_be_as_fast_as_it_has_measured(
    folder, expected, monkeypatch, said, node_is_believed
):
    priors, shortest, health = [], both_sides.ShortestWait, HttpTransport.health

    def dealing(believed, **more):
        priors.append(believed)
        return shortest(believed, **more)

    monkeypatch.setattr(both_sides, "ShortestWait", dealing)
    monkeypatch.setattr(both_sides, "operations_per_s", lambda _: 2e10)
    monkeypatch.setattr(HttpTransport, "health", lambda transport: replace(health(transport), **said))
    with node_elsewhere(folder) as url, job_near(url, folder, accuracy="exact") as job:
        np.testing.assert_array_equal(rows_of(job), expected)
        (believed,) = priors
        assert believed[Route(job.frost_line.number)] / believed[Route(0)] == pytest.approx(node_is_believed)


def test_a_node_whose_trial_takes_long_computes_its_share_meanwhile(folder, expected, monkeypatch):
    tried, end = threading.Event(), threading.Event()
    found = EngineChoice(engine=REFERENCE, error=0.0, trials=())

    def trial(*_):
        tried.set()
        assert end.wait(60)
        return Measurements(choice=found)

    monkeypatch.setattr(beginning, "_MIN_TO_TRY", 0)
    monkeypatch.setattr(beginning, "_LONG_TRIAL_S", 0.1)
    monkeypatch.setattr(beginning, "pays_for_trial", lambda *_: True)
    monkeypatch.setattr(PartitionedModel, "engine", trial)
    with node_elsewhere(folder) as url, job_near(url, folder, accuracy="float32") as job:
        while not sides(job).get(job.frost_line.number):
            np.testing.assert_allclose(rows_of(job), expected, rtol=1e-4, atol=1e-5)
        assert tried.is_set()
        end.set()
        until(lambda: job.engine == found)
        np.testing.assert_allclose(rows_of(job), expected, rtol=1e-4, atol=1e-5)


def test_of_two_sides_alike_one_tries_a_slow_network_and_the_other_computes(folder, expected, monkeypatch):
    computed, asked, choose, features = threading.Event(), [], both_sides.Trials.choose, HttpTransport.features

    def pays(left, trial_s, found):
        asked.append(found)
        return False

    def noted(transport, request):
        answer = features(transport, request)
        if request.cut > 1:
            computed.set()
        return answer

    def chosen(*said, **more):
        assert computed.wait(60), "the node computes while the trainer tries engines"
        return choose(*said, **more)

    monkeypatch.setattr(beginning, "_MIN_TO_TRY", 0)
    monkeypatch.setattr(beginning, "rows_before_trial", lambda *_: 0)
    monkeypatch.setattr(beginning, "has_same_hardware", lambda *_: True)
    monkeypatch.setattr(beginning, "is_worth_trying", lambda **_: True)
    monkeypatch.setattr(beginning, "pays_for_trial", pays)
    monkeypatch.setattr("frostline.node.trials.selection.Search._why_not", lambda *_: None)  # it is worth a trial
    monkeypatch.setattr(HttpTransport, "features", noted)
    monkeypatch.setattr(both_sides.Trials, "choose", chosen)
    monkeypatch.setattr(PartitionedModel, "engine", lambda *_: pytest.fail("the node tried engines too"))
    with node_elsewhere(folder) as url, job_near(url, folder) as job:
        np.testing.assert_allclose(rows_of(job), expected, rtol=1e-3, atol=1e-4)
        until(lambda: asked)
        assert sides(job)[job.frost_line.number] > 0
        assert job.engine == EngineChoice()
    [found] = asked
    assert found.samples_per_s > 0
    assert found.speed_up > 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_trial_that_breaks_off_in_a_way_nobody_expects_holds_up_no_node(folder, expected, monkeypatch):
    def breaks(*_, **__):
        raise RuntimeError("an engine's own fault")

    asked = []
    monkeypatch.setattr(beginning, "_MIN_TO_TRY", 0)
    monkeypatch.setattr(beginning, "rows_before_trial", lambda *_: 0)
    monkeypatch.setattr(beginning, "has_same_hardware", lambda *_: True)
    monkeypatch.setattr(beginning, "is_worth_trying", lambda **_: True)
    monkeypatch.setattr(beginning, "pays_for_trial", lambda *said: asked.append(said[-1]))
    monkeypatch.setattr(both_sides.Trials, "choose", breaks)
    with node_elsewhere(folder) as url, job_near(url, folder) as job:
        np.testing.assert_allclose(rows_of(job), expected, rtol=1e-3, atol=1e-4)
        until(lambda: asked)
    assert asked == [FoundHere()], "the node decides as if nobody had tried"


def test_rows_of_small_requests_that_wait_share_a_run_and_go_to_their_own():
    sizes, begun, may_end = [], threading.Event(), threading.Event()

    def run(pixels):
        sizes.append(len(pixels))
        begun.set()
        assert may_end.wait(60)
        if len(sizes) == 2:
            raise ModelError("out of memory")
        return pixels * 2, pixels.sum(axis=1)

    runs, rows = both_sides.SharedRuns(run), [np.full((2, 3), float(number)) for number in range(6)]
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(runs, rows[0])]
        assert begun.wait(60)
        for number, few in enumerate(rows[1:], 1):
            asked.append(pool.submit(runs, few))
            until(lambda number=number: runs.waiting == number)
        may_end.set()
        failed = [one for one in asked if one.exception() is not None]
        for one, few in zip(asked, rows, strict=True):
            if one not in failed:
                twice, sums = one.result()
                np.testing.assert_array_equal(twice, few * 2)
                np.testing.assert_array_equal(sums, few.sum(axis=1))
    assert sizes == [2, 8, 8], "one, four of which the first fails, and the other four"
    assert [str(one.exception()) for one in failed] == ["out of memory"]
    assert runs.waiting == 0


def test_a_trainer_that_could_try_no_engine_says_so_and_computes_all_the_same(folder, expected, monkeypatch):
    def fails(*_, **__):
        raise UnsafeArtifact("the graph changes its own weights")

    runs, run = [], TorchLocalPrefix.run

    def noted(prefix, arrays, size):
        runs.append((len(arrays[0]), size))
        return run(prefix, arrays, size)

    monkeypatch.setattr(both_sides, "observed_memory", fails)
    monkeypatch.setattr("frostline.node.trials.selection.Search._why_not", lambda *_: None)  # it is worth a trial
    monkeypatch.setattr(TorchLocalPrefix, "run", noted)
    events, few = [], {"samples_per_request": 3}
    with node_elsewhere(folder) as url, job_near(url, folder, events=events, settings=few) as job:
        np.testing.assert_allclose(rows_of(job), expected, rtol=1e-4, atol=1e-5)
    assert {size - max(2, rows) for rows, size in runs} == {0}, "a run of a few rows is not filled up"
    [told] = [event.reason for event in events if isinstance(event, SetupWarning)]
    assert told == (
        "the trainer's share runs in eager PyTorch, and no engine was tried: the graph changes its own weights"
    )


def test_the_trainer_computes_all_where_the_node_does_not_run_the_network(folder, expected, monkeypatch):
    def profile(self, *_):
        raise OverBudget("this network takes 9 GB: start the node with more --memory")

    monkeypatch.setattr(HttpTransport, "profile", profile)
    events = []
    with node_elsewhere(folder) as url, job_near(url, folder, events=events, accuracy="exact") as job:
        while not (warnings := [event.reason for event in events if isinstance(event, SetupWarning)]):
            np.testing.assert_array_equal(rows_of(job), expected)
        assert set(sides(job)) == {0}
    assert warnings == ["the node does not run the network: this network takes 9 GB: start the node with more --memory"]


def sends_while_checked(monkeypatch, refuse=None):
    """Have the whole network compared with its parts once an upload has ended; the uploads and what they had sent.

    Without bytes of samples no link is known, and these photographs have few.
    """
    ended, uploads, checks = threading.Event(), [], []
    put, equals = HttpTransport.put_prefix, cutting.equals_whole

    class Counting(Exchange):
        def send(self, message):
            if message.method == "PUT":
                uploads.append(message.path)
                if refuse is not None and len(uploads) == 1:
                    raise refuse
            return super().send(message)

    def puts(*arguments, **options):
        try:
            return put(*arguments, **options)
        finally:
            ended.set()

    def compared(*arguments, **options):
        assert ended.wait(60), "nothing was sent before"
        checks.append(len(uploads))
        return equals(*arguments, **options)

    monkeypatch.setattr(measuring, "_TELLING_BYTES", 0)
    monkeypatch.setattr(import_module("frostline.jobs.offload"), "first_batch_bytes", lambda *_: 0)
    monkeypatch.setattr(import_module("frostline.jobs.connect"), "is_loopback", lambda _: False)
    monkeypatch.setattr("frostline.client.http.Exchange", Counting)
    monkeypatch.setattr(HttpTransport, "put_prefix", puts)
    monkeypatch.setattr(cutting, "equals_whole", compared)
    return uploads, checks


def test_weights_travel_once_while_the_network_is_checked(folder, expected, monkeypatch):
    uploads, checks = sends_while_checked(monkeypatch)
    with node_elsewhere(folder) as url, job_near(url, folder, accuracy="exact") as job:
        while len(sides(job)) < 2:
            np.testing.assert_array_equal(rows_of(job), expected)
    assert checks[0] == len(uploads) == 1


def test_what_could_not_be_sent_before_is_sent_once_the_network_was_checked(folder, expected, monkeypatch):
    uploads, checks = sends_while_checked(monkeypatch, refuse=Overloaded("it is full", retry_after_s=0.01))
    with node_elsewhere(folder) as url, job_near(url, folder, accuracy="exact") as job:
        while len(sides(job)) < 2:
            np.testing.assert_array_equal(rows_of(job), expected)
    assert (checks[0], len(uploads)) == (1, 2)


def test_a_network_that_is_refused_takes_its_upload_back(folder, monkeypatch):
    begun, broken = threading.Event(), threading.Event()

    def puts(self, *_):
        begun.set()
        assert broken.wait(60), "nobody broke it off"
        raise Unavailable("it was broken off")

    def refuses(*_, **__):
        assert begun.wait(60), "nothing was sent before"
        raise ModelError("it is another network")

    sends_while_checked(monkeypatch)
    monkeypatch.setattr(HttpTransport, "put_prefix", puts)
    monkeypatch.setattr(HttpTransport, "break_off", lambda _: broken.set())
    monkeypatch.setattr(cutting, "equals_whole", refuses)
    with node_elsewhere(folder) as url, pytest.raises(ModelError, match="another network"):
        job_near(url, folder)
    assert broken.is_set()
    until(lambda: not [thread for thread in threading.enumerate() if thread.name == "frostline-upload-ahead"])


def test_random_views_are_the_same_on_both_sides(folder):
    def views(near):
        with fl.offload(
            network(),
            fl.Dataset(folder),
            preprocess=tiny_preprocess(flip=True),
            near=near,
            accuracy="exact",
            settings=LoaderSettings(samples_per_request=8, device_batch=8),
        ) as job:
            passes = [rows_of(job, epoch) for epoch in range(2)]
            while near is not None and len(sides(job)) < 2:
                passes[1] = rows_of(job, 1)
            return passes, sides(job)

    alone, _ = views(None)
    with node_elsewhere(folder) as url:
        both, counts = views(url)
    assert len(counts) == 2
    for ours, theirs in zip(both, alone, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_loop_that_stops_early_and_goes_on_loses_and_doubles_nothing(folder, expected):
    with node_elsewhere(folder) as url, job_near(url, folder, accuracy="exact") as job:
        for stop in (1, 5):
            for number, _ in enumerate(job.loader(8, shuffle=True, seed=0)):
                if number == stop:
                    break
        np.testing.assert_array_equal(rows_of(job), expected)


def test_a_job_that_is_over_before_the_network_has_arrived_sends_no_more_of_it(folder, expected, monkeypatch):
    begun, ended = threading.Event(), threading.Event()

    def put(*_):
        """As over a link that takes minutes for it, until the call is broken off."""
        begun.set()
        assert ended.wait(60)
        raise Unavailable("the call was broken off")

    monkeypatch.setattr(HttpTransport, "put_prefix", put)
    monkeypatch.setattr(HttpTransport, "break_off", lambda _: ended.set())
    with node_elsewhere(folder) as url:
        with job_near(url, folder, accuracy="exact") as job:
            assert begun.wait(60)
            np.testing.assert_array_equal(rows_of(job), expected)
            assert set(sides(job)) == {0}
            began = time.monotonic()
        assert time.monotonic() - began < 5


@pytest.mark.parametrize("refused", [None, "it takes 9 GB"])
def test_another_process_gets_the_network_when_it_is_known_whether_the_nodes_run_it(refused):
    got = []
    shipment = Shipment(digest="d", artifact=b"network", is_settled=threading.Event())
    thread = threading.Thread(target=lambda: got.append(pickle.loads(pickle.dumps(shipment))))
    thread.start()
    thread.join(0.2)
    assert not got
    shipment.settle(refused)
    thread.join(60)
    [copy] = got
    assert (copy.digest, copy.artifact, copy.refused) == ("d", b"network", refused)
    assert pickle.loads(pickle.dumps(copy)).refused == refused


def test_workers_of_a_loop_compute_what_the_node_does_not_run(folder, expected, monkeypatch):
    def profile(*_):
        raise OverBudget("this network takes 9 GB: start the node with more --memory")

    monkeypatch.setattr(HttpTransport, "profile", profile)
    with node_elsewhere(folder) as url, job_near(url, folder, events=[], accuracy="exact") as job:
        rows_of_workers = DataLoader(
            job.loader(8, shuffle=True, seed=0), batch_size=None, num_workers=1, multiprocessing_context="forkserver"
        )
        rows = torch.cat([batch.features for batch in rows_of_workers]).numpy()
    np.testing.assert_array_equal(rows, expected)


def test_where_node_and_trainer_share_their_cores_the_node_alone_computes(folder):
    settings = NodeSettings(memory_bytes=1 << 28, device_batch=8)
    with start_node((folder.as_uri(),), settings) as node, job_near(node.url, folder, accuracy="exact") as job:
        rows_of(job)
        assert set(sides(job)) == {job.frost_line.number}
        assert "no plan was measured" in str(job.explain())
        assert job.engine.engine == REFERENCE


@pytest.mark.parametrize("accuracy", ["exact", "float32"])
def test_samples_that_came_before_the_trace_are_not_asked_for_again(folder, expected, monkeypatch, accuracy):
    asked, features = [], HttpTransport.features

    def noted(transport, wanted):
        if wanted.cut == 0:
            asked.extend(wanted.samples.ids.tolist())
        return features(transport, wanted)

    def slowly(*said, **options):
        until(lambda: len(asked) >= 64)
        return of(*said, **options)

    of = PartitionedModel.of
    monkeypatch.setattr(HttpTransport, "features", noted)
    for module in ("connect", "offload"):
        monkeypatch.setattr(import_module(f"frostline.jobs.{module}"), "is_loopback", lambda _: False)
    once = {"hedge_quantile": 1.0, "cache_bytes": 1 << 20}
    with node_elsewhere(folder) as url:
        with monkeypatch.context() as patch:
            patch.setattr(PartitionedModel, "of", slowly)
            job = job_near(url, folder, accuracy=accuracy, settings=once)
        with job:
            ahead = set(asked)
            np.testing.assert_allclose(rows_of(job), expected, rtol=1e-4, atol=1e-5)
            assert len(asked) == len(set(asked)) >= sides(job)[0]
            assert {*job.data.samples.ids[Order(size=ROWS, seed=0, epoch=0).indices(0, 8)].tolist()} <= ahead
        asked.clear()
        with job_near(url, folder, accuracy=accuracy, settings=once) as job:
            np.testing.assert_allclose(rows_of(job), expected, rtol=1e-4, atol=1e-5)
        assert len(asked) <= 8, "features of all samples were kept"
