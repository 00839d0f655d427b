"""A run is computed again: it is equal to the bit, within the bound, or what differs is named."""

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image

from frostline.cache import FeatureStore
from frostline.cli.train import train
from frostline.cli.verify import verify
from frostline.datasets import Dataset
from frostline.training.report.steps import RecordedSteps
from support.commands import run, run_json, trained
from support.images import image_folder
from support.networks import Small

AGAIN = ("--model", "support.networks:Small")
HOW = (*AGAIN, "--until", "stem", "--epochs", "3", "--batch-size", "3", "--val-share", "0.25", "--augment")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return image_folder(tmp_path_factory.mktemp("verified"), per_class=8)


@pytest.fixture(scope="module")
def whole(data, near, tmp_path_factory):
    """The folder of a run that has ended; copy it, and don't write to it."""
    return trained(tmp_path_factory.mktemp("whole"), "--data", data, *HOW, *near, "--accuracy", "exact")


@pytest.fixture
def copied(whole, tmp_path):
    return Path(shutil.copytree(whole, tmp_path / "run"))


def lines(folder):
    return (folder / "steps.jsonl").read_text().splitlines()


def test_a_run_is_equal_to_the_bit_at_its_own_node(capsys, whole, near):
    done = run_json(capsys, "verify", whole, *AGAIN, *near)
    assert (done["verdict"], done["differences"], done["error"]) == ("equal", [], 0.0)
    assert done["samples"] == done["equal_samples"] == 3 * len(done["steps"]) > 0


def test_another_node_and_a_copy_of_the_data_give_the_same_bits(capsys, whole, data, near, tmp_path):
    shutil.copytree(data, tmp_path / "elsewhere")
    done = run_json(capsys, "verify", whole, *AGAIN, *near, "--data", tmp_path / "elsewhere", "--steps", 2)
    assert (done["verdict"], len(done["steps"]), done["engines"]["now"]) == ("equal", 2, ["torch-eager"])
    # Without --near a node of its own computes them; none is taken from the folder, and it says so.
    code, out, err = run(capsys, "verify", whole, *AGAIN, "--trials", 0, "--steps", 1)
    assert code == 0
    assert "All is equal to the bit." in out
    assert "--near http://127.0.0.1" in " ".join(err.split())


def test_fewer_bits_are_within_the_bound_of_their_accuracy(capsys, whole, near):
    how = ("--accuracy", "bf16", "--cut", 2, "--codec", "bf16")
    done = run_json(capsys, "verify", whole, *AGAIN, *near, *how)
    assert (done["verdict"], done["equal_samples"], done["allowed"]) == ("within", 0, 0.3)
    assert 1e-4 < done["error"] < 0.01


def differs(capsys, *arguments):
    """What a run that differs says: the parts that do, their sentences, and the whole."""
    code, out, err = run(capsys, "verify", *arguments, "--json")
    assert code == 3, err
    done = json.loads(out)
    assert done["verdict"] == "differs"
    said = {}
    for one in done["differences"]:
        said.setdefault(one["part"], []).append(one["what"])
    return said, done


def first_object(folder, data):
    """The object of a sample of the first step that was recorded."""
    [step, *_] = RecordedSteps.read(folder).steps
    samples = Dataset(str(data)).samples
    return samples.objects[samples.ids.tolist().index(step.ids[1])]


def test_an_object_that_was_changed_is_named(capsys, whole, data, near, tmp_path):
    changed = Path(shutil.copytree(data, tmp_path / "changed"))
    name = first_object(whole, data)
    Image.new("RGB", (50, 50), "red").save(changed / name)
    said, done = differs(capsys, whole, *AGAIN, *near, "--data", changed, "--steps", 1)
    assert said["data"] == [
        "the listing of the samples to train on is another one (names, sizes, versions or the split)",
        f"step 1: other name, size or version of {name}",
    ]
    [features] = said["features"]
    assert "step 1: 1 of 3 samples differ by" in features
    assert features.endswith(f"such as {name}")
    assert (done["samples"], done["equal_samples"]) == (3, 2)


