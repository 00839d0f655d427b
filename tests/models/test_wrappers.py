"""Networks that are wrapped are cut as what is wrapped: the cuts, outputs and gradients of the network inside."""

import copy

import pytest
import torch
from peft import (
    AdaLoraConfig,
    IA3Config,
    LoHaConfig,
    LoKrConfig,
    LoraConfig,
    OFTConfig,
    PrefixTuningConfig,
    PromptTuningConfig,
    VeraConfig,
    get_peft_model,
)
from torch import nn

import frostline as fl
from frostline.core import TensorSpec
from frostline.core.errors import ModelError, UnknownLayer
from frostline.models.cutting import cut_network
from frostline.models.freezing import freeze
from frostline.models.head import WholeHead
from frostline.models.modules import not_averaged, unwrap
from frostline.preprocess import imagenet
from support.cutting import crossed, finished, sent, shipped_engine
from support.images import image_folder
from support.matrices import sampled
from support.networks import Small
from support.texts import small_bert

# PEFT asks networks of transformers by a name that these are about to leave.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

SHAPE = (3, 32, 32)
ROWS = 8
SIZES = {"hidden_size": 48, "num_attention_heads": 3, "intermediate_size": 96}


def timm_vit():
    import timm

    return timm.create_model("vit_tiny_patch16_224", img_size=32, embed_dim=48, depth=4)


def hf_vit():
    import transformers as hf

    sizes = {"image_size": 32, "patch_size": 16, "num_hidden_layers": 4, **SIZES}
    return hf.ViTForImageClassification(hf.ViTConfig(**sizes))


def hf_bert():
    import transformers as hf

    sizes = {"vocab_size": 100, "num_hidden_layers": 4, **SIZES}
    return hf.BertForSequenceClassification(hf.BertConfig(**sizes))


def images():
    return [torch.randn(ROWS, *SHAPE, generator=torch.Generator().manual_seed(3))]


def texts():
    words = torch.randint(0, 100, (ROWS, 12), generator=torch.Generator().manual_seed(3))
    return [words, (torch.arange(12)[None] < torch.arange(5, 5 + ROWS)[:, None]).long()]


TEXT = TensorSpec((12,), "int64")
TUNED = {
    "timm": (timm_vit, r"blocks\.[23]\.attn\.qkv", "head", "blocks", SHAPE, images),
    "transformers' ViT": (hf_vit, r".*layers?\.[23]\..*(query|q_proj)", "classifier", "layer", SHAPE, images),
    "transformers' BERT": (hf_bert, r".*layer\.[23]\..*query", "classifier", "layer", (TEXT, TEXT), texts),
}


def with_lora(build, where, classifier):
    """LoRA on the last two of four blocks; its factors are random, where PEFT begins with zeros."""
    torch.manual_seed(0)
    tuned = get_peft_model(build(), LoraConfig(target_modules=where, modules_to_save=[classifier], lora_dropout=0.1))
    for name, parameter in tuned.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.1)
    return tuned.eval()


def answer_of(output):
    return output if isinstance(output, torch.Tensor) else output.logits


def learned(model, run, seed=5):
    """Outputs and gradients of one run."""
    model.zero_grad()
    torch.manual_seed(seed)
    answer = answer_of(run())
    answer.float().square().sum().backward()
    return answer.detach(), {
        name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None
    }


def equal_to_the_whole(model, network, batch):
    """What a node would send, finished here, gives what the user's own object gives, and its gradients, to the bit."""
    last = network.frost_line
    features = finished(network, last, sent(crossed(shipped_engine(network), batch, last)))
    ours, own = learned(model, lambda: network.head(features))
    theirs, expected = learned(model, lambda: model(*batch))
    assert torch.equal(ours, theirs)
    assert own.keys() == expected.keys() != set()
    assert all(torch.equal(own[name], expected[name]) for name in own)


