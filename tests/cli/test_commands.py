"""The verbs, run as a user runs them: results, exit codes, sentences."""

import importlib
import inspect
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from unittest.mock import Mock

import click
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

import frostline as fl
from frostline.cli import main, process_began_at
from frostline.cli.commands import verbs
from frostline.cli.options import VerbCommand, sections_of
from frostline.client.http import HttpTransport
from frostline.datasets.dataset import split_in_two
from frostline.jobs import connect
from frostline.jobs.connect import first_of
from frostline.jobs.context import some_of
from frostline.training import setup
from frostline.training.run_config import write_tensors
from support.commands import run, run_json
from support.control_planes import control_plane
from support.images import image_folder
from support.networks import Small
from support.nodes import until
from support.prepared import PLAIN

IMPORTED_AT = time.perf_counter()
SMALL = ["--model", "support.networks:Small", "--until", "stem"]


def test_the_entry_point_is_still_a_function_after_a_command_ran(capsys):
    run(capsys, "--version")
    assert importlib.import_module("frostline.cli").main is main


def test_the_package_is_run_by_its_name_too(monkeypatch):
    calls = []
    monkeypatch.setattr("frostline.cli.main", lambda: calls.append("main"))
    runpy.run_module("frostline", run_name="__main__")
    assert calls == ["main"]


@pytest.mark.parametrize("verb", sorted(name for name, verb in verbs.commands.items() if not hasattr(verb, "commands")))
def test_every_command_has_help_with_an_example_and_json(capsys, verb):
    code, out, _ = run(capsys, verb, "--help")
    assert code == 0
    assert f"Example: frostline {verb}" in out
    assert "--json" in out


def commands(group=verbs, before=()):
    for name, verb in group.commands.items():
        if isinstance(verb, click.Group):
            yield from commands(verb, (*before, name))
        else:
            yield pytest.param((*before, name), verb, id=" ".join((*before, name)))


@pytest.mark.parametrize(("names", "verb"), [*commands()])
def test_help_fits_a_screen_and_help_all_shows_every_option(capsys, names, verb):
    options = [param for param in verb.params if isinstance(param, click.Option)]
    assert [option.name for option in options if not option.help] == [], "an option without a word of help"
    _, short, _ = run(capsys, *names, "--help")
    assert len(short.splitlines()) <= 60
    shown = [option for option in options if f" {option.opts[0]}" in short]
    assert len(shown) <= 20
    assert [option.name for option in options if option.required and option not in shown] == []
    is_short = "--help-all" in short
    assert is_short or len(shown) == len(options)
    _, whole, _ = run(capsys, *names, "--help-all" if is_short else "--help")
    assert [option.name for option in options if f" {option.opts[0]}" not in whole] == []
    assert [option.name for option in options if "".join(option.help.split()) not in "".join(whole.split())] == []


@pytest.mark.parametrize(("names", "verb"), [*commands()])
def test_every_option_is_about_something_and_stands_once_on_the_page_of_verbs(names, verb):
    sections = dict(sections_of(verb))
    options = [param for param in verb.params if isinstance(param, click.Option)]
    assert sorted(option.name for found in sections.values() for option in found) == sorted(
        option.name for option in options
    )
    assert "Other" not in sections, "name the option in _SECTIONS of cli/options.py"
    assert next(iter(sections)) in {"Data", "Node", "Access", "Output"}, names


def test_help_shows_no_option_first_that_no_verb_has():
    names = {param.name for found in commands() for param in found.values[1].params}
    assert [name for name in inspect.signature(VerbCommand).parameters["first"].default if name not in names] == []


@pytest.mark.parametrize(("names", "verb"), [*commands()])
def test_help_of_every_option_begins_with_a_noun_a_verb_or_a_number(names, verb):
    is_fragment = runpy.run_path(str(Path(__file__).resolve().parents[2] / "scripts" / "words.py"))["is_fragment"]
    helps = {option.name: option.help for option in verb.params if isinstance(option, click.Option)}
    first = {name: re.findall(r"[\w-]+", text.lower())[:2] for name, text in helps.items()}
    assert [name for name, words in first.items() if is_fragment(*words)] == []


def test_help_of_training_has_its_sections_in_their_order(capsys):
    _, out, _ = run(capsys, "train", "--help")
    assert re.findall(r"^(\w+):$", out, re.M) == ["Data", "Network", "Node", "Training", "Output"]