def test_bytes_that_changed_behind_an_equal_listing_are_told_by_their_features(capsys, whole, data, near, tmp_path):
    changed = Path(shutil.copytree(data, tmp_path / "changed"))
    image = changed / first_object(whole, data)
    status, content = image.stat(), image.read_bytes()
    Image.new("RGB", (60, 48), "blue").save(image)
    image.write_bytes(image.read_bytes().ljust(len(content), b"\0"))
    os.utime(image, ns=(status.st_atime_ns, status.st_mtime_ns))
    said, done = differs(capsys, whole, *AGAIN, *near, "--data", changed, "--steps", 1)
    assert said.keys() == {"features"}
    assert image.name in said["features"][0]
    assert done["equal_samples"] == 2


def test_an_object_that_cannot_be_read_is_named(capsys, whole, data, near, tmp_path):
    broken = Path(shutil.copytree(data, tmp_path / "broken"))
    name = first_object(whole, data)
    (broken / name).write_bytes(b"no image")
    code, out, err = run(capsys, "verify", whole, *AGAIN, *near, "--data", broken, "--steps", 1)
    assert code in {1, 2, 3}
    assert name in " ".join((out + err).split())


def test_no_step_is_recorded_behind_a_sample_that_was_left_out(capsys, data, near, tmp_path):
    broken = Path(shutil.copytree(data, tmp_path / "broken"))
    (broken / "noise" / "005.jpg").write_bytes(b"no image")
    out = trained(tmp_path / "run", "--data", broken, *HOW, *near, "--max-skipped-fraction", 0.5, "--val-share", 0)
    capsys.readouterr()
    assert len(json.loads((out / "report.json").read_text())["skipped"]) == 1
    steps = RecordedSteps.read(out).steps
    assert len(steps) < 8
    code, said, err = run(capsys, "verify", out, *AGAIN, *near, "--json")
    assert code == (0 if steps else 3), err
    assert json.loads(said)["samples"] == 3 * len(steps)


def test_steps_before_further_layers_were_trained_are_recorded(capsys, data, near, tmp_path):
    how = (*AGAIN, "--until", "body", "--epochs", 2, "--unfreeze", "2:body", "--batch-size", 6)
    out = trained(tmp_path / "run", "--data", data, *how, *near)
    capsys.readouterr()
    steps = RecordedSteps.read(out).steps
    assert {step.epoch for step in steps} == {0}
    done = run_json(capsys, "verify", out, *AGAIN, *near)
    assert (done["verdict"], done["steps"]) == ("equal", [step.step for step in steps])


def test_a_tensor_that_has_other_values_is_named(capsys, whole, near, monkeypatch):
    plain = Small.__init__

    def changed(self, *arguments):
        plain(self, *arguments)
        with torch.no_grad():
            self.stem[0].bias[3] += 1

    monkeypatch.setattr(Small, "__init__", changed)
    said, done = differs(capsys, whole, *AGAIN, *near)
    assert said["weights"] == ["of the tensors that are not trained, stem.0.bias hold other values"]
    assert said.keys() == {"weights", "features"}
    assert done["equal_samples"] == 0


def test_other_layers_on_the_same_weights_are_told_from_other_weights(capsys, whole, near, monkeypatch):
    plain = Small.__init__

    def changed(self, *arguments):
        plain(self, *arguments)
        self.stem[2] = torch.nn.ReLU6(inplace=True)

    monkeypatch.setattr(Small, "__init__", changed)
    said, _ = differs(capsys, whole, *AGAIN, *near, "--steps", 1)
    assert "layers" in said
    assert "weights" not in said


@pytest.mark.parametrize("change", [{"batch_size": 2}, {"val_share": 0.5}])
def test_another_order_is_one(capsys, copied, near, change):
    path = copied / "frostline.json"
    value = json.loads(path.read_text())
    path.write_text(json.dumps({**value, "options": {**value["options"], **change}}))
    said, done = differs(capsys, copied, *AGAIN, *near)
    assert "order" in said
    assert ("data" in said) == ("val_share" in change)
    assert "features" not in said
    assert done["samples"] < 3 * len(done["steps"])


