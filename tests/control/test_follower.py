"""A job keeps to what its control plane says, by counts, and goes on where there is none."""

import random
import threading
import time
from contextlib import closing

import numpy as np
import pytest
import torch

from frostline.client.http import HttpTransport
from frostline.control.follower import ControlFollower
from frostline.control.reporter import ControlLink
from frostline.control.settings import ControlledJob
from frostline.control.shares import Amounts, Pace
from frostline.core.config import LoaderSettings, NodeSettings
from frostline.core.errors import SettingError
from frostline.datasets import Dataset
from frostline.jobs.offload import offload
from frostline.node import Node
from frostline.node.http.server import listen
from frostline.prefetch import Tuner
from frostline.tuning import Setting, rule_of
from support.control_planes import Clock, control_plane
from support.faulty import FaultyWay
from support.nodes import make_images, preprocess, request, samples_of, served, until

MADE = []


JOBS = ControlledJob(name="heavy", weight=3.0), ControlledJob(name="light")
LATE = ControlledJob(name="late", ends_at_s=2000.0, work_bytes=1e9)


def follower(url, job, clock, **settings):
    settings = LoaderSettings(control=None, **settings)
    tuner = Tuner(rule_of(settings), clock())
    maximum = Setting(requests=settings.last_requests, window_bytes=settings.window_bytes)
    MADE.append(ControlFollower(ControlLink(f"{url}?job={job}", None), tuner.limit, maximum, clock=clock))
    return MADE[-1], tuner


@pytest.fixture(autouse=True)
def _closed():
    yield
    while MADE:
        MADE.pop().close()


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return make_images(tmp_path_factory.mktemp("images"), 40)


def rows_read(jobs, clock, seconds, read):
    """What each job reads in so many seconds of the clock, each as soon as it may; all report each second."""
    counts = dict.fromkeys(jobs, 0)
    for _ in range(seconds):
        for each in jobs:
            each.report()
        end_s = clock.now_s + 1
        while clock.now_s < end_s:
            waits_s = {each: each.ask() for each in jobs}
            for each, wait_s in waits_s.items():
                if wait_s == 0:
                    nbytes = read()
                    each.count_bytes(
                        nbytes,
                    )
                    counts[each] += nbytes
            clock.now_s = min(end_s, clock.now_s + max(1e-4, min(waits_s.values())))
    return list(counts.values())


@pytest.mark.parametrize("resource", ["requests_per_s", "bytes_per_s"])
def test_two_jobs_at_one_node_share_by_their_weights(tmp_path, images, resource):
    clock = Clock()
    settings = NodeSettings(memory_bytes=96 << 20, device_batch=8)
    asked = request(images, 0, samples=samples_of(images).take(np.arange(2)))
    with (
        Node(settings, (images.as_uri(),)) as running,
        served(running) as address,
        closing(HttpTransport(address)) as node,
        control_plane(tmp_path, clock, jobs=JOBS, **{resource: 40.0}) as (url, state),
    ):

        def read():
            return sum(len(batch) for batch in node.features(asked))

        heavy, light = follower(url, "heavy", clock)[0], follower(url, "light", clock)[0]
        rows_read([heavy, light], clock, 4, read)
        shares = rows_read([heavy, light], clock, 20, read)
        assert shares[0] / shares[1] == pytest.approx(3, rel=0.05)
        capacity = 20 * 40 * (2 if resource == "requests_per_s" else 1)
        assert sum(shares) == pytest.approx(capacity, rel=0.05)
        assert state.held.to_json()[resource] <= 40 * (1 + 1e-9)


def test_what_one_job_leaves_the_other_takes(tmp_path):
    clock = Clock()
    with control_plane(tmp_path, clock, jobs=JOBS, bytes_per_s=1000.0) as (url, state):
        heavy, light = follower(url, "heavy", clock)[0], follower(url, "light", clock)[0]
        heavy.report()
        light.report()
        for _ in range(8):
            heavy.count_bytes(50)
            heavy.report()
            while light.ask() == 0:
                light.count_bytes(100)
            light.report()
            clock.now_s += 1
        assert state.records[1].settings[1] > 600


