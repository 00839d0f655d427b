"""The networks of ``network_table.py``: small, with random weights, and up to where each is frozen."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import nn

import support.torchvision_cpu.sitecustomize  # noqa: F401 (lets a torchvision that was built for CUDA be imported)
from frostline.core import TensorSpec
from frostline.preprocess.steps import InputSlot, place_inputs

TOKENS, WORDS = 16, 99
IDS, MASK = "input_ids", "attention_mask"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A network, and what is trained of it.

    Attributes:
        name: the network's, as its library has it.
        library: who wrote it.
        build: makes it, with random weights.
        inputs: what it takes.
        until: the last frozen layer; of several encoders the last of each, joined by ``+``.
        names: of the inputs in its ``forward``, where they are the rows of one array, as a job's texts are.
        parts: where inputs of several kinds lie in one array, as those of a job's samples of several parts do.
        tuned: the modules that LoRA is put on, as a regular expression; empty for none.
    """

    name: str
    library: str
    build: Callable[[], nn.Module]
    inputs: tuple[TensorSpec, ...]
    until: str
    names: tuple[str, ...] = ()
    parts: tuple[InputSlot, ...] = ()
    tuned: str = ""

    @property
    def title(self):
        return f"{self.library} {self.name}{' + LoRA' if self.tuned else ''}"


def image(side):
    return (TensorSpec((3, side, side)),)


def of_torchvision(name, until, *, side=64, **options):
    def build():
        import torchvision

        return torchvision.models.get_model(name, weights=None, **options)

    return Row(name=name, library="torchvision", build=build, inputs=image(side), until=until)


def of_timm(name, until, *, side=64, tuned="", **options):
    def build():
        import timm

        return timm.create_model(name, **options)

    return Row(name=name, library="timm", build=build, inputs=image(side), until=until, tuned=tuned)


def of_transformers(name, until, *, inputs, names=(), tuned="", **sizes):
    def build():
        import transformers

        kind = getattr(transformers, name)
        return kind(kind.config_class(**sizes))

    return Row(name=name, library="transformers", build=build, inputs=inputs, names=names, until=until, tuned=tuned)


def of_text(name, until, *, takes=2, **options):
    """Token ids and attention mask, as ``preprocess.text`` gives them; ``freeze`` is shown the first ``takes``."""
    inputs = (TensorSpec((TOKENS,), "int64"),) * takes
    return of_transformers(name, until, inputs=inputs, names=(IDS, MASK), **{**SMALL, "vocab_size": WORDS, **options})


def of_parts(name, until, *, parts, tuned="", **sizes):
    """A network that takes an image or a sound, and a text, by name."""
    row = of_transformers(name, until, inputs=tuple(parts.values()), tuned=tuned, **sizes)
    return replace(row, parts=place_inputs(parts.items()))


def of_diffusers(name, until, **sizes):
    """The encoder of an autoencoder for latent diffusion, before a head of one layer that is trained."""

    def build():
        import diffusers

        encoder = getattr(diffusers, name)(**sizes).encoder
        return nn.Sequential(
            OrderedDict(encoder=encoder, pool=nn.AdaptiveAvgPool2d(1), flat=nn.Flatten(), head=nn.Linear(8, 3))
        )

    return Row(name=f"{name}, its encoder", library="diffusers", build=build, inputs=image(64), until=until)


SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
}
VISION = {**SMALL, "image_size": 32, "patch_size": 8, "inputs": image(32)}
SEGFORMER = {"inputs": image(64), "hidden_sizes": [8, 16, 24, 32], "decoder_hidden_size": 32}
SOUND = {
    **SMALL,
    "inputs": (TensorSpec((4000,)),),
    "conv_dim": [16] * 7,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
}
WHISPER = {
    "inputs": (TensorSpec((16, 64)),),
    "num_mel_bins": 16,
    "max_source_positions": 32,
    "d_model": 32,
    "encoder_layers": 4,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
}
TEXT_PART = {IDS: TensorSpec((TOKENS,), "int64"), MASK: TensorSpec((TOKENS,), "int64")}
TEXT_SIZES = {**SMALL, "vocab_size": WORDS, "max_position_embeddings": TOKENS}
IMAGE_SIZES = {**SMALL, "image_size": 32, "patch_size": 8}
PAIR = {"parts": {"pixel_values": TensorSpec((3, 32, 32)), **TEXT_PART}}
CLIP = {**PAIR, "text_config": {**TEXT_SIZES, "eos_token_id": 2}, "vision_config": IMAGE_SIZES, "projection_dim": 16}
SIGLIP = {**PAIR, "text_config": {**TEXT_SIZES, "projection_size": 32}, "vision_config": IMAGE_SIZES}
TV = (
    of_torchvision("alexnet", "features"),
    of_torchvision("vgg11_bn", "features.21", side=32),
    of_torchvision("resnet18", "layer3", side=32),
    of_torchvision("resnet50", "layer3", side=32),
    of_torchvision("densenet121", "features.transition3", side=32),
    of_torchvision("mobilenet_v2", "features.14", side=32),
    of_torchvision("mobilenet_v3_small", "features.9", side=32),
    of_torchvision("efficientnet_b0", "features.6", side=32),
    of_torchvision("convnext_tiny", "features.5", side=32),
    of_torchvision("regnet_y_400mf", "trunk_output.block3", side=32),
    of_torchvision("shufflenet_v2_x0_5", "stage3", side=32),
    of_torchvision("swin_t", "features.5", side=32),
    of_torchvision("vit_b_16", "encoder.layers.encoder_layer_9", side=32, image_size=32),
    of_torchvision("lraspp_mobilenet_v3_large", "backbone", weights_backbone=None),
)
TIMM = (
    of_timm("vit_tiny_patch16_224", "blocks.3", img_size=64, depth=6),
    of_timm(
        "vit_tiny_patch16_224", "blocks.3", img_size=64, depth=6, tuned=r"blocks\.[45]\.(attn\.(qkv|proj)|mlp\.fc\d)"
    ),
    of_timm("vit_small_patch14_reg4_dinov2", "blocks.3", side=56, img_size=56, depth=6),
    of_timm(
        "vit_small_patch14_reg4_dinov2", "blocks.3", side=56, img_size=56, depth=6, tuned=r"blocks\.[45]\.attn\.qkv"
    ),
    of_timm("vit_tiny_patch16_dinov3_qkvb", "blocks.3", depth=6),
    of_timm("eva02_tiny_patch14_224", "blocks.3", side=56, img_size=56, depth=6),
    of_timm("deit_tiny_distilled_patch16_224", "blocks.3", img_size=64, depth=6),
    of_timm("xcit_nano_12_p16_224", "blocks.3", depth=6),
    of_timm("mixer_s32_224", "blocks.5", img_size=64),
    of_timm("convnextv2_atto", "stages.2"),
    of_timm("swinv2_tiny_window8_256", "layers.2", img_size=64, window_size=2, depths=(2, 2, 2, 2)),
    of_timm("mobilevit_xxs", "stages.3"),
    of_timm("poolformer_s12", "stages.2"),
    of_timm("levit_128s", "stages.1", side=224),
    of_timm("edgenext_xx_small", "stages.2"),
    of_timm("test_maxvit", "stages.2", side=160),
    of_timm("test_nfnet", "stages.2"),
    of_timm("test_coatnet", "stages.2", side=160),
    of_timm("resnetv2_50x1_bit", "stages.2"),
)
HF = (
    of_transformers("ViTForImageClassification", "vit.layers.2", **VISION),
    of_transformers(
        "ViTForImageClassification", "vit.layers.1", tuned=r".*layers\.[23]\..*(query|value|q_proj|v_proj)", **VISION
    ),
    of_transformers("Dinov2ForImageClassification", "dinov2.encoder.layer.2", **VISION),
    of_transformers(
        "Dinov2ForImageClassification",
        "dinov2.encoder.layer.1",
        tuned=r".*layer\.[23]\..*(query|value|q_proj|v_proj)",
        **VISION,
    ),
    of_transformers("Dinov2WithRegistersForImageClassification", "dinov2_with_registers.encoder.layer.2", **VISION),
    of_transformers("CLIPVisionModelWithProjection", "vision_model.encoder.layers.2", **VISION),
    of_transformers("SiglipVisionModel", "encoder.layers.2", **VISION),
    of_transformers("BeitForImageClassification", "beit.layers.2", **VISION),
    of_transformers("SegformerForImageClassification", "segformer", **SEGFORMER),
    of_transformers("SegformerForSemanticSegmentation", "segformer", **SEGFORMER),
    of_transformers(
        "SwinForImageClassification",
        "swin",
        inputs=image(48),
        image_size=48,
        patch_size=4,
        embed_dim=24,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=3,
    ),
    of_transformers(
        "ConvNextV2ForImageClassification",
        "convnextv2.encoder.stages.2",
        inputs=image(64),
        hidden_sizes=[8, 16, 24, 32],
        depths=[1, 1, 2, 1],
    ),
    of_text("BertForSequenceClassification", "bert.encoder.layer.2"),
    of_text("BertForSequenceClassification", "bert.encoder.layer.1", tuned=r".*layer\.[23]\..*(query|value)"),
    of_text(
        "DistilBertForSequenceClassification",
        "distilbert.transformer.layer.2",
        dim=32,
        hidden_dim=64,
        n_heads=4,
        n_layers=4,
    ),
    of_text("RobertaForSequenceClassification", "roberta.encoder.layer.2"),
    of_text("ElectraForSequenceClassification", "electra.encoder.layer.2", embedding_size=32),
    of_text("AlbertForSequenceClassification", "features", embedding_size=16),
    of_text(
        "DebertaV2ForSequenceClassification",
        "deberta.encoder.layer.2",
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
    ),
    of_text("ModernBertForSequenceClassification", "model.layers.2", pad_token_id=0),
    of_text("MPNetForSequenceClassification", "mpnet.encoder.layer.2"),
    of_text(
        "GPT2ForSequenceClassification", "transformer.h.2", takes=1, n_embd=32, n_head=4, n_layer=4, pad_token_id=0
    ),
    of_text("GPT2LMHeadModel", "transformer.h.2", takes=1, n_embd=32, n_head=4, n_layer=4),
    of_text("LlamaForCausalLM", "model.layers.2", num_key_value_heads=2),
    of_text("LlamaForCausalLM", "model.layers.1", num_key_value_heads=2, tuned=r".*layers\.[23]\..*(q_proj|v_proj)"),
    of_text("LlamaForSequenceClassification", "model.layers.2", num_key_value_heads=2, pad_token_id=0),
    of_text("Qwen3ForCausalLM", "model.layers.2", num_key_value_heads=2, head_dim=8),
    of_text("MistralForCausalLM", "model.layers.2", num_key_value_heads=2),
    of_text("Gemma2ForCausalLM", "model.layers.2", num_key_value_heads=2, head_dim=8),
    of_text("OPTForCausalLM", "model.decoder.layers.2", ffn_dim=64, word_embed_proj_dim=32),
    of_transformers("Wav2Vec2ForSequenceClassification", "wav2vec2.encoder.layers.2", **SOUND),
    of_transformers("Wav2Vec2ForSequenceClassification", "wav2vec2", **SOUND),
    of_transformers("HubertForSequenceClassification", "hubert.encoder.layers.2", **SOUND),
    of_transformers("WhisperForAudioClassification", "encoder.layers.2", **WHISPER),
    of_transformers(
        "WhisperForAudioClassification", "encoder.layers.1", **WHISPER, tuned=r".*layers\.[23]\..*(q_proj|v_proj)"
    ),
    of_transformers(
        "ASTForAudioClassification",
        "audio_spectrogram_transformer.layers.2",
        inputs=(TensorSpec((64, 32)),),
        max_length=64,
        num_mel_bins=32,
        **SMALL,
    ),
)
TOWERS = "vision_model.encoder.layers.2+text_model.encoder.layers.2"
PAIRS = (
    of_parts("CLIPModel", TOWERS, **CLIP),
    of_parts("CLIPModel", "vision_model+text_model", **CLIP),
    of_parts("SiglipModel", TOWERS, **SIGLIP),
    of_transformers("SmolVLMVisionTransformer", "encoder.layers.2", **VISION),
)
VAE = {
    "block_out_channels": (16, 32),
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "norm_num_groups": 8,
    "latent_channels": 4,
}
DIFFUSERS = (
    of_diffusers("AutoencoderKL", "encoder", **VAE),
    of_diffusers("AutoencoderKL", "encoder.down_blocks.1", **VAE),
)
NETWORKS = (*TV, *TIMM, *HF, *PAIRS, *DIFFUSERS)
