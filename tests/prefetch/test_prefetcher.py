"""The driver against a scripted transport: threads, failures, closing."""

import itertools
import signal
import threading
import time
from queue import Empty, SimpleQueue

import numpy as np
import pytest

from frostline.core import FeatureBatch, Samples
from frostline.core.config import LoaderSettings
from frostline.core.errors import NodeUnreachable, OverBudget, Overloaded, StoreUnavailable
from frostline.core.events import RequestFinished, RequestHedged, RequestRetried, SampleSkipped
from frostline.prefetch import Prefetcher, Window, plan_requests
from frostline.testing import Act, ScriptedTransport
from frostline.wire.messages import FeatureRequest
from support.mixing import one_way
from support.threads import no_thread_is_left


def table(count):
    ids = np.arange(count, dtype=np.int64)
    objects = [f"{item}.jpg" for item in ids]
    zeros = np.zeros(count, np.int64)
    return Samples(ids=ids, objects=objects, offsets=zeros, lengths=zeros + 8, labels=zeros)


def prefetcher(fetch, *, count=64, events=None, **settings):
    chosen = LoaderSettings(**{"samples_per_request": 8, "requests_in_flight": 4, "retry_for_s": 20, **settings})
    order = np.arange(count)
    asked = plan_requests(table(count), order, order, one_way(chosen.samples_per_request, 16))
    return Prefetcher(
        Window(asked, chosen),
        fetch,
        threads=chosen.requests_in_flight,
        clock=time.monotonic,
        on_event=(events if events is not None else []).append,
    )


def features(transport):
    return lambda ask: transport.features(
        FeatureRequest(data="memory://", samples=ask.samples, prefix="0" * 64, cut=ask.route.cut, preprocess={})
    )


def deliveries_until(deliveries, rows):
    came = []
    while sum(len(item.batch) for item in came) < rows:
        came.append(next(deliveries))
    return came


def ids_of(deliveries):
    return [int(item) for delivery in deliveries for item in delivery.batch.ids]


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    with no_thread_is_left():
        yield


def test_every_sample_comes_once_in_order_with_its_own_activations():
    with prefetcher(features(ScriptedTransport())) as deliveries:
        came = list(deliveries)
    assert ids_of(came) == list(range(64))
    assert all((item.batch.tensors[0][:, 0] == item.batch.ids).all() for item in came)


def test_requests_go_on_while_the_consumer_computes():
    transport = ScriptedTransport()
    with prefetcher(features(transport)) as deliveries:
        assert transport.wait_for_requests(8)
        assert ids_of(deliveries) == list(range(64))


def test_a_node_that_dies_in_the_middle_and_comes_back_loses_and_doubles_nothing():
    transport = ScriptedTransport(otherwise=Act(rows_per_batch=2, gate="middle", gate_after=4))
    events = []
    with prefetcher(features(transport), events=events) as deliveries:
        came = [next(deliveries), next(deliveries)]
        assert transport.wait_for_requests(2)
        transport.go_down()
        assert transport.wait_for_requests(4), "it is asked again while the consumer computes"
        transport.open("middle")
        transport.come_back()
        came += deliveries
    assert ids_of(came) == list(range(64))
    assert any(isinstance(event, RequestRetried) for event in events)
    asked = [request.samples.ids.tolist() for request in transport.requests]
    assert [4, 5, 6, 7] in asked, "the rows that had arrived are not asked for again"


@pytest.mark.parametrize(
    "error", [NodeUnreachable("reset"), StoreUnavailable("503"), Overloaded("busy", retry_after_s=0.01)]
)
def test_retries_transient_errors(error):
    transport = ScriptedTransport([Act(), Act(error=error, error_after=3)])
    events = []
    with prefetcher(features(transport), events=events) as deliveries:
        assert ids_of(deliveries) == list(range(64))
    (retried,) = [event for event in events if isinstance(event, RequestRetried)]
    assert (retried.samples, retried.attempt, retried.reason) == (5, 2, str(error))


def test_a_node_that_stays_away_ends_the_job_and_names_the_setting():
    transport = ScriptedTransport()
    transport.go_down()
    with (
        prefetcher(features(transport), retry_for_s=0.15) as deliveries,
        pytest.raises(NodeUnreachable, match=r"scripted node is down.*retry_for_s"),
    ):
        next(deliveries)


@pytest.mark.parametrize("error", [OverBudget("32 samples need 3 GB, the node may use 2"), KeyError("a mistake")])
def test_raises_permanent_errors_at_once(error):
    transport = ScriptedTransport([Act(gate="never"), Act(error=error)])
    with prefetcher(features(transport)) as deliveries, pytest.raises(type(error)):
        next(deliveries)


def test_closing_early_frees_threads_that_wait_for_the_node():
    transport = ScriptedTransport([Act()], otherwise=Act(gate="never"))
    with prefetcher(features(transport)) as deliveries:
        assert len(next(deliveries).batch) == 8
        assert transport.wait_for_requests(3)
    deliveries.close()
    with pytest.raises(ValueError, match="closed"):
        next(deliveries)


def test_a_pass_may_be_closed_in_its_own_thread_as_by_the_garbage_collector():
    closed, failures = threading.Event(), []

    def fetch(ask):
        try:
            deliveries.close()
        except RuntimeError as error:
            failures.append(error)
        closed.set()
        yield FeatureBatch(ids=ask.samples.ids)

    deliveries = prefetcher(fetch, requests_in_flight=1)
    deliveries.__enter__()
    assert closed.wait(60)
    deliveries.close()
    assert not failures


