"""The networks that benchmarks run, frozen up to their classifiers, and a tiny one for quick forms."""

from types import SimpleNamespace

import torch
from torch import nn

import support.torchvision_cpu.sitecustomize  # noqa: F401 (lets a torchvision that was built for CUDA be imported)
from frostline.models.freezing import classifier_of, used_parameters
from frostline.preprocess import imagenet
from frostline.training.networks import load_model

CLASSES = 10
TINY = "tiny"
NETWORKS = {
    "alexnet": "torchvision:alexnet",
    "densenet121": "torchvision:densenet121",
    "efficientnet_lite0": "demo:efficientnet_lite0",
    "mobilenet_v3_large": "torchvision:mobilenet_v3_large",
    "resnet18": "torchvision:resnet18",
    "resnet50": "torchvision:resnet50",
    "vgg11": "torchvision:vgg11",
    "vit_small": "timm:vit_small_patch16_224",
    TINY: TINY,
}


def load(name, classes=CLASSES):
    """A network by its short name: the demo's with its weights, the others with random ones, which cost as much."""
    if name == TINY:
        torch.manual_seed(0)
        return SimpleNamespace(model=Tiny(classes), preprocess=imagenet(32))
    return load_model(NETWORKS[name], classes=classes, weights=None if name == "efficientnet_lite0" else "random")


class Tiny(nn.Module):
    """Two convolutions and a classifier; `frostline train --model parts.networks:Tiny` has it too."""

    def __init__(self, classes=CLASSES):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1)
        )
        self.classifier = nn.Linear(8, classes)

    def forward(self, pixels):
        return self.classifier(self.features(pixels).flatten(1))


# With random weights of full size, sixteen residual branches in a row make a network in which small errors double and
# double; trainings begin with small branches for that reason (with none: Goyal et al., arXiv 1706.02677, section 5.1).
_RESIDUAL_GAIN = 0.25


def calibrated(model, pixels):
    """In eval mode, with the BatchNorm statistics of these photographs; the branches of bottlenecks are small."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None
        if hasattr(module, "bn3"):
            nn.init.constant_(module.bn3.weight, _RESIDUAL_GAIN)
    with torch.no_grad():
        model.train()(torch.from_numpy(pixels))
    return model.eval()


def frozen(model, shape):
    """All but the classifier; dropout on the way there is off, as it is where features are taken as they are."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    _, classifier = classifier_of(model, used_parameters(model, shape))
    model.requires_grad_(False)
    classifier.requires_grad_(True)
    return model.eval()