OTHERS = {
    "train --node-url http://store-1:7070": "Did you mean '--near'?",
    "train --num-workers 4": "No such option '--num-workers'. Reading ahead tunes itself, so leave it out.",
    "train --output-dir run": "Did you mean '--out'?",
    "train --num-epochs 3": "Did you mean '--epochs'?",
    "train --fp16": "Write --accuracy fp16 for the frozen layers, or --bf16 for the head.",
    "train --pretrained": "--weights random takes none.",
    "plan --fp16": "No such option '--fp16'. Write --accuracy fp16 for the frozen layers.",
    "ingest --num-workers 4": "No such option '--num-workers'. Did you mean '--workers'?",
    "index --verbose": "No such option '--verbose'. Write --json for the result.",
    "train --gpus 1": "Write --device cuda.",
    "serve --port 7070": "Write --listen 0.0.0.0:7070.",
    "predict --checkpoint run": "Did you mean '--run'?",
    "train --batch 16": "Did you mean '--batch-size'?",
    "train --freeze layer4": "Did you mean '--until'?",
    "train --validation-split 0.1": "Did you mean '--val-share'?",
    "train --scheduler cosine": "Did you mean '--schedule'?",
    "train -o run": "Did you mean '--out'?",
    "train --val-data held-out": "Write --val-share 0.2, or --val-split NAME for a split of --data.",
    "train --image-size 224": "Images are made as the weights of the network take them, so leave it out.",
    "train --early-stopping": "Write --patience 5.",
    "train --wandb": "Write --json for the result, or --log-format json for every event.",
    "train --config a.yaml": "so write them out, or --resume DIR takes those of a run.",
    "predict --config a.yaml": "No file of options is read, so write them out.",
    "plan --what-if": "Write --bandwidth 100Mbit, or --nodes 2, or --store-speed 0.5.",
    "ingest --image-size 224": "Did you mean '--resize'?",
    "ingest --shard-size 1GB": "Did you mean '--object-size'?",
    "ingest --src photos --dst out": "No such option '--src'. Write frostline ingest SRC DEST.",
    "predict photos": "Missing option '--run'. Write --run DIR: folder of a run",
    "predict photos --run run": "Missing option '--data'. Write --data photos.",
    "serve photos": "Missing option '--data-root'. Write --data-root photos.",
    "doctor photos": "Got unexpected extra argument (photos). Write --data photos.",
    "help train": "No such command 'help'. Write frostline train --help.",
    "version": "No such command 'version'. Write frostline --version.",
    "bench": "Did you mean 'plan'?",
    "fit": "No such command 'fit'. Did you mean 'train'?",
    "evaluate --data photos": "Did you mean 'predict'?",
    "embed": "Did you mean 'extract'?",
    "convert photos out": "Did you mean 'ingest'?",
    "ls photos": "Did you mean 'index'?",
    "train --data . --until a --model timm/resnet18": "write timm:resnet18 or torchvision:resnet18",
    "train --data . --until a --model torchvision.models.resnet18": "write timm:resnet18 or torchvision:resnet18",
}


@pytest.mark.parametrize(("names", "verb"), [*commands()])
def test_what_stands_in_place_of_another_programs_option_is_one_that_the_verb_has(capsys, names, verb):
    options = {opt for param in verb.params for opt in param.opts}
    words = (
        "num-workers fp16 host verbose gpus pretrained epoch-length val-data early-stopping wandb config what-if src"
    )
    for word in words.split():
        if f"--{word}" in options:
            continue
        _, _, err = run(capsys, *names, f"--{word}")
        said = err.partition("No such option")[2]
        assert said, word
        assert set(re.findall(r"--[\w-]+", said)) <= options | {f"--{word}"}, said


def test_commands_and_options_of_other_programs_lead_to_ours(capsys, folder, monkeypatch):
    monkeypatch.chdir(folder)
    for line, says in OTHERS.items():
        code, _, err = run(capsys, *line.split())
        assert code == 2, line
        assert says in err, line


def test_train_writes_a_network_that_loads_without_frostline_and_a_whole_report(capsys, folder, tmp_path):
    out = tmp_path / "run"
    report = run_json(
        capsys, "train", "--data", folder, *SMALL, "--epochs", 2, "--batch-size", 6, "--val-share", 0.25, "--out", out
    )
    assert {path.name for path in out.iterdir()} == {
        "checkpoints",
        "frostline.json",
        "head.safetensors",
        "model.safetensors",
        "report.html",
        "report.json",
        "steps.jsonl",
    }
    assert json.loads((out / "report.json").read_text()) == report
    wanted = "val_accuracy losses seconds samples epochs wire_bytes baseline_wire_bytes plan stall_s skipped"
    assert set(wanted.split()) <= set(report)
    assert report["plan"] is None  # too short to measure one
    assert (report["engine"], report["engine_error"]) == ("torch-eager", 0.0)
    assert [item["samples"] for item in report["ways"]] == [24]
    assert report["samples"] == 2 * 18
    assert len(report["losses"]) == 2 * 3
    # A loop without Frostline could keep features too.
    assert report["baseline_wire_bytes"] == sum(path.stat().st_size for path in folder.rglob("*.jpg"))
    model = Small()
    model.load_state_dict(load_file(out / "model.safetensors"))
    head = load_file(out / "head.safetensors")
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in head.items())


def test_a_run_is_the_same_for_the_same_seed(capsys, folder, near):
    runs = [run_json(capsys, "train", "--data", folder, *SMALL, "--epochs", 1, "--seed", 5, *near) for _ in range(2)]
    assert runs[0]["losses"] == runs[1]["losses"]


