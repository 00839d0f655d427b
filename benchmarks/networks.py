"""The networks that benchmarks run, frozen up to their classifiers; imported by several of them."""

import torch

from frostline.models.freeze import classifier_of, used_parameters

CLASSES = 10
NETWORKS = {
    "alexnet": "torchvision:alexnet",
    "densenet121": "torchvision:densenet121",
    "efficientnet_lite0": "demo:efficientnet_lite0",
    "resnet18": "torchvision:resnet18",
    "resnet50": "torchvision:resnet50",
    "vgg11": "torchvision:vgg11",
    "vgg19": "torchvision:vgg19",
    "vit_small": "timm:vit_small_patch16_224",
}


def calibrated(model, pixels):
    """In eval mode, with the BatchNorm statistics of these photographs."""
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum = None
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
