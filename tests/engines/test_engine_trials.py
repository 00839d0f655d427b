"""Batches and threads are chosen by what was measured, among all that were to be tried."""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from frostline.core import REFERENCE
from frostline.engines.catalog import absence, build
from frostline.engines.protocols import evaluation_pixels
from frostline.engines.trials import Subject, features, try_engine
from support.prefixes import pixels, small_prefix

ROWS, THREADS = (32, 8), (2, 1)
PREFIX = small_prefix()
LAST = PREFIX.cuts[-1].number
PIXELS = pixels(24)


def subject(folder, *, rows=ROWS, threads=THREADS):
    return Subject(
        graph=PREFIX.graph,
        cuts=PREFIX.cuts,
        tensors=PREFIX.tensors,
        pixels=PIXELS,
        levels=None,
        device="cpu",
        rows=rows,
        threads=threads,
        folder=folder,
    )


def clock_of(*runs_s):
    """Runs take so long, in their order; each of them asks for the time twice."""
    now_s = 0.0
    for run_s in runs_s:
        yield now_s
        now_s += run_s
        yield now_s
    raise AssertionError("more was run than there was to measure")


def tried(folder, name, *settings, reference=None, **options):
    """A trial whose settings take so long a run, in the order in which they are tried, five runs each."""
    runs = [run_s for setting in settings for run_s in (setting if isinstance(setting, list) else [setting] * 5)]
    clock = clock_of(*runs)
    return try_engine(subject(folder, **options), name, LAST, reference, clock=lambda: next(clock))


@pytest.fixture(scope="module")
def reference():
    made = build(REFERENCE, PREFIX.graph, PREFIX.cuts, PREFIX.tensors, cut=LAST)
    return features(made, evaluation_pixels(PIXELS), LAST)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("converted")


CASES = [
    ((0.32, 0.08, 0.32), (2, 32)),  # as fast: what is to be kept comes first
    ((0.32, 0.04, 0.04), (2, 8)),
    ((0.32, 0.08, 0.16), (1, 32)),
    ((0.32, 0.04, 0.02), (1, 8)),  # other threads are tried at the best batch
    ((0.32, 0.077, 0.31), (2, 32)),  # what is within the noise is no gain
]


@pytest.mark.parametrize(
    ("name", "seconds", "chosen"),
    [("torch-channels-last", *case) for case in CASES] + [(name, *CASES[3]) for name in ("openvino", "onnxruntime")],
)
def test_the_fastest_batch_and_number_of_threads_are_chosen(name, seconds, chosen, folder, reference):
    if why_not := absence(name, "cpu"):
        pytest.skip(why_not)
    found = tried(folder, name, *seconds, reference=reference)
    assert found.why_not is None
    assert (found.threads, found.rows) == chosen
    place = {(2, 32): 0, (2, 8): 1}.get(chosen, 2)
    assert found.seconds == pytest.approx(seconds[place] / chosen[1])
    assert found.error < 1e-5
    assert found.load_bytes >= found.weight_bytes > 0


def test_runs_that_a_neighbour_made_longer_do_not_choose_fewer_threads(folder, reference):
    """Whoever waits for two threads is held up by a neighbour more than who has one, and the choice is kept."""
    held_up = [0.1, 0.11, 0.5, 0.5, 0.5]
    found = tried(folder, "torch-channels-last", held_up, [0.3] * 5, reference=reference, rows=(32,))
    assert (found.threads, found.rows) == (2, 32)
    assert found.seconds == pytest.approx(0.5 / 32)


def test_runs_nothing_where_there_is_one_choice(folder, reference):
    found = tried(folder, "torch-channels-last", 0.1, reference=reference, rows=(8,), threads=(1,))
    assert (found.threads, found.rows) == (1, 8)


def test_seconds_of_a_trial_are_those_of_its_own_threads(folder, reference, monkeypatch):
    ticks = iter(range(1000))
    monkeypatch.setattr("frostline.engines.trials.time.process_time", lambda: 0.8 * next(ticks))
    found = try_engine(subject(folder, rows=(8,), threads=(2,)), "torch-channels-last", LAST, reference)
    assert found.seconds == pytest.approx(0.8 / 2 / 8)


class Watching(TorchDispatchMode):
    """Notes the number of threads at each convolution."""

    def __init__(self):
        super().__init__()
        self.threads = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "conv" in func.name():
            self.threads.add(torch.get_num_threads())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_an_engine_of_torch_runs_on_its_own_number_of_threads(threads):
    made = build(
        "torch-channels-last", PREFIX.graph, PREFIX.cuts, PREFIX.tensors, cut=LAST, threads=threads, max_rows=8
    )
    before = torch.get_num_threads()
    with Watching() as watching:
        (values,) = made.run(PIXELS[:8], LAST)
    assert watching.threads == {threads}
    assert torch.get_num_threads() == before
    assert np.isfinite(values).all()