def test_a_run_in_the_store_is_that_of_any_other_policy(capsys, folder, near, tmp_path):
    how = ("train", "--data", folder, *SMALL, "--epochs", 2, "--augment", "--batch-size", 6, "--val-share", 0.25)
    here, there = (
        run_json(capsys, *how, "--policy", policy, "--out", tmp_path / policy, *more)
        for policy, more in (("freeze", near), ("all_in_store", ()))
    )
    alike = "losses epoch_losses val_losses val_accuracies samples epochs train_samples skipped baseline_wire_bytes"
    assert {name: there[name] for name in alike.split()} == {name: here[name] for name in alike.split()}
    assert there["ways"] == []  # no sample came to the trainer
    assert there["stages"]["store: head"] > 0
    assert there["plan"]["policy"] == "all_in_store"
    assert not (tmp_path / "all_in_store" / "steps.jsonl").exists(), "no batch came here"
    code, _, err = run(capsys, "verify", tmp_path / "all_in_store", *SMALL[:2])
    assert (code, "neither checkpoints nor steps are kept" in " ".join(err.split())) == (2, True)
    [head] = [item["where"] for item in there["where"] if item["part"] == "head"]
    assert head.startswith("beside the node at")
    for file in ("model.safetensors", "head.safetensors"):
        ours, theirs = (load_file(tmp_path / policy / file) for policy in ("all_in_store", "freeze"))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def test_without_a_number_of_epochs_held_out_loss_decides_here_and_in_the_store(capsys, folder, near, tmp_path):
    how = ("train", "--data", folder, *SMALL, "--lr", 0.02, "--batch-size", 6, "--val-share", 0.25)
    here, there = (
        run_json(capsys, *how, "--policy", policy, "--out", tmp_path / policy, *more)
        for policy, more in (("freeze", near), ("all_in_store", ()))
    )
    losses = here["val_losses"]
    assert here["epochs"] == len(losses) > 5
    assert losses[here["head_epoch"] - 1] == min(losses)
    assert here["val_accuracy"] == here["val_accuracies"][here["head_epoch"] - 1]
    assert "optimistic" in here["held_out"]
    alike = "losses val_losses val_accuracies val_accuracy epochs head_epoch held_out baseline_wire_bytes"
    assert {name: there[name] for name in alike.split()} == {name: here[name] for name in alike.split()}
    ours, theirs = (load_file(tmp_path / policy / "model.safetensors") for policy in ("all_in_store", "freeze"))
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    # The statistics of the head that was kept, not of the last one.
    assert int(ours["body.1.num_batches_tracked"]) == here["head_epoch"] * 3


def test_a_split_called_a_test_is_scored_and_chooses_nothing(capsys, tmp_path):
    data = image_folder(tmp_path / "images", per_class=8)
    run_json(capsys, "index", "--data", data, "--split", "train=0.75,test=0.25")
    how = ("train", "--data", data, *SMALL, "--lr", 0.02, "--split", "train", "--val-split", "test")
    report = run_json(capsys, *how)
    assert report["epochs"] == report["head_epoch"] == 20
    assert report["held_out"] == "split 'test'; nothing was chosen by it"


def test_makes_few_epochs_where_features_are_not_kept_and_says_so(capsys, folder, near):
    code, out, err = run(capsys, "train", "--data", folder, *SMALL, "--augment", *near)
    assert code == 0, err
    assert "at most 5 epochs: features are not kept" in " ".join(err.split())
    assert "in 5 epochs" in out


def test_counts_seconds_from_the_command_and_shows_setting_up_apart(capsys, folder, near):
    report = run_json(capsys, "train", "--data", folder, *SMALL, "--epochs", 1, *near)
    assert 0 < report["setup_s"] < report["first_step_s"] < report["seconds"]
    code, out, err = run(capsys, "train", "--data", folder, *SMALL, *near)
    assert code == 0, err
    for line in ("seconds since the command", "set-up", "first step after", "20 % of each class"):
        assert line in out
    assert "is kept: its held-out loss was the lowest" in " ".join(err.split())