@pytest.mark.parametrize("name", sampled(TUNED, usual=("transformers' ViT",)))
def test_adapters_on_the_last_two_blocks_leave_the_cuts_of_the_plain_network(name):
    build, where, classifier, blocks, inputs, batch = TUNED[name]
    tuned = with_lora(build, where, classifier)
    network = cut_network(tuned, inputs)
    plain = build().eval()
    for path, parameter in plain.named_parameters():
        parameter.requires_grad = f"{blocks}s.2." in path or f"{blocks}.2." in path or ".3." in path
    getattr(plain, classifier).requires_grad_(True)
    bare = cut_network(plain, inputs)
    assert network.fallback is None
    assert len(network.cuts) == len(bare.cuts) > 8
    assert [cut.bytes_per_sample for cut in network.cuts] == [cut.bytes_per_sample for cut in bare.cuts]
    assert ".1." in f"{network.frost_line.name}.".replace(":", ".")
    equal_to_the_whole(tuned, network, batch())


def test_dropout_of_adapters_is_drawn_as_in_the_wrapped_network():
    build, where, classifier, _, inputs, batch = TUNED["timm"]
    tuned = freeze(with_lora(build, where, classifier).train(), "blocks.1", input_shape=inputs)
    equal_to_the_whole(tuned, cut_network(tuned, inputs), batch())


def test_adapters_inside_the_frozen_part_belong_to_it():
    build, _, classifier, _, inputs, batch = TUNED["timm"]
    tuned = with_lora(build, r"blocks\.[03]\.attn\.qkv", classifier)
    freeze(tuned, "blocks.1", input_shape=inputs)
    network = cut_network(tuned, inputs)
    assert any("lora_A" in name and "blocks.0" in name for name in network.prefix.tensors)
    assert ".2." in f"{network.frost_line.name}.".replace(":", ".")
    assert {name for name, _ in network.head.named_parameters() if "lora_" in name and "blocks.0" in name} == set()
    equal_to_the_whole(tuned, network, batch())


@pytest.mark.parametrize("until", ["blocks.1", "base_model.model.blocks.1"])
def test_a_tuned_network_is_frozen_up_to_a_path_inside_or_outside(until):
    build, _, classifier, _, inputs, _ = TUNED["timm"]
    tuned = freeze(with_lora(build, r"blocks\.\d+\.attn\.qkv", classifier), until, input_shape=inputs)
    trained = {
        name.split(".")[3]
        for name, parameter in tuned.named_parameters()
        if "lora_" in name and parameter.requires_grad
    }
    assert trained == {"2", "3"}
    network = cut_network(tuned, inputs)
    assert network.fallback is None
    assert ".1." in f"{network.frost_line.name}.".replace(":", ".")


def compiled(model):
    return torch.compile(model, backend="eager")


def in_one_process(model):
    return nn.parallel.DistributedDataParallel(model)


