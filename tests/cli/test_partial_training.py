"""Adapters, and layers that are trained from later epochs on: the losses of plain loops that do the same."""

import csv
import io
import json

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import frostline as fl
from frostline.cli import main
from frostline.cli.train import finish
from frostline.core.errors import SettingError
from frostline.core.events import StepFinished
from frostline.training.networks import load_model
from frostline.training.recipe import UnfreezeStep, Unfreezing
from frostline.training.report.report import Record
from support.images import image_folder
from support.networks import adapted_blocks
from support.reports import a_report

BLOCKS, SMALL = "support.networks:Blocks", "support.networks:Small"
HOW = ("--batch-size", 6, "--val-share", 0.25, "--accuracy", "exact")


@pytest.fixture(scope="module", autouse=True)
def _cache_of_its_own(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return image_folder(tmp_path_factory.mktemp("images"), per_class=8)


@pytest.fixture(scope="module")
def near(shared_node):
    return shared_node.url


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    said = capsys.readouterr()
    return ended.value.code, said.out, " ".join(said.err.split())


def trained(capsys, folder, near, *arguments):
    code, said, err = run(capsys, "train", "--data", folder, "--near", near, *HOW, *arguments, "--json")
    assert code == 0, err
    return json.loads(said)


def plain_loop(folder, near, network, epochs, prepare):
    """Losses of a whole network on pixels, and held out; ``prepare`` says what an epoch trains, and sets modes."""
    data, losses, scored, optimizer = fl.Dataset(folder), [], [], None
    with fl.offload(None, data, preprocess=network.preprocess, near=near) as job:
        train, held = job.data.split(0.25)
        torch.manual_seed(0)
        for epoch in range(epochs):
            added = prepare(network.model, epoch)
            if optimizer is None:
                optimizer = torch.optim.Adam(added, 2e-3)
            elif added:
                optimizer.add_param_group({"params": added})
            for batch in job.loader(6, data=train, shuffle=True, epoch=epoch):
                loss = nn.functional.cross_entropy(network.model(batch.features), batch.labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            network.model.eval()
            with torch.no_grad():
                [batch] = job.loader(len(held), data=held)
                scored.append(float(nn.functional.cross_entropy(network.model(batch.features), batch.labels)))
        with torch.no_grad():
            likely = [network.model(batch.features).softmax(1) for batch in job.loader(6)]
    return losses, scored, torch.cat(likely).amax(1).tolist()


def interrupted_after(step, patch):
    plain = Record.__call__

    def counted(self, event):
        plain(self, event)
        if isinstance(event, StepFinished) and event.step == step:
            raise KeyboardInterrupt

    patch.setattr(Record, "__call__", counted)


LORA = ("--model", BLOCKS, "--until", "layers.1", "--lora", "layers.2-3:r=4,alpha=8", "--epochs", 2)


def test_adapters_have_the_losses_of_a_plain_loop_go_on_after_a_break_and_predict(
    capsys, folder, near, tmp_path, monkeypatch
):
    from peft import LoraConfig, inject_adapter_in_model

    def prepare(model, epoch):
        model.train()
        for layer in model.layers:
            layer.norm.eval()
        for frozen in (model.stem, model.layers[0], model.layers[1]):
            frozen.eval()
        return [parameter for parameter in model.parameters() if parameter.requires_grad] if epoch == 0 else []

    network = load_model(BLOCKS, classes=len(fl.Dataset(folder).classes))
    torch.manual_seed(0)
    inject_adapter_in_model(LoraConfig(target_modules=["2.linear", "3.linear"], r=4, lora_alpha=8), network.model)
    network.model.fc.requires_grad_(True)
    losses, scored, likely = plain_loop(folder, near, network, 2, prepare)

    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        interrupted_after(3, patch)
        asked = ("train", "--data", folder, "--near", near, *HOW, *LORA, "--checkpoint-every", 2, "--out", out)
        assert run(capsys, *asked)[0] == 130
    code, said, err = run(capsys, "train", "--resume", out, "--model", BLOCKS, "--near", near, "--json")
    assert code == 0, err
    report = json.loads(said)
    assert report["losses"] == pytest.approx(losses, rel=1e-4)
    assert report["val_losses"] == pytest.approx(scored, rel=1e-4)
    assert report["resumed_steps"] == 2
    assert report["settings"]["lora"] == "layers.2-3:r=4,alpha=8"
    code, said, err = run(capsys, "predict", "--run", out, "--model", BLOCKS, "--data", folder, "--near", near)
    assert code == 0, err
    found = [float(row["probability"]) for row in csv.DictReader(io.StringIO(said))]
    assert found == pytest.approx(likely, rel=1e-3)


def test_a_network_that_brings_adapters_of_its_own_is_written_as_it_is(capsys, folder, near, tmp_path):
    network = ("--model", "support.networks:adapted_blocks", "--until", "layers.1", "--epochs", 1)
    trained(capsys, folder, near, *network, "--out", tmp_path / "run")
    written = load_file(tmp_path / "run" / "model.safetensors")
    assert written.keys() == adapted_blocks().state_dict().keys()


LATER = ("--model", SMALL, "--until", "features", "--unfreeze", "2:body", "--epochs", 3)


def body_later(model, epoch):
    """The classifier, and from the second epoch on the body too."""
    if epoch == 0:
        model.requires_grad_(False)
        model.fc.requires_grad_(True)
    if epoch == 1:
        model.body.requires_grad_(True)
    model.train()
    model.stem.eval()
    if epoch == 0:
        model.body.eval()
    return list({0: model.fc, 1: model.body}[epoch].parameters()) if epoch < 2 else []


@pytest.fixture(scope="module")
def expected(folder, near):
    network = load_model(SMALL, classes=len(fl.Dataset(folder).classes))
    return plain_loop(folder, near, network, 3, body_later)[:2]


def test_layers_unfrozen_later_have_a_plain_loops_losses_and_use_the_cache(capsys, folder, near, tmp_path, expected):
    first = trained(capsys, folder, near, *LATER, "--cache", tmp_path / "kept")
    assert (first["losses"], first["val_losses"]) == (
        pytest.approx(expected[0], rel=1e-4),
        pytest.approx(expected[1], rel=1e-4),
    )
    samples, names = len(list(folder.rglob("*.jpg"))), {way["name"] for way in first["ways"]}
    # Each frost line's features come once.
    assert sum(way["samples"] for way in first["ways"]) == 2 * samples
    assert len(names) == 2
    again = trained(capsys, folder, near, *LATER, "--cache", tmp_path / "kept")
    assert again["losses"] == first["losses"]
    assert again["ways"] == []
    _, said, _ = run(capsys, "train", "--data", folder, "--near", near, *HOW, *LATER, "--cache", tmp_path / "kept")
    assert "kept on this machine by an earlier job" in said


@pytest.mark.parametrize("step", [4, 8])
def test_a_run_that_unfreezes_layers_goes_on_after_a_break(capsys, folder, near, tmp_path, monkeypatch, expected, step):
    out = tmp_path / "run"
    assert len(expected[0]) == 9
    with monkeypatch.context() as patch:
        interrupted_after(step, patch)
        asked = ("train", "--data", folder, "--near", near, *HOW, *LATER, "--checkpoint-every", 2, "--out", out)
        assert run(capsys, *asked)[0] == 130
    code, said, err = run(capsys, "train", "--resume", out, "--model", SMALL, "--near", near, "--json")
    assert code == 0, err
    assert "body is trained too from epoch 2 on: the frost line is" in err
    report = json.loads(said)
    assert report["losses"] == pytest.approx(expected[0], rel=1e-4)
    assert 2 <= report["resumed_steps"] <= step
    code, _, err = run(capsys, "train", "--resume", out, "--model", SMALL, "--unfreeze", "3:body")
    assert (code, "began with --unfreeze 2:body" in err) == (2, True)


def test_adapters_stay_trained_when_layers_before_them_are_unfrozen(capsys, folder, near, tmp_path, monkeypatch):
    from peft import LoraConfig, inject_adapter_in_model

    def prepare(model, epoch):
        model.layers[1].requires_grad_(epoch == 1)
        model.train()
        frozen = (model.stem, *model.layers[: 2 - epoch], *(layer.norm for layer in model.layers[2:]))
        for module in frozen:
            module.eval()
        if epoch == 1:
            return list(model.layers[1].parameters())
        return [parameter for parameter in model.parameters() if parameter.requires_grad]

    network = load_model(BLOCKS, classes=len(fl.Dataset(folder).classes))
    torch.manual_seed(0)
    inject_adapter_in_model(LoraConfig(target_modules=["2.linear", "3.linear"], r=4, lora_alpha=8), network.model)
    network.model.fc.requires_grad_(True)
    losses, scored, _ = plain_loop(folder, near, network, 2, prepare)

    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        interrupted_after(4, patch)
        asked = ("train", "--data", folder, "--near", near, *HOW, *LORA, "--unfreeze", "2:layers.1", "--out", out)
        assert run(capsys, *asked, "--checkpoint-every", 2)[0] == 130
    code, said, err = run(capsys, "train", "--resume", out, "--model", BLOCKS, "--near", near, "--json")
    assert code == 0, err
    assert json.loads(said)["losses"] == pytest.approx(losses, rel=1e-4)
    assert json.loads(said)["val_losses"] == pytest.approx(scored, rel=1e-4)
    assert "lora_" not in " ".join(load_file(out / "model.safetensors"))


def test_a_layer_with_an_adapter_is_not_unfrozen(capsys, folder, near):
    asked = ("train", "--data", folder, "--near", near, *HOW, *LORA)
    for layer, named in (("layers.2", "layers.2.linear"), ("layers", "layers.2.linear"), ("layers.3.linear",) * 2):
        code, _, err = run(capsys, *asked, "--unfreeze", f"2:{layer}")
        assert (code, f"{named} has an adapter" in err) == (2, True), err


def test_patience_begins_where_the_last_layers_are_unfrozen(capsys, folder, near, tmp_path):
    # So small a step that nothing gets better: without layers that are unfrozen it ends after the second epoch.
    asked = ("--model", SMALL, "--until", "features", "--epochs", 5, "--learning-rate", 1e-30, "--patience", 1)
    first = trained(capsys, folder, near, *asked)
    later = trained(capsys, folder, near, *asked, "--unfreeze", "4:body", "--out", tmp_path / "run")
    assert (first["epochs"], first["head_epoch"]) == (2, 1)
    # After layers are unfrozen BatchNorm learns without any step, which may well lower the loss.
    assert later["head_epoch"] == 1 + later["val_losses"].index(min(later["val_losses"]))
    assert later["epochs"] == min(5, max(later["head_epoch"], 3) + 1)


def test_epochs_and_layers_are_read():
    found = Unfreezing.parse("3:layer4+norm, 6:layer3")
    assert found.steps == (UnfreezeStep(epoch=3, layers=("layer4", "norm")), UnfreezeStep(epoch=6, layers=("layer3",)))
    assert found.layers == ("layer4", "norm", "layer3")
    assert Unfreezing.parse(None).steps == ()
    assert [found.until_next(epoch, 9) for epoch in (0, 2, 5)] == [2, 3, 4]
    for text in ("", "layer4", "1:layer4", "3:", "6:a,3:b", "3:a,3:b", "x:a"):
        with pytest.raises(SettingError, match="such as"):
            Unfreezing.parse(text)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--unfreeze", "2:bodi", "--epochs", 3), "no layer 'bodi'"),
        (("--unfreeze", "2:body,3:stem", "--epochs", 3), "nothing is left that could run beside the data"),
        (("--unfreeze", "2:body"), "so many epochs or more"),
        (("--unfreeze", "4:body", "--epochs", 3), "trains more from epoch 4 on"),
        (("--unfreeze", "2:body", "--epochs", 3, "--cut", 1), "cut is for one"),
        (("--lora", "head:r=2"), "modules that take one are stem.0, body.0"),
    ],
)
def test_what_cannot_be_trained_so_is_refused_before_it_begins(capsys, folder, near, options, words):
    asked = ("train", "--data", folder, "--near", near, *HOW, "--model", SMALL, "--until", "features", *options)
    code, _, err = run(capsys, *asked)
    assert (code, words in err) == (2, True), err


def test_where_features_came_from_is_said_of_steps_that_were_made_here_alone(capsys):
    def shown(**changes):
        finish(a_report(ways=(), **changes), None, as_json=False)
        return " ".join(capsys.readouterr().out.split())

    kept = "features of all samples kept on this machine by an earlier job"
    assert kept in shown(first_step_s=2.5)
    assert kept not in shown(first_step_s=2.5, settings={"policy": "all_in_store"}), "the node computed them"
    resumed = shown(first_step_s=None, wire_bytes=405_000, baseline_wire_bytes=0)
    assert kept not in resumed
    assert "first step after no step was left" in resumed
    assert "fewer bytes –" in resumed
    assert "first step after - " in shown(first_step_s=None, interrupted=True)
