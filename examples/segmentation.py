"""Images with masks: the decoder of a segmentation network over features of its backbone.

python examples/segmentation.py scenes --classes 21
"""

import argparse

import torch
import torchvision

import frostline as fl

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("scenes", help="folder with images/ and masks/, as docs/concepts/targets.md has them")
parser.add_argument("--classes", type=int, default=21, help="number of classes in the masks")
parser.add_argument("--side", type=int, default=256, help="side of the network's input in pixels")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--weights", default="DEFAULT", help="weights of the backbone; 'none' for random ones")
parser.add_argument("--near", help="address of a node beside the data, such as http://store-1:7070")
asked = parser.parse_args()

model = torchvision.models.segmentation.lraspp_mobilenet_v3_large(
    weights=None, weights_backbone=None if asked.weights == "none" else asked.weights, num_classes=asked.classes
)
model = fl.freeze(model, until="backbone", input_shape=(3, asked.side, asked.side))
optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3)

with fl.offload(model, asked.scenes, preprocess=fl.preprocess.imagenet(asked.side), near=asked.near) as job:
    for epoch in range(asked.epochs):
        right = counted = 0
        for x, masks in job.loader(8, shuffle=True, epoch=epoch, drop_last=True):
            scores = job.head(x)
            scores = scores["out"] if isinstance(scores, dict) else scores
            loss = torch.nn.functional.cross_entropy(scores, masks, ignore_index=255)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            is_known = masks != 255
            right += int((scores.argmax(1) == masks)[is_known].sum())
            counted += int(is_known.sum())
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}, {right / counted:.1%} of the pixels were right")
