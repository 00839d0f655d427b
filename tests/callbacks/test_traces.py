"""What a job does is written as spans: in a file that Perfetto opens, and for OpenTelemetry."""

import json

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import frostline as fl
from frostline.callbacks import OpenTelemetryTrace, TraceFile
from frostline.callbacks.traces import Span, SpanMaker
from frostline.core import Route
from frostline.core.events import (
    BatchDelivered,
    EpochFinished,
    EpochStarted,
    PhaseStarted,
    RequestFinished,
    RequestRetried,
    StepFinished,
)
from support.commands import run, run_json
from support.images import image_folder, tiny_preprocess
from support.networks import Small

BATCH = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return image_folder(tmp_path_factory.mktemp("images"), per_class=4)


def spans_of(*timed):
    maker = SpanMaker()
    return [span for now_s, event in timed for span in maker.take(event, now_s)]


def times(spans):
    return [(span.name, span.began_s, span.ended_s) for span in spans]


def test_waits_and_steps_fill_their_epoch_and_phases_come_before_it():
    delivered = {"epoch": 0, "samples": 4, "from_cache": 1}
    spans = spans_of(
        (0.0, PhaseStarted(name="tracing the network")),
        (2.0, EpochStarted(epoch=0, samples=8)),
        (3.0, BatchDelivered(**delivered, stall_s=1.0)),
        (3.5, StepFinished(epoch=0, step=1, steps=2, samples=4, loss=1.0)),
        (5.0, BatchDelivered(**delivered, stall_s=0.5)),
        (6.0, EpochFinished(epoch=0, samples=8, from_cache=2, seconds=4.0, stall_s=1.5)),
    )
    assert times(spans) == [
        ("tracing the network", 0.0, 2.0),
        ("wait", 2.0, 3.0),
        ("step", 3.0, 4.5),
        ("wait", 4.5, 5.0),
        ("step", 5.0, 6.0),
        ("epoch", 2.0, 6.0),
    ]
    assert spans[1].attributes == {"samples": 4, "from_cache": 1}


def test_a_request_begins_when_it_was_sent_and_says_its_way():
    [span] = spans_of((9.0, RequestFinished(samples=4, payload_bytes=100, seconds=2.5, route=Route(3, "fp16"))))
    about = {"samples": 4, "bytes": 100, "cut": 3, "codec": "fp16"}
    assert span == Span(name="request", began_s=6.5, ended_s=9.0, attributes=about)


def test_other_events_are_moments_and_no_text_of_theirs_is_kept():
    reason = "http://user:secret@store"
    [span] = spans_of((1.0, RequestRetried(samples=4, attempt=2, delay_s=0.5, reason=reason)))
    assert span == Span(
        name="request_retried", began_s=1.0, ended_s=1.0, attributes={"samples": 4, "attempt": 2, "delay_s": 0.5}
    )


def test_a_loop_that_breaks_off_ends_its_epoch_with_the_trace():
    maker = SpanMaker()
    assert not list(maker.take(EpochStarted(epoch=0, samples=8), 1.0))
    assert times(maker.end(4.0)) == [("epoch", 1.0, 4.0)]
    assert not list(maker.end(5.0))


def trained(folder, trace):
    """Both passes of a loop with a network; the statistics of its job."""
    model = fl.freeze(Small().train(), "body", input_shape=(3, 32, 32))
    with fl.offload(model, fl.Dataset(folder), preprocess=tiny_preprocess(), on_event=trace) as job:
        for epoch in range(2):
            for batch in job.loader(BATCH, epoch=epoch):
                job.head(batch.features).sum().backward()
        return job.statistics()


def test_the_file_has_every_request_and_each_wait_within_its_epoch(folder, tmp_path):
    path = tmp_path / "trace.json"
    with TraceFile(path) as trace:
        statistics = trained(folder, trace)
    events = json.loads(path.read_text())
    named = {
        name: [event for event in events if event["name"] == name] for name in ("epoch", "wait", "step", "request")
    }
    assert len(named["epoch"]) == 2
    assert sum(event["args"]["samples"] for event in named["wait"]) == statistics.samples
    begun = [event for event in named["request"] if event["ph"] == "b"]
    ended = {event["id"]: event["ts"] for event in named["request"] if event["ph"] == "e"}
    assert len(begun) == len(ended) == statistics.answered
    assert all(event["ts"] <= ended[event["id"]] for event in begun)
    for event in (*named["wait"], *named["step"]):
        assert any(
            epoch["ts"] - 1 <= event["ts"] and event["ts"] + event["dur"] <= epoch["ts"] + epoch["dur"] + 1
            for epoch in named["epoch"]
        )


def test_opentelemetry_gets_what_belongs_to_an_epoch_as_its_children(folder):
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with OpenTelemetryTrace(provider.get_tracer("loop")) as trace:
        statistics = trained(folder, trace)
    spans = exporter.get_finished_spans()
    epochs = {span.context.span_id: span for span in spans if span.name == "epoch"}
    assert sorted(span.attributes["epoch"] for span in epochs.values()) == [0, 1]
    waits = [span for span in spans if span.name == "wait"]
    assert sum(span.attributes["samples"] for span in waits) == statistics.samples
    assert {span.parent.span_id for span in waits} == set(epochs)
    assert all(span.start_time <= span.end_time for span in spans)


def test_the_verb_writes_a_trace_beside_its_run_and_says_where_it_cannot(capsys, folder, shared_node, tmp_path):
    path = tmp_path / "trace.json"
    how = ("--data", folder, "--model", "support.networks:Small", "--until", "stem", "--epochs", 1)
    how = (*how, "--near", shared_node.url)
    report = run_json(capsys, "train", *how, "--trace", path)
    names = {event["name"] for event in json.loads(path.read_text())}
    assert {"tracing the network", "epoch", "wait", "step", "request", "evaluated"} <= names
    assert report["losses"]
    code, _, err = run(capsys, "train", *how, "--trace", tmp_path / "nowhere" / "trace.json")
    assert code == 2
    assert "the trace cannot be written to" in err
