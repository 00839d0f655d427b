"""Logs of verbs that run for long: one JSON object a line, with what happened and without secrets."""

import json
import logging
import os
import signal
import subprocess
import sys
from datetime import datetime

import pytest

from frostline.cli import logs
from frostline.cli.logs import EventLog
from frostline.core.events import (
    BatchDelivered,
    EpochStarted,
    NodeLeft,
    RowsNotFinite,
    SampleSkipped,
    StepFinished,
    WaitingForRows,
)
from support.commands import run

SECRET = "hunter2"


@pytest.fixture
def lines(capsys):
    """What was logged by now, line by line; structured logs end with the test."""
    logs.begin_logs("json")
    yield lambda: read(capsys.readouterr().err)
    logs.end_logs()


def read(text):
    found = [json.loads(line) for line in text.splitlines()]
    for line in found:
        assert datetime.fromisoformat(line["time"]).tzinfo is not None
        assert line["level"] in {"info", "warning", "error"}
        assert isinstance(line["event"], str)
    return found


def about(line):
    return {name: value for name, value in line.items() if name not in ("time", "level")}


def test_an_event_is_logged_by_its_name_with_its_fields_and_trouble_as_a_warning(lines):
    on_event = EventLog(clock=lambda: 0.0)
    on_event(EpochStarted(epoch=2, samples=30))
    on_event(SampleSkipped(id=3, object="a/b.jpg", reason="is no image"))
    started, skipped = lines()
    assert about(started) == {"event": "epoch_started", "epoch": 2, "samples": 30}
    assert started["level"] == "info"
    assert about(skipped) == {
        "event": "sample_skipped",
        "id": 3,
        "object": "a/b.jpg",
        "reason": "is no image",
        "changed": False,
    }
    assert skipped["level"] == "warning"


def test_the_first_row_that_is_not_finite_is_a_warning_and_the_rest_is_counted(lines):
    now = [0.0]
    on_event = EventLog(clock=lambda: now[0])
    for total in (2, 4, 6):
        on_event(RowsNotFinite(rows=2, total=total, first=f"sample {total}"))
    now[0] = 10.0
    on_event(BatchDelivered(epoch=0, samples=8, from_cache=0, stall_s=0.0))
    first, progress = lines()
    assert about(first) == {"event": "rows_not_finite", "rows": 2, "total": 2, "first": "sample 2"}
    assert first["level"] == "warning"
    assert progress["nonfinite"] == 6


def test_what_happens_for_each_batch_is_summed_and_logged_every_ten_seconds(lines):
    now = [0.0]
    on_event = EventLog(clock=lambda: now[0])
    for step in range(1, 21):
        now[0] = float(step)
        on_event(BatchDelivered(epoch=0, samples=8, from_cache=0, stall_s=0.25))
        if step not in (10, 20):
            on_event(StepFinished(epoch=0, step=step, steps=50, samples=8, loss=float("nan") if step == 9 else 0.5))
    first, second = lines()
    assert about(first) == {
        "event": "progress",
        "epoch": 0,
        "step": 9,
        "steps": 50,
        "samples": 8,
        "loss": "nan",
        "samples_per_s": 8.0,
        "stall_share": 0.25,
    }
    assert second["step"] == 19


def test_a_wait_is_logged_while_it_lasts_and_counted_once(lines):
    now = [0.0]
    on_event = EventLog(clock=lambda: now[0])
    on_event(EpochStarted(epoch=0, samples=64))
    lines()
    for second in range(1, 13):
        now[0] = float(second)
        on_event(WaitingForRows(requests_in_flight=2))
    now[0] = 12.5
    on_event(BatchDelivered(epoch=0, samples=8, from_cache=0, stall_s=12.5))
    now[0] = 20.0
    on_event(BatchDelivered(epoch=0, samples=8, from_cache=0, stall_s=0.5))
    first, second = (about(line) for line in lines())
    assert (first["stall_share"], first["samples_per_s"]) == (1.0, 0.0)
    assert second["stall_share"] == pytest.approx(0.3)


