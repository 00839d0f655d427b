"""A run that was killed goes on with the losses of a run that nothing broke off."""

import errno
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from unittest.mock import Mock

import pytest

from frostline.cli.train import FREE, train
from frostline.core.config import NodeSettings
from frostline.core.errors import NodeUnreachable
from frostline.core.files import write_errors
from frostline.training.report.steps import RecordedSteps
from frostline.training.run_config import own_folder, write_tensors
from frostline.training.verify import compare_steps
from support.commands import run, run_json, trained
from support.images import image_folder

pytestmark = pytest.mark.promise("kept", mended="a run that could not read its checkpoints deleted them and began anew")

SMALL = ("--model", "support.networks:Small", "--until", "stem", "--accuracy", "exact", "--augment")
HOW = ("--epochs", "3", "--batch-size", "3", "--val-share", "0.25", "--checkpoint-every", "2")
AGAIN = SMALL[:2]
"""What no run folder may say by itself: code."""
STEPS = 18
# Ends the process without any clean-up after so many steps, as the system does to one that is out of memory.
KILLED = """
import os, signal, sys
from frostline.core.events import StepFinished
from frostline.training.report import report
plain = report.Record.__call__
def counted(self, event):
    plain(self, event)
    if isinstance(event, StepFinished) and event.step == int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGKILL)
report.Record.__call__ = counted
from frostline.cli import main
main(sys.argv[2:])
"""


def run_until_killed(step, *arguments):
    paths = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, "-c", KILLED, str(step), *map(str, arguments)]
    ended = subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr


@pytest.fixture(scope="module")
def undisturbed(folder, near, tmp_path_factory):
    out = trained(tmp_path_factory.mktemp("whole"), "--data", folder, *SMALL, *HOW, *near)
    return (
        json.loads((out / "report.json").read_text()),
        (out / "model.safetensors").read_bytes(),
        RecordedSteps.read(out),
    )


ALIKE = ("losses", "epoch_losses", "val_losses", "val_accuracies", "samples", "epochs")