def test_a_command_began_with_its_process():
    assert process_began_at() < IMPORTED_AT
    code = (
        "import time; at = time.perf_counter(); from frostline.cli import process_began_at; "
        "print(at - process_began_at())"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    # The interpreter itself took some of it; a tick is a hundredth of a second.
    assert float(out) > -0.02


def test_weights_from_a_file_are_used(capsys, folder, near, tmp_path):
    torch.manual_seed(9)
    write_tensors(tmp_path / "w.safetensors", Small().state_dict())
    plain, given = (
        run_json(capsys, "train", "--data", folder, *SMALL, "--epochs", 1, *near, *more)
        for more in ((), ("--weights", tmp_path / "w.safetensors"))
    )
    assert plain["losses"] != given["losses"]
    assert given["settings"]["weights"] == "w.safetensors"


def test_the_first_samples_of_a_run_are_asked_for_before_its_network_is_built(capsys, folder, near, monkeypatch):
    """A node on another machine: the link would idle for as long as the network is built and traced."""
    asked, features, load = [], HttpTransport.features, setup.load_model

    def noted(transport, wanted):
        if wanted.cut == 0:
            asked.extend(wanted.samples.ids.tolist())
        return features(transport, wanted)

    def slow(*names, **options):
        until(lambda: len(asked) >= len(train))
        return load(*names, **options)

    monkeypatch.setattr(HttpTransport, "features", noted)
    monkeypatch.setattr(setup, "load_model", slow)
    monkeypatch.setattr(connect, "is_loopback", lambda _: False)
    train, held_out = split_in_two(fl.Dataset(folder), 0.25, 5)
    run_json(capsys, "train", "--data", folder, *SMALL, "--epochs", 1, *near, "--val-share", 0.25, "--seed", 5)
    judges = some_of(fl.Dataset(folder), 8).ids.tolist()
    assert asked[:8] == judges
    rest = [id for id in first_of(train, seed=5).ids.tolist() if id not in judges]
    assert sorted(asked[8 : 8 + len(rest)]) == sorted(rest)
    assert len(held_out)


def test_where_the_weights_came_from_is_said_before_training_and_at_the_end(capsys, folder, near):
    code, out, err = run(capsys, "train", "--data", folder, *SMALL, "--epochs", 1, *near)
    assert code == 0, err
    assert "weights of support.networks:Small: as support.networks:Small made them" in err
    assert "as support.networks:Small made them" in out


@pytest.mark.usefixtures("no_hub")
def test_a_network_whose_weights_are_nowhere_is_refused_before_a_node_starts(capsys, folder, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    code, out, err = run(capsys, "train", "--data", folder, "--model", "torchvision:resnet18", "--until", "layer4")
    assert (code, out) == (2, "")
    assert f"put resnet18-f37072fd.pth into {tmp_path}/hub/checkpoints" in err
    assert "starting a node" not in err


def test_the_demo_runs_on_a_folder_of_the_users(capsys, folder, tmp_path):
    out = tmp_path / "run"
    code, text, err = run(capsys, "demo", "--data", folder, "--epochs", 1, "--out", out)
    assert code == 0, err
    for line in ("held-out accuracy", "with Frostline", "without it", "fewer bytes", "head"):
        assert line in text
    assert (out / "report.html").exists()


def test_plan_shows_every_cut_and_why_and_keeps_what_it_measured(capsys, folder, tmp_path):
    photos = image_folder(tmp_path / "photos", per_class=3)
    question = ("plan", "--data", photos, *SMALL)
    found = run_json(capsys, *question)
    cuts = {item["cut"] for item in found["candidates"]}
    assert cuts == set(range(len(cuts)))
    assert sum(item["share"] for item in found["mixture"]) == pytest.approx(1)
    in_use = {(item["cut"], item["codec"]) for item in found["mixture"]}
    assert {(item["cut"], item["codec"]) for item in found["candidates"] if item["rejected"] is None} == in_use
    shutil.rmtree(photos)  # nothing but the measurement is left to answer from
    thin = run_json(capsys, *question, "--bandwidth", "8kbit", "--epochs", 3)
    assert thin["asked"]["data"] == found["asked"]["data"]
    assert thin["measured"] == found["measured"]
    assert thin["link"]["bytes_per_s"] == 1000
    assert thin["as_measured"]["samples_per_s"] == found["samples_per_s"]
    code, out, err = run(capsys, *question, "--policy", "all", "--all", "--html", tmp_path / "plan.html")
    assert code == 0, err
    assert "--measure measures again" in err
    for words in ("encoded", "chosen", "hapi_v3", "neurosurgeon", "100.0 %", "zstd"):
        assert words in out
    assert (tmp_path / "plan.html").read_text().rstrip().endswith("</html>")


def test_a_question_before_any_measurement_measures_once_and_says_so(capsys, folder, near):
    question = ("plan", "--data", folder, *SMALL, *near, "--accuracy", "fp16", "--trials", 0, "--cut", 1, "--json")
    code, out, err = run(capsys, *question)
    assert code == 0, err
    assert "measuring once" in err
    again = run(capsys, *question)
    assert "measuring once" not in again[2]
    assert json.loads(again[1]) == json.loads(out)
    assert json.loads(out)["policy"] == "fixed"


def test_a_lossy_codec_is_used_where_it_is_allowed_and_its_error_is_reported(capsys, folder, near, tmp_path):
    ways = (*near, "--cut", 2, "--codec", "int8", "--accuracy", "0.5", "--trials", 0)
    report = run_json(capsys, "train", "--data", folder, *SMALL, *ways, "--epochs", 1, "--out", tmp_path)
    assert report["accuracy"] == 0.5
    assert 0 < report["codec_error"] < 0.5
    assert {(item["cut"], item["codec"]) for item in report["ways"]} == {(2, "int8")}
    assert report["plan"]["mixture"] == [{"cut": 2, "codec": "int8", "share": 1.0}]
    assert report["measured_samples_per_s"] > 0
    assert report["replans"] == []


def test_index_counts_and_finds_the_manifest_again(capsys, folder):
    first = run_json(capsys, "index", "--data", folder)
    assert first["per_class"] == {"circle": 8, "noise": 8, "stripe": 8}
    assert run_json(capsys, "index", "--data", folder)["manifest_found"]
    assert run(capsys, "index", "--data", folder)[1].startswith(f"{folder.as_uri()}: 24 samples\n"), "in one line"


def test_commands_take_the_last_manifest_with_no_list(capsys, tmp_path):
    folder = image_folder(tmp_path / "photos", per_class=6)
    code, _, err = run(capsys, "index", "--data", folder, "--no-relist")
    assert code == 2
    assert "list the data first" in err
    run_json(capsys, "index", "--data", folder)
    shutil.copyfile(folder / "noise" / "000.jpg", folder / "noise" / "more.jpg")
    assert run_json(capsys, "index", "--data", folder, "--no-relist")["samples"] == 18
    out = tmp_path / "features.parquet"
    found = run_json(capsys, "extract", "--data", folder, *SMALL, "--memory", "512MiB", "--no-relist", "--out", out)
    assert found["samples"] == 18
    assert run_json(capsys, "index", "--data", folder)["samples"] == 19
    code, _, err = run(capsys, "train", "--data", folder, *SMALL, "--no-relist", "--on-change", "rebuild")
    assert code == 2
    assert "--no-relist does not" in err


def test_index_saves_splits_and_the_other_commands_use_them(capsys, tmp_path):
    folder = image_folder(tmp_path, per_class=8)
    shares = "train=0.5,val=0.25,test=0.25"
    found = run_json(capsys, "index", "--data", folder, "--split", shares, "--seed", 3)
    assert found["splits"] == {"train": 12, "val": 6, "test": 6}
    assert "splits: train 12, val 6, test 6" in run(capsys, "index", "--data", folder)[1]
    few = run_json(capsys, "index", "--data", folder, "--where", "label != 'noise'")
    assert (few["samples"], few["splits"]["val"], few["per_class"]["noise"]) == (16, 4, 0)
    train = ("train", "--data", folder, *SMALL, "--epochs", 1, "--batch-size", 4)
    report = run_json(capsys, *train, "--split", "train", "--val-split", "val")
    assert (report["train_samples"], report["val_samples"]) == (12, 6)
    report = run_json(capsys, *train, "--where", "label != 'noise'")
    assert (report["train_samples"], report["val_samples"]) == (12, 4)
    out = tmp_path / "features.parquet"
    run_json(capsys, "extract", "--data", folder, *SMALL, "--split", "test", "--out", out)
    assert pq.read_table(out).num_rows == 6
    for arguments, sentence in (
        (("--val-split", "val"), "6 samples of split 'val' are among those to train on"),
        (("--split", "tset"), "has no split 'tset', only train, val, test"),
        (("--where", "label == 'nois'"), "there is no class 'nois'"),
        (("--where", "length < 0"), "there is no sample in"),
    ):
        code, _, err = run(capsys, *train, *arguments)
        assert (code, sentence in err) == (2, True), err


def test_train_takes_the_splits_that_the_data_brings(capsys, near, tmp_path):
    made = image_folder(tmp_path / "made", per_class=8)
    folder = tmp_path / "photos"
    for kind in made.iterdir():
        for number, file in enumerate(sorted(kind.iterdir())):
            split = ("train", "train", "train", "train", "val", "val", "test", "test")[number]
            (folder / split / kind.name).mkdir(parents=True, exist_ok=True)
            file.rename(folder / split / kind.name / file.name)
    code, out, _ = run(capsys, "index", "--data", folder)
    assert "splits: train 12, val 6, test 6" in out
    assert "the data itself brings the splits train, val, test" in out
    assert run_json(capsys, "index", "--data", folder)["per_class"] == {"circle": 8, "noise": 8, "stripe": 8}
    train = ("train", "--data", folder, *SMALL, "--epochs", 1, "--batch-size", 4, *near)
    code, out, err = run(capsys, *train, "--json")
    report = json.loads(out)
    assert (report["classes"], report["train_split"], report["val_split"]) == (
        ["circle", "noise", "stripe"], "train", "val"
    )  # fmt: skip
    assert (report["train_samples"], report["val_samples"], report["samples"]) == (12, 6, 12)
    said = " ".join(err.split())
    assert "training on the split train, 12 samples, and scoring the split val, 6 samples" in said
    for asked, sides in (
        (("--val-split", "test"), ("train", 12, "test", 6)),
        (("--split", "test", "--val-split", "val"), ("test", 6, "val", 6)),
        (("--split", "val"), ("val", 3, None, 3)),
        (("--val-share", 0.25), ("train", 9, None, 3)),
    ):
        report = run_json(capsys, *train, *asked)
        found = tuple(report[name] for name in ("train_split", "train_samples", "val_split", "val_samples"))
        assert found == sides, asked
    shutil.rmtree(folder / "train")
    code, _, err = run(capsys, *train)
    assert (code, "the splits val, test, and none that is called train" in " ".join(err.split())) == (2, True), err
    shutil.rmtree(folder / "val")
    report = run_json(capsys, *train)
    assert (report["train_split"], report["train_samples"], report["val_samples"]) == (None, 3, 3)


def test_index_finds_what_cannot_be_read_and_what_is_there_twice(capsys, tmp_path):
    folder = image_folder(tmp_path, per_class=4)
    shutil.copy(folder / "noise" / "001.jpg", folder / "stripe" / "twin.jpg")
    (folder / "circle" / "broken.jpg").write_bytes(b"no image at all")
    found = run_json(capsys, "index", "--data", folder, "--check")["check"]
    assert found["duplicates"] == [["noise/001.jpg", "stripe/twin.jpg"]]
    assert [item["object"] for item in found["unreadable"]] == ["circle/broken.jpg"]
    code, out, err = run(capsys, "index", "--data", folder, "--check")
    assert code == 0
    assert "1 samples cannot be read, and 1 have the bytes of another" in out
    assert "the same bytes: noise/001.jpg, stripe/twin.jpg" in out
    assert "skipped circle/broken.jpg" in err


def test_extract_writes_a_row_for_each_sample(capsys, folder, near, tmp_path):
    out = tmp_path / "features.parquet"
    done = run_json(capsys, "extract", "--data", folder, *SMALL, "--out", out, *near)
    table = pq.read_table(out)
    assert table.num_rows == done["samples"] == 24
    assert table.column_names == ["id", "object", "label", "class", "features"]
    assert table["class"].to_pylist() == [name.split("/")[0] for name in table["object"].to_pylist()]
    assert table["features"].chunk(0).to_numpy_ndarray().shape[1:] == tuple(done["shape"])
    assert sorted(path.name for path in tmp_path.iterdir()) == [".features.parquet.state", "features.parquet"]
    assert 0 < done["setup_s"] < done["seconds"]


def test_extract_refuses_a_file_that_it_cannot_write_before_it_lists_the_data(capsys, tmp_path):
    code, _, err = run(capsys, "extract", "--data", tmp_path / "nowhere", *SMALL, "--out", tmp_path / "features.csv")
    assert code == 2
    assert ".parquet" in err
    assert "nowhere" not in err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("index", "--data", "nowhere"), "nowhere"),
        (("index", "--data", "{empty}"), "no"),
        (("serve", "--data-root", "{folder}", "--engines", "torch-bf16,onnx"), "no engine onnx"),
        (("serve", "--data-root", "{folder}", "--device-batch", "12"), "device_batch"),
        (("serve", "--data-root", "{folder}", "--shared-cache-wait", "-1"), "shared_cache_wait_s"),
        (("train", "--data", "{one}", *SMALL), "1 class"),
        (("train", "--data", "{folder}", "--model", "torchvision:resnet81", "--until", "x"), "did you mean resnet18"),
        (
            ("train", "--data", "{folder}", "--model", "timm:vit_smal_patch16_224", "--until", "x"),
            "did you mean vit_small",
        ),
        (
            ("train", "--data", "{folder}", "--model", "nothing", "--until", "x"),
            "timm:nothing or torchvision:nothing",
        ),
        (("train", "--data", "{folder}", "--model", "a/b", "--until", "x"), "library it is of: write hf:a/b; or "),
        (("train", "--data", "{folder}", "--model", "no.such:thing", "--until", "x"), "where it is: PYTHONPATH=FOLDER"),
        (
            ("train", "--data", "{folder}", *SMALL, "--label", "kind"),
            "'kind' of labels, nor any other: leave the",
        ),
        (("train", "--data", "{flat}", *SMALL), "put files into class folders such as cats/1.jpg"),
        (("train", "--data", "{folder}", "--model", "support.networks:Small", "--until", "sten"), "did you mean stem"),
        (("train", "--data", "{folder}", *SMALL, "--epochs", "0"), "epochs must be at least 1"),
        (("train", "--data", "{folder}", *SMALL, "--val-share", "1.5"), "val_share"),
        (("train", "--data", "{folder}", *SMALL, "--memory", "lots"), "no number of bytes"),
        (("train", "--data", "{folder}", *SMALL, "--memory", "1MB"), "memory_bytes must be at least"),
        (("train", "--data", "{folder}", *SMALL, "--cut", "99"), "no cut 99"),
        (("train", "--data", "{folder}", *SMALL, "--codec", "int8"), "needs the cut that it is for"),
        (("train", "--data", "{folder}", *SMALL, "--accuracy", "good"), "exact, float32, fp16, bf16, int8 or a"),
        (("train", "--data", "{folder}", *SMALL, "--policy", "magic"), "neurosurgeon"),
        (("plan", "--data", "{folder}", *SMALL, "--bandwidth", "100"), "1Gbit, 100Mbit or 12MB"),
        (("plan", "--data", "{folder}", *SMALL, "--store-speed", "0"), "is no factor"),
        (("plan", "--data", "{folder}", *SMALL, "--nodes", "0"), "--nodes"),
        (("train", "--data", "{folder}", *SMALL, "--weights", "none.safetensors"), "no weights file"),
        (("train", "--data", "{folder}", *SMALL, "--weights", "{folder}/circle/000.jpg"), "cannot be read"),
        (("train", "--data", "{folder}", *SMALL, "--weights", "{other}"), "does not fit the network"),
        (("train", "--data", "{folder}", "--model", "support.networks:Small", "--until", "fc"), "nothing to train"),
        (("serve", "--data-root", "{folder}", "--listen", "7070"), "HOST:PORT"),
        (
            ("serve", "--data-root", "{folder}", "--listen", "0.0.0.0:0"),
            "--tenants, or start it with --allow-anonymous",
        ),
        (("io", "--socket", "{folder}/new/io.sock"), "give one of them"),
        (("io", "--data-root", "{folder}/none"), "--data-root: there is no folder"),
        (("serve", "--data-root", "file://{folder}/none"), "--data-root: there is no folder"),
        (("io", "--socket", "{open}/io.sock", "--data-root", "{folder}"), "0700"),
        (("io", "--data-root", "{folder}", "--memory", "64MiB", "--window", "65MiB"), "window_bytes"),
        (("serve", "--data-root", "{folder}", "--tenants", "{folder}/none.toml"), "none.toml"),
        (("serve", "--data-root", "{folder}", "--control-config", "{folder}/none.toml"), "none.toml"),
        (("serve", "--data-root", "{folder}", "--prices", "1,2"), "--prices takes GB,HOUR,CURRENCY"),
        (("serve", "--data-root", "{folder}", "--prices", "1,2,EUR", "--control", "none"), "serves no control plane"),
        (("index", "photos/"), "Missing option '--data'. Write --data photos/."),
        (("control",), "Missing option '--config'. Write --config FILE: TOML file of the resources"),
        (
            ("train", "--data", "{folder}", *SMALL, "--targets", "age"),
            "no column 'age' for targets, only labels",
        ),
        (
            ("train", "--data", "{folder}", "--model", "x:y"),
            "option '--until'. Write --until LAYER: last frozen module, such as layer3",
        ),
    ],
)
def test_reports_a_users_mistake_in_one_sentence_with_exit_code_2(capsys, folder, tmp_path, arguments, sentence):
    (tmp_path / "empty").mkdir()
    one = image_folder(tmp_path / "two", per_class=1)
    for name in ("circle", "noise"):
        (one / name / "000.jpg").unlink()
    write_tensors(tmp_path / "other.safetensors", {"a": torch.zeros(1)})
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o755)
    (tmp_path / "flat").mkdir()
    (tmp_path / "flat" / "a.png").write_bytes((folder / "circle" / "000.jpg").read_bytes())
    places = {"folder": folder, "one": one, "flat": tmp_path / "flat", "other": tmp_path / "other.safetensors"}
    places |= {name: tmp_path / name for name in ("empty", "open")}
    code, out, err = run(capsys, *(part.format(**places) for part in arguments))
    assert code == 2
    assert sentence in err
    assert "Traceback" not in err
    assert out == ""