def test_a_window_takes_the_bounds_of_its_job(tmp_path):
    clock = Clock()
    bounds = []

    class Window:
        def bound(self, **given):
            bounds.append(given)

        def statistics(self):
            return None

    with control_plane(tmp_path, clock, requests=6.0, memory_bytes=4000.0) as (url, _):
        only, tuner = follower(url, "a", clock, requests_in_flight=16, window_bytes=10_000)
        window = Window()
        tuner.begin(window, clock())
        only.report()
        tuner.look(window, stalled_s=0.0, now=clock())
        assert bounds == [{"requests": 16, "window_bytes": 10_000}, {"requests": 6, "window_bytes": 4000}]


def test_a_job_goes_on_with_what_it_heard_where_the_control_plane_is_gone(tmp_path, caplog):
    clock = Clock()
    with control_plane(tmp_path, clock, bytes_per_s=1000.0) as (url, _):
        only, _ = follower(url, "a", clock)
        only.report()
    for _ in range(100):
        clock.now_s += 1
        only.report()
        assert only.ask() == 0
        only.count_bytes(1000)
        assert only.ask() > 0, "the pace is still kept"
    assert len([record for record in caplog.records if "does not answer" in record.message]) == 1


@pytest.mark.parametrize("mode", ["hang", "drips", "says heads only"])
def test_a_control_plane_that_hangs_holds_no_job_up(tmp_path, caplog, monkeypatch, mode):
    monkeypatch.setattr("frostline.control.reporter._DEADLINE_S", 0.2)
    clock = Clock()
    with control_plane(tmp_path, clock, bytes_per_s=1000.0) as (url, _), FaultyWay(url, random.Random(0)) as way:
        only, _ = follower(way.url, "a", clock)
        only.report()
        way.switch_scope(mode)
        for _ in range(2):
            clock.now_s += 1
            began = time.monotonic()
            only.report()
            assert time.monotonic() - began < 5
            assert only.ask() == 0
            only.count_bytes(1000)
            assert only.ask() > 0, "the pace is still kept"
    [said] = [record.message for record in caplog.records if "does not answer" in record.message]
    assert way.url in said
    assert "the node" not in said


@pytest.mark.parametrize("is_heard_first", [False, True])
def test_a_job_waits_shortly_for_a_silent_control_plane_at_its_start_and_its_end(
    tmp_path, caplog, monkeypatch, is_heard_first
):
    monkeypatch.setattr("frostline.control.reporter._DEADLINE_S", 3.0)
    with control_plane(tmp_path, Clock(), bytes_per_s=1000.0) as (url, _), FaultyWay(url, random.Random(0)) as way:
        only, _ = follower(way.url, "a", Clock())
        if not is_heard_first:
            way.switch_scope("hang")
        began = time.monotonic()
        only.begin()
        assert only.wait(lambda: False) is not None
        way.switch_scope("hang")
        only.close()
        assert time.monotonic() - began < 4, "less than two reports wait for"
    assert "the node" not in caplog.text


def test_a_deadline_that_cannot_be_kept_is_logged_once(tmp_path, caplog):
    clock = Clock()
    with control_plane(tmp_path, clock, jobs=[LATE], bytes_per_s=1000.0) as (url, _):
        only, _ = follower(url, "late", clock)
        for _ in range(3):
            only.report()
            clock.now_s += 1
    said = [record.message for record in caplog.records if "cannot end in time" in record.message]
    assert len(said) == 1