@pytest.fixture
def alone(tmp_path):
    """A process group of one."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


WRAPPERS = {
    "torch.compile": (compiled, "_orig_mod."),
    "DataParallel": (nn.DataParallel, "module."),
    "DistributedDataParallel": (in_one_process, "module."),
    "both": (lambda model: compiled(in_one_process(model)), "_orig_mod.module."),
}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapped_network_is_cut_as_the_network_inside(name):
    wrap, prefix = WRAPPERS[name]
    bare = freeze(Small().train(), "body", input_shape=SHAPE)
    for until in ("body", f"{prefix}body"):
        wrapped = wrap(Small().train())
        assert freeze(wrapped, until, input_shape=SHAPE) is wrapped
        network = cut_network(wrapped, SHAPE)
        assert [cut.name for cut in network.cuts] == [cut.name for cut in cut_network(bare, SHAPE).cuts]
        assert network.fallback is None
        equal_to_the_whole(wrapped, network, images())


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", WRAPPERS)
def test_keeps_what_the_head_learned_in_the_wrapped_network(name):
    wrap, prefix = WRAPPERS[name]
    wrapped = freeze(wrap(Small().train()), "body", input_shape=SHAPE)
    network = cut_network(wrapped, SHAPE)
    before = copy.deepcopy(wrapped.state_dict())
    own = dict(wrapped.named_parameters())
    optimizer = torch.optim.SGD([parameter for parameter in wrapped.parameters() if parameter.requires_grad], lr=0.1)
    network.head.train()
    assert unwrap(wrapped).drop.training
    network.head(torch.rand(8, 16)).sum().backward()
    optimizer.step()
    changed = {key for key, value in wrapped.state_dict().items() if not torch.equal(value, before[key])}
    assert changed == {f"{prefix}fc.weight", f"{prefix}fc.bias"}
    assert dict(network.head.named_parameters())["fc.weight"] is own[f"{prefix}fc.weight"]


def test_a_network_that_is_compiled_in_place_or_in_part_is_cut_too():
    in_place, in_part = Small().train(), Small().train()
    in_place.compile(backend="eager")
    in_part.stem = compiled(in_part.stem)
    for model in (in_place, in_part):
        freeze(model, "body", input_shape=SHAPE)
        network = cut_network(model, SHAPE)
        assert network.fallback is None
        assert len(network.cuts) == len(cut_network(freeze(Small(), "body", input_shape=SHAPE), SHAPE).cuts)
        equal_to_the_whole(model, network, images())


def test_adapters_in_a_compiled_network_are_cut_as_they_are():
    build, where, classifier, _, inputs, batch = TUNED["timm"]
    wrapped = compiled(with_lora(build, where, classifier))
    freeze(wrapped, "blocks.1", input_shape=inputs)
    network = cut_network(wrapped, inputs)
    assert ".1." in f"{network.frost_line.name}.".replace(":", ".")
    equal_to_the_whole(wrapped, network, batch())


def test_an_unknown_layer_is_named_as_the_user_wrote_it():
    with pytest.raises(UnknownLayer, match=r"no layer 'bodi'.*body"):
        freeze(compiled(Small()), "bodi", input_shape=SHAPE)


@pytest.mark.usefixtures("alone")
def test_parameters_that_are_split_over_processes_are_refused_with_what_to_do():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = Small()
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    for refuse in (lambda: freeze(model, "body", input_shape=SHAPE), lambda: cut_network(model, SHAPE)):
        with pytest.raises(ModelError, match=r"fully_shard has split.*then call fully_shard\(job.head\)"):
            refuse()


class Scaled(nn.Module):
    """What is trained are a parameter of the network's own, a layer, and one of two that are frozen otherwise."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.stem = nn.Sequential(nn.Flatten(), nn.Linear(3072, 8))
        self.scale = nn.Parameter(torch.ones(8))
        self.middle = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop, self.fc = nn.Dropout(0.2), nn.Linear(8, 3)

    def forward(self, x):
        return self.fc(self.drop(self.norm(self.middle(self.stem(x) * self.scale))))


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, torch.distributed.tensor.DTensor) else tensor


