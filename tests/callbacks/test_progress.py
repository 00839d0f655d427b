"""How far a job is, in a terminal, in a log and in a notebook."""

import io
import sys
from types import ModuleType, SimpleNamespace

import pytest

import frostline as fl
from frostline.callbacks import JobProgress
from frostline.core.config import NodeSettings
from frostline.core.events import BatchDelivered, EpochFinished, EpochStarted, PhaseStarted, ProgressMade, SetupWarning
from support.images import image_folder, tiny_preprocess


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Displays:
    """IPython's ``display`` with ``raw`` and ``display_id``, which gives a handle with ``update``, as it documents."""

    def __init__(self):
        self.outputs = []

    def __call__(self, data, *, raw, display_id):
        assert raw is True
        assert display_id is True
        versions = [data]
        self.outputs.append(versions)
        return SimpleNamespace(update=lambda data, raw: versions.append(data))


def pass_over(progress, clock, *, batches=4, samples=25, stall_s=0.25):
    progress(EpochStarted(epoch=0, samples=100))
    for _ in range(batches):
        clock.now_s += 1.0
        progress(BatchDelivered(epoch=0, samples=samples, from_cache=0, stall_s=stall_s))
    progress(EpochFinished(epoch=0, samples=100, from_cache=0, seconds=4.0, stall_s=1.0))


def test_a_terminal_has_one_line_that_grows():
    stream, clock = Terminal(), Clock()
    pass_over(JobProgress(stream=stream, clock=clock), clock)
    shown = [line.strip() for line in stream.getvalue().split("\r")]
    half = "epoch 1: [###############...............] 50 of 100, 25 samples/s, waiting 25.0 % of the time, 2.00 s left"
    assert half in shown
    assert shown[-1] == f"epoch 1: [{30 * '#'}] 100 of 100, 25 samples/s, waiting 25.0 % of the time, 4.00 s"
    assert stream.getvalue().count("\n") == 1


def test_a_log_has_one_line_a_pass():
    stream, clock = io.StringIO(), Clock()
    pass_over(JobProgress(stream=stream, clock=clock), clock)
    assert stream.getvalue().startswith("epoch 1: [####")
    assert stream.getvalue().count("\n") == 1


def test_a_notebook_has_one_output_a_pass_that_is_updated():
    displays, clock = Displays(), Clock()
    progress = JobProgress(display=displays, clock=clock)
    progress(PhaseStarted(name="tracing <b>it</b>"))
    pass_over(progress, clock)
    phase, epoch = displays.outputs
    assert "tracing &lt;b&gt;it&lt;/b&gt;" in phase[-1]["text/html"]
    assert "<progress" not in phase[-1]["text/html"], "it is over, and nobody knows how much it was"
    assert 'value="50" max="100"' in epoch[2]["text/html"]
    assert epoch[-1]["text/plain"].endswith("100 of 100, 25 samples/s, waiting 25.0 % of the time, 4.00 s")


def test_a_notebook_is_not_flooded():
    displays, clock = Displays(), Clock()
    progress = JobProgress(display=displays, clock=clock)
    progress(PhaseStarted(name="copying"))
    for done in range(1000):
        clock.now_s += 0.001
        progress(ProgressMade(done=done, total=1000))
    assert len(displays.outputs[0]) <= 4


def test_it_is_a_bar_where_a_kernel_runs_and_text_in_another_shell(monkeypatch):
    ipython, display = ModuleType("IPython"), ModuleType("IPython.display")
    displays = display.display = Displays()
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    ipython.get_ipython = lambda: SimpleNamespace(kernel=object())
    JobProgress()(PhaseStarted(name="tracing"))
    assert len(displays.outputs) == 1
    ipython.get_ipython = lambda: SimpleNamespace()
    JobProgress()(PhaseStarted(name="tracing"))
    assert len(displays.outputs) == 1


def test_a_job_still_warns():
    with pytest.warns(UserWarning, match="run here"):
        JobProgress(stream=io.StringIO())(SetupWarning(reason="the frozen layers run here"))


def test_a_loader_of_a_job_fills_it(tmp_path):
    displays, node = Displays(), NodeSettings(memory_bytes=1 << 28)
    data, preprocess = fl.Dataset(image_folder(tmp_path, per_class=3)), tiny_preprocess()
    with fl.offload(None, data, preprocess=preprocess, node=node, on_event=JobProgress(display=displays)) as job:
        samples = sum(len(batch.labels) for batch in job.loader(4))
    assert f"{samples} of {samples}" in displays.outputs[-1][-1]["text/plain"]
