"""The fourteen networks of the same-answer tests, without pretrained weights, and a small one for corner cases."""

from collections.abc import Callable

import torch
from torch import nn

from frostline.core import TensorSpec

UNTIL = {
    "alexnet": "features",
    "bert": "bert.encoder.layer.2",
    "convnext_tiny": "features.5",
    "deit": "deit.layers.2",
    "densenet121": "features.transition3",
    "distilbert": "distilbert.transformer.layer.1",
    "efficientnet_lite0": "_blocks.10",
    "hf_vit": "vit.layers.2",
    "mobilenet_v3_large": "features.10",
    "resnet18": "layer3",
    "resnet50": "layer3.2",
    "vgg11": "features.10",
    "vgg19": "features",
    "vit_small": "blocks.2",
}
"""For each network a frost line with BatchNorm, LayerNorm or dropout behind it, where it has any."""

NETWORKS = tuple(UNTIL)
_TEXTS = ("bert", "distilbert")
_WORDS, _LENGTH = 30_522, 48


def inputs_of(name: str, side: int = 96) -> tuple[TensorSpec, ...]:
    """What the network takes: an image of that side, or the ids of the words of a text and its mask."""
    text = TensorSpec((_LENGTH,), "int64")
    return (text, text) if name in _TEXTS else (TensorSpec((3, side, side)),)


def batch_of(name: str, rows: int, side: int = 96) -> list[torch.Tensor]:
    """A batch of that kind, the same each time."""
    generator = torch.Generator().manual_seed(7)
    if name not in _TEXTS:
        return [torch.randn(rows, 3, side, side, generator=generator)]
    lengths = torch.randint(_LENGTH // 2, _LENGTH + 1, (rows, 1), generator=generator)
    words = torch.randint(0, _WORDS, (rows, _LENGTH), generator=generator)
    return [words, (torch.arange(_LENGTH)[None] < lengths).long()]


def build(name: str, *, seed: int = 0, side: int = 96) -> nn.Module:
    """One of ``NETWORKS``, with BatchNorm statistics that are not the neutral ones.

    Transformers have fewer layers than the published ones (4 of 12, and 3 of 6), of the same width.
    Transformers are built for images of that side; the others take any.
    """
    torch.manual_seed(seed)
    model = _builder(name, side)()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, std=0.1)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
    return model


def _builder(name: str, side: int) -> Callable[[], nn.Module]:
    if name == "efficientnet_lite0":
        from efficientnet_lite_pytorch import EfficientNet

        return lambda: EfficientNet.from_name("efficientnet-lite0")
    if name == "vit_small":
        import timm

        return lambda: timm.create_model("vit_small_patch16_224", drop_rate=0.1, img_size=side, depth=4)
    if name in ("bert", "deit", "distilbert", "hf_vit"):
        return lambda: _from_transformers(name, side)
    import torchvision

    return getattr(torchvision.models, name)


def _from_transformers(name: str, side: int) -> nn.Module:
    import transformers as hf

    if name == "bert":
        return hf.BertForSequenceClassification(hf.BertConfig(num_hidden_layers=4))
    if name == "distilbert":
        return hf.DistilBertForSequenceClassification(hf.DistilBertConfig(n_layers=3))
    sizes = {"image_size": side, "num_hidden_layers": 4, "hidden_dropout_prob": 0.1}
    if name == "deit":
        return hf.DeiTForImageClassification(hf.DeiTConfig(**sizes))
    return hf.ViTForImageClassification(hf.ViTConfig(**sizes))


class Block(nn.Module):
    """A residual block with a norm, a linear layer and dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(torch.relu(self.linear(self.norm(x))))


class Blocks(nn.Module):
    """A convolution, four residual blocks in a row and a classifier, of 32 x 32 pixels or more."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.stem = nn.Conv2d(3, 8, 4, stride=4)
        self.pool = nn.AdaptiveAvgPool2d(2)
        self.layers = nn.ModuleList(Block(32) for _ in range(4))
        self.fc = nn.Linear(32, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.flatten(self.pool(self.stem(x)), 1)
        for layer in self.layers:
            x = layer(x)
        return self.fc(x)


def adapted_blocks() -> nn.Module:
    """The same with adapters of the user's own in the last two blocks."""
    from peft import LoraConfig, inject_adapter_in_model

    return inject_adapter_in_model(LoraConfig(target_modules=["2.linear", "3.linear"], r=2), Blocks())


class Wide(nn.Module):
    """A body of 64 MiB of weights, more than a small node has memory for."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 4096), nn.Linear(4096, 4096))
        self.fc = nn.Linear(4096, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.body(x))


class Small(nn.Module):
    """Convolution, BatchNorm, ReLU in place, pooling and a classifier with dropout: 32 x 32 pixels, traced in 0.1 s."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.body = nn.Sequential(nn.Conv2d(8, 16, 3, stride=2), nn.BatchNorm2d(16), nn.ReLU(inplace=True))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.drop = nn.Dropout(0.2)
        self.fc = nn.Linear(16, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.drop(torch.flatten(self.pool(self.body(self.stem(x))), 1)))


class Rooted(Small):
    """The same, whose stem gives NaN for dark pictures, such as those of ``circle``."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__(classes)
        self.stem = nn.Sequential(_Root(), *self.stem)


class _Root(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.mean((1, 2, 3), keepdim=True) + 0.5).sqrt() * x


class Undecided(Small):
    """The same, which decides in Python on values behind its stem, and so cannot be traced whole."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.stem(x)
        return self.fc(torch.flatten(self.pool(self.body(hidden * 2 if hidden.mean() > 0 else hidden)), 1))