def steps_of(job, data):
    """Losses of two epochs, scores in eval mode behind each, and what was trained."""
    torch.manual_seed(1)
    parameters = [parameter for parameter in job.head.parameters() if parameter.requires_grad]
    optimizer, losses = torch.optim.Adam(parameters, 0.1), []
    for epoch in range(2):
        job.head.train()
        for batch in job.loader(4, shuffle=True, seed=0, epoch=epoch, data=data):
            loss = nn.functional.cross_entropy(job.head(batch.features), batch.labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        job.head.eval()
        with torch.no_grad():
            losses += [float(job.head(batch.features).sum()) for batch in job.loader(4, data=data)]
    return losses, {name: whole(tensor).clone() for name, tensor in job.head.state_dict().items()}


@pytest.mark.usefixtures("alone")
def test_a_head_sharded_after_the_job_was_made_has_the_same_losses(tmp_path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    data, found = fl.Dataset(image_folder(tmp_path / "images", per_class=4)), []
    for is_sharded in (False, True):
        model = freeze(Scaled().train(), "stem", input_shape=SHAPE)
        model.middle.requires_grad_(False)
        with fl.offload(model, data, preprocess=imagenet(32)) as job:
            if is_sharded:
                fully_shard(job.head, mesh=init_device_mesh("cpu", (1,)))
                assert isinstance(job.head, FSDPModule)
            found.append(steps_of(job, job.data))
    (plain, state), (losses, same) = found
    assert losses == plain
    assert state.keys() == same.keys()
    assert all(torch.equal(state[name], same[name]) for name in state)
    assert not torch.equal(state["scale"], torch.ones(8))


@pytest.mark.usefixtures("alone")
def test_heads_that_would_not_train_all_of_their_parameters_are_refused_once_sharded():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    network = cut_network(freeze(Scaled().train(), "stem", input_shape=SHAPE), SHAPE)
    fully_shard(network.head.fc, mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(ModelError, match=r"shard it whole, by fully_shard\(job.head\)"):
        network.head.train()
    head = WholeHead(Scaled())
    fully_shard(head, mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(ModelError, match="was not cut, and such a head cannot be sharded"):
        head.eval()


@pytest.mark.usefixtures("alone")
def test_one_process_has_no_gradients_to_average():
    assert not_averaged(in_one_process(Small())) is None
    assert not_averaged(Small()) is None


def test_warns_several_processes_that_the_head_averages_no_gradients():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        for wrapped in (in_one_process(Small()), compiled(in_one_process(Small()))):
            assert "wrap job.head in DistributedDataParallel" in not_averaged(wrapped)
    finally:
        torch.distributed.destroy_process_group()


# Line at which the frozen part ends, and what is said of it: what prompts change comes before all frozen blocks.
ADAPTERS = {
    "prefixes": (
        lambda _: PrefixTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=3),
        "",
        "its code fails on rows that are made up, while what it calls is recorded, with: The size of tensor",
    ),
    "prompts": (
        lambda _: PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=3),
        "embeddings.word_embeddings",
        "'prompt_encoder.default.embedding.weight' before them is trained",
    ),
    "IA3": (lambda at: IA3Config(task_type="SEQ_CLS", target_modules=at, feedforward_modules=[]), "layer.0", None),
    "LoHa": (lambda at: LoHaConfig(target_modules=at, r=2), "layer.0", "by the values"),
    "LoKr": (lambda at: LoKrConfig(target_modules=at, r=2), "layer.0", "by the values"),
    "AdaLoRA": (lambda at: AdaLoraConfig(target_modules=at, init_r=4, target_r=2, total_step=9), "layer.0", None),
    "VeRA": (lambda at: VeraConfig(target_modules=at, r=4), "layer.0", None),
    "DoRA": (lambda at: LoraConfig(target_modules=at, r=2, use_dora=True), "layer.0", None),
    "OFT": (lambda at: OFTConfig(target_modules=at, r=0, oft_block_size=4), "layer.0", None),
}


@pytest.mark.parametrize("kind", ADAPTERS)
def test_adapters_of_each_kind_on_texts_are_trained_as_in_the_plain_loop(kind):
    config, line, why = ADAPTERS[kind]

    def tuned():
        base = small_bert()
        torch.manual_seed(1)
        model = get_peft_model(base, config(r".*layer\.1\..*(query|value)$")).train()
        for module in model.modules():
            if not any(parameter.requires_grad for parameter in module.parameters()):
                module.eval()
        return model

    model, plain = tuned(), tuned()
    network = cut_network(model, (TensorSpec((9,), "int64"),))
    assert line in network.frost_line.name
    assert (network.fallback is None) if why is None else (why in network.fallback)
    found, words = [], torch.randint(1, 60, (6, 9), generator=torch.Generator().manual_seed(3))
    given = [words] if network.prefix is None else crossed(shipped_engine(network), [words], network.frost_line)
    for head, rows, whole in ((network.head, given, model), (plain, [words], plain)):
        torch.manual_seed(2)
        optimizer, losses = torch.optim.AdamW(whole.parameters(), 0.05), []
        for _ in range(3):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(head(*rows).logits, words[:, 0] % 2)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        found.append(losses)
    assert found[0] == pytest.approx(found[1], rel=1e-6)
    assert found[1][0] != found[1][2], "something is trained"


@pytest.mark.parametrize("keeps", [True, False], ids=["with a cache", "without"])
def test_a_decoder_that_keeps_a_cache_is_told_to_keep_none_and_is_cut_then(keeps):
    from transformers import GPT2Config, GPT2ForSequenceClassification

    def tuned():
        torch.manual_seed(0)
        sizes = {"vocab_size": 64, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2, "pad_token_id": 0}
        base = GPT2ForSequenceClassification(GPT2Config(**sizes, use_cache=keeps)).eval()
        target = {"target_modules": r".*h\.1\..*c_attn", "fan_in_fan_out": True}
        return get_peft_model(base, LoraConfig(task_type="SEQ_CLS", r=2, **target))

    network = cut_network(tuned(), (TensorSpec((9,), "int64"),))
    if keeps:
        assert "set model.config.use_cache = False" in network.fallback
        return
    assert network.fallback is None
    assert "transformer.h.0" in network.frost_line.name
    words = torch.randint(1, 64, (3, 9))
    with torch.no_grad():
        features = crossed(shipped_engine(network), [words], network.frost_line)
        assert torch.equal(network.head(*features).logits, tuned()(words).logits)