NO_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nSee the documentation"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    MemoryError(),
]


NOTES = [
    "the trained network will not be kept: give --out DIR",
    "{out} has an earlier run, which this one replaces",
    '"message": "the trained network will not be kept',
]


def test_says_before_training_what_is_lost_and_when_memory_is_short(capsys, folder, tmp_path, monkeypatch):
    (tmp_path / "frostline.json").write_text("{}")
    train, out = ("train", "--data", folder, *SMALL), ("--out", tmp_path)
    for error, options, sentence in zip(NO_MEMORY, ((), out, ("--log-format", "json")), NOTES, strict=True):
        monkeypatch.setattr("frostline.training.start.begin", Mock(side_effect=error))
        code, _, err = run(capsys, *train, *options)
        assert code == 2
        said, failed = err.splitlines()
        assert sentence.format(out=tmp_path) in said
        assert "give a smaller --batch-size" in failed
    monkeypatch.setattr("frostline.training.start.begin", Mock(side_effect=RuntimeError("something else")))
    with pytest.raises(RuntimeError, match="something else"):
        main([str(argument) for argument in train])


def test_a_report_without_its_runs_settings_is_not_replaced_without_a_word(capsys, folder, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "report.json").write_text("{}")
    code, _, err = run(capsys, "train", "--data", folder, *SMALL, "--out", out)
    assert code == 0
    assert f"{NOTES[1].format(out=out)}, except for its report, which is kept as report.N.json" in err
    assert (out / "report.1.json").read_text() == "{}"
    assert "losses" in (out / "report.json").read_text()


