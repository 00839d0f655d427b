"""Networks of transformers, from folders that ``save_pretrained`` wrote: weights, classes and preparation of images."""

import json
import re

import numpy as np
import pytest
import torch
import transformers as hf
from PIL import Image

from frostline.cli import main
from frostline.core.errors import ModelError, UnknownModel, WeightsMismatch, WeightsMissing
from frostline.models.cutting import cut_network
from frostline.models.freezing import freeze
from frostline.preprocess import CenterCrop, Decode, Normalize, Resize, Squeeze
from frostline.training.hugging_face import as_saved, config_of
from frostline.training.networks import load_model
from frostline.training.pretrained import processor_of
from frostline.training.run_config import write_tensors

SIDE = 32
NARROW = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 3, "intermediate_size": 96}
CONVS = {"depths": [1, 1], "hidden_sizes": [16, 32]}
CONFIGS = {
    "vit": lambda: hf.ViTConfig(**NARROW, image_size=SIDE, patch_size=8),
    "dinov2": lambda: hf.Dinov2Config(**{**NARROW, "mlp_ratio": 2}, image_size=SIDE, patch_size=8),
    "convnext": lambda: hf.ConvNextConfig(**CONVS, num_stages=2),
    "resnet": lambda: hf.ResNetConfig(**CONVS, embedding_size=16, layer_type="basic"),
}
UNTIL = {"vit": "vit.layers.1", "convnext": "convnext.encoder.stages.0", "resnet": "resnet.encoder.stages.0"}
PROCESSOR = {
    "do_resize": True,
    "size": {"shortest_edge": 36},
    "resample": 3,
    "do_center_crop": True,
    "crop_size": {"height": SIDE, "width": SIDE},
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.5, 0.4, 0.3],
    "image_std": [0.2, 0.2, 0.1],
}


pytestmark = pytest.mark.usefixtures("no_hub")


def saved(folder, kind="vit", dtype=torch.float32, processor=PROCESSOR, make=None):
    """A folder as people have them."""
    torch.manual_seed(3)
    model = hf.AutoModelForImageClassification.from_config(CONFIGS[kind]()) if make is None else make()
    model.to(dtype).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return model.eval()


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_saved_network_comes_back_with_its_weights_in_its_precision(kind, dtype, tmp_path):
    theirs = saved(tmp_path, kind, dtype)
    ours = load_model(f"hf:{tmp_path}", classes=2).model.eval()
    pixels = torch.randn(8, 3, SIDE, SIDE).to(dtype)
    with torch.no_grad():
        assert torch.equal(ours(pixels), theirs(pixels).logits)
    assert {parameter.dtype for parameter in ours.parameters()} == {dtype}


@pytest.mark.parametrize("kind", UNTIL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_saved_network_is_cut_and_gets_the_classes_of_the_data(kind, dtype, tmp_path):
    saved(tmp_path, kind, dtype)
    found = load_model(f"hf:{tmp_path}", classes=5)
    freeze(found.model, UNTIL[kind], input_shape=found.preprocess.shape)
    network = cut_network(found.model, found.preprocess.shape)
    assert network.fallback is None
    assert len(network.cuts) > 5
    last = network.frost_line
    features = [torch.zeros(2, *shape, dtype=dtype) for shape in last.shapes]
    assert network.head(features).shape == (2, 5)


def test_a_backbone_without_a_classifier_gets_a_fresh_one(tmp_path):
    theirs = saved(tmp_path, make=lambda: hf.ViTModel(CONFIGS["vit"]()))
    found = load_model(f"hf:{tmp_path}", classes=4)
    own = dict(found.model.network.vit.named_parameters())
    assert all(
        torch.equal(own[name], parameter) for name, parameter in theirs.named_parameters() if "pooler" not in name
    )
    assert found.model(torch.zeros(2, 3, SIDE, SIDE)).shape == (2, 4)


def test_a_file_that_lacks_frozen_weights_is_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    saved(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    lost = next(name for name in tensors if ".1." in name)
    save_file({name: tensor for name, tensor in tensors.items() if name != lost}, file, {"format": "pt"})
    with pytest.raises(WeightsMismatch, match=r"lacks 1 of the network's tensors, such as vit\."):
        load_model(f"hf:{tmp_path}", classes=2)


def changed_config(folder, **fields):
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


@pytest.mark.promise("equal", mended="frozen layers whose weights had another shape were drawn at random")
def test_a_file_whose_frozen_weights_have_another_shape_is_refused(tmp_path):
    saved(tmp_path)
    changed_config(tmp_path, intermediate_size=64)
    with pytest.raises(WeightsMismatch, match=r"has in another shape \d+ of the network's tensors, such as vit\."):
        load_model(f"hf:{tmp_path}", classes=2)


@pytest.mark.promise(
    "secret", mended="a configuration could name a kernel of the hub, which transformers fetches and runs"
)
@pytest.mark.parametrize("weights", [None, "random"])
@pytest.mark.parametrize(
    "fields",
    [
        {"attn_implementation": "owner/kernel"},
        {"_attn_implementation": "owner/kernel@main:flash"},
        {"experts_implementation": "owner/kernel"},
        {"text_config": {"attn_implementation": {"": "owner/kernel"}}},
    ],
)
def test_a_configuration_that_names_code_of_the_hub_is_refused(tmp_path, fields, weights):
    saved(tmp_path)
    changed_config(tmp_path, **fields)
    with pytest.raises(ModelError, match=r"implementation in .*config\.json names code of the hub, which is not run"):
        load_model(f"hf:{tmp_path}", classes=2, weights=weights)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "no JSON", "\xff", " " * (17 << 20)], ids=["deep", "words", "bytes", "large"]
)
def test_a_configuration_that_makes_no_sense_gets_a_sentence(tmp_path, text):
    saved(tmp_path)
    (tmp_path / "config.json").write_text(text, "latin-1")
    with pytest.raises(ModelError, match=r"config\.json cannot be read"):
        load_model(f"hf:{tmp_path}", classes=2)


