"""A run that was killed goes on with the losses of a run that nothing broke off."""

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.commands import run, run_json, trained
from support.images import image_folder

SMALL = ("--model", "support.networks:Small", "--until", "stem", "--accuracy", "exact", "--augment")
HOW = ("--epochs", "3", "--batch-size", "3", "--val-share", "0.25", "--checkpoint-every", "2")
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
    return json.loads((out / "report.json").read_text()), (out / "model.safetensors").read_bytes()


ALIKE = ("losses", "epoch_losses", "val_losses", "val_accuracies", "samples", "epochs")


def test_a_run_killed_twice_has_the_losses_of_an_undisturbed_one(capsys, folder, near, undisturbed, tmp_path):
    whole, model = undisturbed
    assert len(whole["losses"]) == STEPS
    out, draw = tmp_path / "run", random.Random(7)
    first, second = draw.randrange(3, STEPS // 2), draw.randrange(STEPS // 2 + 3, STEPS)
    run_until_killed(first, "train", "--data", folder, *SMALL, *HOW, *near, "--out", out)
    run_until_killed(second, "train", "--resume", out)
    report = run_json(capsys, "train", "--resume", out)
    assert {name: report[name] for name in ALIKE} == {name: whole[name] for name in ALIKE}
    assert second - 2 <= report["resumed_steps"] < second
    assert (out / "model.safetensors").read_bytes() == model
    assert len(list((out / "checkpoints").iterdir())) <= 2
    # It is over, and says the same again.
    again = run_json(capsys, "train", "--resume", out)
    assert {name: again[name] for name in ALIKE} == {name: whole[name] for name in ALIKE}
    assert again["resumed_steps"] == STEPS


def test_resumes_from_the_previous_checkpoint_where_the_latest_is_damaged(capsys, folder, near, undisturbed, tmp_path):
    whole, _ = undisturbed
    out = tmp_path / "run"
    run_until_killed(9, "train", "--data", folder, *SMALL, *HOW, *near, "--out", out)
    newest = max((out / "checkpoints").iterdir())
    newest.write_bytes(newest.read_bytes()[:100])
    code, _, err = run(capsys, "train", "--resume", out)
    assert code == 0, err
    assert f"an older checkpoint: {newest.name} is damaged" in " ".join(err.split())
    assert newest.with_name(f"{newest.name}.damaged").stat().st_size == 100, "it is set aside, and not removed"
    report = json.loads((out / "report.json").read_text())
    assert report["losses"] == whole["losses"]
    assert 0 < report["resumed_steps"] < int(newest.stem.removeprefix("step-"))


def test_ends_with_a_sentence_where_no_checkpoint_can_be_read_and_leaves_every_file_as_it_is(
    capsys, folder, near, tmp_path
):
    out = tmp_path / "run"
    run_until_killed(5, "train", "--data", folder, *SMALL, *HOW, *near, "--out", out)
    for path in (out / "checkpoints").iterdir():
        path.write_bytes(path.read_bytes()[:50])
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    for _ in range(2):  # asked again it says the same, and begins nothing
        code, _, err = run(capsys, "train", "--resume", out)
        assert code == 2
        assert "no checkpoint in" in " ".join(err.split())
        assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_a_changed_setting_is_refused_by_its_name_and_another_node_is_not(capsys, folder, near, tmp_path):
    out = tmp_path / "run"
    run_json(capsys, "train", "--data", folder, *SMALL, *HOW, *near, "--epochs", 1, "--out", out)
    for option, value, before in (("--batch-size", 6, 3), ("--epochs", 2, 1), ("--lr", 0.5, 0.002)):
        code, _, err = run(capsys, "train", "--resume", out, option, value)
        assert code == 2
        name = "--learning-rate" if option == "--lr" else option
        assert f"began with {name} {before}, and {value} is given now" in " ".join(err.split())
    assert run(capsys, "train", "--resume", out, "--batch-size", 3, "--near", near[1])[0] == 0


def test_refuses_other_data_and_a_folder_without_a_run(capsys, near, tmp_path):
    data, out = image_folder(tmp_path / "images", per_class=4), tmp_path / "run"
    run_json(capsys, "train", "--data", data, *SMALL, "--epochs", 1, "--out", out)
    next(iter(sorted(data.rglob("*.jpg")))).unlink()
    code, _, err = run(capsys, "train", "--resume", out)
    assert code == 2
    assert "the samples to train on" in " ".join(err.split())
    code, _, err = run(capsys, "train", "--resume", tmp_path)
    assert code == 2
    assert "there is no run in" in err
    assert Path(out / "frostline.json").is_file()