def test_an_unreachable_node_is_a_one_sentence_error(capsys, folder):
    code, _, err = run(capsys, "train", "--data", folder, *SMALL, "--near", "http://127.0.0.1:9")
    assert code == 1
    assert "127.0.0.1:9" in err
    assert "Traceback" not in err


def start(*arguments: object, **options) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", "from frostline.cli import main; main()", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, os.environ.get("PYTHONPATH", "")])},
        **options,
    )


def test_a_served_node_answers_and_its_port_is_taken_for_the_next(capsys, folder, tmp_path):
    serve = ("serve", "--data-root", folder, "--listen", "127.0.0.1:0", "--json")
    with (
        control_plane(tmp_path, time.time, compute_s_per_s=2.0) as (plane, state),
        start(*serve, "--control", f"{plane}?job=node") as process,
    ):
        try:
            assert process.stdout is not None
            url = json.loads(process.stdout.readline())["url"]
            assert [(record.report.job, record.report.kind) for record in state.records] == [("node", "node")]
            report = run_json(capsys, "train", "--data", folder, *SMALL, "--epochs", 1, "--near", url)
            assert any(url in item["where"] for item in report["where"])
            code, _, err = run(capsys, "serve", "--data-root", folder, "--listen", url.removeprefix("http://"))
            assert code == 2
            assert "in use" in err
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        assert process.stdout.read() == "", "one line, and nothing else"
        assert state.records == [], "it said that it ended"


