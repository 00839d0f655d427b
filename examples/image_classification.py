"""Photographs in class folders: a ResNet whose last block and classifier are trained, and scored on what is held out.

python examples/image_classification.py photos
"""

import argparse

import torch
import torchvision

import frostline as fl

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("photos", help="folder with a folder of images for each class, here or in a store")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--weights", default="DEFAULT", help="weights of torchvision; 'none' for random ones")
parser.add_argument("--near", help="address of a node beside the data, such as http://store-1:7070")
asked = parser.parse_args()

train, held_out = fl.Dataset(asked.photos).split(0.2)
model = torchvision.models.resnet18(weights=None if asked.weights == "none" else asked.weights)
model.fc = torch.nn.Linear(model.fc.in_features, len(train.classes))
model = fl.freeze(model, until="layer3")
optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3)
transform = torchvision.models.ResNet18_Weights.DEFAULT.transforms()

with fl.offload(model, train.whole, transform=transform, near=asked.near) as job:
    for epoch in range(asked.epochs):
        job.head.train()
        for x, y in job.loader(16, data=train, shuffle=True, epoch=epoch):
            loss = torch.nn.functional.cross_entropy(job.head(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        job.head.eval()
        with torch.no_grad():
            right = sum(int((job.head(x).argmax(1) == y).sum()) for x, y in job.loader(16, data=held_out))
        print(f"epoch {epoch + 1}: {right / len(held_out):.1%} of {len(held_out)} held-out photographs are right")
    print(job.explain())