def test_an_interrupt_gets_through_while_the_consumer_waits():
    main = threading.main_thread().ident
    transport = ScriptedTransport(otherwise=Act(gate="never"))
    never = SimpleQueue()

    def fetch(ask):
        with pytest.raises(Empty):
            never.get(timeout=0.2)  # by now the consumer waits
        signal.pthread_kill(main, signal.SIGINT)
        return features(transport)(ask)

    # Outermost, for a machine on which the consumer does not wait by now.
    with pytest.raises(KeyboardInterrupt), prefetcher(fetch, requests_in_flight=1) as deliveries:
        next(deliveries)


def test_a_late_request_is_hedged_and_its_first_attempt_is_closed():
    acts = [Act()] * 25 + [Act(gate="never")]
    transport, events = ScriptedTransport(acts), []
    with prefetcher(features(transport), count=26 * 8, events=events, hedge_quantile=0.5) as deliveries:
        assert ids_of(deliveries) == list(range(26 * 8))
    hedged = [event.samples for event in events if isinstance(event, RequestHedged)]
    assert hedged == [8] * (len(transport.requests) - 26)
    assert hedged, "the first attempt would never have been answered"
    assert sum(isinstance(event, RequestFinished) for event in events) == 26, "an attempt that was given up is not one"


class Slow:
    """An answer that never comes, and whose end has to be waited for."""

    def __init__(self, may_end):
        self._may_end = may_end
        self.is_ending = threading.Event()

    def __iter__(self):
        return self

    def __next__(self):
        assert self.is_ending.wait(60)
        raise StopIteration

    def close(self):
        self.is_ending.set()
        assert self._may_end.wait(60)


def test_the_end_of_an_answer_that_was_given_up_holds_nothing_up():
    others, may_end = features(ScriptedTransport()), threading.Event()
    asked, slow = itertools.count(), Slow(may_end)

    def fetch(ask):
        return slow if next(asked) == 25 else others(ask)

    with prefetcher(fetch, count=50 * 8, hedge_quantile=0.5) as deliveries:
        came = ids_of(deliveries_until(deliveries, 50 * 8))
        assert slow.is_ending.wait(60), "it was given up"
        may_end.set()
    assert came == list(range(50 * 8))


def test_with_slack_what_arrived_does_not_wait_for_what_is_missing():
    transport = ScriptedTransport([Act(gate="first")])
    with prefetcher(features(transport), max_reorder=None, hedge_quantile=1) as deliveries:
        came = [next(deliveries) for _ in range(7)]
        assert sorted(ids_of(came)) == list(range(8, 64))
        assert all(item.stop == 0 for item in came)
        transport.open("first")
        came += deliveries
    assert sorted(ids_of(came)) == list(range(64))


def test_a_generator_that_cannot_be_closed_from_outside_is_waited_for():
    release, running = threading.Event(), threading.Event()

    def fetch(ask):
        running.set()
        release.wait()
        yield FeatureBatch(ids=ask.samples.ids)

    with prefetcher(fetch, requests_in_flight=1) as deliveries:
        assert running.wait(60)
        threading.Timer(0.05, release.set).start()
    assert deliveries.statistics().rows_handed_out == 0


def test_unreadable_samples_are_reported_once_and_leave_no_hole():
    transport = ScriptedTransport(unreadable={5: "truncated", 40: "no JPEG"})
    events = []
    with prefetcher(features(transport), events=events) as deliveries:
        came = ids_of(deliveries)
    assert came == [index for index in range(64) if index not in (5, 40)]
    skipped = [(event.id, event.object, event.reason) for event in events if isinstance(event, SampleSkipped)]
    assert skipped == [(5, "5.jpg", "truncated"), (40, "40.jpg", "no JPEG")]


def test_reports_finished_requests_to_the_observer():
    events = []
    with prefetcher(features(ScriptedTransport()), events=events) as deliveries:
        list(deliveries)
    finished = [event for event in events if isinstance(event, RequestFinished)]
    assert sum(item.payload_bytes for item in finished) == 64 * 16
    assert sum(item.samples for item in finished) == 64
    assert all(item.seconds >= 0 for item in finished)


def test_the_network_goes_on_while_answers_that_are_here_are_computed():
    turn, asked = threading.Event(), SimpleQueue()

    class Computed:
        """An answer whose rows wait for a processor."""

        def __init__(self, ask):
            asked.put(len(ask.samples))
            self._ids, self._left, self._tell = ask.samples.ids, 1, None

        def when_received(self, tell):
            self._tell = tell

        def __iter__(self):
            return self

        def __next__(self):
            if not self._left:
                raise StopIteration
            self._left = 0
            self._tell()
            assert turn.wait(60)
            return FeatureBatch(ids=self._ids, tensors=(np.zeros((len(self._ids), 16), np.uint8),))

    with prefetcher(Computed, count=200, requests_in_flight=2) as rows:
        before = sum(asked.get(timeout=60) for _ in range(4))
        assert before == 4 * 8, "four whole requests"
        turn.set()
        assert ids_of(rows) == list(range(200))


def test_encoded_samples_travel_at_cut_0():
    transport = ScriptedTransport()

    def fetch(ask):
        return transport.features(FeatureRequest(data="m", samples=ask.samples, prefix=None, cut=0, preprocess={}))

    with prefetcher(fetch) as deliveries:
        encoded = [bytes(item) for delivery in deliveries for item in delivery.batch.encoded]
    assert [int.from_bytes(item, "little") for item in encoded] == list(range(64))
