"""The six networks that the same-answer tests use, without pretrained weights, and small ones for corner cases."""

from collections.abc import Callable

import torch
from torch import nn

NETWORKS = ("alexnet", "densenet121", "efficientnet_lite0", "mobilenet_v3_large", "resnet18", "vit_small")

UNTIL = {
    "alexnet": "features",
    "densenet121": "features.transition3",
    "efficientnet_lite0": "_blocks.10",
    "mobilenet_v3_large": "features.10",
    "resnet18": "layer3",
    "vit_small": "blocks.9",
}
"""For each network a frost line with BatchNorm, LayerNorm or dropout behind it."""


def build(name: str, *, seed: int = 0) -> nn.Module:
    """One of ``NETWORKS``, with BatchNorm statistics that are not the neutral ones."""
    torch.manual_seed(seed)
    model = _builder(name)()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, std=0.1)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
    return model


def _builder(name: str) -> Callable[[], nn.Module]:
    if name == "efficientnet_lite0":
        from efficientnet_lite_pytorch import EfficientNet

        return lambda: EfficientNet.from_name("efficientnet-lite0")
    if name == "vit_small":
        import timm

        return lambda: timm.create_model("vit_small_patch16_224", drop_rate=0.1)
    import torchvision

    return getattr(torchvision.models, name)


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