def test_a_line_of_the_record_that_was_changed_is_named_and_the_others_are_compared(capsys, copied, near):
    first, second, third, *rest = lines(copied)
    third = third.replace('"rows": "', '"rows": "AAAA', 1)
    (copied / "steps.jsonl").write_text("\n".join((first, second, third, *rest)) + "\n")
    said, done = differs(capsys, copied, *AGAIN, *near)
    assert said == {"record": ["line 3 is not as it was written"]}
    assert done["samples"] == done["equal_samples"] > 0
    assert 2 not in done["steps"]


def signed(value):
    """A line as the record's writer makes it."""
    made = hashlib.blake2b(json.dumps(value).encode(), digest_size=16).hexdigest()
    return json.dumps({**value, "blake2b": made})


def test_a_strangers_record_is_answered_with_sentences(capsys, copied, near):
    first, second, *_ = lines(copied)
    step = json.loads(second)
    del step["blake2b"]
    others = [{"number": 1 << 50}, {"epoch": 1 << 52}, {"epoch": 1 << 31}, {"engine": "\x1b[2J"}]
    planted = [signed({**step, "step": 100 + place, **change}) for place, change in enumerate(others)]
    (copied / "steps.jsonl").write_text("\n".join((first, second, *planted)) + "\n")
    code, out, err = run(capsys, "verify", copied, *AGAIN, *near)
    assert code == 3, err
    assert "\x1b" not in out + err
    assert r"\x1b[2J" in out
    assert "step 100 is said to be batch" in " ".join(out.split())


def test_features_that_a_cache_keeps_wrongly_are_told_from_those_of_the_run(capsys, data, near, tmp_path, monkeypatch):
    how = [*(word for word in HOW if word != "--augment"), "--epochs", 1, "--cache", tmp_path / "cache"]
    out = trained(tmp_path / "run", "--data", data, *how, *near)
    capsys.readouterr()
    again = ("verify", out, *AGAIN, *near, "--steps", 2, "--cache", tmp_path / "cache")
    done = run_json(capsys, *again)
    assert done["verdict"] == "equal"
    plain = FeatureStore.get_into

    def wrong(self, scope, keys, layout, out):
        found = plain(self, scope, keys, layout, out)
        assert found.any(), "they are read from there"
        for array in out if isinstance(out, (tuple, list)) else [out]:
            array += 1
        return found

    monkeypatch.setattr(FeatureStore, "get_into", wrong)
    said, done = differs(capsys, *again[1:])
    assert said.keys() == {"cache"}
    assert done["samples"] == done["equal_samples"] == 6


def test_without_a_record_and_beside_the_store_it_says_why(capsys, copied, near, tmp_path):
    (copied / "steps.jsonl").unlink()
    code, _, err = run(capsys, "verify", copied, *AGAIN, *near)
    assert code == 2
    assert "which frostline train --out writes as its steps go by" in " ".join(err.split())
    code, _, err = run(capsys, "verify", tmp_path, *AGAIN)
    assert code == 2
    assert "there is no run in" in err
    code, _, err = run(capsys, "verify", copied)
    assert code == 2
    assert "which runs code: where that is to be, give it again (frostline verify" in " ".join(err.split())


def test_its_options_are_those_of_a_run_and_its_help_names_those_that_may_be_given():
    mine, theirs = ({param.name for param in verb.params} for verb in (verify, train))
    assert theirs - mine == {"checkpoint_every", "log_format", "out", "resume", "trace"}
    assert mine - theirs == {"run", "steps"}
    shown = {param.name for param in verify.shown_options(is_short=True)}
    assert shown == {
        *("run", "steps", "near", "data", "model", "until", "loss", "accuracy", "cut", "codec", "policy", "device"),
        *("memory", "cache_folder", "local_tier", "trials", "as_json"),
    }