def test_what_a_configuration_needs_and_is_not_installed_gets_a_sentence(tmp_path):
    saved(tmp_path)
    changed_config(tmp_path, quantization_config={"quant_method": "bitsandbytes", "load_in_8bit": True})
    with pytest.raises(ModelError, match=r"cannot be loaded: .*bitsandbytes"):
        load_model(f"hf:{tmp_path}", classes=2)


def test_weights_are_read_from_safetensors_alone(tmp_path):
    model = saved(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(WeightsMissing, match=r"holds no model.safetensors, and .* from safetensors alone"):
        load_model(f"hf:{tmp_path}", classes=2)


def test_code_that_comes_with_a_network_is_not_run(tmp_path):
    saved(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoModelForImageClassification": "own.Net"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(ModelError):
        load_model(f"hf:{tmp_path}", classes=2)
    assert not (tmp_path / "ran").exists()


def test_random_weights_come_only_where_they_are_asked_for(tmp_path):
    theirs = saved(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(WeightsMissing):
        load_model(f"hf:{tmp_path}", classes=2)
    found = load_model(f"hf:{tmp_path}", classes=2, weights="random")
    assert found.weights == "random"
    assert not torch.equal(next(found.model.network.vit.parameters()), next(theirs.vit.parameters()))


@pytest.mark.parametrize("lost", ["config.json", "preprocessor_config.json"])
def test_a_folder_that_lacks_a_file_says_which(lost, tmp_path):
    saved(tmp_path)
    (tmp_path / lost).unlink()
    with pytest.raises(ModelError, match=re.escape(lost)):
        load_model(f"hf:{tmp_path}", classes=2)


def test_without_a_network_and_a_cache_the_files_to_bring_are_named():
    with pytest.raises(WeightsMissing, match=r"bring model.safetensors, config.json and preproc") as said:
        load_model("hf:google/vit-base-patch16-224", classes=2)
    assert "\n" not in str(said.value)


@pytest.mark.parametrize(
    "name", ["hf:a\0/b", "hf:a-/b", "hf:a/b..c", "hf:a/\x1b[2J", "timm:resnet18.nobody", "timm:resnet18.\0"]
)
def test_names_that_nothing_can_have_get_a_sentence(name):
    with pytest.raises(UnknownModel, match=r"no model of the hub is called|timm has no model"):
        load_model(name, classes=2, weights="random")


@pytest.mark.parametrize("name", ["hf:nowhere", "hf:./not/here", "hf:a/b/c"])
def test_explains_a_value_that_is_neither_a_folder_nor_a_name(name):
    with pytest.raises(UnknownModel, match="hf:OWNER/NAME"):
        load_model(name, classes=2)


def read(tmp_path, **says):
    file = tmp_path / "preprocessor_config.json"
    file.write_text(json.dumps(PROCESSOR | says))
    return processor_of(file)


def test_reports_processor_time_in_steps(tmp_path):
    found = read(tmp_path)
    decode, resize, crop, normalise = found.preprocess.steps
    assert (decode, resize, crop) == (Decode(), Resize(shorter=36, filter="bicubic"), CenterCrop(size=SIDE))
    assert isinstance(normalise, Normalize)
    np.testing.assert_allclose(normalise.mean, (127.5, 102, 76.5))
    np.testing.assert_allclose(normalise.std, (51, 51, 25.5))
    assert found.otherwise == ()


def test_convnexts_crop_is_a_share_of_the_shorter_side(tmp_path):
    found = read(tmp_path, size={"shortest_edge": 224}, crop_pct=0.875, do_center_crop=False)
    assert found.preprocess.steps[1:3] == (Resize(shorter=256, filter="bicubic"), CenterCrop(size=224))
    assert found.otherwise == ()


@pytest.mark.parametrize(
    ("says", "steps"),
    [
        ({"do_center_crop": False, "size": {"height": 40, "width": 40}}, (Squeeze(size=40, filter="bicubic"),)),
        ({"size": {"height": 40, "width": 40}}, (Squeeze(size=40, filter="bicubic"), CenterCrop(size=SIDE))),
        ({"do_center_crop": False, "size": {"shortest_edge": 384}}, (Squeeze(size=384, filter="bicubic"),)),
    ],
)
def test_images_are_squeezed_where_the_processor_says_so(says, steps, tmp_path):
    found = read(tmp_path, **says)
    assert found.preprocess.steps[1:-1] == steps
    assert found.otherwise == ()


def test_refuses_an_unknown_resampling_filter(tmp_path):
    [reason] = read(tmp_path, resample=1).otherwise
    assert "resized by filter 1" in reason


def test_levels_that_are_not_rescaled_or_not_normalised_keep_their_meaning(tmp_path):
    bare = read(tmp_path, do_normalize=False).preprocess.steps[-1]
    np.testing.assert_allclose((*bare.mean, *bare.std), (0, 0, 0, 255, 255, 255))
    plain = read(tmp_path, do_rescale=False).preprocess.steps[-1]
    np.testing.assert_allclose(plain.mean, (0.5, 0.4, 0.3))


@pytest.mark.parametrize("says", [{"crop_size": {"height": 32, "width": 48}}, {"crop_size": None}, {"image_std": 3}])
def test_a_processor_that_cannot_be_followed_is_refused_by_the_files_name(says, tmp_path):
    with pytest.raises(ModelError, match=r"preprocessor_config\.json"):
        read(tmp_path, **says)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_frostline_trains_and_plans_with_a_folder(dtype, tmp_path, capsys, shared_node):
    model, data = tmp_path / "model", tmp_path / "data"
    model.mkdir()
    saved(model, "vit", dtype)
    draw = np.random.default_rng(0)
    for label in "abc":
        (data / label).mkdir(parents=True)
        for number in range(12):
            Image.fromarray(draw.integers(0, 255, (40, 40, 3), np.uint8)).save(data / label / f"{number}.png")
    common = ["--data", str(data), "--model", f"hf:{model}", "--until", "vit.layers.1"]
    for verb in (["plan"], ["train", "--epochs", "1", "--batch-size", "8", "--out", str(tmp_path / "run")]):
        with pytest.raises(SystemExit) as ended:
            main([*verb, *common, "--near", shared_node.url])
        assert not ended.value.code, capsys.readouterr()
    # What it wrote is a folder of transformers', which knows nothing of Frostline.
    theirs, about = hf.AutoModelForImageClassification.from_pretrained(
        tmp_path / "run", local_files_only=True, output_loading_info=True
    )
    assert not any(about[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert theirs.config.id2label == {0: "a", 1: "b", 2: "c"}
    before = hf.AutoModelForImageClassification.from_pretrained(model, local_files_only=True)
    assert torch.equal(theirs.vit.embeddings.cls_token, before.vit.embeddings.cls_token), "what was frozen stayed"


@pytest.mark.parametrize("kind", ["vit"])
def test_what_was_trained_is_written_as_transformers_reads_it(kind, tmp_path):
    saved(tmp_path / "before", kind)
    model = load_model(f"hf:{tmp_path / 'before'}", classes=3).model.eval()
    after = tmp_path / "after"
    after.mkdir()
    write_tensors(after / "model.safetensors", as_saved(model, model.state_dict()), {"format": "pt"})
    (after / "config.json").write_text(config_of(model, 3, ("ant", "bee", "cat")))
    theirs, about = hf.AutoModelForImageClassification.from_pretrained(
        after, local_files_only=True, output_loading_info=True
    )
    assert not any(about[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert theirs.config.id2label == {0: "ant", 1: "bee", 2: "cat"}
    pixels = torch.randn(2, 3, SIDE, SIDE)
    with torch.no_grad():
        assert torch.equal(model(pixels), theirs.eval()(pixels).logits)
    again = load_model(f"hf:{tmp_path / 'before'}", classes=3, weights=str(after / "model.safetensors")).model.eval()
    with torch.no_grad():
        assert torch.equal(model(pixels), again(pixels))


def test_networks_of_others_keep_their_names_and_get_no_config_of_transformers():
    model = torch.nn.Linear(2, 2)
    assert as_saved(model, model.state_dict()).keys() == model.state_dict().keys()
    assert config_of(model, 2, ()) is None