def test_without_a_control_plane_a_job_keeps_to_its_own_settings(tmp_path):
    with closing(listen("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    only, _ = follower(f"http://127.0.0.1:{port}", "a", Clock())
    only.begin()
    assert only.wait(lambda: False) is not None
    only.close()


def test_an_address_that_is_none_is_refused():
    for url, said in (("http://x:1?job=a/b", "job must be a name"), ("store", "store")):
        with pytest.raises(SettingError, match=said):
            ControlLink(url, None)


def test_a_request_that_waits_for_its_turn_is_given_up_at_once(tmp_path):
    clock = Clock()
    with control_plane(tmp_path, clock, requests_per_s=0.0) as (url, _):
        only, _ = follower(url, "a", clock)
        rows = only.pace(lambda: iter(()))
        thread = threading.Thread(target=lambda: list(rows))
        thread.start()
        rows.close()
        thread.join(60)
        assert not thread.is_alive()
        only.close()


def test_requests_go_in_the_order_in_which_they_came():
    clock, went = Clock(), []
    only, _ = follower("http://127.0.0.1:1", "a", clock)
    share = Amounts(requests_per_s=1.0)
    only.keep_to(share)

    def request(number, waits):
        only.wait(waits.set)
        went.append(number)

    threads = []
    for number in range(4):
        waits = threading.Event()
        threads.append(threading.Thread(target=request, args=[number, waits]))
        threads[-1].start()
        assert waits.wait(60)
    for number in range(4):
        clock.now_s += 1.01
        only.keep_to(share)
        until(lambda number=number: len(went) > number)
    assert went == [0, 1, 2, 3]
    for thread in threads:
        thread.join()


def test_a_pace_lets_no_more_go_than_its_rate_and_a_quarter_second_on_top():
    pace = Pace(0.0)
    pace.change(Amounts(requests_per_s=20.0), 0.0)
    went = [now_s / 1000 for now_s in range(10_000) if pace.ask(now_s / 1000) == 0]
    assert len(went) == pytest.approx(200, abs=6)
    assert pace.take_usage(10.0).waited_requests


def test_requests_are_paid_with_what_earlier_ones_brought():
    pace = Pace(0.0)
    pace.change(Amounts(bytes_per_s=1000.0), 0.0)
    assert pace.ask(0.0) == 0
    pace.count_bytes(500, 0.0)
    pace.end_request(500, 0.0, 0.0)
    assert pace.expected_bytes == 500
    assert pace.ask(0.0) == pytest.approx(0.5)
    assert pace.ask(0.5) == 0
    assert pace.ask(0.5) == pytest.approx(0.5), "the second one waits though nothing of the first has come"
    pace.count_bytes(200, 0.6, 200)
    pace.end_request(200, 300, 0.6)
    assert pace.ask(0.75) == 0, "what did not come was given back"


def test_a_real_job_reads_the_same_samples_under_control_and_leaves_when_it_ends(tmp_path, images):
    data = Dataset(images.as_uri())
    settings = {"samples_per_request": 4, "cache_bytes": 1 << 20, "max_reorder": 0}
    clock = Clock()
    with control_plane(tmp_path, clock, requests=2.0, bytes_per_s=1e9, memory_bytes=1e9) as (url, state):
        found = []
        for control in (None, f"{url}?job=night"):
            with offload(
                None, data, preprocess=preprocess(), settings=LoaderSettings(control=control, **settings)
            ) as job:
                found.append(np.concatenate([batch.ids for batch in job.arrays(8, shuffle=True, seed=3)]))
                there = [(record.report.job, record.report.kind) for record in state.records]
        assert there == [("night", "window"), ("night", "cache")]
        assert state.records == []
    assert found[0].tolist() == found[1].tolist()


def test_the_bytes_of_a_share_are_those_that_cross_whatever_the_job_makes_of_them(tmp_path, images):
    """Encoded samples cross, and the layers behind the cut, which run here, leave eight numbers of each."""
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.LazyLinear(8), torch.nn.Linear(8, 2))
    model(torch.zeros(1, *preprocess().shape))
    model[:2].requires_grad_(False)
    clock, settings = Clock(), {"samples_per_request": 4, "cache_bytes": 0, "measure_first": False}
    with control_plane(tmp_path, clock, bytes_per_s=1e9) as (url, state):
        own = LoaderSettings(control=f"{url}?job=night", **settings)
        with offload(model, Dataset(images.as_uri()), preprocess=preprocess(), cut=0, settings=own) as job:
            for _ in job.loader(8):
                pass
            crossed = job.statistics().payload_bytes
            assert crossed > len(job.data) * 8 * 4, "more than the features"
            until(lambda: [record.report.moved_bytes for record in state.records] == [crossed])
