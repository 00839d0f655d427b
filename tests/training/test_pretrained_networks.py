"""Networks by name: pretrained ones from their libraries' caches, random ones only where they are asked for."""

import re
from pathlib import Path

import pytest
import timm
import torch
import torchvision
from safetensors.torch import save_file

from frostline.core.errors import FrostlineError, ModelError, WeightsMissing
from frostline.core.events import WeightsLoaded
from frostline.models import freeze
from frostline.training.networks import load_model
from frostline.training.pretrained import import_package
from support.networks import Small

SHUFFLENET = "torchvision:shufflenet_v2_x0_5"
SHUFFLENET_FILE = "shufflenetv2_x0.5-f707e7126e.pth"
RESNET = "timm:test_resnet"
RESNET_REPOSITORY = "timm/test_resnet.r160_in1k"


@pytest.fixture(autouse=True)
def caches(tmp_path, monkeypatch, no_hub):
    """Empty caches, and a network on which nothing answers."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    return tmp_path


def put_shufflenet(caches: Path) -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    state = torchvision.models.shufflenet_v2_x0_5(weights=None).state_dict()
    folder = caches / "torch" / "hub" / "checkpoints"
    folder.mkdir(parents=True)
    torch.save(state, folder / SHUFFLENET_FILE)
    return state


def put_resnet(caches: Path) -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    state = timm.create_model("test_resnet", pretrained=False).state_dict()
    folder = caches / "hub" / f"models--{RESNET_REPOSITORY.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc")
    (folder / "snapshots" / "abc").mkdir(parents=True)
    save_file(state, folder / "snapshots" / "abc" / "model.safetensors")
    return state


@pytest.mark.parametrize(
    ("name", "put", "until", "source"),
    [
        (SHUFFLENET, put_shufflenet, "conv5", f"ShuffleNet_V2_X0_5_Weights.IMAGENET1K_V1.*{SHUFFLENET_FILE}"),
        (RESNET, put_resnet, "layer4", f"{RESNET_REPOSITORY}.*model.safetensors"),
    ],
)
def test_the_frozen_layers_have_the_weights_of_the_librarys_cache(caches, name, put, until, source):
    state, events = put(caches), []
    network = load_model(name, classes=3, on_event=events.append)
    frozen = dict(freeze(network.model, until, input_shape=network.preprocess.shape).named_parameters())
    held = {path: item for path, item in frozen.items() if not item.requires_grad}
    assert len(held) >= len(frozen) - 2
    assert all(torch.equal(item, state[path]) for path, item in held.items())
    assert events == [WeightsLoaded(model=name, source=network.weights)]
    assert re.search(source, network.weights)


@pytest.mark.parametrize(
    ("name", "file"), [(SHUFFLENET, SHUFFLENET_FILE), (RESNET, f"model.safetensors of {RESNET_REPOSITORY}")]
)
def test_pretrained_weights_that_are_nowhere_are_a_sentence_that_names_the_file(caches, name, file):
    events = []
    with pytest.raises(WeightsMissing, match=r"not on this machine.*cannot be fetched.*--weights random") as refused:
        load_model(name, classes=3, on_event=events.append)
    assert file in str(refused.value)
    assert "\n" not in str(refused.value)
    assert events == []


@pytest.mark.parametrize("name", [SHUFFLENET, RESNET, "demo:efficientnet_lite0"])
def test_random_weights_are_to_be_had_by_their_name(name):
    events = []
    network = load_model(name, classes=3, weights="random", on_event=events.append)
    assert network.weights == "random"
    assert events == [WeightsLoaded(model=name, source="random")]


def test_a_factory_makes_its_weights_itself():
    with pytest.raises(ModelError, match="makes its weights itself"):
        load_model("support.networks:Small", classes=3, weights="random")
    assert isinstance(load_model("support.networks:Small", classes=3).model, Small)


def test_a_network_without_published_weights_is_refused():
    with pytest.raises(WeightsMissing, match="timm publishes no weights of botnet50ts_256"):
        load_model("timm:botnet50ts_256", classes=3)


def test_weights_that_cannot_be_read_are_a_sentence(caches):
    put_shufflenet(caches)
    (caches / "torch" / "hub" / "checkpoints" / SHUFFLENET_FILE).write_bytes(b"no weights")
    with pytest.raises(FrostlineError, match=f"{SHUFFLENET_FILE} cannot be loaded"):
        load_model(SHUFFLENET, classes=3)


def test_a_network_is_given_the_pixels_that_its_weights_expect():
    def preset(name):
        steps = load_model(f"torchvision:{name}", classes=3, weights="random").preprocess.to_json()["steps"]
        return {key: value for step in steps for key, value in step.items()}

    assert (preset("resnet18")["shorter"], preset("resnet18")["size"]) == (256, 224)
    assert (preset("efficientnet_b1")["shorter"], preset("efficientnet_b1")["size"]) == (255, 240)


def test_a_missing_package_is_named_with_the_line_that_installs_it():
    with pytest.raises(ModelError, match=r"needs timmm, .*no_such_package.*: pip install timmm$"):
        import_package("no_such_package", "timmm")
    with pytest.raises(ModelError, match=r"needs frostline\[demo\], .*: pip install 'frostline\[demo\]'$"):
        import_package("no_such_package", "frostline[demo]")


def test_a_torchvision_of_another_pytorch_is_named_and_not_what_imports_it(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    for name, error in (("uses_vision", "operator torchvision::nms does not exist"), ("uses_none", "no symbol")):
        (tmp_path / f"{name}.py").write_text(f"raise RuntimeError({error!r})")
    with pytest.raises(ModelError, match=r"needs timm, .*nms.*: install the torchvision that belongs to this PyTorch$"):
        import_package("uses_vision", "timm")
    with pytest.raises(ModelError, match=r"needs timm, .*: install the timm that belongs to this PyTorch$"):
        import_package("uses_none", "timm")