@pytest.mark.parametrize(
    "text",
    [
        f"https://me:{SECRET}@store/a.jpg was not answered",
        f"https://store/a.jpg?X-Amz-Signature={SECRET}&a=b: 403",
        f"'s3://key:{SECRET}@bucket/x'",
    ],
)
def test_passwords_and_signatures_of_addresses_are_not_logged_whoever_logs_them(lines, text):
    EventLog()(NodeLeft(url=text, reason=text))
    logs.log("node_ready", roots=[text], by={"one": text})
    logging.getLogger("someone").warning("cannot read %s", text)
    try:
        raise OSError(text)
    except OSError:
        logging.getLogger("someone").exception("failed")
    found = lines()
    assert len(found) == 4
    assert SECRET not in json.dumps(found)
    assert found[2]["message"].startswith("cannot read ")
    assert "OSError" in found[3]["exception"]


def test_a_text_of_any_length_is_a_line_of_bounded_length(lines):
    text = "a" * 100_000
    logs.log("odd", names=[text], by={"one": f"s3://me:{SECRET}@{text}"})
    logging.getLogger("someone").warning("cannot read %s", text)
    for line in lines():
        assert len(json.dumps(line)) < 40_000
        assert " characters more)" in json.dumps(line)
        assert SECRET not in json.dumps(line)


def test_fields_cannot_take_the_place_of_the_time_and_the_level(lines):
    logs.log("odd", time="never", level=logging.WARNING)
    (line,) = lines()
    assert line["level"] == "warning"
    assert line["time"] != "never"


def test_extracting_logs_one_json_object_a_line_and_its_result_stays_alone_on_stdout(capsys, folder, near, tmp_path):
    about = ("--data", folder, "--model", "support.networks:Small", "--until", "stem", *near)
    options = ("--out", tmp_path / "features.parquet", "--log-format", "json", "--json")
    code, out, err = run(capsys, "extract", *about, *options)
    assert code == 0, err
    assert json.loads(out)["samples"] == 24
    assert {"phase_started", "weights_loaded", "epoch_started", "epoch_finished"} <= {
        line["event"] for line in read(err)
    }


def test_training_logs_its_epochs_and_scores(capsys, folder, near):
    about = ("--data", folder, "--model", "support.networks:Small", "--until", "stem", *near)
    code, _, err = run(capsys, "train", *about, "--epochs", "2", "--batch-size", "8", "--log-format", "json")
    assert code == 0, err
    evaluated = [line for line in read(err) if line["event"] == "evaluated"]
    assert [line["epoch"] for line in evaluated] == [0, 1]
    assert all("accuracy" in line["scores"] for line in evaluated)


def test_a_failure_is_a_line_too_and_the_next_command_speaks_as_ever(capsys, folder, tmp_path):
    about = ("--data", tmp_path / "none", "--model", "support.networks:Small", "--until", "stem")
    before = list(logging.getLogger().handlers)
    code, _, err = run(capsys, "train", *about, "--log-format", "json")
    (line,) = [line for line in read(err) if line["event"] == "failed"]
    assert code == 2
    assert line["level"] == "error"
    assert "none" in line["message"]
    assert logging.getLogger().handlers == before
    code, _, err = run(capsys, "train", *about)
    assert code == 2
    assert err.splitlines()[-1] == f"frostline: {line['message']}"


def command(*arguments):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    started = [sys.executable, "-c", "from frostline.cli import main; main()", *map(str, arguments)]
    return subprocess.Popen(
        started, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


@pytest.mark.parametrize(
    ("verb", "options", "ready", "ended"),
    [
        ("serve", ("--listen", "127.0.0.1:0", "--memory", "256MiB"), "node_ready", "node_stopped"),
        ("io", ("--memory", "64MiB", "--node-memory", "256MiB"), "io_service_ready", "io_service_stopping"),
    ],
)
def test_a_service_logs_its_beginning_and_its_end(verb, options, ready, ended, folder, tmp_path):
    tmp_path.chmod(0o700)
    options += ("--socket", tmp_path / "io.sock") if verb == "io" else ()
    with command(verb, "--data-root", folder, *options, "--log-format", "json", "--json") as service:
        try:
            url = json.loads(service.stdout.readline())["url"]
            service.send_signal(signal.SIGTERM)
            found = read(service.communicate(timeout=200)[1])
        finally:
            service.kill()
    assert [line["event"] for line in found] == [ready, ended]
    assert {line["url"] for line in found} == {url}
