"""The networks that benchmarks run, frozen up to their classifiers; imported by several of them."""

import torch

from frostline.models.freezing import classifier_of, used_parameters
from frostline.training.networks import load_model

CLASSES = 10
NETWORKS = {
    "alexnet": "torchvision:alexnet",
    "densenet121": "torchvision:densenet121",
    "efficientnet_lite0": "demo:efficientnet_lite0",
    "resnet18": "torchvision:resnet18",
    "resnet50": "torchvision:resnet50",
    "vgg11": "torchvision:vgg11",
    "vgg19": "torchvision:vgg19",
    "vit_base": "timm:vit_base_patch16_224",
    "vit_small": "timm:vit_small_patch16_224",
}


def load(name, classes=CLASSES):
    """A network by its full name: the demo's with its weights, the others with random ones, which cost as much."""
    return load_model(name, classes=classes, weights=None if name.startswith("demo:") else "random")


# With random weights of full size, sixteen residual branches in a row make a network in which small errors double and
# double; trainings begin with small branches for that reason (with none: Goyal et al., arXiv 1706.02677, section 5.1).
_RESIDUAL_GAIN = 0.25


def calibrated(model, pixels):
    """In eval mode, with the BatchNorm statistics of these photographs; the branches of bottlenecks are small."""
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum = None
        if hasattr(module, "bn3"):
            torch.nn.init.constant_(module.bn3.weight, _RESIDUAL_GAIN)
    with torch.no_grad():
        model.train()(torch.from_numpy(pixels))
    return model.eval()


def frozen(model, shape):
    """All but the classifier; dropout on the way there is off, as it is where features are taken as they are."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    _, classifier = classifier_of(model, used_parameters(model, shape))
    model.requires_grad_(False)
    classifier.requires_grad_(True)
    return model.eval()