def descendants(pid):
    """The processes that a process has started, and those that they have."""
    lists = [task / "children" for task in Path(f"/proc/{pid}/task").iterdir()]
    children = [int(child) for path in lists for child in path.read_text().split()]
    return [*children, *(child for each in children for child in descendants(each))]


def is_running(pid):
    """Whether a process has not ended; of one that has and was not collected the command line is empty."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes() != b""
    return False


@pytest.mark.parametrize("policy", ["best", "all_in_store"])
def test_ctrl_c_leaves_a_loadable_checkpoint_and_no_process(folder, tmp_path, policy, monkeypatch):
    monkeypatch.setenv(PLAIN, "1")  # signals and children are those that a user's shell sees
    out = tmp_path / "run"
    arguments = ("train", "--data", folder, *SMALL, "--policy", policy, "--epochs", 100_000, "--out", out)
    with start(*arguments, start_new_session=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "epoch 2" in line:
                break
        children = descendants(process.pid)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=200)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    report = json.loads((out / "report.json").read_text())
    assert report["interrupted"]
    assert report["epochs"] >= 2
    model = load_file(out / "model.safetensors")
    # A step that the interrupt ends halfway has been seen by BatchNorm, and has no loss.
    assert int(model["body.1.num_batches_tracked"]) - len(report["losses"]) in (0, 1)
    Small().load_state_dict(model)
    assert children, "the node at least"
    assert not any(map(is_running, children))


def test_jobs_share_a_service_that_reports_its_state_until_stopped(capsys, folder, tmp_path, monkeypatch):
    socket = tmp_path / "here" / "io.sock"
    how = ("train", "--data", folder, *SMALL, "--epochs", 1, "--seed", 5)
    monkeypatch.setenv("FROSTLINE_IO", "")
    alone = run_json(capsys, *how)
    serve = ("io", "--socket", socket, "--data-root", folder, "--memory", "64MiB", "--json")
    with (
        control_plane(tmp_path, time.time, requests=4.0, bytes_per_s=1e9) as (plane, state),
        start(*serve, "--control", f"{plane}?job=io") as process,
    ):
        try:
            url = json.loads(process.stdout.readline())["url"]
            assert url == f"unix://{socket}"
            monkeypatch.setenv("FROSTLINE_IO", url)
            shared = run_json(capsys, *how)
            assert shared["losses"] == alone["losses"]
            assert any(url in item["where"] for item in shared["where"])
            until(lambda: max(record.report.moved_bytes for record in state.records) > 0)
            assert [record.report.kind for record in state.records] == ["io", "cache"]
            until(lambda: run_json(capsys, "io", "--socket", socket, "--status")["jobs"] == {})
            stands = run_json(capsys, "io", "--socket", socket, "--status")
            assert stands["totals"]["samples"] >= 24
            assert stands["window"]["used_bytes"] == 0
            code, out, _ = run(capsys, "io", "--socket", socket, "--status")
            assert code == 0
            assert "bytes under way" in out
            code, _, err = run(capsys, "io", "--socket", socket, "--data-root", folder)
            assert code == 2
            assert "already" in err
        finally:
            process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=200)
        assert (process.returncode, err) == (-signal.SIGTERM, "")
        assert state.records == []
    assert not socket.exists()
    code, _, err = run(capsys, "io", "--socket", socket, "--status")
    assert code == 1
    assert f"frostline io --socket {socket}" in err


def test_a_service_ends_with_ctrl_c(folder, tmp_path):
    socket = tmp_path / "here" / "io.sock"
    with start("io", "--socket", socket, "--near", "http://127.0.0.1:9", "--json") as process:
        assert json.loads(process.stdout.readline())["asks"] == ["http://127.0.0.1:9"]
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    assert not socket.exists()