def test_a_run_killed_twice_has_the_losses_of_an_undisturbed_one(capsys, folder, near, undisturbed, tmp_path):
    whole, model, record = undisturbed
    assert len(whole["losses"]) == STEPS
    out, draw = tmp_path / "run", random.Random(7)
    first, second = draw.randrange(3, STEPS // 2), draw.randrange(STEPS // 2 + 3, STEPS)
    run_until_killed(first, "train", "--data", folder, *SMALL, *HOW, *near, "--out", out)
    kept = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    code, _, err = run(capsys, "train", "--data", folder, *SMALL, *HOW, *near, "--out", out)
    assert (code, "cut off before its end: go on with it by --resume" in " ".join(err.split())) == (2, True)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == kept
    run_until_killed(second, "train", "--resume", out, *AGAIN)
    report = run_json(capsys, "train", "--resume", out, *AGAIN)
    assert {name: report[name] for name in ALIKE} == {name: whole[name] for name in ALIKE}
    assert second - 2 <= report["resumed_steps"] < second
    assert (out / "model.safetensors").read_bytes() == model
    assert len(list((out / "checkpoints").iterdir())) <= 2
    now = {one.step: one for one in RecordedSteps.read(out).steps}
    assert now.keys() >= set(range(1, first - 2)), "those before the checkpoint are kept"
    both = [(was, now[was.step]) for was in record.steps if was.step in now]
    assert [compare_steps(was, one, str, 0.0).differences for was, one in both] == [()] * len(both)
    # It is over, and says the same again.
    again = run_json(capsys, "train", "--resume", out, *AGAIN)
    assert {name: again[name] for name in ALIKE} == {name: whole[name] for name in ALIKE}
    assert again["resumed_steps"] == STEPS


def test_resumes_from_the_previous_checkpoint_where_the_latest_is_damaged(capsys, folder, near, undisturbed, tmp_path):
    whole, _, _ = undisturbed
    out = tmp_path / "run"
    run_until_killed(9, "train", "--data", folder, *SMALL, *HOW, *near, "--out", out)
    newest = max((out / "checkpoints").iterdir())
    newest.write_bytes(newest.read_bytes()[:100])
    code, _, err = run(capsys, "train", "--resume", out, *AGAIN)
    assert code == 0, err
    assert f"an older checkpoint: {newest.name} is damaged" in " ".join(err.split())
    assert newest.with_name(f"{newest.name}.damaged").stat().st_size == 100, "it is set aside, and not removed"
    report = json.loads((out / "report.json").read_text())
    assert report["losses"] == whole["losses"]
    assert 0 < report["resumed_steps"] < int(newest.stem.removeprefix("step-"))


@pytest.mark.parametrize("full", [("model",), ("head", "model"), ("step-0000000004", "model")])
def test_a_full_disk_costs_a_run_what_does_not_fit_and_nothing_else(
    capsys, folder, near, undisturbed, tmp_path, monkeypatch, full
):
    out = tmp_path / "run"
    with monkeypatch.context() as patched:
        for module in ("run", "run_folder"):

            def write(path, *what):
                with write_errors(path):
                    if path.name.startswith(full):
                        raise OSError(errno.ENOSPC, "No space left on device")
                write_tensors(path, *what)

            patched.setattr(f"frostline.training.{module}.write_tensors", write)
        code, _, err = run(capsys, "train", "--data", folder, *SMALL, *HOW, *near, "--out", out)
    said = " ".join(err.split())
    assert code == 2
    assert said.endswith(f"frostline train --resume {out} goes on with the run") == (full[0] in ("model", "head"))
    assert all(f"no space left to write {out}" in said and name in said for name in full)
    report = json.loads((out / "report.json").read_text())
    assert sorted(report["not_written"]) == [f"{name}.safetensors" for name in full if name in ("head", "model")]
    if full[0].startswith("step"):
        assert (report["epochs"], report["interrupted"]) == (0, True)
        assert f"{full[0]}.safetensors" in report["ended_by"]
    else:
        assert (report["losses"], report["ended_by"]) == (undisturbed[0]["losses"], None)
    assert not list(out.rglob(".*"))
    again = run_json(capsys, "train", "--resume", out, *AGAIN)
    assert {name: again[name] for name in ALIKE} == {name: undisturbed[0][name] for name in ALIKE}
    assert (again["ended_by"], again["not_written"]) == (None, {})
    assert (out / "model.safetensors").read_bytes() == undisturbed[1]


def test_what_a_run_learned_stays_until_the_next_one_in_its_folder_has_learned(
    capsys, folder, near, tmp_path, monkeypatch
):
    how = ("--data", folder, *SMALL, *HOW, *near)
    out = trained(tmp_path / "run", *how)
    learned = {name: (out / name).read_bytes() for name in ("head.safetensors", "model.safetensors")}
    predict = ("predict", "--run", out, *AGAIN, "--data", folder, *near, "--out", tmp_path / "said.csv")
    with monkeypatch.context() as patched:
        patched.setattr("frostline.training.run._Run.epochs", Mock(side_effect=NodeUnreachable("it is gone")))
        code, _, err = run(capsys, "train", *how, "--out", out)
    assert (code != 0, "it is gone" in err) == (True, True)
    assert {name: (out / name).read_bytes() for name in learned} == learned
    assert json.loads((out / "report.json").read_text())["not_written"].keys() == learned.keys()
    code, _, err = run(capsys, *predict)
    assert (code, "that which lies there is of the run before" in " ".join(err.split())) == (2, True)
    assert run_json(capsys, "train", "--resume", out, *AGAIN)["not_written"] == {}
    code, _, err = run(capsys, *predict)
    assert code == 0, err


def test_unreadable_checkpoints_end_with_a_sentence_and_stay_as_they_are(capsys, folder, near, tmp_path):
    out = tmp_path / "run"
    run_until_killed(5, "train", "--data", folder, *SMALL, *HOW, *near, "--out", out)
    for path in (out / "checkpoints").iterdir():
        path.write_bytes(path.read_bytes()[:50])
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    for _ in range(2):  # asked again it says the same, and begins nothing
        code, _, err = run(capsys, "train", "--resume", out, *AGAIN)
        assert code == 2
        assert "no checkpoint in" in " ".join(err.split())
        assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_a_second_training_in_the_folder_of_a_running_one_is_refused(capsys, folder, near, undisturbed, tmp_path):
    out = tmp_path / "run"
    begin = ("train", "--data", folder, *SMALL, *HOW, *near, "--out", out)
    with own_folder(out):
        code, _, err = run(capsys, *begin)
        assert (code, f"another training runs in {out}" in " ".join(err.split())) == (2, True)
        assert not list(out.iterdir())
    run_until_killed(9, *begin)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    with own_folder(out):
        code, _, err = run(capsys, "train", "--resume", out, *AGAIN)
        assert (code, f"another training runs in {out}" in " ".join(err.split())) == (2, True)
        assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    assert run_json(capsys, "train", "--resume", out, *AGAIN)["losses"] == undisturbed[0]["losses"]


def test_a_changed_setting_is_refused_by_its_name_and_another_node_is_not(capsys, folder, near, tmp_path):
    out = tmp_path / "run"
    run_json(capsys, "train", "--data", folder, *SMALL, *HOW, *near, "--epochs", 1, "--out", out)
    for option, value, before in (("--batch-size", 6, 3), ("--epochs", 2, 1), ("--lr", 0.5, 0.002)):
        code, _, err = run(capsys, "train", "--resume", out, *AGAIN, option, value)
        assert code == 2
        name = "--learning-rate" if option == "--lr" else option
        assert f"began with {name} {before}, and {value} is given now" in " ".join(err.split())
    assert run(capsys, "train", "--resume", out, *AGAIN, "--batch-size", 3, "--near", near[1])[0] == 0


def test_refuses_other_data_and_a_folder_without_a_run(capsys, near, tmp_path):
    data, out = image_folder(tmp_path / "images", per_class=4), tmp_path / "run"
    run_json(capsys, "train", "--data", data, *SMALL, "--epochs", 1, "--out", out)
    next(iter(sorted(data.rglob("*.jpg")))).unlink()
    code, _, err = run(capsys, "train", "--resume", out, *AGAIN)
    assert code == 2
    assert "the samples to train on" in " ".join(err.split())
    code, _, err = run(capsys, "train", "--resume", tmp_path)
    assert code == 2
    assert "there is no run in" in err
    assert Path(out / "frostline.json").is_file()


@pytest.fixture(scope="module")
def ended(folder, near, tmp_path_factory):
    """The folder of a run that has ended; copy it, and don't write to it."""
    return trained(tmp_path_factory.mktemp("ended"), "--data", folder, *SMALL, *HOW, *near, "--epochs", 1)


CODE = """
from pathlib import Path
Path({canary!r}).touch()
def make():
    raise SystemExit("this ran")
"""


@pytest.fixture
def hostile(ended, tmp_path, monkeypatch):
    """Changes options of a copy of the run's folder, which is the working folder, and says the name of a canary."""
    shutil.copytree(ended, tmp_path / "run")
    canary = tmp_path / "it-ran"
    (tmp_path / "run" / "harmful.py").write_text(CODE.format(canary=str(canary)))
    monkeypatch.chdir(tmp_path / "run")
    monkeypatch.syspath_prepend(str(tmp_path / "run"))

    def made(**options):
        path = tmp_path / "run" / "frostline.json"
        value = json.loads(path.read_text())
        path.write_text(json.dumps({**value, "options": {**value["options"], **options}}))
        return canary

    return made


@pytest.mark.parametrize("verb", ["train --resume .", "predict --run . --data DATA"])
@pytest.mark.parametrize("model", ["harmful:make", "cProfile:main", "os:getcwd", "run.harmful:make", ":make", "x"])
def test_a_run_folder_runs_no_code(capsys, folder, hostile, verb, model):
    canary = hostile(model=model)
    code, _, err = run(capsys, *verb.replace("DATA", str(folder)).split())
    assert code == 2
    assert "which runs code: where that is to be, give it again" in " ".join(err.split())
    assert "harmful" not in sys.modules
    assert not canary.exists()


@pytest.mark.parametrize("loss", ["harmful.py:make", "./harmful.py:make"])
def test_a_run_folder_says_no_file_of_a_loss(capsys, folder, near, hostile, loss):
    canary = hostile(loss=loss, task="classes")
    code, _, err = run(capsys, "train", "--resume", ".", *AGAIN)
    assert code == 2
    assert f"--loss {loss}, which runs code" in " ".join(err.split())
    code, _, err = run(capsys, "predict", "--run", ".", "--data", folder, *AGAIN, *near)
    assert code == 0, err
    assert not canary.exists()


def test_a_run_folder_names_no_place_that_is_asked_or_written(capsys, hostile, tmp_path, monkeypatch):
    monkeypatch.setenv("FROSTLINE_TOKEN", "a-secret-of-the-user")
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        server.settimeout(0.1)
        canary, written = (
            hostile(
                near=[f"http://127.0.0.1:{server.getsockname()[1]}"],
                cache_folder=str(tmp_path / "cache"),
                local_tier=str(tmp_path / "tier"),
                out=str(tmp_path / "elsewhere"),
                epochs=2,
            ),
            tmp_path / "trace.json",
        )
        code, _, err = run(capsys, "train", "--resume", ".", *AGAIN)
        assert code == 0, err
        with pytest.raises(TimeoutError):
            server.accept()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
    assert not written.exists()
    assert not canary.exists()
    said = " ".join(err.split())
    assert "--near http://127.0.0.1" in said
    assert f"--cache {tmp_path / 'cache'}, which is not taken from its folder" in said


@pytest.mark.parametrize("name", ["trace", "log_format", "as_json", "resume", "token", "control", "no_such_option"])
def test_other_options_are_not_taken_from_a_run_folder(capsys, hostile, tmp_path, name):
    before = (tmp_path / "run" / "report.json").read_bytes()
    hostile(**{name: str(tmp_path / "run" / "report.json"), "near": []})
    code, out, err = run(capsys, "train", "--resume", ".", *AGAIN, "--device", "no-such-device")
    assert code == 2
    assert out == ""
    assert (tmp_path / "run" / "report.json").read_bytes() == before
    if name not in {param.name for param in train.params}:
        assert f"unknown options: {name}" in " ".join(err.split())


@pytest.mark.parametrize(
    "data", ["s3://photos", "https://photos.example", "cql://ring/photos/images", "hf:evil/photos"]
)
def test_data_elsewhere_is_asked_only_where_it_is_named(capsys, hostile, data):
    hostile(data=data)
    code, _, err = run(capsys, "train", "--resume", ".", *AGAIN)
    assert code == 2
    assert f"--data {data}, which is asked with your credentials" in " ".join(err.split())


OF_THE_RUN = {
    "accuracy",
    "augment",
    "batch_size",
    "bf16",
    "on_change",
    "codec",
    "column",
    "cut",
    "epochs",
    "file_column",
    "format",
    "label",
    "label_smoothing",
    "learning_rate",
    "lora",
    "max_length",
    "metrics",
    "optimizer",
    "patience",
    "policy",
    "samples",
    "schedule",
    "seed",
    "max_skipped_fraction",
    "split",
    "targets",
    "task",
    "tokenizer",
    "unfreeze",
    "until",
    "val_share",
    "val_split",
    "cached_augmentations",
    "warm_up",
    "weight_decay",
    "weights",
    "where",
    # How much of this machine is used.
    "allow_nonfinite",
    "cache_size",
    "checkpoint_every",
    "device",
    "list_locally",
    "local_tier_size",
    "memory",
    "read_threads",
    "relist",
    "trials",
}
"""Options that a folder may say: they run nothing, ask nobody and write nowhere. What is new needs a thought."""


def test_every_option_of_train_is_known_to_be_harmless_or_to_be_named_again():
    named = {"data", "loss", "model", "cache_folder", "local_tier", "near", "out", "trace", "log_format"}
    assert {param.name for param in train.params} == OF_THE_RUN | named | {"as_json", "resume"}


def test_a_run_may_go_on_beside_a_node_with_other_settings():
    of_a_node = {param.name for param in train.params if getattr(param, "of", None) is NodeSettings}
    assert "memory" in of_a_node
    assert of_a_node - set(FREE) == set()


@pytest.mark.parametrize(
    "change",
    [
        {"outputs": 0},
        {"outputs": 1 << 40},
        {"outputs": "2"},
        {"classes": [1]},
        {"classes": "ab"},
        {"options": []},
        {"identity": 3},
        {"more": 1},
        {"options": {"model": 5, "until": "stem"}},
        {"options": {"model": "demo:x"}},
    ],
    ids=str,
)
def test_a_config_that_is_no_runs_is_refused_with_a_sentence(capsys, folder, hostile, change):
    hostile()
    path = Path("frostline.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    code, _, err = run(capsys, "predict", "--run", ".", "--data", folder)
    assert code == 2, err
    assert "Traceback" not in err
    assert "more" not in change or "frostline.json has no field 'more'" in err
